"""
The default reward functions, and the weighted sum of the points that reward functions give to completions.

    def some_reward(completions, prompts=None, completion_ids=None, **columns) -> list[float | None]

Every argument is a list with one entry per completion; columns are those of the data set (answer, ...), repeated for the
completions of a group. A completion is a string, or a list of chat messages whose last one counts: the policy's, or those of a
whole conversation with an environment. None means "could not score". A model may print anything, so the functions here
return 0 and never raise. All others are in reward_functions/, by kind, and in files of your own:

    python train.py --use_grpo --reward_functions correctness mine.py:short
    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl

The second command shows what functions give to right, wrong, empty and cheating completions (analysis/reward_linter.py).
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache

if __name__ == "__main__":                                # before the slow imports below: --help answers at once
    from analysis.reward_linter import run_command_line

    run_command_line(sys.argv[1:])

import torch
from torch import Tensor

from reward_functions.answers import extract_answer, same_answer, text_of
from reward_functions.arithmetic import countdown
from reward_functions.calling import RewardError, as_asked, call_reward_function  # noqa: F401
from reward_functions.formats import answer_pattern, environment, json_format, multiple_choice, xml_tags
from reward_functions.heuristics import diversity, repetition_penalty, rule_list, safety  # noqa: F401
from reward_functions.loading import RESERVED, function_from_file, name_of
from reward_functions.mathematics import math_equality
from reward_functions.models import classifier, judge  # noqa: F401
from reward_functions.programs import passes_tests
from reward_functions.tunix import check_answer, check_numbers, match_format_approximately, match_format_exactly

FORM = re.compile(r"<reasoning>(.*?)</reasoning>\s*<answer>(.*?)</answer>", re.DOTALL)


def correctness(completions, answer, **columns) -> list[float | None]:
    """1 point if the one tagged answer equals the column `answer`, else 0; None where the data set has no answer.

    correctness(["<answer>72.0</answer>"], answer=["72"]) == [1.0]
    """
    return [
        None if truth is None else float(same_answer(extract_answer(text_of(completion)), str(truth)))
        for completion, truth in zip(completions, answer, strict=True)
    ]


def reasoning_coherence(completions, **columns) -> list[float]:
    """Structure, 0 to 1 point: a fifth each for one pair of reasoning tags, one pair of answer tags, reasoning directly
    before answer, something written in both, and nothing outside of them.

    reasoning_coherence(["<reasoning>1+1=2</reasoning><answer>2</answer>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        form = FORM.search(text)
        checks = (
            text.count("<reasoning>") == text.count("</reasoning>") == 1,
            text.count("<answer>") == text.count("</answer>") == 1,
            form is not None,
            form is not None and bool(form[1].strip()) and bool(form[2].strip()),
            form is not None and form[0] == text.strip(),
        )
        points.append(sum(checks) / len(checks))
    return points


def explanation_quality(completions, **columns) -> list[float]:
    """Conciseness, 0 to 1 point: 1 for tagged reasoning of up to 100 words, falling to 0 at 300, times the share of its
    lines that are not repeats. 0 without any reasoning: silence is not concise.

    explanation_quality(["<reasoning>2 and 2 make 4</reasoning>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        reasoning = text.partition("<reasoning>")[2].partition("</reasoning>")[0].strip() if "</reasoning>" in text else ""
        lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
        brevity = min(1.0, max(0.0, (300 - len(reasoning.split())) / 200))
        points.append(brevity * len(set(lines)) / len(lines) if lines else 0.0)
    return points


BUILT_IN = {function.__name__: function for function in (
    correctness, reasoning_coherence, explanation_quality, multiple_choice, answer_pattern, json_format, xml_tags,
    countdown, environment, repetition_penalty, diversity, safety, match_format_exactly, match_format_approximately,
    check_answer, check_numbers, math_equality, passes_tests,
)}


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
