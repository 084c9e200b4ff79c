"""Programs that try to leave the sandbox, to stay, or to use up resources, with every isolation method that works here."""

import os
import platform
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import read_programs

from reward_functions import sandbox
from reward_functions.sandbox import OUTPUT_BYTES, RESTRICTIONS, run_python

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_process_is_left")

SECRET = "hunter" + "2"
os.environ["SANDBOX_SECRET"] = SECRET                              # before any server starts


def find_interpreter(method):
    """An interpreter with which a method works, or None. Root's own may be in a folder that only root may enter."""
    with pytest.MonkeyPatch.context() as patch:
        for interpreter in filter(os.path.exists, [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]):
            patch.setattr(sys, "executable", interpreter)
            if sandbox.run_in_server(method, (), "import fractions", 5.0, 512).ok:
                return interpreter
            sandbox.idle_servers[method, ()].pop().communicate()


INTERPRETERS = {method: find_interpreter(method) for method in RESTRICTIONS}
AVAILABLE = [method for method in RESTRICTIONS if INTERPRETERS[method]]


@pytest.fixture(params=list(RESTRICTIONS))
def method(request, monkeypatch):
    if request.param not in AVAILABLE:
        pytest.skip(f"programs cannot be isolated by {request.param} here")
    monkeypatch.setattr(sys, "executable", INTERPRETERS[request.param])
    monkeypatch.setattr(sandbox, "usable_method", lambda: request.param)
    return request.param


@pytest.mark.parametrize("code,ok,stdout,reason", [
    ("print(1 + 1)", True, "2\n", ""),
    ("", True, "", ""),
    ("import sys; sys.exit()", True, "", ""),
    ("import sys; sys.exit(3)", False, "", "exit code 3"),
    ("import sys; sys.exit('no')", False, "", "exit code 1"),
    ("1 / 0", False, "", "exit code 1"),
    ("def", False, "", "exit code 1"),
    ("print('\\ud800')", False, "", "exit code 1"),
    ("a = 'x' * 10**9", False, "", "memory"),
    ("print('x' * 10**6)", False, "x" * OUTPUT_BYTES, "output"),
    ("import ctypes; ctypes.string_at(0)", False, "", "SIGSEGV"),
    ("import os; print({*os.environ} - {'LC_CTYPE', 'PWD'})", True, "set()\n", ""),
    ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nprint(A())", True, "A(x=1)\n", ""),
    ("import sys; print(sys.stdin.read() == '', __name__)", True, "True __main__\n", ""),
    ("from resource import *; print(*map(getrlimit, [RLIMIT_CPU, RLIMIT_CORE, RLIMIT_MEMLOCK]))", True,
     "(10, 10) (0, 0) (0, 0)\n", ""),
])
def test_a_program_runs_and_what_became_of_it_is_said(method, code, ok, stdout, reason):
    result = run_python(code, timeout_s=10)
    assert (result.ok, result.stdout, result.reason) == (ok, stdout, reason), result


def test_the_first_method_that_works_is_used_and_without_one_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox, "RESTRICTIONS", {"no such method": None, AVAILABLE[0]: None})
    monkeypatch.setattr(sys, "executable", INTERPRETERS[AVAILABLE[0]])
    usable_method = sandbox.usable_method.__wrapped__
    assert usable_method() == AVAILABLE[0]
    del sandbox.RESTRICTIONS[AVAILABLE[0]]
    monkeypatch.setattr(sandbox, "usable_method", usable_method)
    with pytest.raises(RuntimeError, match=r"cannot be isolated .*\(no such method: the sandbox failed"):
        run_python("print(1)")


def test_a_server_that_stops_is_ended_and_costs_one_program(method, monkeypatch):
    run_python("")
    server = sandbox.idle_servers[method, ()][-1]
    os.killpg(server.pid, signal.SIGSTOP)
    monkeypatch.setattr(sandbox, "SECONDS_TO_START", 0.5)
    assert run_python("", timeout_s=0.1).reason == "the sandbox was killed"
    assert server.returncode is not None
    monkeypatch.setattr(sandbox, "SECONDS_TO_START", 60.0)
    assert run_python("print(1)").stdout == "1\n"


@pytest.mark.parametrize("code", ["", "import time; time.sleep(99)", "print('x' * 10**6)"])
def test_output_is_not_waited_for_when_something_else_holds_the_pipes(code):
    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        os.write(pipes[2][1], b"!")
        os.dup2(pipes[0][1], 1)
        sys.stdout = os.fdopen(1, "w")
        sandbox.execute(code)
    started = time.monotonic()
    result = sandbox.wait_for_program(pid, *(read_end for read_end, _ in pipes), 0.5)             # and we hold the write ends
    assert result["reason"] in ("", "time", "output") and time.monotonic() - started < 2
    for end in sum(pipes, ()):
        os.close(end)


@pytest.mark.parametrize("quota,cores", [("max 100000", 4), ("150000 100000", 2), ("800000 100000", 4), (None, 4)])
def test_the_quota_of_a_container_limits_the_cores(quota, cores, tmp_path, monkeypatch):
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 7})
    monkeypatch.setattr("builtins.open", lambda path, real=open: real(tmp_path / Path(path).name))
    assert sandbox.usable_cores() == cores


def test_only_packages_that_modules_load_are_visible(method, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:                  # tmp_path is for its owner alone
        for name in "package_elsewhere", "another_package":
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "__init__.py").write_text("")
        (Path(folder) / "package_elsewhere" / "part.py").write_text("VALUE = 5")
        (Path(folder) / "beside.txt").write_text(SECRET)
        os.chmod(folder, 0o755)
        monkeypatch.syspath_prepend(folder)
        code = "import os\nfrom package_elsewhere.part import VALUE\n"
        code += f"print(VALUE, os.path.exists('{folder}/beside.txt'))\nimport another_package"
        result = run_python(code, modules=("package_elsewhere",))
        readable = method == "user"                                # without Landlock; `stat` is permitted with it
        assert result.stdout == f"5 {readable}\n" and "another_package" in result.stderr, result
        assert "No module named 'package_elsewhere'" in run_python(code).stderr
        for server in sandbox.idle_servers.pop((method, ("package_elsewhere",))):
            server.communicate()


ORDINARY = {
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.gather(*map(asyncio.sleep, [0, 0.01]))\n"
               "    return await asyncio.to_thread(sum, [2, 3])\nprint(asyncio.run(f()))",
    "socketpair": "import asyncio, socket\nasync def f():\n    a, b = socket.socketpair()\n    b.send(b'5\\n')\n"
                  "    reader, _ = await asyncio.open_connection(sock=a)\n"
                  "    print(int(await reader.readline()))\nasyncio.run(f())",
    "alarm": "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: print(5))\n"
             "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.2)",
    "own signal": "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: print(5)); signal.raise_signal(signal.SIGUSR1)",
    "sqlite": "import sqlite3\nprint(*sqlite3.connect(':memory:').execute('select 2 + 3').fetchone())",
    "ctypes": "import ctypes\nprint(ctypes.CDLL(None).abs(-5))",
    "ssl": "import ssl\nprint(ssl.create_default_context() and 5)",
    "mmap": "import mmap\nprint(mmap.mmap(-1, 1 << 20, prot=3)[0] + 5)",
    "thread that ends in C": "import ctypes, threading\nend = ctypes.CDLL(None).pthread_exit\n"
                             "t = threading.Thread(target=end, args=(None,)); t.start(); t.join(1); print(5)",
    "recursion": "import sys\nsys.setrecursionlimit(9999)\nf = lambda n: n and 1 + f(n - 1)\nprint(f(5000) // 1000)",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_the_standard_library_needs_is_permitted(method, name):
    result = run_python(ORDINARY[name])
    assert result.stdout == "5\n", result


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


def test_hostile_programs_are_contained(method):
    """Some at once: many only wait for their time to end, and whoever harms a neighbour is found out too. Everybody may use the folder."""
    def run(name):
        with tempfile.TemporaryDirectory() as folder:
            victim = Path(folder) / "file"
            victim.write_text(SECRET)
            os.chmod(folder, 0o777)
            os.chmod(victim, 0o666)
            code = f"{PREAMBLE}\nVICTIM, HOME = {folder!r}, {os.path.expanduser('~')!r}\n{HOSTILE[name]}\n"
            started = time.monotonic()
            result = run_python(code, timeout_s=1.5, memory_mb=256)
            seconds = time.monotonic() - started
            next_output = run_python(f"print({name!r})").stdout
            assert "ESCAPED" not in result.stdout + result.stderr, (name, result)
            assert os.listdir(folder) == ["file"] and victim.read_text() == SECRET and seconds < 6, (name, result)
            assert next_output == f"{name}\n", "of this program, not of one in another thread"
            assert name not in SLOW_ONES or result.reason == "time", (name, result)

    with ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(run, HOSTILE))) >= 120
    assert os.path.exists(os.__file__)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
def test_other_ways_to_call_the_kernel_are_closed(method):
    x32 = f"{PREAMBLE}\nprint(libc.syscall(0x40000000 | 39), ctypes.get_errno())"
    assert run_python(x32).stdout == "-1 38\n"
    code = "import ctypes, mmap; page = mmap.mmap(-1, 4096, prot=7)\n"
    code += "page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
    code += "ctypes.CFUNCTYPE(int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"     # int 0x80, as 32-bit programs do
    assert run_python(code).reason == "SIGSYS"


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
        run_python(earlier * 50)
    assert run_python(LOOK_AROUND).stdout == "True False\n"
    assert run_python(f"y = '{'finds-' + 'me'}'\n{LOOK_AROUND}").stdout == "True True\n", "but its own"
