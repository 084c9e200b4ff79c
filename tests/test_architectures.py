"""
Runs of every architecture with default flags: the table in docs/results.md.

Of checkpoints with towers for images or sound beside the text model, text alone is trained, and towers stay as they were.
"""

import itertools
import json

import pytest
import torch
from conftest import MODELS, QUICK, WITH_STATE, WITH_TOWERS, exhaustive, length_reward, made_up_rollout
from safetensors.torch import load_file

import train
from config import ModelConfig
from engine import make_engine
from engine.models import load_any_policy, save_any_policy
from runs.command_line import parse_config
from runs.folder import read_jsonl
from runs.setup import set_up


TOWERS = "vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio"


def load(folder, **more):
    return load_any_policy(ModelConfig(str(folder), **more))[0]


def is_of_tower(name):
    return any(tower in name for tower in TOWERS)


# In make test each has one of the four combinations, in turn.
COMBINATIONS = [(0, "float32"), (4, "bfloat16"), (4, "float32"), (0, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("name,lora_rank,precision", [
    (name, *combination) if number % 4 == at else exhaustive(name, *combination)
    for (number, name), (at, combination) in itertools.product(enumerate(MODELS), enumerate(COMBINATIONS))
])
def test_two_steps_with_default_flags(name, lora_rank, precision, tokenizer, tmp_path):
    """The start-up check compares sampler, trainer and the model's own forward pass, the first step the first two."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    save_any_policy(MODELS[name]().eval(), tokenizer, base)
    run = set_up(parse_config([
        *QUICK, "--output_dir", str(tmp_path / "run"), "--model_path", str(base), "--use_grpo", "--max_steps", "2",
        "--generation_max_length", "12", "--lora_rank", str(lora_rank), "--precision", precision,
        "--reward_functions", length_reward(tmp_path)]))
    assert run.policy.shares_prompts == (name not in WITH_STATE)
    train.training_loop(run)
    steps = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if line["phase"] == "grpo"]
    assert len(steps) == 2 and all(line["grad_norm"] > 0 and line["zero_variance_groups"] < 1 for line in steps)
    torch.manual_seed(0)
    before, after = load(base, lora_rank=lora_rank).state_dict(), load(tmp_path / "run/final").state_dict()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert len(changed) > 4 and before.keys() == after.keys() and all(after[key].isfinite().all() for key in changed)
    assert all("lora_" in key for key in changed) == bool(lora_rank) and not any(map(is_of_tower, changed))
    if name in WITH_TOWERS and not lora_rank:
        assert load_file(base / "model.safetensors").keys() == load_file(tmp_path / "run/final/model.safetensors").keys()
        classes = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (base, tmp_path / "run/final")]
        assert classes[0] == classes[1]


@pytest.mark.parametrize("name", WITH_TOWERS)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_only_the_text_model_is_trained_and_has_a_gradient(name, lora_rank, tokenizer, tmp_path):
    torch.manual_seed(0)
    save_any_policy(WITH_TOWERS[name]().eval(), tokenizer, tmp_path)
    model = load(tmp_path, lora_rank=lora_rank)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any(map(is_of_tower, trained)) and any(map(is_of_tower, dict(model.named_parameters())))
    assert all("lora" in name for name in trained) == bool(lora_rank)
    shared = make_engine("shared", model, tokenizer)
    shared.forward(made_up_rollout([5, 9], [4, 7, 3, 6]), torch.arange(4)).logp.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained
