"""
Kernels of attention: softmax(scaling * q k^T + mask) v, together with the log-sum-exp of the scores, so that
results over two sets of keys can be merged into the result over both (Hydragen, arXiv:2402.05099).

A kernel is a class of two functions. forward: q (B, R, n, D), k and v (B, 1, m, D), one key head for its R
query heads, a mask to add to the scores (B or 1, 1, n, m) or None (additive_mask), causal -> output
(B, R, n, D), log-sum-exp (B, R, n). backward takes output and log-sum-exp, over these keys or over more, and
returns the gradients of q, k and v through these keys.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

QUERIES_PER_CHUNK = 256         # where scores or masks of all queries would be too large
SCORES_PER_CHUNK = 2**21        # scores of a chunk of rows and queries: 8 megabytes in float32


class Options(NamedTuple):
    """Hold the attention options of a layer."""

    window: int | None          # a query attends to keys less than `window` positions before it
    softcap: float | None       # scores become softcap * tanh(scores / softcap)
    scaling: float


class FlashOnCPU:
    """Call torch's flash attention for CPUs, which needs no copies of keys for query heads (stride 0)."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=options.scaling)

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        dtype, computed = q.dtype, torch.promote_types(q.dtype, torch.float32)   # in 16 bits: 8 times as long
        grad, q, k, v, output = (x.to(computed) for x in (grad, q, k, v, output))
        mask = None if mask is None else mask.to(computed)
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, output, lse, 0.0, causal, attn_mask=mask, scale=options.scaling)
        grad_q, grad_k, grad_v = (x.to(dtype) for x in grads)
        return grad_q, grad_k.sum(dim=1, keepdim=True), grad_v.sum(dim=1, keepdim=True)


class FlashOnCUDA:
    """Call torch's flash attention for 16-bit numbers on CUDA, which has no mask."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=options.scaling)
        return output, lse

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)             # random state of dropout
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
            scale=options.scaling)
        return grad_q, grad_k.sum(dim=1, keepdim=True), grad_v.sum(dim=1, keepdim=True)


class EfficientOnCUDA:
    """Call torch's memory-efficient attention for CUDA: with masks, in float32, and on older GPUs."""

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        mask = None if mask is None else mask.expand(*q.shape[:3], -1)
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=options.scaling)
        return output, lse[:, :, : q.shape[2]]            # rounded up to a multiple of 32

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        mask = None if mask is None else mask.expand(*q.shape[:3], -1)
        lse, unused = pad(lse, (0, -lse.shape[2] % 32), value=torch.inf), q.new_zeros((), dtype=torch.int64)
        grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, mask, output, lse, unused, unused, 0.0, [True, True, True, False], causal,
            scale=options.scaling)
        return grad_q, grad_k.sum(dim=1, keepdim=True), grad_v.sum(dim=1, keepdim=True)


class Chunked:
    """Compute scores in float32, one chunk of rows and queries at a time. Supports all devices and options.

    The query heads of a key head are folded into the queries, so keys are read once for all of them.
    """

    @staticmethod
    def forward(q, k, v, mask, causal: bool, options: Options):
        output = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for rows, queries, keys in chunk_slices(q, k, causal):
            scores, _ = masked_scores(q, k, mask, causal, options, rows, queries, keys)
            lse[rows, :, queries] = scores.logsumexp(dim=-1)
            probs = (scores - lse[rows, :, queries, None]).exp_()
            output[rows, :, queries] = fold_heads_matmul(probs.to(v.dtype), v[rows, :, keys])
        return output, lse

    @staticmethod
    def backward(grad, q, k, v, output, lse, mask, causal: bool, options: Options):
        grad_q, (grad_k, grad_v) = torch.empty_like(q), (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        delta = (grad * output).sum(dim=-1, keepdim=True, dtype=lse.dtype)       # (B, R, n, 1)
        for rows, queries, keys in chunk_slices(q, k, causal):
            scores, softcap_grad = masked_scores(q, k, mask, causal, options, rows, queries, keys)
            probs = (scores - lse[rows, :, queries, None]).exp_()
            grad_v[rows, :, keys] += fold_heads_matmul_t(probs.to(grad.dtype), grad[rows, :, queries])
            grad_probs = fold_heads_matmul(grad[rows, :, queries], v[rows, :, keys].mT)
            grad_scores = probs * (grad_probs - delta[rows, :, queries])
            if softcap_grad is not None:
                grad_scores = grad_scores * softcap_grad
            grad_scores = grad_scores * options.scaling
            grad_q[rows, :, queries] = fold_heads_matmul(grad_scores.to(k.dtype), k[rows, :, keys])
            grad_k[rows, :, keys] += fold_heads_matmul_t(grad_scores.to(q.dtype), q[rows, :, queries])
        return grad_q, grad_k, grad_v


def chunk_slices(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (rows, queries, keys) whose scores fit SCORES_PER_CHUNK; if causal, keys up to the last query."""
    (num_rows, heads, num_queries, _), num_keys = q.shape, k.shape[2]
    queries_per_chunk = min(num_queries, QUERIES_PER_CHUNK, max(1, SCORES_PER_CHUNK // (heads * num_keys)))
    rows_per_chunk = max(1, SCORES_PER_CHUNK // (heads * num_keys * queries_per_chunk))
    for row in range(0, num_rows, rows_per_chunk):
        for start in range(0, num_queries, queries_per_chunk):
            end = min(start + queries_per_chunk, num_queries)
            yield slice(row, row + rows_per_chunk), slice(start, end), slice(0, end if causal else num_keys)


def masked_scores(q, k, mask, causal: bool, options: Options, rows: slice, queries: slice, keys: slice):
    """Compute scores (b, R, n, m) of a chunk in at least float32, and the soft cap's derivative or None."""
    scores = fold_heads_matmul(q[rows, :, queries], k[rows, :, keys].mT)
    scores, softcap_grad = scores.to(torch.promote_types(scores.dtype, torch.float32)) * options.scaling, None
    if options.softcap:
        tanh = torch.tanh(scores / options.softcap)
        scores, softcap_grad = tanh * options.softcap, 1 - tanh**2
    if mask is not None:
        scores = scores + mask[rows, :, queries, keys]
    elif causal:
        index = torch.arange(keys.stop, device=q.device)
        scores = scores.masked_fill(index[queries, None] < index, mask_value(scores.dtype))
    return scores, softcap_grad


def fold_heads_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Compute left (b, R, n, i) @ right (b, 1, i, j) -> (b, R, n, j), as one product for all R."""
    return (left.flatten(1, 2) @ right[:, 0]).unflatten(1, left.shape[1:3])


def fold_heads_matmul_t(left: Tensor, right: Tensor) -> Tensor:
    """Sum left (b, R, n, i) transposed @ right (b, R, n, j) over R -> (b, 1, i, j)."""
    return (left.flatten(1, 2).mT @ right.flatten(1, 2))[:, None]


def choose_kernel(device: str, dtype: torch.dtype, head_sizes: tuple[int, int], masked: bool, softcap: bool):
    """Choose the kernel of a block by device type, dtype, head sizes of keys and values, mask, and soft cap.

    masked: there is a window or padding. Attention sinks need no kernel: add_sinks merges them into the
    result. Heads whose size is no multiple of 8 have no kernel of CUDA.
    """
    if softcap or head_sizes[0] != head_sizes[1]:
        return Chunked
    if device == "cpu":
        return FlashOnCPU
    if device == "cuda" and dtype != torch.float64 and head_sizes[0] % 8 == 0:
        for_flash = not masked and dtype != torch.float32 and head_sizes[0] <= 256
        return EfficientOnCUDA if not for_flash or is_older_than_ampere() else FlashOnCUDA
    return Chunked


@cache
def is_older_than_ampere() -> bool:
    """Return True for a T4 or V100, say, for which flash attention was not built."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask (..., n, m) into what is added to scores: 0, or mask_value for a masked key.

    Rows begin at multiples of 32 bytes, as CUDA's kernel requires.
    """
    shape = *visible.shape[:-1], visible.shape[-1] + -visible.shape[-1] % 16
    mask = torch.full(shape, mask_value(dtype), dtype=dtype, device=visible.device)
    return mask[..., : visible.shape[-1]].masked_fill_(visible, 0.0)


def merge_by_lse(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention over two sets of keys: outputs (..., D), log-sum-exps (...)."""
    top = torch.maximum(lse, other_lse)
    first, second = (lse - top).exp_(), (other_lse - top).exp_()     # not sigmoid, see dev/LOG.md
    total = first + second
    weight = (second / total)[..., None]
    merged = torch.lerp(output.to(weight.dtype), other.to(weight.dtype), weight)
    return merged.to(output.dtype), top + total.log_()


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a key of score `sinks` and value 0: output (..., D), lse and sinks (...), broadcast."""
    total = torch.stack(torch.broadcast_tensors(lse, sinks.to(lse.dtype))).logsumexp(dim=0)
    return (output * (lse - total).exp_()[..., None]).to(output.dtype), total


def mask_value(dtype: torch.dtype) -> float:
    """Return the score of a masked key: finite, so a block without keys for a query has weight 0, not NaN."""
    return max(-1e30, torch.finfo(dtype).min)
