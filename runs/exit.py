"""
Early ends of a run: Ctrl-C, errors, exit codes.
"""

import errno
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.devices import print_last_line, shutdown
from engine.errors import RunError
from runs.checkpoint import NotSaved
from runs.folder import RunFolder

MOST_SKIPPED = 3                # steps in a row without a finite loss or gradient that end a run


class Diverged(RunError):
    """Too many steps in a row had a loss or gradient that is not finite."""

    def __init__(self, skipped: int, checkpoint: Path):
        folder = checkpoint.parents[1]
        super().__init__(
            f"{skipped} steps in a row had a loss or gradient that is not finite. The weights before them are"
            f" in {checkpoint}, the batches in {folder}/skipped.jsonl: inspect them with --replay, or lower "
            "--learning_rate"
        )


class StopOnSignal:
    """Let the current step finish after Ctrl-C, SIGTERM or SIGHUP, which a closed terminal sends.

    A second Ctrl-C ends the program at once. A signal that is ignored, as by nohup, stays so.
    """

    def __init__(self, ranks):
        self.ranks, self.received = ranks, False

    def __enter__(self):
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self.receive) for number in handled}
        return self

    def receive(self, number, _):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            with suppress(OSError):                       # print may not be called in a handler
                os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    def requested(self) -> bool:
        """Return True on all ranks as soon as one has received a signal."""
        return self.ranks.sum(int(self.received)) > 0

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_setup_errors():
    """Exit with one line: with code 2 for a mistake of the user, 1 for a reward function that raises."""
    try:
        yield
    except (ValueError, OSError) as error:                # OSError: of a path of the user
        end_program(f"error: {error}", 2)
    except RunError as error:
        end_program(str(error), 1)


@contextmanager
def exit_on_run_errors(folder: RunFolder):
    """Exit with one line: with code 1 if the run in a folder cannot continue, 130 after a second Ctrl-C."""
    try:
        yield
    except NotSaved as error:
        end_program(f"{error}; fix that, then continue with --output_dir {folder.path} --resume", 1)
    except RunError as error:
        end_program(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        end_program(f"{error.strerror}: {folder.path}; make room, then continue with --resume", 1)
    except KeyboardInterrupt:
        saved = any((folder.path / "checkpoints").glob("step-*"))
        begin = "continue from the last checkpoint" if saved else "there is no checkpoint yet; begin again"
        end_program(f"stopped at once; {begin} with --output_dir {folder.path} --resume", 130)


def end_program(message: str, code: int) -> None:
    """Print one line, once, whichever rank it comes from, and exit."""
    print_last_line(f"train.py: {message}")
    shutdown(code)
    sys.exit(code)
