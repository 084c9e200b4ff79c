"""
On a GPU: whole runs in every precision, the CPU's log-probabilities and gradients, resuming, a process group.

    make test-gpu

TEST_DEVICE=cpu runs the same on the CPU, where most of it compares the CPU with itself.
"""

import copy
import os
import shutil

import pytest
import torch
from conftest import (
    ARCHITECTURES, CURRENT_ARCHITECTURES, PROMPTS, ROOT, comparable, length_reward, made_up_rollout, run_folder, run_process,
    shared_log_probs, weights_of,
)
from torch.nn.utils import parameters_to_vector

import train
from config import GRPOConfig
from engine import make_engine, sampler
from engine.devices import best_device
from engine.models import save_any_policy
from engine.network import set_precision
from logprobs import completion_log_probs
from runs.folder import read_jsonl

ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
DEVICE = os.environ.get("TEST_DEVICE", ACCELERATOR and ACCELERATOR.type)
ON_CPU = ["--device", "cpu"] if DEVICE == "cpu" else []
RUN = ["--use_grpo", "--cold_start_steps", "0", "--eval_limit", "0", "--learning_rate", "1e-3"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DEVICE, reason="torch reports no GPU")]


@pytest.mark.parametrize("flags", [
    "", "--precision bfloat16", "--precision float16 --seed 1", "--lora_rank 4", "--lora_rank 4 --precision bfloat16",
    "--use_kl_penalty --use_value_head --gradient_checkpointing --ppo_epochs 2",
])
def test_two_steps_learn(tmp_path, capsys, flags):
    folder = run_folder(tmp_path / "out", *RUN, *ON_CPU, "--reward_functions", length_reward(tmp_path), "--max_steps", "2", *flags.split())
    assert f"on {DEVICE}" in capsys.readouterr().out
    lines = read_jsonl(folder / "metrics.jsonl")
    assert sum(m["updates"] for m in lines) == 2 and all(m["grad_norm"] > 0 and m["peak_memory_gb"] > 0 and not m["skipped"] for m in lines)


@pytest.fixture
def exact(matmul_precision):
    """float32 instead of TF32, so that results can be compared with the CPU's."""
    best_device()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("log_probs", [shared_log_probs, completion_log_probs])
def test_log_probabilities_and_gradients_are_those_of_the_cpu(architecture, exact, log_probs):
    _, model = architecture
    rollout = made_up_rollout([3, 20, 7], [5, 1, 9, 4, 12, 3])
    results = []
    for one in model, copy.deepcopy(model).to(DEVICE):
        new = log_probs(one, rollout)
        (new.logp.sum() + new.entropy.sum()).backward()
        results.append((new.logp.detach().cpu(), parameters_to_vector([p.grad for p in one.parameters()]).cpu()))
    (logp, gradient), (again, its_gradient) = results
    torch.testing.assert_close(again, logp, atol=1e-4, rtol=1e-4)
    assert (its_gradient - gradient).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3", "llama"])
def test_packed_and_plain_rows_agree_in_tf32_and_bfloat16(name, precision):
    """With prompts longer than a block of the kernels, which the tests above do not have."""
    best_device()
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval().to(DEVICE)
    set_precision(model, precision)
    rollout = made_up_rollout([150, 37], [40, 70, 33, 1])
    results = []
    for log_probs in shared_log_probs, completion_log_probs:
        model.zero_grad()
        new = log_probs(model, rollout)
        new.logp.mean().backward()
        results.append((new.logp.detach(), parameters_to_vector([p.grad for p in model.parameters()])))
    (packed, gradient), (plain, its_gradient) = results
    assert (packed - plain).abs().mean() < 0.05 and (gradient - its_gradient).norm() < 0.1 * its_gradient.norm()


@pytest.mark.parametrize("name", [*ARCHITECTURES, *CURRENT_ARCHITECTURES])
def test_two_steps_of_an_architecture_with_lora_in_bfloat16(name, tokenizer, tmp_path):
    torch.manual_seed(0)
    save_any_policy((ARCHITECTURES | CURRENT_ARCHITECTURES)[name]().eval(), tokenizer, tmp_path / "base")
    folder = run_folder(
        tmp_path / "run", *RUN, *ON_CPU, "--model_path", str(tmp_path / "base"), "--max_steps", "2", "--lora_rank", "4",
        "--precision", "bfloat16", "--generation_max_length", "30", "--reward_functions", length_reward(tmp_path))
    lines = read_jsonl(folder / "metrics.jsonl")
    assert len(lines) >= 2 and not any(m["skipped"] for m in lines if "skipped" in m)


SHARED = {*ARCHITECTURES, *CURRENT_ARCHITECTURES} - {"qwen3_5", "lfm2"}
EXPERTS = "gemma4_experts", "qwen3_moe", "gpt_oss", "glm4_moe"                  # trained ones wait for the device in a step


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(SHARED))
def test_recorded_steps_sample_what_steps_sample(name, precision, tokenizer, monkeypatch):
    best_device()
    torch.manual_seed(0)
    model = (ARCHITECTURES | CURRENT_ARCHITECTURES)[name]().eval().to(DEVICE)
    set_precision(model, precision)
    config, engine = GRPOConfig(generation_max_length=40), make_engine("shared", model, tokenizer)
    recorded, steps, results = sampler.recorded, [], []

    def record(step, device):
        steps.append(recorded(step, device))
        return steps[-1]

    for replacement in record, lambda step, device: step:
        monkeypatch.setattr(sampler, "recorded", replacement)
        results.append(engine.sample(PROMPTS, config, seeds=0))
    ours, theirs = results
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    torch.testing.assert_close(ours.sampling_logp, theirs.sampling_logp, atol=1e-5, rtol=0)
    if DEVICE == "cuda":
        recorded_here = torch.version.cuda and name not in EXPERTS               # a pretended GPU has no graphs
        assert {step.__name__ for step in steps} == {"replay" if recorded_here else "sample_token"}


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    reward = "--reward_functions", length_reward(tmp_path)
    flags = [*RUN, *ON_CPU, *reward, "--save_steps", "1", "--keep_checkpoints", "4"]
    whole = run_folder(tmp_path / "whole", *flags, "--max_steps", "4", "--use_kl_penalty")
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    for later in [*sorted(resumed.glob("checkpoints/step-*"))[2:], resumed / "final"]:
        shutil.rmtree(later)
    train.main(["--output_dir", str(resumed), "--resume", *reward])
    assert comparable(whole) == comparable(resumed)
    weights, others = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


ONE_PROCESS = """
import copy, torch
import conftest, engine.devices, engine.sharding
from logprobs import completion_log_probs
from engine.devices import Ranks, best_device, dist
from engine.packing import pack_groups

device = best_device()
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(",".join(f"{kind}:{name}" for kind, name in {"cpu": "gloo", device.type: backend}.items()))
engine.sharding.num_processes = engine.devices.num_processes = lambda: 2         # shard all the same
torch.manual_seed(0)
model, rollout = conftest.ARCHITECTURES["gemma3"]().eval().to(device), conftest.made_up_rollout([3, 20], [5, 1, 9, 4])
sharded = copy.deepcopy(model)
engine.sharding.shard(sharded, {"replicate": 1, "fsdp": 1, "tp": 1})
norms = []
for one in model, sharded:
    conftest.shared_log_probs(one, rollout).logp.sum().backward()
    norms.append(engine.sharding.sum_and_clip_gradient(list(one.parameters()), 1.0, Ranks()))
total = torch.ones(3, device=device)
Ranks().sum_in_place(total)
assert total.sum() == 3 and norms[0] > 0 and abs(norms[1] / norms[0] - 1) < 1e-4, norms
print(dist.get_backend_config(), "agrees")
dist.destroy_process_group()
"""


def test_weights_are_sharded_over_a_process_group_of_one(tmp_path):
    (tmp_path / "one.py").write_text(ONE_PROCESS)
    done = run_process(tmp_path / "one.py", processes=1, PYTHONPATH=f"{ROOT}:{ROOT}/tests")
    assert "agrees" in done.stdout
    assert DEVICE != "cuda" or "cuda:nccl" in done.stdout
