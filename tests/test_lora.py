"""Adapters: nothing at first, merged and back without a trace, and what peft itself makes of the file."""

import json
import shutil

import pytest
import torch
from conftest import ARCHITECTURES, PROMPTS, comparable, ctrl_c_after, run_folder, with_noise
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import infer
import train
from config import ModelConfig
from engine import make_engine
from engine.device_policy import DevicePolicy
from engine.models import adapter_settings, load_any_policy, save_any_policy
from engine.network import set_precision
from engine.text_model import has_adapter, trainable_parameters
from runs.folder import read_jsonl

IDS = torch.tensor([[5, 9, 40, 41, 17, 200]])


@pytest.fixture(params=["gemma3", "gpt2"])                # gpt2 has other linear layers
def saved(request, tmp_path, tokenizer):
    """Return the folder of a base model."""
    torch.manual_seed(0)
    save_any_policy(ARCHITECTURES[request.param]().eval(), tokenizer, tmp_path / "base")
    return tmp_path / "base"


def load(folder, **more):
    return load_any_policy(ModelConfig(str(folder), **more))


@torch.no_grad()
def test_a_new_adapter_is_the_base_model_and_is_all_that_is_trained(saved):
    base, _ = load(saved)
    model, _ = load(saved, lora_rank=4)
    size = sum(p.numel() for p in base.parameters())
    assert has_adapter(model) and 0 < sum(p.numel() for p in trainable_parameters(model)) < size
    expected = base(IDS).logits
    assert torch.equal(model(IDS).logits, expected)
    assert (with_noise(model)(IDS).logits - expected).abs().max() > 0.01


def test_frozen_weights_are_stored_in_the_precision_of_the_layers_bit_for_bit(saved, settings):
    model, tokenizer = load(saved, lora_rank=4, precision="bfloat16")
    in_float32, _ = load(saved, lora_rank=4)
    set_precision(in_float32.requires_grad_(), "bfloat16")                   # nothing frozen: nothing rounded
    sizes = {}
    for name, parameter in with_noise(model).named_parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        assert parameter.dtype == torch.float32 or (not parameter.requires_grad and ".base_layer." in name)
    assert sizes[torch.bfloat16] > sizes[torch.float32] / 4
    with torch.no_grad():
        for name, parameter in in_float32.named_parameters():
            if "lora_" in name:
                parameter.copy_(model.get_parameter(name))
    engines = [make_engine("shared", each, tokenizer) for each in (model, in_float32)]
    rollout = engines[0].sample(PROMPTS, settings, 0)
    now, then = (engine.forward(rollout, torch.arange(16)).logp for engine in engines)
    assert torch.equal(now, then)
    now.sum().backward()
    then.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, in_float32.get_parameter(name).grad), name


@pytest.mark.slow
@torch.no_grad()
def test_peft_loads_and_merges_what_is_saved_and_so_do_we(saved, tmp_path):
    model, tokenizer = load(saved, lora_rank=4, lora_alpha=6.0)
    expected = with_noise(model)(IDS).logits
    save_any_policy(model, tokenizer, tmp_path / "adapter")
    assert not (tmp_path / "adapter/model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    peft_model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(peft_model(IDS).logits, expected)
    again, _ = load_any_policy(ModelConfig(str(tmp_path / "adapter")))
    assert torch.equal(again(IDS).logits, expected) and len(trainable_parameters(again)) == len(trainable_parameters(model))
    peft_model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (merged.eval()(IDS).logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_the_reference_is_the_adapter_as_it_was(saved, tmp_path, settings, engine):
    """An adapter that was trained before: a reference without it would be another model."""
    model, tokenizer = load(saved, lora_rank=4)
    save_any_policy(with_noise(model), tokenizer, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"--lora_rank=8: the adapter in .* has 4"):
        load(tmp_path / "adapter", lora_rank=8)
    (model, _), (as_loaded, _) = load(tmp_path / "adapter"), load(tmp_path / "adapter")
    policy = make_engine(engine, model, tokenizer)
    rollout, reference, as_loaded = policy.sample(PROMPTS, settings, 0), policy.frozen_copy(), policy.like(as_loaded)
    assert isinstance(policy, DevicePolicy) and reference.model is model
    with_noise(model)                                     # training goes on
    now, kept, before = (each.log_probs(rollout).logp for each in (policy, reference, as_loaded))
    assert torch.allclose(kept, before, atol=1e-6) and (now - before).abs().max() > 0.01
    assert torch.equal(policy.log_probs(rollout).logp, now)
    exact = policy.forward(rollout, torch.arange(16), reference).kl
    assert torch.allclose(exact, policy.log_probs(rollout, reference=as_loaded).kl, atol=1e-5)
    exact.sum().backward()                                # the reference's forward pass left the graph intact
    policy.update_reference(reference, alpha=0.0)
    assert all(torch.equal(kept, p) for kept, p in zip(reference.adapter, trainable_parameters(model), strict=True))


@pytest.mark.slow
def test_a_run_with_an_adapter_is_moved_resumed_and_evaluated(tmp_path, capsys):
    flags = "--use_grpo --max_steps 4 --cold_start_steps 2 --lora_rank 4 --save_steps 1 --use_kl_penalty --kl_estimator exact"
    whole = run_folder(tmp_path / "whole", *flags.split())
    assert any(line.get("kl", 0) > 0 for line in read_jsonl(whole / "metrics.jsonl"))
    with ctrl_c_after(4):
        stopped = run_folder(tmp_path / "stopped", *flags.split())
    folder = stopped.rename(tmp_path / "moved")           # with base/, the built-in model
    train.main(["--output_dir", str(folder), "--resume"])
    assert comparable(folder) == comparable(whole)
    final = folder / "final"
    assert (final / "adapter_model.safetensors").read_bytes() == (whole / "final/adapter_model.safetensors").read_bytes()
    capsys.readouterr()
    evaluation = "--evaluate arithmetic --limit 8 --generation_max_length 8".split()
    infer.main(["--model_path", str(final), *evaluation])
    evaluated = capsys.readouterr().out
    AutoPeftModelForCausalLM.from_pretrained(final).merge_and_unload().save_pretrained(tmp_path / "merged")      # as in docs/scale.md
    AutoTokenizer.from_pretrained(final).save_pretrained(tmp_path / "merged")
    infer.main(["--model_path", str(tmp_path / "merged"), *evaluation])
    assert capsys.readouterr().out == evaluated and evaluated.startswith("accuracy")


def test_an_adapter_is_loaded_with_its_own_base_wherever_it_is_or_refused(tmp_path, tokenizer, monkeypatch):
    def write(folder, seed):
        torch.manual_seed(seed)
        save_any_policy(ARCHITECTURES["llama"]().eval(), tokenizer, tmp_path / folder)

    def is_the_same():
        return torch.equal(load(tmp_path / "a/run/final")[0](IDS).logits, expected)

    for seed, folder in enumerate(["a/base", "b/base", "a/run/base"]):
        write(folder, seed)
    monkeypatch.chdir(tmp_path / "a")
    model, _ = load("./base", lora_rank=2)
    expected = with_noise(model)(IDS).logits
    save_any_policy(model, tokenizer, tmp_path / "a/run/final")
    monkeypatch.chdir(tmp_path / "b")                     # where ./base is another model, as beside the run
    assert is_the_same()
    shutil.rmtree(tmp_path / "a/run/base")
    (tmp_path / "a/base").rename(tmp_path / "a/run/base")
    assert is_the_same(), "moved with its run"
    write("a/base", 1)
    assert is_the_same(), "although another model is in the old place"
    shutil.rmtree(tmp_path / "a/run/base")
    with pytest.raises(ValueError, match=rf"^--model_path=\S+/final: {tmp_path}/a/base is not the model that the adapter [^\n]+$"):
        is_the_same()
    shutil.rmtree(tmp_path / "a/base")
    with pytest.raises(ValueError, match=r"^--model_path=\S*/final: cannot be loaded: .*/base'"):
        is_the_same()
    settings = tmp_path / "a/run/final/adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"base_model_name_or_path": "own/base"}))
    assert adapter_settings(settings.parent)["base_model_name_or_path"] == "own/base", "of a hub, not of the folder a"


@pytest.mark.parametrize("options,refused", [
    (dict(target_modules=["q_proj"], lora_dropout=0.5), ""),
    (dict(target_modules=["q_proj"], modules_to_save=["lm_head"]), "modules_to_save"),
    (dict(target_modules=["q_proj", "lm_head"]), "the head"),
])
def test_an_adapter_of_peft_is_loaded_without_its_dropout_or_refused_in_one_line(tmp_path, tokenizer, options, refused):
    torch.manual_seed(0)
    save_any_policy(ARCHITECTURES["llama"]().eval(), tokenizer, tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    if refused:
        with pytest.raises(ValueError, match=rf"^--model_path={tmp_path}/adapter: the adapter changes {refused}, [^\n]+$"):
            load(tmp_path / "adapter")
        return
    ours, _ = load(tmp_path / "adapter")
    assert not any(module.training for module in ours.modules())
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits)
