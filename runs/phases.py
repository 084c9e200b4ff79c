"""
Phases of a run: their lengths, optimisers and learning rates.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from config import Config


@dataclass
class Phase:
    """A part of the training with one kind of step, an optimiser and a learning rate schedule."""

    name: str                   # cold_start, supervised or grpo
    steps: int                  # optimiser steps
    learning_rate: float        # peak
    eval_steps: int             # between evaluations; 0: only at its end
    end_accuracy: float = math.inf                        # held-out accuracy that ends the phase

    def is_over(self, step: int, accuracy: float) -> bool:
        """Return True at the last step, or if the evaluation after a step was good enough (NaN: none)."""
        return step >= self.steps or (step > 0 and accuracy >= self.end_accuracy)


def plan_phases(config: Config, num_examples: int) -> list[Phase]:
    """Return the phases of a run with their lengths in optimiser steps."""
    training = config.training
    limit, every = training.max_steps or math.inf, training.eval_steps
    rollouts = math.ceil(training.num_epochs * num_examples / training.batch_size)
    if not training.use_grpo:
        return [Phase("supervised", int(min(limit, rollouts)), training.learning_rate, every)]
    cold_start_steps = int(min(limit, training.cold_start_steps))
    often = math.ceil(every / 3) if training.cold_start_accuracy < 1 else every
    cold_start = Phase(
        "cold_start", cold_start_steps, training.cold_start_learning_rate, often,
        end_accuracy=training.cold_start_accuracy)
    steps = int(min(limit, rollouts * config.updates_per_rollout))
    grpo_phase = Phase("grpo", steps, training.learning_rate, every)
    return [cold_start, grpo_phase] if cold_start_steps else [grpo_phase]


def make_optimizer(parameters: list[dict], phase: Phase, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW for groups of parameters."""
    # With the usual 0.999, beta2 averages over too many steps, as gradients change fast.
    return torch.optim.AdamW(
        parameters, lr=phase.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
        fused=device.type != "xla")                       # XLA fuses by itself


def make_scheduler(optimizer: torch.optim.Optimizer, phase: Phase, training) -> LambdaLR:
    """Return the learning rate schedule of a phase. training: a TrainingConfig."""
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    return LambdaLR(optimizer, factor)


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Return the share of the peak learning rate at a step, counted from 0. No step of the phase has 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[schedule]


def is_due(before: int, after: int, every: int) -> bool:
    """Return True if a multiple of `every` is in before < n <= after. Never if every is 0."""
    return every > 0 and after // every > before // every
