"""Rewards for answer formats and countdown, heuristics, and the four rewards of tunix, by example."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rewards import GOLD

import reward_functions
from reward_functions.tunix import find_answer, read_float


@pytest.mark.parametrize("given,truth,choices,points", [
    ("B", "B", None, 1.0), ("(b)", "B", None, 1.0), ("B.", "b", None, 1.0), ("B) four", "B", None, 1.0),
    ("A", "B", None, 0.0), ("Bees", "B", None, 0.0), ("A or B", "B", None, 0.0), ("", "A", ["None", "x"], 0.0),
    ("y", "y", ["x", "y"], 1.0), ("B", "y", ["x", "y"], 1.0), ("one", "B", ["one", "two"], 0.0),
    ("two", "B", ["one", "two"], 1.0),
    ("132", "132", None, None), ("A", None, None, None), ("A", math.nan, ["nan"], None), ("A", "", None, None),
    # the text comes before the letter
    ("D", "2", ["5", "4", "3", "2"], 1.0), ("2", "2", ["5", "4", "3", "2"], 1.0), ("C", "2", ["5", "4", "3", "2"], 0.0),
    ("d) 2", "2", ["5", "4", "3", "2"], 1.0), ("A. Lincoln", "G. Washington", ["G. Washington", "A. Lincoln"], 0.0),
    ("5", "5%", ["5", "5%"], 0.0), ("CO", "Co", ["CO", "Co"], 0.0), ("2", "A", ["2", "2", "4"], 1.0),
    ("C", "A", ["2", "2", "4"], 0.0),
    ("x", "x", ["__x__", "x", "$x+1$"], 1.0), ("__x__", "x", ["__x__", "x"], 0.0), ("x+1", "B", ["x", "$x+1$"], 1.0),
    # no choice: several letters, a letter of no choice
    ("A", "AB", None, None), ("D", "D", ["x", "y"], None), ("\u0131", "I", None, 0.0), ("AB", "B", None, 0.0),
    ("four", "A", "four", 1.0),
    ("B", 4, [3, 4], 1.0),
])
def test_multiple_choice(given, truth, choices, points):
    assert reward_functions.multiple_choice([f"<answer>{given}</answer>"], answer=[truth], choices=[choices]) == [points]


def test_a_choice_is_named_in_many_ways_and_another_one_in_none():
    names = ["\\boxed{%s}", "\\boxed{\\text{%s}}", "**%s**", "$%s$", "Option %s", "%s - Bern", "**%s** - Bern", "%s — Bern"]
    names += ["\\text{(%s)}", "The answer is %s.", "Choice (%s)", "`%s`", "\\(%s\\)"]
    for truth in "E", "\\text{(E)}", "**E**":
        texts = [f"<answer>{name % letter}</answer>" for letter in "EABCDFGHI" for name in names]
        expected = [1.0] * len(names) + [0.0] * 8 * len(names)
        assert reward_functions.multiple_choice(texts, answer=[truth] * len(texts)) == expected
    texts = ["E or A", "E - A", "Option E or A", "**E** **A**", "Not E", "Either", "E-mail", "E, A", "\\boxed{E}\\boxed{A}"]
    texts = [text for each in texts for text in (each, f"<answer>{each}</answer>")]
    texts += ["<answer>A</answer>\\boxed{E}", "<answer>E</answer><answer>A</answer>", "\\boxed{A} The answer is E."]
    assert reward_functions.multiple_choice(texts, answer=["E"] * len(texts)) == [0.0] * len(texts)


@pytest.mark.parametrize("text,schema,points", [
    ('<answer>{"x": 1}</answer>', None, 1.0), ('{"x": 1}', None, 1.0), ('Here:\n```json\n[1, 2]\n```\nso.', None, 1.0),
    ("{x: 1}", None, 0.0), ("", None, 0.0), ("NaN", None, 0.0), ("[" * 99999, None, 0.0), ('{"x": 1} and more', None, 0.0),
    ('{"x": 1}', math.nan, 1.0), ("[]", " ", 1.0), ('</answer><answer>{"x": 1}', None, 0.0),
])
def test_json_format(text, schema, points):
    assert reward_functions.json_format([text], schema=[schema]) == [points]


def test_json_schemas_are_followed_by_the_package(monkeypatch):
    asked = []
    validator = SimpleNamespace(is_valid=lambda value: asked.append(value) or False)
    class Kind(SimpleNamespace):
        def __new__(cls, schema):
            return validator

        @staticmethod
        def check_schema(schema):
            if "broken" in schema:
                raise KeyError("no schema")

    fake = SimpleNamespace(validators=SimpleNamespace(validator_for=lambda schema: Kind))
    monkeypatch.setitem(sys.modules, "jsonschema", fake)
    for schema in {"required": ["x"]}, '{"required": ["x"]}':
        assert reward_functions.json_format(['{"x": 1}'], schema=[schema]) == [0.0] and asked.pop() == {"x": 1}
    validator.is_valid = lambda value: int(value["x"] / 0.01) > 0                # multipleOf, as jsonschema computes it
    assert reward_functions.json_format(['{"x": 1e999}', '{"x": 1}'], schema=[{}, {}]) == [0.0, 1.0]
    for schema, error in ("{x: 1}", "Expecting property name"), ({"broken": 1}, "no schema"):             # a mistake in the data
        with pytest.raises(Exception, match=error):
            reward_functions.json_format(['{"x": 1}'], schema=[schema])


@pytest.mark.parametrize("text,number", [
    ("#### 72", "72"), ("72 dollars.", "72"), ("**72**", "72"), ("\\boxed{72}", "72"), ("It costs $1,000.", "1000"),
    ("1{,}000 clips", "1000"), ("x=-3", "-3"), ("5-3", "3"),
    ("so \u22123.", "-3"), ("-$5", "-5"), ("$-5", "-5"), ("0.50", "0.5"), (".5", "0.5"), ("1e3", "1000"), ("12 and 13", "13"),
    ("7/8", "8"), ("72%", "72"), ("1,2,3", "3"),
    ("\uff17\uff12", "72"), ("<think>5</think>72", "72"),
])
def test_the_last_number_of_a_completion(text, number):
    assert reward_functions.last_number([text] * 2, answer=[number, number + "1"]) == [1.0, 0.0]


def test_without_a_number_or_within_thoughts_there_is_none():
    texts = ["", "many", "<think>72", "72</think>", "<think>1</think>72<think>"]
    assert reward_functions.last_number([*texts, "72", "72"], answer=["72"] * 5 + [None, ["71", 72]]) == [0.0] * 5 + [None, 1.0]


@pytest.mark.parametrize("text,tags,points", [
    (GOLD, None, 1.0),
    ("<plan>x</plan><code>y</code>", ["plan", "code"], 1.0),
    ("<code>y</code><plan>x</plan>", ["plan", "code"], 0.5),
    ("<plan>x</plan><code> </code>", ["plan", "code"], 0.5),
    ("<plan>x</plan>" * 2, ["plan"], 0.0), ("</plan>x<plan>", ["plan"], 0.0),
    ("<plan>x", ["plan"], 0.0), ("", ["plan"], 0.0), (GOLD, math.nan, 1.0),
    ("<plan>x</plan>", "plan", 1.0),
    ("<p>x</p><l>x</l><a>x</a><n>x</n>", "plan", 0.0),             # one text is a list of one
])
def test_xml_tags(text, tags, points):
    assert reward_functions.xml_tags([text], tags=[tags]) == [points]


def test_answer_pattern():
    date = r"\d{4}-\d\d-\d\d"
    texts = ["<answer>2024-01-31</answer>", "<answer>on 2024-01-31</answer>", "<answer>2024-01-31?</answer>", "2024-01-31", ""]
    assert reward_functions.answer_pattern([*texts, texts[0]], pattern=[date] * 5 + [None]) == [1.0, 0.0, 0.0, 0.0, 0.0, None]
    assert reward_functions.answer_pattern([*texts[:1] * 2, ""], pattern=[math.nan, "", ".*"]) == [None, None, 0.0]


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


def test_countdown_counts_in_fractions_and_wants_one_answer_in_tags_or_a_box_behind_the_thoughts():
    texts = ["<answer>8/(3-8/3)</answer>", "8/(3-8/3)", "<answer>8/(3-8/3)</answer>" * 2, "So the expression is \\boxed{8/(3-8/3)}."]
    texts += ["<think>\n8/3\n</think>\n<answer>8/(3-8/3)</answer>", "<think>\n<answer>8/(3-8/3)</answer>", "<answer>8/(3-8/3) = 24</answer>"]
    points = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert reward_functions.countdown(texts, numbers=["[3, 8, 3, 8]"] * 7, target=["24"] * 7) == points
    assert reward_functions.countdown(texts[:3], numbers=[None, [3], "nan"], target=[24, float("nan"), 24]) == [None] * 3


@pytest.mark.parametrize("text,points", [
    ("a b c d e", 0.0), ("a b a b a b", -1 / 3), ("la " * 100, -96 / 97), ("", 0.0), ("a b c", 0.0), ("!" * 100, -96 / 97),
    ("一二三四五六", 0.0), ("一二三四" * 25, -93 / 97), ("ab" * 1000, -96 / 97),
])
def test_repetition_penalty(text, points):
    assert reward_functions.repetition_penalty([text]) == pytest.approx([points])


def test_diversity_looks_at_siblings_only_and_compares_characters_where_a_script_has_no_spaces():
    assert reward_functions.diversity(["一二三", "一二四"], prompts=["p"] * 2) == pytest.approx([2 / 3] * 2)
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


@pytest.mark.parametrize("text,truth,exact,approximate,answer,numbers", [
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
])
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
