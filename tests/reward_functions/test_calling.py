"""What reward functions get by name, what they return and log, async functions, failures and the time limit."""

import asyncio
import json
import math
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import start_run
from test_rewards import EXAMPLES, call_and_score, rollout_of

from engine.errors import RunError
from reward_functions.calling import Reports
from reward_functions.loading import load_reward_function, require_columns
from runs.folder import read_jsonl
from runs.results import evaluate_held_out, refuse_taken_names
from sources import load_examples
from train import grpo_training_step


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def score(function, *texts, examples=EXAMPLES, **options):
    """Points (P, G) of one function as lists."""
    total, _ = call_and_score([load_reward_function(function)], [1.0], rollout_of(*texts), examples, **options)
    return total.tolist()


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
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    row = {"prompt": [{"role": "user", "content": "What is half of 1?"}], "solution": "$\\frac{1}{2}$"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    function = load_reward_function(f"{tmp_path}/of_trl.py:{name}")
    texts = ["<think>\nhalf\n</think>\nSo \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}"]
    total, _ = call_and_score(
        [function], [1.0], rollout_of(*texts), load_examples(str(tmp_path / "data.jsonl")), timeout=60.0
    )
    torch.testing.assert_close(total[0].tolist(), TRLS_POINTS[name])


ROW = {
    "prompt": [{"role": "user", "content": "6+1=?"}], "answer": "7", "solution": "7",
    "verification_info": {"inputs": [1, 2]}, "data_source": "openai/gsm8k",
}
POINTS = {                      # of two completions of the first row, and two of the other one
    "accuracy_reward": [1, 0, None, None],
    "compute_score": [1, 0, 0, 0],
}


@pytest.mark.parametrize("name", POINTS)
def test_reward_functions_of_others_run_unchanged(name):
    function, reports = load_reward_function(f"{Path(__file__).with_name('foreign_rewards.py')}:{name}"), Reports()
    examples = [ROW | {"extra_info": {"index": 4}}, ROW | {"answer": "x", "solution": "x", "extra_info": {"index": 5}}]
    require_columns([function], examples, "the data")
    rollout = rollout_of("#### 7", "maybe", "#### 7", "maybe")
    _, per_function = call_and_score([function], [1.0], rollout, examples, reports=reports, timeout=30.0)
    assert [None if p != p else p for p in per_function[name].flatten().tolist()] == POINTS[name]
    if name == "compute_score":
        assert [row["compute_score/index"] for row in reports.extra] == [4, 4, 5, 5]


def test_a_function_gets_every_column_repeated_for_siblings_in_lists_of_its_own_and_never_the_demonstration():
    seen = {}

    def clears(completions, prompts, **columns):
        completions.clear(), prompts.clear(), columns["answer"].clear()
        return [1.0] * 4

    def spy(completions, prompts, prompt_ids, completion_ids, sampling_logp, trainer_state, log_extra, log_metric, tests,
        hint="-", **columns):
        seen.update(columns, completions=completions, prompts=prompts, prompt_ids=prompt_ids, completion_ids=completion_ids,
            tests=tests, hint=hint)
        assert vars(trainer_state) == {"global_step": 0, "max_steps": 1, "epoch": 0.0}, "without a run"
        return [0.0] * 4

    examples = [EXAMPLES[0] | {"completions": ["x"], "prompts": 1, "trainer_state": 5}, EXAMPLES[1]]
    call_and_score([clears, spy], [1.0, 1.0], rollout_of("a", "b", "c", "d"), examples)
    assert seen == {
        "completions": ["a", "b", "c", "d"], "prompts": ["p", "p", "q", "q"],
        "prompt_ids": [[7], [7], [8, 9], [8, 9]], "completion_ids": [[0, 1], [3, 4], [6, 7], [9, 10]],
        "answer": ["1", "1", "2", "2"], "level": [None, None, 3, 3], "tests": [None] * 4, "hint": "-",
    }


@pytest.mark.parametrize("annotation", ["list[list[int]]", "typing.List[typing.List[int]]"])
def test_completions_annotated_as_token_ids_are_token_ids(annotation):
    names = {}
    exec(f"import typing\ndef f(completions: {annotation}):\n    return [float(sum(c)) for c in completions]", names)
    assert score(names["f"], *"abcd") == [[1.0, 7.0], [13.0, 19.0]]

    def texts(completions: list[str], **columns):
        assert "prompt_ids" not in columns
        return [float(len(c)) for c in completions]

    assert score(texts, *"abcd") == [[1.0, 1.0], [1.0, 1.0]]


def test_a_column_that_is_called_solution_is_not_replaced_by_the_answer():
    def asked(completions, solution, **columns):
        return [float(text == solution[0]) for text in completions]

    for columns, points in ({"answer": "a"}, [1.0, 0.0]), ({"answer": "a", "solution": "b"}, [0.0, 1.0]):
        assert score(asked, "a", "b", examples=[{"prompt": "p"} | columns]) == [points]


def test_trainer_state_counts_the_steps_of_grpo(tmp_path):
    seen = []

    def spy(completions, trainer_state, **kwargs):
        seen.append(trainer_state)
        return [float(len(c)) for c in completions]

    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "3")
    run.plan = replace(run.plan, reward_functions=[spy, *run.plan.reward_functions[1:]])
    run.progress.phase_step = 7
    grpo_training_step(run, next(run.batches))
    assert vars(seen[0]) == {"global_step": 7, "max_steps": 10, "epoch": 4 / len(run.plan.data.train_set)}
    run.progress.phase = 0
    assert run.trainer_state.global_step == 0, "not the steps of the cold start"


@pytest.mark.parametrize("points,returned", [
    (None, "None; return a list with one number (or None) for each of the 4 completions"),
    ([{"a": 1.0}] * 4, "None; return a list"),
    (torch.tensor(1.0), "tensor(1.); return a list"),
    ([1.0], "1 values for 4 completions; return a list"),
    ([1.0, -math.inf, 1.0, 1.0], "a reward beyond"),
    ([10**400] * 4, "[100000"),
])
def test_what_is_no_list_of_points_is_shown(points, returned):
    def function(completions):
        return points

    rollout, reports = rollout_of("a", "b", "", "d"), Reports()
    with pytest.raises(RunError) as error:
        call_and_score([function], [1.0], rollout, EXAMPLES)
    said = str(error.value)
    assert f"it returned {returned}" in said and "raised" not in said, said
    call_and_score([function], [1.0], rollout, EXAMPLES, on_error="none", reports=reports)
    (failure,) = reports.failures
    assert f"it returned {returned}" in failure["error"]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda points: torch.tensor(points).numpy()])
def test_points_may_be_a_list_a_tuple_a_tensor_or_an_array(kind):
    functions = [length, lambda completions, **columns: kind([1.0, 2.0, math.nan, math.nan])]
    total, _ = call_and_score(functions, [1.0, 1.0], rollout_of("a", "b", "c", "d"), EXAMPLES)
    assert total.tolist() == [[2.0, 3.0], [1.0, 1.0]], "NaN is None: for all siblings, the function does not apply"


@pytest.mark.parametrize("returned,points,form", [
    ([{"score": 1.0, "form": np.float32(3)}, 0.0, None, {"score": True, "form": 0.0}], [1.0, 0.0, None, 1.0], [3, None, None, 0]),
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


def test_logged_values_reach_metrics_and_records_of_a_step_and_an_evaluation(tmp_path):
    def logging(completions, log_extra, log_metric, **kwargs):
        log_extra("first", [c[:1] for c in completions])
        log_extra("tensor", torch.arange(len(completions)))
        log_extra("object", [{1}] * len(completions))
        for value in 1.0, 2.0:
            log_metric("spread", torch.tensor(value))
        return [float(len(c)) for c in completions]

    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--eval_limit", "4")
    run.plan = replace(run.plan, reward_functions=[logging, *run.plan.reward_functions[1:]])
    run.folder.open(run.config, 0, {})
    metrics, experience = grpo_training_step(run, next(run.batches))
    run.log_step(metrics | {"skipped": 0, "step_seconds": 1.0}, experience)
    run.log_evaluation(evaluate_held_out(run))
    step, evaluation = read_jsonl(run.folder.path / "metrics.jsonl")
    assert step["spread"] == 1.5 and evaluation["eval_spread"] == 1.5
    for name in "grad_norm", "step":
        with pytest.raises(RunError, match=f"log_metric: {name} is a metric of the run itself; choose another name"):
            refuse_taken_names({name: -5.0}, step)
    records = read_jsonl(run.folder.path / "rollouts.jsonl")
    for i, record in enumerate(records):
        assert record["extra"] == {"first": record["completion"][:1], "tensor": i, "object": "{1}"}


@pytest.mark.parametrize("error", ["SystemExit(0)", "asyncio.CancelledError()"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_would_end_the_program_is_an_error_of_the_function(kind, error):
    names = {}
    exec(f"import asyncio\n\n{kind} leaves(completions, **columns):\n    raise {error}", names)
    for timeout in 0.0, 20.0:
        with pytest.raises(RunError, match=r"leaves raised (RuntimeError|CancelledError): .* \(<string>, line 4\)"):
            call_and_score([names["leaves"]], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES, timeout=timeout)


def test_a_failed_call_leaves_all_totals_unscored_and_is_kept_in_the_run_folder(tmp_path):
    def fails(completions, **columns):
        raise KeyError("x")

    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--reward_errors", "none", "--reward_timeout", "30")
    run.plan = replace(run.plan, reward_functions=[fails, *run.plan.reward_functions[1:]])
    run.folder.open(run.config, 0, {})
    metrics, experience = grpo_training_step(run, next(run.batches))
    groups = experience.groups
    assert metrics["unscored"] == metrics["reward_errors"] == 1 and metrics["grad_norm"] == 0
    assert groups.per_function[run.config.grpo.reward_functions[1]].isfinite().all(), "not the points of the others alone"
    run.log_step(metrics | {"skipped": 0, "step_seconds": 1.0}, experience)
    (line,) = read_jsonl(run.folder.path / "reward_errors.jsonl")
    assert (line["step"], line["function"], line["error"]) == (1, "fails", "KeyError: 'x'")


def test_async_functions_run_beside_each_other_on_one_loop_and_outputs_are_theirs():
    loops = []

    class Slow:
        async def __call__(self, completions, **kwargs):
            loops.append(asyncio.get_running_loop())
            await asyncio.sleep(0.4)
            return [float(len(type(self).__name__))] * len(completions)

    async def plain(completions, answer, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.4)
        return [float(a) for a in answer]

    functions, started = [type("a", (Slow,), {})(), plain, length, type("ccc", (Slow,), {})()], time.monotonic()
    total, _ = call_and_score(functions, [1.0] * 4, rollout_of(*"abcd"), EXAMPLES)
    assert total.tolist() == [[6.0, 6.0], [7.0, 7.0]] and time.monotonic() - started < 1.1, "not 1.2 s, one after the other"
    call_and_score([plain], [1.0], rollout_of(*"abcd"), EXAMPLES)
    assert len(set(loops)) == 1, "clients that a function keeps belong to one loop"


def test_an_async_function_that_raises_or_hangs_is_named_and_the_others_are_cancelled_or_count():
    cancelled = threading.Event()

    async def raises(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0 / len(text) for text in completions]

    async def hangs(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    rollout = rollout_of("a", "", "c", "d")
    with pytest.raises(RunError, match=r"raises raised ZeroDivisionError.*test_calling.*on 4 completions"):
        call_and_score([raises, hangs], [1.0, 1.0], rollout, EXAMPLES)
    assert cancelled.wait(5)
    cancelled.clear()
    reports, started = Reports(), time.monotonic()
    total, _ = call_and_score([hangs, raises], [1.0, 1.0], rollout, EXAMPLES, on_error="none", timeout=0.3, reports=reports)
    assert time.monotonic() - started < 2 and total.isnan().all()
    assert [f["function"] for f in reports.failures] == ["hangs", "raises"] and cancelled.wait(5)


def test_functions_for_messages_are_told_that_completions_of_texts_are_texts():
    def of_trl(completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    with pytest.raises(RunError, match=r"TypeError.*Completions are texts because the prompts are; pass prompts as messages\.$"):
        score(of_trl, *"abcd")


def backtracks(completions, **columns):
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b"))) for _ in completions]


def catches(completions, **columns):
    points = []
    for _ in range(9):                                    # each of these would take the next interruption, 1 s later
        try:
            time.sleep(30)
        except Exception:
            points.append(0.0)
    return points


def waits_in_a_pool(completions, **columns):
    with ThreadPoolExecutor(1) as threads:                # at the end of this block for its thread, for the second time
        return threads.submit(threading.Event().wait, 8).result()


def spins(completions, **columns):
    while True:
        pass


@pytest.mark.parametrize("function", [backtracks, catches, waits_in_a_pool, spins])
def test_the_limit_interrupts_and_the_handler_of_before_is_restored(function):
    before, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(RunError, match=r"no result within 0\.5 s"):
        score(function, *"ab", examples=EXAMPLES[:1], timeout=0.5)
    assert time.monotonic() - started < 3
    assert score(length, *"ab", examples=EXAMPLES[:1], timeout=0.5) == [[1.0, 1.0]]
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_ends_a_call_with_a_limit():
    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)                   # processes of pytest-xdist ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            score(spins, *"ab", examples=EXAMPLES[:1], timeout=20.0)
        assert time.monotonic() - started < 3
    finally:
        signal.signal(signal.SIGINT, before)
