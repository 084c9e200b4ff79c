"""Programs that try to get out, to stay, to take everything or to be paid for nothing. Each runs in every way there is here."""

import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

from reward_functions import programs
from reward_functions import sandbox
from reward_functions.programs import passes_tests
from reward_functions.sandbox import OUTPUT_BYTES, SETTLED, run_python

SECRET = "hunter" + "2"
os.environ["SANDBOX_SECRET"] = SECRET                              # before any server starts


def works(way):
    try:
        return run_python("", way=way).ok
    except RuntimeError:
        return False


WAYS = [way for way in SETTLED if works(way)]


@pytest.fixture(params=SETTLED)
def way(request):
    if request.param not in WAYS:
        pytest.skip(f"programs cannot be contained by {request.param} here")
    return request.param


@pytest.fixture(autouse=True, scope="module")
def nobody_is_left():
    """After all tests each server has one child, which waits for the next request, and nobody is left without a parent."""
    yield
    servers = [server.pid for servers in sandbox.idle.values() for server in servers]
    for _ in range(100):                                           # a server forks a moment after it has answered
        time.sleep(0.02)
        everybody = map(parent_of, filter(str.isdecimal, os.listdir("/proc")))
        parents = sorted(parent for parent in everybody if parent in [1, *servers])
        if parents == sorted(servers):
            return
    raise AssertionError(f"{servers=}, {parents=}")


def parent_of(pid):
    """The parent of a process that runs reward_functions/sandbox.py or belongs to a user that the sandbox makes up."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/stat") as stat:
            if b"/sandbox.py" in command.read() or 61184 <= os.stat(f"/proc/{pid}").st_uid < 65520:
                return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return None                                                # it has just ended


def test_at_least_one_way_is_tested():
    assert WAYS


# ---- what an honest program sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code,ok,stdout,reason",
    [
        ("print(1 + 1)", True, "2\n", ""),
        ("", True, "", ""),
        ("import sys; sys.exit()", True, "", ""),
        ("import sys; sys.exit(3)", False, "", "exit code 3"),
        ("import sys; sys.exit('no')", False, "", "exit code 1"),
        ("1 / 0", False, "", "exit code 1"),
        ("def", False, "", "exit code 1"),
        ("print('\\ud800')", False, "", "exit code 1"),
        ("a = 'x' * 10**9", False, "", "memory"),
        ("while True: pass", False, "", "time"),
        ("import time; time.sleep(99)", False, "", "time"),
        ("print('x' * 10**6)", False, "x" * OUTPUT_BYTES, "output"),
        ("import ctypes; ctypes.string_at(0)", False, "", "SIGSEGV"),
        ("open('a', 'w').write('b'); print(open('a').read())", True, "b\n", ""),
        ("import os; print(os.listdir('.'), {*os.environ} - {'LC_CTYPE', 'PWD'})", True, "[] set()\n", ""),
        ("import json, re, decimal, asyncio; print(asyncio.run(asyncio.sleep(0, 5)))", True, "5\n", ""),
        ("import threading; t = threading.Thread(target=print, args=(7,)); t.start(); t.join()", True, "7\n", ""),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nprint(A())", True, "A(x=1)\n", ""),
        ("import sys; print(sys.stdin.read() == '', __name__)", True, "True __main__\n", ""),
        ("from resource import *; print(*map(getrlimit, [RLIMIT_CPU, RLIMIT_CORE, RLIMIT_MEMLOCK]))", True,
         "(10, 10) (0, 0) (0, 0)\n", ""),
    ],
)
def test_a_program_runs_and_what_became_of_it_is_said(way, code, ok, stdout, reason):
    result = run_python(code, timeout_s=0.5 if reason == "time" else 10, way=way)
    assert (result.ok, result.stdout, result.reason) == (ok, stdout, reason), result


def test_a_traceback_is_in_stderr(way):
    assert "ZeroDivisionError" in run_python("1 / 0", way=way).stderr


def test_many_threads_may_call_at_once(way):
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: run_python(f"print({i})", way=way).stdout, range(64)))
    assert results == [f"{i}\n" for i in range(64)]


def test_where_nothing_can_be_contained_nothing_is_run():
    with pytest.raises(RuntimeError, match="cannot be contained"):
        run_python("print(1)", way="no such way")


def test_a_server_that_dies_costs_one_program(way):
    run_python("", way=way)
    sandbox.idle[way, ()][-1].kill()                               # its child still answers one request
    reasons = [run_python("print(1)", way=way).reason for _ in range(3)]
    assert sorted(reasons) == ["", "", "the sandbox was killed"] and reasons[2] == ""


def test_nothing_is_left_for_the_next_program(way):
    assert run_python("open('left', 'w').write('x')", way=way).ok
    assert run_python("import os; print(os.listdir('.'))", way=way).stdout == "[]\n"


# ---- hostile programs ----------------------------------------------------------------------------------------------


def read_programs(name):
    """Name -> program, from a file of them under lines that begin with ==."""
    parts = (Path(__file__).parent / name).read_text().split("\n== ")[1:]
    return dict(part.split("\n", 1) for part in parts)


PREAMBLE = f"""
import contextlib, ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
PARENT = os.getppid()
@contextlib.contextmanager
def escape():
    try:
        yield
    except BaseException:
        return
    print("ESCAPED")
def found(data):
    if "{SECRET[:3]}" + "{SECRET[3:]}" in str(data):
        print("ESCAPED")
"""

HOSTILE = read_programs("hostile_programs.txt")
SLOW_ONES = {"sleep", "infinite loop", "output closed, then sleep", "signals ignored", "signals blocked", "stop itself"}


def test_there_are_enough_hostile_programs():
    assert len(HOSTILE) >= 40


@cache
def run_hostile_programs(way):
    """Name -> result, seconds, what a file of ours says afterwards, and the output of the next program. Some at once: many
    only wait for their time to end, and whoever harms a neighbour is found out too.
    """
    def run(name):
        with tempfile.TemporaryDirectory() as folder:
            victim = Path(folder) / "file"
            victim.write_text(SECRET)
            code = f"{PREAMBLE}\nVICTIM, HOME = {folder!r}, {os.path.expanduser('~')!r}\n{HOSTILE[name]}\n"
            started = time.monotonic()
            result = run_python(code, timeout_s=1.5, memory_mb=256, way=way)
            seconds = time.monotonic() - started
            return result, seconds, victim.read_text(), run_python("print(6 * 7)", way=way).stdout

    with ThreadPoolExecutor(8) as threads:
        return dict(zip(HOSTILE, threads.map(run, HOSTILE)))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(way, name):
    result, seconds, victim, next_output = run_hostile_programs(way)[name]
    assert seconds < 6
    assert "ESCAPED" not in result.stdout + result.stderr, result
    assert victim == SECRET
    assert os.path.exists(os.__file__)
    assert next_output == "42\n"
    assert name not in SLOW_ONES or result.reason == "time"


def test_files_and_folders_that_everybody_may_use_cannot_be_used(way):
    if way == "user" and sandbox.libc.syscall(444, None, 0, 1) < 1:
        pytest.skip("the kernel has no Landlock")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / "file").write_text(SECRET)
        os.chmod(f"{folder}/file", 0o666)
        code = f"{PREAMBLE}\nwith escape(): open({folder + '/file'!r}).read()\nwith escape(): open({folder + '/new'!r}, 'w')"
        assert run_python(code, way=way).stdout == ""
        assert os.listdir(folder) == ["file"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_other_ways_to_call_the_kernel_are_closed(way):
    x32 = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall(0x40000000 | 39), ctypes.get_errno())"
    assert run_python(x32, way=way).stdout == "-1 1\n", "not permitted, where a kernel without x32 would say: not there"
    code = "import ctypes, mmap; page = mmap.mmap(-1, 4096, prot=7); page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
    code += "ctypes.CFUNCTYPE(int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"       # int 0x80, as 32-bit programs do
    assert run_python(code, way=way).reason == "SIGSYS"


LOOK_AROUND = """
import ctypes, os
(out, into), libc, page = os.pipe(), ctypes.CDLL(None), 4096
near = sorted(map(id, [object(), 'x' * 9999, {}, [], ctypes, bytearray(10**4)]))
looked = found = 0
for base in near:
    for address in range((base - (8 << 20)) // page * page, base + (8 << 20), page):
        if libc.write(into, ctypes.c_void_p(address), page) == page:           # -1 where nothing is, and no signal
            parts = os.read(out, page).split(b'finds-')
            found += sum(part.startswith(b'me') for part in parts[1:])
            looked += 1
print(looked > 100, found > 0)
"""


def test_no_program_finds_the_text_of_an_earlier_one_in_its_memory(way):
    earlier = "x = 1  # " + "finds-" + "me" * 1
    for _ in range(3):
        run_python(earlier * 50, way=way)
    assert run_python(LOOK_AROUND, way=way).stdout == "True False\n"
    assert run_python(f"y = '{'finds-' + 'me'}'\n{LOOK_AROUND}", way=way).stdout == "True True\n", "but its own"


# ---- programs that want points for nothing -------------------------------------------------------------------------

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


CHEATS = read_programs("cheating_programs.txt") | {
    "zero byte": "def square(x): return 0\x00",
    "lone surrogate": "def square(x): return '\ud800'",
}


def test_there_are_enough_cheats():
    assert len(CHEATS) >= 40


def test_no_cheat_earns_anything(monkeypatch):
    monkeypatch.setattr("reward_functions.programs.SECONDS_PER_TEST", 1.0)
    monkeypatch.setattr("os.cpu_count", lambda: 8)                 # some at once: they wait for their time to end
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
