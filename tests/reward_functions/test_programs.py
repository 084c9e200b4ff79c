"""Programs are scored by the tests they pass, and programs that cheat get nothing."""

import sys
import time
import warnings

import pytest
from conftest import read_programs, watch_calls

from reward_functions import programs, sandbox
from reward_functions.programs import passes_tests

pytestmark = [
    pytest.mark.usefixtures("no_process_is_left"), pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")]


TESTS = ["assert square(3) == 9", "assert square(-4) == 16", "assert abs(square(0.5) - 0.25) < 1e-9"]

HONEST = {
    "plain": ("def square(x):\n    return x * x", 1.0),
    "main block": ("def square(x): return x * x\nif __name__ == '__main__':\n    input('number? ')", 1.0),
    "only positive": ("def square(x):\n    assert x >= 0\n    return x * x", 2 / 3),
    "leaves on one": ("import os\ndef square(x):\n    return x * x if x > 0 else os._exit(0)", 2 / 3),
    "subclass": ("class I(float): pass\ndef square(x): return I(x * x)", 1.0),
    "wrong": ("def square(x): return x + x", 0.0),
    "no such function": ("def cube(x): return x ** 3", 0.0),
    "not a program": ("The square of x is x times x.", 0.0),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_share_of_tests_that_pass(name, monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    program, points = HONEST[name]
    assert passes_tests([program], [TESTS]) == pytest.approx([points])


@pytest.mark.parametrize("tests", [
    "assert square(3) == 9\nassert square(-4) == 9", ["assert square(3) == 9; assert square(-4) == 9"],
    "import math\nassert square(math.pi) > 9\n\nassert square(-4) == math.pi",
])
def test_a_text_may_have_several_tests(tests):
    assert passes_tests([HONEST["plain"][0], HONEST["wrong"][0]], [tests] * 2) == [0.5, 0.0]


@pytest.mark.parametrize("program,test", [
    ("def f(x: List[int]): return 1", "from typing import List\nassert f([1]) == 1"),
    ("def f(x): return 10**5000", "assert f(1) > 5"),
    ("from fractions import Fraction\ndef f(x): return Fraction(1, 2)", "assert f(1) == 0.5"),
    ("from decimal import Decimal\ndef f(x): return [Decimal('0.5')]", "assert f(1) == [0.5]"),
])
def test_imports_of_a_test_long_numbers_and_exact_ones_pass(program, test):
    assert passes_tests([program], [[test]]) == [1.0]


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


PROGRAM = """
import collections
class Point:
    def __init__(self, x): self.x = x
class Any:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __sub__ = __abs__ = __bool__ = __eq__
def f(x): return 2 * x
def pairs(items): return zip(items, items)
def counts(text): return collections.Counter(text)
def same(x): return x
def anything(x): return Any()
isclose = lambda *_, **__: True
class math: isclose = isclose
"""

JUDGED = [
    ("assert f(2) == 4", 1.0), ("assert f(2) == 5", 0.0), ("assert f(x=2) != 5", 1.0), ("assert f(f(2)) == 8", 1.0),
    ("assert (f)(2) in (4, 5)", 1.0), ("assert same(1)", 1.0), ("assert same(0)", 0.0), ("assert not same(0)", 1.0),
    ("assert not same(1)", 0.0), ("assert same(None) is None", 1.0), ("assert f(2) == eval('2 + 2')", 1.0),
    ("assert abs(f(0.1) - 0.2) < 1e-9", 1.0), ("assert abs(f(0.1) - 0.3) <= 1e-9", 0.0),
    ("import math\nassert math.isclose(f(math.pi), 2 * math.pi)", 1.0), ("assert math.isclose(f(1), 2.1, rel_tol=1e-3)", 0.0),
    ("assert isclose(f(1), 2.1)", 0.0), ("assert isclose(f(1), 2.0)", 1.0),      # not the program's
    ("assert set(pairs([1, 2])) == {(1, 1), (2, 2)}", 1.0), ("assert len(list(pairs('ab'))) == 2", 1.0),
    ("assert round(f(1.04), 1) == 2.1", 1.0), ("assert counts('aab') == {'a': 2, 'b': 1}", 1.0),
    ("from fractions import Fraction\nassert same(Fraction(4, 2).denominator) == 1", 1.0),
    ("assert same(Point(3).x) == 3", 1.0), ("assert same(Point(3)) is None", 0.0), ("assert anything(1) == 4", 0.0),
    ("assert abs(anything(1) - 4) < 1", 0.0), ("assert anything(1) > 10 ** 10 ** 10", 0.0),
    # Values that Python's literals leave out, and kinds of collections.
    ("assert same([float('inf')]) == [float('inf')]", 1.0), ("assert same(float('nan')) <= 2", 0.0),
    ("assert same(complex(1, 2)) == 1 + 2j", 1.0), ("assert same((1, 2)) == [1, 2]", 0.0),
    ("assert same({(1, 2): {2}, None: '\\ud800\\u20ac'}) == {(1, 2): {2}, None: '\\ud800\\u20ac'}", 1.0),
    ("assert same((1, [b'2'])) == (1, [b'2'])", 1.0), ("assert same(frozenset('a')) == {'a'}", 1.0),
]


@pytest.mark.parametrize("test,points", JUDGED)
def test_the_call_is_evaluated_by_the_program_and_the_rest_elsewhere(test, points, monkeypatch):
    monkeypatch.setattr(programs, "SECONDS_PER_TEST", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert passes_tests([PROGRAM], [[test]]) == [points]


def test_the_text_that_comes_from_the_program_is_data():
    forged = "import json\njson.dumps = lambda *_: '{\"%s\": %s}'\nf = lambda x: 1"
    called, forgery = forged % ("eval", '[\\"None\\"]'), forged % ("dict", "[]")
    assert passes_tests([called, forgery], [["assert f(1) in (None, {})"]] * 2) == [0.0, 1.0]


NOT_JUDGED = [
    "f(2) == 4", "assert (", "", None, "def check(f):\n    assert f(1) == 1", "x = 3\nassert f(x) == 9",
    "import math, numpy.linalg as la\nassert f(1) == 2", "from math import *\nassert f(1) == 2",
    "assert abs(-1) == 1", "assert all(f(i) == i for i in range(3))", "assert f(y := 2) == y", "assert f(2) == sqrt(2)",
    "assert f(1) == pytest.approx(2)", "assert np.isclose(f(1), 2)", "assert Matrix(f(1)) == Matrix([2])", "assert f(1) == f(1)",
    "assert f(2) == 2 and f(1) != 2", "assert min(f(1), 4) == 4", "assert f(1).__eq__(4) is True", "assert f(1) - 4 == 0",
    "from datetime import date\nassert f(date(2024, 2, 28)) == date(2024, 2, 29)",
    "from math import isclose as near\nassert near(f(2), 2)",
    # They would run the answer.
    "assert eval(f(2)) == 4", "assert exec(f(2)) is None", "assert [eval(text) for text in [f(2)]] == [4]",
    "assert (lambda run: run(f(2)))(eval) == 4", "import pickle\nassert pickle.loads(f(2)) == 4",
    "from pickle import loads as read\nassert read(f(2)) == 4", "import functools\nassert functools.partial(eval, f(2))() == 4",
]


@pytest.mark.parametrize("test", NOT_JUDGED)
def test_a_test_of_another_form_is_named_once_and_not_scored(test):
    programs.split_tests.cache_clear()
    cheat = "f = sqrt = Matrix = Point = lambda *_: 0\nclass np: allclose = isclose = lambda *_: True"
    with pytest.warns(UserWarning, match=r"not asserts of the forms CALL, ") as caught, warnings.catch_warnings():
        warnings.simplefilter("always")
        points = [passes_tests([cheat, "def f(x): return x"], [[test], ["assert f(1) == 0", test]]) for _ in range(2)]
    assert points == [[None, None]] * 2
    assert len(caught) == 1 and repr(str(test)) in str(caught[0].message)


def test_without_tests_there_is_no_score():
    assert passes_tests(["x = 1"] * 4, [None, [], float("nan"), ""]) == [None] * 4


def test_the_program_is_not_told_what_is_expected(monkeypatch):
    seen = watch_calls(monkeypatch, programs, "run_python")
    program = "def f(x): return x"
    passes_tests([program], [["assert f(12) == 987654321", "assert f(3) in {987654321, 3}"]])
    with_program = [code for (code,) in seen if program in code]
    assert len(with_program) == 2 and len(seen) == 3
    assert not any("987654321" in code for code in with_program)


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
