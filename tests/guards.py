"""
Write the table of CONTRIBUTING.md that names the tests of each file, from the coverage of the tests of make check.

    pip install pytest-cov && python tests/guards.py

The tests of a file are those of its name, then those that reach most of its other lines, until nine of ten lines that any
test reaches are reached; three files at most. Lines that importing the file runs do not count. Without any, the test files that name it.
"""

import re
import subprocess
import sys
from pathlib import Path

from coverage import CoverageData
from project_files import ROOT, modules_of_the_program

COMMAND = "-m pytest -q -n auto --cov=. --cov-context=test --cov-report= -m".split()


def lines_by_tests(data: CoverageData, path: str) -> dict[str, set[int]]:
    """Return the lines of a file that each test file reaches."""
    reached: dict[str, set[int]] = {}
    for line, contexts in data.contexts_by_lineno(path).items():
        for context in filter(None, contexts):
            reached.setdefault(context.split("::")[0], set()).add(line)
    return reached


def guards(path: Path, reached: dict[str, set[int]]) -> list[str]:
    """Return the test files of a file, from the lines that each test file reaches."""
    files = {str(test.relative_to(ROOT)): test for test in [ROOT / "test_grpo.py", *(ROOT / "tests").rglob("test_*.py")]}
    chosen = [name for name, test in files.items() if test.stem == f"test_{path.stem}" and test.parent.name in (path.parent.name, "tests")]
    every = set().union(*reached.values())
    left = every.difference(*(reached.get(name, ()) for name in chosen))
    while len(left) > 0.1 * len(every) and len(chosen) < 3:
        chosen.append(max(sorted(reached), key=lambda test: len(reached[test] & left)))
        left -= reached[chosen[-1]]
    return chosen or sorted(name for name, test in files.items() if path.stem in test.read_text())


def main() -> None:
    subprocess.run([sys.executable, *COMMAND, "not slow"], cwd=ROOT, check=True)
    data = CoverageData(str(ROOT / ".coverage"))
    data.read()
    rows = []
    for path in modules_of_the_program():
        tests = guards(path, lines_by_tests(data, str(path)))
        names = ", ".join(test.removeprefix("tests/").removesuffix(".py") for test in tests)
        rows.append(f"| {path.relative_to(ROOT)} | {names} |\n")
    page = ROOT / "CONTRIBUTING.md"
    head, table, rest = re.split(r"(\| file \| tests \|\n\|---\|---\|\n)(?:\|.*\n)*", page.read_text())
    page.write_text(head + table + "".join(rows) + rest)


if __name__ == "__main__":
    main()
