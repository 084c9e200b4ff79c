"""Tokens and memory of a step are estimated before the first one."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import start_run

from runs import memory_estimate
from logprobs import completion_log_probs
from engine.packing import pack_rows
from sample import sample_completions_for_prompts


def describe(run):
    """The lines about a step of a run."""
    longest = max(len(run.tokenizer(example["prompt"]).input_ids) for example in run.train_set)
    return memory_estimate.describe_step(
        run.model, run.tokenizer, run.train_set[:2], run.config, longest_prompt=longest, shared_prompt=run.shared_prompt
    )


def bytes_per_token(run):
    recompute = run.config.training.gradient_checkpointing
    return memory_estimate.activation_bytes(run.model, run.tokenizer, run.train_set[:2], recompute, run.shared_prompt)


def test_tokens_and_passes_are_those_of_a_step_in_which_all_goes_to_the_limit(tmp_path):
    run = start_run(tmp_path, "--use_grpo", "--max_tokens_per_forward", "100", "--generation_max_length", "30")
    longest = max(len(run.tokenizer(example["prompt"]).input_ids) for example in run.train_set)
    tokens = 4 * (longest + 4 * 30)
    line = describe(run)[0]
    assert f"4 prompts of up to {longest} tokens x 4 = 16 completions of up to 30" in line
    assert f"{tokens} tokens at most, in {-(-tokens // 100)} passes" in line


def test_what_does_not_fit_is_said_with_what_to_turn(tmp_path, monkeypatch):
    run = start_run(tmp_path, "--use_grpo")
    assert "run out" not in describe(run)[1]
    monkeypatch.setattr(memory_estimate, "available_gb", lambda device: 0.1)
    assert "--gradient_checkpointing" in describe(run)[1]


def test_activations_are_counted_per_token_and_recomputed_ones_left_out(tmp_path):
    """Against the sizes of what a longer pass keeps, found by walking its graph."""
    run = start_run(tmp_path, "--use_grpo", "--generation_max_length", "40", "--num_completions_per_prompt", "2")
    prompts = [example["prompt"] for example in run.train_set[:8]]
    rollout = sample_completions_for_prompts(run.model, run.tokenizer, prompts, run.config.grpo, seed=0)
    tokens = pack_rows(rollout, torch.arange(16), True).ids.numel()
    result = completion_log_probs(run.model, rollout)
    weights = {p.data_ptr() for p in run.model.parameters()}
    seen, storages, todo = set(), {}, [result.logp.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in weights:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert bytes_per_token(run) * tokens == pytest.approx(sum(storages.values()), rel=0.2)
    again = start_run(tmp_path, "--use_grpo", "--gradient_checkpointing", "true")
    a_layer = bytes_per_token(run) / 4
    assert a_layer < bytes_per_token(again) < 2 * a_layer, "of the layer recomputed, and what goes into each"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "--batch_size 64 --max_tokens_per_forward 16384",
    "--batch_size 16 --max_tokens_per_forward 8192 --generation_max_length 400",
    "--batch_size 16 --max_tokens_per_forward 8192 --generation_max_length 400 --gradient_checkpointing",
])
def test_the_estimate_is_near_the_measured_peak(tmp_path, flags):
    """In a process of its own, on untrained weights, where hardly a completion ends before the limit."""
    (tmp_path / "varied.py").write_text("def varied(completions, **columns):\n    return list(range(len(completions)))\n")
    command = [sys.executable, "train.py", "--use_grpo", "--cold_start_steps", "0", "--max_steps", "1", "--eval_limit", "0",
               "--report_to", "none", "--reward_functions", f"{tmp_path}/varied.py:varied", "--output_dir", f"{tmp_path}/run"]
    said = subprocess.run([*command, *flags.split()], capture_output=True, text=True, check=True).stdout
    estimate = float(re.search(r"memory: about ([\d.]+) of", said)[1])
    peak = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["peak_memory_gb"]
    assert 0.7 < estimate / peak < 1.3, f"{estimate=} {peak=}"
