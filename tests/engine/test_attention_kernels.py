"""Kernels of attention: the table that chooses them, and what each computes."""

import itertools

import pytest
import torch

from engine import attention_kernels
from engine.attention_kernels import (
    Chunked, EfficientOnCUDA, FlashOnCPU, FlashOnCUDA, Options, add_sinks, choose_kernel, merge_by_lse,
)


def test_the_kernel_is_chosen_from_a_table():
    """Every combination of device, numbers, head sizes, mask and soft cap."""
    for device, dtype, sizes, masked, softcap in itertools.product(
        ("cpu", "cuda", "xla", "mps"), (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        ((64, 64), (256, 256), (512, 512), (192, 128)), (True, False), (True, False),
    ):
        half = dtype in (torch.bfloat16, torch.float16)
        if softcap or sizes == (192, 128):
            expected = Chunked
        elif device == "cpu":
            expected = FlashOnCPU
        elif device == "cuda" and dtype != torch.float64 and not masked:
            expected = FlashOnCUDA if half and sizes != (512, 512) else EfficientOnCUDA
        else:
            expected = Chunked
        assert choose_kernel(device, dtype, sizes, masked, softcap) is expected, (device, dtype, sizes, masked, softcap)


@pytest.mark.parametrize("causal,masked", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("scores_per_chunk", [2**21, 40])
def test_kernels_agree_with_a_softmax_written_out(causal, masked, scores_per_chunk, monkeypatch):
    """Three rows, two query heads for the key head, a mask of its own for each row; output, log-sum-exp and gradients."""
    monkeypatch.setattr(attention_kernels, "SCORES_PER_CHUNK", scores_per_chunk)
    draws = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(3, heads, 7, 4, generator=draws, dtype=torch.float64) for heads in (2, 1, 1, 2))
    mask = torch.zeros(3, 1, 7, 7, dtype=torch.float64)
    if masked:
        hidden = torch.rand(mask.shape, generator=draws) < 0.4
        mask.masked_fill_(hidden & ~torch.eye(7, dtype=torch.bool), attention_kernels.mask_value(mask.dtype))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.3 + mask
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
    gradients = torch.autograd.grad((expected[0] * grad).sum(), leaves)
    options, mask = Options(None, None, 0.3), mask if masked else None
    for kernel in Chunked, FlashOnCPU:
        output, lse = kernel.forward(q, k, v, mask, causal, options)
        for ours, theirs in zip((output, lse), expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        for ours, theirs in zip(kernel.backward(grad, q, k, v, output, lse, mask, causal, options), gradients):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_results_over_two_sets_of_keys_merge_into_the_result_over_both():
    draws = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(2, 5, 3, 6, generator=draws, dtype=torch.float64) for _ in range(2))      # (K, L, R, keys)
    sinks = torch.randn(2, 1, 3, generator=draws, dtype=torch.float64)

    def result(keys):
        return (scores[..., keys].softmax(-1) * values[..., keys]).sum(-1, keepdim=True), scores[..., keys].logsumexp(-1)

    output, lse = merge_by_lse(*result(slice(0, 2)), *result(slice(2, 6)))
    torch.testing.assert_close(output, result(slice(0, 6))[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-12)
    output, lse = add_sinks(output, lse, sinks)
    joint = torch.cat([scores, sinks.expand(2, 5, 3)[..., None]], dim=-1)
    expected = (joint.softmax(-1)[..., :-1] * values).sum(-1, keepdim=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, joint.logsumexp(-1), rtol=0, atol=1e-12)


def test_the_efficient_kernel_returns_no_log_sum_exp_of_padding():
    q, k = (torch.empty(2, heads, 8, 64, device="meta") for heads in (4, 1))     # 8 queries are rounded up to 32
    assert EfficientOnCUDA.forward(q, k, k, None, True, Options(None, None, 0.1))[1].shape == q.shape[:3]
