"""
Heuristics of style. A policy can maximise each of them with useless text, so give them a small weight beside
a function that checks the answer, and read completions.
"""

import itertools
import re

from reward_functions.answers import as_texts
from rewards import score_each, text_of, words_of


def repetition_penalty(completions, **columns) -> list[float]:
    """Return -1 to 0: minus the fraction of runs of four of words_of that occurred earlier in the text.

    repetition_penalty(["a b c d e", "a b a b a b"]) == [0.0, -1 / 3]
    """
    rewards = []
    for text in map(text_of, completions):
        words = words_of(text.casefold())
        distinct = set(zip(*(words[i:] for i in range(4)), strict=False))
        rewards.append(len(distinct) / (len(words) - 3) - 1 if distinct else 0.0)
    return rewards


def diversity(completions, prompts=None, **columns) -> list[float | None]:
    """Return 0 to 1: 1 minus the mean Jaccard index of a completion's word pairs with those of its siblings,
    the other completions of the same prompt; None without siblings. Random text gets the maximum.

    diversity(["a b", "a b", "c d"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    """
    words = [words_of(text_of(completion).casefold()) for completion in completions]
    pairs = [set(itertools.pairwise(text)) or set(text) for text in words]
    prompts = prompts or [""] * len(completions)
    rewards: list[float | None] = []
    for row, prompt in enumerate(prompts):
        siblings = [pairs[i] for i, other in enumerate(prompts) if other == prompt and i != row]
        both = ((pairs[row] & sibling, pairs[row] | sibling) for sibling in siblings)
        overlaps = [len(shared) / len(either) if either else 1.0 for shared, either in both]
        rewards.append(1 - sum(overlaps) / len(overlaps) if overlaps else None)
    return rewards


def safety(completions, forbidden, **columns) -> list[float | None]:
    """Return 1 if none of the regular expressions in the column `forbidden` matches, ignoring case, else 0;
    None without a list. Such a list misses context and other spellings.

    safety(["rm -rf /", "ls"], forbidden=[[r"rm\\s+-rf"]] * 2) == [0.0, 1.0]
    {"prompt": "How do I empty the folder build?", "forbidden": ["rm +-rf", "sudo"]}
    """
    def reward(text: str, rules) -> float:
        return float(not any(re.search(rule, text, re.IGNORECASE) for rule in as_texts(rules)))

    return score_each(reward, completions, forbidden)
