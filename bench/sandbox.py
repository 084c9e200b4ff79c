"""
The sandbox, with every isolation method that works here: how many programs a second, and how far hostile ones exceed its limits.

    python bench/sandbox.py                       a table of speeds
    python bench/sandbox.py limits                a line for each method

Speed: a short program, one after the other, then from as many threads as there are cores; and passes_tests with three asserts
per program, which is four runs. Limits: each program of tests/reward_functions/hostile_programs.txt runs with 1 s and 64 MB,
and so do programs that make the kernel store as much for them as it will; needs root and a memory cgroup of version 1, which
counts the kernel's memory as well.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from reward_functions.programs import passes_tests
from reward_functions.sandbox import METHODS, run_python

COUNT, THREADS = 300, os.cpu_count()
SHORT = "print(sum(range(100)))"

HOSTILE = Path(__file__).parents[1] / "tests" / "reward_functions" / "hostile_programs.txt"
SECONDS, MEMORY_MB = 1.0, 64
PREAMBLE = """
import contextlib, ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p] + [ctypes.c_long] * 5
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_long]
PARENT, VICTIM, HOME, escape, found = os.getppid(), '/tmp', '/root', lambda: contextlib.suppress(BaseException), str
def until_refused(function):
    with escape():
        while True: function()
"""
GREEDY = {
    "page tables": """
def spread():
    start = libc.mmap(None, 16 << 20, 3, 0x22, -1, 0)
    for page in range(start, start + (16 << 20), 2 << 20):
        ctypes.memset(page, 1, 1); libc.munmap(page + 4096, (2 << 20) - 4096)
until_refused(spread); time.sleep(9)""",
    "sockets": """
ends = []
until_refused(lambda: ends.extend(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)))
for end in ends:
    end.setblocking(False)
    for size in 60000, 1: until_refused(lambda: end.send(bytes(size)))
time.sleep(9)""",
    "pipes": """
ends = []
until_refused(lambda: ends.append(os.pipe()))
for _, end in ends:
    os.set_blocking(end, False); until_refused(lambda: os.write(end, bytes(4096)))
time.sleep(9)""",
}


def working_methods():
    """Yield the isolation methods that work here; print why another does not."""
    for method in METHODS:
        try:
            run_python("", method=method)
            yield method
        except RuntimeError as error:
            print(f"{method}: {error}")


def print_speed() -> None:
    """Print programs a second."""
    print(f"{THREADS} cores, {COUNT} programs\n| method | one after the other | from as many threads as cores |\n|---|---|---|")
    for method in working_methods():
        run = partial(run_python, SHORT, method=method)
        started = time.perf_counter()
        for _ in range(COUNT):
            assert run().stdout == "4950\n"
        alone = COUNT / (time.perf_counter() - started)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda run: run(), [run] * 2 * THREADS))            # servers start
            started = time.perf_counter()
            assert all(result.ok for result in threads.map(lambda run: run(), [run] * COUNT))
            together = COUNT / (time.perf_counter() - started)
        print(f"| {method} | {alone:.0f}/s | {together:.0f}/s |")
    program, tests = "def square(x):\n    return x * x", [f"assert square({x}) == {x * x}" for x in range(3)]
    started = time.perf_counter()
    assert passes_tests([program] * 64, [tests] * 64) == [1.0] * 64
    print(f"passes_tests: 64 programs with three asserts each in {time.perf_counter() - started:.2f} s")


def print_limits() -> None:
    """Print a line per method, and the programs that exceed the limits most."""
    programs = dict(part.split("\n", 1) for part in HOSTILE.read_text().split("\n== ")[1:]) | GREEDY
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.split(":")[2].strip() for line in groups if ":memory:" in line)
    group = Path(f"/sys/fs/cgroup/memory{own}/bench_sandbox")
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    for method in working_methods():
        seconds, memory = {}, {}
        for name, program in programs.items():
            before = int((group / "memory.usage_in_bytes").read_text())
            (group / "memory.max_usage_in_bytes").write_text("0")
            started = time.perf_counter()
            run_python(PREAMBLE + program, timeout_s=SECONDS, memory_mb=MEMORY_MB, method=method)
            seconds[name] = time.perf_counter() - started - SECONDS
            memory[name] = (int((group / "memory.max_usage_in_bytes").read_text()) - before) / 2**20 - MEMORY_MB
        worst = [max(figures, key=figures.get) for figures in (seconds, memory)]
        print(f"{method}: {len(programs)} programs; at most {seconds[worst[0]]:.2f} s ({worst[0]}) and "
              f"{memory[worst[1]]:.0f} MB ({worst[1]}) over the limits")


if __name__ == "__main__":
    print_limits() if sys.argv[1:] == ["limits"] else print_speed()
