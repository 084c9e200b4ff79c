"""Mathematical equality by example, and expressions that hang."""

import ast
import math
import re
import time

import pytest
from test_rewards import needs_math_verify

import reward_functions
from reward_functions import mathematics
from reward_functions.sandbox import SandboxResult


@needs_math_verify
@pytest.mark.parametrize(
    "given,truth,points",
    [
        ("<answer>1/2</answer>", "\\frac{1}{2}", 1.0), ("so \\boxed{0.5}", "1/2", 1.0),
        ("<answer>2(x+1)</answer>", "$2x+2$", 1.0), ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("<answer>\\frac{1}{3}</answer>", "\\frac{1}{2}", 0.0), ("<answer>1,234</answer>", "1234", 1.0),
        ("\\boxed{1}\\boxed{2}", "2", 0.0), ("2", "2", 0.0), ("", "2", 0.0), ("\\boxed{", "2", 0.0),
        ("<answer>Paris</answer>", "paris", 1.0), ("<answer>dog</answer>", "god", 0.0), ("<answer>x y</answer>", "yx", 1.0),
        ("<answer>18 or 19</answer>", "19", 0.0), ("<answer>18 dollars</answer>", "$18.00", 1.0),
        ("<answer>x</answer>", None, None), ("<answer>9^{9^{9^9}}</answer>", "3", 0.0),
        ("<answer>" + "(" * 3000 + "</answer>", "3", 0.0), ("<answer>" + "\\frac{" * 300 + "</answer>", "3", 0.0),
        ("<answer>__import__('os')._exit(0)</answer>", "3", 0.0),
    ],
)
def test_math_equality(given, truth, points):
    assert reward_functions.math_equality([given], answer=[truth]) == [points]


def verdicts(pairs):
    return reward_functions.math_equality([f"<answer>{given}</answer>" for given, _ in pairs], answer=[truth for _, truth in pairs])


@needs_math_verify
def test_words_after_a_number_are_left_out_only_if_they_are_units():
    words = ["million", "thousand", "dozen", "factorial", "minus seven", "not", "less", "squared", "square", "east", "apples", "per", "c", "t"]
    assert verdicts([(f"18 {word}", "18") for word in words] + [(f"18 \\text{{ {word}}}", "18") for word in words]) == [0.0] * 28
    units = ["dollars", "Euros", "cents", "hours", "people", "years", "books", "miles per hour", "km/h", "m/s^2", "cm", "cm^2", "m²", "square units",
             "sq. ft", "ft^2", "\\text{ cm}^{2}", "\\mathrm{~m}", "\\text{ inches}.", "degrees", "kilograms", "\\degree", "^\\circ C", "^{\\circ}\\text{F}", "°C", "€", "percent"]
    assert verdicts([(f"18 {unit}", "18") for unit in units]) == [1.0] * len(units)
    assert verdicts([("18cm", "18"), ("$18$ dollars", "18"), ("36\\pi \\text{ cm}^2", "36\\pi"), ("18", "18 \\text{ ways}")]) == [1.0] * 4


@needs_math_verify
@pytest.mark.parametrize("given", [
    "18 \\text{19}", "18_{8}", "18 _8", "\\neq 18", "\\not= 18", "\\approx 18", "> 18", "18/", "18^", "18²", "18₈", "10 8", "10\\,8", "17\n18", "$17$ $18$", "\\(17\\) \\(18\\)",
])
def test_what_says_something_else_than_18_is_not_18(given):
    assert verdicts([(given, "18")]) == [0.0]


@needs_math_verify
def test_numbers_side_by_side_are_read_where_they_are_mathematics():
    pairs = [("-1 1/2", "-\\frac{3}{2}"), ("204_5", "204_{5}"), ("\\frac 1 2", "0.5"), ("\\log_2 8", "3"), ("$x=1$ or\n$x=2$", "x=2, x=1"), ("x+\\frac{1}{2}.", "\\frac{1}{2}+x")]
    assert verdicts(pairs) == [1.0] * len(pairs) and verdicts([("204_5", "204_6")]) == [0.0]


@needs_math_verify
def test_a_missing_truth_gives_no_score():
    missing = "", " ", "nan", math.nan, None
    assert reward_functions.math_equality(["<answer>5</answer>"] * 5, answer=list(missing)) == [None] * 5


def test_a_long_answer_is_not_read():
    started = time.process_time()
    assert mathematics.as_latex("\\text{a}" * 15000) is mathematics.as_latex("1+" * 500 + "1") is None and mathematics.as_latex("1+" * 499 + "1")
    assert time.process_time() - started < 1


@needs_math_verify
def test_an_answer_that_never_ends_costs_neither_the_others_nor_the_order(monkeypatch):
    monkeypatch.setattr("reward_functions.mathematics.SECONDS_PER_ANSWER", 1)
    answers = ["2/2", "10**10**10", "2**(2**(2**100))", "4/2", "100000!^{100000!}", "1/3"]
    points = reward_functions.math_equality([f"<answer>{a}</answer>" for a in answers], answer=["1", "7", "7", "2", "7", "1/4"])
    assert points == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_math_verify_that_does_not_work_in_the_sandbox_is_an_error(monkeypatch):
    monkeypatch.setitem(mathematics.SANDBOX, "modules", ("not_installed",))
    mathematics.check_sandbox.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"math-verify does not work in the sandbox \(.+\); pip install it"):
        reward_functions.math_equality(["<answer>1</answer>"], answer=["2"])


def test_an_answer_that_was_compared_in_what_another_one_left_is_compared_again(monkeypatch):
    def compare(code, **options):                                  # time is over at the second of several, or at a lone "8"
        given = [pair[0] for pair in ast.literal_eval(re.search(r"in (\[.*\]):", code)[1])] if "in [" in code else []
        runs.append(given)
        return SandboxResult(True, "" if given[:1] == ["$8$"] else "1\n", "", "")

    runs = []
    monkeypatch.setattr("reward_functions.mathematics.run_python", compare)
    points = reward_functions.math_equality([f"<answer>{n}</answer>" for n in (7, 8, 9)], answer=["1+6", "2+6", "3+6"])
    assert points == [1.0, 0.0, 1.0] and [given for given in runs if given] == [["$7$", "$8$", "$9$"], ["$8$", "$9$"], ["$9$"]]
