"""End a run: after the current step on a signal, or with a line of explanation if it cannot continue."""

import os
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress

from engine.devices import all_gather_object, other_rank_ended, print_last_line, shutdown
from engine.errors import RunError, first_line, is_out_of_memory
from policy import RatioError
from sample import LogitsError

RAISED_BY_ALL = RunError, RatioError, LogitsError
STOP = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2          # the last two: of batch systems


@contextmanager
def stop_on_signal():
    """Let the current step finish after Ctrl-C or a signal of STOP: of a batch system or a closed terminal.

    A second Ctrl-C ends the program at once. Signals that are ignored, as with nohup, stay ignored. Yields a
    function that returns True on all ranks as soon as one of them has received a signal.
    """
    received = []

    def receive(number, _):
        received.append(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            with suppress(OSError):                       # print is not allowed in a handler
                os.write(2, b"\nstopping after this step or batch; press Ctrl-C again to stop at once\n")
        elif number == signal.SIGHUP:                     # the terminal is gone; printing would raise
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)

    in_main_thread = threading.current_thread() is threading.main_thread()       # only it handles signals
    signals = (signal.SIGINT, *STOP) if in_main_thread else ()
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, receive) for number in handled}
    try:
        yield lambda: any(all_gather_object(bool(received)))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_errors(
    program: str, mistakes: tuple = (ValueError, OSError),
    stopped: str = "--resume continues a run from its last checkpoint",
):
    """End a program with one line instead of a traceback, if the cause is not a bug in the program.

    mistakes  exceptions that the user can correct
    stopped   what to do after Ctrl-C
    The exit code is 2 for a mistake of the user, 1 for an error that ends a run, 130 for Ctrl-C.
    """
    try:
        yield
    except mistakes as error:
        end_program(f"{program}: error: {error}", 2)
    except (*RAISED_BY_ALL, OSError) as error:                  # OSError: a full disk
        end_program(f"{program}: {error}", 1)
    except KeyboardInterrupt:
        end_program(f"{program}: stopped at once; {stopped}", 130)
    except Exception as error:
        if not is_out_of_memory(error):
            if other_rank_ended():                        # it has printed why; a collective failed here
                shutdown(1)
            raise
        end_program(f"{program}: {first_line(error)}: lower --generation_batch_size; in training also "
                    "--max_tokens_per_forward, or add --gradient_checkpointing", 1)


def end_program(line: str, code: int) -> None:
    """Print a line once, from whichever rank, with --debug after the traceback, and exit."""
    print_last_line((traceback.format_exc() if "--debug" in sys.argv else "") + line)
    shutdown(code)
    sys.exit(code)
