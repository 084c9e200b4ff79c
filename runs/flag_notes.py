"""
Notes on the flags of a run, printed at its start: flags without effect, combinations seldom intended, and
what the chat template does with its variables.
"""

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from config import Config
from sources.readers import READERS
from sources.settings import profile_values


def flag_notes(settings: Config) -> list[str]:
    """Return a line for each flag without effect, and for each combination that is seldom intended."""
    config, training, several = settings.grpo, settings.training, settings.updates_per_rollout > 1
    lines = flags_without_effect(settings)
    if not training.use_grpo:
        return lines
    if not several and config.loss_type != "reinforce":
        kinds = "clipping and max_policy_kl have" if config.max_policy_kl else "clipping has"
        lines.append(f"{kinds} no effect: with one update per rollout every ratio is 1; see --ppo_epochs")
    combinations = {
        "gdpo scales each function in its group, then the sum; advantage_scale batch is the paper's":
            config.reward_combination == "gdpo" and config.scale == "group",
        "gspo's ratio is a mean over a completion and hardly moves: usual clips are 3e-4, 4e-4":
            config.loss_type == "gspo" and config.clip_high > 0.01 and several,
        f"cispo caps a token's weight at {1 + config.clip_high:g}; clip_high of 4 or so is usual":
            config.loss_type == "cispo" and config.clip_high < 1 and several,
        f"reference_update_freq {config.reference_update_freq} counts optimiser steps, of which each rollout "
        f"takes {settings.updates_per_rollout}":
            config.reference_mode == "periodic" and several and config.kl_coef,
        "dr_grpo is meant for advantages in points; --normalize_advantages false is the paper's":
            config.loss_type == "dr_grpo" and config.normalize_advantages,
    }
    return lines + [line for line, holds in combinations.items() if holds]


def template_notes(tokenizer) -> list[str]:
    """Return a line for each variable that the chat template does not read, and for thoughts left on."""
    template = str(tokenizer.chat_template or "")
    variables = tokenizer.init_kwargs.get("chat_template_kwargs", {})
    unread = [name for name in variables if name not in template]
    lines = [f"--chat_template_kwargs: the chat template does not read {name}" for name in unread]
    if "enable_thinking" not in template or "enable_thinking" in variables:
        return lines
    question = [{"role": "user", "content": "?"}]
    with suppress(TemplateError):                         # it may reject such a conversation
        prompts = [tokenizer.apply_chat_template(
            question, tokenize=False, add_generation_prompt=True, **variables, **more)
            for more in ({}, {"enable_thinking": False})]
        if prompts[0] != prompts[1]:
            lines.append("thoughts take thousands of tokens; without them: --chat_template_kwargs "
                         """'{"enable_thinking": false}' (docs/recipes.md)""")
    return lines


def flags_without_effect(settings: Config) -> list[str]:
    """Return a line for each flag that has been set and has no effect, with the reason."""
    config, training = settings.grpo, settings.training
    trained, held_out = Path(settings.data.dataset), Path(settings.data.eval_dataset or settings.data.dataset)
    no_kl, unscaled = not config.kl_coef, not (config.normalize_advantages or config.use_value_head)
    of_evaluations = "generation_", "environment", "max_turns", "engine"
    of_grpo = [f.name for f in dataclasses.fields(config) if not f.name.startswith(of_evaluations)]
    rules: list[tuple[str, Any, list[str]]] = [       # reason, whether it holds, flags
        ("without --lora_rank", not settings.model.lora_rank, ["lora_alpha"]),
        ("with the built-in model", not settings.model.model_path, ["chat_template", "chat_template_kwargs"]),
        ("with a file, which has no splits", trained.suffix in READERS, ["train_split"]),
        ("with a file, which has no splits", held_out.suffix in READERS, ["eval_split"]),
        ("without --cold_start_steps", not training.cold_start_steps,
         ["cold_start_learning_rate", "cold_start_accuracy"]),
        ("without --engine vllm", config.engine != "vllm", ["engine_memory", "engine_timeout"]),
        ("with --engine vllm, which decides itself", config.engine == "vllm", ["generation_batch_size"]),
        ("with --loss_type reinforce", config.loss_type == "reinforce", ["clip_low", "clip_high"]),
        ("without --use_value_head", not config.use_value_head,
         ["value_coef", "value_clip", "gae_gamma", "gae_lambda"]),
        ("with a value head, which scales over the tokens of the step", config.use_value_head,
         ["advantage_scale"]),
        ("without --normalize_advantages", unscaled, ["advantage_scale"]),
        ("without --normalize_advantages", unscaled and config.reward_combination == "sum",
         ["advantage_epsilon"]),
        ("without --use_kl_penalty true", no_kl and config.kl_penalty_coef > 0, ["kl_penalty_coef"]),
        ("without --use_kl_penalty true and a --kl_penalty_coef", no_kl,
         ["kl_in", "kl_estimator", "kl_horizon", "reference_mode", "ema_alpha", "reference_update_freq",
          "reference_offload"]),
        ("without --kl_target", not no_kl and not config.kl_target, ["kl_horizon"]),
        ("without --reference_mode ema", not no_kl and config.reference_mode != "ema", ["ema_alpha"]),
        ("without --reference_mode periodic", not no_kl and config.reference_mode != "periodic",
         ["reference_update_freq"]),
        ("with one epoch, in which no prompt is repeated", training.num_epochs <= 1, ["prefer_mixed"]),
        (f"with {settings.rollout_size} completions in a rollout",
         config.minibatch_size >= settings.rollout_size, ["minibatch_size"]),
    ]
    if not training.use_grpo:
        rules = [*rules[:4], ("without --use_grpo", True, [
            *of_grpo, "cold_start_steps", "cold_start_accuracy", "cold_start_learning_rate",
            "prefer_mixed", "log_groups", "log_rollouts_every"])]
    profile, lines = profile_values(training.profile, training.batch_size), []
    for section in (settings.model, settings.data, config, training):
        for f in dataclasses.fields(section):
            default = f.default_factory() if f.default is dataclasses.MISSING else f.default
            value = getattr(section, f.name)
            reasons = [reason for reason, holds, flags in rules if holds and f.name in flags]
            if value != profile.get(f.name, default):
                lines += [f"{f.name} {value} has no effect {reason}" for reason in reasons]
    return lines
