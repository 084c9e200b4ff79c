"""The notebook runs from top to bottom where it lies, without Jupyter: empty functions are named, solved ones train its model."""

import contextlib
import io
import json
import sys

import pytest
import solutions
from project_files import ROOT

NOTEBOOK = ROOT / "docs/notebook.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
TO_WRITE = [cell for cell in CELLS if "    ...\n" in cell]


@pytest.fixture
def run(monkeypatch):
    """Run cells in one namespace, and return what they print."""
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the files are there: nothing to fetch"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "5_kl", raising=False)                     # the notebook changes its functions
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")            # as the first cell, but undone afterwards
    names = vars(solutions).copy()

    def run_cells(cells):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for cell in cells:
                exec(compile(cell, "a cell", "exec"), names)
        return printed.getvalue().splitlines()

    yield run_cells
    sys.modules.pop("5_kl", None)


def test_an_empty_function_is_named_and_a_solved_one_is_right(run):
    lines = run(CELLS[:2])
    assert len(lines) == 8 and all("reward" in line for line in lines)
    assert len(TO_WRITE) == 4
    for cell in TO_WRITE:
        name = cell.partition("(")[0].removeprefix("def ")
        assert run([f"check({name})"]) == ["right"]
        (said,) = run([cell])
        assert "not None" in said


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_model_learns_with_the_solutions_and_then_cheats(run):
    lines = run([cell for cell in CELLS if cell not in TO_WRITE])
    right, cheating = (float(line.split()[-1]) for line in lines if line.startswith("step 100"))
    assert right > 0.8 and cheating < 0.2
