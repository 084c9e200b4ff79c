"""
Where a run computes: which device there is, one process or many, and how much memory it took. With sharding.py the only file
that knows torch.distributed and torch_xla.

    torchrun --nproc_per_node 4 train.py --use_grpo ...

Every process samples and scores a share of the prompts and forwards a share of the packs. What is small, completions, rewards
and advantages, is gathered: every process knows all of it and takes the same decisions. What is large, weights, gradients and
the optimiser's state, is sharded (sharding.py). Processes that divide every layer's matrices among them (tensor parallelism)
have the same share and do the same, as if they were one. Alone, everything here answers as the first of one process.

XLA compiles, and one process drives all its devices. What is asked of it between two cuts becomes one program, kept for
whenever the same is asked for again with the same shapes. So there shapes are rounded up (bucket), and programs end where
loops turn (cut_graph). On a CPU or a GPU neither does anything.
"""

import ctypes
import importlib.util
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

tensor_parallel = 1                                                    # processes with the same share: --mesh tp=N


def best_device() -> torch.device:
    """The XLA device if PJRT_DEVICE names one (TPU, or CPU to try it out), else the GPU if there is one, else the CPU.

    A process that torchrun started joins the others first.
    """
    cuda, processes = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("PJRT_DEVICE"):
        if processes > 1:
            raise ValueError(
                f"PJRT_DEVICE={os.environ['PJRT_DEVICE']} and WORLD_SIZE={processes}: one process drives all XLA devices; "
                "start it without torchrun, or unset PJRT_DEVICE"
            )
        return xla_device()
    if processes == 1:
        return torch.device("cuda" if cuda else "cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")        # what is gathered lies on the CPU
    return device


def shutdown() -> None:
    """Part from the other processes at the end of a program."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- one process or many ---------------------------------------------------------------------------------------------


def num_processes() -> int:
    """How many there are; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process_rank() -> int:
    """Which one this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process is the one that writes and speaks."""
    return process_rank() == 0


def data_parallel_size() -> int:
    """Among how many the work is divided."""
    return num_processes() // tensor_parallel


def rank_slice(things: list) -> list:
    """What this process has to do, as evenly as can be; all shares in order are all things."""
    n, size, number = len(things), data_parallel_size(), process_rank() // tensor_parallel
    return things[n * number // size : n * (number + 1) // size]


def lockstep_batches(batches: list) -> Iterator[tuple[object, bool]]:
    """(batch, whether it counts) for this process, in as many rounds as everywhere.

    A forward pass of a sharded model needs all processes: whoever has nothing left to do repeats something for nothing.
    """
    size = data_parallel_size()
    for start in range(0, len(batches), size):
        mine = start + process_rank() // tensor_parallel
        yield batches[min(mine, len(batches) - 1)], mine < len(batches)


def gather(thing) -> list:
    """What every process has at this place, in order: [thing] when alone."""
    if num_processes() == 1:
        return [thing]
    things = [None] * num_processes()
    dist.all_gather_object(things, thing)
    return things


def gather_from_ranks(work: Callable) -> list:
    """The results of work() for all shares, in order. What one process raises first, all raise."""
    failure = result = None
    try:
        result = work()
    except Exception as error:
        failure = error
    parts = gather((failure and picklable(failure), result))
    first = next((number for number, (problem, _) in enumerate(parts) if problem), None)
    if first is not None:
        raise failure if first == process_rank() else parts[first][0]
    return [result for _, result in parts[::tensor_parallel]]


def picklable(error: Exception) -> Exception:
    """An exception that other processes can be told of."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:                                     # of a class that pickle does not find, or cannot make anew
        return RuntimeError(f"{type(error).__name__}: {error}")


def all_sum(count):
    """The sum over all shares of a number, or of a tensor on the CPU; itself where there is one process."""
    if num_processes() == 1:
        return count
    total = count.clone() if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)
    sum_in_place(total)
    return total if isinstance(count, Tensor) else total.item()


def sum_in_place(tensor: Tensor) -> None:
    """In place, over all shares. Those who have the same one count once."""
    if process_rank() % tensor_parallel:
        tensor.zero_()
    dist.all_reduce(tensor)


# ---- XLA -------------------------------------------------------------------------------------------------------------


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


# ---- memory ----------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what tensors leave behind, in blocks of up to 128 MB, for the next ones.

    Otherwise every large tensor on a CPU is fetched from the kernel anew and zeroed page by page, which took a third of a
    training pass (dev/LOG.md).
    """
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        set_option, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3           # names of malloc.h
        if set_option(mmap_threshold, 128 * 2**20) or set_option(mmap_threshold, 32 * 2**20):    # older ones refuse 128
            set_option(trim_threshold, 2**31 - 1)


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
