"""
Which part of a completion is read, what a cell of the data is, and which answers are equal: spellings.json has rows of
[answer, truth, is it right?, verdicts of math_equality (math-verify 0.9.0) and of correctness].
"""

import json
import math
from pathlib import Path

import pytest
from test_rewards import needs_math_verify

import reward_functions
import rewards
from reward_functions import answers

SPELLINGS = json.loads((Path(__file__).parent / "spellings.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name,column", [("correctness", 4), pytest.param("math_equality", 3, marks=needs_math_verify)])
def test_spellings_have_the_verdicts_of_the_table_and_any_answer_of_a_list_may_be_given(name, column):
    function = getattr(reward_functions, name)
    verdicts = function([f"<answer>{row[0]}</answer>" for row in SPELLINGS], answer=[row[1] for row in SPELLINGS])
    assert [row for row, verdict in zip(SPELLINGS, verdicts, strict=True) if bool(verdict) != row[column]] == []
    texts = [f"<answer>{text}</answer>" for text in ("Paris", "2.0", "3", "1", "1")]
    assert function(texts, answer=[["Rome", "paris"], ["1", 2], [1, 2], [], None]) == [1.0, 1.0, 0.0, 0.0, None]


def test_correctness_accepts_no_spelling_of_another_answer():
    assert [row for row in SPELLINGS if row[4] and not row[2]] == []


@pytest.mark.parametrize("text,answer", [
    ("<answer>72</answer>", "72"), ("\\boxed{1} \\boxed{72}", "72"), ("<answer>so \\boxed{72}</answer>", "72"), ("72", None),
    ("", None),
    ("<answer>71</answer><answer>72</answer>", None), ("<answer>72", None), ("<answer></answer> \\boxed{72}", None),
    ("\\boxed{72} <answer>", None),
    ("<think><answer></answer> \\boxed{71}</think><answer>72</answer>", "72"),
    ("<answer>71</answer></think><answer>72</answer>", "72"),
    ("<think>\\boxed{72}", None), ("<think><answer>72</answer>", None), ("<think>a</think>\\boxed{72}<think>", None),
    ("a</think>b</think>\\boxed{72}", "72"),
])
def test_the_answer_comes_after_the_thoughts_in_tags_or_in_the_last_box(text, answer):
    assert rewards.extract_answer(text) == answer


@pytest.mark.parametrize("one,others,equal", [
    ("42", ["42\u200b", "\ufeff42", "\uff14\uff12", "\u0664\u0662", "\u096a\u0968"], True), ("caf\u00e9", ["cafe\u0301"], True),
    ("New York", ["New\u00a0York"], True), ("-5", ["\u22125"], True), ("$50", ["\uff04\uff15\uff10"], True), ("(B)", ["\uff08B\uff09"], True),
    ("\u7b54\u6848:B", ["\u7b54\u6848\uff1aB"], True), ("10\u00b2", ["10\u00b2"], True), ("paris", ["PARIS"], True),
    # Powers, fractions and accents are not lost.
    ("10\u00b2", ["102"], False), ("x\u2082", ["x2"], False), ("2\u00bd", ["21/2"], False), ("24", ["\u0664\u0662"], False),
    ("cafe", ["caf\u00e9"], False), ("42", ["4 2"], False),
])
def test_text_is_compared_as_it_is_seen(one, others, equal):
    assert {rewards.same_answer(one, other) for other in others} | {rewards.same_answer(other, one) for other in others} == {equal}


@pytest.mark.parametrize("value,texts", [
    (None, []), (math.nan, []), ("", []), (" ", []), ("nan", []), ("rm", ["rm"]), (7, ["7"]), (0, ["0"]), ([], []),
    (["rm", "ls"], ["rm", "ls"]),
    ("['rm', 'ls']", ["rm", "ls"]), ("[]", []), ("[a-z]", ["[a-z]"]),
    ((1, 2.5), ["1", "2.5"]), ([[1]], ["[1]"]), ({"text": ["x"]}, ["{'text': ['x']}"]), (range(2), ["0", "1"]),
])
def test_a_single_value_is_a_list_of_one_and_a_missing_one_none(value, texts):
    assert answers.as_texts(value) == texts and rewards.is_missing(value) == (texts == [] and value not in ([], "[]"))


@pytest.mark.parametrize("text,content", [
    ("\\boxed{4}", "4"), ("$\\boxed 4$", "4"), ("\\boxed6", "6"), ("\\fbox{2}", "2"), ("\\framebox{14}", "14"),
    ("\\framebox[2cm]{14}.", "14"), ("\\boxed {4}", "4"),
    ("\\boxed 14 apples", "14"), ("\\boxed x$", "x"), ("$\\boxed \\frac{1}{2}$", "\\frac{1}{2}"), ("\\boxed -3.5.", "-3.5"),
    ("\\boxed{1}\\fbox{2}", "2"), ("\\boxed{{1}}", "{1}"),
    ("\\boxed is a command", None), ("\\boxed", None), ("\\boxed{", None), ("\\boxedx", None), ("\\boxed{}", None),
    ("4", None), ("{4}", None), ("box{4}", None),
])
def test_the_content_of_a_box(text, content):
    assert rewards.extract_boxed(text) == content


@pytest.mark.parametrize("text,blocks", [
    ("x = 1", []), ("a ```python\nx = 1\n``` b ```py\nx = 2\n``` c", ["x = 1\n", "x = 2\n"]),
    ("```\n4\n```\n```python\nx = 1\n```\n```text\n5\n```", ["x = 1\n"]),
    ("```java\nint x;\n```", []), ("```\nx = 1\n```\n```bash\nls\n```", ["x = 1\n"]), ("~~~python\nx = 1\n~~~", ["x = 1\n"]),
    ("````python\n```\n````", ["```\n"]),
    ("```python3 title=x.py\r\nx = 1\n```", ["x = 1\n"]), ("```Python\nx = 1", ["x = 1"]), ("```pycon\n>>> 1\n```", []),
    ("- so:\n  ```python\n  x = 1\n  y = 2\n  ```", ["x = 1\ny = 2\n"]),
    ("```python\nx = 1\n```<answer>```python\nx = 2\n```</answer>", ["x = 2\n"]), ("```python\nx = 1\n```</think>", []),
])
def test_the_blocks_of_a_language_in_an_answer(text, blocks):
    assert answers.fenced_blocks(text, r"python|py\b") == blocks
