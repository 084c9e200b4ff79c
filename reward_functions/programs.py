"""The reward function for programs, which runs their tests in the sandbox (reward_functions/sandbox.py)."""

import ast
import builtins
import functools
import re
import secrets
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

from reward_functions.answers import answer_text, as_texts, fenced_blocks
from reward_functions.sandbox import run_python, usable_cores
from rewards import text_of

SECONDS_PER_TEST = 3.0          # for the program itself and one test
SECONDS_PER_PROGRAM = 10.0      # for one program with all its tests
CONVERSIONS = {                 # of a value, which a test may make
    "bool", "dict", "float", "frozenset", "int", "len", "list", "round", "set", "sorted", "str", "sum",
    "tuple",
}
# A name that a line without indentation defines, and such a line that does something else.
DEFINED = re.compile(r"^(?:(?:async )?def +|class +|(?=\w+ *=))(\w+)", re.MULTILINE)
STATEMENT = re.compile(r"^(?!(?:async )?def |class |import |from )[^@#)\]}'\"\s]", re.MULTILINE)
FORMS = "asserts of the forms CALL, CALL == VALUE, not CALL, abs(CALL - VALUE) < EPS or isclose(CALL, VALUE)"


def passes_tests(completions, tests, **columns) -> list[float | None]:
    """Return 0 to 1: the fraction of the tests that the program in a completion passes; None where there are
    no tests, or where a test has another form (a warning names it).

    tests    a column: assert statements that may follow imports, a list of texts or one text, of the forms
             CALL, not CALL, CALL == VALUE (or < and so on), abs(CALL - VALUE) < EPS, math.isclose(CALL,
             VALUE), where CALL calls a function of the program, f(1), or is a conversion of that, set(f(1))
    program  the fenced Python blocks of the answer, as program_of chooses them; without blocks, its text

    passes_tests(["def f(x):\\n    return x"], tests=[["assert f(4) == 4", "assert f(-1) == 1"]]) == [0.5]
    {"prompt": "Write a function double(x).", "tests": ["assert double(2) == 4", "assert double(-1) == -2"]}

    CALL is evaluated in the program's process, and the rest in another one, which receives only its value as
    JSON: printing, patching builtins, or an object that equals everything can only lower the reward.
    """

    def score(program: str, parts: list[list | None]) -> float | None:
        return None if not parts or None in parts else fraction_passed(program, list(chain(*parts)))

    parts = [list(map(split_tests, as_texts(row))) for row in tests]
    calls = [{call for part in row if part for _, call, _ in part} for row in parts]
    programs = list(map(program_of, map(text_of, completions), calls))
    with ThreadPoolExecutor(usable_cores()) as threads:
        return list(threads.map(score, programs, parts))


def program_of(text: str, calls: set[str]) -> str:
    """Return the program in a completion: of its blocks, the last one that defines each name in the calls,
    and those that only define and import, but no example or earlier attempt. Without such names, all blocks.
    """
    names = set(re.findall(r"\w+", " ".join(calls)))
    blocks = fenced_blocks(text, r"python|py\b") or [answer_text(text)]
    last = {name: i for i, block in enumerate(blocks) for name in names.intersection(DEFINED.findall(block))}
    chosen = [block for i, block in enumerate(blocks) if i in last.values() or not STATEMENT.search(block)]
    return "\n".join(chosen if last else blocks)


def fraction_passed(program: str, tests: list[tuple[str, str, str]]) -> float:
    """Evaluate the call of each test in a process of its own, then run all assertions in another."""
    asserted, deadline = [], time.monotonic() + SECONDS_PER_PROGRAM
    for assertion, call, imports in tests:
        code, left = PROGRAM_TEMPLATE.format(program, call, imports), deadline - time.monotonic()
        if left > 0 and (result := run_python(code, timeout_s=min(left, SECONDS_PER_TEST))).ok:
            asserted.append((secrets.token_hex(16), assertion, result.stdout))
    if not asserted:
        return 0.0
    result = run_python(ASSERTION_TEMPLATE.format(asserted), timeout_s=SECONDS_PER_TEST)
    return len({token for token, *_ in asserted} & set(result.stdout.split())) / len(tests)


# Runs the program, then prints the value of the call as JSON; {"tuple": [[1, 2]]} stands for tuple([1, 2]),
# {"object": []} for an instance of a class. The program's own output goes to stderr.
PROGRAM_TEMPLATE = '''
import json, os, sys
def plain(value):
    if value is None or isinstance(value, (int, float, str)):
        return value
    if type(value).__name__ in ("Decimal", "Fraction"):
        return {{type(value).__name__: [str(value)]}}
    if isinstance(value, complex):
        return {{"complex": [value.real, value.imag]}}
    try:
        items = list(map(plain, value.items() if isinstance(value, dict) else value))
    except TypeError:
        return {{"object": []}}
    kinds = dict, tuple, set, frozenset, bytes
    return next(({{kind.__name__: [items]}} for kind in kinds if isinstance(value, kind)), items)

output, space = os.dup(1), {{"__name__": "program"}}
os.dup2(2, 1)
exec({2!r}, space)
exec(compile({0!r}, "program.py", "exec"), space)
exec({2!r}, space)
sys.set_int_max_str_digits(0)
os.write(output, json.dumps(plain(eval({1!r}, space))).encode())
'''


# Runs the assertions, and prints the tokens of those that hold. Nothing in this process comes from the
# program but JSON and instances of the classes below, and the program does not know the tokens.
ASSERTION_TEMPLATE = '''
import contextlib, json, math, sys
from decimal import Decimal
from fractions import Fraction
sys.set_int_max_str_digits(0)
kinds = bytes, complex, dict, frozenset, object, set, tuple, Decimal, Fraction
kinds = {{kind.__name__: kind for kind in kinds}}
def decode(value):
    return next(kinds[name](*given) for name, given in value.items())
for token, assertion, value in {0!r}:
    with contextlib.suppress(BaseException):
        value = json.loads(value, object_hook=decode)
        exec(assertion, {{"math": math, "isclose": math.isclose, "_value": value}})
        print(token, flush=True)
'''


@functools.cache
def split_tests(text: str) -> list[tuple[str, str, str]] | None:
    """Split each assert statement of a text into an assertion on _value, the CALL for it, and the imports.
    Return None if the text has another form, with a warning.

    split_tests("assert abs(f(2) - 4) < 1e-9") == [("assert abs(_value - 4) < 1e-09", "f(2)", "")]
    """
    with suppress(SyntaxError, ValueError, RecursionError):
        statements = ast.parse(text.strip()).body
        imports = [one for one in statements if isinstance(one, ast.Import | ast.ImportFrom)]
        names = {name.asname or name.name for line in imports for name in line.names}
        modules = {getattr(line, "module", "") or name.name for line in imports for name in line.names}
        known = all(module.partition(".")[0] in sys.stdlib_module_names for module in modules)
        asserts = [take_call(one, names) for one in statements if one not in imports]
        if asserts and known and "*" not in names:
            return [(*parts, ast.unparse(ast.Module(imports, []))) for parts in asserts]
    warnings.warn(f"passes_tests: no score for rows with the test {text!r:.200}: not {FORMS}", stacklevel=2)
    return None


def take_call(statement: ast.stmt, imported: set[str]) -> tuple[str, str]:
    """Return the assertion with _value in place of CALL, and CALL. Raise ValueError for another form.

    VALUE has no imported names but math: an instance of another class would equal nothing that JSON can hold.
    """
    value = ast.Name("_value")
    match statement:
        case ast.Assert(ast.Call(ast.Name("isclose") | ast.Attribute(_, "isclose"), [call, *_]) as test):
            test.args[0] = value
        case ast.Assert(ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(call, ast.Sub()) as difference]))):
            difference.left = value
        case ast.Assert(ast.Compare(call) as test):
            test.left = value
        case ast.Assert(ast.UnaryOp(ast.Not(), call) as test):
            test.operand = value
        case ast.Assert(call):
            statement.test = value
        case _:
            raise ValueError
    inner, known = call, {*dir(builtins), "math", "isclose", "_value"}
    while isinstance(inner, ast.Call) and getattr(inner.func, "id", "") in CONVERSIONS and inner.args:
        inner = inner.args[0]
    others = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} - known
    match inner:
        case ast.Call(ast.Name(name)) if not others and name not in known | imported:
            return ast.unparse(statement), ast.unparse(call)
    raise ValueError
