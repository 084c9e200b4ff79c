"""
Errors that end a run, and other errors in one line.
"""


class RunError(RuntimeError):
    """A run cannot continue. The message is one line that tells what to change; the exit code is 1."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of its type if it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
