"""The processor and the memory of this process: threads, freed memory, peak memory, random generators."""

import ctypes
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import psutil
import torch


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed blocks of up to 128 MB for later tensors.

    By default it returns them to the kernel, which zeroes every large tensor page by page when it is
    allocated again: a third of the time of a training pass (dev/LOG.md).
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3  # constants of malloc.h
        if mallopt(mmap_threshold, 128 * 2**20) or mallopt(mmap_threshold, 32 * 2**20):  # older: 32 at most
            mallopt(trim_threshold, 2**31 - 1)


def own_cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count()))


def used_seconds() -> np.ndarray:
    """Return wall-clock seconds, and processor seconds on own_cores by all processes and by this one.

    Its children count as this process, also those that have ended: the programs of reward functions.
    """
    times, own, process = [], 0.0, psutil.Process()
    with suppress(OSError):                               # of a sandbox without /proc/stat
        times = psutil.cpu_times(percpu=True)
    everyone = sum(times[core].user + times[core].system for core in own_cores() if core < len(times))
    for each in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):                      # it has ended meanwhile
            own += sum(each.cpu_times()[:4])              # user, system, and those of its ended children
    return np.array([time.monotonic(), everyone, own])


class IdleCores:
    """Compute with one thread per core that other processes leave idle, but with at least one.

    If another process uses a thread's core, all other threads wait for it at the end of each operation. On
    two cores beside one busy process, a step of the demonstration takes 2.7 s with two threads, 0.7 s with 1.
    """

    def __init__(self):
        self.threads, self.busy, self.before = torch.get_num_threads(), 0, used_seconds()

    def choose_threads(self, notify: Callable) -> None:
        """Choose the number from the work of others since the last call. OMP_NUM_THREADS fixes it."""
        if "OMP_NUM_THREADS" in os.environ or time.monotonic() - self.before[0] < 0.3:
            return
        now, cores = used_seconds(), len(own_cores())
        seconds, everyone, own = now - self.before
        self.before = now
        others = (everyone - own) / seconds
        if abs(others - self.busy) > 0.6:                 # with 0.5 it would oscillate
            self.busy = max(0, round(others))
        before, threads = torch.get_num_threads(), max(1, min(self.threads, cores - self.busy))
        if threads != before:
            torch.set_num_threads(threads)
            notify(f"  note   threads {before} -> {threads}: others use {self.busy} of {cores} cores")


idle_cores = IdleCores()        # threads are the process's


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory so far in 10^9 bytes: of the GPU or TPU, or elsewhere of the whole process."""
    if device.type == "xla":
        from torch_xla.core import xla_model

        with suppress(RuntimeError):                      # XLA's CPU device has no count
            return xla_model.get_memory_info(device)["peak_bytes_used"] / 1e9
    elif device.type in ("cuda", "xpu"):
        return torch.accelerator.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9         # bytes or kilobytes


def seed_generators(of: str | int) -> None:
    """Seed the global random generators of Python, numpy and torch, without transformers' trainers."""
    number = random.Random(of).getrandbits(32) if isinstance(of, str) else of
    for seed in random.seed, np.random.seed, torch.manual_seed:
        seed(number)
