"""
How a run ends early.
"""

import signal
import sys

from engine.devices import all_sum


class StopOnSignal:
    """Ctrl-C and SIGTERM, which schedulers send, let the step finish. A second Ctrl-C ends the program at once."""

    def __enter__(self):
        self.came = False
        self.previous = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, _):
        self.came = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
            print("\nstopping after this step; Ctrl-C again: at once", file=sys.stderr)

    def asked(self) -> bool:
        """Whether to stop: in all processes, as soon as one was told to."""
        return all_sum(int(self.came)) > 0

    def __exit__(self, *exception):
        for number, handler in self.previous.items():
            signal.signal(number, handler)
