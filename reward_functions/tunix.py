"""
The four rewards of tunix's GSM8K example, for comparison.

Kept to the letter, with what is questionable about them: 5 of the 9.5 points are for form, a wrong number scores below
silence, being near counts, and check_numbers reads neither a minus sign nor "1,234".
"""

import math
import re

from reward_functions.answers import TAGS, text_of


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
