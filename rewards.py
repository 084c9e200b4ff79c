"""
The default reward functions, and the weighted sum of the points that reward functions give to completions.

    def some_reward(completions, prompts=None, completion_ids=None, **columns) -> list[float | None]

Every argument is a list with one entry per completion; columns are those of the data set (answer, ...),
repeated for the completions of a group. A completion is a string, or a list of chat messages of which the
last one counts: the policy's, or those of a whole conversation with an environment. None means "could not
score". A model may print anything, so the functions here return 0 and never raise. Others are in
reward_functions/, or in files of your own:

    python train.py --use_grpo --reward_functions correctness mine.py:short
    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl

The second command shows the points of right, wrong, empty and cheating completions.
"""

import re
import sys
from collections.abc import Callable

if __name__ == "__main__":                                # before the slow imports below
    from analysis.reward_linter import run_command_line

    run_command_line(sys.argv[1:])

import torch
from torch import Tensor

from reward_functions.answers import TAGS, extract_answer, same_answer, score_each, text_of
from reward_functions.arithmetic import countdown
from reward_functions.calling import Reports, build_arguments, call_reward_function, start_call
from reward_functions.calling import RewardError  # noqa: F401
from reward_functions.formats import answer_pattern, environment, json_format, multiple_choice, xml_tags
from reward_functions.heuristics import diversity, repetition_penalty, rule_list, safety  # noqa: F401
from reward_functions.loading import as_name, check_signature, function_from_file, name_of
from reward_functions.mathematics import math_equality
from reward_functions.models import classifier, judge  # noqa: F401
from reward_functions.programs import passes_tests
from reward_functions.tunix import (
    check_answer, check_numbers, match_format_approximately, match_format_exactly,
)


def correctness(completions, answer, **columns) -> list[float | None]:
    """Give 1 point if the one tagged answer equals the column `answer`, or one of a list of answers there,
    else 0; None where there is none.

    correctness(["<answer>72.0</answer>"], answer=["72"]) == [1.0]
    {"prompt": "8 * 9 = ?", "answer": "72"}
    """
    return score_each(lambda text, true: float(same_answer(extract_answer(text), true)), completions, answer)


def reasoning_coherence(completions, **columns) -> list[float]:
    """Give 0 to 1 point for the structure: a fifth each for one pair of reasoning tags, one pair of answer
    tags, reasoning directly before the answer, text in both, and no text outside of them.

    reasoning_coherence(["<reasoning>1+1=2</reasoning><answer>2</answer>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        before, _, rest = text.partition("<reasoning>")
        reasoning, *rest = re.split(r"</reasoning>\s*<answer>", rest, maxsplit=1)
        answer, complete, after = "".join(rest).partition("</answer>")
        checks = (
            *(text.count(start) == text.count(end) == 1 and text.index(start) < text.index(end)
              for start, end in (TAGS[:2], TAGS[2:])),
            bool(complete),
            bool(complete and reasoning.strip() and answer.strip()),
            bool(complete) and not before.strip() and not after.strip(),
        )
        points.append(sum(checks) / len(checks))
    return points


def explanation_quality(completions, **columns) -> list[float]:
    """Give 0 to 1 point for conciseness: 1 for tagged reasoning of up to 100 words, decreasing linearly to 0
    at 300, times the fraction of its lines that are not repeats. 0 without any reasoning.

    explanation_quality(["<reasoning>2 and 2 make 4</reasoning>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        reasoning, closed, _ = text.partition("<reasoning>")[2].partition("</reasoning>")
        lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
        brevity = min(1.0, max(0.0, (300 - len(reasoning.split())) / 200))
        points.append(brevity * len(set(lines)) / len(lines) if closed and lines else 0.0)
    return points


BUILT_IN = {function.__name__: function for function in (
    correctness, reasoning_coherence, explanation_quality, multiple_choice, answer_pattern, json_format,
    xml_tags, countdown, environment, repetition_penalty, diversity, safety, match_format_exactly,
    match_format_approximately, check_answer, check_numbers, math_equality, passes_tests,
)}


def load_reward_function(name: str | Callable) -> Callable:
    """Return a built-in reward function by name, or the function of `path/to/file.py:function`.

    A function is returned as it is, if it can be called as a reward function.
    """
    if callable(name):
        is_built_in = BUILT_IN.get(name_of(name)) is name
        return name if is_built_in else check_signature(name, as_name(name), BUILT_IN)
    if name in BUILT_IN:
        return BUILT_IN[name]
    return check_signature(function_from_file("reward_functions", name, tuple(BUILT_IN)), name, BUILT_IN)


def compute_rewards_for_completions(
    reward_functions: list[Callable], weights: list[float], rollout, examples: list[dict], *,
    on_error: str = "raise", timeout: float = 0.0, reports: Reports | None = None,
    turn_points: Tensor | None = None, trainer_state=None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score every completion with every function and add up: total = sum of weight * points.

    rollout      has completions (B texts) and completion_ids, completion_mask (B, T)
    examples     P dicts, B = P * G. Functions get completions in the format of the prompt: text, or messages
    on_error     "raise": stop, naming the function and its error; "none": leave completions unscored
    timeout      seconds for one call, which scores all B completions; 0: no limit. Taking longer is an error
    reports      gets what functions log, and the failed calls under on_error="none"
    turn_points  (B, T), with an environment: functions get a list for each completion, the points of its
                 turns. A conversation with NaN among them is unscored: its environment raised
    trainer_state  global_step, max_steps and epoch, as in TRL; None: step 0 of 1
    returns      total (P, G) in points, and the points of each function (P, G) before weighting

    Points are NaN where a function could not score. A total is NaN if a function failed, or scored only some
    siblings and not this one: they cannot be compared. A function that returned None for all siblings of a
    group is left out of the totals of the group.
    """
    group_size, remainder = divmod(len(rollout.completions), len(examples))
    assert remainder == 0, f"{len(rollout.completions)=} is not a multiple of {len(examples)=}"
    arguments = build_arguments(rollout, examples, turn_points, trainer_state)
    own = Reports([{} for _ in rollout.completions])
    calls = [start_call(function, arguments, own) for function in reward_functions]
    per_function, failed = {}, torch.zeros(len(examples), group_size, dtype=torch.bool)
    for function, call in zip(reward_functions, calls, strict=True):
        points, raised = call_reward_function(                                              # (B,), (B,)
            function, call, arguments, own, group_size, on_error, timeout)
        if turn_points is not None:
            points = points.masked_fill(turn_points.isnan().any(dim=1), torch.nan)
        per_function[name_of(function)] = points.view(-1, group_size)
        failed |= raised.view(-1, group_size)
    if reports is not None:
        reports.add(own)
    return weighted_sum(per_function, weights).masked_fill(failed, torch.nan), per_function


def weighted_sum(per_function: dict[str, Tensor], weights: list[float]) -> Tensor:
    """Add up the points of each function (P, G) -> total (P, G), with NaN as documented above."""
    assert len(weights) == len(per_function), f"{len(weights)=} {list(per_function)=}"
    points = torch.stack(list(per_function.values()))                                   # (functions, P, G)
    skipped = points.isnan().all(dim=2, keepdim=True)             # the function does not apply to this group
    weighted = torch.where(skipped, 0.0, points) * torch.tensor(weights, dtype=points.dtype)[:, None, None]
    return torch.where(skipped.all(dim=0), torch.nan, weighted.sum(dim=0))
