"""
Where a run computes: which device there is, one process or many, and how much memory it took. The only file that knows
torch.distributed and torch_xla.

    torchrun --nproc_per_node 4 train.py --use_grpo ...

Every process samples and scores a share of the prompts and forwards a share of the packs. What is small, completions, rewards
and advantages, is gathered: every process knows all of it and takes the same decisions. What is large, weights, gradients and
the optimiser's state, is sharded (FSDP2). Processes that divide every layer's matrices among them (tensor parallelism)
have the same share and do the same, as if they were one. Alone, everything here answers as the first of one process.
Left out on purpose: pipeline parallelism.

XLA compiles, and one process drives all its devices. What is asked of it between two cuts becomes one program, kept for
whenever the same is asked for again with the same shapes. So there shapes are rounded up (bucket), and programs end where
loops turn (cut_graph). On a CPU or a GPU neither does anything.
"""

import ctypes
import importlib.util
import logging
import math
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Only checkpoints gather weights that are divided in two ways, and time does not matter there.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}      # of transformers' tensor-parallel plans, in torch
PARTIAL = "replicated_with_grad_allreduce"                             # norms of a process's own heads
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


def leave() -> None:
    """Part from the other processes at the end of a program."""
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- one process or many ---------------------------------------------------------------------------------------------


def num_processes() -> int:
    """How many there are; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def process_number() -> int:
    """Which one this is, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this process is the one that writes and speaks."""
    return process_number() == 0


def num_shares() -> int:
    """Among how many the work is divided."""
    return num_processes() // tensor_parallel


def share(things: list) -> list:
    """What this process has to do, as evenly as can be; all shares in order are all things."""
    n, size, number = len(things), num_shares(), process_number() // tensor_parallel
    return things[n * number // size : n * (number + 1) // size]


def rounds(batches: list) -> Iterator[tuple[object, bool]]:
    """(batch, whether it counts) for this process, in as many rounds as everywhere.

    A forward pass of a sharded model needs all processes: whoever has nothing left to do repeats something for nothing.
    """
    size = num_shares()
    for start in range(0, len(batches), size):
        mine = start + process_number() // tensor_parallel
        yield batches[min(mine, len(batches) - 1)], mine < len(batches)


def gather(thing) -> list:
    """What every process has at this place, in order: [thing] when alone."""
    if num_processes() == 1:
        return [thing]
    things = [None] * num_processes()
    dist.all_gather_object(things, thing)
    return things


def everywhere(work: Callable) -> list:
    """The results of work() for all shares, in order. What one process raises first, all raise."""
    failure = result = None
    try:
        result = work()
    except Exception as error:
        failure = error
    parts = gather((failure and as_sent(failure), result))
    first = next((number for number, (problem, _) in enumerate(parts) if problem), None)
    if first is not None:
        raise failure if first == process_number() else parts[first][0]
    return [result for _, result in parts[::tensor_parallel]]


def as_sent(error: Exception) -> Exception:
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
    add_up(total)
    return total if isinstance(count, Tensor) else total.item()


def add_up(tensor: Tensor) -> None:
    """In place, over all shares. Those who have the same one count once."""
    if process_number() % tensor_parallel:
        tensor.zero_()
    dist.all_reduce(tensor)


# ---- sharded weights -------------------------------------------------------------------------------------------------


def shard(model, layers: list, mesh: dict[str, int]) -> None:
    """Share the weights out over all processes, each layer a unit that is gathered when it is needed.

    mesh    {"replicate": k, "fsdp": m, "tp": n}: k copies of the weights, each over m times n processes; the last n also divide
            every layer's matrices, and the work on them
    raises  ValueError in one line if the model cannot be divided like that
    """
    global tensor_parallel
    if num_processes() == 1:
        return
    device, tensor_parallel = next(model.parameters()).device, mesh["tp"]
    over = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    partial = divide_matrices(model, over["tp"]) if tensor_parallel > 1 else []
    for module in [*layers, model]:
        fully_shard(module, mesh=over["replicate", "fsdp"] if mesh["replicate"] > 1 else over["fsdp"])
        module.set_gradient_divide_factor(1.0)            # a sum over processes: losses have their denominators already
        module.set_force_sum_reduction_for_comms(True)
    for name, parameter in model.base_model.named_parameters():
        if any(fnmatch(name, f"{pattern}.*") for pattern in partial):
            parameter.partial_over = over["tp"].get_group()
    model.mesh, model.as_forward_pass = mesh, lambda function: function()
    register_fsdp_forward_method(model, "as_forward_pass")
    with torch.no_grad():                                 # the first pass settles which module is the outermost
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    reshard(model)


def divide_matrices(model, over) -> list[str]:
    """Tensor parallelism after transformers' plan for the model: every process has some heads, and columns of the MLP.

    returns  patterns of the modules that all processes have, each with a gradient from its own heads alone
    """
    config = model.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None) or {}
    divided = [config.num_key_value_heads, config.intermediate_size] if plan else []
    if not plan or set(plan.values()) - {*STYLES, PARTIAL} or any(size % over.size() for size in divided):
        raise ValueError(
            f"--mesh tp={over.size()}: {config.model_type} cannot be divided like that, "
            + (f"with {divided[0]} key heads and {divided[1]} columns" if divided else "transformers has no plan for it")
            + "; use fsdp alone"
        )
    parallelize_module(model.base_model, over, {name: STYLES[how]() for name, how in plan.items() if how in STYLES})
    return [name for name, how in plan.items() if how == PARTIAL]


def forward_pass(model, function: Callable):
    """function(), which asks parts of the model, as one forward pass: with the weights that it needs. Returns tensors."""
    return model.as_forward_pass(function) if hasattr(model, "mesh") else function()


@contextmanager
def gathered_weights(model):
    """All weights in every process, gathered once, for many forward passes without gradient."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()


def reshard(model) -> None:
    """Drop what was gathered: before weights are changed, or the next pass would see the old ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor):
    """A sharded tensor gathered, on the CPU; only in the process that writes, elsewhere None. From XLA on the CPU, too; others,
    and what is no tensor, as they are.
    """
    if isinstance(tensor, DTensor):
        full = tensor.full_tensor()
        return full.cpu() if is_main() else None
    return tensor.cpu() if isinstance(tensor, Tensor) and tensor.device.type == "xla" else tensor


def sharded_like(tensor, parameter):
    """A whole tensor, shared out as a parameter of the same shape is; other things as they are."""
    if not isinstance(parameter, DTensor) or getattr(tensor, "shape", None) != parameter.shape:
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, or what is still under way to it; others as they are."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def bytes_here(tensor) -> int:
    """What a tensor takes in this process."""
    part = local(tensor)
    return part.numel() * part.element_size()


def clip_gradient(parameters: list, longest: float) -> float:
    """Cut the gradient to a length. Returns its length before, over all processes.

    Adds up first what processes found out apart: gradients of parameters that are not sharded, and of norms of a process's
    own heads. Once here, and not with every backward pass, so that what is added up already is not added up again.
    """
    by_mesh: dict[object, list] = {}                      # None: not sharded
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
            if hasattr(parameter, "partial_over"):
                dist.all_reduce(parameter.grad.to_local(), group=parameter.partial_over)
    if num_processes() > 1:
        for parameter in by_mesh.get(None, []):
            add_up(parameter.grad)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part]) for part in by_mesh.values()]
    norm = math.hypot(*(float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms))
    for part in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(part, longest, torch.tensor(norm))
    return norm


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
