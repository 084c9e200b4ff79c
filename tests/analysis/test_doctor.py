"""
The training doctor on runs generated from the figures of recorded ones.

What --check says of a model: its prompt and completion, who finds answers in them, how long a run takes, what to change.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import QUICK, made_up_rollout, run_folder

import train
from analysis import first_contact
from analysis.doctor import cause_of_no_signal, diagnose
from analysis.first_contact import cause_of, counts_of_right, time_of_run
from config import Config, GRPOConfig
from engine import make_engine
from experience import Groups
from grpo import compute_group_advantages
from model import save_policy
from reward_functions.calling import Reports
from runs.groups import summarize_sampling


def findings(rollouts, **flags):
    """{rule: advice} of a run."""
    config = Config.of(model_path="some/model", use_grpo=True, **flags)
    _, *found = diagnose([line | {"phase": "grpo"} for line in rollouts], config.flags)
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


GENERATED = {                   # lines, the findings, words in the first one, flags
    "collapse in ten rollouts": (
        changed(lambda t, line: {"reward/correctness": max(0, 0.97 - t / 10), "mean_reward": max(0.18, 1.21 - t / 10),
                                 "zero_variance_groups": 0.3},
                start=0.97, end=0.97), ["collapse"], "fell from its maximum, 1.27, to 0.18"),
    "a collapse of what was gained": (
        [line | {"mean_reward": -1 + 0.02 * (t if t < 50 else max(0, 100 - t))} for t, line in enumerate(healthy(1))],
        ["collapse"], ""),
    "entropy x 0.97 a rollout": (changed(lambda t, line: {"entropy": line["entropy"] * 0.97**t}), ["entropy"],
        "--entropy_coef 0.01"),
    "length hacking": (
        changed(lambda t, line: {"completion_tokens": min(250, 23 * 1.03**t), "truncated": min(0.9, t / 100),
                                 "mean_reward": line["mean_reward"] + t / 100}), ["length"], "from 23 to 250 tokens"),
    "reward without right answers": (
        changed(lambda t, line: {"mean_reward": line["mean_reward"] + t / 60,
                                 "reward/correctness": max(0, line["reward/correctness"] - t / 800),
                                 "reward/reasoning_coherence": 0.3 + t / 60}), ["reward_hacking"], "fell from 0.5"),
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
                 "mean_reward": 0.0, "completion_tokens": 250.0, "entropy": 1.0} for line in healthy(3)], ["truncation"], "90%"),
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
    assert diagnose([{"phase": "supervised", "loss": 1.0}], Config.of().flags) == []


def test_a_small_loss_of_reward_is_no_collapse():
    for size, found in (0.04, False), (0.4, True):
        lines = [line | {"mean_reward": size * (20 <= number < 28)} for number, line in enumerate(healthy(80))]
        assert ("collapse" in findings(lines)) == found
    for flags in dict(use_kl_penalty=False), dict(use_kl_penalty=True):
        assert ("a higher --kl_penalty_coef" in findings(lines, **flags)["collapse"]) == flags["use_kl_penalty"]


NONE = {"truncated": 0.0, "zero_variance_groups": 1.0, "zero_variance_right_groups": 0.0}


@pytest.mark.parametrize("metrics,flags,right,seen,expected", [
    ({"truncated": 0.9}, {}, {"correctness": 0, "last_number": 7}, "", "90% of the completions were cut at 256 tokens"),
    ({"truncated": 0.3}, {}, {"correctness": 0, "last_number": 7}, "0 tags", "(0 tags), 7 by last_number: --reward_functions"),
    ({}, {}, {"correctness": 0, "last_number": 0}, "9 tags", "(9 tags): ask for the form of the answer by --instruction"),
    ({"turns": 1.0}, {"environment": "calculator", "max_turns": 2}, {}, "", "no completion was answered by the environment"),
    ({"turns": 1.5}, {"environment": "calculator", "max_turns": 2}, {}, "", "100% of the groups have zero variance"),
    ({"zero_variance_right_groups": 0.8}, {}, {"correctness": 14}, "", "all completions are right in most"),
    ({"zero_variance_groups": 0.7}, {}, {"correctness": 0}, "", ""), ({}, {"use_value_head": True}, {"correctness": 0}, "", ""),
])
def test_the_cause_comes_before_its_symptoms_and_names_a_flag(metrics, flags, right, seen, expected):
    found = cause_of_no_signal(NONE | metrics, Config.of(use_grpo=True, **flags).flags, right, seen)
    assert expected in found and bool(found) == bool(expected)


def test_functions_that_were_not_chosen_are_tried_on_the_same_completions():
    texts, config = ["It costs 72 dollars.", "So 71", "About 72 of them", "No idea"], Config.of(use_grpo=True)
    rollout, scores = replace(made_up_rollout([2], [3] * 4), completions=texts), torch.zeros(1, 4, dtype=torch.float64)
    groups = Groups(
        [{"prompt": "p", "answer": "72"}], rollout, scores, {"correctness": scores}, scores, compute_group_advantages(scores),
        extra=[{}] * 4, reports=Reports([]))
    counts = counts_of_right(groups, config)
    assert counts["correctness"] == 0 and counts["last_number"] == 2 and "countdown" not in counts, "no column for countdown"
    found = "(of 4, 0 have <answer> tags, 0 have \\boxed{}, 3 have a number in the last line), 2 by last_number"
    assert found in cause_of(summarize_sampling(groups), config, groups)


def test_the_time_of_a_run_counts_updates_evaluations_and_epochs():
    """2 rollouts of 8 completions with 2 epochs each: 2 * (10 + 2 * 8 * 1) s; 4 evaluations of 2 batches: 80 s."""
    config = Config.of(use_grpo=True, batch_size=2, num_completions_per_prompt=4, ppo_epochs=2, eval_steps=2)
    run = SimpleNamespace(config=config, plan=SimpleNamespace(
        phases=[SimpleNamespace(steps=4)], data=SimpleNamespace(eval_set=range(16))))
    assert time_of_run(run, 10.0, 1.0) == (
        "a step of 8 completions takes about 0:00:26; 4 updates and 4 evaluations of 16 problems about 0:02:12, if lengths stay")
    run.config = replace(config, training=replace(config.training, eval_samples=2))
    assert time_of_run(run, 10.0, 1.0).endswith("16 problems about 0:03:32, if lengths stay"), "twice as many batches"
    run.plan.data.eval_set = []
    assert "4 updates and 0 evaluations of 0 problems about 0:00:52" in time_of_run(run, 10.0, 1.0)


def test_check_prints_what_the_model_reads_and_writes_and_shortens_what_takes_long(tmp_path, model, tokenizer, capsys, monkeypatch):
    save_policy(model, tokenizer, tmp_path / "model")
    flags = [*QUICK, "--use_grpo", "--model_path", str(tmp_path / "model"), "--check", "--output_dir", str(tmp_path / "run")]
    train.main(flags)
    printed = capsys.readouterr().out
    prompt = re.search(r"the first prompt, as it is tokenised: '<bos>(\d+\+\d+=\?)'\nits first completion, (\d+) tokens: ", printed)
    assert prompt and int(prompt[2]) <= 16
    assert re.search(r"\nright, of 16: correctness \d+, last_number \d+, math_equality \d+\n", printed)
    assert printed.splitlines()[-1] in ("rewards differ within groups: there is something to learn",) or ": --" in printed.splitlines()[-1]
    assert "  note   here completions were cut" not in printed and not (tmp_path / "run").exists()
    monkeypatch.setattr(first_contact, "SECONDS", 0)
    train.main([*flags, "--generation_max_length", "12"])
    assert "  note   here completions were cut at 8 tokens to save time, not at 12\n" in capsys.readouterr().out


def test_a_run_says_once_why_its_completions_teach_nothing(tmp_path, capsys):
    flags = "--use_grpo --cold_start_steps 0 --max_steps 3 --eval_limit 0 --generation_max_length 2"
    run_folder(tmp_path / "run", *flags.split())
    sentence = "  note   100% of the completions were cut at 2 tokens: --generation_max_length 4\n"
    printed = capsys.readouterr().out
    assert printed.count(sentence) == 1 and printed.index(sentence) < printed.index("grpo    2/3")


def test_sampling_that_takes_long_prints_a_line_now_and_then(base, capsys, monkeypatch):
    console = base.folder.console
    monkeypatch.setattr("runs.console.SILENCE", 0)
    config = replace(GRPOConfig(generation_max_length=4), num_completions_per_prompt=2)
    for engine in "plain", "shared":
        policy = make_engine(engine, base.policy.model, base.policy.tokenizer)
        policy.on_tokens = console.on_tokens
        policy.sample(["1+1=?", "2+2=?"], config, 0)
        lines = [line for line in capsys.readouterr().out.splitlines() if "sampling" in line]
        assert lines and all(re.fullmatch(r"  sampling: [1-4] tokens, [0-4] completions are not finished", line) for line in lines)
