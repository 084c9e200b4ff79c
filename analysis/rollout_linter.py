r"""
Lint reward functions on a run's own completions, each changed in ways that must not earn points, and in ways
that must not cost any.

    python rewards.py --lint --rollouts RUN/rollouts.jsonl

The answer of a text: the last <answer>...</answer>, in it or else anywhere the last \boxed{...}, else where
the data's answer is last found and not part of a longer word or number. Without one it is not changed.
P groups of G completions, each with the data's gold as column G (no text if the data has none).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import regex
import torch

from analysis.evaluation import estimate_mean
from analysis.reward_linter import completions_of, score_texts
from data import as_text
from grpo import compute_group_advantages
from reward_functions.answers import as_texts, extract_boxed
from rewards import same_answer, text_of
from runs.records import read_steps
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
TAGGED = r"(.*)(<answer>\s*)(.*?)(\s*</answer>)(.*)"
FORMS = f"(.*<answer>[^<]*){BOXED}([^<]*</answer>.*)", TAGGED, f"(.*){BOXED}(.*)"
REASONING = re.compile(r"(?s)(?<=<reasoning>).*?(?=</reasoning>)|(?<=<think>).*?(?=</think>)")


def split_at_answer(text: str, truth: str | None) -> tuple[str, ...]:
    """Return what is before, opens, is, closes and follows the answer; five empty texts without one."""
    bare = [rf"(.*)(?<![\w.,-])()({re.escape(truth)})()(?!\w|[.,]\d)(.*)"] if truth else []
    found = (regex.fullmatch(form, text, regex.DOTALL) for form in (*FORMS, *bare))
    return next((match.groups() for match in found if match), ("",) * 5)


def changes_of(
    text: str, prompt: str, truth: str | None, others: Iterable[str], signs: str = "", boxed: bool = False
) -> dict[str, str]:
    r"""Return the changed texts by the name of the change, without those that are equal to the text.

    truth     the data's answer, None if unknown;  others  answers of other problems, of which one is taken
    signs     contains $ or % if an answer to this problem has them: only then `unit` adds one
    boxed     \boxed is asked for or used somewhere, so the answer may be in one

    Words such as "12 apples" are not tried: a prompt may ask for a number alone.
    """
    thought = REASONING.search(text)
    start, end = thought.span() if thought else (0, 0)
    before, opening, answer, closing, after = split_at_answer(text, truth)
    texts = {
        "echo": prompt, "repeated": "\n".join([text] * 3), "cut": text[: len(text) // 2],
        "claim": text[:start] + CLAIM + text[start:], "padded": text[:end] + FILLER + text[end:],
        "no reasoning": text[:start] + "..." + text[end:] if thought else text[len(before) :],
        "white space": re.sub(r"\s*(</?(?:reasoning|think|answer)>)\s*", r"\n\1\n", text).strip(),
        "line break": text[:start] + text[start:end].replace(" ", "\n", 1) + text[end:],
    }
    right = answer if not truth or same_answer(answer, truth) else truth
    other, new = next((o for o in others if o != right and not same_answer(o, right)), ""), {}
    if answer and other:
        new = {"other answer": other, "hedged": f"{right} or maybe {other}"}
        new["candidates"] = (f"{closing}\n{opening}" if opening else " or ").join([other, right, f"{other}1"])
    if re.fullmatch(r"-?\d+(\.\d+)?", answer):
        digits, point, decimals = answer.partition(".")
        new["thousands"] = f"{int(digits):,}{point}{decimals}"
        new["notation"] = f"{answer}.0" if not point else answer[1:] if digits == "0" else f"{answer}0"
        new |= {"unit": f"${answer}" if "$" in signs else f"{answer} %"} if signs else {}
    if answer and boxed and "\\boxed" not in opening:
        new["boxed"] = f"\\boxed{{{answer}}}"
    if answer and "<answer>" not in text:
        new["white space"] = f" {answer} "
    texts |= {name: before + opening + value + closing + after for name, value in new.items()}
    return {name: changed for name, changed in texts.items() if changed != text}


def with_last(completion: str | list[dict], text: str | None) -> str | list[dict]:
    """Return a completion with another text, or last turn of the conversation; as it is for None."""
    if text is None or isinstance(completion, str):
        return completion if text is None else text
    return [*completion[:-1], completion[-1] | {"content": text}]


def with_text(completion: str | list[dict], text: str | None) -> str | list[dict]:
    """Return a completion with a text in its last turn; as it is for None."""
    if text is None or isinstance(completion, str):
        return completion if text is None else text
    return [*completion[:-1], completion[-1] | {"content": text}]


def read_groups(path: Path, data: Sequence[dict], limit: int) -> tuple[list[tuple[dict, list]], str]:
    """Return (example, completions) of saved groups, and a line about them. Raises ValueError, one line.

    data    has the examples, found by their prompts
    limit   groups, spread evenly from the first to the newest; 0: enough for 256 completions
    """
    saved: list[tuple[str, int, list]] = []
    for records in read_steps(path):
        for _, group in groupby(records if records[0]["phase"] == "grpo" else [], key=itemgetter("group")):
            keys, rows = zip(*((prompt_key(row["prompt"]), row["completion"]) for row in group), strict=True)
            saved.append((keys[0], records[0]["step"], list(rows)))
    wanted = {key for key, *_ in saved}
    examples = {key: row for row in data if (key := prompt_key(row["prompt"])) in wanted}
    found = [group for group in saved if group[0] in examples and len(group[2]) == len(saved[-1][2])]
    if not found:
        raise ValueError(
            f"--rollouts={path}: of {len(saved)} groups of GRPO in it none has a prompt of the data; give "
            "--dataset and --prompt_column of the run"
        )
    size = len(found[0][2])
    picked = np.linspace(0, len(found) - 1, min(limit or -(-256 // size), len(found))).round().astype(int)
    line = f"{len(picked)} groups of {size} completions, steps {found[0][1]} to {found[-1][1]}"
    if len(saved) > len(found):
        line += f"; left out: {len(saved) - len(found)} saved groups whose prompts are not in the data"
    return [(examples[found[i][0]], found[i][2]) for i in picked], line


def lint_rollouts(
    functions: list[Callable], weights: list[float], groups: list[tuple[dict, list]], config
) -> tuple[list[str], list[str]]:
    """Return the lines of a table and the worst example of each of its rows, and the flags.

    groups  (example, G completions);  config  a GRPOConfig, for the baseline and scale of advantages

    The best completions of a function are those with its most points: golds only if these get more than all
    others. A function is judged by answers if another answer lowers its points in half of the cases; the
    total always is. Shares are means over groups. The advantage is the mean of the changed completions, each
    alone in its group (a gold in place of the first).
    """
    texts = [[*siblings, completions_of(example).get("gold", "")] for example, siblings in groups]
    examples, prompts = [example for example, _ in groups], [as_text(e["prompt"]) for e, _ in groups]
    truths = ["".join(as_texts(example.get("answer"))[:1]) for example in examples]
    truths = [extract_boxed(truth) or truth for truth in truths]
    answers = [                                           # of each group, the data's first
        list(filter(None, [truth, *(split_at_answer(text_of(text), truth)[2] for text in row[:-1])]))
        for row, truth in zip(texts, truths, strict=True)
    ]
    boxed = any("\\boxed" in text for text in (*prompts, *(text_of(t) for row in texts for t in row[:-1])))
    changes = [                                           # P * (G + 1)
        changes_of(text_of(text), prompts[p], truths[p], chain(*answers[p + 1 :], *answers[:p]),
                   "".join(answers[p]), boxed)
        for p, row in enumerate(texts) for text in row
    ]
    failures: dict[str, str] = {}

    def score(change: str) -> dict[str, np.ndarray]:
        """Return points (P, G + 1) of each function and the total, NaN where the change changes nothing."""
        new = [found.get(change) for found in changes]
        pairs = zip(chain(*texts), new, strict=True)
        total, points, failed = score_texts(functions, weights, [with_text(*pair) for pair in pairs], examples)
        for f in reversed(failed):
            failures[f["function"]] = f"{f['function']} failed on {f['completion']!r:.60}: {f['error']}"
        same = torch.tensor([bool(change) and text is None for text in new]).view_as(total)
        points = points | {"the total": total}
        return {name: values.masked_fill(same, torch.nan).numpy() for name, values in points.items()}

    def advantage(change: str, p: int, g: int) -> float:
        """Return the advantage of a changed completion in its group."""
        rewards = torch.tensor(before["the total"][:, :-1])
        g, rewards[p, g % rewards.shape[1]] = g % rewards.shape[1], after[change]["the total"][p, g]
        return float(compute_group_advantages(rewards, baseline=config.baseline, scale=config.scale)[p, g])

    before = score("")
    after = {change: score(change) for change in dict.fromkeys(chain(*changes))}
    table, worst, flags = ["| points | change | at fault | completions | advantage |", "|---" * 5 + "|"], [], []
    for name in list(before)[: None if len(functions) > 1 else 1]:
        points = before[name]
        every = np.stack([points, *(found[name] for found in after.values())])
        if name in failures or np.isnan(points).all() or np.nanmax(every) - np.nanmin(every) < EPSILON:
            flags.append(failures.get(name, f"{name} gives the same points, or none, to every completion"))
            continue
        saved = np.arange(points.shape[1]) < points.shape[1] - 1                 # (G + 1,), not the gold
        best = points >= np.nanmax(points) - EPSILON
        if not (best & saved).any():
            worst.append(f"{name}: no completion has as many points as golds, which are changed in their place")
        best &= saved | ~(best & saved).any()
        lowered = (after.get("other answer", before)[name] - points)[best]
        lowered = lowered[~np.isnan(lowered)] < -EPSILON
        by_answer = name == "the total" or len(functions) == 1 or lowered.sum() * 2 >= len(lowered) > 0
        wrong, anything = saved & ~best, saved & (points == points)
        for tier, cases in list(zip(TIERS, (best, wrong, anything, best), strict=True))[0 if by_answer else 2 :]:
            phrase, names, sign, limit = tier
            kinds = []
            for change in filter(after.get, names):
                gain = sign * (after[change][name] - points)                     # (P, G + 1)
                counted, fault = cases & ~np.isnan(gain), cases & (gain > limit)
                if not fault.any():
                    continue
                kinds.append(f"`{change}`")
                by_group = zip(fault, counted, strict=True)
                share = estimate_mean(np.array([at[of].mean() for at, of in by_group if of.any()]))
                mean = np.mean([advantage(change, *place) for place in np.argwhere(fault)])
                table.append(
                    f"| `{name}` | {phrase.format(kinds[-1])} | {share['mean']:.0%} [{share['low']:.0%}, "
                    f"{share['high']:.0%}] | {fault.sum()} of {counted.sum()} | {mean:+.2f} |"
                )
                row = np.where(fault, gain, -np.inf).argmax()
                old, new = points.flat[row], after[change][name].flat[row]
                worst.append(f"{name}, {change}: {old:g} -> {new:g} points: {changes[row][change]!r:.200}")
            if kinds:
                flags.append(f"{name} gives {phrase.format(', '.join(kinds))}")
    return [*table, "", *worst], flags
