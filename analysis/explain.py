"""
Explain one step of GRPO on one group, number by number, for a lecture.

    python -m analysis.explain --use_grpo                           the demonstration, after a cold start
    python -m analysis.explain --use_grpo --model_path RUN/final    any model, data and variant
    python -m analysis.explain --output_dir RUN --resume            the next step of a run, from a checkpoint

The flags are those of train.py, and its functions compute every number. Unlike a step of train.py, this one
has a batch of one prompt and makes one update on the whole group. Nothing is written to disk.
"""

import sys
from functools import partial

from runs.command_line import parse_config  # first, see runs/__init__.py

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

import train
from data import as_text
from experience import Batch, Experience, Groups, compute_experience
from grpo import compute_group_advantages, kl_penalty, token_loss
from runs.console import RunConsole, reward_text
from runs.errors import exit_on_errors
from runs.folder import or_none
from runs.run import Run
from runs.setup import set_up

COLD_STEPS = 100                # maximum number of supervised steps before it, so that some answers are right
BATCHES = 20                    # number of batches that are searched for a group with unequal rewards
TOKENS_SHOWN = 6                # number of tokens shown of a completion: the least likely ones


def main(argv: list[str]) -> None:
    """Set up a run from flags of train.py, and print its next step of GRPO, number by number."""
    config = parse_config([*argv, "--check"])             # --check: write nothing
    if not config.training.use_grpo:
        raise ValueError("only a step of GRPO can be explained; add --use_grpo")
    run = set_up(config)
    if run.folder.ranks.size > 1:
        raise ValueError("only one process can explain a step; start it without torchrun")
    train_until_grpo(run)
    config, policy, groups = run.config.grpo, run.policy, find_group(run)
    rollout, rows = groups.rollout, torch.arange(groups.rewards.numel())
    advantages = compute_group_advantages(
        groups.rewards, baseline=config.baseline, scale=config.scale,
        global_mean=run.progress.mean_of_rewards)
    experience = compute_experience(groups, advantages, config, policy, run.reference)
    show_completions(run, groups, experience)
    old = policy.log_probs(rollout).logp                                         # (G, T)
    best_first = mean_advantages(experience).argsort(descending=True, stable=True).tolist()
    picked = [(row, t) for row in (best_first[0], best_first[-1]) for t in least_likely_tokens(rollout, row)]
    title = "3. Some tokens before the update: sampler (old), trainer (new)"
    batch = experience.batch(rows, config.aggregation, max_tokens=config.generation_max_length)
    show_tokens(run, title, batch, old, picked)

    reference = run.reference if config.exact_kl else None
    loss_scale = policy.scaler.get_scale() if hasattr(policy, "scaler") else 1   # not 1 in float16
    norms = []
    for max_tokens in 1, policy.max_tokens:               # 1: each completion gets its own forward pass
        policy.max_tokens = max_tokens
        policy.clear_gradient()
        losses = policy.forward_backward(batch, partial(train.grpo_loss, config), reference=reference)
        norms.append(policy.clip_gradient(torch.inf) / loss_scale)               # inf: only compute it
    show_loss(run, losses, batch)
    rate, max_norm = policy.scheduler.get_last_lr()[0], run.config.training.max_grad_norm
    policy.optimizer_step(max_norm)
    run.console.print(
        f"5. The update: gradient norm {norms[1]:.4g} (with one completion per pass: {norms[0]:.4g}), "
        f"clipped to {max_norm:g} if larger; {type(policy.optimizer).__name__}, learning rate {rate:.3g}")

    new = policy.log_probs(rollout).logp
    title = "6. The same tokens after the update, as in a second epoch on this rollout"
    show_tokens(run, title, batch, new, picked)
    mask = rollout.completion_mask
    before, after = ((logp * mask).sum(dim=1) for logp in (old, new))            # (G,) nats
    show(run.console, "7. The log-probability of each completion", ["", "A", "before", "after", "change"], [
        [str(g), f"{a:+.4f}", f"{start:.4f}", f"{end:.4f}", f"{end - start:+.4f} nat"]
        for g, (a, start, end) in enumerate(zip(mean_advantages(experience), before, after, strict=True))
    ])


def train_until_grpo(run: Run) -> None:
    """Begin the GRPO phase; if a cold start comes first, take at most COLD_STEPS steps of it."""
    if run.has_taken_all_steps:
        raise ValueError("this run is complete; explain its policy with --model_path RUN/final")
    run.begin_phase()
    if run.phase.name == "grpo":
        return
    steps = min(run.phase.steps, COLD_STEPS)
    run.console.print(f"taking {steps} supervised steps of {run.phase.name} first, for some right answers")
    while run.progress.phase_step < steps:
        train.supervised_training_step(run, next(run.batches))
    run.progress.phase, run.progress.phase_step = run.progress.phase + 1, 0
    run.begin_phase()


def mean_advantages(experience: Experience) -> Tensor:
    """Return the mean advantage of each completion's tokens, (G,); 0 if the loss excludes the completion."""
    mask = experience.mask
    return (experience.advantages * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def find_group(run: Run) -> Groups:
    """Return the first group with unequal rewards in BATCHES batches; without reward functions, any group."""
    for number in range(1, BATCHES + 1):
        groups = train.sample_groups(run, next(run.batches))
        if run.config.grpo.reward_functions == ["none"] or not groups.tied.all():
            size, first = len(groups.tied), int(groups.tied.int().argmin())
            count = f"{int(groups.tied.sum())} of {size} groups in batch {number}"
            run.console.print(f"{count} have zero variance; this is group {first}")
            return groups.select(torch.arange(size) == first)
    raise ValueError(
        f"all groups of {BATCHES} batches have zero variance, so all advantages are 0; use another reward "
        "function, easier or harder problems, or the --model_path of a policy that is sometimes right")


def least_likely_tokens(rollout, row: int) -> list[int]:
    """Return the positions of the least likely tokens of a completion, in ascending order."""
    logp = rollout.sampling_logp[row].masked_fill(~rollout.completion_mask[row], torch.inf)
    count = min(TOKENS_SHOWN, int(rollout.completion_mask[row].sum()))
    return sorted(logp.topk(count, largest=False).indices.tolist())


# ---- tables ------------------------------------------------------------------------------------------------


def show(console: RunConsole, title: str, head: list[str], lines: list[list[str]]) -> None:
    """Print a table. Cells contain a model's text, so they are not parsed as rich markup."""
    columns = [Column(name, overflow="fold") for name in head]
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for line in lines:
        table.add_row(*map(Text, line))
    if not console.rich.is_terminal:
        console.rich.width = 10**6                        # rich assumes 80 in a pipe
    console.rich.print(table, soft_wrap=False)


def show_completions(run: Run, groups: Groups, experience: Experience) -> None:
    """Print the prompt, its completions, their rewards and advantages."""
    console, config, rollout, rewards = run.console, run.config.grpo, groups.rollout, groups.rewards
    console.print(f"\nprompt: {groups.examples[0]['prompt']!r}, answer: {groups.examples[0].get('answer')!r}")
    head = ["", "completion", "tokens", "log-probability", "ended by"]
    show(console, "1. Completions, sampled token by token", head, [
        [str(g), repr(as_text(completion)), str(int(mask.sum())), f"{float(logp[mask].sum()):.3f} nat",
         "stop token" if finished else "length limit"]
        for g, (completion, mask, logp, finished) in enumerate(zip(
            rollout.completions, rollout.completion_mask, rollout.sampling_logp, rollout.finished.tolist(),
            strict=True))
    ])
    weighted = zip(groups.per_function.items(), config.weights, strict=True)
    columns = {f"{name} x {weight:g}": values for (name, values), weight in weighted} | {"r": groups.scores}
    if not torch.equal(groups.scores.nan_to_num(), rewards.nan_to_num()):
        columns["r, clipped or penalised"] = rewards
    advantages = mean_advantages(experience).tolist()
    title = "2. Rewards by function, their weighted sum r, and the advantage A"
    show(console, title, ["", *columns, "A"], [
        [str(g), *(reward_text(or_none(values[0, g])) for values in columns.values()), f"{advantage:+.4f}"]
        for g, advantage in enumerate(advantages)
    ])
    how = "value head" if config.use_value_head else f"baseline {config.baseline}, scale {config.scale}"
    console.print(f"   A: {how}; if A differs between the tokens of a completion, their mean is shown")


def show_tokens(run: Run, title: str, batch: Batch, logp: Tensor, picked: list[tuple]) -> None:
    """Print ratio, loss and KL of the picked tokens (row, t). logp (G, T) is that of the current policy."""
    decode, old_logp = run.policy.tokenizer.decode, batch.old_logp
    loss, clipped, log_ratio = token_loss(                                       # (G, T) each
        logp, old_logp, batch.advantages, batch.mask, **run.config.grpo.loss_arguments)
    ratio = log_ratio.clamp(-20, 20).exp()
    head, columns = ["", "token", "old logp", "new logp", "ratio", "A", "clipped", "loss"], []
    if batch.reference_logp is not None:
        head.append("KL to reference")
        columns.append(kl_penalty(logp, batch.reference_logp, estimator="k3"))
    ids, advantages = batch.rollout.completion_ids, batch.advantages
    show(run.console, title, head, [
        [str(row), repr(decode([ids[row, t].item()])), f"{old_logp[row, t]:.4f}", f"{logp[row, t]:.4f}",
         f"{ratio[row, t]:.4f}", f"{advantages[row, t]:+.4f}", "yes" if clipped[row, t] else "no",
         f"{loss[row, t]:+.4f}", *(f"{kl[row, t]:.5f}" for kl in columns)]
        for row, t in picked
    ])


def show_loss(run: Run, losses: dict, batch: Batch) -> None:
    """Print the terms of the loss, their sum, and the weights of tokens."""
    console, config = run.console, run.config.grpo
    terms = [name for name in losses if name == "policy_loss" or name.endswith("_term")] + ["total_loss"]
    show(console, "4. The loss", ["term", "value"], [[name, f"{losses[name]:+.6f}"] for name in terms])
    of_tokens = batch.weights[batch.mask]
    console.print(
        f"   {config.loss_type}: {config.aggregation} of the losses of {len(of_tokens)} tokens, with weights "
        f"from {of_tokens.min():.3g} to {of_tokens.max():.3g}")
    console.print("   all ratios are still 1, so only the gradient of policy_loss matters, not its value")


if __name__ == "__main__":
    with exit_on_errors("analysis.explain"):
        main(sys.argv[1:])
