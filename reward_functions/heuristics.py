"""
Heuristics of style, each of which a policy can please without being any good.

Give them a small weight beside a function that knows what is right, and look at completions.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable

from reward_functions.answers import text_of


# ---- what a text is like: heuristics, each of which a policy can please without being any good ------------------------
# Give them a small weight beside a function that knows what is right, and look at completions.


def repetition_penalty(completions, **columns) -> list[float]:
    """-1 to 0 points: minus the share of runs of four words that stood in the text before. A heuristic: synonyms slip through.

    repetition_penalty(["a b c d e", "a b a b a b"]) == [0.0, -1 / 3]
    """
    points = []
    for text in map(text_of, completions):
        words = text.casefold().split()
        runs = list(zip(*(words[i:] for i in range(4)), strict=False))
        points.append(len(set(runs)) / len(runs) - 1 if runs else 0.0)
    return points


def diversity(completions, prompts=None, **columns) -> list[float | None]:
    """0 to 1 point: 1 minus what a completion has in common with a sibling, on average: word pairs in both / in either.
    Siblings answer the same prompt. None for a completion without any. A heuristic: noise is as diverse as can be.

    diversity(["a b", "a b", "c d"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    """
    words = [text_of(completion).casefold().split() for completion in completions]
    pairs = [set(itertools.pairwise(text)) or set(text) for text in words]
    groups = defaultdict(list)
    for row, prompt in enumerate(prompts or [""] * len(completions)):
        groups[str(prompt)].append(row)
    points: list[float | None] = [None] * len(completions)
    for rows in groups.values():
        for row in rows if len(rows) > 1 else []:
            shared = [overlap(pairs[row], pairs[sibling]) for sibling in rows if sibling != row]
            points[row] = 1 - sum(shared) / len(shared)
    return points


def overlap(left: set, right: set) -> float:
    """Jaccard's index: elements in both / in either, 0 to 1. Two empty sets are the same."""
    return len(left & right) / len(left | right) if left | right else 1.0


def safety(completions, forbidden, **columns) -> list[float | None]:
    """1 point if none of the regular expressions in the column `forbidden` is found, in any case, else 0; None without a
    list. A heuristic: a list of words knows neither context nor spelling, and an empty completion is perfectly safe.

    safety(["rm -rf /", "ls"], forbidden=[[r"rm\\s+-rf"]] * 2) == [0.0, 1.0]
    """
    return [
        None if rules is None else float(not any(re.search(rule, text_of(completion), re.IGNORECASE) for rule in rules))
        for completion, rules in zip(completions, forbidden, strict=True)
    ]


def rule_list(name: str, rules: dict[str, float]) -> Callable:
    """A reward function of that name out of regular expressions, for a file of your own: the sum of the points of those that
    are found, in any case. A heuristic, as good as the list.

    polite = rule_list("polite", {r"\\bplease\\b": 0.5, r"\\bstupid\\b": -1.0});  polite(["Stupid, please"]) == [-0.5]
    """
    compiled = [(re.compile(rule, re.IGNORECASE), float(points)) for rule, points in rules.items()]

    def function(completions, **columns) -> list[float]:
        return [sum((p for rule, p in compiled if rule.search(text_of(c))), 0.0) for c in completions]

    function.__name__ = name
    return function
