"""
Spellings of answers in spellings.json: [answer, truth, verdicts of math-verify 0.9.0, of math_equality and of correctness, why
the first two differ]. math-verify is called as its README does, with LaTeX between dollar signs.
"""

import json
from pathlib import Path

import pytest
from test_rewards import needs_math_verify

import reward_functions
import rewards

ROWS = json.loads((Path(__file__).parent / "spellings.json").read_text(encoding="utf-8"))
TAGGED = [f"<answer>{row[0]}</answer>" for row in ROWS]
TRUTHS = [row[1] for row in ROWS]


def changed(verdicts: list, column: int) -> list:
    """Return the rows of which the verdict is not the one in the table."""
    return [row for row, verdict in zip(ROWS, verdicts, strict=True) if bool(verdict) != row[column]]


def test_correctness_gives_the_verdicts_of_the_table():
    assert changed(rewards.correctness(TAGGED, answer=TRUTHS), 4) == []


@needs_math_verify
def test_math_equality_gives_the_verdicts_of_the_table():
    assert changed(reward_functions.math_equality(TAGGED, answer=TRUTHS), 3) == []


@pytest.mark.parametrize("function", [rewards.correctness, pytest.param(reward_functions.math_equality, marks=needs_math_verify)])
def test_any_answer_of_a_list_may_be_given(function):
    texts = [f"<answer>{text}</answer>" for text in ("Paris", "2.0", "3", "1", "1")]
    assert function(texts, answer=[["Rome", "paris"], ["1", 2], [1, 2], [], None]) == [1.0, 1.0, 0.0, 0.0, None]
