"""Choosing reward functions by name or file, and the columns that they need."""

import importlib.util
import inspect
from dataclasses import replace
import json
import re
import sys

import pytest
import torch
from test_rewards import call_and_score, needs_math_verify

import reward_functions
import rewards
from conftest import ROOT, made_up_rollout, run_process
from reward_functions.loading import BUILT_IN, load_reward_function, missing_columns, require_columns
from reward_functions.sandbox import run_python


def test_reward_functions_come_from_the_library_or_a_file(tmp_path):
    assert load_reward_function("correctness") is rewards.correctness
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns):\n    return [-len(c) for c in completions]\n\nnumber = 3\n")
    assert load_reward_function(f"{file}:short")(["abc"]) == [-3]
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "same.py").write_text(
        "def correctness(completions, **columns): ...\ndef one(text): ...\n"
        "class Weighted:\n    def __init__(self, weight): ...\n"
    )
    for name, message in {
        "corectness": "unknown; use path/to/file.py:function or one of correctness",
        f"{file}:long": "has no function long",
        f"{file}:number": "has no function number",
        f"{tmp_path}/none.py:f": "No such file",
        f"{tmp_path}/broken.py:f": "no_such_module",
        f"{tmp_path}/same.py:correctness": "there is a built-in reward function correctness; rename yours",
        f"{tmp_path}/same.py:one": r"one: add completions, a list of them, to its parameters",
        f"{tmp_path}/same.py:Weighted": "'weight'; name a function, or an object with __call__",
    }.items():
        with pytest.raises(ValueError, match=rf"^.*{message}.*$"):
            load_reward_function(name)


def test_a_function_may_ask_for_the_answer_under_trls_names_and_never_for_the_demonstration():
    def curious(completions, solution, completion, level=0, **columns): ...

    assert missing_columns(curious, {"prompt", "completion", "answer"}) == ["completion"]
    assert missing_columns(lambda completions, ground_truth, log_metric, trainer_state: 0, {"prompt", "answer"}) == []
    assert missing_columns(curious, {"prompt", "completion"}) == ["solution", "completion"]


def test_a_reward_file_imports_its_neighbours_and_our_modules_stay_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "count_of_mine.py").write_text("def count(text): return float(len(text))\n")
    (tmp_path / "data.py").write_text("def mine(): ...\n")
    (tmp_path / "rewarding.py").write_text(
        "import data\nfrom count_of_mine import count\n"
        "def short(completions, **columns): return [-count(c) for c in completions]\n"
        "def ours(completions, **columns): return [data.load_examples is not None for c in completions]\n"
    )
    (tmp_path / "hidden.py").write_text("from data import mine\n")
    for name, points in ("short", [-2.0]), ("ours", [True]):
        assert load_reward_function(f"{tmp_path}/rewarding.py:{name}")(["ab"]) == points
    with pytest.raises(ValueError, match=r"cannot import name 'mine' from 'data' \(.*data.py\)"):
        load_reward_function(f"{tmp_path}/hidden.py:f")


def test_an_edited_file_or_neighbour_is_loaded_again_and_a_neighbour_belongs_to_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    for folder, number in ("one", 1.0), ("two", 2.0):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper_of_both.py").write_text(f"NUMBER = {number}\n")
        code = "from helper_of_both import NUMBER\ndef given(completions, **columns): return [NUMBER] * len(completions)\n"
        (tmp_path / folder / "mine.py").write_text(code)
    names = [f"{tmp_path}/{folder}/mine.py:given" for folder in ("one", "two")]
    one, two = map(load_reward_function, names)
    assert one(["a"]) == [1.0] and two(["a"]) == [2.0]
    assert load_reward_function(names[0]) is one and load_reward_function(names[1]) is two, "a module is loaded once"
    (tmp_path / "one/helper_of_both.py").write_text("NUMBER = 30.0\n")
    assert load_reward_function(names[0])(["a"]) == [30.0] and load_reward_function(names[1])(["a"]) == [2.0]
    (tmp_path / "two/mine.py").write_text("def given(completions, **columns): return [4.0]\n")
    assert load_reward_function(names[1])(["a"]) == [4.0]
    (tmp_path / "two/helper_of_both.py").write_text("NUMBER = unknown\n")
    (tmp_path / "two/mine.py").write_text(code)
    with pytest.raises(ValueError, match="unknown"):
        load_reward_function(names[1])
    (tmp_path / "two/helper_of_both.py").write_text("NUMBER = 500.0\n")
    assert load_reward_function(names[1])(["a"]) == [500.0]


def test_other_processes_import_a_reward_file_by_its_name(tmp_path):
    (tmp_path / "with_a_pool.py").write_text(
        "import multiprocessing\ndef length(text): return float(len(text))\ndef lengths(completions, **columns):\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        return pool.map(length, completions)\n")
    code = (
        "from reward_functions.loading import load_reward_function\nif __name__ == '__main__':\n"
        f"    assert load_reward_function('{tmp_path}/with_a_pool.py:lengths')(['ab', 'c']) == [2.0, 1.0]\n")
    (tmp_path / "program.py").write_text(code)
    run_process(tmp_path / "program.py", PYTHONPATH=str(ROOT))


def test_an_instance_stays_and_what_cannot_be_called_is_refused():
    class Counting:
        def __call__(self, completions, **columns):
            return [float(len(text)) for text in completions]

    instance = Counting()
    assert load_reward_function(instance) is instance and load_reward_function(Counting)(["abc"]) == [3.0]
    with pytest.raises(ValueError, match=r"^--reward_functions .*Idle.* is not a callable object; name a function"):
        load_reward_function(type("Idle", (), {}))


def test_every_function_is_imported_from_the_package_and_a_module_of_it_does_not_import_the_others():
    for name in BUILT_IN:
        function = getattr(reward_functions, name)
        assert load_reward_function(name) is function is load_reward_function(function) and function.__name__ == name
    for name in "classifier", "judge":
        assert callable(getattr(reward_functions, name)) and name not in BUILT_IN
    with pytest.raises(ImportError, match="cannot import name 'corectness'"):
        exec("from reward_functions import corectness")
    few, more = "import reward_functions.sandbox", "from reward_functions import math_equality, multiple_choice"
    for statement, others in (few, {"torch", "rewards"}), (more, {"torch"}):
        run_process("-c", f"import sys; {statement}; assert not {others} & set(sys.modules)")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_function_that_reads_a_column_has_a_line_of_data_that_it_can_score(name):
    function = load_reward_function(name)
    example = json.loads((re.findall(r"^ *(\{.*)$", function.__doc__, re.MULTILINE) or ["{}"])[0])
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


@pytest.mark.parametrize("name",
    ["correctness", "multiple_choice", "check_answer", "check_numbers", pytest.param("math_equality", marks=needs_math_verify)])
def test_an_object_is_no_answer_of_a_built_in_function(name):
    truth = {"ground_truth": "B", "style": "rule"}
    function = load_reward_function(name)
    assert function([f"<answer>{text}</answer>" for text in ("B", str(truth))], answer=[truth, truth]) == [None, None]


def test_a_column_counts_where_it_has_a_value():
    def needs(completions, level, **columns): ...

    require_columns([needs], [{"prompt": "p"}, {"prompt": "q", "level": torch.zeros(3)}], "zeros are values")
    with pytest.raises(ValueError, match=r"needs the column level, which my data does not have \(columns with values: prompt\)$"):
        require_columns([needs], [{"level": None}, {"prompt": "q", "level": ""}, {"level": float("nan")}], "my data")
