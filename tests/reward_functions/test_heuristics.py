"""Heuristics by example."""

import pytest

import reward_functions


@pytest.mark.parametrize(
    "text,points", [("a b c d e", 0.0), ("a b a b a b", -1 / 3), ("la " * 100, -96 / 97), ("", 0.0), ("a b c", 0.0),
                    ("!" * 100, -96 / 97), ("一二三四五六", 0.0), ("一二三四" * 25, -93 / 97), ("ab" * 1000, -96 / 97)]
)
def test_repetition_penalty(text, points):
    assert reward_functions.repetition_penalty([text]) == pytest.approx([points])


def test_diversity_compares_characters_where_a_script_has_no_spaces():
    assert reward_functions.diversity(["一二三", "一二四"], prompts=["p"] * 2) == pytest.approx([2 / 3] * 2)


def test_diversity_looks_at_siblings_only():
    assert reward_functions.diversity(["a b", "a b", "c d"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    assert reward_functions.diversity(["a b", "a b", "c d"], prompts=["p", "q", "p"]) == [1.0, None, 1.0]
    assert reward_functions.diversity(["", "", "x"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    assert reward_functions.diversity(["a b c", "a b d"], prompts=[[{"role": "user", "content": "p"}]] * 2) == pytest.approx([2 / 3] * 2)


def test_safety():
    assert reward_functions.safety(["rm -rf /", "RM  -RF", "ls", "ls"], forbidden=[[r"rm\s+-rf"]] * 3 + [None]) == [0.0, 0.0, 1.0, None]
    assert reward_functions.safety(["arm", "for me", "rm", ""], forbidden=["rm"] * 4) == [0.0, 1.0, 0.0, 1.0], "one text is a list of one"
    assert reward_functions.safety(["rm"] * 3, forbidden=[[], float("nan"), ""]) == [1.0, None, None]
