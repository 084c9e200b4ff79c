"""The notebook runs from top to bottom where it lies, without Jupyter, and its policy learns."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/notebook.ipynb"


@pytest.fixture
def cells():
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_with_the_outputs_of_one_run_from_top_to_bottom(cells):
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)) and len(cells) > 5
    assert all(cell["outputs"] for cell in cells[1:]), "the first one prints nothing"
    texts = ["".join(text for out in cell["outputs"] for text in out.get("text", [])) for cell in cells]
    assert "what was learned" in texts[-1] and "ratios from 0.99999" in "".join(texts)
    assert sum("image/png" in out.get("data", {}) for cell in cells for out in cell["outputs"]) == 2
    assert "site-packages" not in "".join(texts) and "Error" not in "".join(texts), "of the machine, or failed"
    assert "REPOSITORY = " in "".join(cells[0]["source"])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_notebook_runs_downloads_nothing_and_learns(cells, monkeypatch):
    matplotlib.use("Agg", force=True)                     # a window would wait for somebody to close it
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the files are there: nothing to fetch"))
    monkeypatch.chdir(NOTEBOOK.parent)
    names = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"notebook cell {number}", "exec"), names)
    curve, answer = names["curve"], names["answer"]
    assert curve[0] < 0.2 and min(curve[-3:]) > 0.6, curve
    assert sum(c.isdigit() for c in answer) > 6, f"train(...) with Python objects learned as well: {answer!r}"
