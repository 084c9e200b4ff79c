"""
The default reward functions, and the score of a completion: the weighted sum of its rewards.

    def some_reward(completions, prompts, completion_ids, **columns) -> list[float | None]

Every argument is a list with one entry per completion. columns are the columns of the data set (answer, ...),
repeated for the completions of a group. A completion is text or, if its prompt is a list of chat messages, a
list of messages; the functions here read the last one. Return None where a function does not apply. A model
may print anything, so no function here raises an error for bad text. Do not modify the shared arguments.

reward_functions/ has more functions, and code that calls users' functions safely.

    python train.py --use_grpo --reward_functions correctness mine.py:short
    python train.py --use_grpo --check --reward_functions correctness mine.py:short --dataset data.jsonl

The second command prints the rewards of right, wrong, empty and cheating completions. Shapes: P prompts, G
completions of each, B = P*G with the completions of a prompt adjacent, T tokens.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

if TYPE_CHECKING:               # comparing text needs no torch; functions that return tensors import it
    from torch import Tensor

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
# (?>...) is atomic: without it a text with many tags and no </answer> takes time cubic in its length.
FORMAT = re.compile(r"(?>(.*?)<reasoning>)(?>(.*?)</reasoning>\s*<answer>)(.*?)</answer>(.*)", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])(?:\[[^][]*\])*\s*")
UNBRACED = re.compile(r"-?\$?\d(?:[\d,./]*\d)?|[A-Za-z]\b|\\[A-Za-z]+[^\s$]*")         # "\boxed 4"
POWERS = "\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u208e\u2150-\u215e"       # NFKC would make 102 of 10 squared
# Thai to Burmese, Khmer, and Chinese with Japanese: characters of scripts without spaces between words.
CHARACTERS = "\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
WORD = re.compile(rf"[{CHARACTERS}]|\w[^\s{CHARACTERS}]{{0,19}}|\S")
COLUMNS_NOT_PASSED = {"prompt", "completion", "turn_points"}  # passed as `prompts`, or not at all
MAX_REWARD = 1e15               # its square is still finite in float32


def correctness(completions, answer, **columns) -> list[float | None]:
    """Return 1 if the answer, as extract_answer reads it, equals the column `answer`, else 0.

    The column may hold a list of right answers. Where it is blank or "nan", the reward is None.

    correctness(["<answer>72.0</answer>", "so \\boxed{72}"], answer=["72", "72"]) == [1.0, 1.0]
    {"prompt": "8 * 9 = ?", "answer": "72"}
    """
    def score_one(text: str, truth) -> float:
        return float(same_answer(extract_answer(text), truth))

    return score_each(score_one, completions, answer)


def reasoning_coherence(completions, **columns) -> list[float]:
    """Return 0.2 for each of these: one pair of reasoning tags, one pair of answer tags, reasoning right
    before the answer, text in both, and no text outside of them. Nonsense inside the tags still gets 1.

    reasoning_coherence(["<reasoning>1+1=2</reasoning><answer>2</answer>"]) == [1.0]
    """
    rewards = []
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
        rewards.append(sum(checks) / len(checks))
    return rewards


def explanation_quality(completions, **columns) -> list[float]:
    """Return 0 to 1 for tagged reasoning that is short and repeats no line, whether right or wrong: 1 up to
    100 of words_of, decreasing linearly to 0 at 300, times the fraction of its lines that are not repeats.

    explanation_quality(["<reasoning>2 and 2 make 4</reasoning>"]) == [1.0]
    """
    rewards = []
    for text in map(text_of, completions):
        reasoning, closed, _ = text.partition("<reasoning>")[2].partition("</reasoning>")
        lines = [line.strip() for line in reasoning.splitlines() if line.strip()]
        brevity = min(1.0, max(0.0, (300 - len(words_of(reasoning))) / 200))
        rewards.append(brevity * len(set(lines)) / len(lines) if closed and lines else 0.0)
    return rewards


def compute_rewards_for_completions(
    reward_functions: list[Callable], weights: list[float], rollout, examples: list[dict]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call every reward function on all completions. The score of a completion is the sum of weight * reward.

    rollout   has completions (B texts or conversations), completion_ids and completion_mask (B, T)
    examples  P dicts
    returns   scores (P, G), which shape_rewards turns into final rewards; and the rewards of each function
              (P, G) before weighting, by its name

    A reward of None is NaN in the second result. The score depends on what a function returns:

        None for all completions of a prompt   the function is skipped: it does not apply to this prompt
        None for some of them                  their scores are NaN: they cannot be compared with the others
        NaN                                    the score is NaN: the function failed

    Rewards of a function with weight 0 are logged, but excluded from the score.
    """
    import torch

    shape, per_function = (len(examples), -1), {}
    failed = torch.zeros(len(rollout.completions), dtype=torch.bool)
    returned = call_reward_functions(reward_functions, rollout, examples)
    for (name, values), weight in zip(returned.items(), weights, strict=True):
        if weight:
            failed |= torch.tensor([r is not None and math.isnan(r) for r in values])
        rewards = torch.tensor([math.nan if r is None else r for r in values], dtype=torch.float64)
        per_function[name] = rewards.view(shape)
    return weighted_sum(per_function, weights).masked_fill(failed.view(shape), torch.nan), per_function


def call_reward_functions(
    reward_functions: list[Callable], rollout, examples: list[dict]
) -> dict[str, list[float | None]]:
    """Call every reward function on all completions, and return the B rewards of each by its name.

    A slow function may start its work and return a function without arguments that waits for the rewards, so
    all functions are started before the first result is awaited.
    """
    arguments, count = build_arguments(rollout, examples), len(rollout.completions)
    names = [name_of(function) for function in reward_functions]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several reward functions have the name {', '.join(repeated)}: change a __name__")
    started = {name: function(**arguments) for name, function in zip(names, reward_functions, strict=True)}
    return {
        name: read_rewards(result() if callable(result) else result, count, f"reward function {name}")
        for name, result in started.items()}


def weighted_sum(per_function: dict[str, Tensor], weights: list[float]) -> Tensor:
    """Add up the weighted rewards of functions, (P, G) each: scores (P, G), with NaN for None as above."""
    import torch

    assert len(weights) == len(per_function), f"{len(weights)=} {list(per_function)=}"
    rewards = torch.stack(list(per_function.values()))                                  # (functions, P, G)
    weight = torch.tensor(weights, dtype=rewards.dtype)[:, None, None]
    applies = ~rewards.isnan().all(dim=2, keepdim=True)   # (functions, P, 1): not None for the whole group
    counted = applies & (weight != 0)
    score = torch.where(counted, rewards * weight, 0.0).sum(dim=0)
    return torch.where((counted if any(weights) else applies).any(dim=0), score, torch.nan)


# ---- reading answers ---------------------------------------------------------------------------------------


def text_of(completion) -> str:
    """Return the text of a completion: a string, or the content of the last chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"] or ""


def score_each(score_one: Callable, completions, *columns) -> list[float | None]:
    """Return score_one(text, *values) for each completion; None where a value is missing or is a dict."""
    return [
        None if any(is_missing(value) or isinstance(value, dict) for value in values)
        else score_one(text_of(completion), *values)
        for completion, *values in zip(completions, *columns, strict=True)
    ]


def is_missing(value) -> bool:
    """Return True for None, blank text and NaN. data.py turns a NaN in the column `answer` into "nan"."""
    return value is None or (isinstance(value, str | float) and str(value).strip() in ("", "nan"))


def extract_answer(text: str) -> str | None:
    """Return the answer in a completion, None if there is none: after its thoughts, the text between <answer>
    and </answer>, or the box in it; in a text without these tags, the content of the last \\boxed{...}.

    Several tagged answers count as none, because otherwise listing all candidates would be rewarded.
    """
    text = after_thoughts(text)
    tagged = tagged_answer(text)
    if tagged is None and re.search("</?answer>", text):
        return None
    return extract_boxed(tagged or text) or tagged


def after_thoughts(text: str) -> str:
    """Return the text after the last </think>; "" if a later <think> is open, all of a text without them."""
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def tagged_answer(text: str) -> str | None:
    """Return the text between <answer> and </answer>; None unless there is just one pair, with text in it."""
    if not has_one_pair("answer", text):
        return None
    return text.partition("<answer>")[2].partition("</answer>")[0].strip() or None


def extract_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, \\fbox{...} or \\framebox{...}, or None.

    extract_boxed("so \\boxed 4$") == extract_boxed("\\fbox{4}") == "4"
    """
    *before, last = BOX.split(text)
    if before and (unbraced := UNBRACED.match(last)):
        return unbraced[0]
    depth = 0
    for end, character in enumerate(last if before and last[:1] == "{" else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return last[1:end].strip() or None
    return None


def has_one_pair(tag: str, text: str) -> bool:
    """Return True if the text has <tag> and then </tag>, once each."""
    return re.findall(f"</?{tag}>", text) == [f"<{tag}>", f"</{tag}>"]


def same_answer(given: str | None, truth) -> bool:
    """Return True if two answers are equal as numbers, or as text apart from case and surrounding space. The
    truth may be a list of right answers. An answer of None or a missing truth equals nothing.
    """
    if isinstance(truth, list):
        return any(same_answer(given, one) for one in truth)
    if given is None or is_missing(truth):
        return False
    given, truth = normalize(given), normalize(str(truth))
    given_number, true_number = as_number(given), as_number(truth)
    if given_number is not None and true_number is not None:
        return given_number == true_number
    return given.casefold() == truth.casefold()


def normalize(text: str) -> str:
    """Return a text in Unicode's form NFKC, which has one spelling of each letter and of full-width signs;
    without characters that cannot be seen, with digits of all scripts as 0 to 9, and without outer space.
    """
    text = re.sub(f"[^{POWERS}]+", lambda run: unicodedata.normalize("NFKC", run[0]), text)
    seen = (c for c in text if unicodedata.category(c) != "Cf")
    return "".join(str(unicodedata.decimal(c, c)) for c in seen).strip()


def words_of(text: str) -> list[str]:
    """Return the words of a text: what is between spaces, at most 20 characters of it; each sign that begins
    one; and each character of scripts without spaces, such as Chinese.

    words_of("2 + 2=4. 等于四 !!") == ["2", "+", "2=4.", "等", "于", "四", "!", "!"]
    """
    return WORD.findall(text)


def as_number(text: str) -> Decimal | None:
    """Parse '1,234', '-$72', '72 €', '72.0' exactly, and '5 %' as 5; None for others, such as '1,2345'."""
    text = normalize(text).replace("\u2212", "-")
    cleaned = re.sub(r"^([+-]?)[$€£]+\s*", r"\1", text).rstrip("%€£. ")
    if not re.fullmatch(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?", cleaned):
        return None
    try:
        return Decimal(cleaned.replace(",", ""))
    except InvalidOperation:
        return None


# ---- calling reward functions ------------------------------------------------------------------------------


def build_arguments(rollout, examples: list[dict]) -> dict[str, list]:
    """Return the arguments of reward functions, lists of B entries. Columns are repeated within a group."""
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
    """Return the values (rows, T) where the mask is True, as one list for each row."""
    return [row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)]


def match_prompt_format(completion: str | list[dict], prompt) -> str | list[dict]:
    """Return a completion in the format of its prompt, as in TRL: text, or chat messages."""
    if isinstance(completion, str) and isinstance(prompt, list) and isinstance(prompt[0], dict):
        return [{"role": "assistant", "content": completion}]
    return completion


def read_rewards(returned, count: int, subject: str) -> list[float | None]:
    """Return rewards from a list, tuple, array or tensor as a list. Raise ValueError, which begins with the
    subject, unless there is a number or None for each of `count` completions.
    """
    expected = f"return a list with one number (or None) for each of the {count} completions"
    try:
        if not isinstance(returned, list | tuple) and not getattr(returned, "ndim", 0):
            raise TypeError
        rewards = [None if reward is None else float(reward) for reward in returned]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{subject} returned {returned!r:.60}; {expected}") from None
    if len(rewards) != count:
        raise ValueError(f"{subject} returned {len(rewards)} values for {count} completions; {expected}")
    if any(reward and abs(reward) > MAX_REWARD for reward in rewards):
        raise ValueError(f"{subject} returned a reward beyond +-{MAX_REWARD:g}; return None instead")
    return rewards


def name_of(function: Callable) -> str:
    """Return the name of a function as used in logs."""
    return getattr(function, "__name__", type(function).__name__)
