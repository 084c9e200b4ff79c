"""
Losses of saved rollouts, computed again without sampling and without an update.

    python -m analysis.replay RUN/rollouts.jsonl                       with the settings of its run
    python -m analysis.replay RUN/rollouts.jsonl --loss_type gspo      with some changed: flags of train.py

Prints a line of JSON for each step, with the keys of metrics.jsonl.
Rollouts and weights are the same each time, so the effect of a flag is isolated: loss, baseline, clip. The
weights are those of --model_path, or of the run's newest checkpoint. With the checkpoint written just before
a step, its numbers are those of the run, but with --baseline global_mean and --dynamic_sampling, whose
replaced groups are not saved. A rollout is one update here, at any --minibatch_size.
"""

import json
import math
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

from runs.command_line import parse_config  # first, see runs/__init__.py

import numpy as np
import torch

import train
from config import Config, GRPOConfig
from engine import make_engine
from engine.devices import best_device, num_processes
from engine.policy import load_any_policy, move
from engine.ranks import Ranks
from engine.sharding import sum_and_clip_gradient
from experience import Experience, Groups, demonstrations_as_experience, shape_rewards
from model import ValueHead
from reward_functions.loading import load_reward_function
from rewards import name_of, weighted_sum
from runs.checkpoint import latest_checkpoint, read_state
from engine.reference import load_reference, load_teacher
from runs.errors import exit_on_errors
from runs.folder import RunFolder, or_none, read_steps, warn_once
from runs.run import Progress, Run
from sample import Rollout, left_pad, pad_rows


def main(argv: list[str]) -> None:
    """Print the metrics of every step in a file of rollouts.

    raises  ValueError in one line, if the file, the weights or something that the settings need is missing
    """
    path = Path(argv[0] if argv else "")
    steps = read_steps(path)
    first = next(steps, None)
    if not first or "completion_ids" not in first[0]:
        raise ValueError(f"{path}: no rollouts in it; name the rollouts.jsonl or skipped.jsonl of a run")
    config = parse_config(["--resume", "--check", "--output_dir", str(path.parent), *argv[1:]])
    weights = latest_checkpoint(path.parent, warn_once)
    if {"--model_path", "--model-path"} & {word.partition("=")[0] for word in argv}:
        weights = Path(config.model.model_path)
    if weights is None:
        raise ValueError(f"{path}: no checkpoint beside it; name the weights with --model_path")
    run = load_run(config, weights)
    print(f"with the weights of {weights}; approx_kl is that to the weights that sampled", file=sys.stderr)
    for records in chain([first], steps):
        step, phase = records[0]["step"], records[0]["phase"]
        replay_step = replay_grpo_step if phase == "grpo" else replay_supervised_step
        metrics = {name: or_none(n) for name, n in replay_step(run, records).items()}
        print(json.dumps({"step": step, "phase": phase} | metrics))


def load_run(config: Config, weights: Path) -> Run:
    """Return a run with saved weights; those of a checkpoint with its progress, reference, value head."""
    device, grpo = best_device(config.model.device), config.grpo
    if num_processes() > 1:
        raise ValueError("rollouts are replayed in one process; start it without torchrun")
    policy, tokenizer = load_any_policy(replace(config.model, model_path=str(weights)))
    state = read_state(weights) if (weights / "state.pt").exists() else {}
    name = "shared" if state.get("shared_prompt", True) else "plain"
    max_tokens = config.training.max_tokens_per_forward
    engine = make_engine(name, move(policy, device), tokenizer, max_tokens=max_tokens)
    engine.same_arithmetic = grpo.engine != "vllm"        # which sampled
    ranks = Ranks(device)
    run = Run(
        config, RunFolder(config, ranks), device, tokenizer, [], None, [], [], [], ranks, engine,
        Progress(**state.get("progress", {})),
    )
    if config.training.use_grpo and grpo.kl_coef:
        run.reference = load_teacher(config, policy) if grpo.reference_path else load_reference(
            policy, config, weights, state)
        if run.reference is None:
            raise ValueError(
                f"{weights} has no reference beside it for the KL term; add --use_kl_penalty false")
    if config.training.use_grpo and grpo.use_value_head:
        if not state.get("value_head"):
            raise ValueError(f"{weights} has no value head; add --use_value_head false")
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(device)
        run.value_head.load_state_dict(state["value_head"])
    return run


def replay_grpo_step(run: Run, records: list[dict]) -> dict:
    """Return metrics of a GRPO step from its records."""
    config = run.config.grpo
    run = replace(run, progress=replace(run.progress))    # every step begins with that of the weights
    rollout, per_function = rollout_of(records, run.tokenizer.pad_token_id)
    names = [saved_name(name, per_function) for name in config.reward_functions]
    saved = torch.tensor(np.array([record["reward"] for record in records], float))
    could_be = weighted_sum(per_function, [1.0] * len(per_function))             # (P, G)
    failed = saved.view_as(could_be).isnan() & ~could_be.isnan()                 # a function raised
    per_function = {name: per_function[name] for name in names}
    scores = weighted_sum(per_function, config.weights).masked_fill(failed, torch.nan)
    groups = Groups([], rollout, scores, per_function, shape_rewards(config, rollout, scores, per_function))
    run.progress.add_rewards(groups.rewards)
    experience = train.experience_of(run, groups, train.group_advantages(run, groups))
    metrics = experience.metrics | {"mean_reward": float(scores.nanmean())}
    return gradient_metrics(run, experience, config) | metrics


def saved_name(name: str, saved: dict) -> str:
    """Return the name that points of a reward function were saved under: that after a colon, or its own."""
    short = name.rpartition(":")[2]                       # python:NAME, file.py:NAME
    found = short if short in saved else name_of(load_reward_function(name))
    if found not in saved:
        raise ValueError(f"--reward_functions {name}: not among those saved, {' '.join(saved)}")
    return found


def replay_supervised_step(run: Run, records: list[dict]) -> dict:
    """Return metrics of a supervised step from its records."""
    rollout, _ = rollout_of(records, run.tokenizer.pad_token_id)
    experience = demonstrations_as_experience([], rollout)
    metrics = gradient_metrics(run, experience, run.config.grpo.with_supervised_loss)
    return {name: metrics[name] for name in ("policy_loss", "total_loss", "entropy", "grad_norm")}


def gradient_metrics(run: Run, experience: Experience, config: GRPOConfig) -> dict:
    """Return metrics of one update on all completions, with the norm of its gradient."""
    modules = [module for module in (run.model, run.value_head) if module is not None]
    for module in modules:
        module.zero_grad()
    losses = train.accumulate_gradients(run, experience, torch.arange(len(experience.mask)), config)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return losses | {"grad_norm": sum_and_clip_gradient(parameters, math.inf)}


def rollout_of(records: list[dict], pad_id: int) -> tuple[Rollout, dict[str, torch.Tensor]]:
    """Return the Rollout of one step's records (completion_records), and the points (P, G) by function."""
    def column(name: str) -> list:
        return [record[name] for record in records]

    num_prompts = len(set(column("group")))
    prompts = column("prompt_ids")[:: len(records) // num_prompts]
    logp = column("sampling_logp")                        # None: a token that the policy did not choose
    # As floats, None is NaN.
    turn_points = [np.array(record["turn_points"], float) for record in records if "turn_points" in record]
    rollout = Rollout(
        *left_pad(prompts, pad_id), pad_rows(column("completion_ids"), dtype=torch.long),
        pad_rows([[p is not None for p in row] for row in logp], dtype=torch.bool),
        pad_rows([[p or 0.0 for p in row] for row in logp], dtype=torch.float32),
        torch.tensor(column("finished")), column("completion"),
        pad_rows(turn_points, dtype=torch.float32) if turn_points else None,
    )
    scored = column("rewards") if "rewards" in records[0] else [{}]
    points = {name: np.array([row[name] for row in scored], float) for name in scored[0]}
    return rollout, {name: torch.tensor(values).view(num_prompts, -1) for name, values in points.items()}


if __name__ == "__main__":
    with exit_on_errors("analysis.replay"):
        main(sys.argv[1:])
