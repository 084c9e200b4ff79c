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
    chats = [[{"role": "user", "content": "p"}]] * 2
    assert reward_functions.diversity(["a b c", "a b d"], prompts=chats) == pytest.approx([2 / 3] * 2)


@pytest.mark.parametrize("text,forbidden,points", [
    ("rm -rf /", [r"rm\s+-rf"], 0.0), ("RM  -RF", [r"rm\s+-rf"], 0.0), ("ls", [r"rm\s+-rf"], 1.0), ("ls", None, None),
    ("arm", "rm", 0.0), ("for me", "rm", 1.0), ("", "rm", 1.0), ("rm", [], 1.0), ("rm", float("nan"), None), ("rm", "", None),
])
def test_safety(text, forbidden, points):
    assert reward_functions.safety([text], forbidden=[forbidden]) == [points]
