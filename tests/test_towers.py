"""Checkpoints with towers for images or sound beside the text model: text alone is trained, towers stay as they were."""

import json

import pytest
import torch
from conftest import (
    ARCHITECTURES, PROMPTS, WITH_TOWERS, comparable, ctrl_c_after, exhaustive, length_reward, run_folder, shared_log_probs,
)
from peft import PeftModel
from safetensors.torch import load_file

import infer
import train
from config import ModelConfig
from data import encode_prompt
from engine import make_engine
from engine.adapters import merged_copy, trainable_parameters
from engine.model_files import auto_class
from engine.text_model import text_model
from engine.policy import frozen_copy, load_policy, save_policy, update_reference
from runs.folder import read_jsonl
from runs.memory_estimate import model_shapes, pass_bytes
from runs.startup_check import check_packing, random_rollout

FLAGS = (
    "--use_grpo --max_steps 3 --save_steps 1 --keep_checkpoints 9 --generation_max_length 8 --learning_rate 1e-2 "
    "--weight_decay 0.1 --use_kl_penalty true --kl_penalty_coef 0.1 --kl_estimator exact --gradient_checkpointing"
).split()
TOWERS = "vision_tower", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio"


@pytest.fixture(scope="module", params=WITH_TOWERS)
def base(request, tmp_path_factory, tokenizer):
    """The folder of a checkpoint."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    save_policy(WITH_TOWERS[request.param]().eval(), tokenizer, folder)
    return folder


def is_of_tower(name):
    return any(tower in name for tower in TOWERS)


def load(folder, **more):
    return load_policy(ModelConfig(str(folder), **more))


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
    now = shared.log_probs(rollout, None, settings.policy)
    assert (now.logp - rollout.sampling_logp).abs().max() < 1e-4
    now.logp.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_it_samples_and_scores_as_its_text_model_alone(tokenizer, settings, tmp_path):
    torch.manual_seed(0)
    model, alone = WITH_TOWERS["gemma3_vision"]().eval(), ARCHITECTURES["gemma3"]().eval()
    alone.model.load_state_dict(text_model(model).state_dict())
    engines = [make_engine("shared", each, tokenizer) for each in (model, alone)]
    rollout, again = (engine.sample(PROMPTS, settings, seed=0) for engine in engines)
    assert torch.equal(rollout.completion_ids, again.completion_ids) and torch.equal(rollout.sampling_logp, again.sampling_logp)
    assert torch.equal(*(engine.log_probs(rollout, None, {}).logp for engine in engines))
    for each, name in (model, "towers"), (alone, "alone"):
        each.save_pretrained(tmp_path / name)
    for recompute in False, True:
        towers, text = (model_shapes(ModelConfig(model_path=str(tmp_path / name)), 1) for name in ("towers", "alone"))
        assert pass_bytes(towers, 512, recompute) == pass_bytes(text, 512, recompute), "layers for text are counted"


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [exhaustive(0), 4])
def test_a_run_leaves_the_towers_as_they_were_and_resumes_and_its_final_loads(base, lora_rank, tmp_path, capsys):
    flags = [*FLAGS, "--model_path", str(base), "--lora_rank", str(lora_rank), "--reward_functions", length_reward(tmp_path)]
    whole = run_folder(tmp_path / "whole", *flags)
    printed = capsys.readouterr().out
    part = "the adapter" if lora_rank else "the text model"
    assert "packing ok" in printed and f"of them in {part} that is trained" in printed
    assert any(line.get("kl", 0) > 0 for line in read_jsonl(whole / "metrics.jsonl"))
    state = torch.load(whole / "checkpoints/step-00000001/state.pt", weights_only=True)
    policy, _ = load(whole / "final")
    assert [s["exp_avg"].shape for s in state["optimizer"]["state"].values()] == [p.shape for p in trainable_parameters(policy)]

    folder = tmp_path / "stopped"
    with ctrl_c_after(2):
        run_folder(folder, *flags)
    train.main(["--output_dir", str(folder), "--resume"])
    assert comparable(folder) == comparable(whole)
    final, merged = folder / "final", folder / "final"
    file = "adapter_model.safetensors" if lora_rank else "model.safetensors"
    assert (final / file).read_bytes() == (whole / "final" / file).read_bytes()

    capsys.readouterr()
    evaluation = "--evaluate arithmetic --limit 8 --generation_max_length 8".split()
    infer.main(["--model_path", str(final), *evaluation])
    evaluated = capsys.readouterr().out
    if lora_rank:
        merged = tmp_path / "merged"
        infer.main(["--model_path", str(final), "--merge_into", str(merged)])
        infer.main(["--model_path", str(merged), *evaluation])
        assert capsys.readouterr().out.splitlines()[1:] == evaluated.splitlines()
    before, after = load_file(base / "model.safetensors"), load_file(merged / "model.safetensors")
    assert before.keys() == after.keys(), "the names of the checkpoint"
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
    assert any(not torch.equal(before[name], after[name]) for name in before if not is_of_tower(name))
    architectures = [json.loads((folder / "config.json").read_text())["architectures"] for folder in (base, merged)]
    assert architectures[0] == architectures[1]


@torch.no_grad()
def test_peft_puts_the_saved_adapter_where_it_was(base, tmp_path):
    model, tokenizer = load(base, lora_rank=4)
    for parameter in trainable_parameters(model):
        parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.tensor([[5, 9, 40, 41, 17, 200]])
    expected = model(input_ids=ids).logits
    save_policy(model, tokenizer, tmp_path / "adapter")
    assert not any(map(is_of_tower, load_file(tmp_path / "adapter/adapter_model.safetensors")))
    for again in (
        PeftModel.from_pretrained(auto_class(model.config).from_pretrained(base, dtype=torch.float32), tmp_path / "adapter").eval(),
        auto_class(model.config).from_pretrained(tmp_path / "adapter", dtype=torch.float32).eval(),
    ):
        assert torch.equal(again(input_ids=ids).logits, expected)
    again, _ = load(tmp_path / "adapter")
    assert torch.equal(again(input_ids=ids).logits, expected)
    assert not any(is_of_tower(name) for name, parameter in again.named_parameters() if parameter.requires_grad)
    save_policy(merged_copy(model), tokenizer, tmp_path / "merged")
    assert (load(tmp_path / "merged")[0](input_ids=ids).logits - expected).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_reference_follows_the_text_model(base, lora_rank):
    model, _ = load(base, lora_rank=lora_rank)
    reference = frozen_copy(model)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    old = [parameter.clone() for parameter in reference.parameters()]
    for parameter in trainable_parameters(model):
        parameter.add_(1.0)
    update_reference(reference, model, 0.5)
    moved = [float((new - before).mean()) for new, before in zip(reference.parameters(), old, strict=True)]
    assert {round(distance, 3) for distance in moved} == ({0.5} if lora_rank else {0.0, 0.5})
    update_reference(reference, model, 0.0)
    current = trainable_parameters(model) if lora_rank else model.parameters()
    assert all(torch.equal(kept, new) for kept, new in zip(reference.parameters(), current, strict=True))


def test_a_model_without_towers_is_trained_whole():
    model, _ = load_policy(ModelConfig())
    assert all(parameter.requires_grad for parameter in model.parameters()) and text_model(model) is model.model
    rollout = random_rollout(model, load_policy(ModelConfig())[1], [[5, 6]])
    assert shared_log_probs(model, rollout).logp.isfinite().all()
