"""
Phases of a run: how many steps each has, its optimiser and its learning rate.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch

from config import Config


@dataclass
class Phase:
    """A stretch of training with one kind of step, an optimiser and a schedule of its own."""

    name: str                   # cold_start, supervised or grpo
    steps: int                  # optimiser steps
    learning_rate: float        # peak


def plan_phases(config: Config, num_examples: int) -> list[Phase]:
    """Return the phases of a run with their lengths in optimiser steps."""
    training = config.training
    limit = training.max_steps or math.inf
    rollouts = math.ceil(training.num_epochs * num_examples / training.batch_size)
    if not training.use_grpo:
        return [Phase("supervised", int(min(limit, rollouts)), training.learning_rate)]
    cold_start = Phase("cold_start", int(min(limit, training.cold_start_steps)), training.cold_start_learning_rate)
    grpo_phase = Phase("grpo", int(min(limit, rollouts * config.updates_per_rollout)), training.learning_rate)
    return [cold_start, grpo_phase] if cold_start.steps else [grpo_phase]


def make_optimizer(parameters: list[dict], phase: Phase, training, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW for groups of parameters. training: a TrainingConfig."""
    kind, options = torch.optim.AdamW, {"fused": device.type != "xla"}           # XLA fuses by itself
    if training.adam_8bit:
        kind, options = adam_8bit(), {}
    betas = 0.9, training.adam_beta2
    return kind(parameters, lr=phase.learning_rate, betas=betas, weight_decay=training.weight_decay, **options)


def make_scheduler(optimizer: torch.optim.Optimizer, phase: Phase, training) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the learning rate's schedule. training: a TrainingConfig."""
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def adam_8bit() -> type:
    """Import AdamW with 8-bit state; also needed to load such a state. Raises ValueError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ValueError("--adam_8bit: needs torchao; pip install torchao, or leave it out") from None
    return AdamW8bit


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Return the share of the peak learning rate at a step, counted from 0. It is never 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]


def is_due(before: int, after: int, every: int) -> bool:
    """Return whether a multiple of `every` steps lies between two counts of steps; never for 0."""
    return every > 0 and after // every > before // every
