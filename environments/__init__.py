"""Conversations with environments: tools, games, functions of your own. Here: what closes them."""

from contextlib import contextmanager, suppress

from engine.errors import exits_as_errors
from reward_functions.calling import call_with_timeout

OPEN: list = []                 # instances (instances.py) that are not closed yet


@contextmanager
def closing_environments():
    """Close the instances that are made inside, at the end and after errors and Ctrl-C."""
    opened_before = len(OPEN)
    try:
        yield
    finally:
        instances = OPEN[opened_before:]
        del OPEN[opened_before:]
        for instance in instances:
            with suppress(Exception), exits_as_errors():
                call_with_timeout(instance.seconds, getattr(instance.environment, "close", lambda: None))
