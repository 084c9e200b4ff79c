"""The exercises of the lecture: unsolved they fail, solved they pass, and the usual mistakes are noticed."""

import importlib.util
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from project_files import ROOT

FOLDER = ROOT / "docs/exercises"


def module_of(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tests(monkeypatch):
    """Number of an exercise -> its test, of the functions in a module."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delenv("EXERCISES", raising=False)
    module = module_of("test_exercises")
    found = {name.split("_")[1]: test for name, test in vars(module).items() if name.startswith("test_")}
    assert sorted(found) == list("123456")

    def run(number, functions):
        module.task = functions
        found[number]()

    return run


stubs, solutions = module_of("exercises"), module_of("solutions")
SOLVED = {name: f for name, f in vars(solutions).items() if inspect.isfunction(f)}


@pytest.mark.parametrize("number", "123456")
def test_an_exercise_fails_until_it_is_solved(tests, number):
    with pytest.raises(NotImplementedError):
        tests(number, stubs)
    tests(number, solutions)


def test_stubs_have_hints_and_the_signatures_of_the_solutions():
    assert len(SOLVED) == 6
    for name, function in SOLVED.items():
        stub = getattr(stubs, name)
        assert inspect.signature(function) == inspect.signature(stub) and "Hint: " in stub.__doc__, name


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


def ratio(logp, old_logp):
    return (logp - old_logp).exp()


MISTAKES = {                    # the exercise, its function with the mistake, and a part of what is said
    "no ties": ("1", "group_advantages", lambda r: (r - r.mean(1, True)) / (r.std(1, keepdim=True) + 1e-8), "have zero variance"),
    "std over G": ("1", "group_advantages", lambda r: (r - r.mean(1, True)) / (r.std(1, False, keepdim=True) + 1e-8),
                   "divides by G and not by G minus 1"),
    "itself among the siblings": ("2", "leave_one_out", lambda r: r - r.mean(1, True), "contains the completion itself"),
    "maximum": ("3", "clipped_loss", lambda p, o, a, c: -torch.maximum(ratio(p, o) * a, ratio(p, o).clamp(1 - c, 1 + c) * a),
                "larger of the two"),
    "mean of means": ("4", "loss_of_a_piece", lambda loss, mask, n: loss[mask].mean(), "divides by its own tokens"),
    "sum of numbers": ("4", "loss_of_a_piece", lambda loss, mask, n: loss.nansum() / n, "the padding is in the sum"),
    "product": ("4", "loss_of_a_piece", lambda loss, mask, n: (loss * mask).sum() / n, "NaN times 0"),
    "no ratio": ("5", "kl_term", lambda p, o, q: k3(p, q), "the ratio is missing or ignores"),
    "ratio without gradient": ("5", "kl_term", lambda p, o, q: ratio(p, o).detach() * k3(p, q), "has no gradient"),
    "old_logp ignored": ("5", "kl_term", lambda p, o, q: ratio(p, p.detach()) * k3(p, q), "missing or ignores old"),
    "detached": ("5", "kl_term", lambda p, o, q: (ratio(p, o) * k3(p, q)).detach(), "the penalty has no gradient"),
    "in the text": ("6", "right_number", lambda completions, answer, **_: [
        float(a in text) for text, a in zip(completions, answer)], "is right where the answer is 1000, and earns 0.0"),
    "one number": ("6", "right_number", lambda completions, answer, **_: 1.0, "a number for each completion, not 1.0"),
    "float": ("6", "right_number", lambda completions, answer, **_: solutions.right_number(
        [text.replace("_", "") for text in completions], answer), "an underscore"),
    "raises": ("6", "right_number", lambda completions, answer, **_: [
        float(math.isclose(float(text.split("<answer>")[1].split("<")[0].replace(",", "")), float(a)))
        for text, a in zip(completions, answer)], "raises IndexError"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_noticed_and_named(tests, mistake):
    number, name, wrong, said = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=said):
        tests(number, SimpleNamespace(**SOLVED | {name: wrong}))
