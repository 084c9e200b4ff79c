"""
XLA, the compiler of TPUs: its device, its programs, and weights that are divided among several devices.

The operations between two calls of cut_graph become one program, which is reused for equal operations with
equal shapes. So shapes are rounded up (bucket), and each iteration of a loop ends a program. On other devices
these functions have no effect.
"""

import os
from functools import cache

import torch


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


def eager_device(device: torch.device) -> torch.device:
    """Return the device for small tensors of many shapes: the CPU for XLA, which would compile each shape."""
    return torch.device("cpu") if device.type == "xla" else device


def shard_weights(model: torch.nn.Module) -> None:
    """Shard every matrix of a model over all XLA devices along its longest dimension, if there are several.

    Other parameters are replicated. The compiler divides the matrix products among the devices.
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
            longest = max(range(weight.ndim), key=lambda dim: weight.shape[dim])
            spec = tuple("fsdp" if dim == longest else None for dim in range(weight.ndim))
            spmd.mark_sharding(weight, mesh, spec)
