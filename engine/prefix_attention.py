"""
Attention in which the completions of a prompt share it: forward and backward, exact, for unmodified models.

A pass holds its tokens in one row: a prompt, its completions, the next prompt, and so on. Linear layers
process every token once. Attention splits in two. Each prompt and each completion attends to itself,
causally; each completion attends to its prompt. Both results are merged by their log-sum-exps, so a prompt's
keys and values are never copied for a completion, and no (tokens, tokens) mask exists (Prefix Grouper,
arXiv:2506.05433; Hydragen, arXiv:2402.05099).

The function is registered with transformers' AttentionInterface. Models pass the keyword argument
`token_layout` on to it from their forward pass. No mask function of the same name is registered, so
transformers makes no mask.
Not supported: dropout; layers that carry state from token to token (they need plain rows).
Shapes: L tokens of a pass, K key heads, R query heads for each, H = K * R, D head size; a block has b rows of
n queries and m keys. Of a new token: R rows, r query heads for each key head, P prompts of Tp tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from engine import attention_kernels
from engine.attention_kernels import Options, add_sinks, additive_mask, choose_kernel, merge_by_lse
from engine.devices import copy_together
from engine.errors import CannotShare

NAME = "prefix_attention"
PADDED_QUERY, PADDED_KEY = -1, 2**30  # positions of padding: no query attends to such a key


# ---- token layout ------------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Hold rows of queries and the keys that each row attends to, as indices of tokens of the pass."""

    queries: Tensor             # (b, n), right-padded by repeating a token; see Part
    keys: Tensor                # (b, m)
    query_positions: Tensor     # (b, n); PADDED_QUERY on padding
    key_positions: Tensor       # (b, m); PADDED_KEY on padding
    causal: bool                # the keys are the queries, and each query attends to those up to itself
    longest_distance: int       # between a query and a key that it attends to, if there is no window
    padded_keys: bool           # not causal, and rows have different numbers of keys


@dataclass
class TokenLayout:
    """Define which token attends to which: `own` holds every token, `prefix` groups and their prompts."""

    own: list[Block]            # on the CPU
    prefix: list[Block]
    size: int                   # L
    store: Callable | None = None               # called with each layer's keys and values
    layers: dict = field(default_factory=dict)  # modules that have called attend -> their windows
    known: dict = field(default_factory=dict)   # number of key heads -> parts

    def attend(self, module, query, key, value, *, source, sinks, **options) -> Tensor:
        """Compute attention: query (1, H, L, D), key, value (1, K, L, D) -> (1, L, H, D)."""
        self.layers[module] = options["window"]
        if self.store is not None:
            self.store(source, key, value, options["window"])
        return PrefixAttention.apply(query, key, value, sinks, self, Options(**options))

    def parts(self, heads: int, device) -> list["Part"]:
        """Return the parts of the attention for a number of key heads: own, and prefix if there is one."""
        if heads not in self.known:
            both = filter(None, (self.own, self.prefix))
            self.known[heads] = [make_part(blocks, self.size, heads, device) for blocks in both]
        return self.known[heads]


class Part(NamedTuple):
    """Hold where each key head finds its tokens; row l * K + k of a matrix holds token l of head k.

    A GPU copies whole rows several times as fast as it gathers along another dimension.
    """

    blocks: list[Block]         # queries (K * b, n) and keys (K * b, m) are such rows
    query_rows: Tensor          # (L * K,) of each token and head in the flattened, concatenated queries
    key_rows: Tensor            # (L * K,) the same among the keys; the number of these for one in no block


def make_part(blocks: list[Block], size: int, heads: int, device) -> Part:
    """Return a part of a pass of `size` tokens, on a device."""
    def of_heads(index: Tensor) -> Tensor:                # (b, n) -> (K * b, n)
        return (index * heads + torch.arange(heads)[:, None, None]).flatten(0, 1)

    def find_rows(*pairs: tuple[Tensor, Tensor]) -> Tensor:                      # -> (L * K,)
        held = torch.cat([index.flatten() for index, _ in pairs])
        positions = torch.cat([positions.repeat(heads, 1).flatten() for _, positions in pairs])
        slots = ((positions != PADDED_QUERY) & (positions != PADDED_KEY)).nonzero()[:, 0]
        rows = torch.full((size * heads,), len(held))
        rows[held[slots]] = slots
        return rows

    blocks = [b._replace(queries=of_heads(b.queries), keys=of_heads(b.keys)) for b in blocks]
    tensors = [x for b in blocks for x in b[:4]]
    tensors.append(find_rows(*((b.queries, b.query_positions) for b in blocks)))
    tensors.append(find_rows(*((b.keys, b.key_positions) for b in blocks)))
    *tensors, query_rows, key_rows = copy_together(tensors, device)
    on_device = [Block(*tensors[4 * i : 4 * i + 4], *b[4:]) for i, b in enumerate(blocks)]
    return Part(on_device, query_rows, key_rows)


def attends_to(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Compute the mask of a block, (b, n, m) bool: keys up to the query's position and inside the window.

    A completion's positions continue those of its prompt, so one rule serves both parts of the attention.
    """
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


# ---- the attention of a pass -------------------------------------------------------------------------------


def kernel_calls(block: Block, q: Tensor, v: Tensor, options: Options) -> Iterator[tuple]:
    """Yield (kernel, queries, keys, mask, causal) of each call; q (K * b, R, n, D), v (K * b, 1, m, D).

    Without a mask there is one call. With a mask there is one for each chunk of queries, over the keys in its
    window.
    """
    window, num_queries, num_keys = options.window, q.shape[2], v.shape[2]
    masked = block.padded_keys or (window is not None and block.longest_distance >= window)
    head_sizes, softcap = (q.shape[-1], v.shape[-1]), options.softcap is not None
    kernel = choose_kernel(q.device.type, q.dtype, head_sizes, masked, softcap)
    if not masked:
        yield kernel, slice(0, num_queries), slice(0, num_keys), None, block.causal
        return
    for start in range(0, num_queries, attention_kernels.QUERIES_PER_CHUNK):
        end = min(start + attention_kernels.QUERIES_PER_CHUNK, num_queries)
        if block.causal:
            keys = slice(max(0, start - window + 1), end)
        else:  # right-aligned: the last column is the end of a prompt
            keys = slice(max(0, num_keys - max(1, window - 1)) if window else 0, num_keys)
        visible = attends_to(block.query_positions[:, start:end], block.key_positions[:, keys], window)
        mask = additive_mask(visible.repeat(len(q) // len(visible), 1, 1)[:, None], q.dtype)
        yield kernel, slice(start, end), keys, mask, False


class PrefixAttention(torch.autograd.Function):
    """Compute attention: query (1, H, L, D), key and value (1, K, L, D), sinks (H,) or None -> (1, L, H, D).

    A softmax over two sets of keys is merged from a softmax over each: with lse = log(exp(lse1) + exp(lse2)),
    output = exp(lse1 - lse) output1 + exp(lse2 - lse) output2. A sink is a third set of one score with value
    0. In the backward pass each kernel gets the merged output and lse, and so computes its part of the
    gradient.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, layout: TokenLayout, options: Options):
        heads = key.shape[1]
        q, k, v = (head_rows(x.transpose(1, 2), heads) for x in (query, key, value))
        own, *prefix = layout.parts(heads, query.device)
        output, lse = forward_part(own, q, k, v, options, no_block_lse=0.0)      # (L * K, R, D), (L * K, R)
        for part in prefix:
            other = forward_part(part, q, k, v, options, no_block_lse=-torch.inf)
            output, lse = merge_by_lse(output, lse, *other)
        if sinks is not None:
            output, lse = add_sinks(output, lse, sinks.view(heads, -1).repeat(query.shape[2], 1))
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.layout, ctx.options = layout, options
        return output.view(1, query.shape[2], query.shape[1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, sinks, output, lse = ctx.saved_tensors
        heads, size = key.shape[1], query.shape[2]
        q, k, v = (head_rows(x.transpose(1, 2), heads) for x in (query, key, value))
        grad = head_rows(grad, heads)                                            # (L * K, R, D)
        grads, *others = (
            backward_part(part, grad, q, k, v, output, lse, ctx.options)
            for part in ctx.layout.parts(heads, query.device))
        for other in others:
            grads = [x + y for x, y in zip(grads, other, strict=True)]
        grad_sinks = None
        if sinks is not None:
            weight = (sinks.view(heads, -1).repeat(size, 1) - lse).exp_()        # (L * K, R)
            of_tokens = -(weight * (grad * output).sum(dim=-1)).view(size, -1)   # (L, H)
            grad_sinks = of_tokens.sum(dim=0).to(sinks.dtype)
        grads = (x.view(1, size, -1, x.shape[-1]).transpose(1, 2) for x in grads)
        return *grads, grad_sinks, None, None


def head_rows(x: Tensor, heads: int) -> Tensor:
    """View (1, L, H, D) as (L * K, H / K, D); no copy if the heads of a token are adjacent."""
    return x.reshape(x.shape[1] * heads, -1, x.shape[-1])


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather the tokens of a block: (L * K, R, ...), rows (K * b, n) -> (K * b, R, n, ...)."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def scatter_back(blocks: Iterable[Tensor], rows: Tensor, fill: float = 0.0) -> Tensor:
    """Undo gather_rows: blocks (K * b, R, n, ...), rows (L * K,) -> (L * K, R, ...), `fill` for no block."""
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in blocks]
    end = tokens[0].new_full((1, *tokens[0].shape[1:]), fill)
    return torch.cat([*tokens, end]).index_select(0, rows)


def forward_part(part: Part, q, k, v, options: Options, no_block_lse: float) -> tuple[Tensor, Tensor]:
    """Compute one part of the attention: output (L * K, R, D), log-sum-exp (L * K, R).

    A token in no block has output 0 and log-sum-exp no_block_lse. Padding is in no block of either part: 0 in
    one of them keeps the merged result finite.
    """
    results = []
    for block in part.blocks:
        block_q = gather_rows(q, block.queries)                                  # (K * b, R, n, D)
        block_k, block_v = (gather_rows(x, block.keys) for x in (k, v))          # (K * b, 1, m, D)
        chunks = [
            kernel.forward(
                block_q[:, :, queries], block_k[:, :, keys], block_v[:, :, keys], mask, causal, options)
            for kernel, queries, keys, mask, causal in kernel_calls(block, block_q, block_v, options)
        ]
        results.append([torch.cat(x, dim=2) if len(x) > 1 else x[0] for x in zip(*chunks, strict=True)])
    outputs, lses = zip(*results, strict=True)
    return scatter_back(outputs, part.query_rows), scatter_back(lses, part.query_rows, no_block_lse)


def backward_part(part: Part, grad, q, k, v, output, lse, options: Options) -> list[Tensor]:
    """Compute the gradients of q (L * K, R, D), k and v (L * K, 1, D) through one part of the attention."""
    grads = []
    for block in part.blocks:
        block_grad, block_q, block_output = (gather_rows(x, block.queries) for x in (grad, q, output))
        block_k, block_v = (gather_rows(x, block.keys) for x in (k, v))
        heads = len(block.queries) // len(block.query_positions)
        padding = (block.query_positions == PADDED_QUERY).repeat(heads, 1)       # (K * b, n)
        # Padding repeats a token, which must not count twice: exp(score - inf) = 0.
        block_lse = gather_rows(lse, block.queries).masked_fill(padding[:, None], torch.inf)
        grad_q, grad_k, grad_v = [], torch.zeros_like(block_k), torch.zeros_like(block_v)
        for kernel, queries, keys, mask, causal in kernel_calls(block, block_q, block_v, options):
            chunk_grad_q, chunk_grad_k, chunk_grad_v = kernel.backward(
                block_grad[:, :, queries], block_q[:, :, queries], block_k[:, :, keys], block_v[:, :, keys],
                block_output[:, :, queries], block_lse[:, :, queries].contiguous(), mask, causal, options)
            grad_q.append(chunk_grad_q)
            grad_k[:, :, keys] += chunk_grad_k
            grad_v[:, :, keys] += chunk_grad_v
        grad_q = torch.cat(grad_q, dim=2) if len(grad_q) > 1 else grad_q[0]
        grads.append((grad_q, grad_k, grad_v))
    of_q, of_k, of_v = zip(*grads, strict=True)
    return [scatter_back(of_q, part.query_rows), *(scatter_back(x, part.key_rows) for x in (of_k, of_v))]


# ---- the attention of a new token --------------------------------------------------------------------------


@dataclass
class Siblings:
    """Map R rows to P prompts: the queries of a prompt's rows form one matrix, so its keys are read once."""

    rows: Tensor                # (P, S) rows of each prompt, padded with row 0
    slots: Tensor               # (R,) index of each row in `rows`, flattened
    known: dict = field(default_factory=dict)   # number of key heads -> what `indices` returns

    def indices(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return where a query head of `group` comes from, (P * K * S,), and one of `ungroup`, (R * K,)."""
        if heads not in self.known:
            head, width = torch.arange(heads, device=self.rows.device)[:, None], self.rows.shape[1]
            prompt, sibling = self.slots[:, None] // width, self.slots[:, None] % width          # (R, 1)
            back = (prompt * heads + head.T) * width + sibling                                   # (R, K)
            self.known[heads] = (self.rows[:, None] * heads + head).flatten(), back.flatten()
        return self.known[heads]

    def group(self, x: Tensor, heads: int) -> Tensor:
        """Group the rows of each prompt: (R * K, r, n) -> (P * K, S * r, n)."""
        grouped = x.flatten(1).index_select(0, self.indices(heads)[0])           # (P * K * S, r * n)
        return grouped.view(len(self.rows) * heads, -1, x.shape[-1])

    def ungroup(self, x: Tensor, heads: int) -> Tensor:
        """Undo group: (P * K, S * r, n) -> (R * K, r, n)."""
        size = self.rows.shape[1]
        back = x.reshape(len(x) * size, -1).index_select(0, self.indices(heads)[1])
        return back.view(len(back), -1, x.shape[-1])


def attend_to_prompt_and_own(
    query, keys, values, prompt_keys, prompt_values, prompt_mask, own_mask, sinks, siblings: Siblings,
    options: Options,
) -> Tensor:
    """Compute the attention of one new token in each row to its prompt and to its own columns.

    The kernels are those of a pass, so that in 16 bits sampler and trainer round alike.

    query    (R * K, r, D): r query heads for each key head of each row
    keys     (R * K, C, D) of the rows, prompt_keys (P * K, Tp, D), and values
    masks    own_mask (R * K, 1, C), prompt_mask (P * K, S * r, Tp) or None, to be added to the scores
    sinks    (H,) or None
    returns  (R * K, r, D)
    """
    heads, sizes = len(prompt_keys) // len(siblings.rows), (keys.shape[-1], values.shape[-1])

    def attend(q, k, v, mask):  # q (n, r, D), k and v (n, m, D), mask (n, r, m) or None
        kernel = choose_kernel(q.device.type, q.dtype, sizes, mask is not None, options.softcap is not None)
        mask = None if mask is None else mask[:, None]
        return (x[:, 0] for x in kernel.forward(q[:, None], k[:, None], v[:, None], mask, False, options))

    own, own_lse = attend(query, keys, values, own_mask.expand(-1, query.shape[1], -1))
    if sinks is not None:
        own, own_lse = add_sinks(own, own_lse, sinks.view(heads, -1).repeat(len(query) // heads, 1))
    prompt, prompt_lse = attend(siblings.group(query, heads), prompt_keys, prompt_values, prompt_mask)
    prompt_lse = siblings.ungroup(prompt_lse[..., None], heads)[..., 0]
    return merge_by_lse(own, own_lse, siblings.ungroup(prompt, heads), prompt_lse)[0]


# ---- the interface to transformers -------------------------------------------------------------------------


def prefix_attention(
    module, query, key, value, attention_mask=None, *, token_layout=None, scaling=None, dropout=0.0,
    sliding_window=None, softcap=None, s_aux=None, **kwargs,
):
    """Compute a layer's attention: query (1, H, L, D), key, value (1, K, L, D) -> (1, L, H, D), None.

    token_layout  a TokenLayout in a pass over prompts and completions, a PrefixCache while tokens are sampled
    s_aux         (H,) attention sinks
    raises        CannotShare if the model does not pass the layout on, or wants what is not supported
    """
    name = type(module).__name__
    if token_layout is None:
        raise CannotShare(f"{name} was not given the layout of its tokens")
    if dropout or kwargs.get("position_bias") is not None:
        raise CannotShare(f"{name}: {dropout=} or a position bias")
    source, device = key, query.device.type               # layers that share keys get the same tensor
    if torch.is_autocast_enabled(device):
        query = query.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return token_layout.attend(
            module, query, key.to(query.dtype), value.to(query.dtype), source=source, window=sliding_window,
            softcap=softcap, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling, sinks=s_aux,
        ), None


AttentionInterface.register(NAME, prefix_attention)


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
    layout.layers.clear()                                 # several models may be forwarded with one layout
    with use_prefix_attention(model):
        output = model.base_model(input_ids=ids, position_ids=positions, token_layout=layout, use_cache=False)
    check_layers(model, layout)
    return output.last_hidden_state


@contextmanager
def use_prefix_attention(model):
    """Make a model's attention layers call prefix_attention. Each pass then needs a token_layout."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    previous = [(each, each._attn_implementation) for each in configs.values()]
    try:
        for each, _ in previous:
            each._attn_implementation = NAME
        yield
    finally:
        for each, name in previous:                       # those of parts after that of the whole model
            each._attn_implementation = name
