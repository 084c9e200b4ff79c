"""
Bytes of a training pass and of sampling beside the weights, from the shapes of a model's matrices.

A layer keeps what goes into its matrices and comes out of them; the other tensors of a pass are taken to be
shares of that. The constants were fitted to the bytes of real passes (tests/runs/test_memory_estimate.py).
Models may be on the meta device, where they have shapes and no values (memory_estimate.py).
Left out on purpose: the states of recurrent layers; fragments of the memory.
"""

from functools import lru_cache

import torch
from transformers import PreTrainedModel

from engine.adapters import has_adapter
from engine.chunked_head import chunk_size
from engine.precision import matrices_of_layers, precision_of
from engine.recomputation import layers_of
from engine.text_model import text_model

LOGITS = 6.5                    # tensors of the size of logits that exist at once, with top-p over all tokens
MATRICES = 1.15                 # kept by a layer: this many times the inputs and outputs of its matrices,
IN_PYTHON = 1.32                # and so many times that if an activation is several operations in Python
BACKWARD = 1.2                  # bytes of a layer in its backward pass, in bytes that it keeps
FORWARD = 3                     # the same without a gradient, in inputs and outputs of its widest matrix


def widths(model: PreTrainedModel, layer: torch.nn.Module) -> list[tuple[int, bool]]:
    """Return for each matrix of a layer how many numbers of a token go in and out, and if it is of experts.

    Of the active experts. Adapters are left out.
    """
    config = model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1
    matrices = (p for name, p in layer.named_parameters() if p.ndim in (2, 3) and "lora_" not in name)
    return [(sum(p.shape[-2:]) * (active if p.ndim == 3 else 1), p.ndim == 3) for p in matrices]


@lru_cache(maxsize=16)
def bytes_of_layers(model: PreTrainedModel, row_length: int) -> list[float]:
    """Return the bytes that each layer of the text model keeps of a token for its backward pass.

        matrices    MATRICES * size * (inputs + outputs)    size is 4, or 2 in 16 bits
        norms       4 * (x, x / rms(x))                     with LoRA not x / rms(x)

    row_length  of plain rows, which keep a mask, or with eager attention scores; 0 in a packed pass
    """
    config, frozen = model.config.get_text_config(), has_adapter(model)
    size = 2 if precision_of(model) != "float32" else 4
    size_of_experts = size if frozen else 4               # those that are trained compute in float32
    scores = 2 * config.num_attention_heads if config._attn_implementation == "eager" else 1

    def kept(layer: torch.nn.Module) -> float:
        kinds = [type(module).__name__ for module in layer.modules()]
        of_matrices = (n * (size_of_experts if experts else size) for n, experts in widths(model, layer))
        kept = MATRICES * sum(of_matrices)
        kept += 4 * (1 if frozen else 2) * config.hidden_size * sum("norm" in kind.lower() for kind in kinds)
        in_python = "NewGELUActivation" in kinds or getattr(config, "swiglu_limit", None) is not None
        return kept * (IN_PYTHON if in_python else 1) + 4 * scores * row_length

    return [kept(layer) for layer in layers_of(text_model(model))]


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
    in_layer = tokens * BACKWARD * max(layers) + gradient + tied
    # A layer has freed half of what it has kept when its backward pass takes most.
    kept = len(layers) * hidden if recompute else sum(layers) - max(layers) / 2
    peak = tokens * (6 * hidden + kept) + cast_bytes(model) + max(in_layer, in_head)
    return max(peak, head_gradient + tied)


def sampling_bytes(
    model: PreTrainedModel, prompts: int, rows: int, longest: int, limit: int, shared_prompt: bool = True
) -> float:
    """Return the peak of sampling beyond the weights: keys and values of all layers, and a prefill or a step.

    prompts  that are forwarded at once, of up to `longest` tokens each
    rows     completions that are sampled at once, all up to the limit
    """
    config, layers = model.config.get_text_config(), layers_of(text_model(model))
    types = getattr(config, "layer_types", None) or [None] * len(layers)
    own_keys = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)          # Gemma 4
    size = 2 if precision_of(model) != "float32" and shared_prompt else 4
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    row_length = limit if shared_prompt else longest + limit                     # a plain row has the prompt
    cached = largest = 0
    for layer, layer_type in zip(layers[:own_keys], types, strict=False):
        window = config.sliding_window if layer_type == "sliding_attention" else longest + limit
        dims = filter(None, (getattr(module, "head_dim", None) for module in layer.modules()))
        token = 2 * size * heads * max(dims, default=config.hidden_size // config.num_attention_heads)
        of_rows = token * rows * (row_length if shared_prompt else min(row_length, window))
        cached += of_rows + token * prompts * min(longest, window)
        largest = max(largest, of_rows)                   # copied for more tokens
    widest = max(n for layer in layers for n, _ in widths(model, layer))
    prefill = prompts * longest * FORWARD * 4 * widest
    scores = 4 * 4 * config.num_attention_heads * rows * (longest + limit)
    logits = 4 * LOGITS * rows * len(model.get_output_embeddings().weight)
    return cast_bytes(model) + cached + max(prefill, largest + scores + logits)
