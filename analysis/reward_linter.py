"""
The linter of reward functions: what each of them gives to gold, wrong, empty and cheating completions, and what is odd in it.

    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl --limit 20

prints a table of mean points, then a line for everything to flag. Exit code 1 if there is any, 0 if not.
"""

import argparse
import inspect
import itertools
import math
import re
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn.utils.rnn import pad_sequence

from data import COLUMNS, load_examples
from reward_functions.answers import extract_answer, text_of
from reward_functions.loading import RESERVED, missing_columns, name_of
from rewards import BUILT_IN, compute_rewards_for_completions, load_reward_function
from sources.tasks import demonstration

KINDS = {
    "gold": "the completion of the data set, or its answer in the expected form",
    "empty": "no text at all",
    "wrong": "the column `wrong`, where the data has it; else gold with another answer, or what is gold elsewhere",
    "confident": "wrong, and certain of it",
    "form": "the tags around dots",
    "spam": "three answers, the right one in the middle",
    "repeated": "gold three times",
    "truncated": "the first half of gold",
}
SLOW = 0.1                      # seconds per completion


def completions_of(example: dict, other: dict | None = None) -> dict[str, str]:
    """Kind -> text, for one example; other: another one. Without anything to call gold: empty, wrong and form alone.

    Of a conversation it is the last turn that differs.
    """
    answer, gold = example.get("answer"), text_of(example.get("completion") or "")
    gold = gold or (demonstration("because", answer) if answer else None)
    form = demonstration("...", "...")
    if not gold:
        return {"empty": "", "wrong": "I do not know.", "form": form}
    right = extract_answer(gold) or answer
    if answer and right:
        changed = re.sub(r"\d{1,9}", lambda digits: str(2 * int(digits[0]) + 7), answer, count=1)
        wrong_answer = changed if changed != answer else f"not {answer}"
        head, found, tail = gold.rpartition(right)
        wrong = head + wrong_answer + tail if found else wrong_answer
        answers = (f"<answer>{text}</answer>" for text in (wrong_answer, right, f"{wrong_answer}1"))
        spam = "<reasoning>One of these.</reasoning>" + "".join(answers)
    else:
        wrong = text_of((other or {}).get("completion") or "I do not know.")
        spam = ""
    wrong = example.get("wrong") or wrong
    spam = spam or f"{wrong}\n{gold}\n{wrong}"
    start = "<reasoning>" if "<reasoning>" in wrong else ""
    certain = "I am absolutely certain of this and have checked it twice. "
    return {
        "gold": gold, "empty": "", "wrong": wrong, "confident": wrong.replace(start, start + certain, 1), "form": form,
        "spam": spam, "repeated": "\n".join([gold] * 3), "truncated": gold[: len(gold) // 2],
    }


def as_rollout(completions: list) -> SimpleNamespace:
    """Texts, or conversations, as if they had been sampled: a token for each word of the last turn, and one to stop."""
    words = [text_of(completion).split() for completion in completions]
    numbers = {word: number for number, word in enumerate(itertools.chain(*words), start=1)}
    ids = [torch.tensor([*map(numbers.get, text), 0]) for text in words]
    mask = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in ids], batch_first=True)
    return SimpleNamespace(completions=completions, completion_ids=pad_sequence(ids, batch_first=True), completion_mask=mask)


def measure(function: Callable, examples: list[dict], timeout: float = 0.0) -> tuple[dict[str, float], float, list[dict]]:
    """What a function gives, over the examples that have one of the columns it asks for by name.

    returns  mean points by kind (kinds that it never scored are left out), seconds per completion, calls that failed
    """
    columns = dict.fromkeys(name for example in examples for name in example)
    own = set(columns) & set(inspect.signature(function).parameters) - set(RESERVED)
    points: dict[str, list[float]] = {}
    failures: list[dict] = []
    started, count = time.perf_counter(), 0
    for number, example in enumerate(examples):
        if own and all(example.get(name) is None for name in own):
            continue
        other = next((e for e in examples[number + 1 :] + examples[:number] if own <= e.keys()), None)
        texts = completions_of(example, other)
        total, _ = compute_rewards_for_completions(
            [function], [1.0], as_rollout(list(texts.values())), [columns | example], on_error="none", timeout=timeout,
            failures=failures,
        )
        for kind, value in zip(texts, total[0].tolist(), strict=True):
            if not math.isnan(value):
                points.setdefault(kind, []).append(value)
        count += len(texts)
    means = {kind: sum(points[kind]) / len(points[kind]) for kind in KINDS if kind in points}
    return means, (time.perf_counter() - started) / max(1, count), failures


def flags_of(points: dict[str, float], is_total: bool) -> list[str]:
    """What is odd about mean points by kind, a phrase each. A total must tell right from wrong; of its parts some need not."""
    if not points:
        return ["scores nothing in this data: does it have the columns?"]
    if len(points) > 1 and max(points.values()) - min(points.values()) < 1e-9:
        return [f"gives {points['empty']:g} to everything: nothing can be learned from it here"]
    flags = []
    for lower, kinds in ("gold", list(KINDS)), ("wrong", ["empty", "form", "spam"]):
        limit = points.get(lower, math.inf) + 1e-9
        above = [f"{kind} ({points[kind]:.2f})" for kind in kinds if points.get(kind, -math.inf) > limit]
        if above:
            flags.append(f"gives more to {', '.join(above)} than to {lower} ({points[lower]:.2f})")
    gold = points.get("gold", math.inf)
    equal = [kind for kind in ("empty", "wrong", "confident", "form", "spam") if abs(points.get(kind, -math.inf) - gold) < 1e-9]
    if is_total and equal:
        flags.append(f"gives as much to {', '.join(equal)} as to gold ({gold:.2f})")
    return flags


def row_of(name: str, points: dict[str, float]) -> str:
    """A line of the table."""
    return f"| `{name}` | " + " | ".join(f"{points[kind]:.2f}" if kind in points else "" for kind in KINDS) + " |"


def lint(functions: list[Callable], weights: list[float], examples: list[dict]) -> tuple[list[str], list[str]]:
    """(lines of the table, flags)"""
    table, flags = [f"| points | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"], []
    total: dict[str, float] = {}
    for function, weight in zip(functions, weights, strict=True):
        name = name_of(function)
        points, seconds, failures = measure(function, examples)
        table.append(row_of(name, points))
        found = [f"failed on {f['completion']!r:.60}: {f['error']}" for f in failures[:1]]
        found = found or flags_of(points, is_total=len(functions) == 1)
        flags += [f"{name} {flag}" for flag in found]
        if seconds > SLOW:
            flags.append(f"{name} takes {seconds:.2f} s a completion")
        for kind, value in points.items():
            total[kind] = total.get(kind, 0.0) + weight * value
    if len(functions) > 1:
        table.append(row_of("total", total))
        flags += [f"the total {flag}" for flag in flags_of(total, is_total=True)]
    return table, flags


def suitable(examples: list[dict]) -> list[Callable]:
    """The built-in functions that score something here: their columns are there, and so is what they need to be installed."""
    columns = {name for example in examples for name in example}
    functions = [f for name, f in BUILT_IN.items() if name != "environment" and not missing_columns(f, columns)]
    return [function for function in functions if measure(function, examples)[0]]


def main(argv: list[str]) -> int:
    """The command line. Returns the exit code: 0 nothing to flag, 1 something, 2 a mistake in the command."""
    parser = argparse.ArgumentParser(prog="rewards.py", description="What do reward functions reward?", allow_abbrev=False)
    parser.add_argument("--lint", action="store_true", required=True)
    parser.add_argument("--reward_functions", nargs="+", default=[], help="as in train.py; empty: built-in ones that score it")
    parser.add_argument("--reward_weights", nargs="+", type=float, default=[], help="one for each; empty: 1 each")
    parser.add_argument("--dataset", default="arithmetic", help="as in train.py")
    for name in COLUMNS:
        parser.add_argument(f"--{name}_column", default="", help="as in train.py")
    parser.add_argument("--bad_lines", default="error", choices=["error", "skip"], help="as in train.py")
    parser.add_argument("--limit", type=int, default=8, help="examples (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        asked = {name: getattr(args, f"{name}_column") for name in COLUMNS}
        examples = load_examples(args.dataset, limit=max(1, args.limit), bad_lines=args.bad_lines, columns=asked)
        functions = [load_reward_function(name) for name in args.reward_functions] or suitable(examples)
        weights = args.reward_weights or [1.0] * len(functions)
        if len(weights) != len(functions):
            raise ValueError(f"--reward_weights: {len(weights)} weights for {len(functions)} functions; one for each")
    except ValueError as error:
        print(f"rewards.py: error: {error}", file=sys.stderr)
        return 2
    table, flags = lint(functions, weights, examples)
    print("\n".join(table))
    print("".join(f"\n- {flag}" for flag in flags))
    return int(bool(flags))
