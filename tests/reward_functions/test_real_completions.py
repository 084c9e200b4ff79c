"""
Completions as language models write them, with the reward of each function. The first column says whether the answer is
right; where a function differs from it, the completion does not have the form that the function asks for, or the function
is as lax as the practice that it follows.
"""

import sys

import pytest
from test_rewards import needs_math_verify

import reward_functions

LONG = "Natalia sold 48/2 = 24 clips in May. Altogether she sold 48+24 = 72 clips in April and May."
TAGGED = "<reasoning>{}</reasoning>\n<answer>{}</answer>"
NUMBERS = [                     # completion, is 72 its answer?, rewards of correctness, math_equality, last_number
    # The form that the default instruction asks for.
    (TAGGED.format(LONG, "72"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "72 clips"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "**72**"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "$72$"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "\\boxed{72}"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "The answer is 72."), 1, 0, 0, 1),
    (TAGGED.format(LONG, "48 + 24 = 72"), 1, 0, 1, 1),
    (TAGGED.format(LONG, "\uff17\uff12"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "72\u200b"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "\u0667\u0662"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "$72.00"), 1, 1, 1, 1),
    (TAGGED.format(LONG, "24"), 0, 0, 0, 0),
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
    ("\\boxed{48}", 0, 0, 0, 0),
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
    ("Natalia sold a total of 72 dollars.", 1, 0, 1, 1),
    ("72", 1, 0, 1, 1),
    ("Let me think. 48 and half of it is 24, that makes 70.", 0, 0, 0, 0),
    ("I am sorry, but I cannot answer that.", 0, 0, 0, 0),
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
        rewards = getattr(reward_functions, name)(texts, answer=["72"] * len(texts))
        assert [(row, reward) for row, reward in zip(NUMBERS, rewards) if reward != row[column]] == [], name


@pytest.mark.parametrize("text,points", [
    ("<answer>(B)</answer>", 1), ("\\boxed{B}", 1), ("The best option is $\\boxed{\\text{B}}$.", 1),
    ("<answer>B. Bern</answer>", 1), ("<answer>Bern</answer>", 1),
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
    (f"~~~python\n{SQUARE}~~~", 1),
    (f"```Python title=\"square.py\"\n{SQUARE}```", 1),
    (f"```py\n{SQUARE}", 1),                                                          # the closing fence was the stop
    (f"```\n{SQUARE}```", 1),
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
    rewards = reward_functions.passes_tests([text for text, _ in PROGRAMS], tests)
    assert [(row, reward) for row, reward in zip(PROGRAMS, rewards) if reward != row[1]] == []
