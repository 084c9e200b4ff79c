"""
The four rewards of tunix's GSM8K example, reproduced exactly, for comparison: 5 of the maximum of 9.5 are for
the format, a wrong number gets less than an empty completion, near misses get a small reward, and
check_numbers parses neither a minus sign nor "1,234".
"""

import math
import re

from rewards import TAGS, score_each, text_of


def match_format_exactly(completions, **columns) -> list[float]:
    """Return 3 if the tags occur in order anywhere (at a line's end the last one is optional), else 0."""
    return [0.0 if find_answer(text_of(completion)) is None else 3.0 for completion in completions]


def find_answer(text: str) -> str | None:
    """Return the group of <reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$), in linear time."""
    reasoning = text.partition("<reasoning>")[2]
    rest = reasoning[1:].partition("</reasoning>")[2].partition("<answer>")[2]
    match = re.match(r"(.+?)(?:</answer>|$)", rest, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def match_format_approximately(completions, **columns) -> list[float]:
    """Return -2 to 2: for each of the four tags 0.5 if it occurs exactly once, else -0.5."""
    return [sum(0.5 if text_of(c).count(tag) == 1 else -0.5 for tag in TAGS) for c in completions]


def check_answer(completions, answer, **columns) -> list[float | None]:
    """Return 3 if the answer equals the column `answer`, 0.5 within 10 %, 0.25 within 20 %, -0.5 for text, -1
    otherwise, 0 without an answer.

    {"prompt": "47+85=?", "answer": "132"}
    """

    def reward(text: str, truth) -> float:
        guess = find_answer(text)
        if guess is None:
            return 0.0
        guess, truth = guess.strip().replace(",", ""), str(truth).strip().replace(",", "")
        if guess == truth:
            return 3.0
        guess_number, true_number = read_float(guess), read_float(truth)
        if guess_number is None or true_number is None:
            return -0.5
        if guess_number == true_number:
            return 3.0
        ratio = guess_number / true_number if true_number else math.inf
        return 0.5 if 0.9 <= ratio <= 1.1 else 0.25 if 0.8 <= ratio <= 1.2 else -1.0

    return score_each(reward, completions, answer)


def check_numbers(completions, answer, **columns) -> list[float | None]:
    """Return 1.5 if the first digits and dots after <answer> equal the column `answer`, else 0.

    {"prompt": "47+85=?", "answer": "132"}
    """

    def reward(text: str, truth) -> float:
        match = re.search(r"[\d.]+", text.partition("<answer>")[2])
        guess, truth = read_float(match[0]) if match else None, read_float(str(truth).replace(",", ""))
        return 1.5 if guess is not None and guess == truth else 0.0

    return score_each(reward, completions, answer)


def read_float(text: str) -> float | None:
    """Parse a finite float; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
