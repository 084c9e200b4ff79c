"""
What a run does when memory runs out, when it is interrupted, and when it cannot continue.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import wraps

from engine.devices import num_processes, other_rank_ended, print_last_line, shutdown
from engine.errors import RunError, first_line, is_out_of_memory
from logprobs import completion_lengths


def halved_when_out_of_memory(flag: str) -> Callable:
    """Decorate a function of a run: if memory runs out in it, halve a flag and call it again from its start.

    A gradient does not depend on the tokens of a pass, nor a completion on the number of those sampled at
    once, so the run is the same to rounding. The smaller value stays for it, also when it is resumed.

    flag    max_tokens_per_forward, of a function (run, experience, ...) that adds to the gradient, or
            generation_batch_size, of a function that samples
    raises  the error if there is nothing to halve, or in several processes: a rank cannot repeat a
            collective alone
    """
    def decorate(function):
        @wraps(function)
        def call(run, *args, **options):
            while True:
                try:
                    return function(run, *args, **options)
                except Exception as error:
                    if not is_out_of_memory(error) or num_processes() > 1:
                        raise
                    value, half = halves(run, flag, *args)
                    if half == value:
                        raise
                    traceback.clear_frames(error.__traceback__)                  # frees the pass's tensors
                    run.console.print(f"{first_line(error)}: --{flag} {value} -> {half}, and once more")
                if flag == "max_tokens_per_forward":
                    for module in filter(None, (run.model, run.value_head)):
                        module.zero_grad()
                run.change_setting(flag, half)

        return call

    return decorate


def halves(run, flag: str, *args) -> tuple[int, int]:
    """Return the value of a flag of halved_when_out_of_memory and its half, but at least a row or a group."""
    if flag == "generation_batch_size":
        value, least = run.config.grpo.generation_batch_size, run.config.grpo.num_completions_per_prompt
        value = value or run.config.rollout_size
    else:
        prompt_mask, completion_mask = args[0].rollout.prompt_mask, args[0].rollout.completion_mask
        longest_row = int(prompt_mask.sum(dim=1).max() + completion_lengths(completion_mask).max())
        value, least = run.engine.max_tokens, longest_row
    return value, max(value // 2, min(value, least))


class StopOnSignal:
    """Let the current step finish after Ctrl-C, SIGTERM or SIGHUP, which a closed terminal sends.

    A second Ctrl-C ends the program at once. A signal that is ignored, as by nohup, stays so.
    """

    def __init__(self, ranks):
        self.ranks, self.received = ranks, False

    def __enter__(self):
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        if threading.current_thread() is not threading.main_thread():
            signals = ()                                  # Python handles them in the main thread alone
        handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self.receive) for number in handled}
        return self

    def receive(self, number, _):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            with suppress(OSError):                       # print may not be called in a handler
                os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")
        elif number == signal.SIGHUP:                     # the terminal has gone; a print to it would raise
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)

    def requested(self) -> bool:
        """Return True on all ranks as soon as one has received a signal."""
        return self.ranks.sum(int(self.received)) > 0

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_errors(program: str, mistakes: tuple = (ValueError, OSError)):
    """End a program with one line instead of a traceback, where the cause is not in the program.

    The exit code is 2 for a mistake of the user, 1 for what keeps a run from continuing, 130 for Ctrl-C.
    """
    try:
        yield
    except mistakes as error:
        end_program(f"{program}: error: {error}", 2)
    except (RunError, OSError) as error:                  # OSError: a full disk
        end_program(f"{program}: {error}", 1)
    except KeyboardInterrupt:
        end_program(f"{program}: stopped at once; --resume continues a run from its last checkpoint", 130)
    except Exception as error:
        if not is_out_of_memory(error):
            if other_rank_ended():                        # it has said why; a collective with it failed here
                shutdown(1)
            raise
        end_program(f"{program}: {first_line(error)}: lower --generation_batch_size; in training also "
                    "--max_tokens_per_forward, or add --gradient_checkpointing", 1)


def end_program(line: str, code: int) -> None:
    """Print a line, once, whichever rank it comes from, and exit."""
    print_last_line(line)
    shutdown(code)
    sys.exit(code)
