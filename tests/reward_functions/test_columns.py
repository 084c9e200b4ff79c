"""The columns that reward functions need: each built-in function on each built-in task, and the examples of data."""

import importlib.util
import inspect
import json
from dataclasses import replace

import pytest
import torch
from conftest import made_up_rollout
from test_rewards import call_and_score, needs_math_verify

from reward_functions.loading import BUILT_IN, missing_columns, require_columns
from reward_functions.sandbox import run_python


def example_of(function):
    """The line of data in a function's docstring."""
    lines = map(str.strip, function.__doc__.splitlines())
    return json.loads(next((line for line in lines if line.startswith("{")), "{}"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_function_that_reads_a_column_has_a_line_of_data_that_it_can_score(name):
    function, example = BUILT_IN[name], example_of(BUILT_IN[name])
    given = {"completions", "prompts", "completion_ids", "turn_points"}
    columns = set(inspect.signature(function).parameters) - given - {"columns"}
    assert bool(example) == bool(columns)
    if columns:
        assert set(example) == {"prompt", *columns} and not missing_columns(function, set(example))
        assert all(f"`{column}`" in inspect.getdoc(function) or column == "tests" for column in columns), "named in the text"
    if name == "math_equality" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("needs math-verify")
    if name == "json_format":
        example["schema"] = None                          # it needs jsonschema
    if example and (name != "passes_tests" or run_python("").ok):
        rollout = replace(made_up_rollout([2], [3]), completions=["<reasoning>so</reasoning><answer>17</answer>"])
        points, _ = call_and_score([function], [1.0], rollout, [example])
        assert points.isfinite().all()


@pytest.mark.parametrize("name", ["correctness", "multiple_choice", "check_answer", "check_numbers", pytest.param("math_equality", marks=needs_math_verify)])
def test_an_object_is_no_answer_of_a_built_in_function(name):
    truth = {"ground_truth": "B", "style": "rule"}
    rows = [{"prompt": "p", "answer": "B"}, {"prompt": "p", "reward_model": truth, "answer": truth}]
    assert BUILT_IN[name]([f"<answer>{text}</answer>" for text in ("B", str(truth))], answer=[truth, truth]) == [None, None]
    with pytest.raises(ValueError, match=rf"^--reward_functions {name}: the answers in my data are objects; name a field: --answer_column reward_model.ground_truth$"):
        require_columns([BUILT_IN[name]], rows, "my data")

    def mine(completions, answer, **columns): ...

    require_columns([mine, BUILT_IN["reasoning_coherence"]], rows, "my data")
    require_columns([BUILT_IN[name]], rows[:1], "my data")


def test_a_column_counts_where_it_has_a_value():
    def needs(completions, level, **columns): ...

    require_columns([needs], [{"prompt": "p"}, {"prompt": "q", "level": torch.zeros(3)}], "zeros are values")
    with pytest.raises(ValueError, match=r"needs the column level, which my data does not have \(columns with values: prompt\)$"):
        require_columns([needs], [{"prompt": "p", "level": None}, {"prompt": "q", "level": ""}, {"level": float("nan")}], "my data")
