"""A Python that is too old is refused in one line, before anything is installed or imported."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from project_files import ROOT

OLD = """#!/bin/sh
exec {python} -c '
import atexit, runpy, sys
sys.version_info, sys.argv = (3, 9, 18), sys.argv[1:]
atexit.register(lambda: print({{"config", "torch"}} & set(sys.modules) or "nothing imported"))
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


@pytest.fixture
def path(tmp_path):
    """Environment variables with which python3 says that it is 3.9, without those of a make that started the tests."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(OLD.format(python=sys.executable))
    (tmp_path / "bin/python3").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return inherited | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.parametrize("program", ["train.py", "infer.py"])
def test_the_programs_end_before_their_imports(path, program):
    done = subprocess.run(["python3", program, "--help"], cwd=ROOT, env=path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "nothing imported\n", done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("this is Python ") and "3.11 or newer" in line


@pytest.mark.parametrize("target", ["demo", "test", "test-tpu"])
def test_make_ends_before_it_installs(path, tmp_path, target):
    for name in "Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt", "requirements-tpu.txt", ".ci/oldest.txt", ".ci/usual.txt", "runs/__init__.py":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(["make", target], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "nothing imported\n"
    assert done.stderr.startswith("this is Python ") and not list(tmp_path.glob(".venv*"))


def test_the_oldest_versions_are_the_lower_bounds():
    files = (ROOT / "requirements.txt").read_text() + (ROOT / "requirements-dev.txt").read_text()
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", files, flags=re.M))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci/oldest.txt").read_text(), flags=re.M))
    assert {name: re.sub(r"(\.0)+$", "", version) for name, version in pinned.items()} == {
        name: bound for name, bound in bounds.items() if name not in ("ruff", "mypy")}
