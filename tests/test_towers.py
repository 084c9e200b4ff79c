"""Checkpoints with towers for images or sound beside the text model: text alone is trained, towers stay as they were."""

import json

import pytest
import torch
from conftest import (
    ARCHITECTURES, PROMPTS, WITH_TOWERS, comparable, ctrl_c_after, exhaustive, length_reward, run_folder,
)
from safetensors.torch import load_file

import train
from config import ModelConfig
from data import encode_prompt
from engine import make_engine
from engine.adapters import trainable_parameters
from engine.text_model import text_model
from engine.policy import load_any_policy, save_any_policy
from runs.folder import read_jsonl
from runs.startup_check import check_packing

FLAGS = (
    "--use_grpo --max_steps 3 --save_steps 1 --keep_checkpoints 9 --generation_max_length 8 --learning_rate 1e-2 "
    "--use_kl_penalty true --kl_penalty_coef 0.1 --kl_estimator exact --gradient_checkpointing"
).split()
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


def load(folder, **more):
    return load_any_policy(ModelConfig(str(folder), **more))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_only_the_text_model_is_trained_and_has_a_gradient(base, lora_rank, settings):
    model, tokenizer = load(base, lora_rank=lora_rank)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and not any(map(is_of_tower, trained)) and any(map(is_of_tower, dict(model.named_parameters())))
    assert all("lora" in name for name in trained) == bool(lora_rank)
    if not lora_rank:
        text = {parameter for module in (text_model(model), model.lm_head) for parameter in module.parameters()}
        assert set(trainable_parameters(model)) == text
    prompts = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS[:2]]
    shared, plain = (make_engine(name, model, tokenizer) for name in ("shared", "plain"))
    assert check_packing(shared, plain, prompts, settings).ok
    rollout = shared.sample(PROMPTS, settings, seed=0)
    now = shared.log_probs(rollout, None, settings.distribution)
    assert (now.logp - rollout.sampling_logp).abs().max() < 1e-4
    now.logp.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_it_samples_and_scores_as_its_text_model_alone(tokenizer, settings):
    torch.manual_seed(0)
    model, alone = WITH_TOWERS["gemma3_vision"]().eval(), ARCHITECTURES["gemma3"]().eval()
    alone.model.load_state_dict(text_model(model).state_dict())
    engines = [make_engine("shared", each, tokenizer) for each in (model, alone)]
    rollout, again = (engine.sample(PROMPTS, settings, seed=0) for engine in engines)
    assert torch.equal(rollout.completion_ids, again.completion_ids) and torch.equal(rollout.sampling_logp, again.sampling_logp)
    assert torch.equal(*(engine.log_probs(rollout, None, {}).logp for engine in engines))


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [exhaustive(0), 4])
def test_a_run_leaves_the_towers_as_they_were_and_resumes_and_its_final_loads(base, lora_rank, tmp_path, capsys):
    flags = [*FLAGS, "--model_path", str(base), "--lora_rank", str(lora_rank), "--reward_functions", length_reward(tmp_path)]
    whole = run_folder(tmp_path / "whole", *flags)
    assert "packing ok" in capsys.readouterr().out
    assert any(line.get("kl", 0) > 0 for line in read_jsonl(whole / "metrics.jsonl"))
    state = torch.load(whole / "checkpoints/step-00000001/state.pt", weights_only=True)
    policy, _ = load(whole / "final")
    assert [s["exp_avg"].shape for s in state["optimizer"]["state"].values()] == [p.shape for p in trainable_parameters(policy)]

    folder = tmp_path / "stopped"
    with ctrl_c_after(2):
        run_folder(folder, *flags)
    train.main(["--output_dir", str(folder), "--resume"])
    assert comparable(folder) == comparable(whole)
    final = folder / "final"
    file = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    assert (final / file).read_bytes() == (whole / "final" / file).read_bytes()

    if lora_rank:
        return
    before, after = (load_file(folder / "model.safetensors") for folder in (base, final))
    assert before.keys() == after.keys(), "the names of the checkpoint"
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
    assert any(not torch.equal(before[name], after[name]) for name in before if not is_of_tower(name))
    architectures = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (base, final)]
    assert architectures[0] == architectures[1]
