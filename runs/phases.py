"""
The progress of a run through its phases; the optimiser and schedule with which a phase begins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.optim.lr_scheduler import LambdaLR

from config import Config
from engine.errors import RunError
from engine.text_model import trainable_parameters
from model import ValueHead
from policy import Policy


@dataclass
class Progress:
    """Progress of a run, in plain numbers. A checkpoint saves all of it."""

    phase: int = 0                                        # index of the current phase
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    evaluated_at: int = -1                                # step of the last evaluation
    accuracy: float = math.nan                            # in that evaluation
    best_step: int = -1                                   # step of the best evaluation; -1: there is none
    best_score: float = -math.inf                         # in that evaluation: see held_out_score
    skipped: int = 0                                      # steps without a finite loss or gradient
    skipped_in_a_row: int = 0                             # the latest of these in a row
    reward_sum: float = 0.0                               # over all completions of the run
    reward_count: int = 0                                 # number of these completions

    def count(self, update: dict) -> None:
        """Count an update. skipped_in_a_row excludes overflows that a smaller loss scale may avoid."""
        self.step, self.phase_step = self.step + 1, self.phase_step + 1
        self.skipped += update["skipped"]
        if not update["skipped"]:
            self.skipped_in_a_row = 0
        elif update.get("loss_scale", 1) <= 1 or not math.isfinite(update["total_loss"]):
            self.skipped_in_a_row += 1

    def add_rewards(self, rewards: torch.Tensor) -> None:
        """Add rewards (P, G) to the running mean. NaN is excluded."""
        scored = rewards[~rewards.isnan()]
        self.reward_sum += float(scored.sum())
        self.reward_count += len(scored)

    @property
    def mean_of_rewards(self) -> float:
        return self.reward_sum / max(1, self.reward_count)

    def add_evaluation(self, accuracy: float, score: float) -> bool:
        """Count an evaluation after this step. Return True if its score is the best so far."""
        self.evaluated_at, self.accuracy = self.step, accuracy
        if score > self.best_score:                       # on a tie the earlier stays; not for NaN
            self.best_step, self.best_score = self.step, score
        return self.best_step == self.step


@dataclass
class Phase:
    """A part of the training with one kind of step, its own optimiser and learning-rate schedule."""

    name: str                   # cold_start, supervised or grpo
    steps: int                  # optimiser steps
    learning_rate: float        # its peak
    eval_steps: int             # steps between evaluations; 0: only at the end
    end_accuracy: float = math.inf                        # held-out accuracy that ends the phase

    def is_over(self, progress: Progress) -> bool:
        """Return True after the last step, or if an evaluation after a step has reached end_accuracy."""
        evaluated = progress.evaluated_at == progress.step and progress.phase_step > 0
        return progress.phase_step >= self.steps or (evaluated and progress.accuracy >= self.end_accuracy)


def plan_phases(config: Config, num_examples: int) -> list[Phase]:
    """Return the phases of a run with their lengths in optimiser steps."""
    training = config.training
    limit, every = training.max_steps or math.inf, training.eval_steps
    rollouts = math.ceil(training.num_epochs * num_examples / training.batch_size)
    if not training.use_grpo:
        return [Phase("supervised", int(min(limit, rollouts)), config.peak_learning_rate, every)]
    cold_start_steps = int(min(limit, training.cold_start_steps))
    often = math.ceil(every / 3) if training.cold_start_accuracy < 1 else every
    cold_start = Phase(
        "cold_start", cold_start_steps, training.cold_start_learning_rate, often,
        end_accuracy=training.cold_start_accuracy)
    steps = int(min(limit, rollouts * config.updates_per_rollout))
    grpo_phase = Phase("grpo", steps, config.peak_learning_rate, every)
    return [cold_start, grpo_phase] if cold_start_steps else [grpo_phase]


def prepare_policy(policy: Policy, phase: Phase, config: Config, make_optimizer: Callable | None) -> None:
    """Give a policy its optimiser (of make_optimizer, else AdamW), schedule and value head for a phase."""
    training, device = config.training, policy.device
    modules, value_head = [policy.model], None
    if phase.name == "grpo" and config.grpo.use_value_head:
        hidden_size = policy.model.config.get_text_config().hidden_size
        value_head = ValueHead(hidden_size, training.seed).to(device)
        modules.append(value_head)
    if make_optimizer:
        named = chain(*(module.named_parameters() for module in modules))
        optimizer = make_optimizer([pair for pair in named if pair[1].requires_grad])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RunError(f"optimizer: returned a {type(optimizer).__name__}, not a torch Optimizer")
        if not {"state", "param_groups"} <= optimizer.state_dict().keys():
            raise RunError("optimizer: its state_dict lacks state or param_groups: no run could be resumed")
    else:
        # The usual beta2 of 0.999 would average over too many steps: gradients change fast here.
        optimizer = torch.optim.AdamW(
            [{"params": trainable_parameters(module)} for module in modules], lr=phase.learning_rate,
            betas=(0.9, 0.95), weight_decay=0.0, fused=device.type != "xla")     # XLA does fuse
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(
        learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    policy.set_optimizer(optimizer, LambdaLR(optimizer, factor), value_head)


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Return the learning rate at a step (counted from 0) as a share of its peak: above 0 up to the last."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[schedule]


def is_due(before: int, after: int, every: int) -> bool:
    """Return True if a multiple n of `every` has before < n <= after; False if every is 0."""
    return every > 0 and after // every > before // every
