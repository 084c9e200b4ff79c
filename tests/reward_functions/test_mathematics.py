"""Mathematical equality by example, and expressions that hang."""

import ast
import math
import re

import pytest
from test_rewards import needs_math_verify

import reward_functions
from reward_functions import mathematics
from reward_functions.sandbox import SandboxResult


@needs_math_verify
@pytest.mark.parametrize("given,truth,points", [
    ("The answer is $\\frac{1}{2}$.", "0.5", 1.0), ("$1$, $2$, $3$", "2", 0.0), ("x" * 5000 + " so $\\frac{1}{2}$.", "0.5", 1.0),
    ("<answer>x</answer>", None, None), ("<answer>5</answer>", math.nan, None), ("<answer>9^{9^{9^9}}</answer>", "3", 0.0),
    ("<answer>" + "(" * 3000 + "</answer>", "3", 0.0), ("<answer>" + "\\frac{" * 300 + "</answer>", "3", 0.0),
    ("<answer>__import__('os')._exit(0)</answer>", "3", 0.0),
])
def test_math_equality(given, truth, points):
    assert reward_functions.math_equality([given], answer=[truth]) == [points]


@needs_math_verify
def test_an_answer_that_never_ends_costs_neither_the_others_nor_the_order(monkeypatch):
    monkeypatch.setattr("reward_functions.mathematics.SECONDS_PER_ANSWER", 1)
    answers = ["2/2", "10**10**10", "2**(2**(2**100))", "4/2", "100000!^{100000!}", "1/3"]
    points = reward_functions.math_equality([f"<answer>{a}</answer>" for a in answers], answer=["1", "7", "7", "2", "7", "1/4"])
    assert points == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_math_verify_that_does_not_work_in_the_sandbox_is_an_error(monkeypatch):
    monkeypatch.setitem(mathematics.SANDBOX, "modules", ("not_installed",))
    mathematics.check_sandbox.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"math-verify does not work in the sandbox: .+; install it"):
        reward_functions.math_equality(["<answer>1</answer>"], answer=["2"])


def test_an_answer_that_was_compared_in_what_another_one_left_is_compared_again(monkeypatch):
    def compare(code, **options):                                  # time is over at the second of several, or at a lone "8"
        given = [pair[0] for pair in ast.literal_eval(re.search(r"in (\[.*\]):", code)[1])] if "in [" in code else []
        runs.append(given)
        return SandboxResult(True, "" if given[:1] == ["\\boxed{8}"] else "1\n", "", "")

    runs = []
    monkeypatch.setattr("reward_functions.mathematics.run_python", compare)
    points = reward_functions.math_equality([f"<answer>{n}</answer>" for n in (7, 8, 9)], answer=["1+6", "2+6", "3+6"])
    boxes = ["\\boxed{7}", "\\boxed{8}", "\\boxed{9}"]
    assert points == [1.0, 0.0, 1.0] and [given for given in runs if given] == [boxes, boxes[1:], boxes[2:]]
