"""
Lint reward functions: score correct, wrong, empty and cheating completions, and flag suspicious points.

The command line is in lint_command.py.
"""

import inspect
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from config import GRPOConfig
from data import as_text, demonstration
from reward_functions.calling import wrap_reward_functions
from reward_functions.loading import RESERVED
from rewards import compute_rewards_for_completions, extract_answer, name_of, text_of
from runs.folder import read_steps
from sample import pad_rows
from sources.batches import prompt_key

KINDS = (                       # columns of the table, which docs/rewards.md explains
    "gold", "empty", "wrong", "confident", "form", "spam", "repeated", "truncated", "echo",
)
SLOW = 0.1                      # seconds per completion


def completions_of(example: dict, other: dict | None = None) -> dict[str, str]:
    """Return the text of each kind for one example; without a gold: empty, wrong, form, echo.

    other  another example, whose gold is wrong here
    For a conversation the texts are its last turn. Not in the table: gold with a newline in place of the
    first space of its reasoning (`newline`), without the tags of the answer (`untagged`), and with </answer>
    before <answer> (`reversed`).
    """
    answer, gold = example.get("answer"), text_of(example.get("completion") or "")
    answer = answer[0] if isinstance(answer, list) and answer else answer
    answer = None if isinstance(answer, list | dict | None) else str(answer)
    gold = gold or (demonstration("because", answer) if answer else None)
    form, echo = demonstration("...", "..."), as_text(example["prompt"])
    if not gold:
        return {"empty": "", "wrong": "I do not know.", "form": form, "echo": echo}
    correct, spam = extract_answer(gold) or answer, ""
    wrong = text_of((other or {}).get("completion") or "I do not know.")
    if answer and correct:
        changed = re.sub(r"\d{1,9}", lambda digits: str(2 * int(digits[0]) + 7), answer, count=1)
        wrong_answer = changed if changed != answer else f"not {answer}"
        text, closing = gold.removesuffix("</answer>"), "</answer>" * gold.endswith("</answer>")
        head, found, tail = text.rpartition(correct)
        tail += closing
        wrong = head + wrong_answer + tail if found else wrong_answer
        answers = (f"<answer>{text}</answer>" for text in (wrong_answer, correct, f"{wrong_answer}1"))
        spam = "<reasoning>One of these.</reasoning>" + "".join(answers) if "<answer>" in gold else ""
    if isinstance(column := example.get("wrong"), str):
        wrong = column or wrong
    spam = spam or f"{wrong}\n{gold}\n{wrong}"
    start = "<reasoning>" if "<reasoning>" in wrong else ""
    confident = wrong.replace(start, start + "I am absolutely certain of this and have checked it twice. ", 1)
    bare = gold.replace("</answer>", "")
    return {
        "gold": gold, "empty": "", "wrong": wrong, "confident": confident, "form": form, "spam": spam,
        "repeated": "\n".join([gold] * 3), "truncated": gold[: len(gold) // 2], "echo": echo,
        "newline": re.sub(r"(<(?:reasoning|think)>\S*) ", r"\1\n", gold, count=1),
        "untagged": bare.replace("<answer>", ""), "reversed": bare.replace("<answer>", "</answer><answer>"),
    }


def texts_as_rollout(completions: list) -> SimpleNamespace:
    """Return texts or conversations as a rollout: one token per word of the last turn, and a stop token."""
    words = [text_of(completion).split() for completion in completions]
    vocabulary = {word: token for token, word in enumerate(itertools.chain(*words), start=1)}
    rows = [[*map(vocabulary.get, text), 0] for text in words]
    ids, mask = pad_rows(rows), pad_rows([[True] * len(row) for row in rows])
    return SimpleNamespace(
        completions=completions, completion_ids=ids, completion_mask=mask, prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1], sampling_logp=ids * 0.0, turn_points=None,
    )


def score_texts(
    functions: list[Callable], weights: list[float], completions: list, examples: list[dict],
    config: GRPOConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor], list[dict]]:
    """Return what compute_rewards_for_completions does, for completions of P examples, and failed calls.

    config  None: errors of functions leave points out
    """
    rollout = texts_as_rollout(completions)
    wrapped, reports = wrap_reward_functions(
        functions, rollout, config or GRPOConfig(reward_errors="none"))
    return *compute_rewards_for_completions(wrapped, weights, rollout, examples), reports.failures


def score_kinds(function: Callable, examples: list[dict]) -> tuple[dict[str, float], float, list[dict]]:
    """Score all kinds of completions with a function, for the examples that have one of the columns it names.

    returns  mean points by kind, without kinds that it never scored; seconds per completion; failed calls
    """
    columns = dict.fromkeys(name for example in examples for name in example)
    used = set(columns) & set(inspect.signature(function).parameters) - set(RESERVED)
    points: dict[str, list[float]] = {}
    failures: list[dict] = []
    started, count = time.perf_counter(), 0
    for i, example in enumerate(examples):
        if used and all(example.get(name) is None for name in used):
            continue
        other = next((e for e in examples[i + 1 :] + examples[:i] if used <= e.keys()), None)
        texts = completions_of(example, other)
        completions = list(texts.values())
        total, _, failed = score_texts([function], [1.0], completions, [columns | example] * len(texts))
        for kind, value in zip(texts, total[:, 0].tolist(), strict=True):
            if not math.isnan(value):
                points.setdefault(kind, []).append(value)
        failures += failed
        count += len(texts)
    means = {kind: sum(values) / len(values) for kind, values in points.items()}
    return means, (time.perf_counter() - started) / max(1, count), failures


def flags_of(points: dict[str, float], is_total: bool) -> list[str]:
    """Return a phrase for each suspicious order of mean points by kind.

    is_total  equal points for gold and wrong are flagged too; a single function of several may give them
    """
    if not points:
        return ["scores none of the examples: does the data have the columns it needs?"]
    if len(points) > 1 and max(points.values()) - min(points.values()) < 1e-9:
        return [f"gives {max(points.values()):g} to every completion, so nothing can be learned from it here"]
    flags = []
    orders = {"wrong": ["empty", "form", "spam", "echo"], "newline": ["gold"], "untagged": ["reversed"]}
    for lower, kinds in {"gold": KINDS, **orders}.items():
        limit = points.get(lower, math.inf) + 1e-9
        above = [f"{kind} ({points[kind]:.2f})" for kind in kinds if points.get(kind, -math.inf) > limit]
        if above:
            flags.append(f"gives more to {', '.join(above)} than to {lower} ({points[lower]:.2f})")
    gold = points.get("gold", math.inf)
    bad_kinds = "empty", "wrong", "confident", "form", "spam", "echo"
    equal = [kind for kind in bad_kinds if abs(points.get(kind, -math.inf) - gold) < 1e-9]
    if is_total and equal:
        flags.append(f"gives as much to {', '.join(equal)} as to gold ({gold:.2f})")
    return flags


def table_row(name: str, points: dict[str, float]) -> str:
    """Return a line of the table."""
    cells = [f"{points[kind]:.2f}" if kind in points else "" for kind in KINDS]
    return f"| `{name}` | {' | '.join(cells)} |"


def lint(
    functions: list[Callable], weights: list[float], examples: list[dict]
) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and the flags of all functions and of their weighted sum."""
    table, flags = [f"| points | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"], []
    total: dict[str, float] = {}
    for function, weight in zip(functions, weights, strict=True):
        name = name_of(function)
        points, seconds, failures = score_kinds(function, examples)
        table.append(table_row(name, points))
        found = [f"failed: {f['error']}" for f in failures[:1]]
        found = found or flags_of(points, is_total=len(functions) == 1)
        flags += [f"{name} {flag}" for flag in found]
        if seconds > SLOW:
            flags.append(f"{name} takes {seconds:.2f} s a completion")
        for kind in points.keys() & KINDS:
            total[kind] = total.get(kind, 0.0) + weight * points[kind]
    if len(functions) > 1:
        table.append(table_row("total", total))
        flags += [f"the total {flag}" for flag in flags_of(total, is_total=True)]
    return table, flags


def examples_of_run(path: Path, data: Iterable[dict]) -> list[dict]:
    """Return the examples of a run's saved GRPO groups, newest first, with a group's best completion as gold.

    data  has the examples, found by their prompts
    A group in which no reward is above another shows nothing, and is left out; of a prompt's groups the
    newest counts. Raises ValueError, one line, if no group is left.
    """
    best: dict[str, str | list[dict]] = {}
    for records in read_steps(path):
        rows = [row for row in records if row["phase"] == "grpo" and row["reward"] is not None]
        for _, of_group in itertools.groupby(rows, key=lambda row: row["group"]):
            group = sorted(of_group, key=lambda row: row["reward"])
            if group[0]["reward"] < group[-1]["reward"]:
                key = prompt_key(group[0]["prompt"])
                best.pop(key, None)                       # so that it becomes the last one
                best[key] = group[-1]["completion"]
    examples = {key: example for example in data if (key := prompt_key(example["prompt"])) in best}
    if not examples:
        raise ValueError(
            f"--rollouts={path}: none of its prompts with unequal rewards is in the data; name the "
            "rollouts.jsonl of a run, and its --dataset and --prompt_column")
    newest = reversed(best.items())
    return [examples[key] | {"completion": completion} for key, completion in newest if key in examples]
