"""
Devices and processes: choice of the device, and collectives between processes.

Completions, rewards and advantages are small, so all processes gather them and make the same decisions.
Weights, gradients and optimiser state are large and sharded. Without torchrun there is a single process. On
XLA one process drives all devices.
"""

import atexit
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import RunError, in_one_line
from engine.xla import xla_device

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


def picklable(error: Exception) -> Exception:
    """Return an error that other processes can load: the error itself, or RunError with its line."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RunError(in_one_line(error)).with_traceback(error.__traceback__)


class Ranks:
    """The division of a run's work among its processes, from the view of one of them.

    All processes call every method in the same order. Work is divided into slices; the processes of one
    tensor-parallel group have the same slice, and do the same work.

    per_slice  the number of processes in such a group: --mesh tp=N
    """

    def __init__(self, per_slice: int = 1):
        self.per_slice = per_slice

    @property
    def num_slices(self) -> int:
        return num_processes() // self.per_slice

    @property
    def own_slice(self) -> int:
        """Return the number of this process's slice, from 0."""
        return process_rank() // self.per_slice

    def slice(self, items: list) -> list:
        """Return this process's slice of a list. Slices cover it; their sizes differ by at most one."""
        n = len(items)
        return items[n * self.own_slice // self.num_slices : n * (self.own_slice + 1) // self.num_slices]

    def gather(self, work: Callable, *columns: list) -> list:
        """Call work with this process's slice of each column, and return the results of all slices in order.

        Empty slices have no result. The first rank's exception is raised on every rank, also that of a result
        that cannot be pickled.
        """
        failure = result = None
        mine = [self.slice(column) for column in columns]
        has_work = not mine or len(mine[0]) > 0
        if num_processes() == 1:
            return [work(*mine)] if has_work else []
        try:
            result = work(*mine) if has_work else None
            pickle.dumps(result)                          # raises here and not in all_gather_object
        except Exception as error:
            failure, result = picklable(error), None
        outcomes = all_gather_object((failure, has_work, result))
        first = next((rank for rank, (error, *_) in enumerate(outcomes) if error), None)
        if first is not None:
            raise failure if first == process_rank() else outcomes[first][0]
        return [result for _, had_work, result in outcomes[:: self.per_slice] if had_work]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor on the CPU over all slices."""
        if num_processes() == 1:
            return tensor
        total = tensor.clone()
        self.sum_in_place(total)
        return total

    def sum_in_place(self, tensor: Tensor) -> None:
        """Sum a tensor over all slices, in place; the processes of one slice count once."""
        if process_rank() % self.per_slice:
            tensor.zero_()
        dist.all_reduce(tensor)


def on_all_ranks(work: Callable):
    """Return work(), called on each rank. The first rank's exception is raised on every rank."""
    results = []
    Ranks().gather(lambda: results.append(work()))
    return results[0]


def on_main(work: Callable):
    """Call work on the first rank, and return its result on all ranks. Its exception is raised on all."""
    return Ranks().gather(lambda: work() if is_main() else None)[0]
