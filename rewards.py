"""
The default reward functions, and the weighted sum of the points that reward functions give to completions.

    def some_reward(completions, prompts, completion_ids, **columns) -> list[float | None]

Every argument is a list with one entry per completion; columns are those of the data set (answer, ...),
repeated for the completions of a group. A completion is text, or where the prompt is a list of chat messages
a list too, of which the last message counts. None: the function does not apply. A model may print anything,
so the functions here return 0 or None and never raise. All functions share the lists: do not change them.

Others, and what calls functions of users safely (timeout, async, names of TRL), are in reward_functions/.

    python train.py --use_grpo --reward_functions correctness mine.py:short
    python train.py --use_grpo --check --reward_functions correctness mine.py:short --dataset data.jsonl

The second command shows the points of right, wrong, empty and cheating completions. P prompts, G completions
of each, B = P*G with those of a prompt adjacent, T tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

if TYPE_CHECKING:               # text is compared without torch; the functions that make tensors import it
    from torch import Tensor

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
# (?>...) is atomic: without it a text with many tags and no </answer> takes time cubic in its length.
FORMAT = re.compile(r"(?>(.*?)<reasoning>)(?>(.*?)</reasoning>\s*<answer>)(.*?)</answer>(.*)", re.DOTALL)
COLUMNS_NOT_PASSED = {"prompt", "completion", "turn_points"}  # functions get `prompts`
MAX_REWARD = 1e15              # its square is still finite in float32


def correctness(completions, answer, **columns) -> list[float | None]:
    """Give 1 point if the answer in tags is that of the column `answer`, else 0; several count as no answer.

    The column may hold a list: any of it is right. Where it holds nothing, or "nan", the result is None.

    correctness(["<answer>72.0</answer>"], answer=["72"]) == [1.0]
    {"prompt": "8 * 9 = ?", "answer": "72"}
    """
    return score_each(lambda text, true: float(same_answer(extract_answer(text), true)), completions, answer)


def reasoning_coherence(completions, **columns) -> list[float]:
    """Give a fifth of a point each for one pair of reasoning tags, one pair of answer tags, reasoning right
    before the answer, text in both, and no text outside of them. Nonsense in these tags earns all five.

    reasoning_coherence(["<reasoning>1+1=2</reasoning><answer>2</answer>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        match = FORMAT.fullmatch(text)
        before, reasoning, answer, after = map(str.strip, match.groups()) if match else [""] * 4
        checks = (
            has_one_pair("reasoning", text),
            has_one_pair("answer", text),
            match is not None,
            bool(reasoning and answer),
            match is not None and not before and not after,
        )
        points.append(sum(checks) / len(checks))
    return points


def explanation_quality(completions, **columns) -> list[float]:
    """Give 0 to 1 point for tagged reasoning that is short and has no line twice, be it right or wrong: 1 up
    to 100 words, decreasing linearly to 0 at 300, times the fraction of its lines that are not repeats.

    explanation_quality(["<reasoning>2 and 2 make 4</reasoning>"]) == [1.0]
    """
    points = []
    for text in map(text_of, completions):
        reasoning, closed, _ = text.partition("<reasoning>")[2].partition("</reasoning>")
        lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
        brevity = min(1.0, max(0.0, (300 - len(reasoning.split())) / 200))
        points.append(brevity * len(set(lines)) / len(lines) if closed and lines else 0.0)
    return points


def compute_rewards_for_completions(
    reward_functions: list[Callable], weights: list[float], rollout, examples: list[dict]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score every completion with every function, and add up: score = sum of weight * points.

    rollout   has completions (B texts or conversations), completion_ids and completion_mask (B, T)
    examples  P dicts
    returns   scores (P, G), which shape_rewards turns into rewards; and the points of each function (P, G)
              before weighting, by its name

    Points that are missing are NaN in the second result. What they do to the score:

        None for all completions of a prompt   it is left out: it does not apply to this prompt
        None for some of them                  NaN for these: they cannot be compared with the others
        NaN                                    NaN: the function failed

    A function of weight 0 is watched alone: nothing of it changes a score.

    A slow function may start its work and return a function without arguments, which waits for the points:
    so all are started before the first is awaited.
    """
    import torch

    arguments = build_arguments(rollout, examples)
    count, shape = len(rollout.completions), (len(examples), -1)
    names = [name_of(function) for function in reward_functions]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several reward functions have the name {', '.join(repeated)}; rename by __name__")
    started = {name: function(**arguments) for name, function in zip(names, reward_functions, strict=True)}
    per_function, failed = {}, torch.zeros(count, dtype=torch.bool)
    for (name, result), weight in zip(started.items(), weights, strict=True):
        points = read_rewards(result() if callable(result) else result, count, f"reward function {name}")
        if weight:                                        # else it is watched alone
            failed |= torch.tensor([p is not None and math.isnan(p) for p in points])
        points = torch.tensor([math.nan if p is None else p for p in points], dtype=torch.float64)
        per_function[name] = points.view(shape)
    return weighted_sum(per_function, weights).masked_fill(failed.view(shape), torch.nan), per_function


def weighted_sum(per_function: dict[str, Tensor], weights: list[float]) -> Tensor:
    """Add up the points of each function (P, G) -> scores (P, G), with NaN for None as above."""
    import torch

    assert len(weights) == len(per_function), f"{len(weights)=} {list(per_function)=}"
    points = torch.stack(list(per_function.values()))                                   # (functions, P, G)
    skipped = points.isnan().all(dim=2, keepdim=True)             # the function does not apply to this group
    weight = torch.tensor(weights, dtype=points.dtype)[:, None, None]
    if any(weights):
        skipped = skipped | (weight == 0)                         # watched alone
    weighted = torch.where(skipped, 0.0, points * weight)
    return torch.where(skipped.all(dim=0), torch.nan, weighted.sum(dim=0))


# ---- reading answers ---------------------------------------------------------------------------------------


def text_of(completion) -> str:
    """Return the text of a completion: a string, or the content of the last chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def score_each(score_one: Callable, completions, *columns) -> list[float | None]:
    """Return score_one(text, *values) for each completion, None where a value is missing or a dict."""
    return [
        None if any(is_missing(value) or isinstance(value, dict) for value in values)
        else score_one(text_of(completion), *values)
        for completion, *values in zip(completions, *columns, strict=True)
    ]


def is_missing(value) -> bool:
    """Check for None, blank text and NaN. data.py turns a NaN in the column `answer` into "nan"."""
    return value is None or (isinstance(value, str | float) and str(value).strip() in ("", "nan"))


def extract_answer(text: str) -> str | None:
    """Return the text between <answer> and </answer>; None unless exactly one such pair exists, not empty.

    Several answers count as none, because listing all candidates would score otherwise.
    """
    if not has_one_pair("answer", text):
        return None
    return text.partition("<answer>")[2].partition("</answer>")[0].strip() or None


def has_one_pair(tag: str, text: str) -> bool:
    """Check that <tag> and then </tag> occur in the text, once each."""
    return re.findall(f"</?{tag}>", text) == [f"<{tag}>", f"</{tag}>"]


def same_answer(given: str | None, truth) -> bool:
    """Compare two answers as numbers, or as text without regard to case and surrounding space. The truth may
    be a list, of which any may be given. Unreadable answers equal none.
    """
    if isinstance(truth, list):
        return any(same_answer(given, one) for one in truth)
    if given is None or is_missing(truth):
        return False
    truth = str(truth)
    given_number, true_number = as_number(given), as_number(truth)
    if given_number is not None and true_number is not None:
        return given_number == true_number
    return given.strip().casefold() == truth.strip().casefold()


def as_number(text: str) -> Decimal | None:
    """Parse '1,234', '-$72', '72 €', '72.0', '5 %' exactly; None for anything else, such as '1,2345'."""
    cleaned = re.sub(r"^([+-]?)[$€£]+\s*", r"\1", text.strip().replace("\u2212", "-")).rstrip("%€£. ")
    if not re.fullmatch(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?", cleaned):
        return None
    try:
        return Decimal(cleaned.replace(",", ""))
    except InvalidOperation:
        return None


# ---- calling reward functions ------------------------------------------------------------------------------


def build_arguments(rollout, examples: list[dict]) -> dict[str, list]:
    """Return the arguments of reward functions, lists of B entries: columns are repeated for siblings."""
    group_size, remainder = divmod(len(rollout.completions), len(examples))
    assert remainder == 0, f"{len(rollout.completions)=} is not a multiple of {len(examples)=}"
    rows = [example for example in examples for _ in range(group_size)]
    prompts = [row["prompt"] for row in rows]
    columns = set().union(*examples) - COLUMNS_NOT_PASSED
    return {name: [row.get(name) for row in rows] for name in sorted(columns)} | dict(
        completions=list(map(match_prompt_format, rollout.completions, prompts)), prompts=prompts,
        completion_ids=select_tokens(rollout.completion_ids, rollout.completion_mask),
    )


def select_tokens(values: Tensor, mask: Tensor) -> list[list]:
    """Return the values (rows, T) where the mask is True, a list for each row."""
    return [row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)]


def match_prompt_format(completion: str | list[dict], prompt) -> str | list[dict]:
    """Return a completion in the format of its prompt, as in TRL: text, or chat messages."""
    if isinstance(completion, str) and isinstance(prompt, list) and isinstance(prompt[0], dict):
        return [{"role": "assistant", "content": completion}]
    return completion


def read_rewards(returned, count: int, subject: str) -> list[float | None]:
    """Return points in a list, tuple, array or tensor as a list. Raise ValueError, which begins with the
    subject, if they are not a number or None for each of `count` completions.
    """
    expected = f"return a list with one number (or None) for each of the {count} completions"
    try:
        if not isinstance(returned, list | tuple) and not getattr(returned, "ndim", 0):
            raise TypeError
        points = [None if point is None else float(point) for point in returned]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{subject} returned {returned!r:.60}; {expected}") from None
    if len(points) != count:
        raise ValueError(f"{subject} returned {len(points)} values for {count} completions; {expected}")
    if any(point and abs(point) > MAX_REWARD for point in points):
        raise ValueError(f"{subject} returned infinite or over {MAX_REWARD:g} points; return None if unable")
    return points


def name_of(function: Callable) -> str:
    """Return the name of a function as used in logs."""
    return getattr(function, "__name__", type(function).__name__)


if __name__ == "__main__":
    raise SystemExit("rewards.py: for points of right and wrong completions: train.py --use_grpo --check ...")
