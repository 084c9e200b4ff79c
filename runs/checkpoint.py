"""
Saving everything a run is, and putting it back: bit for bit on the same number of processes and versions of the libraries,
else up to the order in which sums are taken.

A checkpoint is a folder that infer.py can load as a model, with what training needs beside it: the reference as another
such folder, and state.pt with settings, optimiser, schedule, value head, counters, data position and random states. It does not
depend on how many processes there are: what was sharded is gathered by the one that writes. It is written under another
name, flushed to the disk with the checksums of all its files, and renamed when complete, so a run that is killed, or a disk
that is full, leaves the last good one alone.
"""

import hashlib
import os
import platform
import random
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch.utils._pytree import tree_map

from engine.devices import all_gather_object, is_main, num_processes
from engine.sharding import sharded_like, full_tensor
from environments.conversations import EnvironmentRaised
from model import AdapterReference, save_policy, full_state_dict
from reward_functions.calling import RewardError

# The plain numbers of a run.
COUNTERS = ("step", "phase", "phase_step", "skipped", "skipped_in_a_row", "kl_coef", "reward_sum", "reward_count")
SUMS = "SHA256SUMS"             # in the form of `sha256sum --check`


class NotSaved(RuntimeError):
    """A checkpoint could not be written. Those before it are still there."""


@contextmanager
def saved_if_it_raises(run):
    """What a reward function or an environment raises ends the run, and costs none of its steps."""
    position = run.batches.position
    try:
        yield
    except (RewardError, EnvironmentRaised) as error:
        run.batches.position = position                   # nothing was learned from this batch
        try:
            end = f"Saved to {save_checkpoint(run)}: mend it and continue with --output_dir {run.folder.path} --resume"
        except NotSaved as problem:
            end = f"And {problem}"
        raise type(error)(f"{error} {end}") from error


class Diverged(RuntimeError):
    """Too many steps in a row that were not finite."""

    def __init__(self, run, checkpoint):
        super().__init__(
            f"{run.skipped_in_a_row} steps in a row had a loss or gradient that is not finite. The weights before them are in "
            f"{checkpoint}, the batches in {run.folder.path}/skipped.jsonl: look with --replay, or lower --learning_rate"
        )


def save_checkpoint(run) -> Path:
    """Write checkpoints/step-<step>, delete all but the newest --keep_checkpoints, return the new one. In all processes.

    run     has model, tokenizer, reference, step, phase, phase_step and, within a phase, optimizer, scheduler, batches
    raises  NotSaved, in all processes
    """
    folder = run.folder.path / "checkpoints"
    target = folder / f"step-{run.step:08d}"
    while target.exists():                                # saved at this step before: sorts behind it
        target = target.with_name(target.name + "+")
    weights, state = full_state_dict(run.model), state_of(run)
    reference = None if run.reference is None or adapted(run) else full_state_dict(run.reference)
    problem = None
    if is_main():
        partial = folder / "writing"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            save_policy(run.model, run.tokenizer, partial, weights)
            if reference is not None:
                save_policy(run.reference, run.tokenizer, partial / "reference", reference)
            torch.save(state, partial / "state.pt")
            seal(partial)
            partial.rename(target)
            flush(folder)
            for old in sorted(folder.glob("step-*"))[: -run.config.training.keep_checkpoints]:
                shutil.rmtree(old)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            problem = f"could not save {target}: {error}"
    if problem := all_gather_object(problem)[0]:
        raise NotSaved(problem)
    return target


def save_final(run, folder: Path) -> None:
    """Write the policy into a folder, all of it or nothing: that it is there says that the run is complete."""
    new = folder.with_name(folder.name + ".new")
    save_policy(run.model, run.tokenizer, new)
    if is_main():
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def state_of(run) -> dict:
    """What state.pt holds. Nothing of it needs code to be read."""
    state = {name: getattr(run, name) for name in COUNTERS} | {
        "settings": run.config.as_dict(), "shared_prompt": run.shared_prompt, "versions": versions(),
        "random_states": random_states(), "scaler": run.scaler.state_dict(),
        "value_head": tree_map(full_tensor, run.value_head.state_dict()) if run.value_head is not None else None,
        "memory": vars(run.memory),
        "reference_adapter": [full_tensor(kept) for kept in run.reference.kept] if adapted(run) else None,
    }
    if run.optimizer is not None:
        state |= {"optimizer": tree_map(full_tensor, run.optimizer.state_dict()), "scheduler": run.scheduler.state_dict()}
        state["position"] = run.batches.position
    return state


def adapted(run) -> bool:
    """Whether the reference is an adapter, which state.pt holds."""
    return isinstance(run.reference, AdapterReference)


def seal(folder: Path) -> None:
    """Write the checksums of all files in a folder, and flush everything to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{checksum(path)}  {path.relative_to(folder)}\n" for path in files]
    (folder / SUMS).write_text("".join(lines))
    for path in [*files, folder / SUMS, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush(path)


def flush(path: Path) -> None:
    """Make sure that a file, or what a folder says is in it, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if it is what was written."""
    try:
        sums = (folder / SUMS).read_text()
        if "  state.pt\n" not in sums or not sums.endswith("\n"):
            return f"{SUMS} is not what was written"
        for line in sums.splitlines():
            expected, _, name = line.partition("  ")
            if checksum(folder / name) != expected:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def latest_checkpoint(folder: Path, say: Callable = print) -> Path | None:
    """The newest whole checkpoint of a run folder; None if there was none yet. Says which ones are damaged.

    raises  ValueError in one line if all are
    """
    checkpoints = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    for checkpoint in checkpoints:
        problem = damage(checkpoint)
        if not problem:
            return checkpoint
        say(f"checkpoint {checkpoint} is damaged ({problem}); trying the one before it")
    if checkpoints:
        raise ValueError(f"--output_dir={folder}: all its checkpoints are damaged; begin anew in another folder")
    return None


def restore_counters(run, checkpoint: Path) -> None:
    """Put back how far a run has come. The rest waits in run.saved_state for restore_phase. Loading cannot run code."""
    state = torch.load(checkpoint / "state.pt", weights_only=True, map_location="cpu")
    set_random_states(state.pop("random_states"))
    for name in COUNTERS:
        setattr(run, name, state[name])
    vars(run.memory).update(state.pop("memory"))
    if state["versions"] != versions():
        before, now = (", ".join(f"{k} {v}" for k, v in which.items()) for which in (state["versions"], versions()))
        run.folder.say(f"  note   resumed with {now}, begun with {before}: the same run up to rounding, not bit for bit")
    run.saved_state = state


def restore_phase(run) -> bool:
    """Put back optimiser, schedule and data position, if the checkpoint was written within this phase; returns whether."""
    state, run.saved_state = run.saved_state, {}
    if "optimizer" not in state:
        return False
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    for number, parts in state["optimizer"]["state"].items():
        state["optimizer"]["state"][number] = {k: sharded_like(v, parameters[number]) for k, v in parts.items()}
    asked = [{name: group[name] for name in ("initial_lr", "betas", "weight_decay")} for group in run.optimizer.param_groups]
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.scheduler.base_lrs = [settings["initial_lr"] for settings in asked]      # a flag may have changed it
    for group, settings, lr in zip(run.optimizer.param_groups, asked, run.scheduler.get_lr(), strict=True):
        group.update(settings, lr=lr)
    if state["scaler"]:
        run.scaler.load_state_dict(state["scaler"])
    run.batches.position = state["position"]
    if run.value_head is not None:
        run.value_head.load_state_dict(state["value_head"])
    return True


def versions() -> dict:
    """What a run is computed with."""
    return {
        "python": platform.python_version(), "torch": str(torch.__version__), "transformers": transformers.__version__,
        "processes": num_processes(),
    }


def random_states() -> dict:
    """Of every generator that somebody might ask, reward functions among them. The sampler's need none."""
    numbers = np.random.get_state(legacy=False)
    numbers["state"]["key"] = numbers["state"]["key"].tolist()
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numbers}
    return states | {"cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_states(states: dict) -> None:
    """Put back what random_states() gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    states["numpy"]["state"]["key"] = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(states["numpy"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
