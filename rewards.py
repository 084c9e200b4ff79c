"""
What is a completion worth? Reward functions are chosen by name, called, and added up here.

    def some_reward(completions, prompts=None, completion_ids=None, **columns) -> list[float | None]

Every argument is a list with one entry per completion; columns are those of the data set (answer, ...), repeated for the
siblings of a group. A completion is a string, or a list of chat messages whose last one counts: the policy's, or those of a
whole conversation, the policy's and the environment's in turn. None means "could not score". Functions with this signature
are in reward_library.py (pure), reward_programs.py and in files of your own.

    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl

shows what functions give to right, wrong, empty and cheating completions, and what is wrong with that (lint.py).
"""

import difflib
import importlib.util
import inspect
import math
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from reward_library import (  # noqa: F401 - all of them can be had from here
    FORM, LIBRARY, TAGS, answer_pattern, as_number, check_answer, check_numbers, correctness, countdown, diversity, environment,
    evaluate_expression, explanation_quality, extract_answer, json_format, match_format_approximately, match_format_exactly,
    multiple_choice, reasoning_coherence, repetition_penalty, rule_list, safety, same_answer, text_of, xml_tags,
)
from reward_programs import math_equality, passes_tests

BUILT_IN = {function.__name__: function for function in (*LIBRARY, math_equality, passes_tests)}
RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids", "turn_points")      # no data gets these names

ANSWER_NAMES = ("solution", "target")             # by which a function may ask for the answer too, as TRL's do


class RewardError(RuntimeError):
    """A reward function raised, or returned no points; the message says which one, how, and on what."""


class NoPoints(ValueError):
    """What a reward function returned is not a number or None for each completion."""


@cache
def load_reward_function(name: str) -> Callable:
    """A built-in reward function by name, or `path/to/file.py:function`. Raises ValueError in one line."""
    function = BUILT_IN.get(name) or function_from_file("reward_functions", name, BUILT_IN)
    if name not in BUILT_IN and name_of(function) in BUILT_IN:
        raise ValueError(f"--reward_functions {name}: there is a built-in reward function {name_of(function)}; rename yours")
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "a class" if inspect.isclass(function) else "async"
        raise ValueError(f"--reward_functions {name}: it is {kind}; name a plain function f(completions, **columns)")
    parameters = inspect.signature(function).parameters
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        lacks = "**columns" if "completions" in parameters else "completions (a list of them) and **columns"
        raise ValueError(f"--reward_functions {name}: it must accept columns it does not use: add {lacks} to its parameters")
    return function


def function_from_file(flag: str, name: str, built_in) -> Callable:
    """The function that `path/to/file.py:function` names, for a flag which might have named one of the built-in ones."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        near = "".join(f"did you mean {known}? Else " for known in difflib.get_close_matches(name, built_in, n=1))
        raise ValueError(f"--{flag} {name}: unknown; {near}use path/to/file.py:function or one of {', '.join(built_in)}")
    if not Path(path).is_file():
        raise ValueError(f"--{flag} {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"file {path}", path)
    try:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--{flag} {name}: importing {path} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"--{flag} {name}: {path} has no function {attribute}")
    return function


def missing_columns(function: Callable, columns: set[str]) -> list[str]:
    """The columns that a function cannot do without, and that the data does not have."""
    given = columns - set(RESERVED) | {"completions", "prompts", "completion_ids"}
    given |= set(ANSWER_NAMES) if "answer" in columns else set()
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in needed if name not in given]


def compute_rewards_for_completions(
    reward_functions: list[Callable], weights: list[float], rollout, examples: list[dict], *, on_error: str = "raise",
    clips: Sequence[float] = (), timeout: float = 0.0, failures: list[dict] | None = None, turn_points: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score every completion with every function and add up: total = sum of weight * clipped points.

    rollout   has completions (B texts) and completion_ids, completion_mask (B, T); examples: P dicts, B = P * G.
              A function gets [{"role": "assistant", "content": text}] where the prompt is a conversation, else the text
    on_error  "raise" stops with the function's name and what was asked of it, "none" counts its completions as unscored
    clips     one for each function: its points are cut to so many up and down before they are weighted; 0 or no list: never
    timeout   seconds that a function may take for all B; 0: any time. Taking longer is an error like raising
    failures  a list of yours; of every call that failed under on_error="none" it gets the function, error and completion
    turn_points  (B, T), a Rollout's, where there is an environment: functions get a list of points for each completion, one a
              turn. A conversation with NaN among them is unscored: its environment raised
    returns   total (P, G) in points, and the points of each function (P, G) before clipping and weighting. NaN where a
              function could not score. A total is NaN if a function scored only some siblings and not this one, for then
              they cannot be compared; a function that scored none of a group was not meant for it and is left out.
    """
    group_size, remainder = divmod(len(rollout.completions), len(examples))
    assert remainder == 0, f"{len(rollout.completions)} completions do not make equal groups for {len(examples)} prompts"
    columns = {name for example in examples for name in example} - set(RESERVED)
    per_row = [example for example in examples for _ in range(group_size)]
    arguments = dict(
        completions=[as_asked(text, example["prompt"]) for text, example in zip(rollout.completions, per_row, strict=True)],
        prompts=[example["prompt"] for example in per_row],
        completion_ids=[ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)],
        **{name: [example.get(name) for example in per_row] for name in sorted(columns)},
    )
    mask, failed = rollout.completion_mask, torch.zeros(len(per_row), dtype=torch.bool)
    if turn_points is not None:
        ends = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)            # (B, T), of turns
        arguments["turn_points"] = [points[end].tolist() for points, end in zip(turn_points, ends, strict=True)]
        failed = turn_points.isnan().any(dim=1)                                  # (B,)
    failures = [] if failures is None else failures
    per_function = {
        name_of(function): call_reward_function(function, arguments, on_error, timeout, failures)
        .masked_fill(failed, torch.nan).view(-1, group_size)
        for function in reward_functions
    }
    return weighted_sum(per_function, weights, clips), per_function


def weighted_sum(per_function: dict[str, Tensor], weights: list[float], clips: Sequence[float] = ()) -> Tensor:
    """Points of each function (P, G) -> total (P, G), clipped and NaN as compute_rewards_for_completions says."""
    assert len(weights) == len(per_function), f"{len(weights)=} {list(per_function)=}"
    limits = torch.tensor([clip or math.inf for clip in clips or [0] * len(weights)])[:, None, None]
    points = torch.stack(list(per_function.values()))                            # (functions, P, G)
    points = points.clamp(-limits.to(points.dtype), limits.to(points.dtype))     # NaN stays NaN
    skipped = points.isnan().all(dim=2, keepdim=True)                            # this function does not apply to this group
    weighted = torch.where(skipped, 0.0, points) * torch.tensor(weights, dtype=points.dtype)[:, None, None]
    return torch.where(skipped.all(dim=0), torch.nan, weighted.sum(dim=0))


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


def line_of(error: Exception, function: Callable) -> str:
    """Where a function raised, in its own file if it can be told."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    return f"{Path((own or frames)[-1].filename).name}, line {(own or frames)[-1].lineno}"


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
    backtracks for ever, cannot be given up on at all: run such things in sandbox.py.
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


def name_of(function: Callable) -> str:
    """What a reward function is called in logs."""
    return getattr(function, "__name__", type(function).__name__)


if __name__ == "__main__":
    from lint import main

    sys.exit(main(sys.argv[1:]))
