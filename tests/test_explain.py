"""The explained step: its numbers are those of a training step on the same group, and nothing is left behind."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import QUICK, start_run

import explain
import train
from logprobs import completion_log_probs
from runs import read_jsonl
from sample import sample_completions_for_prompts


def reward_file(folder, body):
    (folder / "points.py").write_text(f"def points(completions, **columns):\n    return [{body} for c in completions]\n")
    return f"{folder}/points.py:points"


FLAGS = "--use_grpo --batch_size 1 --max_steps 9 --cold_start_steps 0 --learning_rate 1e-3 --warmup_ratio 0".split()


def explained(folder, capsys, *flags, body="len(c)"):
    """What --explain prints."""
    capsys.readouterr()
    more = [*FLAGS, "--reward_functions", reward_file(folder, body), *flags]
    train.main([*QUICK, "--output_dir", str(folder / "out"), *more])
    return capsys.readouterr().out


def value(printed, name):
    """The number that stands after a name."""
    return float(re.search(rf"{name}\s+([-+]?[\d.]+(e[-+]?\d+)?)", printed)[1])


def changes(printed):
    """{row: (advantage, before, after)} of the last table."""
    lines = printed.partition("7. log-probability")[2].splitlines()
    rows = [re.findall(r"[-+]?\d+\.?\d*", line) for line in lines if line.strip().endswith("nat")]
    return {int(row[0]): tuple(map(float, row[1:4])) for row in rows}


@pytest.mark.parametrize("more", [[], "--use_kl_penalty --loss_type grpo --entropy_coef 0.01 --ppo_epochs 2".split()])
def test_its_numbers_are_those_of_a_training_step_on_the_same_group(tmp_path, capsys, more):
    printed = explained(tmp_path, capsys, "--explain", *more)
    run = start_run(tmp_path, *FLAGS, "--reward_functions", reward_file(tmp_path, "len(c)"), *more, "--ppo_epochs", "1")
    run.phase_step = 0
    examples = next(run.batches)
    rollout = sample_completions_for_prompts(run.model, run.tokenizer, [examples[0]["prompt"]], run.config.grpo, seed=1)
    policy = run.config.grpo.policy
    before = completion_log_probs(run.model, rollout, **policy).logp.sum(dim=1).tolist()
    metrics, completions = train.grpo_training_step(run, examples)
    assert repr(examples[0]["prompt"]) in printed
    assert [c["completion"] for c in completions] == rollout.completions
    assert value(printed, "gradient norm") == pytest.approx(metrics["grad_norm"], rel=1e-3)
    assert value(printed, "total_loss") == pytest.approx(metrics["total_loss"], abs=2e-6)
    assert f"divided by {len(before)}" not in printed
    tokens = sum(c["tokens"] for c in completions)
    assert (f"divided by {tokens} tokens" in printed) == (not more)
    after = completion_log_probs(run.model, rollout, **policy).logp.sum(dim=1).tolist()
    for row, (advantage, shown_before, shown_after) in changes(printed).items():
        assert advantage == pytest.approx(completions[row]["advantage"], abs=1e-3)
        assert (shown_before, shown_after) == pytest.approx((before[row], after[row]), abs=2e-3)
    lengths = torch.tensor([float(len(c["completion"])) for c in completions])
    assert f"b = {lengths.mean():.4f} (group_mean), s = {lengths.std():.4f}" in printed


def test_completions_with_positive_advantage_went_up_and_ratios_left_1(tmp_path, capsys):
    printed = explained(tmp_path, capsys, "--explain", "--use_kl_penalty", "false")
    rows = changes(printed)
    assert len(rows) == 4
    up = [after - before for advantage, before, after in rows.values() if advantage > 0]
    assert up and all(change > 0 for change in up)
    assert f"{len(up)} of {len(up)} completions with positive advantage became likelier" in printed
    ratios = re.findall(r" (\d\.\d{4}) +[-+]\d\.\d{4} +(?:no|yes)", printed)
    half = len(ratios) // 2
    assert half > 2 and set(ratios[:half]) == {"1.0000"} and set(ratios[half:]) != {"1.0000"}


def test_nothing_is_written(tmp_path, capsys):
    explained(tmp_path, capsys, "--explain", "--cold_start_steps", "2")
    assert {path.name for path in tmp_path.rglob("*")} <= {"points.py", "__pycache__"} | {
        path.name for path in (tmp_path / "__pycache__").glob("*")}


def test_a_group_that_is_not_tied_is_looked_for_and_otherwise_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain, "BATCHES", 3)
    printed = explained(tmp_path, capsys, "--explain", body="1.0")
    assert "all groups of 3 batches are tied" in printed and "gradient norm" not in printed
    calls, sample = [], explain.sample_groups
    lengths = torch.tensor([[1.0, 2.0, 3.0, 3.0]])

    def tied_at_first(*arguments):
        calls.append(replace(sample(*arguments), points=lengths if calls else torch.ones(1, 4)))
        return calls[-1]

    monkeypatch.setattr(explain, "sample_groups", tied_at_first)
    printed = explained(tmp_path, capsys, "--explain", body="1.0")
    assert len(calls) == 2 and "0 of 1 groups of batch 2 are tied" in printed
    assert repr(calls[1].examples[0]["prompt"]) in printed and "gradient norm" in printed


@pytest.mark.parametrize("more", [
    "--loss_type gspo", "--loss_type dr_grpo --normalize_advantages false --overlong penalise", "--use_value_head",
    "--use_kl_penalty --kl_in reward", "--use_kl_penalty --kl_estimator exact --entropy_coef 0.01",
])
def test_every_variant_can_be_explained(tmp_path, capsys, more):
    printed = explained(tmp_path, capsys, "--explain", *more.split())
    assert "7. log-probability" in printed and "nan" not in printed


def test_the_next_step_of_a_run_is_explained_and_a_finished_one_is_not(tmp_path, capsys):
    explained(tmp_path, capsys, "--max_steps", "4", "--save_steps", "3")
    resume = ["--output_dir", str(tmp_path / "out"), "--resume", "--explain"]
    with pytest.raises(SystemExit) as stop:
        train.main(resume)
    assert stop.value.code == 2 and "--explain: this run is finished" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000004")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    train.main(resume)
    (fourth,) = [line for line in read_jsonl(tmp_path / "out/metrics.jsonl") if line["step"] == 4 and line["phase"] == "grpo"]
    assert value(capsys.readouterr().out, "gradient norm") == pytest.approx(fourth["grad_norm"], rel=1e-3)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_without_grpo_there_is_nothing_to_explain(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--explain", "--output_dir", str(tmp_path / "out")])
    assert stop.value.code == 2 and "--explain=True: it is a step of GRPO; add --use_grpo" in capsys.readouterr().err
