"""
The state of a run, and its phases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from config import Config
from data import PromptMemory, ShuffledBatches
from model import AdapterReference
from runs.folder import RunFolder


@dataclass
class Phase:
    """A stretch of training with one kind of step, an optimiser and a schedule of its own."""

    name: str                   # cold_start, supervised or grpo
    steps: int                  # optimiser steps
    learning_rate: float


@dataclass
class Run:
    """Everything that a run is. What changes during it: the model, and the fields from `phase` on."""

    config: Config
    folder: RunFolder
    device: torch.device
    model: torch.nn.Module
    tokenizer: object
    reward_functions: list
    train_set: Sequence[dict]
    eval_set: Sequence[dict]
    phases: list[Phase]
    shared_prompt: bool = True                            # pack siblings behind one prompt; the start-up check decides
    longest_prompt: int = 0                               # tokens, of the training examples
    phase: int = 0                                        # index into phases
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    skipped: int = 0                                      # of those, how many were not finite and changed nothing
    skipped_in_a_row: int = 0                             # how many of the last ones
    kl_coef: float = 0.0                                  # points per nat; constant unless kl_target is set
    reward_sum: float = 0.0                               # points, over all completions learned from in this run
    reward_count: int = 0                                 # how many those were
    memory: PromptMemory = field(default_factory=PromptMemory)                   # what each prompt has earned in this run
    saved_state: dict = field(default_factory=dict)       # of the checkpoint to go on from
    batches: ShuffledBatches | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: object = None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))
    reference: torch.nn.Module | AdapterReference | None = None                  # frozen; None where nothing asks for it
    value_head: torch.nn.Module | None = None             # likewise
    environment: Callable | None = None                   # who answers the policy, where it has several turns
