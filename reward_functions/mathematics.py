"""
Reward function for mathematical equality, by the package math-verify, in the sandbox: an answer may make it hang.
"""

import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor

from reward_functions.answers import extract_answer, same_answer, text_of
from reward_functions.sandbox import run_python


SECONDS_PER_ANSWER = 3          # for reading two expressions and comparing them
ANSWERS_AT_ONCE = 16            # in one process


# ---- mathematics ---------------------------------------------------------------------------------------------------

COMPARE = '''
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


def math_equality(completions, answer, **columns) -> list[float | None]:
    """1 point if the answer equals the column `answer` as mathematics, by the package math-verify, else 0; None where the
    data has no answer. What correctness finds equal is equal; an answer that takes more than a few seconds to compare is not.

    The answer is the tagged one, or where nothing is tagged the only \\\\boxed{...}.

    math_equality(["<answer>1/2</answer>", "so \\\\boxed{0.5}"], answer=["\\\\frac{1}{2}"] * 2) == [1.0, 1.0]
    """
    given = [final_answer(text_of(completion)) for completion in completions]
    truths = [None if truth is None else str(truth) for truth in answer]
    equal = {(g, t): True for g, t in zip(given, truths, strict=True) if same_answer(g, t)}
    unclear = {(g, t) for g, t in zip(given, truths, strict=True) if g and t and as_latex(g) and as_latex(t)} - set(equal)
    equal |= compare(unclear)
    return [None if t is None else float(equal.get((g, t), False)) for g, t in zip(given, truths, strict=True)]


def compare(pairs: set[tuple[str, str]]) -> dict[tuple[str, str], bool]:
    """Which pairs of expressions are equal, some in one process. One that the process dies on is not, and the rest go on."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError("math_equality needs a package that is not there: pip install math-verify")

    def some(left: list[tuple[str, str]]) -> dict:
        equal: dict = {}
        while left:
            code = COMPARE.format(pairs=[tuple(map(as_latex, pair)) for pair in left], seconds=SECONDS_PER_ANSWER)
            seconds = 3.0 * SECONDS_PER_ANSWER + 1
            done = run_python(code, timeout_s=seconds, memory_mb=1024, modules=("math_verify",)).stdout.split()
            equal |= {pair: verdict == "1" for pair, verdict in zip(left, done, strict=False)}
            left = left[len(done) + 1 :]
        return equal

    ordered = sorted(pairs)
    parts = [ordered[i : i + ANSWERS_AT_ONCE] for i in range(0, len(ordered), ANSWERS_AT_ONCE)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return {pair: verdict for part in threads.map(some, parts) for pair, verdict in part.items()}


def as_latex(text: str) -> str | None:
    """An answer as LaTeX. Of plain text math-verify takes the last number, so that "18 or 19" would be 19. Units after a
    number are left out. None for words, whose letters would be multiplied: dog is not god.

    as_latex("18 dollars") == as_latex("$18") == "$18$";  as_latex("dog") is None
    """
    text = re.sub(r"(?<=\d)(\s+[A-Za-z]{3,})+\.?$", "", text.strip()).strip("$")
    return None if re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text) else f"${text}$"


def final_answer(text: str) -> str | None:
    """The tagged answer, or where nothing is tagged what stands in the only \\boxed{...}."""
    if "<answer>" in text or text.count("\\boxed{") != 1:
        return extract_answer(text)
    start, depth = text.index("\\boxed{") + len("\\boxed{"), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip() or None
    return None
