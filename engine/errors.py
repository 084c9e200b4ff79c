"""
Errors that end a run.
"""


class RunError(RuntimeError):
    """A run cannot continue. The message is one line that tells what to change; the exit code is 1."""
