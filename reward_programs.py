"""
Reward functions that run something: the programs in completions, and a library for mathematics that could hang on an answer.
Both happen in the sandbox (sandbox.py), so neither can harm this process or keep it waiting.

They need Linux; where nothing can be contained they raise a RuntimeError that says what is missing.
"""

import ast
import builtins
import importlib.util
import os
import re
from concurrent.futures import ThreadPoolExecutor

from reward_library import extract_answer, payload, same_answer, text_of
from sandbox import run_python

SECONDS_PER_TEST = 3.0          # for the program itself and one test
SECONDS_PER_ANSWER = 3          # for reading two expressions and comparing them
ANSWERS_AT_ONCE = 16            # in one process


# ---- programs ------------------------------------------------------------------------------------------------------

# The program's process. What the program prints goes to stderr, the answers to stdout, as literals of plain types.
ASK = '''
def plain(value):
    if value is None:
        return None
    for kind in (bool, int, float, complex, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {{plain(key): plain(item) for key, item in value.items()}}
    kind = next((kind for kind in (tuple, set, frozenset) if isinstance(value, kind)), list)
    return {{frozenset: set}}.get(kind, kind)(map(plain, value))

import os
answers = os.dup(1)
os.dup2(2, 1)
space = {{"__name__": "program"}}
exec(compile({program!r}, "program.py", "exec"), space)
exec({imports!r}, space)
os.write(answers, repr([plain(eval(question, space)) for question in {questions!r}]).encode())
'''

# The judge's process, in which nothing comes from the program but those literals.
JUDGE = '''
import ast
for test, answers in {tests!r}:
    try:
        exec(test, {{"_answers": ast.literal_eval(answers)}})
        print("passed", flush=True)
    except BaseException:
        pass
'''


def passes_tests(completions, tests, **columns) -> list[float | None]:
    """0 to 1 point: the share of its tests that the program in a completion passes; None where there are no tests, or one
    that is not an assert statement about the program.

    tests    per row a list of assert statements as strings; each may begin with imports
    program  the last ```python block in the tagged answer, if there is one, or in all of the text; without a block, that

    passes_tests(["def double(x):\\n    return 2 * x"], tests=[["assert double(2) == 4", "assert double(-1) == 1"]]) == [0.5]

    The program never learns what is expected of it. `assert abs(double(2) - 4) < 1e-9` is taken apart: double(2) is evaluated
    in a process of its own after the program has run, and `abs(_ - 4) < 1e-9` in another one, where nothing of the program is
    but the value of double(2), read as a literal. So no verdict is within the program's reach. Ending early, printing,
    patching builtins, reading frames or memory, or an object that equals everything can only lose points.

    Not excluded: a program that knows the right values (from the prompt, or from a file, where the sandbox is down to
    `user` and the kernel has no Landlock); guessing where there is little to guess (`assert is_even(4)`); tests that hand the
    comparison to the program (`assert Point(1, 2) == Point(1, 2)`: what begins with a capital is evaluated there whole).
    Values are plain: numbers, text, bytes, None, and lists, tuples, sets and dicts of them. Subclasses count as these, other
    iterables as lists; anything else fails the test, and so do infinity and NaN. The standard library is all there is.
    """

    def score(completion, row: list[str] | None) -> float | None:
        taken_apart = [take_apart(test) for test in row or []]
        if not taken_apart or None in taken_apart:
            return None
        return share_passed(payload(text_of(completion), "python|py"), taken_apart)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(score, completions, tests))


def share_passed(program: str, tests: list[tuple[str, list[str], str]]) -> float:
    """Ask a program every test's questions, each in a new process, then have the answers judged."""
    answered = []
    for judgement, questions, imports in tests:
        asked = run_python(
            ASK.format(program=program, imports=imports, questions=questions), timeout_s=SECONDS_PER_TEST
        )
        if asked.ok:
            answered.append((f"{imports}\n{judgement}", asked.stdout))
    if not answered:
        return 0.0
    judged = run_python(JUDGE.format(tests=answered), timeout_s=SECONDS_PER_TEST)
    return judged.stdout.count("passed\n") / len(tests)


def take_apart(test: str) -> tuple[str, list[str], str] | None:
    """A test -> what is judged, what the program is asked for it, and imports. None if it cannot be taken apart.

    take_apart("assert abs(f(2) - 4) < 1e-9") == ("assert abs(_answers[0] - 4) < 1e-09", ["f(2)"], "")
    """
    try:
        *imports, claim = ast.parse(test.strip()).body
    except (SyntaxError, ValueError, AttributeError):
        return None
    if not isinstance(claim, ast.Assert) or not all(isinstance(line, ast.Import | ast.ImportFrom) for line in imports):
        return None
    imported = {(alias.asname or alias.name).partition(".")[0] for line in imports for alias in line.names}
    # Variables of a comprehension or a lambda: the program would have to be asked once for each value.
    bound = {node.id for node in ast.walk(claim) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(claim) if isinstance(node, ast.arg)}
    taker = TakeQuestions(imported | bound | set(dir(builtins)))
    judgement = ast.unparse(taker.visit(ast.Assert(claim.test)))
    names = {node.id for question in taker.questions for node in ast.walk(ast.parse(question)) if isinstance(node, ast.Name)}
    if not taker.questions or names & bound:
        return None
    return judgement, taker.questions, "\n".join(map(ast.unparse, imports))


class TakeQuestions(ast.NodeTransformer):
    """Puts _answers[i] where only the program knows the value: a call of its function, a variable, or, where the name begins
    with a capital, everything that is done with the class (Stack().push(1).size). The questions are kept as source text.
    """

    def __init__(self, known: set[str]):
        self.known, self.questions = known, []

    def visit(self, node: ast.AST) -> ast.AST:
        root = called = node
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        while isinstance(called, ast.Call):
            called = called.func
        if isinstance(root, ast.Name) and root.id not in self.known and (called is root or root.id[0].isupper()):
            self.questions.append(ast.unparse(node))
            return ast.parse(f"_answers[{len(self.questions) - 1}]", mode="eval").body
        return self.generic_visit(node)


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
