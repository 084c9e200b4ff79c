"""
Where a run computes: which device there is, and how much memory it took. Left out on
purpose: starting several processes; what counts over all of them is counted over all already.
"""

import os
import resource
import sys

import torch


def best_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: training runs in one process; start it without torchrun")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
