"""
Saving everything a run is, and finding it again.

A checkpoint is a folder that infer.py can load as a model, with what training needs beside it: the reference as another
such folder, and state.pt with optimiser, schedule, counters, data position and random state. It is written under another
name and renamed when complete, so that a run killed at any moment leaves the last good one alone.
"""

import shutil
from pathlib import Path

import torch

from model import save_policy


def save_checkpoint(folder: Path, step: int, model, tokenizer, reference, state: dict, keep: int) -> Path:
    """Write folder/step-<step> and delete all but the newest `keep`. state: tensors, numbers, strings, lists, dicts."""
    target, partial = folder / f"step-{step:08d}", folder / "writing"
    shutil.rmtree(partial, ignore_errors=True)
    save_policy(model, tokenizer, partial)
    if reference is not None:
        save_policy(reference, tokenizer, partial / "reference")
    torch.save(state | {"step": step, "random_state": torch.get_rng_state()}, partial / "state.pt")
    if target.exists():                                   # the same step again: keep the old one until the new one is there
        shutil.rmtree(folder / "replaced", ignore_errors=True)
        target.rename(folder / "replaced")
    partial.rename(target)
    shutil.rmtree(folder / "replaced", ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return max(folder.glob("step-*"), default=None)


def load_state(path: Path) -> dict:
    """What save_checkpoint was given as state; the random state is set. Loading it cannot run code."""
    state = torch.load(path / "state.pt", weights_only=True)
    torch.set_rng_state(state["random_state"])
    return state
