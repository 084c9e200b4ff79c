"""
Where a run computes: which device there is, how much memory it took, and what XLA asks for. Left out on
purpose: starting several processes; what counts over all of them is counted over all already.

XLA compiles. What is asked of it between two cuts becomes one program, kept for whenever the same is asked for again
with the same shapes. So there shapes are rounded up (bucket), and programs end where loops turn (cut_graph). On a CPU or
a GPU neither does anything.
"""

import ctypes
import importlib.util
import os
import resource
import sys
from contextlib import suppress
from functools import cache

import torch


def best_device() -> torch.device:
    """The XLA device if PJRT_DEVICE names one (TPU, or CPU to try it out), else the GPU if there is one, else the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training runs in one process; start it without torchrun")
    if os.environ.get("PJRT_DEVICE"):
        return xla_device()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def xla_device() -> torch.device:
    """The one XLA device, or all of them behind one name, with the weights spread over them (shard_weights)."""
    if not importlib.util.find_spec("torch_xla"):
        raise ValueError(f"PJRT_DEVICE={os.environ['PJRT_DEVICE']}: needs torch_xla, see requirements-tpu.txt; or unset it")
    import torch_xla
    from torch_xla import backends, runtime

    backends.set_mat_mul_precision("highest")   # a TPU's default multiplies float32 as bfloat16
    if runtime.global_runtime_device_count() > 1:
        runtime.use_spmd()
    device = torch_xla.device()
    torch.zeros(1, device=device)                         # autograd has to know the device before its first backward pass
    return device


def bucket(n: int, device: torch.device) -> int:
    """A size rounded up to a power of two on XLA, so that few programs serve all sizes; elsewhere the size itself."""
    return 1 << (n - 1).bit_length() if device.type == "xla" else n


def cut_graph(device: torch.device) -> None:
    """On XLA, end a program here and start it, without waiting. Every tensor that is alive becomes one of its results."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def eager_device(device: torch.device) -> torch.device:
    """Where small tensors of many shapes are dealt with: the CPU for XLA, which would compile each shape; else the device."""
    return torch.device("cpu") if device.type == "xla" else device


def shard_weights(model: torch.nn.Module) -> None:
    """Spread every matrix of a model over all XLA devices along its longest side, where there are several.

    Everything else is replicated, and the compiler works out which part of which product each device computes.
    """
    if next(model.parameters()).device.type != "xla":
        return
    from torch_xla import runtime
    from torch_xla.distributed import spmd

    if not runtime.is_spmd():
        return
    mesh = spmd.get_1d_mesh("fsdp")
    for weight in model.parameters():
        if weight.ndim > 1:
            longest = max(range(weight.ndim), key=lambda side: weight.shape[side])
            spmd.mark_sharding(weight, mesh, tuple("fsdp" if side == longest else None for side in range(weight.ndim)))


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what tensors leave behind, in blocks of up to 128 MB, for the next ones.

    Otherwise every large tensor on a CPU is fetched from the kernel anew and zeroed page by page, which took a third of a
    training pass (dev/LOG.md).
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        set_option, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3           # names of malloc.h
        if set_option(mmap_threshold, 128 * 2**20) or set_option(mmap_threshold, 32 * 2**20):    # older ones refuse 128
            set_option(trim_threshold, 2**31 - 1)


def all_sum(count: float) -> float:
    """The sum of a number over all processes; the number itself where there is one."""
    if not torch.distributed.is_initialized():
        return count
    total = torch.tensor(count, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


def peak_memory_gb(device: torch.device) -> float:
    """The most memory held so far, in 10^9 bytes: the GPU's, the TPU's, or the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "xla":
        from torch_xla.core import xla_model

        with suppress(RuntimeError):                      # XLA's CPU device does not count
            return xla_model.get_memory_info(device)["peak_bytes_used"] / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9         # bytes on a Mac, kilobytes elsewhere
