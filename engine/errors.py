"""
Errors that end a run.
"""


class RunError(RuntimeError):
    """A run cannot go on. The message is one line that tells what to change; the program prints it and exits with code 1."""
