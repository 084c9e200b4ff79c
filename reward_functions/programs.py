"""
Reward function for programs, run against tests in the sandbox (reward_functions/sandbox.py).

Needs Linux; where no isolation method works it raises a RuntimeError that states what is missing.
"""

import ast
import builtins
import secrets
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

from reward_functions.answers import extract_block, text_of
from reward_functions.sandbox import run_python, usable_cores

SECONDS_PER_TEST = 3.0          # for the program itself and one test
SECONDS_PER_PROGRAM = 10.0      # for one program with all its tests
SECONDS_PER_BATCH = 120.0       # for all programs together, and one more for each, divided by the cores
EXECUTORS = {"eval", "exec", "compile", "load", "loads", "Unpickler", "timeit"}     # run what they are given


def passes_tests(completions, tests, **columns) -> list[float | None]:
    """Give 0 to 1 point: the fraction of its tests that the program in a completion passes; None where there
    are no tests, or one that is not an assert statement about the program, and where the time of the batch is
    over. Programs that hang cost SECONDS_PER_PROGRAM.

    tests    a column: per row a list of assert statements as strings; each may begin with imports
    program  the last ```python block, in the tagged answer if there is one, else in all of the text; without
             a block, that text

    tests = ["assert double(2) == 4", "assert double(-1) == 1"]
    passes_tests(["def double(x):\\n    return 2 * x"], tests=[tests]) == [0.5]
    {"prompt": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double(-1) == -2"]}

    The expected values are never in the program's process. `assert abs(double(2) - 4) < 1e-9` is split:
    double(2) is evaluated in one process after the program has run, and `abs(_ - 4) < 1e-9` in another one,
    which receives nothing from the program but the value of double(2), parsed as a literal. So the program
    cannot influence the comparison: exiting early, printing, patching builtins, reading frames or memory, or
    an object that equals everything can only lose points.

    A test that hands a value to eval, exec or a load function would run it beside the comparison: a warning
    says so, and there is no score. Compare the value itself, or use ast.literal_eval or json.loads.

    Not prevented: a program that knows the expected values from the prompt; guessing among few possible
    values (`assert is_even(4)`); tests that leave the comparison to the program (`assert Point(1) ==
    Point(1)`: an expression that begins with a capitalised name is evaluated in its process as a whole).
    Values are numbers, text, bytes, None, and lists, tuples, sets and dicts of them. Subclasses count as
    these, other iterables as lists; anything else fails the test, including infinity and NaN. Only the
    standard library is available.
    """

    def score(completion, row: list[str] | None) -> float | None:
        parts = [split_test(test) for test in row or []]
        if not parts or None in parts or time.monotonic() > deadline:
            return None
        return fraction_passed(extract_block(text_of(completion), "python|py"), parts)

    cores = usable_cores()
    deadline = time.monotonic() + SECONDS_PER_BATCH + len(completions) / cores
    with ThreadPoolExecutor(cores) as threads:
        return list(threads.map(score, completions, tests))


def fraction_passed(program: str, tests: list[tuple[str, list[str], str]]) -> float:
    """Evaluate each test's expressions in a process of its own, then run all assertions in another."""
    assertions, deadline = [], time.monotonic() + SECONDS_PER_PROGRAM
    for assertion, expressions, imports in tests:
        code = PROGRAM_TEMPLATE.format(program=program, imports=imports, expressions=expressions)
        left = deadline - time.monotonic()
        if left > 0 and (result := run_python(code, timeout_s=min(left, SECONDS_PER_TEST))).ok:
            assertions.append((secrets.token_hex(16), f"{imports}\n{assertion}", result.stdout))
    if not assertions:
        return 0.0
    result = run_python(ASSERTION_TEMPLATE.format(assertions=assertions), timeout_s=SECONDS_PER_TEST)
    return len({token for token, *_ in assertions} & set(result.stdout.split())) / len(tests)


# Runs the program, then prints the values of the expressions as literals of plain types. The program's own
# output goes to stderr.
PROGRAM_TEMPLATE = '''
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
output = os.dup(1)
os.dup2(2, 1)
space = {{"__name__": "program"}}
exec(compile({program!r}, "program.py", "exec"), space)
exec({imports!r}, space)
os.write(output, repr([plain(eval(expression, space)) for expression in {expressions!r}]).encode())
'''


# Runs the assertions, and prints the tokens of those that hold. Nothing in this process comes from the
# program but the literals, and the program does not know the tokens.
ASSERTION_TEMPLATE = '''
import ast
for token, assertion, values in {assertions!r}:
    try:
        exec(assertion, {{"_values": ast.literal_eval(values)}})
        print(token, flush=True)
    except BaseException:
        pass
'''


def split_test(test: str) -> tuple[str, list[str], str] | None:
    """Split a test into an assertion on values, the expressions for them, and imports; None if it cannot
    be split.

    split_test("assert abs(f(2) - 4) < 1e-9") == ("assert abs(_values[0] - 4) < 1e-09", ["f(2)"], "")
    """
    try:
        *imports, statement = ast.parse(test.strip()).body
    except (SyntaxError, ValueError, AttributeError):
        return None
    are_imports = all(isinstance(line, ast.Import | ast.ImportFrom) for line in imports)
    if not isinstance(statement, ast.Assert) or not are_imports:
        return None
    imported = {(alias.asname or alias.name).partition(".")[0] for line in imports for alias in line.names}
    # Variables of a comprehension or a lambda: expressions with them would be evaluated once per value.
    nodes = list(ast.walk(statement))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    extractor = ExtractExpressions(imported | bound | set(dir(builtins)))
    comparison = extractor.visit(ast.Assert(statement.test))
    if executes_answers(comparison, bound | {"_values"}, imports):
        warnings.warn(
            "passes_tests: no score for a test that hands the program's answer to a function which runs it: "
            f"{test!r:.200}. Compare the answer itself, or use ast.literal_eval or json.loads.", stacklevel=2,
        )
        return None
    assertion = ast.unparse(comparison)
    nodes = [node for expression in extractor.expressions for node in ast.walk(ast.parse(expression))]
    if not extractor.expressions or bound & {node.id for node in nodes if isinstance(node, ast.Name)}:
        return None
    return assertion, extractor.expressions, "\n".join(map(ast.unparse, imports))


def executes_answers(comparison: ast.AST, variables: set[str], imports: list[ast.stmt]) -> bool:
    """Return whether one of the EXECUTORS is in a comparison, but to be called without the variables."""
    names = EXECUTORS | {a.asname for line in imports for a in line.names if a.name in EXECUTORS}
    nodes = list(ast.walk(comparison))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    harmless = [call.func for call in calls if not variables & {getattr(n, "id", "") for n in ast.walk(call)}]
    return any(
        getattr(node, "id", getattr(node, "attr", "")) in names and node not in harmless
        and not ast.unparse(node).startswith(("json.load", "re.")) for node in nodes
    )


class ExtractExpressions(ast.NodeTransformer):
    """Replace each expression whose value only the program knows by _values[i], and keep its source text.

    These are calls of the program's functions, its variables, and, if the name begins with a capital, the
    whole expression on that class (Stack().push(1).size).
    """

    def __init__(self, known: set[str]):
        self.known, self.expressions = known, []

    def visit(self, node: ast.AST) -> ast.AST:
        root = called = node
        while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
            root = root.func if isinstance(root, ast.Call) else root.value
        while isinstance(called, ast.Call):
            called = called.func
        unknown = isinstance(root, ast.Name) and root.id not in self.known
        if unknown and (called is root or root.id[0].isupper()):
            self.expressions.append(ast.unparse(node))
            return ast.parse(f"_values[{len(self.expressions) - 1}]", mode="eval").body
        return self.generic_visit(node)
