"""Arguments of reward functions, functions that fail or hang, and return values that are no points."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from test_rewards import EXAMPLES, call_and_score, length, rollout_of

from reward_functions.calling import Reports, RewardError
from reward_functions.loading import load_reward_function
from sources import load_examples

OF_TRL = """
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

cosine = get_cosine_scaled_reward(max_len=4)
repetition = get_repetition_penalty_reward(ngram_size=1)
too_long = get_soft_overlong_punishment(max_completion_len=3, soft_punish_cache=2)
"""
TRLS_POINTS = {                 # for a right and a wrong completion of two tokens, as its documentation has them
    "accuracy_reward": [1.0, 0.0],
    "reasoning_accuracy_reward": [1.0, 0.0],
    "cosine": [0.75, -0.75],
    "think_format_reward": [1.0, 0.0],
    "repetition": [0.0, 0.0],
    "too_long": [-0.5, -0.5],
}


@pytest.mark.parametrize("name", TRLS_POINTS)
def test_reward_functions_of_trl_run_unchanged(name, tmp_path):
    pytest.importorskip("trl", reason="needs trl")
    if name in ("accuracy_reward", "reasoning_accuracy_reward", "cosine") and not importlib.util.find_spec("math_verify"):
        pytest.skip("needs math-verify")
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    row = {"prompt": [{"role": "user", "content": "What is half of 1?"}], "solution": "$\\frac{1}{2}$"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    function = load_reward_function(f"{tmp_path}/of_trl.py:{name}")
    texts = ["<think>\nhalf\n</think>\nSo \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}"]
    total, _ = call_and_score(
        [function], [1.0], rollout_of(*texts), load_examples(str(tmp_path / "data.jsonl")), timeout=60.0
    )
    torch.testing.assert_close(total[0].tolist(), TRLS_POINTS[name])


def test_completions_of_conversations_are_messages_as_in_trl_and_reserved_columns_stay_out():
    def as_in_trl(completions, **columns):
        assert set(columns) == {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        assert columns["trainer_state"].global_step == 0
        return [float(len(completion[0]["content"])) for completion in completions]

    example = {"prompt": [{"role": "user", "content": "hi"}], "completion": "gold", "completions": ["x"], "prompts": 1, "trainer_state": 5}
    total, _ = call_and_score([as_in_trl], [1.0], rollout_of("a", "bb"), [example])
    assert total.tolist() == [[1.0, 2.0]]


def test_a_reward_function_gets_every_column_repeated_for_siblings_and_never_the_demonstration():
    seen = {}

    def spy(completions, prompts, prompt_ids, completion_ids, trainer_state, log_extra, log_metric, **columns):
        seen.update(columns, completions=completions, prompts=prompts, prompt_ids=prompt_ids, completion_ids=completion_ids)
        return [0.0] * 4

    call_and_score([spy], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES)
    assert seen == {
        "completions": ["a", "b", "c", "d"], "prompts": ["p", "p", "q", "q"],
        "prompt_ids": [[7], [7], [8, 9], [8, 9]], "completion_ids": [[0, 1], [3, 4], [6, 7], [9, 10]],
        "answer": ["1", "1", "2", "2"], "level": [None, None, 3, 3],
    }


def test_a_column_that_only_other_examples_have_is_none():
    seen = []

    def needs(completions, tests, hint="-"):
        seen.append((tests, hint))
        return [0.0] * 4

    call_and_score([needs], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES)
    assert seen == [([None] * 4, "-")]


def test_a_function_may_return_a_dict_for_some_and_a_number_for_others():
    def mixed(completions):
        return [{"score": 1.0, "size": np.float32(3)}, 0.0, None, 2.0]

    reports = Reports()
    scores, _ = call_and_score([mixed], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES, reports=reports)
    assert scores[0].tolist() == [1.0, 0.0] and scores[1].isnan().tolist() == [True, False]
    assert reports.means()["reward/mixed/size"] == 3.0


@pytest.mark.parametrize("points,returned", [
    (None, "None; return a list with one number (or None) for each of the 4 completions"),
    ((1.0 for _ in range(4)), "<generator object"),
    ({"a": [1.0] * 4}, "{'a': [1.0, 1.0, 1.0, 1.0]}; return a list"),
    ([{"a": 1.0}] * 4, "None; return a list"),
    (torch.tensor(1.0), "tensor(1.); return a list"),
    ([1.0], "1 values for 4 completions; return a list"),
    (["good"] * 4, "['good', 'good', 'good', 'good']; return a list"),
    ([1.0, -math.inf, 1.0, 1.0], "infinite or over"),
    ([1e16] * 4, "infinite or over 1e+15 points"),
    ([10**400] * 4, "[100000"),
])
def test_what_is_no_list_of_points_is_shown(points, returned):
    def function(completions):
        return points

    rollout, reports = rollout_of("a", "b", "", "d"), Reports()
    with pytest.raises(RewardError) as error:
        call_and_score([function], [1.0], rollout, EXAMPLES)
    said = str(error.value)
    assert f"it returned {returned}" in said and "raised" not in said, said
    call_and_score([function], [1.0], rollout, EXAMPLES, on_error="none", reports=reports)
    (failure,) = reports.failures
    assert f"it returned {returned}" in failure["error"] and failure["completion"] == "a"


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda points: torch.tensor(points).numpy()])
def test_points_may_be_a_list_a_tuple_a_tensor_or_an_array(kind):
    total, _ = call_and_score(
        [lambda completions, **columns: kind([1.0, 2.0, 3.0, math.nan])], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES
    )
    assert total[0].tolist() == [1.0, 2.0] and total[1, 0] == 3.0 and total[1, 1].isnan()
    functions = [length, lambda completions, **columns: kind([1.0, 2.0, math.nan, math.nan])]
    total, _ = call_and_score(functions, [1.0, 1.0], rollout_of("a", "b", "c", "d"), EXAMPLES)
    assert total.tolist() == [[2.0, 3.0], [1.0, 1.0]], "NaN is None: for all siblings, the function does not apply"


def test_a_column_that_is_called_solution_is_not_replaced_by_the_answer():
    def asked(completions, solution, **columns):
        return [float(text == solution[0]) for text in completions]

    for columns, points in ({"answer": "a"}, [1.0, 0.0]), ({"answer": "a", "solution": "b"}, [0.0, 1.0]):
        total, _ = call_and_score([asked], [1.0], rollout_of("a", "b"), [{"prompt": "p"} | columns])
        assert total.tolist() == [points]


def test_each_function_has_lists_of_its_own():
    def shouts(completions, names, **columns):
        for row in range(len(completions)):
            completions[row] = "x"
            names[row].append("y")
        assert names == [["a", "y"], ["a", "y"], ["y"], ["y"]], "nor are those of siblings the same"
        return [1.0] * len(completions)

    def sees(completions, names, prompts, **columns):
        seen.append((list(completions), [list(row) for row in names]))
        prompts.clear()
        return [float(len(c)) for c in completions]

    seen, examples = [], [{"prompt": "p", "names": ["a"]}, {"prompt": "q", "names": []}]
    for _ in range(2):                                    # the examples of the data stay too
        total, _ = call_and_score([shouts, sees], [1.0, 1.0], rollout_of("aaa", "bb", "c", "dddd"), examples)
        assert total.tolist() == [[4.0, 3.0], [2.0, 5.0]]
    assert seen == [(["aaa", "bb", "c", "dddd"], [["a"], ["a"], [], []])] * 2 and examples[0] == {"prompt": "p", "names": ["a"]}


@pytest.mark.parametrize("error", ["SystemExit(0)", "asyncio.CancelledError()"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_would_end_the_program_is_an_error_of_the_function(kind, error):
    names = {}
    exec(f"import asyncio\n{kind} leaves(completions, **columns):\n    if 'c' in completions:\n        raise {error}\n    return [1.0] * len(completions)", names)
    for timeout in 0.0, 20.0:
        with pytest.raises(RewardError, match=r"leaves raised (RuntimeError|CancelledError): .* \(<string>, line 4\); on 4 completions"):
            call_and_score([names["leaves"]], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES, timeout=timeout)
    reports = Reports()
    points, _ = call_and_score(
        [names["leaves"], length], [1.0, 1.0], rollout_of("a", "b", "c", "d"), EXAMPLES, on_error="none", reports=reports)
    assert points[0].tolist() == [2.0, 2.0] and points[1].isnan().all() and len(reports.failures) >= 1


@pytest.mark.parametrize("returned,points,form", [
    ([{"score": 1.0, "form": 1.0}, {"score": 2}, None, {"score": True, "form": 0.0}], [1.0, 2.0, None, 1.0], [1, None, None, 0]),
    ([{"score": 1.0, "form": 2.0}, {"form": 7.0}, {"score": 3.0}, None], [1.0, None, 3.0, None], [2, 7, None, None]),
])
def test_several_outputs_are_logged_each_and_their_score_counts(returned, points, form):
    def outputs(completions, **columns):
        return returned

    reports = Reports()
    _, found = call_and_score([outputs], [1.0], rollout_of(*"abcd"), EXAMPLES, reports=reports)
    assert [None if math.isnan(p) else p for p in found["outputs"].flatten().tolist()] == points
    numbers = [value for value in form if value is not None]
    assert [row["outputs/form"] for row in reports.extra] == form
    assert reports.means()["reward/outputs/form"] == pytest.approx(sum(numbers) / len(numbers))
