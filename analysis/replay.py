"""
Losses of saved rollouts, computed again without sampling and without an update.

    python train.py --replay RUN/rollouts.jsonl                              with the settings of its run
    python train.py --replay RUN/rollouts.jsonl --loss_type gspo             with some of them changed

Prints a table on stderr, as trained | now; a file or pipe as stdout gets JSON with the keys of metrics.jsonl.
Rollouts and weights are the same each time, so the effect of a flag is isolated: loss, baseline, clip. The
weights are those of --model_path, or of the run's newest checkpoint. With the checkpoint written just before
a step, its numbers are those of the run, but with --baseline global_mean and --dynamic_sampling, whose
replaced groups are not saved. A rollout is one update here, at any --minibatch_size.
"""

if __name__ == "__main__":
    raise SystemExit("analysis/replay.py is no program; run: python train.py --replay RUN/rollouts.jsonl")

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from config import Config, GRPOConfig
from engine.devices import best_device, num_processes
from engine.errors import in_one_line
from engine.packing import left_pad, pad_rows
from experience import Experience, Groups, compute_experience, demonstrations_as_experience, shape_rewards
from grpo import compute_group_advantages
from model import ValueHead, load_policy, move
from reward_functions.loading import name_of
from rewards import load_reward_function, weighted_sum
from runs.checkpoint import latest_checkpoint, read_state
from runs.folder import RunFolder
from runs.records import or_none, parse_record, read_jsonl, read_steps, warn_once
from runs.run import Progress, Run
from runs.setup import load_reference
from sample import Rollout

SHOWN = "total_loss", "grad_norm", "policy_kl"            # in the table


def replay(config: Config, accumulate_gradients: Callable) -> None:
    """Print the metrics of every step in config.training.replay. accumulate_gradients: that of train.py.

    raises  ValueError in one line, if the file, the weights or something that the settings need is missing
    """
    path = Path(config.training.replay)
    if not path.exists():
        raise ValueError(f"--replay={path}: no such file")
    first = None
    if path.is_file():
        with path.open("rb") as file:
            first = next(filter(None, map(parse_record, file)), None)
    if not first or "completion_ids" not in first:
        raise ValueError(
            f"--replay={path}: no rollouts in it; name the rollouts.jsonl or skipped.jsonl of a run")
    given = config.model.model_path
    weights = Path(given) if given else latest_checkpoint(path.parent, warn_once)
    if weights is None:
        raise ValueError(f"--replay={path}: no checkpoint beside it; name the weights with --model_path")
    run = load_run(config, weights)
    lines = read_jsonl(path.parent / "metrics.jsonl")
    logged = {line["step"]: line for line in lines if line["phase"] != "eval"}
    grpo = config.grpo
    how = "of the value head" if grpo.use_value_head else f"{grpo.baseline}, {grpo.scale}"
    variant = f"{grpo.loss_type} {grpo.loss_aggregation}".strip() + f", advantages {how}"
    title = f"as trained | now ({variant}), with the weights of {weights}"
    table = [title, " step" + "".join(f"{n:>24}" for n in SHOWN)]
    for records in read_steps(path):
        step, phase = records[0]["step"], records[0]["phase"]
        try:
            rollout, _ = rollout_of(records, run.tokenizer.pad_token_id)
            rollout.completion_ids[rollout.completion_mask]                      # of one shape
        except Exception as error:                        # of whatever type the lines hold
            raise ValueError(f"--replay={path}: step {step} holds no rollout: {in_one_line(error)}") from None
        if phase == "grpo":
            run.progress = saved_progress(config, run.saved_state)
            load_reference_and_value_head(run, weights)
            metrics = replay_grpo_step(run, records, accumulate_gradients)
        else:
            metrics = replay_supervised_step(run, records, accumulate_gradients)
        metrics = {name: or_none(value) for name, value in metrics.items()}
        if not sys.stdout.isatty():
            print(json.dumps({"step": step, "phase": phase} | metrics))
        columns = [[row.get(name) for row in (logged.get(step, {}), metrics)] for name in SHOWN]
        texts = [" | ".join("-" if value is None else f"{value:.4g}" for value in pair) for pair in columns]
        table.append(f"{step:>5}" + "".join(f"{text:>24}" for text in texts))
    print(*table, sep="\n", file=sys.stderr)
    far = "if it is far from 0, compare two replays, or pass --model_path RUN/checkpoints/step-N"
    print(f"policy_kl is that of these weights to those that sampled:\n{far}", file=sys.stderr)


def load_run(config: Config, weights: Path) -> Run:
    """Return a run with saved weights; those of a checkpoint come with its progress and state."""
    policy, tokenizer = load_policy(replace(config.model, model_path=str(weights)))
    state = read_state(weights) if (weights / "state.pt").exists() else {}
    device = best_device(config.model.device)
    if num_processes() > 1:
        raise ValueError("--replay: runs in one process; start it without torchrun")
    return Run(
        config, RunFolder(config), device, tokenizer, [], None, [], [], [], state.get("shared_prompt", True),
        move(policy, device), saved_progress(config, state), state,
    )


def saved_progress(config: Config, state: dict) -> Progress:
    """Return the progress of a checkpoint's state, or that of a new run if state is empty."""
    progress = Progress(**state["progress"]) if state else Progress()
    if not (config.grpo.kl_target and state):
        progress.kl_coef = config.grpo.kl_coef
    return progress


def load_reference_and_value_head(run: Run, weights: Path) -> None:
    """Load the reference and the value head that were saved with the weights, if GRPO needs them."""
    config = run.config.grpo
    if config.kl_coef and run.reference is None:
        run.reference = load_reference(run.model, run.config, weights, run.saved_state)
        if run.reference is None:
            raise ValueError(
                f"--replay: {weights} has no reference beside it for the KL term; add --use_kl_penalty false")
    if config.use_value_head and run.value_head is None:
        if not run.saved_state.get("value_head"):
            raise ValueError(f"--replay: {weights} has no value head; add --use_value_head false")
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(run.device)
        run.value_head.load_state_dict(run.saved_state["value_head"])


def replay_grpo_step(run: Run, records: list[dict], accumulate_gradients: Callable) -> dict:
    """Return metrics of a GRPO step from its records."""
    config, progress = run.config.grpo, run.progress
    rollout, per_function = rollout_of(records, run.tokenizer.pad_token_id)
    names = [saved_name(name, per_function) for name in config.reward_functions]
    saved = torch.tensor([math.nan if r["reward"] is None else r["reward"] for r in records])
    could_be = weighted_sum(per_function, [1.0] * len(per_function))             # (P, G)
    failed = saved.view_as(could_be).isnan() & ~could_be.isnan()                 # a function raised
    per_function = {name: per_function[name] for name in names}
    scores = weighted_sum(per_function, config.weights).masked_fill(failed, torch.nan)
    rewards = shape_rewards(config, rollout, scores, per_function)
    progress.add_rewards(rewards)
    advantages = compute_group_advantages(
        rewards, **config.advantage_options, global_mean=progress.mean_reward
    )
    groups = Groups([], rollout, scores, per_function, rewards)
    experience = compute_experience(
        groups, advantages, config, run.model, reference=run.reference, value_head=run.value_head,
        kl_coef=progress.kl_coef, **run.forwarding,
    )
    metrics = experience.metrics | {"mean_reward": float(scores.nanmean())}
    return gradient_metrics(run, experience, config, accumulate_gradients) | metrics


def saved_name(name: str, saved: dict) -> str:
    """Return the name that points of a reward function were saved under: that after a colon, or its own."""
    short = name.rpartition(":")[2]                       # python:NAME, file.py:NAME
    found = short if short in saved else name_of(load_reward_function(name))
    if found not in saved:
        raise ValueError(f"--reward_functions {name}: not among those saved, {' '.join(saved)}")
    return found


def replay_supervised_step(run: Run, records: list[dict], accumulate_gradients: Callable) -> dict:
    """Return metrics of a supervised step from its records."""
    rollout, _ = rollout_of(records, run.tokenizer.pad_token_id)
    experience = demonstrations_as_experience([], rollout)
    metrics = gradient_metrics(run, experience, run.config.grpo.supervised, accumulate_gradients)
    return {name: metrics[name] for name in ("policy_loss", "total_loss", "entropy", "grad_norm")}


def gradient_metrics(
    run: Run, experience: Experience, config: GRPOConfig, accumulate_gradients: Callable
) -> dict:
    """Return metrics of one update on all completions, with the norm of its gradient."""
    modules = [module for module in (run.model, run.value_head) if module is not None]
    parameters = [p for module in modules for p in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    losses = accumulate_gradients(run, experience, torch.arange(len(experience.mask)), config)
    squares = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
    return losses | {"grad_norm": squares**0.5}


def rollout_of(records: list[dict], pad_id: int) -> tuple[Rollout, dict[str, torch.Tensor]]:
    """Return the Rollout of one step's records (completion_records), and the points (P, G) by function."""
    def column(name: str) -> list:
        return [record[name] for record in records]

    def nan_for_none(values: list) -> list:
        return [torch.nan if value is None else value for value in values]

    num_prompts = len(set(column("group")))
    prompts = column("prompt_ids")[:: len(records) // num_prompts]
    logp = column("sampling_logp")                        # None: a token that the policy did not choose
    turn_points = [nan_for_none(record["turn_points"]) for record in records if "turn_points" in record]
    rollout = Rollout(
        *left_pad(prompts, pad_id), pad_rows(column("completion_ids"), dtype=torch.long),
        pad_rows([[p is not None for p in row] for row in logp], dtype=torch.bool),
        pad_rows([[p or 0.0 for p in row] for row in logp], dtype=torch.float32),
        torch.tensor(column("finished")), column("completion"),
        pad_rows(turn_points, dtype=torch.float32) if turn_points else None,
    )
    scored = column("rewards") if "rewards" in records[0] else [{}]
    points = {name: torch.tensor(nan_for_none([row[name] for row in scored])) for name in scored[0]}
    return rollout, {name: values.double().view(num_prompts, -1) for name, values in points.items()}
