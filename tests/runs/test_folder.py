"""The run folder: its files, the names in them, and what a kill leaves of them."""

import json
import os
from pathlib import Path

import pytest
import torch

import train
from runs.command_line import parse_config
from runs.folder import RunFolder
from runs.records import read_jsonl


def test_the_run_folder_holds_what_it_promises(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "owner.json", "metrics.jsonl", "rollouts.jsonl", "curves.png", "report.html", "tensorboard", "checkpoints", "final"
    }
    newest, _ = sorted((finished / "checkpoints").iterdir(), reverse=True)
    config = json.loads((finished / "config.json").read_text())
    assert torch.load(newest / "state.pt", weights_only=True)["settings"] == config
    assert config["grpo"]["num_completions_per_prompt"] == 4 and config["training"]["use_grpo"] is True
    assert config["training"]["max_tokens_per_forward"] == 2048, "the default on a CPU, written down for who resumes elsewhere"
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())


def test_metrics_have_the_documented_names_and_count_steps_from_one(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [(m["step"], m["phase"]) for m in lines] == [
        (0, "eval"), (1, "cold_start"), (2, "cold_start"), (3, "cold_start"), (3, "eval"),
        (4, "grpo"), (5, "grpo"), (6, "grpo"), (6, "eval"),
    ]
    grpo = lines[5]
    documented = [
        "policy_loss", "mean_reward", "mean_advantage", "std_advantage", "tied_groups", "kl", "entropy", "clip_fraction",
        "grad_norm", "completion_tokens", "truncated", "step_seconds", "sampling_seconds", "training_seconds", "peak_memory_gb",
    ]
    assert set(documented) <= set(grpo) and all(isinstance(grpo[name], int | float) for name in documented)
    assert {"eval_accuracy", "eval_accuracy_low", "eval_accuracy_high"} <= set(lines[0])
    assert grpo["kl"] == pytest.approx(0, abs=1e-6) and lines[7]["kl"] > 0, "the reference is the policy after the cold start"
    assert abs(grpo["mean_advantage"]) < 1e-6 and grpo["clip_fraction"] == 0


def test_every_metric_is_in_the_glossary(finished):
    glossary = (Path(train.__file__).parent / "docs/metrics.md").read_text()
    for line in read_jsonl(finished / "metrics.jsonl"):
        for name in line:
            entry = name.partition("/")[0] + "/<function>" if "/" in name else name
            assert f"`{entry}`" in glossary, name
    of_completions = glossary.partition("## Completions")[2]
    for name in read_jsonl(finished / "rollouts.jsonl")[0]:
        assert f"`{name}`" in of_completions, name


def test_a_kill_while_a_run_is_taken_up_again_loses_no_line(tmp_path, monkeypatch):
    """Files are truncated or replaced in one call: whenever SIGKILL comes, what was there is there, or what should be."""
    folder = RunFolder(parse_config(["--output_dir", str(tmp_path / "run"), "--report_to", "none"]))
    folder.open(last_step=0)
    for step in 1, 2, 3:
        folder.log(step, "grpo", {"kl": 0.5})
    seen = []

    def in_the_middle(descriptor):
        seen.append([line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")])
        json.loads((tmp_path / "run/config.json").read_text())

    monkeypatch.setattr(os, "fsync", in_the_middle)
    folder = RunFolder(parse_config(["--output_dir", str(tmp_path / "run"), "--resume"]))
    folder.open(last_step=2)
    assert seen == [[1, 2, 3]] and [line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2]
