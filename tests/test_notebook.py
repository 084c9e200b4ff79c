"""The notebook runs from top to bottom where it lies, without Jupyter, and its policy learns."""

import json

import matplotlib
import pytest
from project_files import ROOT

NOTEBOOK = ROOT / "docs/notebook.ipynb"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_notebook_runs_downloads_nothing_and_learns(monkeypatch):
    matplotlib.use("Agg", force=True)                     # a window would wait for somebody to close it
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the files are there: nothing to fetch"))
    monkeypatch.chdir(NOTEBOOK.parent)
    names = {}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"notebook cell {number}", "exec"), names)
    curve, answer = names["curve"], names["answer"]
    assert curve[0] < 0.2 and min(curve[-3:]) > 0.6, curve
    assert sum(c.isdigit() for c in answer) > 6, f"train(...) with Python objects learned as well: {answer!r}"
