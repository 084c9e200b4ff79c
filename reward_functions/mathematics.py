"""Mathematical equality: the package math-verify, in the sandbox, because an answer may make it hang."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

from reward_functions.sandbox import run_python, usable_cores
from rewards import (
    after_thoughts, extract_answer, extract_boxed, is_missing, normalize, same_answer, score_each)

LONGEST_TEXT = 1000             # in characters: the beginning of an answer, or the end of a text without one
SECONDS_PER_ANSWER = 3          # for parsing two expressions, and for comparing them
SANDBOX = dict(memory_mb=1024, modules=("math_verify",))
AROUND = re.compile(r"^[*`\s]+|((?<=\d) +(?!pi\b)[A-Za-z]{2}[A-Za-z /]*)?[*`.\s]*$")
COMPARE_TEMPLATE = '''
import logging
from math_verify import parse, verify
logging.disable()
for given, truths in {pairs!r}:
    try:
        given, *truths = (parse(text, parsing_timeout={seconds}) for text in (given, *truths))
        options = dict(timeout_seconds={seconds}, allow_set_relation_comp=True)
        print(int(any(verify(truth, given, **options) for truth in truths)), flush=True)
    except Exception:
        print(0, flush=True)
'''


def math_equality(completions, answer, **columns) -> list[float | None]:
    """Return 1 if the answer equals the column `answer` by same_answer or by math-verify, else 0. The column
    may hold a list of right answers; of a text in it, the last box counts.

    The answer is that of extract_answer or, in a text without tags and boxes, what math-verify finds, such as
    the last formula.

    math_equality(["<answer>1/2</answer>", "so \\\\boxed{0.5}"], answer=["\\\\frac{1}{2}"] * 2) == [1.0, 1.0]
    {"prompt": "What is 3/4 - 1/4?", "answer": "1/2"}
    """
    def prepare(text: str, truth) -> bool | tuple[str, tuple[str, ...]]:
        cells = truth if isinstance(truth, list) else [truth]
        truths = [extract_boxed(str(cell)) or str(cell) for cell in cells if not is_missing(cell)]
        given, text = extract_answer(text), after_thoughts(text)
        if same_answer(given, truths):
            return True
        if given is None and "answer>" in text:           # no, or several tagged answers
            return False
        read = in_box(given[:LONGEST_TEXT]) if given else text[-LONGEST_TEXT:]
        return read, tuple(map(in_box, truths))

    rows = score_each(prepare, completions, answer)       # True, False, what math-verify compares, or None
    pairs = sorted({row for row in rows if isinstance(row, tuple)})
    check_sandbox()
    equal = {True: 1.0, False: 0.0, None: None} | dict(zip(pairs, compare_in_sandbox(pairs), strict=True))
    return list(map(equal.get, rows))


def in_box(answer: str) -> str:
    """Return an answer in a box, without emphasis, full stop, and unit, whose letters would be factors."""
    return rf"\boxed{{{AROUND.sub('', normalize(answer))}}}"


def compare_in_sandbox(pairs: list[tuple[str, tuple[str, ...]]]) -> list[float]:
    """Return 1 where a text equals one of several others. A pair that ends its process is unequal."""
    def compare(left: list) -> list[float]:
        code = COMPARE_TEMPLATE.format(pairs=left, seconds=SECONDS_PER_ANSWER)
        lines = run_python(code, timeout_s=3 * SECONDS_PER_ANSWER + 1, **SANDBOX).stdout.split() or ["0"]
        rest = left[len(lines) :]                         # for a new process
        return [*map(float, lines), *(compare(rest) if rest else [])]

    with ThreadPoolExecutor(usable_cores()) as threads:
        return list(chain(*threads.map(compare, [pairs[i : i + 16] for i in range(0, len(pairs), 16)])))


@cache
def check_sandbox() -> None:
    """Raise ModuleNotFoundError if math-verify does not work in the sandbox."""
    result = run_python("import math_verify", timeout_s=60.0, **SANDBOX)
    if not result.ok:
        raise ModuleNotFoundError(f"math-verify does not work in the sandbox: {result.reason}; install it")
