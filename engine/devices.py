"""
Devices and processes: choice of the device, collectives between processes, XLA graphs, and peak memory. Only
this file and sharding.py use torch.distributed and torch_xla.

Completions, rewards and advantages are small, so all processes gather them and make the same decisions.
Weights, gradients and optimiser state are large and sharded. Without torchrun there is a single process.

XLA compiles, and one process drives all its devices. The operations between two calls of cut_graph become one
program, which is reused for equal operations with equal shapes. So shapes are rounded up (bucket), and each
iteration of a loop ends a program (cut_graph). On a CPU or a GPU both functions have no effect.
"""

import atexit
import ctypes
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import is_out_of_memory

tensor_parallel = 1  # processes that share a slice of the work: --mesh tp=N
chosen_device = "auto"  # --device, once it is known


def best_device(wanted: str = "") -> torch.device:
    """Return the XLA device if PJRT_DEVICE is set (TPU, or CPU for tests), else the GPU, else the CPU.

    wanted   --device: auto, which takes a GPU of any kind that torch supports (cuda, mps, xpu), or cpu; "":
             as in the last call
    raises   ValueError for XLA under torchrun, or more processes of torchrun than GPUs

    In a process started by torchrun, this initialises the process group. On CUDA it makes float32 matrices be
    multiplied in TF32: several times faster, with rounding errors that are an eighth of bfloat16's.
    """
    global chosen_device
    chosen_device = wanted = wanted or chosen_device
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("PJRT_DEVICE"):
        if processes > 1:
            raise ValueError("PJRT_DEVICE: one process drives all XLA devices; start it without torchrun")
        return xla_device()
    device = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "cpu" or device is None or (device.type == "mps" and processes > 1):     # mps: a single GPU
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    if processes > 1 and device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        if device.index >= (gpus := torch.accelerator.device_count()):
            raise ValueError(f"--nproc_per_node: more processes than GPUs here ({gpus}); or add --device cpu")
        torch.accelerator.set_device_index(device)
    if processes > 1 and not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        kinds = {"cpu": "gloo", device.type: backend}     # gathered tensors are on the CPU
        dist.init_process_group(",".join(f"{kind}:{name}" for kind, name in kinds.items()))
    return device


def shutdown(code: int = 0) -> None:
    """Leave the process group and end this process with an exit code. Without a process group, do nothing.

    Exit handlers run, but Python is not finalised: a thread of the process group that needs the interpreter
    during that would abort the process ("terminate called without an active exception").
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()                           # vLLM's handlers end its own groups
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def print_last_line(line: str) -> None:
    """Print a line to stderr in the first process that ends with one; the others wait until it is printed.

    torchrun stops all processes as soon as one has ended with an error, so the first one must print its line.
    """
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else dist.HashStore()
    if store.add("last lines", 1) == 1:
        print(line, file=sys.stderr, flush=True)
        store.set("last line printed", "")
    else:
        store.wait(["last line printed"], timedelta(seconds=30))


def other_rank_ended() -> bool:
    """Return True if another process has printed its last line, so that a collective with it fails here."""
    return dist.is_initialized() and dist.distributed_c10d._get_default_store().check(["last line printed"])


# ---- one process or many -----------------------------------------------------------------------------------


def num_processes() -> int:
    """Return the number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process_rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return True in the process that writes files and prints."""
    return process_rank() == 0


def all_gather_object(item) -> list:
    """Gather an item of every process, in order of rank."""
    if num_processes() == 1:
        return [item]
    items = [None] * num_processes()
    dist.all_gather_object(items, item)
    return items


def sum_in_place(tensor: Tensor) -> None:
    """Sum a tensor over all slices, in place; processes of one slice count once."""
    if process_rank() % tensor_parallel:
        tensor.zero_()
    dist.all_reduce(tensor)


class Ranks:
    """The division of a run's work among its processes, from the view of one of them.

    All processes call every method in the same order. Those of one tensor-parallel group do the same work.
    """

    @property
    def size(self) -> int:
        """Return the number of slices that the work is divided into."""
        return num_processes() // tensor_parallel

    @property
    def rank(self) -> int:
        """Return the number of this rank's slice, from 0."""
        return process_rank() // tensor_parallel

    def slice(self, items: list) -> list:
        """Return the slice of this rank. Slices cover all items; their sizes differ by at most one."""
        n = len(items)
        return items[n * self.rank // self.size : n * (self.rank + 1) // self.size]

    def gather(self, work: Callable, *columns: list) -> list:
        """Call work with this rank's slice of each column, and return the results of all ranks in order.

        Ranks without items have no result. The first rank's exception is raised on every rank.
        """
        failure = result = None
        mine = [self.slice(column) for column in columns]
        has_work = not mine or len(mine[0]) > 0
        try:
            result = work(*mine) if has_work else None
        except Exception as error:
            failure = error
        outcomes = all_gather_object((failure, has_work, result))
        first = next((rank for rank, (error, *_) in enumerate(outcomes) if error), None)
        if first is not None:
            raise failure if first == process_rank() else outcomes[first][0]
        return [result for _, had_work, result in outcomes[:: tensor_parallel] if had_work]

    def sum(self, count):
        """Sum a number, or a tensor on the CPU, over all ranks."""
        if num_processes() == 1:
            return count
        total = count.clone() if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)
        sum_in_place(total)
        return total if isinstance(count, Tensor) else total.item()


# ---- XLA ---------------------------------------------------------------------------------------------------


@cache
def xla_device() -> torch.device:
    """Return the XLA device; several share one name, with the weights divided among them (shard_weights)."""
    chosen = f"PJRT_DEVICE={os.environ['PJRT_DEVICE']}"
    try:
        import torch_xla
        from torch_xla import backends, runtime

        if chosen == "PJRT_DEVICE=TPU" and not torch_xla.tpu.num_available_chips():
            raise ValueError(f"{chosen}: this machine has no TPU; PJRT_DEVICE=CPU runs XLA without one")
        backends.set_mat_mul_precision("highest")         # a TPU's default multiplies float32 as bfloat16
        num_devices = runtime.global_runtime_device_count()
    except (ImportError, OSError, RuntimeError) as error:          # OSError: libtpu is not installed
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{chosen}: {reason}; see requirements-tpu.txt, or start train.py without PJRT_DEVICE") from error
    if num_devices > 1:
        runtime.use_spmd()
    device = torch_xla.device()
    torch.zeros(1, device=device)  # registers the device before the first backward pass
    return device


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


def seed_generators(of: str | int) -> None:
    """Seed the global random generators of Python, numpy and torch, without transformers' trainers."""
    number = random.Random(of).getrandbits(32) if isinstance(of, str) else of
    for seed in random.seed, np.random.seed, torch.manual_seed:
        seed(number)


# ---- memory ------------------------------------------------------------------------------------------------


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
        """Choose by the work of other processes since the last call. OMP_NUM_THREADS fixes the number."""
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
