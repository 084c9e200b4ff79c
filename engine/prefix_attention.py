"""
Exact attention in which the completions of a prompt share it, by the attention function of the model.

A pass has its tokens in one row: prompts, then completions. Linear layers process every token once. Attention
splits the tokens into rows: prompts with causal attention, and completions, whose keys are [keys of prompt |
own keys]. The model's function, sdpa or eager, attends within each block of such rows.

The functions here are registered with transformers' AttentionInterface. Models pass the keyword argument
`token_layout` on to them from their forward pass. No mask function of the same name is registered, so
transformers creates no mask.
Not supported: dropout; recurrent layers, which need the plain engine.
Shapes: L tokens of a pass, K key heads, H query heads, D head size; a block has b rows of n queries, with m
keys of a prompt before n of their own.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.errors import CannotShare

NAME = "prefix_attention_by_"  # followed by the name of the model's function: sdpa or eager


class Block(NamedTuple):
    """Rows that attend together, as indices of tokens in the pass, padded by repeating a token."""

    tokens: Tensor              # (b, n), right-padded
    prompts: Tensor             # (b, m), left-padded, so that columns are positions; m = 0: none
    padding: Tensor             # (b or 1, 1, 1, 1) columns of padding in prompts


@dataclass
class TokenLayout:
    """The tokens to which each token attends."""

    blocks: list[Block]
    slots: Tensor               # (L,) position of each token among those of all blocks
    store: Callable | None = None               # called with each layer's keys and values
    layers: dict = field(default_factory=dict)  # modules that have called attend -> their windows
    masks: dict = field(default_factory=dict)   # of blocks, shared by all layers

    def attend(self, function, query, key, value, *, module, source, window, folds, is_sdpa) -> Tensor:
        """Compute attention: query (1, H, L, D), key, value (1, K, L, D) -> (1, L, H, D).

        function  of the model: (module, query, key, value, mask) of a block -> (b, n, H, D), weights
        source    the keys as the layer computed them: the same tensor in layers that share keys
        folds     see attend_folded
        is_sdpa   the function is sdpa, which attends causally without a mask
        """
        self.layers[module] = window
        if self.store is not None:
            self.store(source, key, value)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, H, D)
        outputs = []
        for number, block in enumerate(self.blocks):
            (_, n), m = block.tokens.shape, block.prompts.shape[1]
            first = first_column(m, window)
            keys = torch.cat([block.prompts[:, first:], block.tokens], dim=1)
            rows = (
                x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
                for x, index in ((query, block.tokens), (key, keys), (value, keys)))
            if is_sdpa and m == 0 and (window is None or n <= window):
                output, _ = function(module, *rows, None)
            else:
                mask = self.mask(number, first, window, query.dtype, folds)
                output = attend_folded(function, module, *rows, mask, folds)
            outputs.append(output.flatten(0, 1))                                 # (b * n, H, D)
        return torch.cat(outputs).index_select(0, self.slots)[None]

    def mask(self, number: int, first: int, window: int | None, dtype, folds: int = 1) -> Tensor:
        """Return the additive mask of a block from a column on, (b or 1, 1, folds * n, m + n - first)."""
        key = number, first, window, dtype, folds
        if key not in self.masks:
            block, m = self.blocks[number], self.blocks[number].prompts.shape[1]
            column = torch.arange(m + block.tokens.shape[1], device=self.slots.device)
            visible = attends_to(column[m:, None], column[first:], window) & (column[first:] >= block.padding)
            self.masks[key] = additive_mask(visible.repeat(1, 1, folds, 1), dtype)
        return self.masks[key]


def attend_folded(function, module, query, key, value, mask, folds: int) -> Tensor:
    """Call a model's attention function with the `folds` query heads of each key head folded into one head.

    Otherwise, if there is a mask, sdpa copies the keys for each query head, and autograd keeps the copies.

    query    (b, H, n, D);  key, value  (b, K, m, D);  mask  (b or 1, 1, folds * n, m)
    folds    H / K, or 1 to leave the heads as they are
    returns  (b, n, H, D)
    """
    n = query.shape[2]
    query = query.unflatten(1, (-1, folds)).flatten(2, 3)                        # (b, H', folds * n, D)
    module = SimpleNamespace(num_key_value_groups=1) if folds > 1 else module
    output, _ = function(module, query, key, value, mask)                        # (b, folds * n, H', D)
    return output.unflatten(1, (folds, n)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def first_column(width: int, window: int | None) -> int:
    """Return the first column of a prompt of this width to which a token behind it attends."""
    return max(0, width - max(1, window - 1)) if window else 0


def attends_to(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return True where a query position attends to a key position: not a later one, and in the window."""
    return (key <= query) & (key > query - window) if window else key <= query


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive form of a mask (..., n, m): 0 where it is True, else a large negative number.

    Rows begin at multiples of 32 bytes, as CUDA's kernel requires.
    """
    shape = *visible.shape[:-1], visible.shape[-1] + -visible.shape[-1] % 16
    mask = torch.full(shape, max(-1e30, torch.finfo(dtype).min), dtype=dtype, device=visible.device)
    return mask[..., : visible.shape[-1]].masked_fill_(visible, 0.0)


def prefix_attention(
    name: str, module, query, key, value, attention_mask=None, *, token_layout=None, dropout=0.0,
    sliding_window=None, softcap=None, **kwargs,
):
    """Compute a layer's attention: query (1, H, L, D), key, value (1, K, L, D) -> (1, L, H, D), None.

    name          of the model's function, sdpa or eager
    token_layout  a TokenLayout in a pass over prompts and completions, a PrefixCache while tokens are sampled
    raises        CannotShare if the model does not pass the layout on, or needs an unsupported feature
    """
    if token_layout is None:
        raise CannotShare(f"{type(module).__name__} was not given the layout of its tokens")
    if dropout or kwargs.get("position_bias") is not None:
        raise CannotShare(f"{type(module).__name__}: {dropout=} or a position bias")
    name = "eager" if softcap else name                   # sdpa has no soft caps
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function = partial(ALL_ATTENTION_FUNCTIONS.get_interface(name, eager), softcap=softcap, **kwargs)
    source, device = key, query.device.type
    if torch.is_autocast_enabled(device):
        query = query.to(torch.get_autocast_dtype(device))
    key, value = key.to(query.dtype), value.to(query.dtype)
    with torch.autocast(device, enabled=False):
        return token_layout.attend(
            function, query, key, value, module=module, source=source, window=sliding_window,
            folds=query.shape[1] // key.shape[1] if name == "sdpa" else 1, is_sdpa=name == "sdpa",
        ), None


for name in "sdpa", "eager":
    AttentionInterface.register(NAME + name, partial(prefix_attention, name))


def check_layers(model, layout: TokenLayout) -> None:
    """Raise CannotShare unless every layer of a model got the layout, with the window of its type."""
    text_config = model.config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    layer_types = getattr(text_config, "layer_types", None)
    expected = Counter([window] * text_config.num_hidden_layers)
    if layer_types:  # other types (convolutions, recurrences) never match
        windows = {"full_attention": None, "sliding_attention": window}
        expected = Counter(windows.get(layer_type, layer_type) for layer_type in layer_types)
    found = Counter(layout.layers.values())
    if found != expected:
        raise CannotShare(f"attention layers by window: {dict(found)}, expected {dict(expected)}")


def forward_packed(model, ids: Tensor, positions: Tensor, layout: TokenLayout) -> Tensor:
    """Forward the tokens of a pass, ids and positions (1, L), and return hidden states (1, L, width)."""
    layout.layers.clear()                                 # several models may use one layout
    with use_prefix_attention(model):
        output = model.base_model(input_ids=ids, position_ids=positions, token_layout=layout, use_cache=False)
    check_layers(model, layout)
    return output.last_hidden_state


@contextmanager
def use_prefix_attention(model):
    """Make a model's attention layers call prefix_attention; every pass then needs a token_layout."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    previous = [(each, each._attn_implementation) for each in configs.values()]
    try:
        for each, name in previous:
            each._attn_implementation = NAME + ("eager" if (name or "eager").endswith("eager") else "sdpa")
        yield
    finally:
        for each, name in previous:                       # the whole model's first, then its parts'
            each._attn_implementation = name
