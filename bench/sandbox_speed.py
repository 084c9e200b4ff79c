"""
How many short programs the sandbox runs a second, with every isolation method that works here.

    python bench/sandbox_speed.py

The same program, print(sum(range(100))), first one after the other, then from several threads; and passes_tests with three
asserts per program, which is four runs.
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

COUNT = 300
THREADS = os.cpu_count()
CODE = "print(sum(range(100)))"


def main() -> None:
    """Print a table."""
    print(f"{THREADS} cores, {COUNT} programs")
    print("| method | first program | one after the other | from as many threads as cores |\n|---|---|---|---|")
    for method in METHODS:
        run = partial(run_python, CODE, method=method)
        started = time.perf_counter()
        try:
            run()
        except RuntimeError as error:
            print(f"| {method} | {error} | | |")
            continue
        first = time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(COUNT):
            assert run().stdout == "4950\n"
        alone = COUNT / (time.perf_counter() - started)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda run: run(), [run] * 2 * THREADS))                            # servers start
            started = time.perf_counter()
            assert all(result.ok for result in threads.map(lambda run: run(), [run] * COUNT))
            together = COUNT / (time.perf_counter() - started)
        print(f"| {method} | {1000 * first:.0f} ms | {alone:.0f}/s | {together:.0f}/s |")
    program, tests = "def square(x):\n    return x * x", [f"assert square({x}) == {x * x}" for x in range(3)]
    started = time.perf_counter()
    assert passes_tests([program] * 64, [tests] * 64) == [1.0] * 64
    print(f"passes_tests: 64 programs with three asserts each in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
