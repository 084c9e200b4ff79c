"""
Weights over several processes or XLA devices: FSDP2, tensor parallelism, and what gathers, saves and clips them.

Left out on purpose: pipeline parallelism.
"""

import logging
import math
from collections.abc import Callable
from contextlib import contextmanager
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engine import devices
from engine.devices import sum_in_place, is_main, num_processes

# Only checkpoints gather weights that are divided in two ways, and time does not matter there.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}      # of transformers' tensor-parallel plans, in torch
PARTIAL = "replicated_with_grad_allreduce"                             # norms of a process's own heads


def shard(model, layers: list, mesh: dict[str, int]) -> None:
    """Share the weights out over all processes, each layer a unit that is gathered when it is needed.

    mesh    {"replicate": k, "fsdp": m, "tp": n}: k copies of the weights, each over m times n processes; the last n also divide
            every layer's matrices, and the work on them
    raises  ValueError in one line if the model cannot be divided like that
    """
    if num_processes() == 1:
        return
    device, devices.tensor_parallel = next(model.parameters()).device, mesh["tp"]
    over = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    partial = divide_matrices(model, over["tp"]) if devices.tensor_parallel > 1 else []
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


def full_tensor(tensor):
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
            sum_in_place(parameter.grad)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part]) for part in by_mesh.values()]
    norm = math.hypot(*(float(n.full_tensor() if isinstance(n, DTensor) else n) for n in norms))
    for part in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(part, longest, torch.tensor(norm))
    return norm


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
