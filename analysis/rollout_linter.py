r"""
Lint reward functions on a run's own completions, each changed in ways that must not earn points, and in ways
that must not cost any.

    python rewards.py --lint --rollouts RUN/rollouts.jsonl

The answer of a text: the last <answer>...</answer>, in it or else anywhere the last \boxed{...}, else where
the data's answer is last found and not part of a longer word or number. Without one it is not changed. Of a
conversation only the last message is scored. P groups of G completions. A function that compares siblings
gets the completions of a group all changed alike.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import regex

from analysis.reward_linter import score_texts
from data import as_text
from reward_functions.answers import as_texts
from rewards import same_answer, text_of
from runs.folder import read_steps
from sources.batches import prompt_key

EPSILON, LISTS = 1e-9, ("candidates", "hedged")           # points
TIERS = (                       # phrase, changes; at fault: sign * (points changed - unchanged) > limit
    ("as much to {} as to the best completions", ("other answer", *LISTS, "echo"), 1, -EPSILON),
    ("more to {} in place of a wrong answer", LISTS, 1, EPSILON),
    ("more to {} than to the same completions unchanged",
     ("no reasoning", "claim", "repeated", "padded", "cut"), 1, EPSILON),
    ("less to {} than to the best completions",
     ("white space", "line break", "thousands", "unit", "notation", "boxed"), -1, EPSILON),
)
CLAIM = "I have checked this twice and am certain that it is correct. "
FILLER = " Let me look at this again. Every part of it matters. The steps follow from each other. "
BOXED = r"(\\boxed\s*\{\s*)((?:[^{}]++|\{(?3)\})*?)(\s*\})"
TAGGED = r"(.*)(<answer>\s*)((?:(?!</?\w+>).)*?)(\s*</answer>)(.*)"             # without tags in it
FORMS = f"(.*<answer>[^<]*){BOXED}([^<]*</answer>.*)", TAGGED, f"(.*){BOXED}(.*)"
REASONING = re.compile(r"(?s)(?<=<reasoning>).*?(?=</reasoning>)|(?<=<think>).*?(?=</think>)")


def split_at_answer(text: str, truth: str) -> tuple[str, ...]:
    """Return what is before, opens, is, closes and follows the answer; five empty texts without one."""
    bare = rf"(.*)(?<![\w.,-])()({re.escape(truth)})()(?!\w|[.,]\d)(.*)"
    found = (regex.fullmatch(form, text, regex.DOTALL) for form in (*FORMS, bare))
    return next((match.groups() for match in found if match and match[3]), ("",) * 5)


def changes_of(
    text: str, prompt: str, truth: str, others: Iterable[str], signs: str = "", boxed: bool = False
) -> dict[str, str]:
    r"""Return the changed texts by the name of the change, without those that are equal to the text.

    truth   the data's answer, "" if unknown;  others  answers of other problems, of which one is taken
    signs   `unit` adds a $ or % that is in here, as in the answers to this problem
    boxed   \boxed is asked for or used somewhere, so an answer may be in one

    Words such as "12 apples" are not tried, because a prompt may ask for a number alone.
    """
    thought = REASONING.search(text)
    start, end = thought.span() if thought else (0, 0)
    before, opening, answer, closing, after = split_at_answer(text, truth)
    right, new = truth or answer, {}                      # new: what takes the answer's place
    other = next((other for other in others if other and not same_answer(other, right)), "")
    if answer and other:
        new = {"other answer": other, "hedged": f"{right} or maybe {other}"}
        new["candidates"] = (f"{closing}\n{opening}" if opening else " or ").join([other, right, f"{other}1"])
    if re.fullmatch(r"-?[0-9]{1,99}(\.[0-9]+)?", answer):
        whole, point, decimals = answer.partition(".")
        if len(whole.lstrip("-")) > 3:
            new["thousands"] = f"{int(whole):,}{point}{decimals}"
        new["notation"] = f"{answer}.0" if not point else answer[1:] if whole == "0" else f"{answer}0"
        new |= {"unit": f"${answer}"} if "$" in signs else {"unit": f"{answer} %"} if "%" in signs else {}
    if answer and boxed and "\\boxed" not in opening:
        new["boxed"] = f"\\boxed{{{answer}}}"
    if answer and "<answer>" not in text:
        new["white space"] = f" {answer} "
    texts = {
        "echo": prompt, "repeated": "\n".join([text] * 3), "cut": text[: len(text) // 2],
        "claim": text[:start] + CLAIM + text[start:], "padded": text[:end] + FILLER + text[end:],
        "no reasoning": text[:start] + re.sub(r"(?s)\S.*", "...", text[start:end]) + text[end:] if thought
        else text[len(before) :],
        "white space": re.sub(r"\s*(</?(?:reasoning|think|answer)>)\s*", r"\n\1\n", text).strip(),
        "line break": text[:start] + text[start:end].replace(" ", "\n", 1) + text[end:],
    } | {name: before + opening + value + closing + after for name, value in new.items()}
    return {name: changed for name, changed in texts.items() if changed != text}


def read_groups(path: Path, data: Sequence[dict], limit: int) -> tuple[list[tuple[dict, list[str]]], str]:
    """Return (example, completions) of saved groups, and a line about them. Raises ValueError, one line.

    data    has the examples, found by their prompts
    limit   groups, spread evenly from the first to the newest; 0: enough for 256 completions
    """
    saved = []
    for records in read_steps(path):
        for _, group in groupby(records if records[0]["phase"] == "grpo" else [], key=itemgetter("group")):
            rows = list(group)
            key, siblings = prompt_key(rows[0]["prompt"]), [text_of(row["completion"]) for row in rows]
            saved.append((key, records[0]["step"], siblings))
    keys = {key for key, *_ in saved}
    examples = {key: example for example in data if (key := prompt_key(example["prompt"])) in keys}
    found = [group for group in saved if group[0] in examples and len(group[2]) == len(saved[-1][2])]
    if not found:
        raise ValueError(
            f"--rollouts={path}: of {len(saved)} groups of GRPO in it none is in the data; give the "
            "run's --dataset and --prompt_column"
        )
    size = len(found[0][2])
    count = min(limit or -(-256 // size), len(found))
    picked = [found[round(i)] for i in np.linspace(len(found) - 1, 0, count)][::-1]
    line = f"{count} groups of {size} completions, steps {picked[0][1]} to {picked[-1][1]}"
    line += f"; left out as not in the data, or of another size: {len(saved) - len(found)} of {len(saved)}"
    return [(examples[key], siblings) for key, _, siblings in picked], line


def changes_of_groups(examples: list[dict], texts: list[list[str]]) -> list[dict[str, str]]:
    """Return changes_of each text. examples: P; texts: P lists of one length."""
    prompts = [as_text(example["prompt"]) for example in examples]
    truths = ["".join(as_texts(example.get("answer"))[:1]) for example in examples]
    pairs = zip(truths, texts, strict=True)
    answers = [[truth, *(split_at_answer(text, truth)[2] for text in row)] for truth, row in pairs]
    boxed, changes = any("\\boxed" in text for text in chain(prompts, *texts)), []
    for p, row in enumerate(texts):
        others, signs = [*chain(*answers[p + 1 :], *answers[:p])], "".join(answers[p])
        changes += [changes_of(text, prompts[p], truths[p], others, signs, boxed) for text in row]
    return changes


def lint_rollouts(
    functions: list[Callable], weights: list[float], groups: list[tuple[dict, list[str]]]
) -> tuple[list[str], list[str]]:
    """Return the lines of a table and the worst example of each of its rows, and the flags.

    groups  (example, G completions)

    The best completions of a function are those with its most points. A function is judged by answers if
    another answer lowers its points in half of the cases; the total too unless a function gave no points at
    all: it may be the one that knows right answers.
    """
    examples = [example for example, _ in groups]
    texts = [siblings for _, siblings in groups]
    changes = changes_of_groups(examples, texts)          # P * G
    failures: dict[str, str] = {}

    def score(change: str) -> dict[str, np.ndarray]:
        """Return points (P * G,) of each function and the total, NaN for completions without the change."""
        new = [found.get(change, text) for found, text in zip(changes, chain(*texts), strict=True)]
        total, points, failed = score_texts(functions, weights, new, examples)
        for f in reversed(failed):
            failures[f["function"]] = f"{f['function']} failed on {f['completion']!r:.60}: {f['error']}"
        has_change = [not change or change in found for found in changes]
        points = points | {"the total": total}
        return {name: np.where(has_change, of.flatten(), np.nan) for name, of in points.items()}

    before, after = score(""), {change: score(change) for change in dict.fromkeys(chain(*changes))}
    table, worst, flags = ["| points | change | at fault |", "|---" * 3 + "|"], [], []
    for name in list(before)[: None if len(functions) > 1 else 1]:
        points = before[name]
        every = np.concatenate([points, *(found[name] for found in after.values())])
        if name in failures or np.unique(every[~np.isnan(every)].round(9)).size < 2:
            same = f"{name} gives the same points, or none, to every completion: nothing is learned"
            flags.append(failures.get(name, same))
            continue
        best = points >= np.nanmax(points) - EPSILON
        lowered = (after.get("other answer", before)[name] - points)[best]
        lowered = lowered[~np.isnan(lowered)] < -EPSILON
        by_answer = len(functions) == 1 or lowered.sum() * 2 >= len(lowered) > 0
        by_answer |= name == "the total" and all(np.nan_to_num(p).any() for p in before.values())
        tiers = zip(TIERS, (best, ~best, best | ~best, best), strict=True)
        for (phrase, names, sign, limit), cases in list(tiers)[0 if by_answer else 2 :]:
            faulty = []
            for change in filter(after.get, names):
                gain = np.where(cases, sign * (after[change][name] - points), np.nan)
                fault = gain > limit
                if not fault.any():
                    continue
                faulty.append(f"`{change}`")
                share = f"{fault.sum()} of {(~np.isnan(gain)).sum()}"
                table.append(f"| `{name}` | {phrase.format(faulty[-1])} | {share} |")
                i = np.where(fault, gain, -np.inf).argmax()
                old, new = points[i], after[change][name][i]
                worst.append(f"{name}, {change}, {old:g} -> {new:g} points: {changes[i][change]!r:.200}")
            flags += [f"{name} gives {phrase.format(', '.join(faulty))}"] if faulty else []
    return [*(table if table[2:] else ["no change is at fault"]), "", *worst], flags
