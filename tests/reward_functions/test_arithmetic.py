"""Countdown by example."""

import pytest

import reward_functions


@pytest.mark.parametrize("answer,points", [
    ("(3*4)+7", 1.0),
    (" 7 + 4*3 ", 1.0),
    ("3*4", 0.0),                                         # one is missing
    ("3*4+7+7-7", 0.0),                                   # one used again
    ("34-15", 0.0),                                       # the target, from other numbers
    ("-(3-7)*4", 0.0),                                    # a sign is no operation between two numbers
    ("3*4+7.0", 0.0),
    ("3*4+int(7)", 0.0),
    ("7(3)+4", 0.0),
    ("3*4+07", 0.0),
    ("3/(4-4)", 0.0),
    ("3**4**7", 0.0),
    ("(" * 100 + "3*4+7" + ")" * 90, 0.0),
    ("(" * 97 + "3*4+7" + ")" * 97, 1.0),
    ("(" * 5000 + "3*4+7" + ")" * 5000, 0.0),
    ("__import__('os').abort()", 0.0),
    ("\u0663*4+7", 0.0),                                  # a three, in Arabic
])
@pytest.mark.filterwarnings("error")
def test_countdown(answer, points):
    text = f"<reasoning>x</reasoning><answer>{answer}</answer>"
    assert reward_functions.countdown([text], numbers=[[7, 3, 4]], target=[19]) == [points]
    assert reward_functions.countdown([text], numbers=[["4", "7", "3"]], target=["19"]) == [points]


@pytest.mark.parametrize("answer,numbers,target,points", [
    ("3", [3], 3.7, 0.0), ("37/10", [37, 10], 3.7, 1.0), ("37/10", [37, 10], "3.7", 1.0), ("15/4", [15, 4], "15/4", 1.0),
    ("1/3", [1, 3], 0.33, 0.0),
    ("3-6", [3, 6], -3.5, 0.0), ("3-6", [3, 6], -3, 1.0), ("3*4", [3.7, 4], 12, 0.0), ("2*2", [2.5, 2], 4, 0.0),
    ("3*4", [3.0, "4.0"], "12.0", 1.0),
    ("12", "12", 12, 1.0), ("12", 12, 12, 1.0),
    ("1+2", "12", 3, 0.0),                                        # one text is a list of one
])
def test_numbers_and_target_are_not_rounded_and_a_single_number_is_a_list(answer, numbers, target, points):
    assert reward_functions.countdown([f"<answer>{answer}</answer>"], numbers=[numbers], target=[target]) == [points]


def test_countdown_counts_in_fractions_and_wants_one_tagged_answer():
    texts = ["<answer>8/(3-8/3)</answer>", "8/(3-8/3)", "<answer>8/(3-8/3)</answer>" * 2]
    assert reward_functions.countdown(texts, numbers=[[3, 8, 3, 8]] * 3, target=[24] * 3) == [1.0, 0.0, 0.0]
    assert reward_functions.countdown(texts, numbers=[None, [3], "nan"], target=[24, float("nan"), 24]) == [None] * 3
