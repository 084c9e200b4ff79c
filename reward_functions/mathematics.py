"""
Reward function for mathematical equality, by the package math-verify. It runs in the sandbox: an answer may
make it hang.
"""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor

from reward_functions.answers import extract_answer, same_answer, text_of
from reward_functions.sandbox import run_python

SECONDS_PER_ANSWER = 3          # for parsing two expressions, and for comparing them
ANSWERS_PER_PROCESS = 16


def math_equality(completions, answer, **columns) -> list[float | None]:
    """Give 1 point if the answer is mathematically equal to the column `answer`, by the package math-verify,
    else 0; None where the data has no answer. Equal according to same_answer counts as equal; comparing
    longer than a few seconds counts as unequal.

    The answer is the tagged one, or in a text without tags the only \\\\boxed{...}.

    math_equality(["<answer>1/2</answer>", "so \\\\boxed{0.5}"], answer=["\\\\frac{1}{2}"] * 2) == [1.0, 1.0]
    """
    given = [final_answer(text_of(completion)) for completion in completions]
    pairs = [(g, None if truth is None else str(truth)) for g, truth in zip(given, answer, strict=True)]
    equal = {pair: True for pair in pairs if same_answer(*pair)}
    readable = {pair for pair in pairs if all(text and as_latex(text) for text in pair)}
    equal |= compare_in_sandbox(readable - set(equal))
    return [None if pair[1] is None else float(equal.get(pair, False)) for pair in pairs]


def final_answer(text: str) -> str | None:
    """Return the tagged answer, or in a text without tags the content of the only \\boxed{...}."""
    if "<answer>" in text or text.count("\\boxed{") != 1:
        return extract_answer(text)
    start, depth = text.index("\\boxed{") + len("\\boxed{"), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip() or None
    return None


def as_latex(text: str) -> str | None:
    """Return an answer as LaTeX, without units after a number; None for words.

    In plain text math-verify would read the last number only ("18 or 19" as 19), and would multiply the
    letters of words ("dog" would equal "god").

    as_latex("18 dollars") == as_latex("$18") == "$18$";  as_latex("dog") is None
    """
    text = re.sub(r"(?<=\d)(\s+[A-Za-z]{3,})+\.?$", "", text.strip()).strip("$")
    return None if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text) else f"${text}$"


# Runs in the sandbox and prints a line for each pair.
COMPARE_TEMPLATE = '''
import logging
from math_verify import parse, verify
logging.disable()
for given, truth in {pairs!r}:
    try:
        truth, given = (parse(text, parsing_timeout={seconds}) for text in (truth, given))
        equal = verify(truth, given, timeout_seconds={seconds})
    except Exception:
        equal = False
    print(int(equal), flush=True)
'''


def compare_in_sandbox(pairs: set[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Compare pairs of expressions, several in one process. A pair that ends the process is unequal; the rest
    follow in a new process.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError("math_equality needs another package: pip install math-verify")

    def compare(left: list[tuple[str, str]]) -> dict:
        equal: dict = {}
        options = dict(timeout_s=3.0 * SECONDS_PER_ANSWER + 1, memory_mb=1024, modules=("math_verify",))
        while left:
            latex = [tuple(map(as_latex, pair)) for pair in left]
            code = COMPARE_TEMPLATE.format(pairs=latex, seconds=SECONDS_PER_ANSWER)
            lines = run_python(code, **options).stdout.split()
            equal |= {pair: line == "1" for pair, line in zip(left, lines, strict=False)}
            left = left[len(lines) + 1 :]
        return equal

    ordered = sorted(pairs)
    chunks = [ordered[i : i + ANSWERS_PER_PROCESS] for i in range(0, len(ordered), ANSWERS_PER_PROCESS)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return {pair: equal for chunk in threads.map(compare, chunks) for pair, equal in chunk.items()}
