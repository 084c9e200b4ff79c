"""The four rewards of tunix by example."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rewards import GOLD

import reward_functions
from reward_functions.tunix import find_answer, read_float


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


PIECES = ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "x", "1", ".", ",", "-", " ", "\n", "<", ">", "\u0663",
    "\u00a0", "\u2028"]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
TUNIX = re.compile(r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.MULTILINE | re.DOTALL)


@settings(max_examples=400, deadline=None)
@given(texts | texts.map("<reasoning>x</reasoning>{}".format))
@example("<reasoning></reasoning><answer>1</answer>")
@example("<reasoning></reasoning></reasoning><answer>")
def test_the_functions_of_tunix_find_what_their_expressions_find(text):
    match = TUNIX.search(text)
    assert find_answer(text) == (match[1] if match else None)
    match = re.search(r"<answer>.*?([\d.]+)", text, re.DOTALL)
    assert reward_functions.check_numbers([text], answer=["1"]) == [1.5 if match and read_float(match[1]) == 1 else 0.0]
