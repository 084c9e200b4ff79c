"""
Activation checkpointing: keep only the inputs of each layer, and forward it again in the backward pass.
"""

from contextlib import nullcontext
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from engine.prefix_attention import use_prefix_attention
from engine.text_model import layers_of


def recompute_activations(model: PreTrainedModel) -> None:
    """Checkpoint every layer. The switch in transformers works in training mode only, with dropout."""
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"--gradient_checkpointing=True: {type(model).__name__} has no layers made for it; leave it out")

    def recomputed(forward, *args, **kwargs):
        attention = partial(use_prefix_attention, model) if "token_layout" in kwargs else nullcontext
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), attention()), **kwargs,
        )

    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)
