"""
Reward function for mathematical equality, by the package math-verify. It runs in the sandbox: an answer may
make it hang.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from reward_functions.answers import extract_boxed
from reward_functions.sandbox import run_python, usable_cores
from rewards import extract_answer, is_missing, same_answer, text_of

SECONDS_PER_ANSWER = 3          # for parsing two expressions, and for comparing them
ANSWERS_PER_PROCESS = 16
LONGEST_ANSWER = 1000           # in characters; longer ones are compared as text
SANDBOX = dict(memory_mb=1024, modules=("math_verify",))
TEXT = r"\\(?:text\w*|mbox)\s*\{([^{}]*)\}"
WORDS = re.compile(r"[A-Za-z $]*[A-Za-z]{2}[A-Za-z $.]*")
UNIT = r"""(?xi: dollar|cent|euro|second|sec|minute|min|hour|hr|day|week|month|year|yr|inch|in|foot|feet|ft
    |yard|mile|mi|(kilo|centi|milli)?(gram|(met|lit)(er|re))|[kcm]m|[km]g|ml|acre|gallon|quart|pint|cup
    |ounce|oz|pound|lb|ton|mph|degree|radian|celsius|fahrenheit|percent|calorie|people|person|student
    |children|piece|item|page|book|point|time|way|integer|digit|unit)(e?s)?|[mghslLCF]"""
PHRASE = rf"((square|sq|cubic|per|{UNIT})(\^[23]|[²³])?[ ./]+)*({UNIT})"       # "square feet", "km/h"
IN_LATEX = rf"\\(text\w*|mbox|mathrm) ?\{{ ?{PHRASE} ?\}}"
UNITS = rf"( |(?![A-Za-z]\b))({IN_LATEX}|{PHRASE})(\^\{{?[23]\}}?|[²³])?$"     # after a number


def math_equality(completions, answer, **columns) -> list[float | None]:
    """Give 1 point if the answer is mathematically equal to the column `answer`, by the package math-verify,
    else 0; None where the data has no answer. Equal according to same_answer counts as equal; comparing
    longer than a few seconds, as unequal.

    The answer is the tagged one, or in a text without tags the only \\\\boxed{...}; of a list in the column
    `answer` any may be given, of a text there the last \\\\boxed{...} counts.

    math_equality(["<answer>1/2</answer>", "so \\\\boxed{0.5}"], answer=["\\\\frac{1}{2}"] * 2) == [1.0, 1.0]
    {"prompt": "What is 3/4 - 1/4?", "answer": "1/2"}
    """
    given = [final_answer(text_of(completion)) for completion in completions]
    rows = [truth if isinstance(truth, list) else [truth] for truth in answer]
    truths = [[extract_boxed(str(one)) or str(one) for one in row if one is not None] for row in rows]
    pairs = {(g, truth) for g, row in zip(given, truths, strict=True) for truth in row if g}
    equal = {pair: same_answer(*(re.sub(TEXT, r"\1", one).strip(" $") for one in pair)) for pair in pairs}
    unread = {pair for pair in pairs if not all(map(as_latex, pair)) or all(map(WORDS.fullmatch, pair))}
    equal |= compare_in_sandbox(sorted(pair for pair in pairs - unread if not equal[pair]))
    found = [{equal.get((g, one), False) for one in row} for g, row in zip(given, truths, strict=True)]
    return [
        None if is_missing(truth) else float(True in row) for row, truth in zip(found, answer, strict=True)
    ]


def final_answer(text: str) -> str | None:
    """Return the tagged answer, without a \\boxed{...}; in a text without tags the only \\boxed{...}."""
    tagged = extract_answer(text)
    answer = tagged if "<answer>" in text else text
    return extract_boxed(answer) if answer and answer.count("\\boxed") == 1 else tagged


def as_latex(text: str) -> str | None:
    """Return an answer as LaTeX, without UNITS after a number; None for other words and for long texts.

    as_latex("18 dollars") == as_latex("18 \\\\text{ dollars}") == as_latex("$18") == "$18$"
    as_latex("dog") is as_latex("18 million") is None
    """
    if len(text) > LONGEST_ANSWER:
        return None
    text = re.sub(r"\\?\$|(?<!\\)\\[()\[\] ,;:]|~|°|\\degree|\^\{?\\circ\}?", " ", text).strip(" €£")
    text = re.sub(rf"((?<=[\d)}}])|(?<=\\pi)){UNITS}", "", " ".join(text.removesuffix(".").split()))
    text = re.sub(r"\b(\d+) (\d+)/(\d+)\b", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d) ?_", "b_", text)        # math-verify would ignore the base of 18_{8}
    rest = re.sub(r"\\(begin|end)\{\w+\}|\\text\{ *(and|or) *\}|sqrt(?=\()", "", text)
    unreadable = rf"(?<![\\A-Za-z])[A-Za-z]{{3,}}|{TEXT}|(?<!frac )(?<!_)\d \d"
    return None if re.search(unreadable, rest) else f"${text}$"         # "dog" would equal "god", "1 8" 9


# Prints a line for each pair. By default math-verify reads "\neq 18" as 18, and "less" and "c" as units.
COMPARE_TEMPLATE = '''
import logging
from math_verify import parser, verify
logging.disable()
tex = parser.LatexExtractionConfig(normalization_config=parser.NormalizationConfig(malformed_operators=True))
for given, truth in {pairs!r}:
    try:
        truth, given = (parser.parse(text, [tex], parsing_timeout={seconds}) for text in (truth, given))
        equal = verify(truth, given, timeout_seconds={seconds})
    except Exception:
        equal = False
    print(int(equal), flush=True)
'''


def compare_in_sandbox(pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Return whether the expressions of each pair are equal. Several are compared in one process: a pair that
    ends it is unequal, and the rest follow in a new process.
    """
    check_sandbox()

    def compare(left: list[tuple[str, str]]) -> None:
        while left:
            latex = [tuple(map(as_latex, pair)) for pair in left]
            code = COMPARE_TEMPLATE.format(pairs=latex, seconds=SECONDS_PER_ANSWER)
            lines = run_python(code, timeout_s=3 * SECONDS_PER_ANSWER + 1, **SANDBOX).stdout.split() or "0"
            equal.update((pair, line == "1") for pair, line in zip(left, lines, strict=False))
            left = left[len(lines) :]            # again, unless it had all the time for itself

    equal: dict[tuple[str, str], bool] = {}
    chunks = [pairs[i : i + ANSWERS_PER_PROCESS] for i in range(0, len(pairs), ANSWERS_PER_PROCESS)]
    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(compare, chunks))
    return equal


@cache
def check_sandbox() -> None:
    """Raise ModuleNotFoundError if math-verify does not work in the sandbox."""
    code = "from math_verify import parse, verify\nassert verify(parse('$x+x$'), parse('$2x$'))"
    result = run_python(code, timeout_s=60.0, **SANDBOX)
    if not result.ok:
        reason = result.stderr.strip().rpartition("\n")[2] or result.reason
        raise ModuleNotFoundError(f"math-verify does not work in the sandbox ({reason}); pip install it")
