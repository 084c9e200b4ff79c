"""
Calling a reward function: timeout, errors that name the function and the completion, and checking what it returns.
"""

import inspect
import math
import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from reward_functions.answers import text_of
from reward_functions.loading import ANSWER_NAMES, name_of


class RewardError(RuntimeError):
    """A reward function raised, or returned no points; the message says which one, how, and on what."""


class NoPoints(ValueError):
    """What a reward function returned is not a number or None for each completion."""


def as_asked(completion: str | list[dict], prompt) -> str | list[dict]:
    """A completion in the form of its prompt, as TRL's reward functions expect it: text, or messages."""
    as_text = isinstance(completion, str) and not (isinstance(prompt, list) and isinstance(prompt[0], dict))
    return completion if as_text or isinstance(completion, list) else [{"role": "assistant", "content": completion}]


def call_reward_function(
    function: Callable, arguments: dict, on_error: str = "raise", timeout: float = 0.0, failures: list[dict] | None = None
) -> Tensor:
    """(B,) float64 points, NaN where the function answered None."""
    completions, asked = arguments["completions"], inspect.signature(function).parameters
    if "answer" in arguments:
        arguments = {name: arguments["answer"] for name in ANSWER_NAMES if name in asked} | arguments
    try:
        return as_points(call_within(timeout, function, arguments), len(completions))
    except Exception as error:
        form = isinstance(error, NoPoints)                # then no completion is to blame
        late = isinstance(error, TimeoutError)
        failed = f"{'all' if form else 'some'} of {len(completions)}" if form or late else first_failing(function, arguments)
        what = str(error) if form else f"{type(error).__name__}: {error}"
        if on_error == "none":
            if failures is not None:
                failures.append({"function": name_of(function), "error": what, "completion": failed})
            return torch.full((len(completions),), math.nan, dtype=torch.float64)
        if form:
            raise RewardError(f"reward function {name_of(function)}: {what}") from None
        raise RewardError(
            f"reward function {name_of(function)} raised {what} ({line_of(error, function)}); on completion {failed!r}. "
            "Let it return None for what it cannot score, or pass --reward_errors none."
        ) from error


def as_points(returned, count: int) -> Tensor:
    """What a function returned, a list, tuple, array or tensor -> (count,) float64 points, NaN for None. Or NoPoints."""
    wanted = f"return a list with one number (or None) for each of the {count} completions"
    if not isinstance(returned, list | tuple) and not getattr(returned, "ndim", 0):
        raise NoPoints(f"it returned {returned!r:.60}; {wanted}")
    if len(returned) != count:
        raise NoPoints(f"it returned {len(returned)} values for {count} completions; {wanted}")
    try:
        points = torch.tensor([math.nan if p is None else float(p) for p in returned], dtype=torch.float64)
    except (TypeError, ValueError):
        raise NoPoints(f"it returned {returned!r:.60}; {wanted}") from None
    if points.isinf().any():
        raise NoPoints("it returned an infinite number of points; let it return None for what it cannot score")
    return points


def call_within(seconds: float, function: Callable, arguments: dict):
    """function(**arguments), or a TimeoutError after so many seconds; 0: wait for as long as it takes.

    A thread cannot be killed. One that is given up on goes on in the background until it is done or the run ends, and takes
    processor time if it computes. A function that does not let other threads run, such as a regular expression that
    backtracks for ever, cannot be given up on at all: run such things in reward_functions/sandbox.py.
    """
    if not seconds:
        return function(**arguments)
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((function(**arguments), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=call, daemon=True).start()                           # a daemon does not keep the run from ending
    try:
        points, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s (--reward_timeout)") from None
    if error is not None:
        raise error
    return points


def first_failing(function: Callable, arguments: dict) -> str:
    """The first completion on which the function raises when asked alone."""
    for i, completion in enumerate(arguments["completions"]):
        try:
            function(**{name: values[i : i + 1] for name, values in arguments.items()})
        except Exception:
            return text_of(completion)
    return f"none alone; all {len(arguments['completions'])} together"


def line_of(error: Exception, function: Callable) -> str:
    """Where a function raised, in its own file if it can be told."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    return f"{Path((own or frames)[-1].filename).name}, line {(own or frames)[-1].lineno}"
