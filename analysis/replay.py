"""
Replay: the loss of saved rollouts, again, without sampling and without an update.

    python train.py --replay RUN/rollouts.jsonl                              under the settings of its run
    python train.py --replay RUN/rollouts.jsonl --loss_type gspo             and with something changed

Prints a line of JSON for each saved step, with the names of metrics.jsonl. The rollouts and the weights are the same each
time, so two variants differ in nothing but the variant: any loss, baseline, KL estimator, clip or reward weight. The
weights are those of --model_path, or of the newest checkpoint of the run; with the checkpoint written just before a
step, replaying it gives that step's numbers. A rollout is taken as one update, whatever --minibatch_size says.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from config import Config
from engine.devices import best_device, num_processes
from engine.packing import left_pad, pad_rows
from experience import Experience, prepare_experience, shape_rewards
from model import ValueHead, load_policy, move
from rewards import weighted_sum
from runs.checkpoint import latest_checkpoint
from runs.folder import RunFolder
from runs.records import or_none, read_jsonl
from runs.run import Run
from runs.setup import load_reference
from sample import Rollout


def replay(config: Config, gradient: Callable) -> None:
    """Print the metrics of every step in config.training.replay. gradient: train.py's add_up_gradient.

    raises  ValueError in one line, if the file, the weights or something else that the settings ask for is not there
    """
    path = Path(config.training.replay)
    if not path.exists():
        raise ValueError(f"--replay={path}: no such file")
    try:
        records = read_jsonl(path)
    except (ValueError, OSError):
        records = []
    if not records or "completion_ids" not in records[0]:
        raise ValueError(f"--replay={path}: no rollouts in it; name the rollouts.jsonl or skipped.jsonl of a run")
    weights = Path(config.model.model_path) if config.model.model_path else latest_checkpoint(path.parent)
    if weights is None:
        raise ValueError(f"--replay={path}: no checkpoint beside it; say with --model_path which weights to use")
    run, state = load_run(config, weights)
    for (step, phase), group in itertools.groupby(records, key=lambda record: (record["step"], record["phase"])):
        if phase == "grpo":
            add_what_grpo_needs(run, weights, state)
            metrics = replay_grpo_step(run, list(group), gradient)
        else:
            metrics = replay_supervised_step(run, list(group), gradient)
        print(json.dumps({"step": step, "phase": phase} | {name: or_none(value) for name, value in metrics.items()}))


def load_run(config: Config, weights: Path) -> tuple[Run, dict]:
    """A run on saved weights, and what else their checkpoint knows; {} for a folder with weights alone."""
    model, tokenizer = load_policy(replace(config.model, model_path=str(weights)))
    state = torch.load(weights / "state.pt", weights_only=True) if (weights / "state.pt").exists() else {}
    device = best_device()
    if num_processes() > 1:
        raise ValueError("--replay: runs in one process; start it without torchrun")
    run = Run(
        config, RunFolder(config), device, move(model, device), tokenizer, [], [], [], [], kl_coef=config.grpo.kl_coef,
        shared_prompt=state.get("shared_prompt", True),
    )
    return run, state


def add_what_grpo_needs(run: Run, weights: Path, state: dict) -> None:
    """Reference, value head, running mean and adapted coefficient, as they were when the weights were saved."""
    grpo = run.config.grpo
    run.reward_sum, run.reward_count = state.get("reward_sum", 0.0), state.get("reward_count", 0)
    if grpo.kl_target:
        run.kl_coef = state.get("kl_coef", run.kl_coef)
    if grpo.kl_coef and run.reference is None:
        run.reference = load_reference(run, weights, state)
        if run.reference is None:
            raise ValueError(f"--replay: {weights} has no reference beside it for the KL term; add --use_kl_penalty false")
    if grpo.use_value_head and run.value_head is None:
        if not state.get("value_head"):
            raise ValueError(f"--replay: {weights} has no value head; add --use_value_head false")
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(run.device)
        run.value_head.load_state_dict(state["value_head"])


def replay_grpo_step(run: Run, records: list[dict], gradient: Callable) -> dict:
    """Metrics of a GRPO step from its records."""
    grpo = run.config.grpo
    rollout, per_function = rollout_of(records, run.tokenizer.pad_token_id)
    names = [name.rpartition(":")[2] for name in grpo.reward_functions]          # path/to/file.py:function is saved as function
    for name in names:
        if name not in per_function:
            raise ValueError(f"--reward_functions {name}: not among what was saved, {' '.join(per_function)}")
    per_function = {name: per_function[name] for name in names}
    rewards = weighted_sum(per_function, grpo.weights, grpo.reward_clips)        # (P, G)
    experience, metrics = prepare_experience(run, rollout, shape_rewards(grpo, rollout, rewards, per_function))
    metrics |= {"mean_reward": float(rewards.nanmean())}
    return gradient_of(run, experience, gradient) | metrics


def replay_supervised_step(run: Run, records: list[dict], gradient: Callable) -> dict:
    """Metrics of a supervised step: the GRPO loss with advantage 1, under settings that make it the supervised one."""
    plain = replace(
        run.config.grpo, loss_type="reinforce", loss_aggregation="", dual_clip=0.0, ppo_epochs=1, minibatch_size=0,
        entropy_coef=0.0, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0, use_kl_penalty=False,
        kl_target=0.0,
    )
    run = replace(run, config=replace(run.config, grpo=plain), reference=None, value_head=None)
    rollout, _ = rollout_of(records, run.tokenizer.pad_token_id)
    experience = Experience(rollout, rollout.completion_mask, torch.ones(len(records), 1), rollout.sampling_logp)
    metrics = gradient_of(run, experience, gradient)
    return {name: metrics[name] for name in ("policy_loss", "total_loss", "entropy", "grad_norm")}


def gradient_of(run: Run, experience: Experience, gradient: Callable) -> dict:
    """Metrics of one update on all completions, with the length of its gradient."""
    parameters = [p for module in (run.model, run.value_head) if module is not None for p in module.parameters()]
    for parameter in parameters:
        parameter.grad = None
    losses = gradient(run, experience, torch.arange(len(experience.mask)))
    squares = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
    return losses | {"grad_norm": squares**0.5}


def rollout_of(records: list[dict], pad_id: int) -> tuple[Rollout, dict[str, torch.Tensor]]:
    """Records of one step, as completion_records wrote them -> the Rollout, and the points of each function (P, G)."""
    num_prompts = len({record["group"] for record in records})
    prompts = [record["prompt_ids"] for record in records[:: len(records) // num_prompts]]
    logp = [record["sampling_logp"] for record in records]                       # None: the policy did not choose this token
    given = [[torch.nan if p is None else p for p in record["turn_points"]] for record in records if "turn_points" in record]
    rollout = Rollout(
        *left_pad(prompts, pad_id), pad_rows([record["completion_ids"] for record in records], dtype=torch.long),
        pad_rows([[p is not None for p in row] for row in logp], dtype=torch.bool),
        pad_rows([[p or 0.0 for p in row] for row in logp], dtype=torch.float32),
        torch.tensor([record["finished"] for record in records]), [record["completion"] for record in records],
        pad_rows(given, dtype=torch.float32) if given else None,
    )
    points = {
        name: torch.tensor([[torch.nan if r["rewards"][name] is None else r["rewards"][name] for r in records]]).double()
        for name in records[0].get("rewards", {})
    }
    return rollout, {name: values.view(num_prompts, -1) for name, values in points.items()}
