"""
Calling a reward function: its arguments, the timeout, checking what it returns, and errors that name the
function and the completion.
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

from engine.errors import RunError
from reward_functions.answers import text_of
from reward_functions.loading import ANSWER_NAMES, columns_of, name_of


class RewardError(RunError):
    """Report that a reward function failed. The message has the function, the error and the completion."""


class InvalidReturnValue(ValueError):
    """Report that a reward function returned anything but one number or None for each completion."""


def build_arguments(rollout, examples: list[dict], turn_points: Tensor | None = None) -> dict[str, list]:
    """Return the arguments of the reward functions, lists of B entries: columns are repeated for siblings."""
    rows = [example for example in examples for _ in range(len(rollout.completions) // len(examples))]
    mask = rollout.completion_mask
    arguments = dict(
        completions=list(map(match_prompt_format, rollout.completions, (row["prompt"] for row in rows))),
        prompts=[row["prompt"] for row in rows],
        completion_ids=[ids[m].tolist() for ids, m in zip(rollout.completion_ids, mask, strict=True)],
        **{name: [row.get(name) for row in rows] for name in sorted(columns_of(examples))},
    )
    if turn_points is not None:
        ends = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)       # (B, T), of turns
        arguments["turn_points"] = [points[e].tolist() for points, e in zip(turn_points, ends, strict=True)]
    return arguments


def match_prompt_format(completion: str | list[dict], prompt) -> str | list[dict]:
    """Return a completion in the format of its prompt, as in TRL: text, or chat messages."""
    if isinstance(completion, str) and isinstance(prompt, list) and isinstance(prompt[0], dict):
        return [{"role": "assistant", "content": completion}]
    return completion


def call_reward_function(
    function: Callable, arguments: dict, on_error: str = "raise", timeout: float = 0.0,
    failures: list[dict] | None = None,
) -> Tensor:
    """Return the points (B,) float64 of all completions, NaN where the function returned None."""
    completions, parameters = arguments["completions"], inspect.signature(function).parameters
    if "answer" in arguments:
        arguments = {name: arguments["answer"] for name in ANSWER_NAMES if name in parameters} | arguments
    try:
        return parse_points(call_with_timeout(timeout, function, arguments), len(completions))
    except Exception as error:
        invalid = isinstance(error, InvalidReturnValue)   # like a timeout, not caused by a single completion
        message = str(error) if invalid else f"{type(error).__name__}: {error}"
        if invalid or isinstance(error, TimeoutError):
            completion = f"{'all' if invalid else 'some'} of {len(completions)}"
        else:
            completion = find_failing_completion(function, arguments)
        if on_error == "none":
            if failures is not None:
                failures.append({"function": name_of(function), "error": message, "completion": completion})
            return torch.full((len(completions),), math.nan, dtype=torch.float64)
        if invalid:
            raise RewardError(f"reward function {name_of(function)}: {message}") from None
        raise RewardError(
            f"reward function {name_of(function)} raised {message} ({locate_error(error, function)}); "
            f"on completion {completion!r}. Let it return None for what it cannot score, or pass "
            "--reward_errors none."
        ) from error


def parse_points(returned, count: int) -> Tensor:
    """Convert a list, tuple, array or tensor to (count,) float64 points, NaN for None."""
    expected = f"return a list with one number (or None) for each of the {count} completions"
    try:
        if not isinstance(returned, list | tuple) and not getattr(returned, "ndim", 0):
            raise TypeError
        points = torch.tensor([math.nan if p is None else float(p) for p in returned], dtype=torch.float64)
    except (TypeError, ValueError):
        raise InvalidReturnValue(f"it returned {returned!r:.60}; {expected}") from None
    if len(points) != count:
        raise InvalidReturnValue(f"it returned {len(points)} values for {count} completions; {expected}")
    if points.isinf().any():
        raise InvalidReturnValue("it returned an infinite number of points; return None if it cannot score")
    return points


def call_with_timeout(seconds: float, function: Callable, arguments: dict):
    """Return function(**arguments), or raise TimeoutError after that many seconds; 0: no timeout.

    A thread cannot be killed. After a timeout it continues in the background until the function returns or
    the run ends, and uses processor time if it computes. The timeout has no effect on a function that holds
    the interpreter lock, such as a regular expression with catastrophic backtracking: run it in
    reward_functions/sandbox.py.
    """
    if not seconds:
        return function(**arguments)
    results: queue.SimpleQueue = queue.SimpleQueue()

    def call() -> None:
        try:
            results.put((function(**arguments), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=call, daemon=True).start()      # a daemon thread does not keep the process alive
    try:
        points, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no result within {seconds:g} s (--reward_timeout)") from None
    if error is not None:
        raise error
    return points


def find_failing_completion(function: Callable, arguments: dict) -> str:
    """Return the first completion on which the function raises if called with this completion alone."""
    for i, completion in enumerate(arguments["completions"]):
        try:
            function(**{name: values[i : i + 1] for name, values in arguments.items()})
        except Exception:
            return text_of(completion)
    return f"none alone; all {len(arguments['completions'])} together"


def locate_error(error: Exception, function: Callable) -> str:
    """Return the file and line of an error, in the function's own file if the traceback has it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    return f"{Path((own or frames)[-1].filename).name}, line {(own or frames)[-1].lineno}"
