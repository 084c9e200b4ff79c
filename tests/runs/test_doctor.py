"""The training doctor: each rule gives advice with the numbers when its metrics call for it, and none on a healthy run."""

import itertools
import random

import pytest

from config import Config, GRPOConfig, ModelConfig
from runs.doctor import RULES, COOLDOWN, diagnose

CONFIG = Config(ModelConfig("some/model"))                        # defaults, without a profile
HEALTHY = {
    "tied_groups": 0.2, "reward/correctness": 0.5, "entropy": 0.5, "completion_tokens": 40.0, "truncated": 0.02, "kl": 0.02,
    "clip_fraction": 0.05, "unscored": 0.0, "skipped": 0,
}
SICK = {
    "not_finite": ({"skipped": 1}, "5 of the last updates"),
    "nothing_scored": ({"unscored": 1.0}, "none of the completions of 5 rollouts could be scored"),
    "unscored": ({"unscored": 0.25}, "25% of the completions could not be scored"),
    "saturated": ({"reward/correctness": 0.99, "tied_groups": 0.9}, "99% of the completions are correct"),
    "lengths_collapse": ({"completion_tokens": 8.0}, "shrank from 40 to 8 tokens in 10 rollouts"),
    "kl_runs_away": ({"kl": 0.3}, "rose from 0.02 to 0.30 nat/token in 10 rollouts: raise --kl_penalty_coef"),
    "entropy_falls": ({"entropy": 0.2}, "entropy fell from 0.50 to 0.20 nat/token in 10 rollouts"),
    "lengths_explode": ({"completion_tokens": 100.0}, "grew from 40 to 100 tokens"),
    "truncation": (
        {"truncated": 0.4}, "40% of the completions were truncated at 256 tokens: raise --generation_max_length to 512"),
    "clipping": ({"clip_fraction": 0.5}, "50% of the tokens are clipped"),
    "all_tied": (
        {"tied_groups": 1.0, "reward/correctness": 0.0},
        "in 10 rollouts no group had two different rewards, so nothing was learned from them: no completion is correct",
    ),
    "ties": (
        {"tied_groups": 0.62, "reward/correctness": 0.05},
        "62% of groups have equal rewards and give no gradient; with success 0.05 and 4 completions 81% is expected: raise "
        "--num_completions_per_prompt to 16",
    ),
}


def history(change, steps=15):
    return [HEALTHY | (change if step >= steps - 10 else {}) for step in range(steps)]


def test_every_rule_is_tested_here():
    assert set(SICK) == set(RULES)


@pytest.mark.parametrize("rule", SICK)
def test_a_rule_gives_advice_with_the_numbers_and_then_pauses(rule):
    change, text = SICK[rule]
    lines = history(change)
    advice = diagnose(lines, CONFIG)
    assert advice.startswith(f"{rule}: ") and text in advice and "\n" not in advice
    rules = []
    for _ in range(2 * COOLDOWN):
        lines.append(HEALTHY | change | ({"advice": advice} if advice else {}))
        advice = diagnose(lines, CONFIG)
        rules.append((advice or "").partition(":")[0])
    assert rules[: COOLDOWN - 1].count(rule) == 0


def test_unscored_rollouts_are_reported_once():
    lines = history({"unscored": 1.0})
    lines.append(lines[-1] | {"advice": diagnose(lines, CONFIG)})
    assert lines[-1]["advice"].startswith("nothing_scored") and diagnose(lines, CONFIG) is None


def test_a_healthy_run_and_missing_metrics_give_no_advice():
    assert diagnose(history({}), CONFIG) is None
    assert diagnose([{}] * 20, CONFIG) is None
    assert diagnose([{name: None for name in HEALTHY}] * 20, CONFIG) is None
    assert diagnose(history({"truncated": 0.9}, steps=4)[:4], CONFIG) is None, "too early to tell"


def test_advice_on_ties_depends_on_why_they_are_there():
    def on(tied, success, size=4):
        config = Config(grpo=GRPOConfig(num_completions_per_prompt=size))
        return diagnose(history({"tied_groups": tied, "reward/correctness": success}), config)

    assert "--num_completions_per_prompt to 8" in on(0.6, 0.88)
    assert "--dynamic_sampling 3 replaces them" in on(0.8, 0.5), "far more ties than chance: hard and easy problems mixed"
    assert "take easier problems" in on(0.97, 0.001)
    assert "partial credit" in on(0.97, 0.0)


@pytest.mark.parametrize(("rewards", "advice"), [
    ({"reward/correctness": 0.0}, ["easier problems", "partial credit", "--generation_temperature (now 0.8)",
                                   "--num_completions_per_prompt (now 4)", "--cold_start_steps (now 0)"]),
    ({"reward/correctness": 1.0}, ["all completions are correct: take harder problems"]),
    ({"reward/correctness": 0.5}, ["--generation_temperature (now 0.8)", "tells them apart"]),
    ({"reward/quality": 0.3}, ["--generation_temperature (now 0.8)", "tells them apart"]),
])
def test_ten_rollouts_of_tied_groups_are_reported_with_what_to_do(rewards, advice):
    tied, lines, found = {"tied_groups": 1.0, "entropy": None} | rewards, [], []
    for _ in range(30):
        lines.append(dict(tied))
        lines[-1]["advice"] = diagnose(lines, CONFIG)
        found += [(len(lines), lines[-1]["advice"])] * (lines[-1]["advice"] or "").startswith("all_tied")
    assert [after for after, _ in found] == [10, 30], found
    assert all(words in found[0][1] for words in advice), found[0]
    lines[-5]["tied_groups"] = 0.75                       # a single group that differs is enough
    assert RULES["all_tied"](lines, CONFIG) is None
    assert RULES["all_tied"]([tied] * 10, Config(grpo=GRPOConfig(use_value_head=True))) is None, "it learns from ties too"


def test_the_expected_share_of_ties_is_what_chance_gives():
    from runs.doctor import expected_ties

    generator = random.Random(0)
    for success, size in itertools.product([0.1, 0.5, 0.8], [2, 4]):
        groups = [[generator.random() < success for _ in range(size)] for _ in range(20000)]
        tied = sum(len(set(group)) == 1 for group in groups) / len(groups)
        assert expected_ties(success, size) == pytest.approx(tied, abs=0.015)
