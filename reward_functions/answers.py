"""
Helpers of the reward functions: the text of a completion, the tagged answer in it, and equality of answers.

The expected form is <reasoning>...</reasoning><answer>...</answer>. A model may print anything, so nothing
here raises, and two unreadable answers are not equal.
"""

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

SECONDS_PER_PATTERN = 1.0       # of processor time, for a regular expression of the user and one text
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def text_of(completion) -> str:
    """Return the text of a completion: a string, or the content of the last chat message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def is_missing(value) -> bool:
    """Check for None, blank text and NaN. Of a NaN in the column `answer` data.py makes the text "nan"."""
    return value is None or (isinstance(value, str | float) and str(value).strip() in ("", "nan"))


def as_texts(value) -> list[str]:
    """Return a list of the data as texts: [] if it is missing; a single text or number is a list of one."""
    single = isinstance(value, str | dict) or not hasattr(value, "__iter__")
    return list(map(str, [value] if single else value)) if not is_missing(value) else []


def score_each(points: Callable, completions, *columns) -> list[float | None]:
    """Return points(text, *values) for each completion and its columns, None where a value is missing."""
    return [
        None if any(map(is_missing, values)) else points(text_of(completion), *values)
        for completion, *values in zip(completions, *columns, strict=True)
    ]


def extract_answer(text: str) -> str | None:
    """Return the text between <answer> and </answer>; None unless exactly one such pair exists, not empty.

    Several answers count as none, because listing all candidates would score otherwise.
    """
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    single = text.count("<answer>") == text.count("</answer>") == 1
    return answer.strip() or None if closed and single else None


def extract_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, None without one."""
    *before, last = re.split(r"\\boxed\s*\{", text)
    depth = 1
    for end, character in enumerate(last if before else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return last[:end].strip() or None
    return None


def same_answer(given: str | None, truth) -> bool:
    """Compare two answers as numbers, or as text without regard to case and surrounding space. The truth may
    be a list, of which any may be given.
    """
    if isinstance(truth, list):
        return any(same_answer(given, one) for one in truth)
    if given is None or is_missing(truth):
        return False
    truth = str(truth)
    given_number, true_number = as_number(given), as_number(truth)
    if given_number is not None and true_number is not None:
        return given_number == true_number
    return given.strip().casefold() == truth.strip().casefold()


def as_number(text: str) -> Decimal | None:
    """Parse '1,234', '$72', '72.0', '5 %' exactly; None for anything else, such as '1,2345' and 'NaN'."""
    cleaned = text.strip().lstrip("$€£").rstrip("%. ")
    if not re.fullmatch(r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?", cleaned):
        return None
    try:
        return Decimal(cleaned.replace(",", ""))
    except InvalidOperation:
        return None


def matches(function: Callable, *arguments, otherwise: bool) -> bool:
    """Return True if a function of the package regex, such as search, finds a match; `otherwise` after
    SECONDS_PER_PATTERN: there are expressions that take exponential time on some texts.
    """
    try:
        return function(*arguments, timeout=SECONDS_PER_PATTERN) is not None
    except TimeoutError:
        return otherwise


def extract_block(text: str, language: str) -> str:
    """Return the last fenced block of a language, in the tagged answer if there is one, else in the whole
    text; without a block, all of that.

    extract_block("So:\\n```python\\nx = 1\\n```", "python") == "x = 1\\n"
    """
    text = extract_answer(text) or text
    return (re.findall(rf"```(?:{language})?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE) or [text])[-1]
