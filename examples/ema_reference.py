"""
Train several epochs on every rollout, with a KL penalty to a moving average of the policy.

    .venv/bin/python examples/ema_reference.py            the built-in Gemma on addition problems, no downloads
    python train.py examples/ema_reference.json           the same run

A rollout has 256 completions. Two epochs in minibatches of 128 are four optimiser steps on it, each followed by
reference = 0.98 * reference + 0.02 * policy. From the second step on ratios differ from 1, so clipping matters.
The learning rate is a quarter of the demonstration's, which takes one step on each rollout.
"""

from train import Config, train

config = Config.from_profile(
    "demo", use_grpo=True, ppo_epochs=2, minibatch_size=128, use_kl_penalty=True, kl_penalty_coef=0.05,
    reference_mode="ema", ema_alpha=0.98, max_steps=300, learning_rate=1e-4,
)
model, tokenizer = train(config)
