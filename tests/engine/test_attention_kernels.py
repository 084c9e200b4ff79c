"""The table that chooses a kernel of attention. What each computes: test_prefix_attention.py."""

import pytest
import torch

from engine.attention_kernels import (
    Chunked, EfficientOnCUDA, FlashOnCPU, FlashOnCUDA, Options, choose_kernel,
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


def test_the_efficient_kernel_returns_no_log_sum_exp_of_padding():
    q, k = (torch.empty(2, heads, 8, 64, device="meta") for heads in (4, 1))     # 8 queries are rounded up to 32
    assert EfficientOnCUDA.forward(q, k, k, None, True, Options(None, None, 0.1))[1].shape == q.shape[:3]
