"""
Bytes of a training pass and of sampling beside the weights: formulas of the widths of a model's layers.

Models may be on the meta device, where they have shapes and no values (memory_estimate.py).
Left out on purpose: the states of recurrent layers; fragments of the memory; small tensors, for which the
formulas are rounded up instead.
H hidden size, Q and K widths of a layer's queries and of its keys (heads times head size), M columns of its
MLP, V vocabulary.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.adapters import has_adapter
from engine.chunked_head import chunk_size
from engine.precision import matrices_of_layers, precision_of
from engine.recomputation import layers_of
from engine.text_model import text_model

LOGITS = 6.5                    # tensors of the size of logits that exist at once, with top-p over all tokens
SMALL_TENSORS = 1.05            # kept by a layer beside those of the formula, such as one number for each row


class LayerBytes(NamedTuple):
    """Hold the bytes of a layer for each token."""

    kept: float                 # for the backward pass
    backward: float             # beside them, while the backward pass is in the layer
    forward: float              # while the layer is forwarded without a gradient
    cached: float               # keys and values of sampling, in float32


@lru_cache(maxsize=16)
def bytes_of_layers(model: PreTrainedModel, row_length: int) -> list[LayerBytes]:
    """Return the bytes of each layer of the text model. row_length: of plain rows, 0 in a packed pass."""
    return [layer_bytes(model, layer, row_length) for layer in layers_of(text_model(model))]


def layer_bytes(model: PreTrainedModel, layer: torch.nn.Module, row_length: int) -> LayerBytes:
    """Return the bytes of a layer, which for its backward pass keeps for each token

        norms            4 * (x, x / rms(x))                         with LoRA not x / rms(x)
        linear layers    size * their inputs                         in 16 bits each has a copy of its own
        attention        size * (queries, keys, values, output)      no (tokens, tokens) matrix
        MLP              size * (gate, act(gate), up)
        experts          see expert_bytes

    with size 4, or 2 in 16 bits. Plain rows also keep a mask of row_length, or with eager attention scores.
    """
    config, half, lora = model.config.get_text_config(), precision_of(model) != "float32", has_adapter(model)
    size, hidden, heads = 2 if half else 4, config.hidden_size, config.num_attention_heads
    kinds = {type(module).__name__ for module in layer.modules()}
    head_dims = [getattr(module, "head_dim", None) for module in layer.modules()]
    head_dim = max(filter(None, head_dims), default=hidden // heads)
    queries = heads * head_dim
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    norms = inputs = outputs = ranks = 0
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and "norm" in type(module).__name__.lower():
            all_heads = {"q_norm": queries, "k_norm": keys}.get(name.rpartition(".")[2], 0)
            norms += max(weight.numel(), all_heads)
        elif isinstance(module, (torch.nn.Linear, Conv1D)):
            columns, width = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
            inputs += width * weight.requires_grad
            outputs += columns * ("lora_" not in name)
            ranks += width * ("lora_B" in name)
    up = max(0, outputs - queries - 2 * keys - 2 * hidden)        # 2 M of an MLP with a gate, M without
    if not half:
        inputs = 2 * hidden + queries + up / 2 + ranks
    kept = 4 * norms * (1 if lora else 2) + size * (inputs + 2 * queries + 2 * keys + 1.5 * up)
    # The MLP comes first in the backward pass, and has freed what it kept when attention begins.
    backward = size * max(2 * hidden + 1.5 * up, 8 * queries + 6 * keys - 2 * up)
    forward = size * max(2 * hidden + 1.5 * up, 8 * queries) + 24 * hidden + 4 * lora * up
    if "NewGELUActivation" in kinds:                      # GPT-2: six operations in Python
        kept += size * 3 * up
    if any("Experts" in kind for kind in kinds):
        expert = expert_bytes(config, size, frozen=lora)
        kept, backward, forward = kept + expert.kept, backward + expert.backward, forward + expert.forward
    if row_length:                                        # sdpa repeats keys and values for each query head
        scores = 2 * heads if config._attn_implementation == "eager" else 1
        kept += size * 2 * (queries - keys) + 4 * scores * row_length
    return LayerBytes(SMALL_TENSORS * kept, backward, forward, cached=4 * 2 * keys)


def expert_bytes(config, size: int, frozen: bool) -> LayerBytes:
    """Return the bytes of a token's experts, which keep (token, output, gate, up, act(gate), gated) for each.

    Under an adapter experts are frozen, so the token and `gated` are not kept. Else they compute in float32.
    config  of the text model;  size  4, or 2 in 16 bits
    """
    active = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    columns = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    clamped = 0 if getattr(config, "swiglu_limit", None) is None else 3 * columns          # GPT-OSS
    kept = 4 * (2 * config.hidden_size + 4 * columns + clamped)
    if frozen:
        kept = size * (config.hidden_size + 3 * columns + clamped)
    backward, forward = (4 * active * (2 * config.hidden_size + n * columns) for n in (2, 5))
    return LayerBytes(active * kept, backward, forward, cached=0)


def cast_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the 16-bit copies that autocast keeps of the matrices that are trained."""
    matrices = [weight for _, _, weight in matrices_of_layers(model) if weight.ndim == 2]        # no experts
    return 2 * (precision_of(model) != "float32") * sum(w.numel() for w in matrices if w.requires_grad)


def pass_bytes(model: PreTrainedModel, tokens: int, recompute: bool, row_length: int = 0) -> float:
    """Return the peak of a training pass beyond weights and gradients.

    That is what all layers keep, and more in a layer's backward pass or a chunk of engine/chunked_head.py.

    recompute   --gradient_checkpointing: of all layers but one the input alone is kept
    row_length  tokens of a plain row, 0 in a packed pass
    """
    hidden, layers = 4 * model.config.get_text_config().hidden_size, bytes_of_layers(model, row_length)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    parameters = (p for layer in layers_of(text_model(model)) for p in layer.parameters())
    gradient = 4 * max(parameter.numel() for parameter in parameters if parameter.requires_grad)
    head_gradient = 4 * head.numel() * head.requires_grad
    tied = head_gradient * (head is embedding)            # kept until there is that of the embedding as well
    in_head = 4 * LOGITS * min(tokens, chunk_size(head)) * len(head) + head_gradient
    in_layer = tokens * max(layer.backward for layer in layers) + gradient + tied
    kept, casts = tokens * (6 * hidden + sum(layer.kept for layer in layers)), cast_bytes(model)
    if recompute:
        kept = tokens * hidden * (6 + len(layers))
        # What the layer has kept is freed while its backward pass takes more.
        in_layer += tokens * max(layer.kept - layer.backward / 2 for layer in layers)
        peak = kept + max(casts, in_layer, in_head)       # casts end with the forward pass
    else:
        peak = kept + casts + max(in_layer, in_head)
    return max(peak, head_gradient + tied)


def sampling_bytes(
    model: PreTrainedModel, prompts: int, rows: int, longest: int, limit: int, shared_prompt: bool = True
) -> float:
    """Return the peak of sampling beyond the weights: keys and values of all layers, and a prefill or a step.

    prompts  that are forwarded at once, of up to `longest` tokens each
    rows     completions that are sampled at once, all up to the limit
    """
    config, layers = model.config.get_text_config(), bytes_of_layers(model, 0)
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    own_keys = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)          # Gemma 4
    share = 0.5 if precision_of(model) != "float32" and shared_prompt else 1               # 16 bits
    of_prompts = of_rows = largest = 0.0
    for layer, layer_type in zip(layers[:own_keys], types, strict=False):
        window = config.sliding_window if layer_type == "sliding_attention" else longest + limit
        row_length = limit if shared_prompt else min(longest + limit, window)    # a plain row has the prompt
        of_prompts += share * layer.cached * prompts * min(longest, window)
        of_rows += share * layer.cached * rows * row_length
        largest = max(largest, share * layer.cached * rows * row_length)         # copied for more tokens
    prefill = prompts * longest * max(layer.forward for layer in layers)
    scores = 4 * 4 * config.num_attention_heads * rows * (longest + limit)
    logits = 4 * LOGITS * rows * len(model.get_output_embeddings().weight)
    return cast_bytes(model) + of_prompts + max(prefill, of_rows + largest + scores + logits)
