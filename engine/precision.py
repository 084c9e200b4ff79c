"""
Precision: layers that compute in 16 bits under autocast, and frozen weights that are stored in 16 bits.

Weights that are trained, embeddings, norms and the head are float32.
"""

import os
from functools import partial

import torch
from transformers import PreTrainedModel

from engine.text_model import text_model


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision that auto stands for: bfloat16 if a GPU or TPU computes in it, else float32."""
    if precision != "auto":
        return precision
    if device.type == "xla":
        return "float32" if os.environ.get("PJRT_DEVICE") == "CPU" else "bfloat16"
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)      # of CUDA and XPU
    return "bfloat16" if supported and supported(including_emulation=False) else "float32"


def with_precision(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """Let the layers compute in bfloat16 or float16; the head stays in float32. Returns the model."""
    model.precision = "float32" if precision == "auto" else precision            # auto: see resolve_precision
    if precision_of(model) != "float32":
        forward = model.base_model.forward
        model.base_model.forward = partial(under_autocast, getattr(torch, precision), forward)
        round_frozen_weights(model)
    return model


def round_frozen_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Store the frozen matrices of the layers in the precision of the layers. Returns the model.

    They would be converted in every pass, so results stay the same bit for bit; only a mixture's experts are
    in float32 while they are trained. Embeddings and head stay in float32, and what autocast leaves: matrices
    that are no factors, and in float16 experts.
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
