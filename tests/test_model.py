"""
Loading policies from disk, from the hub, and the built-in one; saving; rejecting folders without a model; 16 bits.

What the program uses of torch and transformers that could change without an error, and what they have deprecated.
"""

import copy
import inspect
import json
import os
import pickle
import shutil

import pytest
import torch
from conftest import ARCHITECTURES, PROMPTS, WITH_TOWERS, quick_config, run_folder, run_process
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, core_model_loading

from config import ModelConfig
from engine import make_engine
from engine.device_policy import DevicePolicy
from engine.models import load_any_policy, save_any_policy
from engine.network import Network, move, recompute_activations, set_precision
from engine.text_model import text_model
from runs.setup import set_up


def test_a_model_comes_back_from_disk_in_evaluation_mode_and_pads_with_eos_if_it_has_no_pad_token(model, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = None
    save_any_policy(model, tokenizer, tmp_path)
    loaded, loaded_tokenizer = load_any_policy(ModelConfig(model_path=str(tmp_path)))
    ids = torch.tensor([tokenizer("47+85=?").input_ids])
    assert [loaded_tokenizer("47+85=?").input_ids] == ids.tolist() and loaded_tokenizer.pad_token_id == tokenizer.eos_token_id
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert not loaded.training and next(loaded.parameters()).dtype == torch.float32


def test_a_head_of_its_own_in_the_files_of_a_config_that_ties_it_is_kept_as_transformers_keeps_it(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = ARCHITECTURES["gemma3"]().eval()
    save_any_policy(model, tokenizer, tmp_path / "tied")
    assert model.config.tie_word_embeddings and "lm_head.weight" not in load_file(tmp_path / "tied/model.safetensors")
    shutil.copytree(tmp_path / "tied", tmp_path / "own")
    weights = load_file(tmp_path / "own/model.safetensors")
    weights["lm_head.weight"] = torch.randn(263, 32)
    save_file(weights, tmp_path / "own/model.safetensors", {"format": "pt"})
    ids = torch.tensor([tokenizer("47+85=?").input_ids])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()(ids).logits
    loaded, _ = load_any_policy(ModelConfig(model_path=str(tmp_path / "own")))
    move(loaded, torch.device("cpu"))
    torch.testing.assert_close(loaded(ids).logits, expected)
    save_any_policy(loaded, tokenizer, tmp_path / "again")
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()(ids).logits, expected)
    tied, _ = load_any_policy(ModelConfig(model_path=str(tmp_path / "tied")))
    assert tied.config.tie_word_embeddings and tied.lm_head.weight is move(tied, torch.device("cpu")).model.embed_tokens.weight


def test_the_built_in_model_has_a_million_parameters():
    model, tokenizer = load_any_policy(ModelConfig())
    assert 0.9e6 < sum(p.numel() for p in model.parameters()) < 1.1e6 and not model.training
    eager, _ = load_any_policy(ModelConfig(attn_implementation="eager"))
    assert eager.config._attn_implementation == Network(eager).frozen_copy().module.config._attn_implementation == "eager"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_a_model_is_moved_and_moved_back_also_after_an_exception():
    class Recorder(torch.nn.Linear):
        def to(self, device):
            devices.append(str(device))
            return self

    devices, model = [], Recorder(1, 1)
    with Network(model).in_use("cuda:7"):
        assert devices == ["cuda:7"]
    assert devices == ["cuda:7", "cpu"]
    with pytest.raises(KeyError), Network(model).in_use("cuda:7"):
        raise KeyError
    assert devices[2:] == ["cuda:7", "cpu"]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_layers_in_half_with_weights_and_numbers_in_float32(model, tokenizer, settings, precision):
    engine = make_engine("shared", model, tokenizer)
    rollout = engine.sample(PROMPTS, settings, 0)
    exact = engine.log_probs(rollout).logp
    set_precision(model, precision)
    rounded = engine.forward(rollout, torch.arange(16)).logp
    assert 1e-5 < (rounded - exact).abs().max() < 0.5, "really rounded, and no more than that"
    assert rounded.dtype == torch.float32
    rounded.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
        assert not torch.allclose(engine.log_probs(rollout).logp, rounded), "no stale copies"


def test_a_callers_own_policy_computes_in_the_precision_of_the_run(tmp_path):
    """It is given the module alone; in float16 gradients must be scaled."""
    policy = set_up(quick_config(tmp_path / "run", precision="float16"), engine=DevicePolicy).policy
    assert type(policy) is DevicePolicy and policy.precision == "float16" and policy.scaler.is_enabled()
    assert policy.ratio_tolerance == policy.frozen_copy().ratio_tolerance == 0.1


@pytest.mark.parametrize("precision,kept", [("bfloat16", {"A_log", "down_bias"}), ("float16", {"A_log", "down_bias", "down"})])
def test_frozen_weights_that_autocast_leaves_stay_as_they_are(precision, kept):
    """The state of a Mamba layer and a mixture's biases; in float16 all of a mixture."""
    tiny = type("TinyExperts", (torch.nn.ParameterDict,), {})({"down": torch.ones(2, 3, 3), "down_bias": torch.ones(2, 3)})
    model = ARCHITECTURES["qwen3"]()
    model.model.layers[0].A_log, model.model.layers[0].experts = torch.nn.Parameter(torch.ones(3, 3)), tiny
    set_precision(model.requires_grad_(False), precision)
    added = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters() if "experts" in name or "A_log" in name}
    assert {name for name, dtype in added.items() if dtype == torch.float32} == kept
    assert model.model.layers[0].mlp.up_proj.weight.dtype == getattr(torch, precision)


def test_a_reference_in_half_has_the_log_probabilities_of_the_policy_and_keeps_them(model, tokenizer, settings):
    """Precision and recomputation wrap methods of the model; the copy's must be bound to the copy."""
    set_precision(model, "bfloat16")
    engine = make_engine("shared", model, tokenizer)
    recompute_activations(model)
    rollout = engine.sample(PROMPTS, settings, 0)
    reference, exact = engine.frozen_copy(), engine.frozen_copy(exact=True)
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in exact.model.parameters()} == {torch.float32}
    layers = sum(p.numel() for p in reference.model.parameters() if p.dtype == torch.bfloat16)
    assert layers > 0.9 * sum(m.weight.numel() for m in text_model(model).modules() if type(m).__name__ in ("Linear", "Conv1D"))
    before = engine.log_probs(rollout).logp
    for changed in False, True:
        assert torch.equal(reference.log_probs(rollout).logp, before)
        assert torch.allclose(engine.log_probs(rollout).logp, before) is not changed
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    engine.update_reference(reference, alpha=0.0)
    assert all(torch.equal(p.to(kept.dtype), kept) for p, kept in zip(model.parameters(), reference.model.parameters(), strict=True))


FOREIGN = {
    "a pickle": lambda f: ((f / "model.safetensors").unlink(), (f / "pytorch_model.bin").write_bytes(pickle.dumps({"a": print}))),
    "small vocabulary": lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace(": 263", ": 10")),
    "a layer of another name": lambda f: save_file(
        {name.replace("layers.1.mlp", "layers.7.mlp"): tensor for name, tensor in load_file(f / "model.safetensors").items()},
        f / "model.safetensors", metadata={"format": "pt"}),
    "adapter without rank": lambda f: (f / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(f)})),
    "tokenizer": lambda f: (f / "tokenizer.json").write_text("{}"),
    "no tokenizer": lambda f: [file.unlink() for file in f.glob("tokenizer*")],          # transformers makes an empty one
    "no folder": shutil.rmtree,
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_whatever_a_library_raises_while_a_model_is_loaded_is_one_line_with_the_folder(tmp_path, tokenizer, fault):
    save_any_policy(ARCHITECTURES["qwen3"](), tokenizer, tmp_path)
    load_any_policy(ModelConfig(str(tmp_path)))
    FOREIGN[fault](tmp_path)
    with pytest.raises(ValueError) as error:
        load_any_policy(ModelConfig(str(tmp_path)))
    message = str(error.value)
    assert message.startswith(f"--model_path={tmp_path}: ") and "\n" not in message and message.count("--model_path") == 1
    assert ("its files lack" in message) == (fault == "a layer of another name")


def test_weights_of_a_tower_that_text_does_not_pass_may_be_missing(tmp_path, tokenizer):
    save_any_policy(WITH_TOWERS["gemma3_vision"](), tokenizer, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "vision_tower" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_any_policy(ModelConfig(str(tmp_path)))
    save_file(dict(list(kept.items())[1:]), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="its files lack 1 weights of the model, such as "):
        load_any_policy(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("umask,mode", [(0o022, 0o644), (0o077, 0o600)])
def test_other_users_may_read_weights_if_they_may_read_other_files(tmp_path, lora_rank, umask, mode):
    before = os.umask(umask)
    try:
        save_any_policy(*load_any_policy(ModelConfig()), tmp_path / "base")
        save_any_policy(*load_any_policy(ModelConfig(str(tmp_path / "base"), lora_rank=lora_rank)), tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {mode} and any(name.endswith(".safetensors") for name in modes)


@pytest.mark.slow
def test_a_hub_id_is_loaded_from_the_cache_of_the_hub(tmp_path, tokenizer):
    """In a process of its own: where the cache is, is read when huggingface_hub is imported."""
    snapshot = tmp_path / "models--own--model/snapshots" / ("a" * 40)
    save_any_policy(ARCHITECTURES["gpt2"](), tokenizer, snapshot)
    (tmp_path / "models--own--model/refs").mkdir()
    (tmp_path / "models--own--model/refs/main").write_text("a" * 40)
    flags = "--question 1+1=? --generation_max_length 4 --model_path own/model".split()
    run_process("infer.py", *flags, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")


def test_is_hf_initialized_marks_each_weight_that_was_read_when_a_module_gets_it(tmp_path):
    ARCHITECTURES["llama"]().save_pretrained(tmp_path)
    read = set()

    def note(module, name, weight):
        if getattr(weight, "_is_hf_initialized", False) and not weight.is_meta:
            read.add(weight)

    with torch.nn.modules.module.register_module_parameter_registration_hook(note):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read >= set(model.parameters())


def test_hf_deactivate_async_load_is_read_by_the_loader():
    assert '"HF_DEACTIVATE_ASYNC_LOAD"' in inspect.getsource(core_model_loading), "weights are read ahead in each process"


@pytest.mark.filterwarnings("error::DeprecationWarning", "error::PendingDeprecationWarning", "error::FutureWarning")
@pytest.mark.parametrize("flags", ["", "--engine plain --use_value_head true", "--lora_rank 4 --gradient_checkpointing"])
def test_a_run_calls_nothing_that_is_deprecated(flags, tmp_path):
    common = "--use_grpo --max_steps 1 --cold_start_steps 1 --eval_limit 2 --batch_size 2 --generation_max_length 8"
    assert (run_folder(tmp_path / "run", *common.split(), *flags.split()) / "final").is_dir()
