"""Programs are scored by the tests they pass, and programs that cheat get nothing."""

import re
import sys
import time
import warnings

import pytest
from conftest import read_programs

from reward_functions import programs, sandbox
from reward_functions.programs import passes_tests

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_process_is_left")


@pytest.fixture(autouse=True)
def tests_are_new():
    programs.split_or_warn.cache_clear()


TESTS = ["assert square(3) == 9", "assert square(-4) == 16", "assert abs(square(0.5) - 0.25) < 1e-9"]

HONEST = {
    "plain": ("def square(x):\n    return x * x", 1.0),
    "in a block": ("Here:\n```python\ndef square(x):\n    return x * x\n```\nDone.", 1.0),
    "the last block counts": ("```python\nraise\n```\nBetter:\n```py\ndef square(x): return x * x\n```", 1.0),
    "in the answer": ("<reasoning>easy</reasoning><answer>```python\nsquare = lambda x: x * x\n```</answer>", 1.0),
    "prints a lot": ("def square(x):\n    print('passed\\n' * 99)\n    return x * x", 1.0),
    "main block": ("def square(x): return x * x\nif __name__ == '__main__':\n    input('number? ')", 1.0),
    "only positive": ("def square(x):\n    assert x >= 0\n    return x * x", 2 / 3),
    "hangs on one": ("def square(x):\n    while x < 0: pass\n    return x * x", 2 / 3),
    "leaves on one": ("import os\ndef square(x):\n    return x * x if x > 0 else os._exit(0)", 2 / 3),
    "subclass": ("class I(float): pass\ndef square(x): return I(x * x)", 1.0),
    "wrong": ("def square(x): return x + x", 0.0),
    "no such function": ("def cube(x): return x ** 3", 0.0),
    "not a program": ("The square of x is x times x.", 0.0),
    "nothing": ("", 0.0),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_share_of_tests_that_pass(name, monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    program, points = HONEST[name]
    assert passes_tests([program], [TESTS]) == pytest.approx([points])


@pytest.mark.parametrize("tests", [
    "assert square(3) == 9\nassert square(-4) == 9", "assert square(3) == 9; assert square(-4) == 9",
    "import math\nassert square(math.pi) > 9\n\nassert square(-4) == math.pi", '["assert square(3) == 9", "assert square(-4) == 9"]',
    "['assert square(3) == 9', 'assert square(-4) == 9']", ' ["import math\\nassert square(math.pi) > 9", "assert square(-4) == \\"9\\""]\n',
    ["assert square(3) == 9\nassert square(-4) == 9"],
])
def test_tests_may_be_one_text(tests):
    assert passes_tests([HONEST["plain"][0], HONEST["wrong"][0]], [tests] * 2) == [0.5, 0.0]


@pytest.mark.parametrize("tests", ["x = 3\nassert square(x) == 9\nassert square(x) == 8", "[assert square(3) == 9]", "[1]", "[]", "def check(f):\n    assert f(1) == 1"])
def test_texts_that_are_no_tests_are_not_scored(tests):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert passes_tests([HONEST["plain"][0]], [tests]) == [None]


CHEATS = read_programs("cheating_programs.txt") | {
    "zero byte": "def square(x): return 0\x00",
    "lone surrogate": "def square(x): return '\ud800'",
}


def test_no_cheat_earns_anything(monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    monkeypatch.setattr(programs, "usable_cores", lambda: 8)       # some at once: they wait for their time to end
    points = passes_tests(list(CHEATS.values()), [TESTS] * len(CHEATS))
    assert dict(zip(CHEATS, points)) == dict.fromkeys(CHEATS, 0.0) and len(CHEATS) >= 40
    assert passes_tests([HONEST["plain"][0]], [TESTS]) == [1.0], "and the next program"


@pytest.mark.parametrize(
    "test,points",
    [
        ("assert f(2) == 4", 1.0),
        ("assert f(x=2) == 4 and f(3) != 4", 1.0),
        ("assert f(f(2)) == 8", 1.0),
        ("import math\nassert math.isclose(f(math.pi), 2 * math.pi)", 1.0),
        ("assert set(pairs([1, 2])) == {(1, 1), (2, 2)}", 1.0),
        ("assert counts('ab') == {'a': 1, 'b': 1}", 1.0),
        ("assert f(2) == eval('2 + 2')", 1.0),
        ("assert f(2) == eval('a + a', {'a': 2}) and exec('x = 1') is None", 1.0),
        ("import json\nassert json.loads(str(f(2))) == 4", 1.0),
        ("import re\nassert re.compile('4').match(str(f(2)))", 1.0),
        ("assert f(2) == 5", 0.0),
        ("assert 2 ** f(10 ** 10) == 0", 0.0),                     # the judge runs out of time
    ],
)
def test_a_test_is_taken_apart(test, points, monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    program = """
import collections
def f(x): return 2 * x
def pairs(items): return zip(items, items)
def counts(text): return collections.Counter(text)
"""
    assert passes_tests([program], [[test]]) == [points]


BOX = """
class Box:
    def __init__(self, x): self.x = self.title = x
    def size(self): return 3
    def push(self, y): self.x += y; return self
    def pop(self): return self.x
    def __len__(self): return 0
    def __str__(self): return f"<{self.x}>"
    def __add__(self, other): return Box(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
def f(x): return Box(x)
"""
ANY = """
class Any:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    def __getattr__(self, name): return lambda *_, **__: True
    def __len__(self): return 0
def f(x): return [Any()] if x else Any()
"""
COUNT = "from collections import Counter as C\ndef f(s): return C(s)"
IDENTITY = "def f(x): return x"

JUDGED = [
    # Modules and names of the standard library, without an import, and a program that defines them.
    ("import math as m\ndef area(r): return m.pi * r * r", "assert math.isclose(area(1), 3.14159, rel_tol=1e-3)", 1.0),
    ("def area(r): return 3", "assert math.isclose(area(1), 3.14159, rel_tol=1e-3)", 0.0),
    ("class math: isclose = lambda *_, **__: True\ndef area(r): return 3", "assert math.isclose(area(1), 3.14, rel_tol=1e-3)", 0.0),
    ("isclose = lambda *_, **__: True\ndef area(r): return 3", "assert isclose(area(1), 3.14159, rel_tol=1e-3)", 0.0),
    (COUNT, "assert f('aab') == collections.Counter('aab')", 1.0),
    ("Decimal = lambda x: 1\ndef f(x): return 0", "assert Decimal(f(1)) == Decimal('2')", 0.0),
    ("from decimal import Decimal\ndef f(x): return Decimal(2)", "assert Decimal(f(1)) == Decimal('2')", 1.0),
    ("import datetime\ndef f(d): return d + datetime.timedelta(1)", "from datetime import datetime\nassert f(datetime(2024, 2, 28)) == datetime(2024, 2, 29)", 1.0),
    # Objects: their attributes, methods and lengths are asked for in the program's process.
    (BOX, "assert f(1).x == 1 and f('a').title == 'a'", 1.0),
    (BOX, "assert f(1).size() == 3 and f(1).push(4).x == 5 and f(4).pop() == 4", 1.0),
    (BOX, "assert len(f(1)) == 0 and str(f(1)) == '<1>' and not f(1)", 1.0),
    (BOX, "assert isinstance(f(1), Box) and hasattr(f(1), 'x') and not isinstance(f(1), int)", 1.0),
    (BOX, "assert (Box(1) + Box(2)).x == 3", 1.0),
    ("def f(x): return {'a': x}", "assert f(1).keys() == {'a'} and f(1).get('a') == 1 and list(f(1).items()) == [('a', 1)]", 1.0),
    (ANY, "assert f(0).x == 1", 0.0),
    (ANY, "assert f(0).__eq__(4) is True", 0.0),
    (ANY, "assert 5 in f(0)", 0.0),
    (ANY, "assert all(map(lambda x: x == 4, f(1)))", 0.0),
    (ANY, "assert all(x == 4 for x in f(1))", 0.0),
    ("import builtins\nbuiltins.min = lambda *a: a[-1]\ndef f(x): return 0", "assert min(f(1), 4) == 4", 0.0),
    # Functions of the program, given to another function; iterators and coroutines.
    (IDENTITY, "assert callable(f) and list(map(f, [1, 2])) == [1, 2]", 1.0),
    ("f = 3", "assert callable(f)", 0.0),
    ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]", 1.0),
    ("async def f(x): return x", "assert asyncio.run(f(2)) == 2", 1.0),
    # Values that Python's literals leave out.
    ("def f(x): return [-x, (1, 2)]", "assert f(float('inf')) == [float('-inf'), (1, 2)]", 1.0),
    ("def f(x): return float('nan')", "assert math.isnan(f(1))", 1.0),
    ("def f(x): return float('nan')", "assert f(1) == 2 or f(1) < 2 or f(1) >= 2", 0.0),
    ("def f(x): return complex(x, 1)", "assert f(float('inf')) == complex(float('inf'), 1)", 1.0),
    ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000", 1.0),
    ("def f(n): return {(1, n): {n}, None: '\\ud800\\u20ac', True: [False]}", "assert f(2) == {(1, 2): {2}, None: '\\ud800\\u20ac', True: [False]}", 1.0),
    ("def f(n): return [(i, i) for i in range(n)]", "assert f(3000) == [(i, i) for i in range(3000)]", 1.0),
    # The text that comes from the program is data.
    ("import json\njson.dumps = lambda *_: '[{\"eval\": [\"print(1)\"]}]'\nf = lambda x: 1", "assert f(1) is None", 0.0),
    ("import json\njson.dumps = lambda *_: '[{\"dict\": []}]'\nf = lambda x: 1", "assert f(1) == {}", 1.0),
]


@pytest.mark.parametrize("program,test,points", JUDGED)
def test_what_can_be_judged_is_judged(program, test, points, recwarn):
    assert passes_tests([program], [[test]]) == [points] and not recwarn.list


NOT_JUDGED = [
    ("f(2) == 4", "not an assert statement"),
    ("assert (", "never closed"),
    ("", "not an assert statement"),
    (None, "not an assert statement"),
    ("assert abs(-1) == 1", "asks the program for nothing"),
    ("assert all(f(i) == i for i in range(3))", "each value of its own variable"),
    ("assert f(y := 2) == y", "each value of its own variable"),
    ("assert max([1, 2], key=lambda n: f(n)) == 2", "each value of its own variable"),
    ("assert [box.x for box in f(1)] == [1]", "attribute of its own variable"),
    ("assert f(1) == pytest.approx(2)", "pytest is not an imported module"),
    ("import math, numpy as np\nassert np.allclose(f(1), 2)", "outside of the standard library"),
    ("from math import *\nassert isclose(f(1), 2)", "imports *"),
    ("assert np.allclose(f(1), 2)", "np is not an imported module"),
    ("assert f(2) == sqrt(2)", "nothing but each other"),
    ("assert math.isclose(f(2), sqrt(2))", "nothing but each other"),
    ("assert Matrix(f(1)) == Matrix([2])", "nothing but each other"),
    ("assert f(1) == f(1)", "nothing but each other"),
]


@pytest.mark.parametrize("test,reason", NOT_JUDGED)
def test_what_cannot_be_judged_is_named_once_and_not_scored(test, reason):
    cheat = "f = sqrt = Matrix = Point = lambda *_: 0\nclass np: allclose = lambda *_: True"
    with pytest.warns(UserWarning, match=re.escape(reason)) as caught, warnings.catch_warnings():
        warnings.simplefilter("always")
        points = [passes_tests([cheat, "def f(x): return x"], [[test], ["assert f(1) == 0", test]]) for _ in range(2)]
    assert points == [[None, None]] * 2
    assert len(caught) == 1 and repr(str(test)) in str(caught[0].message)


def test_without_tests_there_is_no_score():
    assert passes_tests(["x = 1"] * 4, [None, [], float("nan"), ""]) == [None] * 4


def test_the_program_is_not_told_what_is_expected(monkeypatch):
    seen = []
    real = sandbox.run_python

    def spy(code, **options):
        seen.append(code)
        return real(code, **options)

    monkeypatch.setattr(programs, "run_python", spy)
    program = "def f(x): return x"
    passes_tests([program], [["assert f(12) == 987654321", "assert f(3) in {987654321, 3}"]])
    with_program = [code for code in seen if program in code]
    assert len(with_program) == 2 and len(seen) == 3
    assert not any("987654321" in code for code in with_program)


HANDED_OVER = [
    "assert eval(f(2)) == 4",
    "assert exec(f(2)) is None",
    "import pickle\nassert pickle.loads(f(2)) == 4",
    "import io, pickle\nassert pickle.load(io.BytesIO(f(2))) == 4",
    "import io, pickle\nassert pickle.Unpickler(io.BytesIO(f(2))).load() == 4",
    "from pickle import loads as read\nassert read(f(2)) == 4",
    "import builtins\nassert builtins.eval(f(2)) == 4",
    "assert list(map(eval, [f(2)])) == [4]",
    "assert [eval(text) for text in [f(2)]] == [4]",
    "assert (lambda run: run(f(2)))(eval) == 4",
    "assert (lambda text: eval(text))(f(2)) == 4",
    "assert (run := eval)(f(2)) == 4",
    "import timeit\nassert timeit.timeit(f(2), number=1) > 0",
    "import functools\nassert functools.partial(eval, f(2))() == 4",
]


@pytest.mark.parametrize("test", HANDED_OVER)
def test_a_test_that_would_run_the_answer_is_refused(test):
    forging = "__import__('os').write(1, b'passed\\n' * 99) or 4"
    with pytest.warns(UserWarning, match="hands the program's answer to a function which runs it"):
        assert passes_tests([f"def f(x): return {forging!r}"], [[test]]) == [None]


def test_points_are_in_the_unit_interval_whatever_the_judge_prints(monkeypatch):
    real, lines = sandbox.run_python, "passed\n" * 99 + "0\n1\n2\n" + "f" * 32 + "\n"

    def forged(code, **options):
        result = real(code, **options)
        return sandbox.SandboxResult(True, result.stdout * 9 + lines, "", "") if "assertion" in code else result

    monkeypatch.setattr(programs, "run_python", forged)
    assert passes_tests([HONEST["only positive"][0]], [TESTS]) == pytest.approx([2 / 3])
    assert passes_tests(["def square(x): return 0"], [TESTS]) == [0.0]


def test_a_program_that_hangs_costs_a_bounded_time_however_many_tests_there_are(monkeypatch):
    monkeypatch.setattr(programs, "SECONDS_PER_TEST", 0.5)
    monkeypatch.setattr(programs, "SECONDS_PER_PROGRAM", 1.0)
    started = time.monotonic()
    assert passes_tests(["def f(x):\n    while True: pass"], [["assert f(1) == 1"] * 40]) == [0.0]
    assert time.monotonic() - started < 6                          # 40 tests of half a second are 20 s
    assert passes_tests(["def f(x):\n    while x > 1: pass\n    return x"], [["assert f(2) == 2", "assert f(1) == 1"]]) == [0.5]
