"""Programs that try to leave the sandbox, to stay, or to use up resources, with every isolation method that works here."""

import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from reward_functions import sandbox
from reward_functions.sandbox import METHODS, OUTPUT_BYTES, run_python

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_process_is_left")

SECRET = "hunter" + "2"
os.environ["SANDBOX_SECRET"] = SECRET                              # before any server starts


def works(method):
    try:
        return run_python("", method=method).ok
    except RuntimeError:
        return False


AVAILABLE = [method for method in METHODS if works(method)]


@pytest.fixture(params=METHODS)
def method(request):
    if request.param not in AVAILABLE:
        pytest.skip(f"programs cannot be isolated by {request.param} here")
    return request.param


def test_at_least_one_way_is_tested():
    assert AVAILABLE


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
def test_a_program_runs_and_what_became_of_it_is_said(method, code, ok, stdout, reason):
    result = run_python(code, timeout_s=0.5 if reason == "time" else 10, method=method)
    assert (result.ok, result.stdout, result.reason) == (ok, stdout, reason), result


def test_a_traceback_is_in_stderr(method):
    assert "ZeroDivisionError" in run_python("1 / 0", method=method).stderr


def test_many_threads_may_call_at_once(method):
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda i: run_python(f"print({i})", method=method).stdout, range(64)))
    assert results == [f"{i}\n" for i in range(64)]


def test_where_nothing_can_be_contained_nothing_is_run():
    with pytest.raises(RuntimeError, match="cannot be isolated"):
        run_python("print(1)", method="no such method")


def test_a_server_that_dies_costs_one_program(method):
    run_python("", method=method)
    sandbox.idle_servers[method, ()][-1].kill()                               # its child still answers one request
    reasons = [run_python("print(1)", method=method).reason for _ in range(3)]
    assert sorted(reasons) == ["", "", "the sandbox was killed"] and reasons[2] == ""


def test_nothing_is_left_for_the_next_program(method):
    assert run_python("open('left', 'w').write('x')", method=method).ok
    assert run_python("import os; print(os.listdir('.'))", method=method).stdout == "[]\n"


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
def run_hostile_programs(method):
    """Name -> result, seconds, what a file of ours says afterwards, and the output of the next program. Some at once: many
    only wait for their time to end, and whoever harms a neighbour is found out too.
    """
    def run(name):
        with tempfile.TemporaryDirectory() as folder:
            victim = Path(folder) / "file"
            victim.write_text(SECRET)
            code = f"{PREAMBLE}\nVICTIM, HOME = {folder!r}, {os.path.expanduser('~')!r}\n{HOSTILE[name]}\n"
            started = time.monotonic()
            result = run_python(code, timeout_s=1.5, memory_mb=256, method=method)
            seconds = time.monotonic() - started
            return result, seconds, victim.read_text(), run_python("print(6 * 7)", method=method).stdout

    with ThreadPoolExecutor(8) as threads:
        return dict(zip(HOSTILE, threads.map(run, HOSTILE)))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(method, name):
    result, seconds, victim, next_output = run_hostile_programs(method)[name]
    assert seconds < 6
    assert "ESCAPED" not in result.stdout + result.stderr, result
    assert victim == SECRET
    assert os.path.exists(os.__file__)
    assert next_output == "42\n"
    assert name not in SLOW_ONES or result.reason == "time"


def test_files_and_folders_that_everybody_may_use_cannot_be_used(method):
    if method == "user" and sandbox.libc.syscall(444, None, 0, 1) < 1:
        pytest.skip("the kernel has no Landlock")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / "file").write_text(SECRET)
        os.chmod(f"{folder}/file", 0o666)
        code = f"{PREAMBLE}\nwith escape(): open({folder + '/file'!r}).read()\nwith escape(): open({folder + '/new'!r}, 'w')"
        assert run_python(code, method=method).stdout == ""
        assert os.listdir(folder) == ["file"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_other_ways_to_call_the_kernel_are_closed(method):
    x32 = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall(0x40000000 | 39), ctypes.get_errno())"
    assert run_python(x32, method=method).stdout == "-1 1\n", "not permitted, where a kernel without x32 would say: not there"
    code = "import ctypes, mmap; page = mmap.mmap(-1, 4096, prot=7); page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
    code += "ctypes.CFUNCTYPE(int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"       # int 0x80, as 32-bit programs do
    assert run_python(code, method=method).reason == "SIGSYS"


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


def test_no_program_finds_the_text_of_an_earlier_one_in_its_memory(method):
    earlier = "x = 1  # " + "finds-" + "me" * 1
    for _ in range(3):
        run_python(earlier * 50, method=method)
    assert run_python(LOOK_AROUND, method=method).stdout == "True False\n"
    assert run_python(f"y = '{'finds-' + 'me'}'\n{LOOK_AROUND}", method=method).stdout == "True True\n", "but its own"
