"""
Reward functions: text in, points out. Pure, so that any of them can be copied out, called by hand, or swapped for yours.

    def some_reward(completions, prompts=None, completion_ids=None, **columns) -> list[float | None]

Every argument is a list with one entry per completion; columns are those of the data set (answer, ...), repeated for the
siblings of a group. A completion is a string, or a list of chat messages whose last one counts: the policy's, or those of a
whole conversation, the policy's and the environment's in turn. None means "could not score". A model may print anything, so the
functions here answer 0 and never raise, and two unreadable answers are not equal answers.

The expected form is <reasoning>...</reasoning><answer>...</answer>.
"""

import ast
import importlib.util
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
FORM = re.compile(r"<reasoning>(.*?)</reasoning>\s*<answer>(.*?)</answer>", re.DOTALL)


RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids", "turn_points")      # no data gets these names


class RewardError(RuntimeError):
    """A reward function raised; the message says which one, how, and on what."""


def text_of(completion) -> str:
    """The text of a completion: a string, or the content of the last chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    """What stands between <answer> and </answer>; None unless there is exactly one such pair, and something in it.

    Several answers are no answer: otherwise listing all candidates would pay.
    """
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    return text.partition("<answer>")[2].partition("</answer>")[0].strip() or None


def as_number(text: str) -> Decimal | None:
    """'1,234', '$72', '72.0', '5 %' as an exact number; None for anything else, NaN and infinity included."""
    cleaned = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip().lstrip("$€£").rstrip("%. "))
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def same_answer(given: str | None, truth: str | None) -> bool:
    """Equal as numbers, or as text without regard to case and surrounding space."""
    if given is None or truth is None:
        return False
    given_number, true_number = as_number(given), as_number(truth)
    if given_number is not None and true_number is not None:
        return given_number == true_number
    return given.strip().casefold() == truth.strip().casefold()


# ---- what was asked for --------------------------------------------------------------------------------------------


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


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """1 point if the one tagged answer is made of the numbers, each used exactly once, with + - * / and parentheses, and
    equals the target, else 0; None where the data set has no numbers or no target. Computed exactly, in fractions.

    countdown(["<answer>(3*4)+7</answer>"], numbers=[[7, 3, 4]], target=[19]) == [1.0]
    """

    def points(text: str, allowed: list[int], wanted: int) -> float:
        value, used = evaluate_expression(extract_answer(text) or "")
        return float(value == int(wanted) and sorted(used) == sorted(map(int, allowed)))

    return [
        None if allowed is None or wanted is None else points(text_of(completion), allowed, wanted)
        for completion, allowed, wanted in zip(completions, numbers, target, strict=True)
    ]


def evaluate_expression(text: str) -> tuple[Fraction | None, list[int]]:
    """The value of an expression like (3*4)+7 and the numbers in it; None for the value if it is anything else.

    Nothing is run: the text is parsed, and only whole numbers, + - * / between two of them, and parentheses count. There are
    no powers, so no value is large; 200 characters are enough for any problem, and cannot nest too deep for the parser.
    """
    used: list[int] = []

    def value(node) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant):
            raise ValueError("not an expression of numbers")
        used.append(node.value)
        return Fraction(node.value)

    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):   # so no names, no fractions of a number, no warnings from the parser
        return None, used
    try:
        return value(ast.parse(text.strip(), mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None, used


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def environment(completions, turn_points=None, **columns) -> list[float]:
    """What the environment gave for the turns of a conversation, added up; 0 where there was none.

    environment([conversation], turn_points=[[-0.1, -0.1, 1.0]]) == [0.8]
    """
    return [0.0] * len(completions) if turn_points is None else [float(sum(points)) for points in turn_points]


# ---- the four rewards of tunix's GSM8K example, for comparison -----------------------------------------------------
# Kept to the letter, with what is questionable about them: 5 of the 9.5 points are for form, a wrong number scores
# below silence, being near counts, and check_numbers reads neither a minus sign nor "1,234".

TUNIX_FORM = re.compile(r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.MULTILINE | re.DOTALL)


def match_format_exactly(completions, **columns) -> list[float]:
    """3 points if reasoning and answer tags occur in order anywhere, the last one optional at a line's end; else 0."""
    return [3.0 if TUNIX_FORM.search(text_of(completion)) else 0.0 for completion in completions]


def match_format_approximately(completions, **columns) -> list[float]:
    """-2 to 2 points: half a point for each of the four tags that occurs exactly once, minus half for each that does not."""
    return [sum(0.5 if text_of(c).count(tag) == 1 else -0.5 for tag in TAGS) for c in completions]


def check_answer(completions, answer, **columns) -> list[float | None]:
    """-1 to 3 points: 3 equal, 0.5 within 10 %, 0.25 within 20 %, -0.5 not a number, -1 another number, 0 no answer."""

    def points(text: str, truth: str) -> float:
        form = TUNIX_FORM.search(text)
        if form is None:
            return 0.0
        guess, truth = form[1].strip().replace(",", ""), truth.strip().replace(",", "")
        if guess == truth:
            return 3.0
        guess_number, true_number = read_float(guess), read_float(truth)
        if guess_number is None or true_number is None:
            return -0.5
        if guess_number == true_number:
            return 3.0
        if true_number == 0:
            return -1.0
        ratio = guess_number / true_number
        return 0.5 if 0.9 <= ratio <= 1.1 else 0.25 if 0.8 <= ratio <= 1.2 else -1.0

    return [None if t is None else points(text_of(c), str(t)) for c, t in zip(completions, answer, strict=True)]


def check_numbers(completions, answer, **columns) -> list[float | None]:
    """1.5 points if the first digits and dots behind <answer> are the true number, else 0."""

    def points(text: str, truth: str) -> float:
        found = re.search(r"<answer>.*?([\d.]+)", text, re.DOTALL)
        guess, truth = read_float(found[1]) if found else None, read_float(truth.replace(",", ""))
        return 1.5 if guess is not None and guess == truth else 0.0

    return [None if t is None else points(text_of(c), str(t)) for c, t in zip(completions, answer, strict=True)]


def read_float(text: str) -> float | None:
    """A finite float, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


BUILT_IN = {
    f.__name__: f
    for f in (
        correctness, reasoning_coherence, explanation_quality, countdown, environment,
        match_format_exactly, match_format_approximately, check_answer, check_numbers,
    )
}


# ---- choosing and adding them up -----------------------------------------------------------------------------------


@cache
def load_reward_function(name: str) -> Callable:
    """A built-in reward function by name, or `path/to/file.py:function`. Raises ValueError in one line."""
    function = BUILT_IN.get(name) or function_from_file("reward_functions", name, BUILT_IN)
    if name not in BUILT_IN and name_of(function) in BUILT_IN:
        raise ValueError(f"--reward_functions {name}: there is a built-in reward function {name_of(function)}; rename yours")
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values()):
        raise ValueError(f"--reward_functions {name}: it must accept columns it does not use: add **columns to its parameters")
    return function


def function_from_file(flag: str, name: str, built_in) -> Callable:
    """The function that `path/to/file.py:function` names, for a flag which might have named one of the built-in ones."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        raise ValueError(f"--{flag} {name}: unknown; use path/to/file.py:function or one of {', '.join(built_in)}")
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


def compute_rewards_for_completions(
    reward_functions: list[Callable], weights: list[float], rollout, examples: list[dict], *, on_error: str = "raise",
    turn_points: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Score every completion with every function and add up: total = sum of weight * points.

    rollout   has completions (B texts) and completion_ids, completion_mask (B, T); examples: P dicts, B = P * G.
              A function gets [{"role": "assistant", "content": text}] where the prompt is a conversation, else the text
    on_error  "raise" stops with the function's name and what was asked of it, "none" counts its completions as unscored
    turn_points  (B, T), a Rollout's, where there is an environment: functions get a list of points for each completion, one a
              turn. A conversation with NaN among them is unscored: its environment raised
    returns   total (P, G) in points, and the points of each function (P, G) before weighting. NaN where a function
              could not score. A total is NaN if a function scored only some siblings and not this one, for then they
              cannot be compared; a function that scored none of a group was not meant for it and is left out.
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
    per_function = {
        name_of(function): call_reward_function(function, arguments, on_error)
        .masked_fill(failed, torch.nan).view(len(examples), group_size)
        for function in reward_functions
    }
    return weighted_sum(per_function, weights), per_function


def weighted_sum(per_function: dict[str, Tensor], weights: list[float]) -> Tensor:
    """Points of each function (P, G) -> total (P, G), NaN as compute_rewards_for_completions says."""
    assert len(weights) == len(per_function), f"{len(weights)=} {list(per_function)=}"
    points = torch.stack(list(per_function.values()))                            # (functions, P, G)
    skipped = points.isnan().all(dim=2, keepdim=True)                            # this function does not apply to this group
    weighted = torch.where(skipped, 0.0, points) * torch.tensor(weights, dtype=points.dtype)[:, None, None]
    return torch.where(skipped.all(dim=0), torch.nan, weighted.sum(dim=0))


def as_asked(completion: str | list[dict], prompt) -> str | list[dict]:
    """A completion in the form of its prompt, as TRL's reward functions expect it: text, or messages."""
    as_text = isinstance(completion, str) and not (isinstance(prompt, list) and isinstance(prompt[0], dict))
    return completion if as_text or isinstance(completion, list) else [{"role": "assistant", "content": completion}]


def call_reward_function(function: Callable, arguments: dict, on_error: str) -> Tensor:
    """(B,) float64 points, NaN where the function answered None."""
    completions = arguments["completions"]
    try:
        points = function(**arguments)
        if len(points) != len(completions):
            raise ValueError(f"it returned {len(points)} values for {len(completions)} completions")
        points = [math.nan if p is None else float(p) for p in points]
        if math.inf in points or -math.inf in points:
            raise ValueError("it returned an infinite number of points")
        return torch.tensor(points, dtype=torch.float64)
    except Exception as error:
        if on_error == "none":
            return torch.full((len(completions),), math.nan, dtype=torch.float64)
        failed = first_failing(function, arguments)
        raise RewardError(
            f"reward function {name_of(function)} raised {type(error).__name__}: {error}; on completion {failed!r}. "
            "Let it return None for what it cannot score, or pass --reward_errors none."
        ) from error


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
