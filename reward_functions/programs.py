"""
Reward function for programs: run in the sandbox (reward_functions/sandbox.py) against tests, so that they can neither harm this process nor keep
it waiting.

Needs Linux; where nothing can be contained it raises a RuntimeError that says what is missing.
"""

import ast
import builtins
import os
from concurrent.futures import ThreadPoolExecutor

from reward_functions.answers import payload, text_of
from reward_functions.sandbox import run_python

SECONDS_PER_TEST = 3.0          # for the program itself and one test


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
