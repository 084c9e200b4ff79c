"""Runs of every architecture with default flags: the table in docs/results.md."""

import itertools

import pytest
import torch
from conftest import MODELS, QUICK, WITH_STATE, exhaustive

import train
from config import ModelConfig
from engine.models import load_any_policy, save_any_policy
from runs.command_line import parse_config
from runs.folder import read_jsonl
from runs.setup import set_up


def load(folder, **more):
    return load_any_policy(ModelConfig(str(folder), **more))[0]


# In make test each has one of the four combinations, in turn.
COMBINATIONS = [(0, "float32"), (4, "bfloat16"), (4, "float32"), (0, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("name,lora_rank,precision", [
    (name, *combination) if number % 4 == at else exhaustive(name, *combination)
    for (number, name), (at, combination) in itertools.product(enumerate(MODELS), enumerate(COMBINATIONS))
])
def test_two_steps_with_default_flags(name, lora_rank, precision, tokenizer, tmp_path):
    """The start-up check compares sampler, trainer and the model's own forward pass, the first step the first two."""
    base, reward = tmp_path / "base", tmp_path / "reward.py"
    torch.manual_seed(0)
    save_any_policy(MODELS[name]().eval(), tokenizer, base)
    reward.write_text("def reward(completions, **columns):\n    return [sum(map(ord, c)) % 97 for c in completions]\n")
    run = set_up(parse_config([
        *QUICK, "--output_dir", str(tmp_path / "run"), "--model_path", str(base), "--use_grpo", "--max_steps", "2",
        "--generation_max_length", "12", "--lora_rank", str(lora_rank), "--precision", precision,
        "--reward_functions", f"{reward}:reward"]))
    assert run.policy.shares_prompts == (name not in WITH_STATE)
    train.training_loop(run)
    steps = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if line["phase"] == "grpo"]
    assert len(steps) == 2 and all(line["grad_norm"] > 0 and line["zero_variance_groups"] < 1 for line in steps)
    torch.manual_seed(0)
    before, after = load(base, lora_rank=lora_rank).state_dict(), load(tmp_path / "run/final").state_dict()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert len(changed) > 4 and before.keys() == after.keys() and all(after[key].isfinite().all() for key in changed)
    assert all("lora_" in key for key in changed) == bool(lora_rank)
