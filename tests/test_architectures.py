"""Current architectures with default flags; mixtures of experts. The first test is the table in docs/results.md."""

import itertools

import pytest
import torch
from conftest import (
    ARCHITECTURES, CURRENT_ARCHITECTURES, PROMPTS, QUICK, WITH_TOWERS, build_qwen3_5_vision, exhaustive,
    with_noise,
)

import train
from config import GRPOConfig, ModelConfig
from engine import make_engine
from engine.models import load_any_policy, save_any_policy
from experience import Batch, add_trainer_logp
from runs.command_line import parse_config
from runs.folder import read_jsonl
from runs.setup import set_up

MODELS = ARCHITECTURES | CURRENT_ARCHITECTURES | WITH_TOWERS | {"qwen3_5_vision": build_qwen3_5_vision}
WITH_STATE = "qwen3_5", "qwen3_5_vision", "lfm2"          # prompts are not shared
EXPERTS = "qwen3_moe", "gpt_oss", "gemma4_experts", "glm4_moe"
UNRESTRICTED = GRPOConfig(
    generation_max_length=20, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)


def load(folder, **more):
    return load_any_policy(ModelConfig(str(folder), **more))[0]


@pytest.fixture
def save(tokenizer, tmp_path):
    """Save a model of an architecture and return its folder."""
    def save(name):
        torch.manual_seed(0)
        save_any_policy(MODELS[name]().eval(), tokenizer, tmp_path / "base")
        return tmp_path / "base"

    return save


# In make test each has one of the four combinations, in turn.
COMBINATIONS = [(0, "float32"), (4, "bfloat16"), (4, "float32"), (0, "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize("name,lora_rank,precision", [
    (name, *combination) if number % 4 == at else exhaustive(name, *combination)
    for (number, name), (at, combination) in itertools.product(enumerate(MODELS), enumerate(COMBINATIONS))
])
def test_two_steps_with_default_flags(name, lora_rank, precision, save, tmp_path):
    """The start-up check compares sampler, trainer and the model's own forward pass, the first step the first two."""
    base, reward = save(name), tmp_path / "reward.py"
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


@torch.no_grad()
@pytest.mark.parametrize("precision,lora_rank", [("float32", 4), ("bfloat16", 4), ("bfloat16", 0)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_and_routers_have_no_adapter_and_sampler_and_trainer_agree(name, precision, lora_rank, save, tokenizer):
    model = with_noise(load(save(name), lora_rank=lora_rank, precision=precision))
    adapted = {key.partition(".lora_")[0] for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert not lora_rank or (len(adapted) >= 8 and not any(word in f"{key}." for word in ("router.", ".experts.", "mlp.gate.") for key in adapted))
    shared, plain = (make_engine(name, model, tokenizer) for name in ("shared", "plain"))
    rollout = shared.sample(PROMPTS, UNRESTRICTED, 0)
    for engine in shared, plain:
        engine.require_ratios_of_1(add_trainer_logp(Batch.of_rollout(rollout, torch.ones(len(rollout.finished), 1)), engine))
