"""
Which tests guard which file: writes the table of CONTRIBUTING.md, from the coverage of the tests of make check.

    pip install pytest-cov && python tests/guards.py

A file's guards are the test files of its name, then those that reach most of its other lines, until nine of ten lines that any
test reaches are reached; three at most. Lines that importing the file runs do not count.
"""

import re
import subprocess
import sys

from coverage import CoverageData
from project_files import ROOT, modules_of_the_program

COMMAND = "-m pytest -q -n auto --maxprocesses 4 --cov=. --cov-context=test --cov-report= -m".split()


def lines_by_tests(data: CoverageData, path: str) -> dict[str, set[int]]:
    """Return the lines of a file that each test file reaches."""
    reached: dict[str, set[int]] = {}
    for line, contexts in data.contexts_by_lineno(path).items():
        for context in filter(None, contexts):
            reached.setdefault(context.split("::")[0], set()).add(line)
    return reached


def guards(name: str, reached: dict[str, set[int]]) -> list[str]:
    """Return the test files that guard the file of a name."""
    chosen = [test for test in reached if re.search(rf"(^|/)test_{name}\.py$", test)]
    left, enough = set().union(*reached.values()), 0.1 * len(set().union(*reached.values()))
    left -= set().union(*(reached[test] for test in chosen))
    while len(left) > enough and len(chosen) < 3:
        chosen.append(max(sorted(reached), key=lambda test: len(reached[test] & left)))
        left -= reached[chosen[-1]]
    return chosen


def main() -> None:
    subprocess.run([sys.executable, *COMMAND, "not slow and not exhaustive"], cwd=ROOT, check=True)
    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    rows = []
    for path in modules_of_the_program():
        tests = guards(path.stem, lines_by_tests(data, str(path)))
        names = ", ".join(test.removeprefix("tests/").removesuffix(".py") for test in tests)
        rows.append(f"| {path.relative_to(ROOT)} | {names} |\n")
    page = ROOT / "CONTRIBUTING.md"
    head, table, rest = re.split(r"(\| file \| tests \|\n\|---\|---\|\n)(?:\|.*\n)*", page.read_text())
    page.write_text(head + table + "".join(rows) + rest)


if __name__ == "__main__":
    main()
