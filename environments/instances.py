"""
Environments with a state: a class, of which every conversation gets an instance of its own.

The contract is that of TRL's environment_factory, see docs/conversations.md. An instance has a thread of its
own, because sqlite3 and browsers belong to the thread that opened them. Turns that end together are answered
at the same time; reset is called for one instance after the other, with `random` seeded equally for the
completions of a prompt. Left out on purpose: using instances again, images, a dict of several classes.
"""

import ctypes
import inspect
import random
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from types import MethodType

from transformers.utils import get_json_schema

from environments.tools import await_result, run_calls
from reward_functions.loading import accepted

NO_TOOLS = "reset", "get_reward", "close"                 # public methods that the model cannot call
SECONDS_PER_CALL = 60.0         # without --reward_timeout
OPEN: list["Instance"] = []     # instances that are not closed yet


class Instance:
    """An instance in its thread. After an error, or a call of more than `seconds`, all calls have it."""

    def __init__(self, environment_class: type, example: dict, seconds: float):
        self.example, self.seconds = example, seconds or SECONDS_PER_CALL
        self.environment = self.error = None
        self.total = 0.0                                  # points so far
        self.start_thread()
        self.created = self.start(self.create, environment_class)
        OPEN.append(self)

    def create(self, environment_class: type) -> None:
        """Make the instance of the class."""
        self.environment = environment_class()

    def start_thread(self) -> None:
        """Start the thread. It and those that it starts are daemons, which do not keep Python alive."""
        self.calls = SimpleQueue()
        self.thread = Thread(target=serve, args=[self.calls], daemon=True)
        self.thread.start()

    def start(self, function: Callable, *arguments) -> Callable:
        """Begin a call in the thread. Return a function that waits for its result."""
        answer = SimpleQueue()
        self.calls.put((partial(function, *arguments), answer))
        return partial(self.result, answer, time.monotonic() + self.seconds)

    def result(self, answer: SimpleQueue, deadline: float):
        """Return the result of a call, or raise the first error. After the deadline leave the thread."""
        try:
            result, error = answer.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            stop = ctypes.c_ulong(self.thread.ident), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(*stop)                    # ends a loop in Python
            self.calls.put(None)
            self.start_thread()
            result, error = None, TimeoutError(f"no result within {self.seconds:g} s (--reward_timeout)")
        self.error = self.error or error
        if self.error:
            raise self.error
        return result

    def reset(self, seed: str) -> str | None:
        """Reset the instance with the columns that it accepts. Return what to append to the prompt."""
        random.seed(seed)
        text = self.environment.reset(**accepted(self.environment.reset, self.example))
        if not isinstance(text, str | None):
            raise TypeError(f"reset returned {text!r:.60}, neither text nor None")
        return text

    def __call__(self, conversation: list[dict]) -> tuple[dict | None, float]:
        """Execute the tool calls of the last message. Return a message with the results, and points."""
        methods = public_methods(type(self.environment), self.environment)
        results = run_calls(conversation[-1]["content"], methods)
        return {"role": "tool", "content": "\n".join(results)} if results else None, self.points()

    def points(self, at_end: bool = False) -> float:
        """Return the points since the last call."""
        if hasattr(self.environment, "get_reward"):
            return float(await_result(self.environment.get_reward())) if at_end else 0.0
        before, reward = self.total, getattr(self.environment, "reward", None)
        self.total = 0.0 if reward is None or callable(reward) else float(reward)
        return self.total - before

    def close(self) -> None:
        """Close the instance, and end its thread."""
        self.calls.put(None)
        if hasattr(self.environment, "close"):
            self.environment.close()


def serve(calls: SimpleQueue) -> None:
    """Answer calls, pairs of a function and a queue for its result and error, until None comes."""
    for function, answer in iter(calls.get, None):
        try:
            answer.put((function(), None))
        except BaseException as error:                    # SystemExit; a Ctrl-C is never here
            answer.put((None, error if isinstance(error, Exception) else RuntimeError(repr(error))))


def reset_group(instances: list[Instance], seed: str) -> str:
    """Reset instances, and return the text for the end of their prompt. The error of one comes at its turn.

    Raises ValueError if texts differ: a group has one prompt.
    """
    texts, state = [], random.getstate()
    for instance in instances:
        with suppress(Exception):
            instance.created()
            texts.append(instance.start(instance.reset, seed)() or "")
    random.setstate(state)
    if different := [text for text in texts if text != texts[0]]:
        raise ValueError(
            f"reset returned {texts[0]!r:.60} and {different[0]!r:.60} for one prompt; let them depend on "
            "columns, and on `random`, which is seeded"
        )
    return texts[0] if texts else ""


@contextmanager
def closing_environments():
    """Close the instances that are made inside, at the end and after errors and Ctrl-C."""
    opened_before = len(OPEN)
    try:
        yield
    finally:
        instances = OPEN[opened_before:]
        del OPEN[opened_before:]
        for closed in [instance.start(instance.close) for instance in instances]:
            with suppress(Exception):                     # it has had its chance
                closed()


def public_methods(environment_class: type, owner) -> dict[str, Callable]:
    """Return the methods that are tools by name, bound to an owner."""
    names = [name for name in dir(environment_class) if not name.startswith("_") and name not in NO_TOOLS]
    functions = {name: inspect.getattr_static(environment_class, name) for name in names}
    return {name: MethodType(f, owner) for name, f in functions.items() if inspect.isfunction(f)}


def tools_of(environment: Callable | None) -> list[Callable] | None:
    """Return the tools of a function or class, for chat templates."""
    if inspect.isclass(environment):
        return list(public_methods(environment, environment).values())
    return getattr(environment, "tools", None)


def refuse_class(name: str, environment: type) -> None:
    """Raise ValueError if conversations cannot have instances of a class."""
    try:
        inspect.signature(environment).bind()             # without arguments
        schemas = [get_json_schema(tool) for tool in tools_of(environment)]
    except Exception as error:
        raise ValueError(f"--environment={name}: {error}".replace("\n", " ")) from None
    if not schemas or not callable(getattr(environment, "reset", None)):
        raise ValueError(f"--environment={name}: the class needs a method reset, and one that is a tool")
