"""
How a run ends early: Ctrl-C, errors, exit codes.
"""

import errno
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from engine.devices import all_sum, is_main, shutdown
from engine.errors import RunError


class Diverged(RunError):
    """Too many steps in a row that were not finite."""

    def __init__(self, skipped: int, checkpoint: Path):
        folder = checkpoint.parents[1]
        super().__init__(
            f"{skipped} steps in a row had a loss or gradient that is not finite. The weights before them are in {checkpoint}, "
            f"the batches in {folder}/skipped.jsonl: inspect them with --replay, or lower --learning_rate"
        )


class StopOnSignal:
    """Let the current step finish after Ctrl-C or SIGTERM, which schedulers send. A second Ctrl-C ends the program at once."""

    def __enter__(self):
        self.received = False
        self.previous = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def receive(self, number, _):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            print("\nstopping after this step; Ctrl-C again: at once", file=sys.stderr)

    def requested(self) -> bool:
        """Return whether to stop: on all ranks, as soon as one has received a signal."""
        return all_sum(int(self.received)) > 0

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_mistakes():
    """End the program with one line: a mistake of the user with exit code 2, a reward function that raises with 1."""
    try:
        yield
    except ValueError as error:
        end_program(f"error: {error}", 2)
    except RunError as error:
        end_program(str(error), 1)


@contextmanager
def exit_on_failures(folder: Path):
    """End the program with one line and exit code 1 if the run in a folder cannot go on, 130 after a second Ctrl-C."""
    try:
        yield
    except RunError as error:
        end_program(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        end_program(f"{error.strerror}: {folder}; make room, then continue with --resume", 1)
    except KeyboardInterrupt:
        end_program(f"stopped at once; continue from the last checkpoint with --output_dir {folder} --resume", 130)


def end_program(message: str, code: int) -> None:
    """Print one line on the main rank and exit."""
    if is_main():
        print(f"train.py: {message}", file=sys.stderr)
    shutdown()
    sys.exit(code)
