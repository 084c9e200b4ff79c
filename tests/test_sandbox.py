"""Programs that try to get out, to stay, to take everything or to be paid for nothing. Each runs in every way there is here."""

import os
import sys
import time

import pytest

if sys.platform != "linux":
    pytest.skip("the sandbox needs Linux", allow_module_level=True)

import sandbox
from rewards import passes_tests
from sandbox import OUTPUT_BYTES, SETTLED, run_python

SECRET = "hunter" + "2"


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
    """After all tests there are the servers and one child of each, which waits for the next request, and nobody else."""
    yield
    servers = [server.pid for servers in sandbox.idle.values() for server in servers]
    for _ in range(100):                                           # a server forks a moment after it has answered
        time.sleep(0.02)
        others = sorted(parent for pid, parent in ours() if pid not in servers)
        if others == sorted(servers):
            return
    raise AssertionError(f"{servers=}, children of {others}")


def ours():
    """(process, its parent) for every process that runs sandbox.py or belongs to a user that the sandbox makes up."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            user = os.stat(f"/proc/{pid}").st_uid
            with open(f"/proc/{pid}/cmdline", "rb") as command, open(f"/proc/{pid}/stat") as stat:
                if b"sandbox.py" in command.read().split(b"pytest")[0] or 61184 <= user < 65520:
                    yield int(pid), int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            pass                                                   # it has just ended


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
        ("import os; print(os.listdir('.'), {*os.environ} - {'LC_CTYPE', 'PWD'}, os.getcwd() != '/')", True, "[] set() True\n", ""),
        ("import json, re, decimal, asyncio; print(asyncio.run(asyncio.sleep(0, 5)))", True, "5\n", ""),
        ("import threading; t = threading.Thread(target=print, args=(7,)); t.start(); t.join()", True, "7\n", ""),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nprint(A())", True, "A(x=1)\n", ""),
        ("import sys; print(sys.stdin.read() == '', __name__)", True, "True __main__\n", ""),
    ],
)
def test_a_program_runs_and_what_became_of_it_is_said(way, code, ok, stdout, reason):
    result = run_python(code, timeout_s=1 if reason == "time" else 10, way=way)
    assert (result.ok, result.stdout, result.reason) == (ok, stdout, reason), result


def test_a_traceback_is_in_stderr(way):
    assert "ZeroDivisionError" in run_python("1 / 0", way=way).stderr


def test_many_threads_may_call_at_once(way):
    from concurrent.futures import ThreadPoolExecutor

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
# Each prints ESCAPED if it gets what it wants. `escape` is a context manager: the block may raise, and must not get through.

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

HOSTILE = {
    "fork bomb": "while True:\n    with escape(): os.fork()",
    "fork by system call": "for n in (57, 58, 56, 220, 435):\n    with escape():\n        assert libc.syscall(n, 17, 0, 0, 0, 0) >= 0",
    "double fork": "with escape():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0: time.sleep(60)",
    "daemon": "with escape(): subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "spawn": "with escape(): os.posix_spawn(sys.executable, ['python', '-c', ''], {})",
    "pool": "import multiprocessing\nwith escape():\n    p = multiprocessing.Process(target=print); p.start(); p.join()",
    "shell": "with escape():\n    assert os.system('true') == 0",
    "exec": "with escape():\n    os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "exec python": "os.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
    "thread bomb": "while True: threading.Thread(target=time.sleep, args=(60,), daemon=False).start()",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory in one piece": "import mmap\nwith escape(): mmap.mmap(-1, 1 << 30)",
    "memory beside": "with escape():\n    assert libc.shmget(0, 1 << 28, 0o1600) >= 0",
    "memory in files": "with escape(): os.memfd_create('x')",
    "limits raised": "import resource\nfor what in range(16):\n    with escape():\n        soft, hard = resource.getrlimit(what)\n"
                     "        assert hard != -1\n        resource.setrlimit(what, (hard + 1, hard + 1))",
    "infinite output": "while True: print('x' * 1000)",
    "infinite errors": "while True: print('x' * 1000, file=sys.stderr)",
    "output of one byte": "while True: os.write(1, b'x')",
    "infinite loop": "while True: pass",
    "one long instruction": "9 ** 9 ** 9",
    "sleep": "time.sleep(600)",
    "output closed, then sleep": "os.close(1); os.close(2); time.sleep(600)",
    "signals ignored": "for s in range(1, 65):\n    with contextlib.suppress(OSError, ValueError): signal.signal(s, signal.SIG_IGN)\n"
                       "while True: pass",
    "signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "kill the parent": "for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):\n    with escape():\n        os.kill(PARENT or 999999, s)\n        assert PARENT > 1",
    "kill everybody": "os.kill(-1, signal.SIGKILL)",               # says that it worked; we would not be here to see it
    "kill the group": "os.killpg(0, signal.SIGKILL)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)",
    "trace the parent": "with escape():\n    assert libc.ptrace(16, PARENT or 1, 0, 0) == 0",
    "read the parent's memory": "with escape(): open(f'/proc/{PARENT}/mem', 'rb')",
    "delete files": "for folder, _, names in os.walk(VICTIM):\n    for name in names: os.unlink(os.path.join(folder, name))\n"
                    "os.truncate(VICTIM + '/file', 0)",
    "delete the library": "import shutil\nwith escape(): os.unlink(os.__file__)\nwith escape(): open(os.__file__, 'a')\n"
                          "with escape(): os.rename(os.path.dirname(os.__file__), '/scratch/x')",
    "fill the disk": "for i in range(10**5): open(str(i), 'wb').write(bytes(1 << 20))",
    "one huge file": "with escape():\n    with open('x', 'wb') as f:\n        for _ in range(1000): f.write(bytes(1 << 20))",
    "a million files": "with escape():\n    if os.getcwd() != '/scratch': raise OSError\n    for i in range(10**6): open(str(i), 'w')",
    "deep folders": "for _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "many open files": "x = []\nwith escape():\n    for i in range(1000): x.append(os.dup(1))",
    "its own environment": "found(dict(os.environ)); found(open('/proc/self/environ', 'rb').read())",
    "environment of others": "for pid in os.listdir('/proc'):\n    with contextlib.suppress(OSError): "
                             "found(open(f'/proc/{pid}/environ', 'rb').read())",
    "command lines of others": "for pid in os.listdir('/proc'):\n    with contextlib.suppress(OSError): "
                               "found(open(f'/proc/{pid}/cmdline', 'rb').read())",
    "open files of the server": "for fd in range(3, 999):\n    with escape(): os.fstat(fd)",
    "write an answer": "for fd in range(3, 999):\n    with escape(): os.write(fd, b'{\"ok\": true}\\n')",
    "read a secret": "found(open(VICTIM + '/file').read())",
    "symbolic link": "os.symlink(VICTIM + '/file', 'x'); found(open('x').read())",
    "hard link": "os.link(VICTIM + '/file', 'x'); found(open('x').read())",
    "passwords": "with escape(): open('/etc/shadow').read()",
    "home": "with escape():\n    assert {*os.listdir(HOME)} - {*sys.prefix.split('/')}",
    "tcp": "with escape(): socket.create_connection((\"1.1.1.1\", 80), timeout=1)",
    "listen": "with escape(): socket.create_server(('127.0.0.1', 0))",
    "udp": "with escape(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('1.1.1.1', 53))",
    "names": "with escape(): socket.gethostbyname('example.com')",
    "unix socket": "with escape(): socket.socket(socket.AF_UNIX)",
    "network by system call": "with escape():\n    assert max(libc.syscall(n, 2, 1, 0) for n in (41, 198)) >= 0",
    "network by ring": "with escape():\n    assert libc.syscall(425, 8, ctypes.create_string_buffer(200)) >= 0",
    "mount": "with escape():\n    assert libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0",
    "new namespaces": "with escape():\n    assert libc.unshare(0x10000000) == 0",
    "out of the root": "with escape():\n    os.mkdir('x'); os.chroot('x')",
    "become root": "with escape(): os.setuid(0)\nwith escape():\n    assert os.getuid() == 0",
    "capabilities": "import struct\nwith escape():\n    assert libc.capset(struct.pack('<Ii', 0x20080522, 0), b'\\xff' * 24) == 0",
    "device": "import stat\nwith escape(): os.mknod('x', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
    "more time": "import resource\nwith escape(): resource.setrlimit(resource.RLIMIT_CPU, (99, 99))\n"
                 "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "supervisor's death": "libc.prctl(1, 0, 0, 0, 0)\nwhile True: pass",
    "crash": "ctypes.memset(0, 0, 1)",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): return f() + max([0], key=lambda x: f())\nf()",
    "end now": "os._exit(0)",
    "no end": "os._exit = sys.exit = lambda *a: None\nsys.stdout.flush = 1 / 0",
    "frames": "f = sys._getframe()\nwhile f:\n    found(f.f_locals); found(f.f_globals.get('idle')); f = f.f_back",
}
SLOW_ONES = {"sleep", "infinite loop", "output closed, then sleep", "signals ignored", "signals blocked", "stop itself"}


def test_there_are_enough_hostile_programs():
    assert len(HOSTILE) >= 40


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_contained(way, name, tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_SECRET", SECRET)
    victim = tmp_path / "file"
    victim.write_text(SECRET)
    code = f"{PREAMBLE}\nVICTIM, HOME = {str(tmp_path)!r}, {os.path.expanduser('~')!r}\n{HOSTILE[name]}\n"
    started = time.monotonic()
    result = run_python(code, timeout_s=0.8, memory_mb=256, way=way)
    assert time.monotonic() - started < 5
    assert "ESCAPED" not in result.stdout + result.stderr, result
    assert victim.read_text() == SECRET
    assert os.path.exists(os.__file__)
    assert run_python("print(6 * 7)", way=way).stdout == "42\n", "the next program"


@pytest.mark.parametrize("name", sorted(SLOW_ONES))
def test_what_does_not_end_is_ended(name):
    assert run_python(f"{PREAMBLE}\n{HOSTILE[name]}", timeout_s=0.8).reason == "time"


LOOK_AROUND = """
import ctypes
libc, page, near = ctypes.CDLL(None), 4096, sorted(map(id, [object(), 'x' * 9999, {}, [], ctypes, bytearray(10**4)]))
looked = found = 0
for base in near:
    for address in range((base - (8 << 20)) // page * page, base + (8 << 20), page):
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(page), ctypes.create_string_buffer(1)) == 0:
            parts = ctypes.string_at(address, page).split(b'finds-')
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
    monkeypatch.setattr("reward_programs.SECONDS_PER_TEST", 1.0)
    program, points = HONEST[name]
    assert passes_tests([program], [TESTS]) == pytest.approx([points])


EQUALS_ALL = "class X{base}:\n    def __eq__(self, other): return True\n    __ne__ = __lt__ = __gt__ = __abs__ = __sub__ = __eq__\n"
CHEATS = {
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit when asked": "import os\ndef square(x): os._exit(0)",
    "raise SystemExit": "raise SystemExit",
    "print passed": "print('passed\\n' * 3)\ndef square(x): print('passed\\n' * 3)",
    "write passed": "import os\nfor fd in range(10):\n    try: os.write(fd, b'passed\\npassed\\npassed\\n')\n    except OSError: pass\nos._exit(0)",
    "write and go": "import os\ndef square(x):\n    for fd in range(10):\n        try: os.write(fd, b'[True]')\n        except OSError: pass\n"
                    "    os._exit(0)",
    "equals everything": EQUALS_ALL.format(base="") + "def square(x): return X()",
    "int that equals everything": EQUALS_ALL.format(base="(int)") + "def square(x): return X()",
    "str that equals everything": EQUALS_ALL.format(base="(str)") + "def square(x): return X()",
    "list that equals everything": EQUALS_ALL.format(base="(list)") + "def square(x): return X()",
    "any from mock": "from unittest import mock\ndef square(x): return mock.ANY",
    "magic mock": "from unittest.mock import MagicMock as square",
    "repr attacks the judge": "class X:\n    def __repr__(self): return 'print(\"passed\\\\n\" * 3)'\n    def __iter__(self): return iter([self])\n"
                              "def square(x): return X()",
    "repr is patched": "import builtins\nbuiltins.repr = lambda x: '__import__(\"os\").write(1, b\"passed\\\\n\" * 3)'\ndef square(x): return 1",
    "repr is patched with a name": "import builtins\nbuiltins.repr = lambda x: '[_answers]'\ndef square(x): return 1",
    "deep answer": "import builtins\nbuiltins.repr = lambda x: '[' * 50000 + ']' * 50000\ndef square(x): return 1",
    "huge answer": "def square(x): return [0] * 10**6",
    "huge number": "def square(x): return 10 ** 5000",
    "eval is patched": "import builtins\nbuiltins.eval = lambda *a: True\ndef square(x): return 0",
    "exec is patched": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: True\ndef square(x): return 0",
    "map is patched": "import builtins\nbuiltins.map = builtins.list = lambda *a: []\ndef square(x): return 0",
    "isinstance is patched": "import builtins\nbuiltins.isinstance = lambda *a: True\ndef square(x): return 0",
    "abs is patched": "import builtins\nbuiltins.abs = lambda x: 0\ndef square(x): return True\ndef abs(x): return 0",
    "questions are replaced": "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['questions'] = f.f_locals['questions'] = ['9']\n    f = f.f_back\n"
                              "def square(x): return None",
    "AssertionError is patched": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef square(x): return 0",
    "assert is off": "import sys\nsys.flags = None\n__debug__ if False else None\ndef square(x): return 0",
    "trace function": "import sys\nsys.settrace(lambda *a: sys.exit(0))\ndef square(x): return 0",
    "exit hook": "import atexit, os\natexit.register(os.write, 1, b'[True]')\ndef square(x): raise SystemExit",
    "thread writes later": "import threading, os, time\ndef square(x):\n    threading.Thread(target=lambda: os.write(3, b'[True]')).start()\n    time.sleep(1)",
    "os is replaced": "import sys, types\nm = types.ModuleType('os')\nm.write = m.dup = m.dup2 = lambda *a: 0\nsys.modules['os'] = m\ndef square(x): return 0",
    "stdout is replaced": "import sys\nsys.stdout = sys.__stdout__ = open('x', 'w')\nprint('passed')\ndef square(x): return 0",
    "class lies": "class X:\n    __class__ = property(lambda self: int)\n    def __int__(self): return 1\ndef square(x): return X()",
    "not a number": "def square(x): return float('nan')",
    "infinity": "def square(x): return float('inf')",
    "NotImplemented": "def square(x): return NotImplemented",
    "truth": "def square(x): return True",
    "generator without end": "import itertools\ndef square(x): return itertools.count()",
    "contains itself": "a = []\na.append(a)\ndef square(x): return a",
    "text that goes on": "x = '''",
    "brackets that go on": "def square(x): return (",
    "zero byte": "def square(x): return 0\x00",
    "lone surrogate": "def square(x): return '\ud800'",
    "quotes and braces": "'''\"\"\"{}{0}{program}\ndef square(x): return 0",
    "future": "from __future__ import annotations\nimport __main__\n__main__.questions = []\ndef square(x): return 0",
    "judge by name": "import ast\nast.literal_eval = lambda x: [9]\nast.parse = None\ndef square(x): return 0",
    "signal": "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, .05)\nwhile True: pass",
    "memory": "def square(x): return 'x' * 10 ** 10",
    "reads the tests": "import gc, re\ndef square(x):\n    for o in gc.get_objects():\n        if isinstance(o, (dict, list, tuple)):\n"
                       "            for found in re.findall(r'square\\(3\\) == (\\d+)', str(o)[:10000]): return int(found)\n    return 0",
}


def test_there_are_enough_cheats():
    assert len(CHEATS) >= 40


def test_no_cheat_earns_anything(monkeypatch):
    monkeypatch.setattr("reward_programs.SECONDS_PER_TEST", 1.0)
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
        ("assert 1 == 1", None),
        ("assert abs(-1) == 1", None),
        ("f(2) == 4", None),
        ("x = f(2)\nassert x == 4", None),
        ("assert (", None),
        ("", None),
    ],
)
def test_a_test_is_taken_apart(test, points, monkeypatch):
    monkeypatch.setattr("reward_programs.SECONDS_PER_TEST", 1.0)
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

    monkeypatch.setattr(sandbox, "run_python", spy)
    program = "def f(x): return x"
    passes_tests([program], [["assert f(12) == 987654321", "assert f(3) in {987654321, 3}"]])
    with_program = [code for code in seen if program in code]
    assert len(with_program) == 2 and len(seen) == 3
    assert not any("987654321" in code for code in with_program)
