"""
Completions as language models write them, with the reward of each function. The first column says whether the answer is
right; where a function differs from it, the completion does not have the form that the function asks for, or the function
is as lax as the practice that it follows.

Which part of a completion is read, what a cell of the data is, and which answers are equal: spellings.json has rows of
[answer, truth, is it right?, verdicts of math_equality (math-verify 0.9.0) and of correctness].
"""

import json
import math
import sys
from pathlib import Path

import pytest
from test_rewards import needs_math_verify

import reward_functions
import rewards
from reward_functions import answers

LONG = "Natalia sold 48/2 = 24 clips in May. Altogether she sold 48+24 = 72 clips in April and May."
TAGGED = "<reasoning>{}</reasoning>\n<answer>{}</answer>"
NUMBERS = [                     # completion, is 72 its answer?, rewards of correctness, math_equality, last_number
    # The form that the default instruction asks for.
    (TAGGED.format(LONG, "72"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "**72**"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "The answer is 72."), 1, 0, 0, 1),
    (TAGGED.format(LONG, "48 + 24 = 72"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "\uff17\uff12"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "72\u200b"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "\u0667\u0662"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "71 or 72"), 0, 0, 0, 1),
    (TAGGED.format(LONG, "72</answer><answer>73"), 0, 0, 0, 0),
    (TAGGED.format(LONG, "73</answer><answer>72"), 0, 0, 0, 1),
    (f"{LONG}\n<answer>72", 1, 0, 0, 1),                                             # cut, or the tag was forgotten
    # Boxes, as models for mathematics write them.
    (f"{LONG}\n\nThe final answer is: $\\boxed{{72}}$", 1, 1, 1, 1),
    ("Therefore, she sold \\[\\boxed{72 \\text{ clips}}\\]", 1, 0, 1, 1),
    ("First \\boxed{72}. Therefore \\boxed{72}.", 1, 1, 1, 1),
    ("In April: $\\boxed{48}$, in May: $\\boxed{24}$. In all: $\\boxed{72}$", 1, 1, 1, 1),
    ("$$\\boxed{72}$$\n\nCheck: 72 - 48 = 24, half of 48.", 1, 1, 1, 0),
    ("\\boxed{\\dfrac{144}{2}}", 1, 0, 1, 0),
    ("\\boxed{x = 72}", 1, 0, 1, 1),
    ("\\boxed{71}\\boxed{72}\\boxed{73}", 0, 0, 0, 0),
    ("**Final Answer**\n\n\\[ \\boxed{ 72 } \\]", 1, 1, 1, 1),
    ("The answer is \\fbox{72}.", 1, 1, 1, 1),
    ("So the answer is \\boxed{", 0, 0, 0, 0),
    # Plain text and markdown.
    (LONG, 1, 0, 1, 1),
    ("She sold 48+24 = <<48+24=72>>72 clips.\n#### 72", 1, 0, 1, 1),
    ("So she earns $72.", 1, 0, 1, 1),
    ("**Answer: 72**", 1, 0, 1, 1),
    ("The answer is $72$.", 1, 0, 1, 1),
    ("### Step 3\nAdd them: 48 + 24 = 72\n\nSo Natalia sold **72 clips** altogether.", 1, 0, 1, 1),
    ("72", 1, 0, 1, 1),
    ("Let me think. 48 and half of it is 24, that makes 70.", 0, 0, 0, 0),
    ("", 0, 0, 0, 0),
    # Thoughts.
    (f"<think>\n{LONG}\n</think>\n\n<answer>72</answer>", 1, 1, 1, 1),
    ("<think>\nI write it in <answer></answer> tags.\n</think>\n\n<answer>72</answer>", 1, 1, 1, 1),
    ("<think>\nMaybe <answer>70</answer>? No.\n</think>\n\n<answer>72</answer>", 1, 1, 1, 1),
    ("<think>\nSo \\boxed{70}? No, 72.\n</think>\n\nThe answer is \\boxed{72}.", 1, 1, 1, 1),
    ("So 48 + 24.\n</think>\n\n**72**", 1, 0, 1, 1),                                   # the template opened the thought
    ("<think>\nSo it is \\boxed{72}. Wait, let me check", 0, 0, 0, 0),
    ("<think>\nSo it is <answer>72</answer>. Wait", 0, 0, 0, 0),
    ("<think>\n72\n</think>\n\nI could not find it.", 0, 0, 0, 0),
    ("<think>72</think>\\boxed{72}<think>Or 71?", 0, 0, 0, 0),
    # Chinese.
    ("娜塔莉亚一共卖了72个发夹。答案\uff1a72", 1, 0, 0, 1),
    ("所以答案是 $\\boxed{72}$。", 1, 1, 1, 1),
    ("答案\uff1a\uff17\uff12。", 1, 0, 0, 1),
]


@needs_math_verify
def test_the_number_that_a_completion_ends_with():
    texts = [row[0] for row in NUMBERS]
    for column, name in (2, "correctness"), (3, "math_equality"), (4, "last_number"):
        found = getattr(reward_functions, name)(texts, answer=["72"] * len(texts))
        assert [(row, reward) for row, reward in zip(NUMBERS, found) if reward != row[column]] == [], name


@pytest.mark.parametrize("text,points", [
    ("<answer>(B)</answer>", 1), ("\\boxed{B}", 1), ("The best option is $\\boxed{\\text{B}}$.", 1),
    ("<answer>\uff08B\uff09</answer>", 1), ("<answer>答案\uff1aB</answer>", 1), ("\\boxed{选项B}", 1),
    ("<think>A? B?</think>\\boxed{B}", 1),
    ("<think>\\boxed{B}", 0), ("<answer>A or B</answer>", 0), ("\\boxed{A}", 0), ("\\boxed{A}, \\boxed{B}, \\boxed{C}", 0),
    # Neither tags nor a box: a single line, or the last one with the word "answer".
    ("B", 1), ("(B)", 1), ("**B**.", 1), ("B. Bern", 1), ("Bern", 1), ("The answer is B.", 1), ("Correct answer: **B) Bern**", 1),
    ("It lies on the Aare.\n\nTherefore, the correct answer is (B).", 1), ("<think>A? B?</think>\nB", 1), ("答案\uff1aB", 1),
    ("A", 0), ("B or C", 0), ("Bern is B, I think.", 0), ("The answer is not B.", 0),
    ("The answer is B\nbecause of the Aare.", 0),
    ("A. Zurich\nB. Bern", 0), ("<think>The answer is B.", 0), ("<answer></answer>\nThe answer is B.", 0),
    ("So \\boxed{A}. The answer is B.", 0), ("", 0),
])
def test_the_choice_that_a_completion_ends_with(text, points):
    assert reward_functions.multiple_choice([text], answer=["B"], choices=["['Zurich', 'Bern', 'Geneva', 'Basel']"]) == [points]


SQUARE = "def square(x):\n    return x * x\n"
PROGRAMS = [                    # completion, share of tests that it should pass, and passes
    (f"```python\n{SQUARE}```", 1),
    (f"Here is it:\n\n```python\n{SQUARE}```\n\nExample usage:\n\n```python\nprint(square(int(input())))\n```\n", 1),
    (f"```python\n{SQUARE}```\n\nThis outputs:\n```\n9\n```", 1),
    (f"```py\n{SQUARE}", 1),                                                          # the closing fence was the stop
    (SQUARE, 1),
    ("The helper:\n```python\ndef times(a, b):\n    return a * b\n```\n"
     "Then:\n```python\ndef square(x):\n    return times(x, x)\n```", 1),
    ("```python\nimport math\n```\n```python\nsquare = lambda x: math.prod([x, x])\n```", 1),
    (f"A first try:\n```python\ndef square(x):\n    return x + x\n```\nThat is wrong. Better:\n```python\n{SQUARE}```", 1),
    (f"Your tests:\n```python\nassert square(3) == 9\n```\nThe program:\n```python\n{SQUARE}```", 1),
    (f"<think>\n```python\ndef square(x): return 0\n```\n</think>\n```python\n{SQUARE}```", 1),
    (f"<think>\n```python\n{SQUARE}```", 0),
    (f"```python\n{SQUARE}```\nIt takes time $\\boxed{{O(1)}}$.", 1),
    (f"<answer>\n```python\n{SQUARE}```\n</answer>", 1),
    ("```bash\npip install square\n```", 0),
    ("Use `x * x`.", 0),
    ("```python\ndef square(x):\n    return x * y\n```", 0),
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a sandbox")
def test_the_program_in_a_completion():
    tests = [["assert square(3) == 9", "assert square(-4) == 16"]] * len(PROGRAMS)
    found = reward_functions.passes_tests([text for text, _ in PROGRAMS], tests)
    assert [(row, reward) for row, reward in zip(PROGRAMS, found) if reward != row[1]] == []


SPELLINGS = json.loads((Path(__file__).parent / "spellings.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name,column", [("correctness", 4), pytest.param("math_equality", 3, marks=needs_math_verify)])
def test_spellings_have_the_verdicts_of_the_table_and_any_answer_of_a_list_may_be_given(name, column):
    function = getattr(reward_functions, name)
    verdicts = function([f"<answer>{row[0]}</answer>" for row in SPELLINGS], answer=[row[1] for row in SPELLINGS])
    assert [row for row, verdict in zip(SPELLINGS, verdicts, strict=True) if bool(verdict) != row[column]] == []
    texts = [f"<answer>{text}</answer>" for text in ("Paris", "2.0", "3", "1", "1")]
    assert function(texts, answer=[["Rome", "paris"], ["1", 2], [1, 2], [], None]) == [1.0, 1.0, 0.0, 0.0, None]
    assert [row for row in SPELLINGS if row[4] and not row[2]] == [], "correctness accepts no spelling of another answer"


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
