"""
Load and save models from a hub, with a LoRA adapter, in 16 bits, sharded over processes, on XLA, and with
gradient checkpointing. For float32 weights in one process, model.py does the same.

Parts of a model that do not process text are frozen. Layers compute in 16 bits under autocast, and frozen
weights are stored in 16 bits; trained weights, embeddings, norms and the head are float32.
Not supported: quantised weights; training on images or sound.
"""

import copy
import json
import os
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForCausalLM,
    AutoModelForImageTextToText, PreTrainedModel,
)
from transformers.utils import logging

import model as core
from engine.devices import is_main
from engine.errors import in_one_line
from engine.fingerprints import fingerprint_of_model
from engine.sharding import full_tensor, loading_shards, reshard, set_tensor, shard, shard_weights
from engine.text_model import freeze_towers, has_adapter, layers_of, text_model

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
        return with_precision(model, model_config.precision), tokenizer


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


def auto_class(architecture):
    """Return the class of transformers that loads a configuration's model. Mistral 3 has no text class."""
    kind = type(architecture)
    with_images = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


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


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the model to a device, in place. XLA creates new parameters, so shared ones are tied again."""
    model.to(device)
    if isinstance(model, PreTrainedModel) and not hasattr(model, "mesh"):        # sharded: already there
        model.tie_weights()
        shard_weights(model)
    return model


@contextmanager
def moved_to(model: PreTrainedModel, device: torch.device):
    """Move the model to a device within the context, and back afterwards."""
    original = next(model.parameters()).device
    try:
        yield model if original == device else move(model, device)
    finally:
        if original != device:
            move(model, original)


def check_context_length(model: PreTrainedModel, prompt_tokens: int, completion_tokens: int) -> None:
    """Raise ValueError if the longest prompt and completion together exceed the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and prompt_tokens + completion_tokens > limit:
        raise ValueError(
            f"--generation_max_length={completion_tokens}: with prompts of up to {prompt_tokens} tokens that "
            f"exceeds the model's {limit} positions; at most {max(0, limit - prompt_tokens)}, or shorten the "
            "prompts (train.py: --max_prompt_length)")


def make_reference(model: PreTrainedModel, *, exact: bool = False):
    """Return a reference without gradients: a copy of the model, or only of its adapter.

    exact  keep all weights in float32 for a moving average, whose small steps 16 bits would round to nothing
    """
    if has_adapter(model):
        from engine.adapters import AdapterReference

        return AdapterReference(model)
    if not hasattr(model, "mesh"):
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        return reference if exact else round_frozen_weights(reference)
    with torch.device("meta"):
        reference = auto_class(model.config).from_config(model.config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        set_tensor(reference, name, torch.nn.Parameter(parameter.detach().clone()))
    for name, buffer in model.named_buffers():
        set_tensor(reference, name, buffer.clone())
    reference.tie_weights()
    reference = with_precision(reference.eval(), precision_of(model)).requires_grad_(False)
    shard(reference if exact else round_frozen_weights(reference), model.mesh)
    return reference


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each layer, and forward the layer again in the backward pass.

    The option for this in transformers works only in training mode, which has dropout.
    """
    from engine.prefix_attention import use_prefix_attention  # only for this

    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"--gradient_checkpointing=True: {type(model).__name__} has no layers that support it; remove it")

    def recomputed(forward, *args, **kwargs):
        attention = partial(use_prefix_attention, model) if "token_layout" in kwargs else nullcontext
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), attention()), **kwargs)

    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


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


# ---- precision ---------------------------------------------------------------------------------------------


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolve auto: bfloat16 if a GPU or TPU supports it, else float32."""
    if precision != "auto":
        return precision
    if device.type == "xla":
        return "float32" if os.environ.get("PJRT_DEVICE") == "CPU" else "bfloat16"
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)      # of CUDA and XPU
    return "bfloat16" if supported and supported(including_emulation=False) else "float32"


def with_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """Make the layers compute in bfloat16 or float16; the head stays in float32. Returns the model."""
    model.precision = "float32" if precision == "auto" else precision            # auto: see resolve_precision
    if precision_of(model) != "float32":
        forward = model.base_model.forward
        model.base_model.forward = partial(under_autocast, getattr(torch, precision), forward)
        round_frozen_weights(model)
    return model


def round_frozen_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Store the frozen matrices of the layers in the precision of the layers. Returns the model.

    Autocast would convert them in every pass, so results stay bit-identical; only a mixture's experts are in
    float32 while they are trained. Embeddings and head stay in float32, and so does everything that autocast
    does not convert: matrices that are not factors of a product, and in float16 experts.
    """
    head, dtype = model.get_output_embeddings().weight, getattr(torch, precision_of(model))
    for module in text_model(model).modules():
        if dtype == torch.float16 and "Experts" in type(module).__name__:
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            is_matrix = weight.ndim > 1 and not isinstance(module, torch.nn.Embedding) and weight is not head
            is_factor = is_matrix and name != "A_log" and not name.endswith("bias")
            if is_factor and not weight.requires_grad:
                setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
    return model


def under_autocast(dtype: torch.dtype, forward, *args, **kwargs):
    """Call a method of a model under autocast, on the model's current device."""
    with torch.autocast(forward.__self__.device.type, dtype=dtype):
        return forward(*args, **kwargs)


def precision_of(model: PreTrainedModel) -> str:
    """Return the precision of the layers, as set by with_precision."""
    return getattr(model, "precision", "float32")


def is_exact(model: PreTrainedModel) -> bool:
    """Return True if the layers compute in float32 throughout, and not in 16 bits or, on CUDA, in TF32."""
    return precision_of(model) == "float32" and torch.get_float32_matmul_precision() == "highest"
