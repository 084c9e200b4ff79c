"""
Kernels of attention: softmax(scaling * q k^T + mask) v, together with the log-sum-exp of the scores, so that results over two
sets of keys can be joined into the result over both (Hydragen, arXiv:2402.05099).

A kernel is a class of two functions. forward: q (B, R, n, D), k and v (B, 1, m, D), one key head for its R query heads, a
mask to add to the scores (B or 1, 1, n, m) or None, causal -> output (B, R, n, D), log-sum-exp (B, R, n). backward takes
output and log-sum-exp, of these keys alone or of more, and gives the gradients of q, k and v through these keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

QUERIES_PER_CHUNK = 256         # where scores or masks of all queries would be too large
SCORES_PER_CHUNK = 2**21        # scores of a chunk of rows and queries: 8 megabytes in float32


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
