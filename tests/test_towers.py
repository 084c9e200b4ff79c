"""Checkpoints with towers for images or sound beside the text model: text alone is trained, towers stay as they were."""

import json

import pytest
import torch
from conftest import ARCHITECTURES, PROMPTS, WITH_TOWERS, length_reward, run_folder
from safetensors.torch import load_file

from config import ModelConfig
from engine import make_engine
from engine.models import load_any_policy, save_any_policy
from engine.text_model import text_model

FLAGS = "--use_grpo --max_steps 2 --generation_max_length 8 --learning_rate 1e-2 --entropy_coef 0.1 --gradient_checkpointing".split()
TOWERS = "vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio"


@pytest.fixture(scope="module", params=WITH_TOWERS)
def base(request, tmp_path_factory, tokenizer):
    """The folder of a checkpoint."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    save_any_policy(WITH_TOWERS[request.param]().eval(), tokenizer, folder)
    return folder


def is_of_tower(name):
    return any(tower in name for tower in TOWERS)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_only_the_text_model_is_trained_and_has_a_gradient(base, lora_rank, settings):
    model, tokenizer = load_any_policy(ModelConfig(str(base), lora_rank=lora_rank))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any(map(is_of_tower, trained)) and any(map(is_of_tower, dict(model.named_parameters())))
    assert all("lora" in name for name in trained) == bool(lora_rank)
    shared = make_engine("shared", model, tokenizer)
    rollout = shared.sample(PROMPTS, settings, 0)
    now = shared.forward(rollout, torch.arange(16))
    assert (now.logp - rollout.sampling_logp).abs().max() < 1e-4
    now.logp.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_it_samples_and_scores_as_its_text_model_alone(tokenizer, settings):
    torch.manual_seed(0)
    model, alone = WITH_TOWERS["gemma3_vision"]().eval(), ARCHITECTURES["gemma3"]().eval()
    alone.model.load_state_dict(text_model(model).state_dict())
    engines = [make_engine("shared", each, tokenizer) for each in (model, alone)]
    rollout, again = (engine.sample(PROMPTS, settings, 0) for engine in engines)
    assert torch.equal(rollout.completion_ids, again.completion_ids) and torch.equal(rollout.sampling_logp, again.sampling_logp)
    assert torch.equal(*(engine.log_probs(rollout).logp for engine in engines))


@pytest.mark.slow
def test_a_run_leaves_the_towers_and_the_names_of_the_checkpoint_as_they_were(base, tmp_path):
    final = run_folder(
        tmp_path / "run", *FLAGS, "--model_path", str(base), "--reward_functions", length_reward(tmp_path)) / "final"
    before, after = (load_file(folder / "model.safetensors") for folder in (base, final))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
    assert any(not torch.equal(before[name], after[name]) for name in before if not is_of_tower(name))
    architectures = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (base, final)]
    assert architectures[0] == architectures[1]
