"""
Which part of a completion is read, what a cell of the data is, and which answers are equal: spellings.json has rows of
[answer, truth, verdicts of math-verify 0.9.0, of math_equality and of correctness, why the first two differ].
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


@pytest.mark.parametrize("value,texts", [
    (None, []), (math.nan, []), ("", []), (" ", []), ("nan", []), ("rm", ["rm"]), (7, ["7"]), (0, ["0"]), ([], []), (["rm", "ls"], ["rm", "ls"]),
    ((1, 2.5), ["1", "2.5"]), ([[1]], ["[1]"]), ({"text": ["x"]}, ["{'text': ['x']}"]), (range(2), ["0", "1"]),
])
def test_a_single_value_is_a_list_of_one_and_a_missing_one_none(value, texts):
    assert answers.as_texts(value) == texts and rewards.is_missing(value) == (texts == [] and value != [])


@pytest.mark.parametrize("text,content", [
    ("\\boxed{4}", "4"), ("$\\boxed 4$", "4"), ("\\boxed6", "6"), ("\\fbox{2}", "2"), ("\\framebox{14}", "14"), ("\\framebox[2cm]{14}.", "14"), ("\\boxed {4}", "4"),
    ("\\boxed 14 apples", "14"), ("\\boxed x$", "x"), ("$\\boxed \\frac{1}{2}$", "\\frac{1}{2}"), ("\\boxed -3.5.", "-3.5"), ("\\boxed{1}\\fbox{2}", "2"), ("\\boxed{{1}}", "{1}"),
    ("\\boxed is a command", None), ("\\boxed", None), ("\\boxed{", None), ("\\boxedx", None), ("\\boxed{}", None), ("4", None), ("{4}", None), ("box{4}", None),
])
def test_the_content_of_a_box(text, content):
    assert answers.extract_boxed(text) == content


def test_the_block_is_the_last_one_of_the_answer_or_of_the_text():
    block = "```python\n{}\n```"
    assert answers.extract_block("x = 1", "python") == "x = 1"
    assert answers.extract_block(f"a {block.format('x = 1')} b {block.format('x = 2')} c", "python") == "x = 2\n"
    assert answers.extract_block(f"{block.format('x = 1')}<answer>{block.format('x = 2')}</answer>", "python") == "x = 2\n"
    assert answers.extract_block("```java\nint x;\n```", "python") == "```java\nint x;\n```"
    program = block.format("x = 1")
    for around in (
        f"Install:\n```bash\npip install x\n```\nThen:\n{program}", f"```json\n{{}}\n```\n{program}", f"{program}\nOutput:\n```\n4\n```",
        program.replace("\n", "\r\n", 1), program.replace("python", "Python3"),
        f"```\n4\n```\n{program}\n```text\n5\n```",
    ):
        assert answers.extract_block(around, "python3?|py").strip() == "x = 1", around
    assert answers.extract_block(f"{block.format('x = 1')}\n```\nx = 2\n```", "json") == "x = 2\n"
    assert answers.extract_block("- so:\n  ```python\n  x = 1\n  y = 2\n  ```", "python") == "x = 1\ny = 2\n"
