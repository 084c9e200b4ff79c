"""Rewards for answer formats by example."""

import sys
from types import SimpleNamespace

import pytest
from test_rewards import GOLD

import rewards
from reward_functions import formats


@pytest.mark.parametrize(
    "given,truth,choices,points",
    [
        ("B", "B", None, 1.0), ("(b)", "B", None, 1.0), ("B.", "b", None, 1.0), ("B) four", "B", None, 1.0),
        ("b: x", "B", None, 1.0), ("y", "y", ["x", "y"], 1.0), ("B", "y", ["x", "y"], 1.0),
        ("A", "B", None, 0.0), ("Bees", "B", None, 0.0), ("A or B", "B", None, 0.0), ("", "B", None, 0.0),
        ("C", "2", ["x", "y", "z"], 1.0), ("Z", "2", ["x", "y", "zoo"], 0.0), ("zoo", "2", ["x", "y", "zoo"], 1.0),
        ("x", "2", ["x", "y", "zoo"], 0.0), ("two", "B", ["one", "two"], 1.0), ("one", "B", ["one", "two"], 0.0),
        ("132", "132", None, None), ("A", None, None, None),
    ],
)
def test_multiple_choice(given, truth, choices, points):
    assert rewards.multiple_choice([f"<answer>{given}</answer>"], answer=[truth], choices=[choices]) == [points]
    if choices is None:
        assert rewards.multiple_choice([f"<answer>{given}</answer>"], answer=[truth]) == [points]


@pytest.mark.parametrize(
    "text,schema,points",
    [
        ('<answer>{"x": 1}</answer>', None, 1.0), ('{"x": 1}', None, 1.0), ('Here:\n```json\n[1, 2]\n```\nso.', None, 1.0),
        ("{x: 1}", None, 0.0), ("", None, 0.0), ("NaN", None, 0.0), ("[" * 99999, None, 0.0), ('{"x": 1} and more', None, 0.0),
        ('{"x": 1}', {"required": ["x"]}, 1.0), ('{"x": 1}', '{"required": ["y"]}', 0.0), ("[]", {"required": ["x"]}, 0.0),
    ],
)
def test_json_format(text, schema, points):
    assert rewards.json_format([text], schema=[schema]) == [points]


def test_json_schemas_are_followed_whole_where_jsonschema_is_there(monkeypatch):
    asked = []
    validator = SimpleNamespace(is_valid=lambda value: asked.append(value) or False)
    fake = SimpleNamespace(validators=SimpleNamespace(validator_for=lambda schema: lambda schema: validator))
    monkeypatch.setitem(sys.modules, "jsonschema", fake)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: fake)
    assert rewards.json_format(['{"x": 1}'], schema=[{"required": ["x"]}]) == [0.0] and asked == [{"x": 1}]
    validator.is_valid = lambda value: int(value["x"] / 0.01) > 0                # multipleOf, as jsonschema computes it
    assert rewards.json_format(['{"x": 1e999}', '{"x": 1}'], schema=[{}, {}]) == [0.0, 1.0]


@pytest.mark.parametrize(
    "text,tags,points",
    [
        (GOLD, None, 1.0),
        ("<plan>x</plan><code>y</code>", ["plan", "code"], 1.0),
        ("<code>y</code><plan>x</plan>", ["plan", "code"], 0.5),
        ("<plan>x</plan><code> </code>", ["plan", "code"], 0.5),
        ("<plan>x</plan>" * 2, ["plan"], 0.0), ("</plan>x<plan>", ["plan"], 0.0),
        ("<plan>x", ["plan"], 0.0), ("", ["plan"], 0.0),
    ],
)
def test_xml_tags(text, tags, points):
    assert rewards.xml_tags([text], tags=[tags]) == [points]


def test_answer_pattern():
    date = r"\d{4}-\d\d-\d\d"
    texts = ["<answer>2024-01-31</answer>", "<answer>on 2024-01-31</answer>", "<answer>2024-01-31?</answer>", "2024-01-31", ""]
    assert rewards.answer_pattern([*texts, texts[0]], pattern=[date] * 5 + [None]) == [1.0, 0.0, 0.0, 0.0, 0.0, None]
