"""
Programs of XLA and graphs of CUDA: operations that are recorded once and run many times.

The operations between two calls of cut_graph become one program of XLA, which is reused for equal operations
with equal shapes. So shapes are rounded up (bucket), and each iteration of a loop ends a program. On a CPU or
a GPU both functions have no effect.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import is_out_of_memory


def bucket(n: int, device: torch.device) -> int:
    """Round a size up to a power of two on XLA, so that few programs serve all sizes; elsewhere return it."""
    return 1 << (n - 1).bit_length() if device.type == "xla" else n


def cut_graph(device: torch.device) -> None:
    """End a program on XLA and run it, without waiting. Every live tensor becomes one of its results."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a CUDA graph of all kernels that a function launches; the function itself if that is impossible.

    Launching a token's thousands of kernels from Python takes longer than running them. The function must
    have run once, read and write the same tensors each time, and not wait for the device, as experts that are
    called one by one do.
    """
    if device.type != "cuda":
        return function
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return function
    return graph.replay


def copy_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one type to a device in a single copy, since the host waits for each copy to a GPU."""
    if device.type == "cpu":
        return tensors
    parts = torch.cat([x.flatten() for x in tensors]).to(device).split([x.numel() for x in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def eager_device(device: torch.device) -> torch.device:
    """Return the device for small tensors of many shapes: the CPU for XLA, which would compile each shape."""
    return torch.device("cpu") if device.type == "xla" else device
