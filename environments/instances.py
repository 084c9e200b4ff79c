"""
Environments with a state: a class, of which every conversation gets an instance of its own.

    class Counter:
        def reset(self, target, **columns):     # gets the columns of the example, and prompt; text that it
            self.target, self.count = target, 0                                  # returns ends the prompt

        def increment(self, step: int) -> int:  # a public method is a tool: types, a docstring with "Args:";
            ...                                                                  # an exception is its result

        def get_reward(self) -> float:          # the points, after the last turn
            return float(self.count == self.target)

        def close(self): ...                    # after the reward functions, whatever has happened

This is the contract of TRL's environment_factory, except that `close` is no tool. Only reset and a tool are
required. Without get_reward, a turn has the points by which the attribute `reward` has grown. A message
without a tool call ends the conversation.

An instance has a thread of its own, because sqlite3 and browsers belong to the thread that opened them. Turns
that end together are answered at the same time. reset is called for one instance after the other, with
`random` seeded equally for the completions of a prompt: a group has one beginning, also in a resumed run.
Left out on purpose: instances that are used again, images, and a dict of several classes.
"""

import ctypes
import inspect
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import MethodType

from transformers.utils import get_json_schema

from environments.tools import await_result, run_calls
from reward_functions.loading import accepted

NO_TOOLS = "reset", "get_reward", "close"                 # public methods that the model cannot call
SECONDS_PER_CALL = 60.0         # without --reward_timeout
OPEN: list["Instance"] = []     # instances that are not closed yet


class Instance:
    """An instance in its thread. Every call ends after a limit of seconds; 0: SECONDS_PER_CALL."""

    def __init__(self, environment_class: type, example: dict, seconds: float):
        self.example, self.seconds = example, seconds or SECONDS_PER_CALL
        self.environment = None
        self.total = 0.0                                  # points so far
        self.start_thread()
        self.created = self.start(self.create, environment_class)
        OPEN.append(self)

    def start_thread(self) -> None:
        """Start the thread. It and those that it starts are daemons, which do not keep Python alive."""
        self.calls = SimpleQueue()
        self.thread = Thread(target=serve, args=[self.calls], daemon=True)
        self.thread.start()

    def start(self, function: Callable, *arguments) -> Callable:
        """Begin a call in the thread. Return a function that returns its result, or raises what it raised."""
        future = Future()
        self.calls.put((future, partial(function, *arguments)))
        return partial(self.result, future, time.monotonic() + self.seconds)

    def result(self, future: Future, deadline: float):
        """Wait for the result of a call. Raise TimeoutError after the deadline, and leave the thread."""
        wait([future], timeout=max(0.0, deadline - time.monotonic()))
        if future.done():
            return future.result()
        stop = ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(*stop)  # ends a loop in Python; not a call in C
        self.calls.put(None)
        self.start_thread()
        raise TimeoutError(f"no result within {self.seconds:g} s (--reward_timeout)")

    def create(self, environment_class: type) -> None:
        """Make the instance."""
        self.environment = environment_class()

    def reset(self, seed: str) -> str | None:
        """Reset the instance with the columns that it accepts. Return what to append to the prompt."""
        random.seed(seed)
        text = self.environment.reset(**accepted(self.environment.reset, self.example))
        if not isinstance(text, str | None):
            raise TypeError(f"reset returned {text!r:.60}, neither text nor None")
        return text

    def __call__(self, conversation: list[dict]) -> tuple[dict | None, float]:
        """Execute the tool calls of the last message. Return a message with the results, and points."""
        tools = {name: getattr(self.environment, name) for name in names_of_tools(type(self.environment))}
        results = run_calls(conversation[-1]["content"], tools)
        return {"role": "tool", "content": "\n".join(results)} if results else None, self.points()

    def points(self, at_end: bool = False) -> float:
        """Return the points since the last call."""
        if hasattr(self.environment, "get_reward"):
            return float(await_result(self.environment.get_reward())) if at_end else 0.0
        before, reward = self.total, getattr(self.environment, "reward", None)
        self.total = 0.0 if reward is None or callable(reward) else float(reward)
        return self.total - before


def serve(calls: SimpleQueue) -> None:
    """Answer calls, pairs of a Future and a function, until None comes."""
    for future, function in iter(calls.get, None):
        try:
            future.set_result(function())
        except BaseException as error:                    # SystemExit; a Ctrl-C is never here
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


@contextmanager
def closing_environments():
    """Close the instances that are made inside, at the end and after errors and Ctrl-C."""
    opened_before = len(OPEN)
    try:
        yield
    finally:
        instances = OPEN[opened_before:]
        del OPEN[opened_before:]
        closable = [each for each in instances if hasattr(each.environment, "close")]
        for closed in [each.start(each.environment.close) for each in closable]:
            with suppress(Exception):                     # it has had its chance
                closed()
        for instance in instances:
            instance.calls.put(None)


def names_of_tools(environment_class: type) -> list[str]:
    """Return the names of the public methods that are tools."""
    names = [name for name in dir(environment_class) if not name.startswith("_") and name not in NO_TOOLS]
    return [name for name in names if inspect.isfunction(inspect.getattr_static(environment_class, name))]


def tools_of(environment: Callable | None) -> list[Callable] | None:
    """Return the tools of an environment, as functions without self, for chat templates."""
    if not inspect.isclass(environment):
        return getattr(environment, "tools", None)
    names = names_of_tools(environment)
    return [MethodType(getattr(environment, name), environment) for name in names]


def refuse_class(name: str, environment: type) -> None:
    """Raise ValueError if conversations cannot have instances of a class."""
    fix = ""
    try:
        inspect.signature(environment).bind()
        fix = "every public method is a tool: give it types and a docstring with Args:, or a name with _; "
        schemas = [get_json_schema(tool) for tool in tools_of(environment)]
    except Exception as error:
        raise ValueError(f"--environment={name}: {fix}{' '.join(str(error).split())}") from None
    if not schemas or not callable(getattr(environment, "reset", None)):
        raise ValueError(f"--environment={name}: the class needs a method reset, and one that is a tool")
