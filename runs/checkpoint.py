"""
Save and restore the complete state of a run. With the same versions and numbers of processes and threads, a
resumed run is bit-identical to an uninterrupted one, otherwise equal up to rounding.

A checkpoint is a folder that infer.py can load as a model. It also contains a reference that is a copy of the
policy, as another such folder, and state.pt, which Run.save_checkpoint writes:

    settings, fingerprints      compared with those of a resumed run by compare_settings in runs/resume.py
    own_functions               names of functions that were passed to train(): compare_settings
    progress, scaler, versions  Run.restore
    reference_adapter           a reference that is only an adapter: load_reference in engine/reference.py
    file_sizes                  records are cut to these: RunFolder.open
    optimizer, scheduler, value_head, position          not between two phases: Run.begin_phase

It does not depend on the number of processes, because sharded tensors are gathered first. If the run is
killed or the disk is full, the previous checkpoint stays intact: see write_folder.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch
import transformers

from engine.devices import num_processes, on_main
from engine.errors import RunError, first_line
from engine.models import full_state_dict, save_any_policy
from engine.sharding import full_tensor, sharded_like
from runs.folder import flush


def write_checkpoint(folder: Path, step: int, model, tokenizer, reference, state: dict, *, keep: int) -> Path:
    """Write folder/step-<step>, delete all but the newest checkpoints, return its path. Call on all ranks.

    reference  a model, or None
    state      contents of state.pt; tensors may be sharded
    raises     like write_folder, on all ranks
    """
    target = folder / f"step-{step:08d}"
    weights, state = full_state_dict(model), full_tensor(state)
    reference_weights = None if reference is None else full_state_dict(reference)

    def write(partial: Path) -> None:
        save_any_policy(model, tokenizer, partial, weights)
        if reference is not None:
            save_any_policy(reference, tokenizer, partial / "reference", reference_weights)
        torch.save(state, partial / "state.pt")
        for lines in folder.parent.glob("*.jsonl"):       # a resumed run does not repeat these steps
            flush(lines)

    def write_newest() -> None:
        write_folder(target, write)
        for old in checkpoints_in(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    on_main(write_newest)
    return target


def write_policy(model, tokenizer, folder: Path) -> None:
    """Write the policy to best/ or final/ by write_folder; final/ completes a run. Call on all ranks."""
    weights = full_state_dict(model)
    on_main(lambda: write_folder(
        folder, lambda partial: save_any_policy(model, tokenizer, partial, weights)))


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder completely or not at all: first as writing/ beside it, flushed to disk, then renamed.

    If the process is killed between the two renames, the earlier folder remains as target-old.

    write   a function that writes files to the folder in its argument
    raises  RunError if the folder cannot be written
    """
    partial, old = target.with_name("writing"), target.with_name(f"{target.name}-old")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        for path in [*partial.rglob("*"), partial]:       # files and folders
            flush(path)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)        # left by a kill
            target.rename(old)                            # renaming is instant, deleting is not
        partial.rename(target)
        flush(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:                            # a full disk, a state that torch.save cannot pickle
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"could not save {target}: {first_line(error)}") from error


def optimizer_state(policy, batches) -> dict:
    """Return the float16 loss scaler for state.pt; within a phase, also optimiser, schedule and position.

    Its tensors may be sharded. No collective is called, since the state_dict of a user's optimiser may raise.
    """
    scaler, value_head = policy.scaler, policy.value_head
    state = {"scaler": scaler and scaler.state_dict()}
    if policy.optimizer is None:                          # between two phases
        return state
    return state | {
        "value_head": value_head and value_head.state_dict(),
        "scheduler": policy.scheduler.state_dict(), "position": batches.position,
        "optimizer": policy.optimizer.state_dict(),
    }


def load_optimizer_state(policy, state: dict) -> None:
    """Restore the state of a phase from optimizer_state, but keep the current peak learning rates."""
    moments, optimizer, scheduler = state["optimizer"]["state"], policy.optimizer, policy.scheduler
    parameters = policy.trained_parameters
    for i, tensors in moments.items():
        moments[i] = {name: sharded_like(x, parameters[i]) for name, x in tensors.items()}
    optimizer.load_state_dict(state["optimizer"])
    peaks = scheduler.base_lrs                            # a flag may have changed them
    scheduler.load_state_dict(state["scheduler"] | {"base_lrs": peaks})
    for group, peak, factor in zip(optimizer.param_groups, peaks, scheduler.lr_lambdas, strict=True):
        group.update(initial_lr=peak, lr=peak * factor(scheduler.last_epoch))
    if policy.value_head is not None:
        policy.value_head.load_state_dict(state["value_head"])


def checkpoints_in(folder: Path) -> list[Path]:
    """Return step-<step> of a folder in order; step-<step>-old before it. Other names are a user's copies."""
    names = [name for name in os.listdir(folder) if re.fullmatch(r"step-\d+(-old)?", name)]
    order = sorted(names, key=lambda name: (name.removesuffix("-old"), not name.endswith("-old")))
    return [folder / name for name in order]


def latest_checkpoint(folder: Path) -> Path | None:
    """Return a run folder's newest checkpoint or None. Raises ValueError, or OSError, if it is unreadable."""
    parent = folder / "checkpoints"
    *before, newest = [None, *(checkpoints_in(parent) if parent.exists() else [])]
    if newest:
        try:
            read_state(newest, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            fix = f"remove it to continue from {before[-1]}" if before[-1] else "start in another folder"
            raise ValueError(f"{newest} cannot be read: {first_line(error)}; {fix}") from None
    return newest


def read_state(checkpoint: Path, *, mmap: bool = False) -> dict:
    """Read state.pt of a checkpoint without running code in it. mmap: read only the parts that are used."""
    return torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu", mmap=mmap)


def versions(policy) -> dict:
    """Return what bit-identical results depend on: versions, device, processes, threads, engine.

    Without OMP_NUM_THREADS, results also depend on other processes: see IdleCores in engine/host.py.
    """
    return {
        "python": platform.python_version(), "torch": str(torch.__version__),
        "transformers": transformers.__version__, "device": policy.device.type, "processes": num_processes(),
        "threads": os.environ.get("OMP_NUM_THREADS", os.cpu_count()), "engine": type(policy).__name__,
    }
