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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

NAME = "prefix_attention"
QUERIES_PER_CHUNK = 256         # where a window or a soft cap needs scores or masks of a chunk of queries
SCORES_PER_CHUNK = 2**21        # scores of a chunk of rows and queries: 8 megabytes in float32


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
    """Which token of a pass attends to which: `own` covers every token once, `prefix` the completions behind a prompt."""

    own: list[Block]
    prefix: list[Block]
    own_slots: Tensor           # (L,) where a token lies among the queries of `own`, flattened one block after the other
    prefix_query_slots: Tensor  # (L,) the same for `prefix`; one more than there are: nowhere
    prefix_key_slots: Tensor    # (L,) where a token lies among the keys of `prefix`
    store: Callable | None = None               # called with keys and values of each layer (sampling keeps a prompt's)
    layers: dict = field(default_factory=dict)  # modules that have called attend -> their windows

    def attend(self, module, query, key, value, **options) -> Tensor:
        """query (1, H, L, D), key and value (1, K, L, D) -> (1, L, H, D). options: see prefix_attention."""
        self.layers[module] = options["window"]
        if self.store is not None:
            self.store(key, value, options["window"])
        return PrefixAttention.apply(query, key, value, options.pop("sinks"), self, Options(**options))

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


# ---- kernels: (q (B, R, n, D), k and v (B, 1, m, D)) -> output (B, R, n, D), log-sum-exp (B, R, n) ------------------------


class Options(NamedTuple):
    """What a layer asks of its attention."""

    window: int | None          # a query sees less than so many positions back
    softcap: float | None       # scores become softcap * tanh(scores / softcap)
    scaling: float


class FlashOnCPU:
    """torch's flash attention for CPUs. Reads a key head for each of its query heads without a copy (stride 0)."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=options.scaling
        )

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, lse, 0.0, causal, attn_mask=mask, scale=options.scaling
        )
        return of_q, of_k.sum(dim=1, keepdim=True), of_v.sum(dim=1, keepdim=True)


class FlashOnCUDA:
    """torch's flash attention for 16-bit numbers on CUDA. Written after torch's sources; has never run on a GPU."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=options.scaling)
        return output, lse

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)             # random state: there is no dropout
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
            scale=options.scaling,
        )
        return of_q, of_k.sum(dim=1, keepdim=True), of_v.sum(dim=1, keepdim=True)


class EfficientOnCUDA:
    """torch's memory-efficient attention for CUDA, also in float32. Written after torch's sources; has never run on a GPU."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=options.scaling
        )
        return output, lse[:, :, : q.shape[2]]            # rounded up to a multiple of 32

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        k, v = (part.expand(-1, q.shape[1], -1, -1) for part in (k, v))
        lse, unused = pad(lse, (0, -lse.shape[2] % 32)), torch.zeros((), dtype=torch.int64, device=q.device)
        of_q, of_k, of_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, output, lse, unused, unused, 0.0, [True, True, True, False], causal, scale=options.scaling
        )
        return of_q, of_k.sum(dim=1, keepdim=True), of_v.sum(dim=1, keepdim=True)


class Chunked:
    """Matrix products and a softmax in float32, a chunk of rows and queries at a time. For every device and every option.

    The query heads of a key head are folded into the queries, so keys are read once for all of them.
    """

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        output = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.float32 if q.dtype != torch.float64 else q.dtype, device=q.device)
        for rows, at, seen in chunks(q, k, causal):
            scores, _ = masked_scores(q, k, mask, causal, options, rows, at, seen)
            lse[rows, :, at] = scores.logsumexp(dim=-1)
            probs = (scores - lse[rows, :, at, None]).exp_()
            output[rows, :, at] = folded(probs.to(v.dtype), v[rows, :, seen])
        return output, lse

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros_like(part, dtype=lse.dtype) for part in (k, v))
        delta = (grad * output).sum(dim=-1, keepdim=True, dtype=lse.dtype)       # (B, R, n, 1)
        for rows, at, seen in chunks(q, k, causal):
            scores, slope = masked_scores(q, k, mask, causal, options, rows, at, seen)
            probs = (scores - lse[rows, :, at, None]).exp_()
            of_v[rows, :, seen] += folded_transposed(probs.to(grad.dtype), grad[rows, :, at])
            of_scores = folded(grad[rows, :, at], v[rows, :, seen].mT) - delta[rows, :, at]
            of_scores = probs * of_scores * options.scaling if slope is None else probs * of_scores * slope * options.scaling
            of_q[rows, :, at] = folded(of_scores.to(k.dtype), k[rows, :, seen])
            of_k[rows, :, seen] += folded_transposed(of_scores.to(q.dtype), q[rows, :, at])
        return of_q, of_k, of_v


def chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, queries, keys) whose scores fit SCORES_PER_CHUNK; of a causal block only keys up to the last query."""
    (rows, heads, queries, _), keys = q.shape, k.shape[2]
    length = min(queries, QUERIES_PER_CHUNK, max(1, SCORES_PER_CHUNK // (heads * keys)))
    count = max(1, SCORES_PER_CHUNK // (heads * keys * length))
    for row in range(0, rows, count):
        for at in range(0, queries, length):
            end = min(at + length, queries)
            yield slice(row, row + count), slice(at, end), slice(0, end if causal else keys)


def masked_scores(q, k, mask, causal: bool, options: Options, rows: slice, at: slice, seen: slice):
    """Scores (b, R, n, m) of a chunk in at least float32, and the slope of the soft cap, if there is one."""
    scores = folded(q[rows, :, at], k[rows, :, seen].mT)
    scores, slope = scores.to(torch.promote_types(scores.dtype, torch.float32)) * options.scaling, None
    if options.softcap:
        bent = torch.tanh(scores / options.softcap)
        scores, slope = bent * options.softcap, 1 - bent**2
    if mask is not None:
        scores = scores + mask[rows, :, at, seen]
    elif causal:
        number = torch.arange(seen.stop, device=q.device)
        scores = scores.masked_fill(number[at, None] < number, lowest_of(scores.dtype))
    return scores, slope


def folded(left: Tensor, right: Tensor) -> Tensor:
    """left (b, R, n, i) @ right (b, 1, i, j) -> (b, R, n, j), as one product for all R."""
    return (left.flatten(1, 2) @ right[:, 0]).unflatten(1, left.shape[1:3])


def folded_transposed(left: Tensor, right: Tensor) -> Tensor:
    """The sum over R of left (b, R, n, i) transposed @ right (b, R, n, j) -> (b, 1, i, j)."""
    return (left.flatten(1, 2).mT @ right.flatten(1, 2))[:, None]


def choose_kernel(device: str, dtype: torch.dtype, head_sizes: tuple[int, int], masked: bool, softcap: bool):
    """The kernel for a block: by device type, numbers, sizes of a key's and a value's head, window or padding, soft cap.

    Sinks need no kernel of their own: they are joined to the result.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if softcap or head_sizes[0] != head_sizes[1]:
        return Chunked
    if device == "cpu":
        return FlashOnCPU
    if device == "cuda" and not masked and (half or dtype == torch.float32):
        return FlashOnCUDA if half and head_sizes[0] <= 256 else EfficientOnCUDA
    return Chunked


# ---- the attention of a pass -----------------------------------------------------------------------------------------


def kernel_calls(block: Block, q: Tensor, v: Tensor, options: Options) -> Iterator[tuple]:
    """(kernel, queries, keys, mask, causal) of the calls that a block takes, for rows q (K * b, R, n, D) and v (K * b, 1, m, D).

    One call, or with a window one for each chunk of queries, over the keys that they may see.
    """
    window, queries, keys = options.window, q.shape[2], v.shape[2]
    masked = block.padded_keys or (window is not None and block.longest_distance >= window)
    kernel = choose_kernel(q.device.type, q.dtype, (q.shape[-1], v.shape[-1]), masked, options.softcap is not None)
    if not masked:
        yield kernel, slice(0, queries), slice(0, keys), None, block.causal
        return
    for start in range(0, queries, QUERIES_PER_CHUNK):
        end = min(start + QUERIES_PER_CHUNK, queries)
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
        output, lse = half_forward(layout.own, layout.own_slots, q, k, v, options)
        if layout.prefix:
            other, other_lse = half_forward(layout.prefix, layout.prefix_query_slots, q, k, v, options)
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


def joined(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of keys from a softmax over each: outputs (K, L, R, D), log-sum-exps (K, L, R)."""
    both = torch.stack([lse, other_lse])
    total = both.logsumexp(dim=0)
    first, second = (both - total).exp_()[..., None]
    return (output * first + other * second).to(output.dtype), total


def with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Join a key of score `sinks` and value 0 to the others: output (..., D), lse and sinks (...), broadcast."""
    total = torch.stack(torch.broadcast_tensors(lse, sinks.to(lse.dtype))).logsumexp(dim=0)
    return (output * (lse - total).exp_()[..., None]).to(output.dtype), total


def lowest_of(dtype: torch.dtype) -> float:
    """The score of a masked key: finite, so a query that sees no key of a block gets weight 0 there, not NaN."""
    return max(-1e30, torch.finfo(dtype).min)


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """(K, L, ..., D), index (b, n) -> (K * b, n, ..., D)."""
    return x[:, index.flatten()].unflatten(1, index.shape).flatten(0, 1)


def as_queries(x: Tensor, index: Tensor) -> Tensor:
    """(K, L, R, D), index (b, n) -> (K * b, R, n, D)."""
    return rows_of(x, index).transpose(1, 2)


def half_forward(blocks: list[Block], slots: Tensor, q, k, v, options: Options) -> tuple[Tensor, Tensor]:
    """One half of the attention: output (K, L, R, D), log-sum-exp (K, L, R). A token that is in no block gets 0, -inf."""
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
    return picked(outputs, slots, 0.0), picked(totals, slots, -torch.inf)


def half_backward(blocks, query_slots, key_slots, grad, q, k, v, output, lse, options: Options):
    """Gradients of q (K, L, R, D), k and v (K, L, D) through one half of the attention."""
    gradients: list[list[Tensor]] = [[], [], []]
    for block in blocks:
        rows_grad, rows_q, rows_output = (as_queries(part, block.queries) for part in (grad, q, output))
        rows_k, rows_v = (rows_of(part, block.keys)[:, None] for part in (k, v))
        padding = (block.query_positions < 0).repeat(len(k), 1)[:, None]         # (K * b, 1, n)
        # Padding repeats a token, and must not count twice: exp(score - inf) = 0.
        rows_lse = rows_of(lse, block.queries).transpose(1, 2).masked_fill(padding, torch.inf)
        of_q, of_k, of_v = torch.empty_like(rows_q), torch.zeros_like(rows_k), torch.zeros_like(rows_v)
        for kernel, at, seen, mask, causal in kernel_calls(block, rows_q, rows_v, options):
            of_q[:, :, at], part_k, part_v = kernel.backward(
                rows_grad[:, :, at], rows_q[:, :, at], rows_k[:, :, seen], rows_v[:, :, seen], rows_output[:, :, at],
                rows_lse[:, :, at].contiguous(), mask, causal, options,
            )
            of_k[:, :, seen] += part_k
            of_v[:, :, seen] += part_v
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
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (part.to(torch.get_autocast_dtype(query.device.type)) for part in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return token_layout.attend(
            module, query, key.to(query.dtype), value.to(query.dtype), window=sliding_window, softcap=softcap,
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
