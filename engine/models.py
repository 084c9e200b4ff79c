"""
Load and save models from a hub, with a LoRA adapter, in 16 bits, and in shards over processes. For float32
weights in one process, model.py does the same.

Parts of a model that do not process text are frozen.
Not supported: quantised weights; training on images or sound.
"""

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

import model as core
from engine.devices import is_main
from engine.errors import in_one_line
from engine.fingerprints import fingerprint_of_model
from engine.network import set_precision
from engine.sharding import full_tensor, loading_shards, reshard
from engine.text_model import auto_class, freeze_towers, has_adapter

logging.disable_progress_bar()                            # a run prints its own progress


def load_any_tokenizer(model_config):
    """Load the tokenizer of model_config.model_path, or the built-in one. Raises ValueError with one line."""
    with loading_errors(model_config.model_path):
        return core.load_tokenizer(model_config)


def load_any_policy(model_config, *, trainable: bool = True):
    """Load the model and the tokenizer of model_config.model_path, a folder or hub id, or the built-in ones.

    Trained weights are float32 at any precision of the layers: in bfloat16 a step of 1e-6 would be rounded to
    nothing.

    model_config  a ModelConfig: model_path is a folder, a hub id or empty. With lora_rank, or if the folder
               holds an adapter, the weights are frozen and the adapter is trained
    trainable  False freezes everything, for inference
    raises     ValueError with one line if there is no such model
    """
    with loading_errors(model_config.model_path):
        adapter = adapter_settings(model_config.model_path)
        if adapter and model_config.lora_rank not in (0, adapter["r"]):
            found = f"the adapter in {model_config.model_path} has {adapter['r']}"
            raise ValueError(f"--lora_rank={model_config.lora_rank}: {found}; omit it")
        if not model_config.model_path:
            model, tokenizer = core.load_policy(replace(model_config, lora_rank=0, precision="float32"))
        else:
            tokenizer = core.load_tokenizer(model_config)
            path = adapter.get("base_model_name_or_path", model_config.model_path)
            trusted = model_config.trust_remote_code
            cls = auto_class(AutoConfig.from_pretrained(path, trust_remote_code=trusted))
            with loading_shards():
                model, missing = core.load_weights(model_config, path, cls)
            freeze_towers(model)
            core.require_weights(model, missing, model_config.model_path)
        if adapter or model_config.lora_rank:
            from engine.adapters import add_adapter       # here and below: only with an adapter

            add_adapter(model, model_config, bool(adapter))
        if not trainable:
            model.requires_grad_(False)
        set_precision(model, model_config.precision)
        return model, tokenizer


@contextmanager
def loading_errors(path: str):
    """Turn any error of a library into ValueError with the path. Our own messages begin with --."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, ValueError) and str(error).startswith("--")
        problem = "cannot be loaded" if Path(path).is_dir() else "no such folder; from the hub"
        line = str(error) if known else f"--model_path={path}: {problem}: {in_one_line(error)}"
        raise ValueError(line) from error


def adapter_settings(path: str) -> dict:
    """Return adapter_config.json of a folder with an adapter, with the path of its base model; else {}."""
    file = Path(path) / "adapter_config.json"
    if not path or not file.exists():
        return {}
    settings, fingerprint = json.loads(file.read_text()), file.with_name("base_fingerprint")
    base = Path(settings["base_model_name_or_path"])
    places = [base, *(folder / base.name for folder in file.resolve().parents[1:3])]   # moved with its run
    found = [place for place in places if base.is_absolute() and place.is_dir()]       # not a hub id
    trained_on = fingerprint.read_text() if fingerprint.exists() else ""               # "": not known
    same = [place for place in found if trained_on in ("", fingerprint_of_model(place))]
    if found and not same:
        raise ValueError(
            f"--model_path={path}: {found[0]} is not the model that the adapter was trained on; put that "
            "model there, or write its new folder into adapter_config.json")
    return settings | {"base_model_name_or_path": str(same[0])} if same else settings


def check_context_length(model: PreTrainedModel, prompt_tokens: int, completion_tokens: int) -> None:
    """Raise ValueError if the longest prompt and completion together exceed the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and prompt_tokens + completion_tokens > limit:
        raise ValueError(
            f"--generation_max_length={completion_tokens}: with prompts of up to {prompt_tokens} tokens that "
            f"exceeds the model's {limit} positions; at most {max(0, limit - prompt_tokens)}, or shorten the "
            "prompts (train.py: --max_prompt_length)")


def full_state_dict(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's state_dict, gathered if sharded. Call on all ranks; it is complete on the main rank.

    Tied weights stay one tensor, so they are written once.
    """
    reshard(model)
    weights, first = full_tensor(model.state_dict()), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weights[name] = weights[first.setdefault(parameter, name)]
    return weights


def save_any_policy(model: PreTrainedModel, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load. With an adapter, write only that.

    weights  full_state_dict(model), if it has been gathered already; otherwise all ranks must call this
    """
    weights = full_state_dict(model) if weights is None else weights
    if not is_main():
        return
    if has_adapter(model):
        from engine.adapters import save_adapter

        save_adapter(model, tokenizer, folder, weights)
    else:
        core.save_policy(model, tokenizer, folder, weights)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolve auto: bfloat16 if a GPU or TPU supports it, else float32."""
    if precision != "auto":
        return precision
    if device.type == "xla":
        return "float32" if os.environ.get("PJRT_DEVICE") == "CPU" else "bfloat16"
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)      # of CUDA and XPU
    return "bfloat16" if supported and supported(including_emulation=False) else "float32"
