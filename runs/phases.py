"""
Phases of a run: their lengths, and the optimiser, schedule, data order, reference and value head that each begins with.
"""

import math
from functools import partial

import torch

from config import Config
from data import ShuffledBatches
from model import ValueHead, frozen_copy, move, trainable_parameters
from runs.checkpoint import restore_phase
from runs.run import Phase, Run


def plan(config: Config, num_examples: int) -> list[Phase]:
    """The phases of a run and their lengths in optimiser steps."""
    training = config.training
    limit, rollouts = training.max_steps or math.inf, math.ceil(training.num_epochs * num_examples / training.batch_size)
    if not training.use_grpo:
        return [Phase("supervised", int(min(limit, rollouts)), training.learning_rate)]
    cold = int(min(limit, training.cold_start_steps))
    grpo = Phase("grpo", int(min(limit, rollouts * config.updates_per_rollout)), training.learning_rate)
    return [Phase("cold_start", cold, training.cold_start_learning_rate), grpo] if cold else [grpo]


def begin_phase(run: Run, phase: Phase) -> None:
    """A new optimiser, schedule and data order and, where they are asked for, reference and value head; or the saved ones."""
    training, grpo = run.config.training, run.config.grpo
    memory = run.memory if run.config.data.prefer_mixed else None
    run.batches = ShuffledBatches(run.train_set, training.batch_size, training.seed + run.phase, memory)
    parameters = [{"params": trainable_parameters(run.model)}]
    if phase.name == "grpo" and grpo.kl_coef > 0 and run.reference is None:
        run.reference = frozen_copy(run.model)
        move(run.reference, torch.device("cpu") if grpo.reference_offload else run.device)
    if phase.name == "grpo" and grpo.use_value_head:
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(run.device)
        parameters.append({"params": list(run.value_head.parameters())})
    adam, options = torch.optim.AdamW, {"fused": run.device.type != "xla"}       # XLA fuses by itself
    if training.adam_8bit:
        adam, options = adam_8bit(), {}
    run.optimizer = adam(
        parameters, lr=phase.learning_rate, betas=(0.9, training.adam_beta2), weight_decay=training.weight_decay, **options
    )
    run.scaler = torch.amp.GradScaler(run.device.type, enabled=run.config.model.precision == "float16")
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, factor)
    if not restore_phase(run) and phase.name == "grpo":
        run.folder.say("the loss stays near 0 by construction (siblings' advantages cancel): watch reward and entropy")


def adam_8bit() -> type:
    """AdamW with its state in 8 bits. What it saved can be read once this has been called. ValueError without torchao."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ValueError("--adam_8bit: needs torchao; pip install torchao, or leave it out") from None
    return AdamW8bit


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Share of the peak learning rate at a step, counted from 0. It is never 0: no step is for nothing."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
