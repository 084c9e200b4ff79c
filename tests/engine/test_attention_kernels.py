"""The table that chooses a kernel of attention. What each computes: test_prefix_attention.py."""

import pytest
import torch

from engine.attention_kernels import Chunked, FlashOnCPU, FlashOnCUDA, choose_kernel


@pytest.mark.parametrize("expected, device, dtype, size, masked, softcap", [
    (FlashOnCPU, "cpu", torch.float32, 64, True, False), (Chunked, "cpu", torch.float32, 64, False, True),
    (FlashOnCUDA, "cuda", torch.bfloat16, 256, False, False), (Chunked, "cuda", torch.float16, 512, False, False),
    (Chunked, "cuda", torch.float32, 64, False, False), (Chunked, "cuda", torch.bfloat16, 64, True, False),
    (Chunked, "mps", torch.bfloat16, 64, False, False),
])
def test_the_kernel_of_a_device_and_head_sizes_that_differ_take_the_general_one(expected, device, dtype, size, masked, softcap):
    assert choose_kernel(device, dtype, (size, size), masked, softcap) is expected
    assert choose_kernel(device, dtype, (size, size // 2), masked, softcap) is Chunked
