"""
Reward function for programs, run against tests in the sandbox (reward_functions/sandbox.py).

Needs Linux; where no isolation method works it raises a RuntimeError that states what is missing.
"""

import ast
import builtins
import functools
import secrets
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from reward_functions.answers import as_texts, extract_block
from reward_functions.sandbox import run_python, usable_cores
from rewards import text_of

SECONDS_PER_TEST = 3.0          # for the program itself and one test
SECONDS_PER_PROGRAM = 10.0      # for one program with all its tests
EXECUTORS = {"eval", "exec", "compile", "load", "loads", "Unpickler", "timeit"}     # run what they are given
# What a test may use without an import: modules, if before a dot, and names of modules.
MODULES = {"asyncio", "cmath", "collections", "functools", "inspect", "itertools", "json", "math", "re"}
NAMES = dict(Counter="collections", OrderedDict="collections", deque="collections", Decimal="decimal",
             Fraction="fractions", isclose="math", date="datetime", datetime="datetime", timedelta="datetime")
# Called in the program's process if the first argument or a keyword is its function or its object.
TAKE_OBJECTS = {"abs", "bool", "callable", "filter", "float", "getattr", "hasattr", "inspect", "int", "len",
                "isinstance", "islice", "issubclass", "map", "next", "reduce", "repr", "run", "sorted", "str"}
METHODS = {name for kind in (str, bytes, list, dict, set, float, complex) for name in dir(kind)}


def passes_tests(completions, tests, **columns) -> list[float | None]:
    """Give 0 to 1 point: the fraction of its tests that the program in a completion passes; None where there
    are no tests, or one that cannot be judged (docs/rewards.md; a warning names it).

    tests    a column: per row assert statements that may follow imports: a list of texts, or one text
    program  the last ```python block, in the tagged answer if there is one, else in all of the text; without
             a block, that text

    tests = ["assert double(2) == 4", "assert double(-1) == 1"]
    passes_tests(["def double(x):\\n    return 2 * x"], tests=[tests]) == [0.5]
    {"prompt": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double(-1) == -2"]}

    The expected values are never in the program's process. Of `assert abs(double(2) - 4) < 1e-9` it evaluates
    double(2), and another process, which receives nothing but this value as JSON, `abs(_ - 4) < 1e-9`. So
    exiting early, printing, patching builtins, or an object that equals everything can only lose points. Not
    prevented: knowing the expected values from the prompt, or guessing among few (`assert is_even(4)`).
    """

    def score(completion, parts: list[tuple | None]) -> float | None:
        judged = parts and None not in parts
        return fraction_passed(extract_block(text_of(completion), "python3?|py"), parts) if judged else None

    parts = [[split_or_warn(test) for text in as_texts(row) for test in single_tests(text)] for row in tests]
    with ThreadPoolExecutor(usable_cores()) as threads:
        return list(threads.map(score, completions, parts))


def fraction_passed(program: str, tests: list[tuple[str, list[str], str]]) -> float:
    """Evaluate each test's expressions in a process of its own, then run all assertions in another."""
    asserted, deadline = [], time.monotonic() + SECONDS_PER_PROGRAM
    for assertion, expressions, imports in tests:
        code = PROGRAM_TEMPLATE.format(program, expressions, imports, NAMES)
        left = deadline - time.monotonic()
        if left > 0 and (result := run_python(code, timeout_s=min(left, SECONDS_PER_TEST))).ok:
            asserted.append((secrets.token_hex(16), assertion, result.stdout))
    if not asserted:
        return 0.0
    result = run_python(ASSERTION_TEMPLATE.format(asserted, NAMES), timeout_s=SECONDS_PER_TEST)
    return len({token for token, *_ in asserted} & set(result.stdout.split())) / len(tests)


# Runs the program, then prints the values of the expressions as JSON, compressed; {"tuple": [[1, 2]]} stands
# for tuple([1, 2]). The program's own output goes to stderr.
PROGRAM_TEMPLATE = '''
import collections, json, os, sys, zlib
def plain(value):
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, complex):
        return {{"complex": [value.real, value.imag]}}
    try:
        items = list(map(plain, value.items() if isinstance(value, dict) else value))
    except TypeError:
        name = type(value).__name__
        return {{name: plain([*value.__reduce__()[1]])}} if name in {3!r} else {{"object": []}}
    kinds = dict, tuple, set, frozenset, bytes, bytearray, collections.deque
    return next(({{kind.__name__: [items]}} for kind in kinds if isinstance(value, kind)), items)

output, space, imported = os.dup(1), {{"__name__": "program"}}, {{}}
os.dup2(2, 1)
sys.set_int_max_str_digits(0)
exec({2!r}, space)
exec(compile({0!r}, "program.py", "exec"), space)
exec({2!r}, imported)
values = json.dumps([plain(eval(expression, space, imported)) for expression in {1!r}])
os.write(output, zlib.compress(values.encode()).hex().encode())
'''


# Runs the assertions, and prints the tokens of those that hold. Nothing in this process comes from the
# program but JSON and instances of the classes below, and the program does not know the tokens.
ASSERTION_TEMPLATE = '''
import contextlib, json, sys, zlib
sys.set_int_max_str_digits(0)
modules = dict.fromkeys("bytearray bytes complex dict frozenset object set tuple".split(), "builtins") | {1!r}
def decode(value):
    return next(getattr(__import__(modules[name]), name)(*given) for name, given in value.items())
for token, assertion, values in {0!r}:
    with contextlib.suppress(BaseException):
        exec(assertion, {{"_values": json.loads(zlib.decompress(bytes.fromhex(values)), object_hook=decode)}})
        print(token, flush=True)
'''


@functools.cache
def single_tests(text: str) -> list[str]:
    """Return the assert statements in a text, or in a list written as text, each after the imports."""
    with suppress(SyntaxError, ValueError, RecursionError):
        if text.lstrip().startswith("["):
            return [test for part in ast.literal_eval(text.strip()) for test in single_tests(str(part))]
        statements = ast.parse(text.strip()).body
        asserts = [one for one in statements if isinstance(one, ast.Assert)]
        imports = [one for one in statements if one not in asserts]
        return [ast.unparse(ast.Module([*imports, one], [])) for one in asserts[1:] and asserts] or [text]
    return [text]


@functools.cache
def split_or_warn(test: str) -> tuple[str, list[str], str] | None:
    """Return split_test(test), or None if it cannot be judged, with a warning, once for each test."""
    try:
        return split_test(test)
    except (SyntaxError, ValueError, RecursionError) as reason:
        warnings.warn(f"passes_tests: no score for rows with the test {test!r:.200}: {reason}", stacklevel=2)


def split_test(test: str) -> tuple[str, list[str], str]:
    """Split a test into an assertion on values, the expressions for them, and imports.

    split_test("assert abs(f(2) - 4) < 1e-9") == ("assert abs(_values[0] - 4) < 1e-09", ["f(2)"], "")
    """
    *imports, statement = ast.parse(test.strip()).body or [None]
    if not isinstance(statement, ast.Assert) or {*map(type, imports)} - {ast.Import, ast.ImportFrom}:
        raise ValueError("it is not an assert statement after imports")
    aliases = [(getattr(line, "module", "") or name.name, name) for line in imports for name in line.names]
    imported = {(name.asname or name.name).partition(".")[0] for _, name in aliases}
    if "*" in imported or {module.partition(".")[0] for module, _ in aliases} - sys.stdlib_module_names:
        raise ValueError("it imports *, or from outside of the standard library")
    nodes = list(ast.walk(statement.test))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - imported - bound - set(dir(builtins))
    dotted = {getattr(node.value, "id", "") for node in nodes if isinstance(node, ast.Attribute)}
    modules = {name for name in names & dotted if not name[0].isupper()}
    if modules - MODULES:
        raise ValueError(f"{min(modules - MODULES)} is not an imported module")
    library = names & set(NAMES) if names - modules - set(NAMES) else set()     # alone, it is the program's
    imports = [*map(ast.unparse, imports), *(f"import {name}" for name in modules)]
    imports += [f"from {NAMES[name]} import {name}" for name in library]
    executors = EXECUTORS | {name.asname for _, name in aliases if name.name in EXECUTORS}
    extractor = ExtractExpressions(names - modules - library, bound, executors)
    comparison = extractor.visit(ast.Assert(statement.test))
    asked = {getattr(node, "id", "") for text in extractor.expressions for node in ast.walk(ast.parse(text))}
    compared = {getattr(node, "id", getattr(node, "arg", "")) for node in ast.walk(comparison)}
    if not asked or bound & asked & compared:
        raise ValueError("it asks the program for nothing, or for each value of its own variable")
    return "\n".join([*imports, ast.unparse(comparison)]), extractor.expressions, "\n".join(imports)


class ExtractExpressions(ast.NodeTransformer):
    """Replace each expression whose value only the program knows by _values[i], and keep its source text:
    variables, calls, attributes and methods of objects, and all of one on a class (Stack().push(1).size).
    """

    def __init__(self, names: set[str], bound: set[str], executors: set[str]):
        self.names, self.bound, self.executors, self.expressions = names, bound, executors, []

    def root(self, node: ast.AST) -> str:
        """Return the name of the program that an expression depends on, or ""."""
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.BinOp):
            taken = isinstance(node, ast.Call) and TAKE_OBJECTS & {*ast.unparse(node.func).split(".")}
            given = [*node.args[:1], *(keyword.value for keyword in node.keywords)] if taken else []
            node = next(filter(self.is_whole, given), next(ast.iter_child_nodes(node)))
        return node.id if isinstance(node, ast.Name) and node.id in self.names else ""

    def is_whole(self, node: ast.AST) -> bool:
        """Return True if the program's process evaluates all of an expression."""
        if isinstance(node, ast.UnaryOp | ast.ListComp | ast.SetComp | ast.GeneratorExp):
            return self.is_whole(getattr(node, "elt", None) or node.operand)
        root, method = self.root(node), getattr(getattr(node, "func", None), "attr", "")
        # Methods of text and collections are called on the value: their arguments may be expected values.
        on_value = method in METHODS and (node.args or method in ("keys", "values", "items"))
        on_value = (on_value or isinstance(node, ast.Subscript)) and not root[:1].isupper()
        return root != "" and not on_value and not isinstance(node, ast.BinOp)

    def visit(self, node: ast.AST) -> ast.AST:
        if self.is_whole(node):
            self.expressions.append(ast.unparse(node))
            return ast.parse(f"_values[{len(self.expressions) - 1}]", mode="eval").body
        executor = getattr(node, "id", getattr(node, "attr", "")) in self.executors
        if executor and not ast.unparse(node).startswith(("json.load", "re.")):
            raise ValueError("it hands the program's answer to a function which runs it")
        if isinstance(node, ast.Call):
            if not (self.names | self.bound) & {getattr(part, "id", "") for part in ast.walk(node)}:
                return node
            self.generic_visit(node.func)                       # the object of a method, not the method
        node = self.generic_visit(node)
        operands = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        values = ["_values[" in ast.unparse(part) for part in operands[isinstance(node, ast.Call):]]
        if isinstance(node, ast.Call | ast.BinOp | ast.Compare) and len(values) > 1 and all(values):
            raise ValueError("it compares values of the program with nothing but each other")
        of_variable = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in self.bound
        if of_variable and node.attr not in METHODS:
            raise ValueError("it asks for an attribute of its own variable")
        return node
