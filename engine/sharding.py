"""
Shard weights over processes: loading, FSDP2, tensor parallelism, gathering, clipping.

Not supported: pipeline parallelism.
"""

import logging
import math
import os
from contextlib import contextmanager
from fnmatch import fnmatch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engine.devices import Ranks, best_device, is_main, num_processes
from engine.text_model import layers_of, text_model

# torch warns that gathering over two mesh dimensions is slow. Only checkpoints do it.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}      # transformers' plan -> torch
PARTIAL = "replicated_with_grad_allreduce"                             # norms of a process's own heads


@contextmanager
def loading_shards():
    """Make from_pretrained keep only a shard of each weight, on the device, if there are several processes.

    Each process reads and converts all weights, one after the other, and drops the shards of the others. So
    it never holds more than its shards and one whole weight, such as the experts of a layer, in float32.
    """
    if num_processes() == 1:
        yield
        return
    mesh = init_device_mesh(best_device().type, (num_processes(),))

    def keep_shard(module, name: str, weight):            # called for each new parameter of a module
        read = getattr(weight, "_is_hf_initialized", False) and not weight.is_meta
        if read and weight.ndim and not isinstance(weight, DTensor):
            part = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).clone()
            weight = torch.nn.Parameter(part, weight.requires_grad)
            weight._is_hf_initialized = True              # else transformers initialises it again
        return weight

    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"          # else threads read all weights in advance
    with torch.nn.modules.module.register_module_parameter_registration_hook(keep_shard):
        yield


def set_tensor(model, name: str, tensor: Tensor) -> None:
    """Replace a parameter or a buffer."""
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, tensor)


def shard(model, mesh: dict[str, int]) -> None:
    """Shard the weights over all processes. Each layer is a unit that is gathered for its forward pass.

    mesh    {"replicate": k, "fsdp": m, "tp": n}: k copies of the weights, each sharded over m times n
            processes; n processes also divide the matrix products of every layer
    raises  ValueError with one line if the model cannot be divided in this way
    """
    if num_processes() == 1:
        return
    device = next(model.parameters()).device
    weights = dict(model.named_parameters())              # whole on the device one at a time
    for name, weight in weights.items():
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        set_tensor(model, name, torch.nn.Parameter(empty, weight.requires_grad))
    model.tie_weights()
    device_mesh = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    partial = parallelize_layers(model, device_mesh["tp"]) if mesh["tp"] > 1 else []
    data_mesh = device_mesh["replicate", "fsdp"] if mesh["replicate"] > 1 else device_mesh["fsdp"]
    for module in [*layers_of(model), model]:
        fully_shard(module, mesh=data_mesh)
        module.set_gradient_divide_factor(1.0)  # sum, not mean: tokens have weights
        module.set_force_sum_reduction_for_comms(True)
    for name, empty in list(model.named_parameters()):
        weight = weights.pop(name)
        part = sharded_like(weight.detach(), empty)
        set_tensor(model, name, torch.nn.Parameter(part, weight.requires_grad))
    model.tie_weights()
    for name, parameter in text_model(model).named_parameters():
        if any(fnmatch(name, f"{pattern}.*") for pattern in partial):
            parameter.partial_over = device_mesh["tp"].get_group()
    model.as_forward_pass = lambda function: function()   # see Network.run
    register_fsdp_forward_method(model, "as_forward_pass")
    with torch.no_grad():                                 # the first pass determines the root module
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))
    reshard(model)


def parallelize_layers(model, device_mesh) -> list[str]:
    """Apply transformers' tensor-parallel plan: every process has some heads and some columns of the MLP.

    returns  patterns of the modules that are replicated, with a gradient from the heads of each process
    """
    text_config, n = model.config.get_text_config(), device_mesh.size()
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    is_known = plan and set(plan.values()) <= {*STYLES, PARTIAL}
    if not is_known or text_config.num_key_value_heads % n or text_config.intermediate_size % n:
        raise ValueError(
            f"--mesh tp={n}: {text_config.model_type} cannot be divided: transformers has no plan for it, or "
            f"its key heads or columns are not a multiple of {n}; use only fsdp")
    styles = {name: STYLES[style]() for name, style in plan.items() if style in STYLES}
    parallelize_module(text_model(model), device_mesh, styles)
    return [name for name, style in plan.items() if style == PARTIAL]


@contextmanager
def gathered_weights(model):
    """Gather all weights in every process, once for many forward passes without gradient."""
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
    """Free gathered weights. Call before weights change, or the next pass uses the old ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_tensor(tensor):
    """Gather a sharded tensor, or those in a container, to the CPU of the main process; None in the others.

    A tensor on XLA is moved to the CPU. Other tensors and values are returned unchanged.
    """
    if isinstance(tensor, dict):
        return {name: full_tensor(value) for name, value in tensor.items()}
    if isinstance(tensor, list | tuple):
        return type(tensor)(map(full_tensor, tensor))
    if isinstance(tensor, DTensor):
        full = tensor.full_tensor()
        return full.cpu() if is_main() else None
    return tensor.cpu() if isinstance(tensor, Tensor) and tensor.device.type == "xla" else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor, parameter):
    """Shard a tensor like a parameter of the same shape; return everything else as it is.

    tensor  whole and the same in every process, or sharded in another way
    """
    if not isinstance(parameter, DTensor) or getattr(tensor, "shape", None) != parameter.shape:
        return tensor
    whole = gathered(tensor)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()


def sum_and_clip_gradient(parameters: list, max_norm: float, ranks: Ranks) -> float:
    """Sum the gradient over all processes and clip it to a norm, in place. Return the norm before clipping.

    FSDP has already summed the gradients of sharded parameters. Those of other parameters, and of norms over
    a process's own heads, are summed here, once after the last backward pass.
    """
    by_mesh: dict[object, list] = {}                      # None: not sharded
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
            if hasattr(parameter, "partial_over"):
                dist.all_reduce(parameter.grad.to_local(), group=parameter.partial_over)
    if num_processes() > 1:
        for parameter in by_mesh.get(None, []):
            ranks.sum_in_place(parameter.grad)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in by_mesh.values()]
    norm = math.hypot(*(float(gathered(n)) for n in norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, torch.tensor(norm))
    return norm
