"""
Where a run computes: which device there is, and how much memory it took. Left out on
purpose: starting several processes; what counts over all of them is counted over all already.
"""

import ctypes
import os
import resource
import sys

import torch


def best_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training runs in one process; start it without torchrun")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    """The most memory held so far, in 10^9 bytes: the GPU's, or the whole process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9         # bytes on a Mac, kilobytes elsewhere
