"""
The four rewards of tunix's GSM8K example, for comparison.

Reproduced exactly, including properties that are questionable: 5 of the 9.5 points are for the format, a
wrong number scores below an empty completion, near misses get points, and check_numbers parses neither a
minus sign nor "1,234".
"""

import math
import re

from rewards import TAGS, score_each, text_of


def match_format_exactly(completions, **columns) -> list[float]:
    """Give 3 points if the tags occur in order anywhere, the last one optional at a line's end; else 0."""
    return [0.0 if find_answer(text_of(completion)) is None else 3.0 for completion in completions]


def find_answer(text: str) -> str | None:
    """Return the group of <reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$), in linear time."""
    reasoning = text.partition("<reasoning>")[2]
    rest = reasoning[1:].partition("</reasoning>")[2].partition("<answer>")[2]
    match = re.match(r"(.+?)(?:</answer>|$)", rest, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def match_format_approximately(completions, **columns) -> list[float]:
    """Give -2 to 2 points: 0.5 for each of the four tags that occurs exactly once, else -0.5."""
    return [sum(0.5 if text_of(c).count(tag) == 1 else -0.5 for tag in TAGS) for c in completions]


def check_answer(completions, answer, **columns) -> list[float | None]:
    """Give 3 if it is the column `answer`, 0.5 within 10 %, 0.25 within 20 %, -0.5 for text, -1 otherwise, 0
    without an answer.

    {"prompt": "47+85=?", "answer": "132"}
    """

    def points(text: str, truth) -> float:
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
        if true_number == 0:
            return -1.0
        ratio = guess_number / true_number
        return 0.5 if 0.9 <= ratio <= 1.1 else 0.25 if 0.8 <= ratio <= 1.2 else -1.0

    return score_each(points, completions, answer)


def check_numbers(completions, answer, **columns) -> list[float | None]:
    """Give 1.5 points if the first digits and dots after <answer> are the column `answer`, else 0.

    {"prompt": "47+85=?", "answer": "132"}
    """

    def points(text: str, truth) -> float:
        match = re.search(r"[\d.]+", text.partition("<answer>")[2])
        guess, truth = read_float(match[0]) if match else None, read_float(str(truth).replace(",", ""))
        return 1.5 if guess is not None and guess == truth else 0.0

    return score_each(points, completions, answer)


def read_float(text: str) -> float | None:
    """Parse a finite float; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
