"""Checkpoints with towers for images or sound beside the text model: text alone is trained, towers stay as they were."""

import json

import pytest
import torch
from conftest import WITH_TOWERS, length_reward, made_up_rollout, run_folder
from safetensors.torch import load_file

from config import ModelConfig
from engine import make_engine
from engine.models import load_any_policy, save_any_policy

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
def test_only_the_text_model_is_trained_and_has_a_gradient(base, lora_rank):
    model, tokenizer = load_any_policy(ModelConfig(str(base), lora_rank=lora_rank))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any(map(is_of_tower, trained)) and any(map(is_of_tower, dict(model.named_parameters())))
    assert all("lora" in name for name in trained) == bool(lora_rank)
    shared = make_engine("shared", model, tokenizer)
    shared.forward(made_up_rollout([5, 9], [4, 7, 3, 6]), torch.arange(4)).logp.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


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
