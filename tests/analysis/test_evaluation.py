"""pass@k, majority votes, intervals, and the metrics of an evaluation in training."""

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.evaluation import estimate_all, estimate_mean, evaluate, majority_vote, pass_at_k
from config import ModelConfig
from engine import make_engine
from engine.models import load_any_policy
from experience import Groups
from runs.groups import Scoring


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
    texts = ["no answer" if answer is None else f"<answer>{answer}</answer>" for answer in answers]
    assert majority_vote(texts, "7") == pytest.approx(vote)


def groups_of(rewards, answers=(), completions=()):
    """Groups with those rewards by function (P, n)."""
    per_function = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in rewards.items()}
    scores = per_function["correctness"]
    rollout = type("Rollout", (), {"completions": list(completions)})
    return Groups([{"answer": answer} for answer in answers], rollout, scores, per_function, scores)


def test_the_estimates_by_hand():
    right = [[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [math.nan, 1.0, 1.0, 1.0]]                 # the last could not be scored
    length = [[2.0, 4.0, math.nan, 3.0], [-1.0] * 4, [math.nan] * 4]
    texts = [f"<answer>{text}</answer>" for text in ["7", "8", "x", "y", *"8888", *"7777"]]
    found = estimate_all(groups_of({"correctness": right, "length": length}, ["7"] * 3, texts))
    assert {name: estimate["mean"] for name, estimate in found.items()} == pytest.approx({
        "accuracy": 0.125, "pass@2": 0.25, "pass@4": 0.5, "majority@4": 0.125,
        "reward/correctness": (0.25 + 0 + 1) / 3, "reward/length": 1.0})
    assert {name: estimate["problems"] for name, estimate in found.items()} == {
        "accuracy": 2, "pass@2": 2, "pass@4": 2, "majority@4": 2, "reward/correctness": 3, "reward/length": 2}
    assert list(estimate_all(groups_of({"correctness": [[1.0]]}, ["7"], ["7"]))) == ["accuracy", "reward/correctness"]
    unknown = estimate_all(groups_of({"correctness": [[math.nan]]}))
    assert unknown == {"reward/correctness": {"mean": None, "low": None, "high": None, "problems": 0}}


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_the_interval_of_rewards_is_normal_over_problems_not_over_completions():
    rewards = [[1.0, 3.0], [-5.0, -6.0], [4.0, 4.0], [0.5, -0.5], [2.0, 8.0], [0.0, 1.0], [7.0, -9.0], [3.0, 3.0]]
    means = [statistics.mean(row) for row in rewards]
    mean, half = statistics.mean(means), 1.96 * statistics.stdev(means) / math.sqrt(8)
    for times in 1, 3:                                    # more completions are no more problems
        groups = groups_of({"correctness": [[math.nan]] * 8, "mine": [row * times for row in rewards]})
        assert estimate_all(groups)["reward/mine"] == pytest.approx({"mean": mean, "low": mean - half, "high": mean + half, "problems": 8})
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
    found = estimate_all(groups_of({"correctness": rows, "mine": rows}, [""] * 40, [""] * 40))
    assert found["accuracy"] == found["reward/mine"] == found["reward/correctness"] and found["accuracy"]["low"] > 0


# ---- in training ----------------------------------------------------------------------------------------------------


def test_the_metrics_of_an_evaluation(folder, monkeypatch, settings):
    engine = make_engine("shared", *load_any_policy(ModelConfig(model_path=folder)))
    real, settings = engine.sample, replace(settings, generation_batch_size=2)

    def scripted(examples, *args, **options):
        rollout = real(examples, *args, **options)
        rollout.completions = [f"<answer>{'1' if example['prompt'] == 'easy' else '0'}</answer>" for example in examples]
        return rollout

    def length(completions, **columns):
        return [float(i) for i, _ in enumerate(completions)]

    monkeypatch.setattr(engine, "sample", scripted)
    examples = [{"prompt": "easy", "answer": "1"}] * 3 + [{"prompt": "hard", "answer": "1"}] + [{"prompt": "unknown"}]
    result = evaluate(engine, examples, settings, Scoring([length], [1.0]), seed=0)
    shares = estimate_mean(np.array([1.0, 1.0, 1.0, 0.0]), is_share=True)
    lengths = estimate_mean(np.arange(5.0), is_share=False)
    assert result.pop("eval_truncated") > 0
    assert result == {
        "eval_problems": 4, "eval_accuracy": 0.75, "eval_accuracy_low": shares["low"], "eval_accuracy_high": shares["high"],
        "eval_reward/correctness": 0.75, "eval_reward_low/correctness": shares["low"], "eval_reward_high/correctness": shares["high"],
        "eval_reward/length": 2.0, "eval_reward_low/length": lengths["low"], "eval_reward_high/length": lengths["high"]}
    unknown = evaluate(engine, examples[-1:], settings, seed=0)
    assert "eval_accuracy" not in unknown and unknown["eval_problems"] == 1 and unknown["eval_reward/correctness"] is None
