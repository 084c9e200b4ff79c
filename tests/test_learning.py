"""Every loss learns the small task of docs/figures.py: held-out accuracy rises beyond its interval, from one supervised start."""

import runpy
from types import SimpleNamespace

import pytest
import torch

import train
from config import GRPOConfig, ModelConfig
from data import load_examples
from engine import make_engine
from engine.policy import load_any_policy
from grpo import LOSSES
from project_files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]           # in make test the built-in model learns a task of one token
WEAK_REWARD = "--normalize_advantages false --reward_weights 0.1"                # so that a coefficient of 0.01 has an effect


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with the data and a supervised start."""
    folder = tmp_path_factory.mktemp("task")
    figures = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/figures.py")))
    flags = f"{figures.TASK} {figures.write_task(folder)} --eval_steps 0"
    task = SimpleNamespace(folder=folder, flags=flags, read_lines=figures.read_lines)
    cold_start = "--use_grpo false --max_steps 100 --learning_rate 1e-3"
    train.main(f"{task.flags} {cold_start} --output_dir {folder}/start".split())
    return task


def learn(task, name, flags):
    """GRPO from the start: the evaluations before it and after it."""
    output = task.folder / name
    train.main(f"{task.flags} --model_path {task.folder}/start/final --output_dir {output} {flags}".split())
    before, after = (line for line in task.read_lines(output / "metrics.jsonl") if line["phase"] == "eval")
    return before, after


@torch.no_grad()
def distance(task, name):
    """Exact KL(policy || start) in nats per token, over completions of the held-out prompts by the policy."""
    (policy, tokenizer), (reference, _) = (
        load_any_policy(ModelConfig(model_path=f"{task.folder}/{which}/final")) for which in (name, "start"))
    prompts = [example["prompt"] for example in load_examples(f"{task.folder}/test.jsonl")]
    config = GRPOConfig(generation_max_length=8, generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
    engine = make_engine("shared", policy, tokenizer)
    rollout = engine.sample(prompts, config, seed=0)
    kl = engine.log_probs(rollout, None, {}, reference=reference).kl
    return float(kl.sum() / rollout.completion_mask.sum())


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_raises_held_out_accuracy_beyond_its_interval(task, loss_type):
    before, after = learn(task, loss_type, f"--use_kl_penalty false --loss_type {loss_type} --max_steps 60")
    assert 0.1 < before["eval_accuracy"] < 0.4, "the start leaves something to learn"
    assert after["eval_accuracy"] > before["eval_accuracy_high"]


def test_a_kl_coefficient_of_a_hundredth_keeps_the_policy_nearer_to_the_reference(task):
    for coefficient in "0", "0.01":
        learn(task, f"kl{coefficient}", f"{WEAK_REWARD} --max_steps 80 --kl_penalty_coef {coefficient}")
    assert distance(task, "kl0.01") < 0.95 * distance(task, "kl0")
