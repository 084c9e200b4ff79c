"""Kernels of attention: the table that chooses them, and what each computes."""

import itertools

import torch

from engine.attention_kernels import Chunked, EfficientOnCUDA, FlashOnCPU, FlashOnCUDA, choose_kernel


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
