"""pass@k, majority votes, intervals, and the metrics of an evaluation in training."""

import itertools
import math
import re
import signal
import statistics
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import assert_same, run_folder, watch_calls
from test_data import write_lines

import train
from analysis import evaluation
from analysis.evaluation import estimate_all, estimate_mean, evaluate, majority_vote, pass_at_k
from config import ModelConfig
from engine import make_engine
from engine.errors import Stopped
from engine.models import load_any_policy
from experience import Groups
from rewards import correctness
from runs.command_line import parse_config
from runs.folder import read_jsonl
from runs.groups import Scoring
from runs.setup import set_up


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize("answers,vote", [
    (["7", "7", "8"], 1.0), (["8", "8", "7"], 0.0), (["7", "7.0", "8", "8 ", "$7"], 1.0), (["7", "8"], 0.5),
    (["7", "8", "9"], 1 / 3), ([None, None, "7"], 1.0), ([None, None], 0.0), ([], 0.0),
])
def test_a_majority_votes_by_value_draws_are_shared_and_the_unreadable_abstain(answers, vote):
    assert majority_vote(answers, [answer in ("7", "7.0", "$7") for answer in answers]) == pytest.approx(vote)


def problems_of(rewards, texts="", cut=(), **columns):
    """Records of problems with those rewards by function (P, n), those texts of all completions, and columns."""
    texts, count = iter(texts), itertools.count()
    return [{name: values[p] for name, values in columns.items()} | {"completions": [
        {"completion": next(texts, ""), "finished": next(count) not in cut, "rewards": dict(zip(rewards, of_one, strict=True))}
        for of_one in zip(*rows, strict=True)]} for p, rows in enumerate(zip(*rewards.values(), strict=True))]


def test_the_estimates_by_hand():
    right = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [None, 1.0, 1.0, 1.0]]                     # the last could not be scored
    length = [[2.0, 4.0, None, 3.0], [-1.0] * 4, [None] * 4]
    texts = [f"<answer>{text}</answer>" for text in ["7", "8", "x", "y", *"8888", *"7777"]]
    found = estimate_all(problems_of({"length": length, "correctness": right}, texts, cut=[0, 1, 2, 8]))
    assert found["accuracy"]["truncated"] == 3 / 8 and found["accuracy"]["function"] == "correctness"
    assert {name: estimate["mean"] for name, estimate in found.items()} == pytest.approx({
        "accuracy": 0.125, "pass@2": 0.25, "pass@4": 0.5, "majority@4": 0.125,
        "reward/correctness": (0.25 + 0 + 1) / 3, "reward/length": 1.0})
    assert {name: estimate["problems"] for name, estimate in found.items()} == {
        "accuracy": 2, "pass@2": 2, "pass@4": 2, "majority@4": 2, "reward/correctness": 3, "reward/length": 2}
    assert list(estimate_all(problems_of({"correctness": [[1.0]]}, ["7"]))) == ["accuracy", "reward/correctness"]
    assert "majority@2" not in estimate_all(problems_of({"correctness": [[1.0, 0.0]]}, ["7", "8"])), "no answer is tagged"
    unknown = estimate_all(problems_of({"correctness": [[None]]}))
    assert unknown == {"reward/correctness": {"mean": None, "low": None, "high": None, "problems": 0}}


def test_the_interval_of_rewards_is_normal_over_problems_not_over_completions():
    rewards = [[1.0, 3.0], [-5.0, -6.0], [4.0, 4.0], [0.5, -0.5], [2.0, 8.0], [0.0, 1.0], [7.0, -9.0], [3.0, 3.0]]
    means = [statistics.mean(row) for row in rewards]
    mean, half = statistics.mean(means), 1.96 * statistics.stdev(means) / math.sqrt(8)
    for times in 1, 3:                                    # more completions are no more problems
        problems = problems_of({"mine": [row * times for row in rewards]})
        assert estimate_all(problems)["reward/mine"] == pytest.approx({"mean": mean, "low": mean - half, "high": mean + half,
            "problems": 8})
    for equal in ([0.3], [0.1] * 9, [0.0] * 9, [1.0] * 9):
        found = estimate_mean(np.array(equal), is_share=False)
        assert found["low"] is None is found["high"] and found["mean"] == pytest.approx(equal[0])


def test_the_interval_of_shares_is_that_with_two_more_zeros_and_ones():
    for successes, n in (0, 4), (3, 20), (20, 20), (128, 256):
        found = estimate_mean(np.array([1.0] * successes + [0.0] * (n - successes)), is_share=True)
        share = (successes + 2) / (n + 4)
        half = 1.96 * math.sqrt(share * (1 - share) / (n + 3))
        assert found == pytest.approx(
            {"mean": successes / n, "low": max(0, share - half), "high": min(1, share + half), "problems": n})
    rows = [[float(i < 3)] for i in range(40)]            # rewards of 0 and 1 are shares
    found = estimate_all(problems_of({"correctness": rows, "mine": rows}))
    assert found["reward/mine"] == found["reward/correctness"] and found["reward/mine"]["low"] > 0
    assert found["accuracy"] == found["reward/mine"] | {"truncated": 0.0, "function": "correctness"}


@pytest.mark.parametrize("rewards,right", [
    ({"mine": [[0.0, 1.0, 1.0]], "correctness": [[0.0, 0.0, 0.0]]}, "mine"),
    ({"mine": [[0.0, 0.5, 1.0]], "math_equality": [[0.0, 1.0, 1.0]], "correctness": [[0.0, 0.0, 0.0]]}, "math_equality"),
    ({"correctness": [[None, None]], "environment": [[1.0, 0.0]]}, "environment"),
    ({"reasoning_coherence": [[0.0, 1.0]], "mine": [[None, None]]}, None), ({"mine": [[2.0, 1.0]]}, None),
])
def test_the_first_function_of_zeros_and_ones_says_what_is_right(rewards, right):
    accuracy = estimate_all(problems_of(rewards)).get("accuracy", {"function": None})
    assert accuracy["function"] == right and (not right or accuracy["mean"] == statistics.mean(rewards[right][0]))


def test_each_source_has_an_accuracy_with_its_own_share_cut():
    rewards = {"correctness": [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]}
    for column in "source", "data_source":
        found = estimate_all(problems_of(rewards, cut=[2, 4], **{column: ["b", "a", "a"]}))
        shown = {name: (one["mean"], one["problems"], one["truncated"]) for name, one in found.items() if "truncated" in one}
        assert shown == {"accuracy": (0.5, 3, pytest.approx(1 / 3)), "accuracy/a": (0.25, 2, 0.5), "accuracy/b": (1.0, 1, 0.0)}
    for sources in ["a"] * 21, [*range(21)]:              # one, or too many
        found = estimate_all(problems_of({"correctness": [[1.0]] * 21}, source=sources))
        assert not any("accuracy/" in name for name in found)


def test_the_metrics_of_an_evaluation(folder, monkeypatch, settings):
    engine = make_engine("shared", *load_any_policy(ModelConfig(model_path=folder)))
    real, settings = engine.sample, replace(settings, generation_batch_size=2)

    def scripted(examples, *args, **options):
        rollout = real(examples, *args, **options)
        answers = [str(int(example["prompt"] == "easy")) for example in examples]
        rollout.completions = [f"<answer>{answer}</answer>" for answer in answers for _ in range(options["num_completions"])]
        return rollout

    def length(completions, prompts, log_metric, **columns):
        log_metric("prompts", len({*prompts}))
        return [2.0 * len(prompt) + (row % 2) for row, prompt in enumerate(prompts)]

    monkeypatch.setattr(engine, "sample", scripted)
    examples = [{"prompt": "easy", "answer": "1"}] * 3 + [{"prompt": "hard", "answer": "1"}] + [{"prompt": "unknown"}]
    result = evaluate(engine, examples, settings, Scoring([correctness, length], [1.0, 1.0]), seed=0, num_completions=2)
    shares, lengths = estimate_mean(np.array([1.0, 1.0, 1.0, 0.0]), True), estimate_mean(np.array([8.5] * 4 + [14.5]), False)
    expected = dict.fromkeys(("pass@2", "majority@2", "accuracy", "reward/correctness"), shares) | {"reward/length": lengths}
    assert result.pop("eval_truncated") > 0
    assert result == {"eval_problems": 4, "eval_prompts": 1.0} | {
        f"eval_{name.replace('/', end + '/') if '/' in name else name + end}": estimate[end.strip("_") or "mean"]
        for name, estimate in expected.items() for end in ("", "_low", "_high")}
    unknown = evaluate(engine, examples[-1:], settings, seed=0)
    assert "eval_accuracy" not in unknown and unknown["eval_problems"] == 1 and unknown["eval_reward/correctness"] is None
    assert evaluate(engine, examples, settings, seed=0)["eval_accuracy"] == 0.75, "supervised: by correctness"


def batches_of(monkeypatch, settings, seconds=0.0, **options):
    """The numbers of the problems in each batch of 3 of 8 problems, and what is printed, if a batch takes some seconds."""
    clock, seen, lines = [0.0], [], []

    def work(sample, examples, seeds):
        clock[0] += seconds
        seen.append([number for *_, number in seeds])
        return Groups([], None, None, {})

    monkeypatch.setattr(evaluation.time, "monotonic", lambda: clock[0])
    policy, settings = SimpleNamespace(sample=None, sampler=None, map_over_processes=work, num_slices=1), replace(settings, generation_batch_size=7)
    with suppress(Stopped):
        list(evaluation.sample_and_score_problems(
            policy, [{}] * 8, settings, Scoring([], []), seed=0, num_completions=2, notify=lines.append, **options))
    return seen, lines


def test_an_evaluation_prints_its_progress_stops_between_batches_and_continues(monkeypatch, settings):
    assert batches_of(monkeypatch, settings, seconds=5.0) == ([[0, 1, 2], [3, 4, 5], [6, 7]], [])
    assert batches_of(monkeypatch, settings, seconds=60.0)[1] == [
        "  evaluated 3 of 8 problems, left 0:01:40", "  evaluated 6 of 8 problems, left 0:00:40"]
    assert batches_of(monkeypatch, settings, seconds=60.0, done=2) == (
        [[2, 3, 4], [5, 6, 7]], ["  evaluated 5 of 8 problems, left 0:01:00"])
    answers = iter([False, True])
    assert batches_of(monkeypatch, settings, stop_requested=lambda: next(answers))[0] == [[0, 1, 2]]


@pytest.mark.parametrize("call", [1, 5])
def test_a_signal_in_the_first_or_last_evaluation_stops_it_and_a_resumed_run_repeats_it(tmp_path, monkeypatch, capsys, call):
    """An evaluation has four batches of two problems."""
    flags = "--use_grpo --cold_start_steps 0 --max_steps 2 --generation_batch_size 4 --log_rollouts_every 1".split()
    flags += ["--eval_samples", "2"]
    never = run_folder(tmp_path / "never", *flags)
    shown = r"held out at step 0: accuracy 0.000 \[0.000, 0.\d+\] of 8 x 2, pass@2 0.000, cut \d+%\n"
    assert re.search(shown, capsys.readouterr().out)
    calls = watch_calls(monkeypatch, evaluation, "score", lambda number: number == call and signal.raise_signal(signal.SIGINT))
    stopped = run_folder(tmp_path / "stopped", *flags)
    assert len(calls) == call and not (stopped / "final").exists()
    assert "; continue with: python train.py" in capsys.readouterr().out
    assert len(read_jsonl(stopped / "metrics.jsonl")) == (0 if call == 1 else 3), "the evaluation is not logged"
    train.main(["--output_dir", str(stopped), "--resume"])
    assert_same(stopped, never)


def test_an_evaluation_on_a_cpu_has_64_problems_of_a_model_and_256_of_the_demonstration(folder, tmp_path, capsys):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": f"{i}+1=?", "answer": str(i + 1)} for i in range(2000)])
    flags = f"--use_grpo --dataset {path} --report_to none --cold_start_steps 0 --output_dir {tmp_path}/run".split()
    for model, limit in (["--model_path", folder], 64), ([], 256), (["--model_path", folder, "--eval_limit", "65"], 65):
        run = set_up(parse_config([*flags, *model]))
        assert len(run.plan.data.eval_set) == limit == run.config.data.eval_limit
        assert ("at most 64 held-out problems, since this is a CPU: --eval_limit" in capsys.readouterr().out) == (limit == 64)
