"""What reward functions get by name, what they log, async functions, several outputs, alarms, and groups that failed."""

import asyncio
import contextlib
import math
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import made_up_rollout, start_run
from test_rewards import EXAMPLES, call_and_score, length, rollout_of

from config import GRPOConfig
from experience import Groups, shape_rewards
from reward_functions.calling import Reports, RewardError
from reward_functions.loading import load_reward_function
from runs.groups import join, select
from runs.folder import read_jsonl
from train import grpo_training_step


def score(function, *texts, examples=EXAMPLES, **options):
    """Points (P, G) of one function as lists."""
    total, _ = call_and_score([load_reward_function(function)], [1.0], rollout_of(*texts), examples, **options)
    return total.tolist()


def fussy(completions, **columns):
    return [1 / len(text) for text in completions]


# ---- a function that failed ----------------------------------------------------------------------------------


def test_a_function_that_raises_leaves_the_totals_of_its_groups_unscored_and_scores_the_others():
    reports = Reports()
    rollout = rollout_of("a", "", "ccc", "dddd")
    total, points = call_and_score([fussy, length], [1.0, 1.0], rollout, EXAMPLES, on_error="none", reports=reports)
    assert total[0].isnan().all(), "not the points of the other function alone"
    assert total[1].tolist() == [1 / 3 + 3, 1 / 4 + 4]
    assert points["fussy"][0].isnan().all() and points["length"].isfinite().all()
    assert reports.failures == [{"function": "fussy", "error": "ZeroDivisionError: division by zero", "completion": "a"}]
    config = GRPOConfig(reward_functions=["fussy", "length"], reward_weights=[1.0, 1.0], reward_combination="gdpo")
    combined = shape_rewards(config, rollout, total, points)
    assert combined[0].isnan().all() and combined[1].isfinite().all(), "in --reward_combination gdpo as well"


def test_a_failed_function_is_counted_as_unscored_in_a_step_and_kept_in_the_run_folder(tmp_path):
    def sometimes(completions, prompts, **columns):
        if seen.setdefault("prompt", prompts[0]) == prompts[0]:            # all groups together, and the first one
            raise KeyError("x")
        return [float(len(c)) for c in completions]

    seen = {}
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--reward_errors", "none", "--reward_timeout", "30")
    run.reward_functions = [sometimes, *run.reward_functions[1:]]
    run.folder.open(0)
    metrics, experience = grpo_training_step(run, next(run.batches))
    assert metrics["unscored"] == 1 / 4 and metrics["reward_errors"] == 1 and math.isfinite(metrics["grad_norm"])
    assert not experience.mask[:4].any() and experience.mask[4:].any(), "they are not trained on"
    run.log_step(metrics | {"skipped": 0}, experience)
    (line,) = read_jsonl(run.folder.path / "reward_errors.jsonl")
    assert (line["step"], line["function"], line["error"]) == (1, "sometimes", "KeyError: 'x'")


# ---- what is passed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotation", ["list[list[int]]", "typing.List[typing.List[int]]"])
def test_completions_annotated_as_token_ids_are_token_ids(annotation):
    names = {}
    exec(f"import typing\nfrom typing import List\ndef f(completions: {annotation}):\n    return [float(sum(c)) for c in completions]", names)
    assert score(names["f"], *"abcd") == [[1.0, 7.0], [13.0, 19.0]]
    exec("def g(completions: list[str], **columns):\n    return [float(len(c)) for c in completions]", names)
    assert score(names["g"], *"abcd") == [[1.0, 1.0], [1.0, 1.0]]


def test_trainer_state_counts_the_steps_of_grpo(tmp_path):
    seen = []

    def spy(completions, trainer_state, **kwargs):
        seen.append(trainer_state)
        return [float(len(c)) for c in completions]

    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "3")
    run.reward_functions = [spy, *run.reward_functions[1:]]
    run.progress.phase_step = 7
    grpo_training_step(run, next(run.batches))
    assert vars(seen[0]) == {"global_step": 7, "max_steps": 10, "epoch": 4 / len(run.train_set)}
    run.progress.phase = 0
    assert run.trainer_state.global_step == 0, "not the steps of the cold start"


# ---- what is logged ------------------------------------------------------------------------------------------


def test_logged_values_reach_metrics_and_records_of_a_step_and_an_evaluation(tmp_path):
    def logging(completions, log_extra, log_metric, **kwargs):
        log_extra("first", [c[:1] for c in completions])
        log_extra("tensor", torch.arange(len(completions)))
        log_extra("object", [{1}] * len(completions))
        for value in 1.0, 2.0:
            log_metric("spread", torch.tensor(value))
        log_metric("grad_norm", -5.0)
        log_metric("step", -5.0)
        return [float(len(c)) for c in completions]

    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--eval_limit", "4")
    run.reward_functions = [logging, *run.reward_functions[1:]]
    run.folder.open(0)
    metrics, experience = grpo_training_step(run, next(run.batches))
    run.log_step(metrics | {"skipped": 0}, experience)
    run.log_evaluation()
    step, evaluation = read_jsonl(run.folder.path / "metrics.jsonl")
    assert step["spread"] == 1.5 and evaluation["eval_spread"] == 1.5
    assert step["grad_norm"] > 0 and step["step"] == run.progress.step, "our own metrics have precedence"
    records = read_jsonl(run.folder.path / "rollouts.jsonl")
    assert [r["extra"] for r in records] == [{"first": r["completion"][:1], "tensor": i, "object": "{1}"} for i, r in enumerate(records)]


def test_what_is_logged_stays_with_its_completions_when_groups_are_replaced_and_joined():
    def groups_of(first, rewards):
        reports = Reports([{"n": first + i} for i in range(4)], {"m": [float(first)]}, [{"function": f"f{first}"}])
        return Groups([{"prompt": "p"}] * 2, made_up_rollout([3, 3], [2] * 4), torch.tensor(rewards), {}, torch.tensor(rewards), reports=reports)

    groups = groups_of(0, [[0.0, 0.0], [0.0, 1.0]])
    assert select(groups, ~groups.tied).reports.extra == [{"n": 2}, {"n": 3}]
    joined = join([select(groups, ~groups.tied), groups_of(4, [[0.0, 1.0], [1.0, 0.0]])])
    assert joined.reports.extra == [{"n": n} for n in range(2, 8)] and joined.reports.means() == {"m": 2.0}
    assert [failure["function"] for failure in joined.reports.failures] == ["f0", "f4"]
    assert len(groups.reports.extra) == 4 and groups.reports.metrics == {"m": [0.0]}, "the parts are unchanged"


# ---- async functions -----------------------------------------------------------------------------------------


def test_async_functions_run_beside_each_other_on_one_loop_and_outputs_are_theirs():
    loops = []

    def slow(name):
        class Slow:
            async def __call__(self, completions, **kwargs):
                loops.append(asyncio.get_running_loop())
                await asyncio.sleep(0.4)
                return [float(len(name))] * len(completions)

        Slow.__name__ = name
        return Slow()

    async def plain(completions, answer, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0.4)
        return [float(a) for a in answer]

    functions, started = [slow("a"), plain, length, slow("ccc")], time.monotonic()
    total, _ = call_and_score(functions, [1.0] * 4, rollout_of(*"abcd"), EXAMPLES)
    assert total.tolist() == [[6.0, 6.0], [7.0, 7.0]] and time.monotonic() - started < 1.1, "not 1.2 s, one after the other"
    call_and_score([plain], [1.0], rollout_of(*"abcd"), EXAMPLES)
    assert len(set(loops)) == 1, "clients that a function keeps belong to one loop"


def test_an_async_function_that_raises_or_hangs_is_named_and_the_others_count():
    cancelled = threading.Event()

    async def raises(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0 / len(text) for text in completions]

    async def hangs(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(RewardError, match=r"raises raised ZeroDivisionError.*test_what_is_passed.*on 4 completions"):
        score(raises, "a", "", "c", "d")
    reports, started = Reports(), time.monotonic()
    total, points = call_and_score(
        [hangs, raises], [1.0, 1.0], rollout_of("a", "", "c", "d"), EXAMPLES, on_error="none", timeout=0.3, reports=reports)
    assert time.monotonic() - started < 2 and points["raises"][1].tolist() == [1.0, 1.0] and total.isnan().all()
    assert [f["function"] for f in reports.failures] == ["hangs", "raises"]
    assert cancelled.wait(5), "and does not go on for ever"


# ---- the time limit ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most(seconds):
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def backtracks(completions, **columns):
    return [float(bool(re.match(r"(a+)+$", "a" * 40 + "b"))) for _ in completions]


def spins(completions, **columns):
    while True:
        pass


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


@pytest.mark.parametrize("function", [backtracks, spins, catches, waits_in_a_pool])
def test_the_limit_interrupts(function):
    with at_most(3), pytest.raises(RewardError, match=r"no result within 0\.5 s"):
        score(function, *"ab", examples=EXAMPLES[:1], timeout=0.5)


def test_the_handler_of_before_is_restored_and_no_timer_is_left():
    before = signal.getsignal(signal.SIGALRM)
    for function, raised in (spins, pytest.raises(RewardError)), (length, contextlib.nullcontext()):
        with raised:
            score(function, *"ab", examples=EXAMPLES[:1], timeout=0.3)
        assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_ctrl_c_ends_a_call_with_a_limit():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)                   # processes of pytest-xdist ignore it
    try:
        with at_most(3), pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
            score(spins, *"ab", examples=EXAMPLES[:1], timeout=20.0)
    finally:
        signal.signal(signal.SIGINT, before)
