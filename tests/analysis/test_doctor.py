"""The training doctor on a library of histories: recorded runs (histories.json), and runs generated from their figures."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from config import Config
from runs.doctor import RULES, STAYS, WITHDRAWN, diagnose, expected_ties, open_advice, verdict

CONFIG = Config.of(model_path="some/model", use_grpo=True)        # defaults, without a profile
RECORDED = json.loads((Path(__file__).parent / "histories.json").read_text())


def play(lines, config=CONFIG):
    """Show a run to the doctor rollout by rollout: returns [(rollout, rule, sentence)], and the lines with the advice."""
    history, given = [], []
    for number, line in enumerate(lines, start=1):
        advice = diagnose([*history, dict(line)], config)
        history.append(line | ({"advice": advice} if advice else {}))
        given += [(number, *advice.split(": ", 1))] if advice else []
        assert "\n" not in (advice or "")
    return given, history


def healthy(seed=0, rollouts=150, start=0.3, end=0.9, size=4):
    """A run whose share of right answers rises as in a recorded one, with the noise of 64 completions of mixed problems."""
    g, t = np.random.default_rng(seed), np.arange(rollouts)
    p = end - (end - start) * np.exp(-t / 40)
    success = np.clip(p + g.normal(0, 0.06, rollouts), 0, 1)
    columns = {
        "reward/correctness": success, "reward/reasoning_coherence": g.normal(0.3, 0.02, rollouts), "mean_reward": 0.3 + success, "skipped": t * 0, "unscored": t * 0.0,
        "entropy": 0.6 * (1.1 - p) * np.exp(g.normal(0, 0.2, rollouts)), "completion_tokens": g.normal(23, 1, rollouts),
        "tied_groups": np.clip(expected_ties(p, size) + g.normal(0, 0.1, rollouts), 0, 1), "tied_right_groups": p**size,
        "kl": 0.0005 * t * np.exp(g.normal(0, 0.2, rollouts)), "truncated": np.abs(g.normal(0, 0.02, rollouts)), "clip_fraction": t * 0.0,
    }
    return [dict(zip(columns, map(float, row), strict=True)) for row in zip(*columns.values(), strict=True)]


def changed(change, rollouts=150, start=0.5, end=0.5, seed=1):
    """A run that stays as it is for 30 rollouts, and is then changed: change(rollouts since then, line) -> metrics."""
    lines = healthy(seed, rollouts, start, end)
    return [line | (change(number - 30, line) if number >= 30 else {}) for number, line in enumerate(lines)]


def fall(t):                    # of ten rollouts, from 1 to 0
    return max(0.0, 1 - t / 10)


GENERATED = {                   # lines, the advice in order and after which rollout, words in the first one
    "collapse in ten rollouts": (
        changed(lambda t, line: {"reward/correctness": 0.97 * fall(t), "mean_reward": 0.18 + 1.03 * fall(t), "tied_groups": 0.3},
                start=0.97, end=0.97), {"saturated": 10, "collapse": 38}, ["9", "take harder problems"]),
    "entropy x 0.97 a rollout": (
        changed(lambda t, line: {"entropy": line["entropy"] * 0.97**t}, 230), {"entropy_falls": 47},
        ["--learning_rate (now 5e-06)", "--entropy_coef 0.01", "a higher --kl_penalty_coef"]),
    "KL + 0.005 a rollout": (
        changed(lambda t, line: {"kl": line["kl"] + 0.005 * t}, 230), {"kl_drift": 49}, ["a higher --kl_penalty_coef"]),
    "length hacking": (
        changed(lambda t, line: {"completion_tokens": min(250, 23 * 1.03**t), "truncated": min(0.9, t / 100),
                                 "mean_reward": line["mean_reward"] + t / 100}),
        {"length_hacking": 47}, ["--overlong penalise", "no more are right"]),
    "reward without right answers": (
        changed(lambda t, line: {"mean_reward": line["mean_reward"] + t / 60, "reward/correctness": max(0, line["reward/correctness"] - t / 200),
                                 "reward/reasoning_coherence": 0.3 + t / 60}),
        {"reward_hacking": 44}, ["reward/reasoning_coherence pays for something else", "--reward_weights"]),
    "96 % are right": (healthy(2, 300, 0.3, 0.97), {"saturated": 106}, ["take harder problems, or stop"]),
    "no group has a gradient": (
        changed(lambda t, line: {"tied_groups": 1.0, "entropy": None, "reward/correctness": 0.0, "mean_reward": 0.3}, start=0.02, end=0.0),
        {"ties": 20}, ["easier problems"]),
    "problems of unequal difficulty": (
        changed(lambda t, line: {"tied_groups": 0.8, "tied_right_groups": 0.3}), {"ties": 41}, ["30% are right, 50% wrong: --dynamic_sampling 3 replaces them"]),
    "NaN": (changed(lambda t, line: {"skipped": 1.0}), {"not_finite": 31}, ["skipped.jsonl"]),
    "NaN from the start": ([{"skipped": 1, "mean_reward": 0.5}] * 12, {"not_finite": 10}, ["--learning_rate (now 5e-06)"]),
    "a reward that scores nothing": ([{"unscored": 1.0, "mean_reward": None}] * 20, {"unscored": 10}, ["reward_errors.jsonl"]),
    "a reward that fails now and then": (changed(lambda t, line: {"unscored": 0.25}), {"unscored": 33}, ["could not be scored"]),
    "a short limit": (
        [line | {"truncated": 0.6, "completion_tokens": 200.0} for line in healthy(3, start=0.5, end=0.5)], {"truncation": 10},
        ["raise --generation_max_length (now 256)"]),
    "short texts for a format": (
        changed(lambda t, line: {"completion_tokens": max(5, 23 * 0.95**t)}), {"length_collapse": 47}, ["what they still earn"]),
    "many updates on a rollout": (
        changed(lambda t, line: {"clip_fraction": 0.5}), {"clipping": 34}, ["--learning_rate"]),
    "all right or all wrong": (
        [line | {"tied_groups": 1.0, "tied_right_groups": 0.5} for line in healthy(4, 40, 0.5, 0.5)], {"ties": 10},
        ["50% are right, 50% wrong: --dynamic_sampling 3"]),
}
RECORDED_ADVICE = {             # in order, and after which rollout
    "healthy": {},
    "healthy, with a KL penalty": {},
    "collapse over 20 rollouts": {"collapse": 12},
    "collapse at once": {"entropy_falls": 13, "length_collapse": 30, "reward_hacking": 51},
    "all tied": {"ties": 10},
    "length hacking": {"length_hacking": 10},
    "reward that is noise": {"collapse": 10, "length_hacking": 28},
    "reward that pays for wrong answers": {"reward_hacking": 10, "length_hacking": 35},
}


@pytest.mark.parametrize("name", GENERATED)
def test_each_kind_of_run_gets_its_advice_once_and_no_other(name):
    lines, expected, words = GENERATED[name]
    given, history = play(lines)
    assert [(rule, number) for number, rule, _ in given] == list(expected.items()), given
    first, last = given[0][2], given[-1][2]
    assert all(word in first for word in words), given
    assert open_advice(history) == given[-1][1], "it stays open"
    for impossible in "--ppo_epochs", "(now 0)", "--max_policy_kl":
        assert impossible not in last or "cold_start" in last, "a flag that changes nothing"


def test_every_rule_has_a_history():
    assert {rule for _, expected, _ in GENERATED.values() for rule in expected} == set(RULES)


@pytest.mark.parametrize("name", RECORDED)
def test_each_recorded_run_gets_its_advice_and_healthy_ones_none(name):
    columns, config = RECORDED[name]["metrics"], Config.of(use_grpo=True, **RECORDED[name]["flags"])
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    given, _ = play(lines, config)
    assert [(rule, number) for number, rule, _ in given] == list(RECORDED_ADVICE[name].items()), given


def test_the_demonstration_of_the_lecture_gets_one_advice_and_a_verdict():
    lines = map(json.loads, (Path(__file__).parents[2] / "docs/figures/curve.jsonl").read_text().splitlines())
    given, history = play([line for line in lines if line["phase"] == "grpo"])
    assert [(rule, "--dynamic_sampling 3" in sentence) for _, rule, sentence in given] == [("ties", True)], "as the page says"
    assert verdict(history, CONFIG) == "mean_reward 0.33 -> 0.63, tied groups 59% in 100 rollouts; open advice: ties"


@pytest.mark.slow
def test_healthy_runs_get_no_advice():
    for start, end in (0.3, 0.85), (0.5, 0.5):
        assert [seed for seed in range(50) if play(healthy(seed, 150, start, end))[0]] == [], (start, end)
    assert play([{}] * 40)[0] == play([dict.fromkeys(healthy()[0])] * 40)[0] == [], "nothing is known"


def test_an_advice_is_withdrawn_when_it_no_longer_holds_and_comes_back_after_a_while():
    lines = [line | {"unscored": 0.3 * (30 <= n < 50 or n >= 90)} for n, line in enumerate(healthy(5, 120, 0.5, 0.5))]
    given, history = play(lines)
    assert [(rule, sentence == WITHDRAWN) for _, rule, sentence in given] == [("unscored", False), ("unscored", True), ("unscored", False)]
    (opened, _, _), (withdrawn, _, _), (again, _, _) = given
    assert 30 < opened < 36 and withdrawn - STAYS in range(50, 56) and 90 < again < 96
    assert open_advice(history) == "unscored" and open_advice(history[: again - 1]) == ""


def test_a_worse_finding_replaces_an_advice_and_a_lesser_one_waits():
    lines = [line | {"clip_fraction": 0.5 * (n > 20), "unscored": 1.0 * (n > 60)} for n, line in enumerate(healthy(6, 90, 0.5, 0.5))]
    given, _ = play(lines)
    assert [rule for _, rule, _ in given] == ["clipping", "unscored"]
    lines = [line | {"clip_fraction": 0.5 * (n > 60), "unscored": 0.3 * (n > 20)} for n, line in enumerate(healthy(6, 90, 0.5, 0.5))]
    assert [rule for _, rule, _ in play(lines)[0]] == ["unscored"]


def test_flags_that_would_change_nothing_are_not_named():
    def advice(name, **flags):
        return play(GENERATED[name][0], Config.of(model_path="some/model", use_grpo=True, **flags))[0][0][2]

    assert "--overlong" not in advice("length hacking", overlong="penalise") and "max_length" not in advice("length hacking")
    assert "fewer --ppo_epochs (now 4)" in advice("many updates on a rollout", ppo_epochs=4)
    assert "--use_kl_penalty true" in advice("entropy x 0.97 a rollout", use_kl_penalty=False)
    assert "--entropy_coef" not in advice("entropy x 0.97 a rollout", entropy_coef=0.02)
    assert play(GENERATED["many updates on a rollout"][0], Config.of(model_path="m", use_grpo=True, loss_type="gspo"))[0] == []
    assert play([line | {"tied_groups": 1.0} for line in healthy(4, 40, 0.5, 0.5)], Config.of(use_grpo=True, use_value_head=True))[0] == []


def test_a_run_with_a_teacher_alone_is_judged_by_its_kl():
    config = Config.of(use_grpo=True, reward_functions=["none"], use_kl_penalty=True, reference_path="teacher")
    tied = [{"tied_groups": 1.0, "mean_reward": 0.0, "reward/none": 0.0, "completion_tokens": 20.0} for _ in range(60)]
    falls = [line | {"kl": 1 / (1 + n), "entropy": 1 / (1 + n)} for n, line in enumerate(tied)]
    assert play(falls, config)[0] == [] and play(falls)[0] != []
    rises = [line | {"kl": 0.02 * n, "entropy": 1.0} for n, line in enumerate(tied)]
    assert [rule for _, rule, _ in play(rises, config)[0]] == ["kl_drift"]


@pytest.mark.parametrize("tied", [0.8, 1.0])
def test_ties_of_right_and_of_wrong_groups_get_opposite_advice(tied):
    for right, remedy in (tied, "take harder problems"), (0.0, "take easier problems, more --cold_start_steps"), (None, "partial credit"):
        lines = [line | {"tied_groups": tied, "tied_right_groups": right, "reward/correctness": 0.4} for line in healthy(4, 40)]
        assert remedy in play(lines)[0][0][2]


def test_a_higher_limit_is_advised_only_where_it_was_too_low_from_the_start():
    grows = [line | {"truncated": min(0.9, n / 100)} for n, line in enumerate(healthy(8, 150, 0.3, 0.85))]
    assert play(grows)[0] == [], "more are right, and longer: no advice, and above all not both"


def test_the_verdict_names_the_course_of_a_run_and_the_open_advice():
    _, history = play(GENERATED["KL + 0.005 a rollout"][0])
    assert verdict(history, CONFIG).endswith("in 230 rollouts; open advice: kl_drift")
    rises = healthy()
    first, last = (np.mean([line["mean_reward"] for line in part]) for part in (rises[:5], rises[-5:]))
    assert f"mean_reward {first:.2f} -> {last:.2f}, reward/correctness" in verdict(rises, CONFIG)
    assert verdict(rises, CONFIG).endswith("in 150 rollouts; open advice: none")
    assert verdict([{"mean_reward": 1.0}], CONFIG) == "mean_reward 1.00 -> 1.00 in 1 rollouts; open advice: none"


@pytest.mark.parametrize("right, remedy", [(0.7, "take harder problems"), (0.0, "take easier problems"), (0.4, "--dynamic_sampling 3")])
def test_groups_that_are_all_right_are_told_from_those_that_are_all_wrong(right, remedy):
    history = [line | {"tied_groups": 0.8, "tied_right_groups": right, "reward/correctness": right} for line in healthy(8, 40)]
    wrong = 0.8 - right
    assert verdict(history, CONFIG).endswith(f"tied groups 80%, {right:.0%} all right and {wrong:.0%} not in 40 rollouts; open advice: none")
    given, _ = play(history)
    assert given[0][1] == "ties" and remedy in given[0][2]


def test_the_expected_share_of_ties_is_what_chance_gives():
    generator = random.Random(0)
    for success, size in itertools.product([0.1, 0.5, 0.8], [2, 4]):
        groups = [[generator.random() < success for _ in range(size)] for _ in range(20000)]
        tied = sum(len(set(group)) == 1 for group in groups) / len(groups)
        assert expected_ties(success, size) == pytest.approx(tied, abs=0.015)


def test_a_loss_of_less_than_a_hundredth_of_a_point_is_no_collapse():
    lines = [dict(line, mean_reward=0.004 * (20 <= number < 25)) for number, line in enumerate(healthy(80))]
    assert "collapse" not in [rule for _, rule, _ in play(lines)[0]]
    lines = [dict(line, mean_reward=0.4 * (20 <= number < 25)) for number, line in enumerate(healthy(80))]
    assert "collapse" in [rule for _, rule, _ in play(lines)[0]]
