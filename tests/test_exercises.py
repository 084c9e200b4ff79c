"""The exercises of the lecture: unsolved they fail, solved they pass, and the usual mistakes are noticed."""

import importlib.util
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "docs/exercises"


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


def test_the_headings_of_the_lecture_say_which_exercises_follow_and_add_up_to_ninety_minutes():
    parts = (FOLDER.parent / "lecture.md").read_text().split("\n## ")[1:]
    minutes = 0
    for part in parts:
        heading, _, text = part.partition("\n")
        talk, then, named = re.search(r"\((\d+) minutes(?:, then (\d+) for exercises? ([\d and]+))?\)", heading).groups()
        assert re.findall(r"\d", named or "") == re.findall(r"\*\*Exercise (\d)\*\*", text), heading
        minutes += int(talk) + int(then or 0)
    assert minutes == 80, "a class of ninety minutes begins late, and somebody asks"


def test_every_question_to_the_room_has_its_answer_behind_it():
    text = " ".join((FOLDER.parent / "lecture.md").read_text().split())
    behind = [re.match(r"[^?]*\?(.{3})", part)[1] for part in text.split("Question")[1:]]
    assert len(behind) >= 6 and all(after.startswith(" (") for after in behind), behind
    assert text.count("?") <= len(behind) + text.count("=?") + 1, "a question that is not marked"


stubs, solutions = module_of("exercises"), module_of("solutions")
SOLVED = {name: f for name, f in vars(solutions).items() if inspect.isfunction(f)}


@pytest.mark.parametrize("number", "123456")
def test_an_exercise_fails_until_it_is_solved(tests, number):
    with pytest.raises(NotImplementedError):
        tests(number, stubs)
    tests(number, solutions)


def test_stubs_and_solutions_have_the_same_signatures():
    assert len(SOLVED) == 6
    for name, function in SOLVED.items():
        assert inspect.signature(function) == inspect.signature(getattr(stubs, name)), name


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


def ratio(logp, old_logp):
    return (logp - old_logp).exp()


MISTAKES = {
    "no ties": ("1", "group_advantages", lambda r: (r - r.mean(1, True)) / (r.std(1, keepdim=True) + 1e-8)),
    "std over G": ("1", "group_advantages", lambda r: (r - r.mean(1, True)) / (r.std(1, False, keepdim=True) + 1e-8)),
    "over the batch": ("1", "group_advantages", lambda r: (r - r.mean()) / (r.std() + 1e-8)),
    "itself among the siblings": ("2", "leave_one_out", lambda r: r - r.mean(1, True)),
    "maximum": ("3", "clipped_loss", lambda p, o, a, c: -torch.maximum(ratio(p, o) * a, ratio(p, o).clamp(1 - c, 1 + c) * a)),
    "clip alone": ("3", "clipped_loss", lambda p, o, a, c: -ratio(p, o).clamp(1 - c, 1 + c) * a),
    "mean of means": ("4", "loss_of_a_piece", lambda loss, mask, n: loss[mask].mean()),
    "product": ("4", "loss_of_a_piece", lambda loss, mask, n: (loss * mask).sum() / n),
    "no ratio": ("5", "kl_term", lambda p, o, q: k3(p, q)),
    "ratio without gradient": ("5", "kl_term", lambda p, o, q: ratio(p, o).detach() * k3(p, q)),
    "k1": ("5", "kl_term", lambda p, o, q: p - q),
    "in the text": ("6", "right_number", lambda completions, answer, **_: [
        float(a in text) for text, a in zip(completions, answer)]),
    "the first answer": ("6", "right_number", lambda completions, answer, **_: [
        float(f"<answer>{a}<" in text.replace(",", "").replace(" ", "").replace(".0<", "<"))
        for text, a in zip(completions, answer)]),
    "leave one out reversed": ("2", "leave_one_out", lambda r: -SOLVED["leave_one_out"](r)),
    "one number": ("6", "right_number", lambda completions, answer, **_: 1.0),
    "nothing": ("6", "right_number", lambda completions, answer, **_: None),
    "float of the list": ("6", "right_number", lambda completions, answer, **_: [float(answer)]),
    "raises": ("6", "right_number", lambda completions, answer, **_: [
        float(math.isclose(float(text.split("<answer>")[1].split("<")[0].replace(",", "")), float(a)))
        for text, a in zip(completions, answer)]),
}


SAID = {                        # of each mistake, in the message
    "no ties": "is a tie", "std over G": "divides by G and not by G minus 1", "over the batch": "those of the batch",
    "itself among the siblings": "contains the completion itself", "maximum": "larger of the two", "clip alone": "the minimum is missing",
    "mean of means": "divides by its own tokens", "product": "NaN times 0", "no ratio": "the ratio is missing",
    "ratio without gradient": "has no gradient", "k1": "this is k1", "in the text": "is right where the answer is 1000, and earns 0.0",
    "leave one out reversed": "sign is reversed", "one number": "a number for each completion, not 1.0",
    "nothing": "a number for each completion, not None", "float of the list": "answer is a list",
    "the first answer": "two answers", "raises": "raises IndexError",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_noticed_and_named(tests, mistake):
    number, name, wrong = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=SAID[mistake]):
        tests(number, SimpleNamespace(**SOLVED | {name: wrong}))


def test_every_exercise_has_a_hint():
    for name in SOLVED:
        assert "Hint: " in getattr(stubs, name).__doc__, name
