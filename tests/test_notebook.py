"""The notebook runs from top to bottom where it lies, without Jupyter, its policy learns, and its stored settings are today's."""

import contextlib
import io
import json

import matplotlib
import pytest
from project_files import ROOT

import train

NOTEBOOK = ROOT / "docs/notebook.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def run_cells(numbers, names):
    for number in numbers:
        exec(compile("".join(CELLS[number]["source"]), f"code cell {number}", "exec"), names)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_notebook_runs_downloads_nothing_and_learns(monkeypatch):
    matplotlib.use("Agg", force=True)                     # a window would wait for somebody to close it
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the files are there: nothing to fetch"))
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")            # as the first cell, but undone afterwards
    names = {}
    run_cells(range(len(CELLS)), names)
    curve, rewards = names["curve"], names["different_digits"](names["answers"])
    assert curve[0] < 0.2 and min(curve[-3:]) > 0.6, curve
    assert sum(rewards) / len(rewards) > 0.25, f"train(...) with Python objects learned as well: {names['answers']!r}"


def test_the_settings_stored_in_the_notebook_are_those_that_a_run_prints_today(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "training_loop", lambda *_: None)
    names = {}
    run_cells([1, 2], names)
    names["sample_completions_for_prompts"] = lambda *_, **__: names["rollout"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run_cells([-1], names)
    settings = printed.getvalue().partition("phase ")[0]
    stored = "".join(text for output in CELLS[-1]["outputs"] for text in output["text"])
    assert settings.startswith("profile") and stored.startswith(settings)
