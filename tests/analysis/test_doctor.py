"""The training doctor on runs generated from the figures of recorded ones."""

import numpy as np
import pytest

from analysis.doctor import diagnose
from config import Config


def flags_of(**flags):
    config = Config.of(**{"model_path": "some/model", "use_grpo": True} | flags)         # defaults, without a profile
    return {name: value for part in config.as_dict().values() for name, value in part.items()}


def findings(rollouts, **flags):
    """{rule: advice} of a run."""
    _, *found = diagnose([line | {"phase": "grpo"} for line in rollouts], flags_of(**flags))
    assert not any("\n" in line or "nan" in line for line in found)
    return dict(line.split(": ", 1) for line in found)


def healthy(seed=0, rollouts=150, start=0.3, end=0.9, size=4):
    """A run whose share of right answers rises as in a recorded one, with the noise of 64 completions of mixed problems."""
    g, t = np.random.default_rng(seed), np.arange(rollouts)
    p = end - (end - start) * np.exp(-t / 40)
    success = np.clip(p + g.normal(0, 0.06, rollouts), 0, 1)
    columns = {
        "reward/correctness": success, "reward/reasoning_coherence": g.normal(0.3, 0.02, rollouts),
        "mean_reward": 0.3 + success, "skipped": t * 0, "unscored": t * 0.0,
        "entropy": 0.6 * (1.1 - p) * np.exp(g.normal(0, 0.2, rollouts)), "completion_tokens": g.normal(23, 1, rollouts),
        "zero_variance_groups": np.clip(p**size + (1 - p) ** size + g.normal(0, 0.1, rollouts), 0, 1),
        "zero_variance_right_groups": p**size,
        "kl": 0.0005 * t * np.exp(g.normal(0, 0.2, rollouts)), "truncated": np.abs(g.normal(0, 0.02, rollouts)),
        "clip_fraction": t * 0.0,
    }
    return [dict(zip(columns, map(float, row), strict=True)) for row in zip(*columns.values(), strict=True)]


def changed(change, rollouts=150, start=0.5, end=0.5, seed=1):
    """A run that stays as it is for 30 rollouts, and is then changed: change(rollouts since then, line) -> metrics."""
    lines = healthy(seed, rollouts, start, end)
    return [line | (change(number - 30, line) if number >= 30 else {}) for number, line in enumerate(lines)]


def fall(t):                    # of ten rollouts, from 1 to 0
    return max(0.0, 1 - t / 10)


GENERATED = {                   # lines, the findings, words in the first one, flags
    "collapse in ten rollouts": (
        changed(lambda t, line: {"reward/correctness": 0.97 * fall(t), "mean_reward": 0.18 + 1.03 * fall(t), "zero_variance_groups": 0.3},
                start=0.97, end=0.97), ["collapse"],
                    "fell from its maximum, 1.27, to 0.18: start a run from an earlier checkpoint"),
    "a collapse of what was gained": (
        [line | {"mean_reward": -1 + 0.02 * (t if t < 50 else max(0, 100 - t))} for t, line in enumerate(healthy(1))],
        ["collapse"], ""),
    "entropy x 0.97 a rollout": (changed(lambda t, line: {"entropy": line["entropy"] * 0.97**t}), ["entropy"], "--entropy_coef 0.01"),
    "length hacking": (
        changed(lambda t, line: {"completion_tokens": min(250, 23 * 1.03**t), "truncated": min(0.9, t / 100),
                                 "mean_reward": line["mean_reward"] + t / 100}), ["length"],
                                     "from 23 to 250 tokens, but no more of them are right"),
    "reward without right answers": (
        changed(lambda t, line: {"mean_reward": line["mean_reward"] + t / 60,
            "reward/correctness": max(0, line["reward/correctness"] - t / 800),
                                 "reward/reasoning_coherence": 0.3 + t / 60}), ["reward_hacking"],
                                     "reward/correctness fell from 0.5"),
    "no group has a gradient": (
        changed(lambda t, line: {"zero_variance_groups": 1.0, "zero_variance_right_groups": 0.0, "entropy": None,
            "reward/correctness": 0.0, "mean_reward": 0.3},
                start=0.02, end=0.0), ["no_signal"], "use easier problems"),
    "nearly all are right": (healthy(2, 300, 0.3, 1.0), ["no_signal"], "all completions are right in most: use harder problems"),
    "NaN from the start": ([{"skipped": 1, "mean_reward": 0.5}] * 12, ["not_finite"], "--learning_rate (now the default)"),
    "a reward that scores nothing": ([{"unscored": 1.0, "mean_reward": None}] * 20, ["unscored"], "reward_errors.jsonl"),
    "a short limit": (
        [line | {"truncated": 0.6, "completion_tokens": 200.0} for line in healthy(3, start=0.5, end=0.5)], ["truncation"],
        "60% of the completions were cut at 256 tokens: --generation_max_length 512"),
    "a short limit, so that no answer is right": (
        [line | {"truncated": 0.9, "zero_variance_groups": 1.0, "zero_variance_right_groups": 0.0, "reward/correctness": 0.0,
                 "mean_reward": 0.0, "completion_tokens": 250.0, "entropy": 1.0} for line in healthy(3)], ["truncation"],
                     "90% of the completions were cut"),
    "nearly all are right, with a value head": (healthy(2, 300, 0.3, 1.0), [], "", {"use_value_head": True}),
    "falling entropy with a teacher alone": (changed(lambda t, line: {"entropy": line["entropy"] * 0.97**t}), [], "",
        {"reward_functions": ["none"], "use_kl_penalty": True, "reference_path": "teacher"}),
    "entropy falls and completions grow, where more are right": (
        [line | {"entropy": 0.5**(t / 50), "completion_tokens": 23.0 + t} for t, line in enumerate(healthy(8, 150, 0.3, 0.85))], [], ""),
}


@pytest.mark.parametrize("name", GENERATED)
def test_each_kind_of_run_has_its_finding_and_no_other(name):
    lines, expected, words, *flags = GENERATED[name]
    found = findings(lines, **dict(*flags))
    assert list(found) == expected and words in " ".join(found.values())


def test_healthy_runs_have_no_findings():
    for start, end in (0.3, 0.85), (0.5, 0.5):
        assert [seed for seed in range(50) if findings(healthy(seed, 150, start, end))] == [], (start, end)


def test_nothing_is_found_where_nothing_is_known_or_before_ten_rollouts():
    assert findings([{}] * 40) == findings([dict.fromkeys(healthy()[0])] * 40) == findings([{"skipped": 1}] * 9) == {}
    assert diagnose([{"phase": "supervised", "loss": 1.0}], flags_of()) == []


def test_a_small_loss_of_reward_is_no_collapse():
    for size, found in (0.04, False), (0.4, True):
        lines = [line | {"mean_reward": size * (20 <= number < 28)} for number, line in enumerate(healthy(80))]
        assert ("collapse" in findings(lines)) == found
    for flags in dict(use_kl_penalty=False), dict(use_kl_penalty=True):
        assert ("a higher --kl_penalty_coef" in findings(lines, **flags)["collapse"]) == flags["use_kl_penalty"]
