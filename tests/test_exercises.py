"""
The exercises of the lecture: unsolved they fail, solved they pass, and the usual mistakes are noticed.

The notebook runs from top to bottom where it lies, without Jupyter: empty functions are named, solved ones train its model.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import re
import sys
from types import SimpleNamespace

import exercises
import pytest
import solutions
import torch
from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("tests_of_the_exercises", ROOT / "docs/exercises/test_exercises.py")
tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tests)
TESTS = {name.split("_", 2)[2]: test for name, test in vars(tests).items() if name.startswith("test_")}
SOLVED = {name: f for name, f in vars(solutions).items() if inspect.isfunction(f)}


def run(name, function):
    """Run the test of an exercise on a function."""
    tests.task = SimpleNamespace(**{name: function})
    TESTS[name]()


@pytest.mark.parametrize("name", SOLVED)
def test_an_exercise_fails_until_it_is_solved(name):
    with pytest.raises(NotImplementedError):
        run(name, getattr(exercises, name))
    run(name, SOLVED[name])


def test_stubs_have_hints_and_the_signatures_of_the_solutions():
    assert len(SOLVED) == 6 and SOLVED.keys() == TESTS.keys()
    for name, function in SOLVED.items():
        stub = getattr(exercises, name)
        assert inspect.signature(function) == inspect.signature(stub) and "Hint: " in stub.__doc__, name


def edited(pattern, new=""):
    """Return the solution of exercise 6, with an error: it replaces a pattern in completions and answers."""
    return lambda completions, answer, **_: SOLVED["right_number"](*[[re.sub(pattern, new, x) for x in texts] for texts in (completions, answer)])


MISTAKES = [(name, said, wrong) for name, mistakes in tests.MISTAKES.items() for said, wrong in mistakes.items()] + [
    ("group_advantages", "changed in place", lambda r: r.copy_(SOLVED["group_advantages"](r))),
    ("leave_one_out", "changed in place", lambda r: r.copy_(SOLVED["leave_one_out"](r))),
    ("clipped_loss", "is right, but has no gradient", lambda *arguments: SOLVED["clipped_loss"](*arguments).detach()),
    ("micro_batch_loss", "changed in place", lambda loss, mask, n: loss.masked_fill_(~mask, 0.0).sum() / n),
    ("micro_batch_loss", "the padding is in the sum", lambda loss, mask, n: loss.nansum() / n),
    ("micro_batch_loss", "return a tensor with a gradient, not 0.", lambda loss, mask, n: loss[mask].sum().item() / n),
    ("micro_batch_loss", "is right, but has no gradient", lambda loss, mask, n: torch.tensor(loss[mask].sum().item() / n)),
    ("micro_batch_loss", "where mask is True is hidden", lambda loss, mask, n: (loss * mask).nan_to_num().sum() / n),
    ("kl_term", "the ratio is missing or ignores old_logp", lambda p, o, q: (p - p.detach()).exp() * tests.k3(p, q)),
    ("kl_term", "is right, but has no gradient", lambda p, o, q: ((p - o).exp() * tests.k3(p, q)).detach()),
    ("right_number", "answer is 1000, and earns 0.0", lambda completions, answer, **_: [float(a in text) for text, a in zip(completions, answer)]),
    ("right_number", "a number for each completion, not 1.0", lambda completions, answer, **_: 1.0),
    ("right_number", "inside the loop", lambda completions, answer, **_: SOLVED["right_number"](completions[:1], answer[:1])),
    ("right_number", "its own answer", lambda completions, answer, **_: SOLVED["right_number"](completions, answer[:1] * len(answer))),
    ("right_number", "no tolerance is allowed", edited(r"\d+\.\d+", lambda number: f"{float(number[0]):.0f}")),
    ("right_number", "answer is 0.5, and earns 0.0", edited(r"\.[1-9]", "?")),
    ("right_number", "raises IndexError", lambda texts, answer, **_: SOLVED["right_number"](["<answer>" + x.split("<answer>")[1] for x in texts], answer)),
    *[("right_number", said, edited(pattern)) for said, pattern in (
        ("int() cuts", r"\.\d+"), ("a comma stands before three digits", ","), ("the sign counts", "-"), ("an underscore", "_"),
        ("four digits after a comma", r",(?=\d{4})"), ("four digits before a comma", r"(?<=\d{4}),"),
    )],
]


@pytest.mark.parametrize("name, said, wrong", MISTAKES)
def test_a_usual_mistake_is_noticed_and_named(name, said, wrong):
    with pytest.raises(pytest.fail.Exception, match=re.escape(said)):
        run(name, wrong)


NOTEBOOK = ROOT / "docs/notebook.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
TO_WRITE = [cell for cell in CELLS if "    ...\n" in cell]


@pytest.fixture
def run_cells(monkeypatch):
    """Run cells in one namespace, and return what they print."""
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the files are there: nothing to fetch"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "5_kl", raising=False)                     # the notebook changes its functions
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")            # as the first cell, but undone afterwards
    names = vars(solutions).copy()

    def run(cells):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for cell in cells:
                exec(compile(cell, "a cell", "exec"), names)
        return printed.getvalue().splitlines()

    yield run
    sys.modules.pop("5_kl", None)


def test_an_empty_function_is_named_and_a_solved_one_is_right(run_cells):
    lines = run_cells(CELLS[:2])
    assert len(lines) == 8 and all("reward" in line for line in lines)
    assert len(TO_WRITE) == 4
    for cell in TO_WRITE:
        name = cell.partition("(")[0].removeprefix("def ")
        assert run_cells([f"check({name})"]) == ["right"]
        (said,) = run_cells([cell])
        assert "not None" in said


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_model_learns_with_the_solutions_and_then_cheats(run_cells):
    lines = run_cells([cell for cell in CELLS if cell not in TO_WRITE])
    right, cheating = (float(line.split()[-1]) for line in lines if line.startswith("step 100"))
    assert right > 0.8 and cheating < 0.2
