"""
Saving everything a run is, and putting it back.

A checkpoint is a folder that infer.py can load as a model, with what training needs beside it: the reference as another
such folder, and state.pt with settings, optimiser, schedule, value head, counters, data position and random state. It is
written under another name and renamed when complete, so that a run killed at any moment leaves the last good one alone.
"""

import shutil
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from model import save_policy

# The plain numbers of a run.
COUNTERS = ("step", "phase", "phase_step", "skipped", "skipped_in_a_row", "kl_coef", "reward_sum", "reward_count")


def save_checkpoint(run) -> Path:
    """Write checkpoints/step-<step>, delete all but the newest --keep_checkpoints, return the new one.

    run  has model, tokenizer, reference, step, phase, phase_step and, within a phase, optimizer, scheduler, batches
    """
    folder = run.folder.path / "checkpoints"
    target, partial, replaced = folder / f"step-{run.step:08d}", folder / "writing", folder / "replaced"
    shutil.rmtree(partial, ignore_errors=True)
    save_policy(run.model, run.tokenizer, partial)
    if run.reference is not None:
        save_policy(run.reference, run.tokenizer, partial / "reference")
    state = {name: getattr(run, name) for name in COUNTERS} | {"random_state": torch.get_rng_state()}
    state |= {"settings": run.config.as_dict(), "shared_prompt": run.shared_prompt}
    state["value_head"] = run.value_head.state_dict() if run.value_head is not None else None
    if run.optimizer is not None:
        state |= {"optimizer": run.optimizer.state_dict(), "scheduler": run.scheduler.state_dict()}
        state["position"] = run.batches.position
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), partial / "state.pt")
    if target.exists():                                   # the same step again: keep the old one until the new one is there
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[: -run.config.training.keep_checkpoints]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, if there is one."""
    return max((folder / "checkpoints").glob("step-*"), default=None)


def restore_counters(run, checkpoint: Path) -> None:
    """Put back how far a run has come. The rest waits in run.saved_state for restore_phase. Loading cannot run code."""
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    torch.set_rng_state(state.pop("random_state"))
    for name in COUNTERS:
        setattr(run, name, state[name])
    run.saved_state = state


def restore_phase(run) -> bool:
    """Put back optimiser, schedule and data position, if the checkpoint was written within this phase; returns whether."""
    state, run.saved_state = run.saved_state, {}
    if "optimizer" not in state:
        return False
    run.optimizer.load_state_dict(state["optimizer"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.batches.position = state["position"]
    if run.value_head is not None:
        run.value_head.load_state_dict(state["value_head"])
    return True
