"""The four rewards of tunix by example."""

import pytest
from test_rewards import GOLD

import reward_functions


@pytest.mark.parametrize(
    "text,truth,exact,approximate,answer,numbers",
    [
        (GOLD, "132", 3.0, 2.0, 3.0, 1.5),
        ("so: <reasoning>x</reasoning> well <answer>132\n", "132", 3.0, 1.0, 3.0, 1.5),
        ("<reasoning>x</reasoning><answer>1,000</answer>", "1000", 3.0, 2.0, 3.0, 0.0),
        ("<reasoning>x</reasoning><answer>125</answer>", "132", 3.0, 2.0, 0.5, 0.0),
        ("<reasoning>x</reasoning><answer>110</answer>", "132", 3.0, 2.0, 0.25, 0.0),
        ("<reasoning>x</reasoning><answer>145</answer>", "132", 3.0, 2.0, 0.5, 0.0),
        ("<reasoning>x</reasoning><answer>158</answer>", "132", 3.0, 2.0, 0.25, 0.0),
        ("<reasoning>x</reasoning><answer>159</answer>", "132", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>inf</answer>", "132", 3.0, 2.0, -0.5, 0.0),
        ("<reasoning>x</reasoning><answer>7</answer>", "132", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>7</answer>", "0", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>many</answer>", "132", 3.0, 2.0, -0.5, 0.0),
        ("<reasoning>x</reasoning><answer>-5</answer>", "-5", 3.0, 2.0, 3.0, 0.0),
        ("132", "132", 0.0, -2.0, 0.0, 0.0),
        ("<answer>about 132 or so", "132", 0.0, -1.0, 0.0, 1.5),
        ("<answer>1.2.3", "132", 0.0, -1.0, 0.0, 0.0),
    ],
)
def test_the_four_rewards_of_tunix(text, truth, exact, approximate, answer, numbers):
    assert reward_functions.match_format_exactly([text]) == [exact]
    assert reward_functions.match_format_approximately([text]) == [approximate]
    assert reward_functions.check_answer([text], answer=[truth]) == [answer]
    assert reward_functions.check_numbers([text], answer=[truth]) == [numbers]
