"""Programs are scored by the tests they pass, and programs that cheat get nothing."""

import sys
import time
from pathlib import Path

import pytest

from reward_functions import programs, sandbox
from reward_functions.programs import passes_tests

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_process_is_left")

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


def read_programs(name):
    """Return name -> program, from a file in which lines that begin with == are names."""
    parts = (Path(__file__).parent / name).read_text().split("\n== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


CHEATS = read_programs("cheating_programs.txt") | {
    "zero byte": "def square(x): return 0\x00",
    "lone surrogate": "def square(x): return '\ud800'",
}


def test_there_are_enough_cheats():
    assert len(CHEATS) >= 40


def test_no_cheat_earns_anything(monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    monkeypatch.setattr(programs, "usable_cores", lambda: 8)       # some at once: they wait for their time to end
    points = passes_tests(list(CHEATS.values()), [TESTS] * len(CHEATS))
    assert dict(zip(CHEATS, points)) == dict.fromkeys(CHEATS, 0.0)
    assert passes_tests([HONEST["plain"][0]], [TESTS]) == [1.0], "and the next program"


@pytest.mark.parametrize(
    "test,points",
    [
        ("assert f(2) == 4", 1.0),
        ("assert f(2) == 4, 'a message'", 1.0),
        ("assert f(x=2) == 4 and f(3) != 4", 1.0),
        ("assert not f(2) == 5", 1.0),
        ("assert f(f(2)) == 8", 1.0),
        ("assert f(True) is not None", 1.0),
        ("import math\nassert math.isclose(f(math.pi), 2 * math.pi)", 1.0),
        ("assert set(pairs([1, 2])) == {(1, 1), (2, 2)}", 1.0),
        ("assert list(pairs([1])) == [(1, 1)] and pairs([1])[0] == (1, 1)", 1.0),
        ("assert Counted('aab').most() == {'a': 2, 'b': 1}", 1.0),
        ("assert counts('ab') == {'a': 1, 'b': 1}", 1.0),
        ("assert TWO == 2 and TABLE['x'] == [2]", 1.0),
        ("assert adder(1)(2) == 3", 1.0),
        ("assert sorted(f(2) for _ in range(2)) == [4, 4]", 1.0),
        ("assert f(2) == eval('2 + 2')", 1.0),
        ("assert f(2) == eval('a + a', {'a': 2}) and exec('x = 1') is None", 1.0),
        ("import json\nassert json.loads(str(f(2))) == 4", 1.0),
        ("import ast\nassert ast.literal_eval(str(f(2))) == 4", 1.0),
        ("import re\nassert re.compile('4').match(str(f(2)))", 1.0),
        ("assert f(2) == 5", 0.0),
        ("assert missing(2) == 4", 0.0),
        ("assert 2 ** f(10 ** 10) == 0", 0.0),                     # the judge runs out of time
        ("assert all(f(i) == 2 * i for i in range(3))", None),     # a variable that only the judge has
        ("assert max([1, 2], key=lambda n: f(n)) == 2", None),
        ("assert 1 == 1", None),
        ("assert abs(-1) == 1", None),
        ("f(2) == 4", None),
        ("x = f(2)\nassert x == 4", None),
        ("assert (", None),
        ("", None),
    ],
)
def test_a_test_is_taken_apart(test, points, monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    program = """
import collections
TWO, TABLE = 2, {"x": [2]}
def f(x): return 2 * x
def pairs(items): return zip(items, items)
def counts(text): return collections.Counter(text)
def adder(x): return lambda y: x + y
class Counted:
    def __init__(self, text): self.text = text
    def most(self): return collections.Counter(self.text)
"""
    assert passes_tests([program], [[test]]) == [points]


def test_without_tests_there_is_no_score():
    assert passes_tests(["x = 1", "x = 1"], [None, []]) == [None, None]


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
    "assert eval(compile(f(2), 'x', 'eval')) == 4",
    "import pickle\nassert pickle.loads(f(2)) == 4",
    "import marshal\nassert marshal.loads(f(2)) == 4",
    "import io, pickle\nassert pickle.load(io.BytesIO(f(2))) == 4",
    "import io, pickle\nassert pickle.Unpickler(io.BytesIO(f(2))).load() == 4",
    "from pickle import loads\nassert loads(f(2)) == 4",
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


def test_the_time_of_a_batch_is_bounded_and_programs_after_it_are_not_scored(monkeypatch):
    monkeypatch.setattr(programs, "usable_cores", lambda: 2)
    monkeypatch.setattr(programs, "SECONDS_PER_TEST", 0.5)
    monkeypatch.setattr(programs, "SECONDS_PER_BATCH", -19.5)      # and 42 programs on two cores have 21 s more
    started = time.monotonic()
    honest, hangs = HONEST["plain"][0], "while True: pass"
    points = passes_tests([honest] + [hangs] * 40 + [honest], [TESTS[:1]] * 42)
    assert points[0] == 1.0 and points[1] == 0.0 and points[-1] is None
    assert points.count(None) > 20 and time.monotonic() - started < 8
