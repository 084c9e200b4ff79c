"""
Attention in which the completions of a prompt share it: forward and backward, exact for unmodified models.

A pass holds its tokens in one row: a prompt, the completions of it, the next prompt, and so on. Linear layers see every
token once. Attention splits in two. Each prompt and each completion attends to itself, causally; each completion attends
to its prompt. Both results are joined by their log-sum-exps, so a prompt's keys and values are never copied for a
completion, and no (tokens, tokens) mask exists (Prefix Grouper, arXiv:2506.05433; Hydragen, arXiv:2402.05099).

The function is registered with transformers' AttentionInterface. Models hand the keyword argument `token_layout` on to it
from their forward pass. There is no mask function of the same name, so transformers makes no mask.
Left out on purpose: dropout; layers that carry state from token to token (they need plain rows).
Shapes: L tokens of a pass, K key heads, R query heads for each, D head size; a block has b rows of n queries and m keys.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from engine import attention_kernels
from engine.attention_kernels import Options, choose_kernel, joined, lowest_of, with_sinks

NAME = "prefix_attention"


# ---- where tokens lie ------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """Rows of queries, and the keys that each row of them attends to: indices of tokens of the pass."""

    queries: Tensor             # (b, n), right-padded by repeating a token
    keys: Tensor                # (b, m)
    query_positions: Tensor     # (b, n); padding: -1
    key_positions: Tensor       # (b, m); padding: 2^30, which no query sees
    causal: bool                # the queries are the keys, and each sees those up to itself
    longest_distance: int       # between a query and a key that it would see without a window
    padded_keys: bool           # not causal, and of different numbers


@dataclass
class TokenLayout:
    """Which token of a pass attends to which: `own` has every token once, but for padding, `prefix` those behind a prompt."""

    own: list[Block]
    prefix: list[Block]
    own_slots: Tensor           # (L,) where a token lies among the queries of `own`, flattened one block after the other
    prefix_query_slots: Tensor  # (L,) the same for `prefix`; one more than there are: nowhere
    prefix_key_slots: Tensor    # (L,) where a token lies among the keys of `prefix`
    store: Callable | None = None               # is given each layer's keys and values: sampling keeps those of prompts
    layers: dict = field(default_factory=dict)  # modules that have called attend -> their windows

    def attend(self, module, query, key, value, *, source, sinks, **options) -> Tensor:
        """query (1, H, L, D), key and value (1, K, L, D) -> (1, L, H, D). options: see prefix_attention."""
        self.layers[module] = options["window"]
        if self.store is not None:
            self.store(source, key, value, options["window"])
        return PrefixAttention.apply(query, key, value, sinks, self, Options(**options))

    def to(self, device) -> "TokenLayout":
        """The same on a device."""
        def moved(blocks):
            return [Block(*(part.to(device) if isinstance(part, Tensor) else part for part in vars(block).values()))
                    for block in blocks]

        slots = (self.own_slots, self.prefix_query_slots, self.prefix_key_slots)
        return TokenLayout(moved(self.own), moved(self.prefix), *(part.to(device) for part in slots))


def attends_to(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Whether a query sees a key of its block: not the future, and less than `window` positions back. (b, n, m) bool.

    A completion's positions go on from its prompt's, so one rule serves both halves of the attention.
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


# ---- the attention of a pass -----------------------------------------------------------------------------------------


def kernel_calls(block: Block, q: Tensor, v: Tensor, options: Options) -> Iterator[tuple]:
    """(kernel, queries, keys, mask, causal) of the calls that a block takes; q (K * b, R, n, D), v (K * b, 1, m, D).

    One call, or with a window one for each chunk of queries, over the keys that they may see.
    """
    window, queries, keys, size = options.window, q.shape[2], v.shape[2], attention_kernels.QUERIES_PER_CHUNK
    masked = block.padded_keys or (window is not None and block.longest_distance >= window)
    kernel = choose_kernel(q.device.type, q.dtype, (q.shape[-1], v.shape[-1]), masked, options.softcap is not None)
    if not masked:
        yield kernel, slice(0, queries), slice(0, keys), None, block.causal
        return
    for start in range(0, queries, size):
        end = min(start + size, queries)
        if block.causal:
            seen = slice(max(0, start - window + 1), end)
        else:                                             # right-aligned: the last column is the end of a prompt
            seen = slice(max(0, keys - max(1, window - 1)) if window else 0, keys)
        visible = attends_to(block.query_positions[:, start:end], block.key_positions[:, seen], window)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, lowest_of(q.dtype))
        yield kernel, slice(start, end), seen, mask.repeat(len(q) // len(mask), 1, 1)[:, None], False


class PrefixAttention(torch.autograd.Function):
    """query (1, H, L, D), key and value (1, K, L, D), sinks (H,) or None -> (1, L, H, D).

    A softmax over two sets of keys, from a softmax over each: with l = log(exp(l1) + exp(l2)),
    output = exp(l1 - l) output1 + exp(l2 - l) output2. A sink is a third set with one score and value 0. Backward, each
    kernel gets the joint output and l, and so computes its part of the joint gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, layout: TokenLayout, options: Options):
        q, k, v = by_key_head(query, key.shape[1]), key[0], value[0]             # (K, L, R, D), (K, L, D) twice
        output, lse = half_forward(layout.own, layout.own_slots, q, k, v, options, nowhere=0.0)
        if layout.prefix:
            other, other_lse = half_forward(layout.prefix, layout.prefix_query_slots, q, k, v, options, nowhere=-torch.inf)
            output, lse = joined(output, lse, other, other_lse)
        if sinks is not None:
            output, lse = with_sinks(output, lse, sinks.view(len(k), 1, -1))
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.layout, ctx.options = layout, options
        return output.transpose(0, 1).flatten(1, 2)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, sinks, output, lse = ctx.saved_tensors
        q, k, v, layout = by_key_head(query, key.shape[1]), key[0], value[0], ctx.layout
        grad = grad[0].unflatten(1, (len(k), -1)).transpose(0, 1)                # (K, L, R, D)
        known = grad, q, k, v, output, lse, ctx.options
        of_q, of_k, of_v = half_backward(layout.own, layout.own_slots, layout.own_slots, *known)
        if layout.prefix:
            more = half_backward(layout.prefix, layout.prefix_query_slots, layout.prefix_key_slots, *known)
            of_q, of_k, of_v = of_q + more[0], of_k + more[1], of_v + more[2]
        of_sinks = None
        if sinks is not None:
            weight = (sinks.view(len(k), 1, -1) - lse).exp_()                    # (K, L, R)
            of_sinks = -(weight * (grad * output).sum(dim=-1)).sum(dim=1).flatten().to(sinks.dtype)
        of_query = of_q.transpose(1, 2).flatten(0, 1)[None]                      # (K, L, R, D) -> (1, H, L, D)
        return of_query, of_k[None], of_v[None], of_sinks, None, None


def by_key_head(query: Tensor, key_heads: int) -> Tensor:
    """(1, H, L, D) -> (K, L, R, D), a view."""
    return query[0].unflatten(0, (key_heads, -1)).transpose(1, 2)


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """(K, L, ..., D), index (b, n) -> (K * b, n, ..., D)."""
    return x[:, index.flatten()].unflatten(1, index.shape).flatten(0, 1)


def as_queries(x: Tensor, index: Tensor) -> Tensor:
    """(K, L, R, D), index (b, n) -> (K * b, R, n, D)."""
    return rows_of(x, index).transpose(1, 2)


def half_forward(blocks: list[Block], slots: Tensor, q, k, v, options: Options, nowhere: float) -> tuple[Tensor, Tensor]:
    """One half of the attention: output (K, L, R, D), log-sum-exp (K, L, R). A token that is in no block gets 0, nowhere."""
    outputs, totals = [], []
    for block in blocks:
        rows_q = as_queries(q, block.queries)                                    # (K * b, R, n, D)
        rows_k, rows_v = (rows_of(part, block.keys)[:, None] for part in (k, v))                 # (K * b, 1, m, D)
        parts = [
            kernel.forward(rows_q[:, :, at], rows_k[:, :, seen], rows_v[:, :, seen], mask, causal, options)
            for kernel, at, seen, mask, causal in kernel_calls(block, rows_q, rows_v, options)
        ]
        output, lse = (torch.cat(part, dim=2) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
        outputs.append(by_token(output.transpose(1, 2), len(k)))
        totals.append(by_token(lse.transpose(1, 2), len(k)))
    return picked(outputs, slots, 0.0), picked(totals, slots, nowhere)


def half_backward(blocks, query_slots, key_slots, grad, q, k, v, output, lse, options: Options):
    """Gradients of q (K, L, R, D), k and v (K, L, D) through one half of the attention."""
    gradients: list[list[Tensor]] = [[], [], []]
    for block in blocks:
        rows_grad, rows_q, rows_output = (as_queries(part, block.queries) for part in (grad, q, output))
        rows_k, rows_v = (rows_of(part, block.keys)[:, None] for part in (k, v))
        padding = (block.query_positions < 0).repeat(len(k), 1)[:, None]         # (K * b, 1, n)
        # Padding repeats a token, and must not count twice: exp(score - inf) = 0.
        rows_lse = rows_of(lse, block.queries).transpose(1, 2).masked_fill(padding, torch.inf)
        of_q, of_k, of_v = [], torch.zeros_like(rows_k), torch.zeros_like(rows_v)
        for kernel, at, seen, mask, causal in kernel_calls(block, rows_q, rows_v, options):
            part_q, part_k, part_v = kernel.backward(
                rows_grad[:, :, at], rows_q[:, :, at], rows_k[:, :, seen], rows_v[:, :, seen], rows_output[:, :, at],
                rows_lse[:, :, at].contiguous(), mask, causal, options,
            )
            of_q.append(part_q)
            of_k[:, :, seen] += part_k
            of_v[:, :, seen] += part_v
        of_q = torch.cat(of_q, dim=2) if len(of_q) > 1 else of_q[0]
        for found, part in zip(gradients, (of_q.transpose(1, 2), of_k[:, 0], of_v[:, 0]), strict=True):
            found.append(by_token(part, len(k)))
    return [picked(found, at, 0.0) for found, at in zip(gradients, (query_slots, key_slots, key_slots), strict=True)]


def by_token(rows: Tensor, key_heads: int) -> Tensor:
    """(K * b, n, ...) -> (K, b * n, ...)."""
    return rows.unflatten(0, (key_heads, -1)).flatten(1, 2)


def picked(parts: list[Tensor], slots: Tensor, nowhere: float) -> Tensor:
    """Blocks (K, b * n, ...) one after the other -> (K, L, ...), for each token what lies at its slot."""
    end = parts[0].new_full((parts[0].shape[0], 1, *parts[0].shape[2:]), nowhere)
    return torch.cat([*parts, end], dim=1)[:, slots]


# ---- the attention of a new token ------------------------------------------------------------------------------------


@dataclass
class Siblings:
    """Which of R rows belong to the same of P prompts: the rows of a prompt as one matrix, so its keys are read once."""

    rows: Tensor                # (P, S) rows of each prompt; what is not used is row 0
    slots: Tensor               # (R,) where each row lies in that table
    in_order: bool              # the table is 0, 1, 2, ...: views do

    def together(self, x: Tensor, heads: int) -> Tensor:
        """(R * K, r, n) -> (P * K, S * r, n)."""
        x = x.unflatten(0, (-1, heads))
        x = (x if self.in_order else x[self.rows.flatten()]).unflatten(0, self.rows.shape)
        return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def apart(self, x: Tensor, heads: int) -> Tensor:
        """(P * K, S * r, n) -> (R * K, r, n)."""
        x = x.unflatten(1, (self.rows.shape[1], -1)).unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
        return (x if self.in_order else x[self.slots]).flatten(0, 1)


def decode_in_one_softmax(
    query, keys, values, prompt_keys, prompt_values, prompt_mask, own_mask, sinks, siblings: Siblings, options: Options
) -> Tensor:
    """The attention of one new token a row to [its prompt | its own columns].

    query   (R * K, r, D): r query heads for each key head of each row; returns the same
    keys    (R * K, C, D) of the rows, prompt_keys (P * K, Tp, D), and values
    masks   (R * K, 1, C) and (R * K, 1, Tp) or None, to be added to the scores
    sinks   (H,) or None
    """
    heads, query = len(prompt_keys) // len(siblings.rows), query * options.scaling
    prompt = siblings.apart(siblings.together(query, heads).bmm(prompt_keys.mT), heads)          # (R * K, r, Tp)
    if options.softcap:
        own = torch.tanh(query.bmm(keys.mT) / options.softcap) * options.softcap + own_mask      # (R * K, r, C)
        prompt = torch.tanh(prompt / options.softcap) * options.softcap
    else:
        own = torch.baddbmm(own_mask, query, keys.mT)
    parts = [prompt if prompt_mask is None else prompt + prompt_mask, own]
    if sinks is not None:
        parts.append(sinks.view(heads, -1, 1).repeat(len(query) // heads, 1, 1))
    probs, width = torch.cat(parts, dim=-1).softmax(dim=-1), prompt.shape[-1]
    output = siblings.apart(siblings.together(probs[..., :width], heads).bmm(prompt_values), heads)
    return torch.baddbmm(output, probs[..., width : width + keys.shape[1]], values)


def decode_in_halves(
    query, keys, values, prompt_keys, prompt_values, prompt_mask, own_mask, sinks, siblings: Siblings, options: Options
) -> Tensor:
    """The same for 16-bit numbers: with the kernels of a pass, one half at a time, so that sampler and trainer round alike."""
    heads, sizes = len(prompt_keys) // len(siblings.rows), (keys.shape[-1], values.shape[-1])

    def half(q, k, v, mask):                              # q (n, r, D), k and v (n, m, D), mask (n, r, m) or None
        kernel = choose_kernel(q.device.type, q.dtype, sizes, mask is not None, options.softcap is not None)
        mask = mask if mask is None else mask[:, None]
        return (part[:, 0] for part in kernel.forward(q[:, None], k[:, None], v[:, None], mask, False, options))

    prompt_mask, own_mask = (part if part is None else part.expand(-1, query.shape[1], -1) for part in (prompt_mask, own_mask))
    if prompt_mask is not None:
        prompt_mask = siblings.together(prompt_mask, heads)
    prompt, prompt_lse = half(siblings.together(query, heads), prompt_keys, prompt_values, prompt_mask)
    prompt, prompt_lse = siblings.apart(prompt, heads), siblings.apart(prompt_lse[..., None], heads)[..., 0]
    output, lse = joined(*half(query, keys, values, own_mask), prompt, prompt_lse)
    return output if sinks is None else with_sinks(output, lse, sinks.view(heads, -1).repeat(len(query) // heads, 1))[0]


# ---- what transformers calls -------------------------------------------------------------------------------------------


def prefix_attention(
    module, query, key, value, attention_mask=None, *, token_layout=None, scaling=None, dropout=0.0, sliding_window=None,
    softcap=None, s_aux=None, **kwargs,
):
    """What transformers calls in each attention layer: query (1, H, L, D), key, value (1, K, L, D) -> (1, L, H, D), None.

    token_layout  a TokenLayout in a pass over prompts and completions, a PrefixCache while tokens are sampled
    s_aux         (H,) attention sinks
    raises        AssertionError where a model does not hand the layout on
    """
    assert token_layout is not None, f"{type(module).__name__} was not given the layout of its tokens"
    assert dropout == 0 and kwargs.get("position_bias") is None, f"{type(module).__name__}: {dropout=} or a position bias"
    source, device = key, query.device.type               # layers that share keys are given the same tensor
    if torch.is_autocast_enabled(device):
        query = query.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return token_layout.attend(
            module, query, key.to(query.dtype), value.to(query.dtype), source=source, window=sliding_window, softcap=softcap,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, sinks=s_aux,
        ), None


AttentionInterface.register(NAME, prefix_attention)


def check_layers(model, layout: TokenLayout) -> None:
    """Assert that every attention layer of a model was given the layout in a pass, each with the window of its kind."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    expected = [window] * config.num_hidden_layers
    if kinds:
        windows = {"full_attention": None, "sliding_attention": window}
        expected = [windows.get(kind, kind) for kind in kinds]                   # convolutions, recurrences: never found
    found = Counter(layout.layers.values())
    assert found == Counter(expected), f"attention layers by window: {dict(found)}, expected {dict(Counter(expected))}"


def forward_packed(model, ids: Tensor, positions: Tensor, layout: TokenLayout) -> Tensor:
    """Forward the tokens of a pass, ids and positions (1, L). Returns hidden states (1, L, width)."""
    layout.layers.clear()                                 # several models may be forwarded with one layout
    with use_prefix_attention(model):
        output = model.base_model(input_ids=ids, position_ids=positions, token_layout=layout, use_cache=False)
    check_layers(model, layout)
    return output.last_hidden_state


@contextmanager
def use_prefix_attention(model):
    """Let a model's attention layers call prefix_attention for a while. Each pass then needs its token_layout."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    kept = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config, _ in kept:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in kept:
            config._attn_implementation_internal = name
