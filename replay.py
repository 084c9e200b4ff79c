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

from checkpoint import latest_checkpoint
from config import Config
from devices import best_device
from experience import Experience, prepare_experience
from model import ValueHead, load_policy
from prepare import Run, load_reference
from rewards import weighted_sum
from runs import RunFolder, or_none, read_jsonl
from sample import Rollout, left_pad


def replay(config: Config, gradient: Callable) -> None:
    """Print the metrics of every step in config.training.replay. gradient: train.py's add_up_gradient.

    raises  ValueError in one line, if the file or the weights are not there
    """
    path = Path(config.training.replay)
    records = read_jsonl(path)
    if not records or "completion_ids" not in records[0]:
        raise ValueError(f"--replay={path}: no rollouts in it; name the rollouts.jsonl or skipped.jsonl of a run")
    weights = Path(config.model.model_path) if config.model.model_path else latest_checkpoint(path.parent)
    if weights is None:
        raise ValueError(f"--replay={path}: no checkpoint beside it; say with --model_path which weights to use")
    model, tokenizer = load_policy(replace(config.model, model_path=str(weights)))
    device = best_device()
    run = Run(config, RunFolder(config), device, model.to(device), tokenizer, [], [], [], [], kl_coef=config.grpo.kl_coef)
    for (step, phase), group in itertools.groupby(records, key=lambda record: (record["step"], record["phase"])):
        metrics = replay_step(run, weights, list(group), gradient, supervised=phase != "grpo")
        print(json.dumps({"step": step, "phase": phase} | {name: or_none(value) for name, value in metrics.items()}))


def replay_step(run: Run, weights: Path, records: list[dict], gradient: Callable, supervised: bool) -> dict:
    """Metrics of one step from its records."""
    rollout, per_function = rollout_of(records, run.tokenizer.pad_token_id)
    for module in run.model, run.value_head:
        if module is not None:
            module.zero_grad()
    if supervised:
        part = replace(run, config=as_supervised(run.config), reference=None, value_head=None)
        one, metrics = torch.ones(len(records), 1), {}
        experience = Experience(rollout, rollout.completion_mask, one, rollout.sampling_logp)
    else:
        part = run
        prepare_run(run, weights)
        rewards = weighted_sum(per_function, run.config.grpo.weights)            # (P, G)
        experience, metrics = prepare_experience(run, rollout, rewards)
        metrics |= {"mean_reward": float(rewards.nanmean()), "std_advantage": float(experience.advantages.std())}
    losses = gradient(part, experience, torch.arange(len(records)))
    gradients = [p.grad for module in (part.model, part.value_head) if module is not None for p in module.parameters()]
    squares = sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None)
    return losses | metrics | {"grad_norm": squares**0.5}


def prepare_run(run: Run, weights: Path) -> None:
    """The reference and the value head that the settings ask for, once."""
    grpo = run.config.grpo
    if grpo.kl_coef and run.reference is None:
        run.reference = load_reference(run.config, weights, run.device)
        if run.reference is None:
            raise ValueError(f"--replay: {weights} has no reference beside it for the KL term; add --use_kl_penalty false")
    if grpo.use_value_head and run.value_head is None:
        run.value_head = ValueHead(run.model.config.get_text_config().hidden_size).to(run.device)
        state = weights / "state.pt"
        saved = torch.load(state, weights_only=True).get("value_head") if state.exists() else None
        if saved:
            run.value_head.load_state_dict(saved)


def rollout_of(records: list[dict], pad_id: int) -> tuple[Rollout, dict[str, torch.Tensor]]:
    """Records of one step, as completion_records wrote them -> the Rollout, and the points of each function (P, G)."""
    def pad(rows, dtype):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)

    num_prompts = len({record["group"] for record in records})
    prompts = [record["prompt_ids"] for record in records[:: len(records) // num_prompts]]
    ids = [record["completion_ids"] for record in records]
    rollout = Rollout(
        *left_pad(prompts, pad_id), pad(ids, torch.long), pad([[True] * len(row) for row in ids], torch.bool),
        pad([record["sampling_logp"] for record in records], torch.float32),
        torch.tensor([record["finished"] for record in records]), [record["completion"] for record in records],
    )
    points = {
        name: torch.tensor([[torch.nan if r["rewards"][name] is None else r["rewards"][name] for r in records]]).double()
        for name in records[0].get("rewards", {})
    }
    return rollout, {name: values.view(num_prompts, -1) for name, values in points.items()}


def as_supervised(config: Config) -> Config:
    """Settings under which the GRPO loss with advantage 1 is the supervised loss."""
    plain = replace(
        config.grpo, loss_type="reinforce", loss_aggregation="", dual_clip=0.0, ppo_epochs=1, entropy_coef=0.0,
        generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0, use_kl_penalty=False, kl_target=0.0,
    )
    return replace(config, grpo=plain)
