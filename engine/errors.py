"""Errors that end a run, and one-line texts of other errors."""

from contextlib import contextmanager


@contextmanager
def exits_as_errors():
    """Raise RuntimeError for SystemExit and the like, which would end the program, but not for Ctrl-C."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from None


class RunError(RuntimeError):
    """A run cannot continue. The message is one line that states what to change; the exit code is 1."""


class Stopped(RunError):
    """A signal has asked for the end of a run in the middle of an evaluation, which a resumed run repeats."""


class CannotShare(Exception):
    """The layers of a model cannot share prompts between completions. The plain engine can."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on any device."""
    texts = "out of memory", "ALLOC_FAILED", "can't allocate memory", "RESOURCE_EXHAUSTED"   # last: CPU, XLA
    by_torch = isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    return (by_torch or isinstance(error, MemoryError)) and not isinstance(error, RunError)


def in_one_line(error: BaseException) -> str:
    """Return the type and the message of an error in one line of at most 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of its type if it is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
