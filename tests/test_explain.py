"""The explained step: its numbers are those of a training step on the same group, and nothing is left behind."""

import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, length_reward, start_run, watch_calls

from analysis import explain
import train
from runs.folder import read_jsonl
from runs.command_line import parse_config
from runs.setup import set_up


FLAGS = "--use_grpo --batch_size 1 --max_steps 9 --cold_start_steps 0 --learning_rate 1e-3 --warmup_ratio 0".split()


def explained(folder, capsys, *flags, reward=None):
    """Return what the command prints."""
    capsys.readouterr()
    rewards = ["--reward_functions", reward or length_reward(folder)]
    explain.main([*QUICK, "--output_dir", str(folder / "out"), *FLAGS, *rewards, *flags])
    return capsys.readouterr().out


def test_a_group_with_unequal_rewards_is_searched_for_and_its_absence_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain, "BATCHES", 3)
    with pytest.raises(ValueError, match="all groups of 3 batches have zero variance"):
        explained(tmp_path, capsys, reward="correctness")
    calls, sample = [], train.sample_groups
    lengths = torch.tensor([[1.0, 2.0, 3.0, 3.0]])

    def tied_at_first(*arguments):
        calls.append(replace(sample(*arguments), rewards=lengths if calls else torch.ones(1, 4)))
        return calls[-1]

    monkeypatch.setattr(train, "sample_groups", tied_at_first)
    printed = explained(tmp_path, capsys, reward="correctness")
    assert len(calls) == 2 and "0 of 1 groups in batch 2 have zero variance" in printed
    assert repr(calls[1].examples[0]["prompt"]) in printed and "gradient norm" in printed


@pytest.mark.slow
def test_the_next_step_of_a_run_is_explained_and_a_finished_one_is_not(tmp_path, capsys):
    train.main([*QUICK, "--output_dir", str(tmp_path / "out"), *FLAGS, "--reward_functions", length_reward(tmp_path),
                "--max_steps", "4", "--save_steps", "3"])
    resume = ["--output_dir", str(tmp_path / "out"), "--resume"]
    with pytest.raises(ValueError, match="this run is complete"):
        explain.main(resume)
    capsys.readouterr()
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000004")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    explain.main(resume)
    (fourth,) = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if line["step"] == 4 and line["phase"] == "grpo"]
    norm = re.search(r"gradient norm\s+([\d.e-]+)", capsys.readouterr().out)[1]
    assert float(norm) == pytest.approx(fourth["grad_norm"], rel=1e-3)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def by_number(shown):
    """The printed tables: {number in the title: (head, rows)}."""
    return {title.split()[0].rstrip("."): rest for _, title, *rest in shown}


def test_every_table_by_hand(tmp_path, capsys, monkeypatch):
    """The first of three groups has zero variance: the second is explained. Two reward functions, a clip, a large update."""
    (tmp_path / "two.py").write_text(
        "def first(completions, **columns):\n"
        "    return [1.0 if i < 4 else sum(map(ord, c)) % 97 / 50 for i, c in enumerate(completions)]\n"
        "def second(completions, **columns):\n"
        "    return [0.0 if i < 4 else len(set(c)) / 20 for i, c in enumerate(completions)]\n")
    flags = [
        *"--use_grpo --batch_size 3 --max_steps 9 --cold_start_steps 0 --learning_rate 5e-5 --warmup_ratio 0".split(),
        "--reward_functions", f"{tmp_path}/two.py:first", f"{tmp_path}/two.py:second", *"--reward_weights 1 2".split(),
        *"--reward_clip 1.7 --use_kl_penalty --kl_penalty_coef 0.05 --entropy_coef 0.01 --generation_max_length 12".split(),
        *"--loss_type dr_grpo --clip_low 0.1 --clip_high 0.3".split(),
    ]
    shown = watch_calls(monkeypatch, explain, "show")
    explain.main([*QUICK, "--output_dir", str(tmp_path / "out"), *flags])
    printed, tables = capsys.readouterr().out, by_number(shown)
    run = start_run(tmp_path, *flags)
    examples = next(run.batches)
    groups = train.sample_groups(run, examples)
    whole, rows, advantages = groups.rollout, range(4, 8), train.group_advantages(run, groups)[1].tolist()
    assert "1 of 3 groups in batch 1 have zero variance; this is group 1\n" in printed
    assert f"prompt: {examples[1]['prompt']!r}, answer: {examples[1]['answer']!r}" in printed

    logp = [whole.sampling_logp[row][whole.completion_mask[row]] for row in rows]
    assert tables["1"][1] == [
        [str(g), repr(whole.completions[row]), str(len(logp[g])), f"{sum(logp[g].tolist()):.3f} nat",
         "stop token" if run.policy.tokenizer.eos_token_id in whole.completion_ids[row] else "length limit"]
        for g, row in enumerate(rows)]

    head, lines = tables["2"]
    columns = [points[1].tolist() for points in (*groups.per_function.values(), groups.scores, groups.rewards)]
    assert max(columns[2]) > 1.7 > min(columns[2]), "some are clipped"
    assert [name.rpartition(":")[2] for name in head[1:]] == ["first x 1", "second x 2", "r", "r, clipped or penalised", "A"]
    for line, wanted in zip(lines, zip(range(4), *columns, advantages), strict=True):
        assert list(map(float, line)) == pytest.approx(wanted, abs=0.0051)
    assert "A: baseline group_mean, scale group" in printed

    order = sorted(range(4), key=lambda g: -advantages[g])
    picked = [(g, t) for g in (order[0], order[-1]) for t in sorted(logp[g].argsort(stable=True)[:6].tolist())]
    (head, before), (_, after) = tables["3"], tables["6"]
    assert [line[:3] for line in before] == [
        [str(g), repr(run.policy.tokenizer.decode([int(whole.completion_ids[4 + g, t])])), f"{logp[g][t]:.4f}"]
        for g, t in picked]
    assert all(line[2] == line[3] and line[4] == "1.0000" and line[6] == "no" for line in before)
    assert [line[:3] for line in after] == [line[:3] for line in before]
    held = []
    for (g, _), line in zip(picked, after, strict=True):
        old, new, ratio, advantage, loss, kl = map(float, [*line[2:6], *line[7:]])
        assert ratio == pytest.approx(math.exp(new - old), abs=2e-4, rel=2e-4)
        assert advantage == pytest.approx(advantages[g], abs=1e-3)
        clipped = min(max(ratio, 0.9), 1.3)
        assert loss == pytest.approx(-min(ratio * advantage, clipped * advantage), abs=1e-3)
        moved = old - new                                 # the reference is the policy before
        assert kl == pytest.approx(math.exp(moved) - 1 - moved, abs=1e-3, rel=1e-3)
        held.append((advantage > 0 and ratio > 1.3) or (advantage < 0 and ratio < 0.9))
    assert [line[6] == "yes" for line in after] == held and len(set(held)) == 2

    entropy = run.policy.log_probs(whole, torch.arange(4, 8)).entropy * whole.completion_mask[4:8]
    terms = [-sum(a * len(each) for a, each in zip(advantages, logp)) / (4 * 12), 0.0, -0.01 * float(entropy.sum()) / (4 * 12)]
    names, values = zip(*tables["4"][1])
    assert names == ("policy_loss", "kl_term", "entropy_term", "total_loss")
    assert [*map(float, values)] == pytest.approx([*terms, sum(terms)], abs=2e-6)
    assert f"dr_grpo: constant of the losses of {sum(map(len, logp))} tokens, with weights from 0.0208 to 0.0208\n" in printed
    assert "learning rate 5e-05\n" in printed, "of this step, not of the next one"

    became = [(float(line[1]), float(line[2]), float(line[3]), float(line[4].removesuffix(" nat"))) for line in tables["7"][1]]
    for g, (advantage, start, end, change) in enumerate(became):
        assert advantage == pytest.approx(advantages[g], abs=1e-3) and start == pytest.approx(sum(logp[g].tolist()), abs=1e-2)
        assert change == pytest.approx(end - start, abs=2e-4) and change != 0


@pytest.mark.parametrize("arguments", [5, 4])             # of policy_loss: with weights, without them
def test_the_gradient_norm_depends_on_the_size_of_passes_only_without_weights(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.setattr(train, "policy_loss", lambda *tensors, loss=train.policy_loss,
        **options: loss(*tensors[:arguments], **options))
    norms = map(float, re.search(r"gradient norm ([\d.e-]+) .*?: ([\d.e-]+)\)", explained(tmp_path, capsys)).groups())
    assert (math.isclose(*norms, rel_tol=1e-3)) == (arguments == 5)


def test_a_value_head_gives_each_token_its_own_advantage_and_the_loss_a_term(tmp_path, capsys, monkeypatch):
    shown = watch_calls(monkeypatch, explain, "show")
    printed = explained(tmp_path, capsys, "--use_value_head", "--cold_start_steps", "2")
    assert "A: value head" in printed and not (tmp_path / "out").exists()
    names, values = zip(*by_number(shown)["4"][1])
    assert names == ("policy_loss", "value_term",
        "total_loss") and float(values[2]) == pytest.approx(float(values[0]) + float(values[1]), abs=2e-6)
    mask = torch.tensor([[True, True, False], [False] * 3])
    some = SimpleNamespace(table=SimpleNamespace(mask=mask, advantages=torch.tensor([[2.0, 4.0, 9.0], [1.0, 1.0, 1.0]])))
    assert explain.mean_advantages(some).tolist() == [3.0, 0.0], "of tokens, without padding"


def test_a_cold_start_is_taken_in_part_and_grpo_begins_anew(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain, "COLD_STEPS", 2)
    flags = [*QUICK, *FLAGS, "--cold_start_steps", "5", "--eval_limit", "0", "--output_dir", str(tmp_path / "out")]
    run, steps = set_up(parse_config(flags)), watch_calls(monkeypatch, train, "supervised_training_step")
    explain.train_until_grpo(run)
    assert "taking 2 supervised steps of cold_start first" in capsys.readouterr().out
    assert len(steps) == 2 and steps[0][1] != steps[1][1]
    assert run.phase.name == "grpo" and run.progress.phase_step == 0
