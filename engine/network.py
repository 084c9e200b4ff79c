"""
A network: a model of transformers, its precision, how it is sharded, and the adapter of a reference.

Layers compute in 16 bits under autocast, and frozen weights are stored in 16 bits; trained weights,
embeddings, norms and the head are float32. The module enters autocast itself, because code without a Network
calls it too: sample.py, the generate of transformers, and those to whom train() returns the model. So these
functions replace methods of the module: set_precision its base_model.forward, recompute_activations
layer.forward; and sharding.shard adds as_forward_pass.
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from engine.sharding import reshard, set_tensor, shard
from engine.text_model import auto_class, has_adapter, layers_of, text_model, trainable_parameters
from engine.xla import shard_weights


@dataclass
class Network:
    """A model, and how it computes. Within in_use, run(function) is one forward pass of it.

    module     a model of transformers
    mesh       how its weights are sharded over several processes, see sharding.shard
    adapter    None, or the adapter of a reference, which has the module in common with the policy: values for
               its trained parameters
    """

    module: PreTrainedModel
    mesh: dict[str, int] = field(default_factory=dict)
    adapter: list[Tensor] | None = None

    @property
    def precision(self) -> str:
        """Return the precision of the layers, which set_precision has chosen."""
        forward = self.module.base_model.forward
        return forward.precision if isinstance(forward, Autocast) else "float32"

    @property
    def is_exact(self) -> bool:
        """Return True if layers compute in float32 throughout, and not in 16 bits or, on CUDA, in TF32."""
        return self.precision == "float32" and torch.get_float32_matmul_precision() == "highest"

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.module, FSDPModule)

    def run(self, function: Callable):
        """Run function(), which calls parts of the module and returns tensors, as one forward pass of it.

        All that reads weights happens within it, because FSDP gathers them for a forward pass.
        """
        return self.module.as_forward_pass(function) if self.is_sharded else function()

    @contextmanager
    def in_use(self, device: torch.device):
        """Within the context the module is on a device and has this adapter; afterwards it is as before."""
        home = next(self.module.parameters()).device
        shared = trainable_parameters(self.module) if self.adapter else []
        trained = [parameter.detach().clone() for parameter in shared]

        def exchange(values: list[Tensor]) -> None:
            reshard(self.module)                          # else the next pass would use gathered ones
            copy_into(shared, values)

        try:
            if home != device:
                move(self.module, device)                 # from the CPU, with --reference_offload
            if shared:
                exchange(self.adapter)
            yield
        finally:
            if shared:
                exchange(trained)
            if home != device:
                move(self.module, home)

    def reference_weights(self) -> list[Tensor]:
        """Return what a reference copies from the policy: all weights, or only those of an adapter."""
        reshard(self.module)                              # gathered weights would not be changed
        if has_adapter(self.module):
            return self.adapter or trainable_parameters(self.module)
        return list(self.module.parameters())

    def frozen_copy(self, *, exact: bool = False) -> "Network":
        """Return a reference without gradients: a copy of the module, or only of its adapter.

        exact  keep all weights in float32 for a moving average, whose small steps 16 bits would round to 0
        """
        if has_adapter(self.module):
            adapter = [parameter.detach().clone() for parameter in trainable_parameters(self.module)]
            return Network(self.module, self.mesh, adapter)
        if not self.is_sharded:
            module = copy.deepcopy(self.module).eval().requires_grad_(False)
            return Network(module if exact else round_frozen_weights(module, self.precision))
        with torch.device("meta"):
            module = auto_class(self.module.config).from_config(self.module.config, dtype=torch.float32)
        for name, parameter in self.module.named_parameters():
            set_tensor(module, name, torch.nn.Parameter(parameter.detach().clone()))
        for name, buffer in self.module.named_buffers():
            set_tensor(module, name, buffer.clone())
        module.tie_weights()
        set_precision(module.eval(), self.precision)
        module.requires_grad_(False)
        shard(module if exact else round_frozen_weights(module, self.precision), self.mesh)
        return Network(module, self.mesh)


def network_of(model: "PreTrainedModel | Network") -> Network:
    """Return the network of a module that another library or a notebook has made; a network as it is."""
    return model if isinstance(model, Network) else Network(model)


@torch.no_grad()
def copy_into(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in place."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def move(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move the model to a device, in place. XLA creates new parameters, so shared ones are tied again."""
    model.to(device)
    if isinstance(model, PreTrainedModel) and not isinstance(model, FSDPModule):      # sharded: already there
        model.tie_weights()
        shard_weights(model)
    return model


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each layer, and forward the layer again in the backward pass.

    The option for this in transformers works only in training mode, which has dropout.
    """
    from engine.prefix_attention import use_prefix_attention  # only for this

    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"--gradient_checkpointing=True: {type(model).__name__} has no layers that support it; remove it")

    def recomputed(forward, *args, **kwargs):
        attention = partial(use_prefix_attention, model) if "token_layout" in kwargs else nullcontext
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), attention()), **kwargs)

    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def set_precision(model: PreTrainedModel, precision: str) -> None:
    """Make the layers of a model compute in bfloat16 or float16. auto, float32: leave them as they are."""
    if precision not in ("auto", "float32"):              # auto: see resolve_precision
        model.base_model.forward = Autocast(precision, model.base_model.forward)
        round_frozen_weights(model, precision)


@dataclass
class Autocast:
    """A model's forward method under autocast, on the device that the model has when it is called."""

    precision: str
    forward: Callable

    def __call__(self, *args, **kwargs):
        dtype = getattr(torch, self.precision)
        with torch.autocast(self.forward.__self__.device.type, dtype=dtype):
            return self.forward(*args, **kwargs)


def round_frozen_weights(model: PreTrainedModel, precision: str) -> PreTrainedModel:
    """Store the frozen matrices of the layers in the precision of the layers. Returns the model.

    Autocast would convert them in every pass, so results stay bit-identical; only a mixture's experts are in
    float32 while they are trained. Embeddings and head stay in float32, and so does everything that autocast
    does not convert: matrices that are not factors of a product, and in float16 experts.
    """
    head, dtype = model.get_output_embeddings().weight, getattr(torch, precision)
    for module in text_model(model).modules():
        if dtype == torch.float16 and "Experts" in type(module).__name__:
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            is_matrix = weight.ndim > 1 and not isinstance(module, torch.nn.Embedding) and weight is not head
            is_factor = is_matrix and name != "A_log" and not name.endswith("bias")
            if is_factor and not weight.requires_grad:
                setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
    return model
