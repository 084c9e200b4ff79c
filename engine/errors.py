"""
Errors that end a run, and other errors in one line.
"""


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds: an assert that python -O does not remove."""
    if not condition:
        raise AssertionError(message)


class RunError(RuntimeError):
    """A run cannot continue. The message is one line that tells what to change; the exit code is 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on any device."""
    texts = "out of memory", "ALLOC_FAILED", "can't allocate memory", "RESOURCE_EXHAUSTED"       # CPU, XLA
    by_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return (by_torch or isinstance(error, MemoryError)) and not isinstance(error, RunError)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of its type if it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
