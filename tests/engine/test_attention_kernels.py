"""Kernels of attention: the table that chooses them, and what each computes."""

import pytest
import torch

from engine import attention_kernels
from engine.attention_kernels import (
    Chunked, EfficientOnCUDA, FlashOnCPU, FlashOnCUDA, Options, add_sinks, choose_kernel, merge_by_lse,
)


@pytest.mark.parametrize("expected, device, dtype, size, masked, softcap", [
    (FlashOnCPU, "cpu", torch.float32, 64, True, False), (Chunked, "cpu", torch.float32, 64, False, True),
    (FlashOnCUDA, "cuda", torch.bfloat16, 256, False, False), (EfficientOnCUDA, "cuda", torch.float16, 512, False, False),
    (EfficientOnCUDA, "cuda", torch.float32, 64, False, False), (EfficientOnCUDA, "cuda", torch.bfloat16, 64, True, False),
    (Chunked, "cuda", torch.bfloat16, 64, True, True), (Chunked, "cuda", torch.float32, 36, False, False),
    (Chunked, "cuda", torch.float64, 64, False, False), (Chunked, "mps", torch.float32, 64, False, False),
])
def test_the_kernel_of_a_device_and_head_sizes_that_differ_take_the_general_one(expected, device, dtype, size, masked, softcap):
    assert choose_kernel(device, dtype, (size, size), masked, softcap) is expected
    assert choose_kernel(device, dtype, (size, size // 2), masked, softcap) is Chunked


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
