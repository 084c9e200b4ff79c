"""
One group on its way through one step of GRPO, number by number, for a lecture hall.

    python train.py --use_grpo --explain                             the demonstration, after a short cold start
    python train.py --use_grpo --explain --model_path RUN/final      any model, data and variant
    python train.py --output_dir RUN --resume --explain              the next step of a run, from its last checkpoint

Every number comes from the functions that train. What differs from a real step is that its batch is one prompt and its
update takes all of the group. Nothing is written to disk, and what the step learned is forgotten.
"""

from collections.abc import Callable

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from engine.chat_template import as_text
from experience import Experience, Groups, compute_experience, log_probs_of_rollout
from grpo import LOSSES, compute_group_advantages, kl_penalty
from runs.records import or_none, points_text
from runs.run import Run

COLD_STEPS = 100                # supervised steps at most: enough for some answers of the demonstration to be right
BATCHES = 20                    # how many are searched for a group that is not tied
TOKENS_SHOWN = 6                # of a completion: those that were least likely


def explain(
    run: Run, supervised_training_step: Callable, sample_groups: Callable, accumulate_gradients: Callable,
    optimizer_step: Callable,
) -> None:
    """Print one step, number by number. The four functions are those of train.py."""
    config = run.config.grpo
    train_until_grpo(run, supervised_training_step)
    groups = find_group(run, sample_groups)
    if groups is None:
        run.folder.print(
            f"all groups of {BATCHES} batches are tied: equal rewards, advantages of 0, nothing to learn. Take another reward "
            "function, easier or harder problems, or a policy that is sometimes right (--model_path)"
        )
        return
    rollout, rows = groups.rollout, torch.arange(groups.rewards.numel())
    run.progress.add_rewards(groups.rewards)
    advantages = compute_group_advantages(
        groups.rewards, **config.advantage_options, global_mean=run.progress.mean_reward
    )
    experience = compute_experience(
        groups, advantages, config, run.model, reference=run.reference, value_head=run.value_head,
        kl_coef=run.progress.kl_coef, **run.forwarding,
    )
    show_completions(run, groups, experience)
    old = log_probs_of_rollout(run.model, rollout, config.policy, **run.forwarding).logp                     # (G, T)
    likeliest_first = experience.advantages.mean(dim=1).argsort(descending=True).tolist()
    picked = [(row, t) for row in (likeliest_first[0], likeliest_first[-1]) for t in surprising(rollout, row)]
    show_tokens(run, experience, old, picked, "3. Some tokens before the update: by sampler (old) and trainer (new)")

    losses = accumulate_gradients(run, experience, rows, config)
    show_loss(run, losses, experience.denominators(rows, config.generation_max_length))
    rate = run.scheduler.get_last_lr()[0]
    norm = optimizer_step(run, losses["total_loss"])
    longest = run.config.training.max_grad_norm
    run.folder.print(f"5. The update: gradient norm {norm:.4g}, cut to {longest:g} if longer; AdamW, learning rate {rate:.3g}")
    if run.progress.skipped_in_a_row:
        run.folder.print("   loss or gradient is not finite: skipped, nothing has changed")

    new = log_probs_of_rollout(run.model, rollout, config.policy, **run.forwarding).logp
    show_tokens(run, experience, new, picked, "6. The same tokens after it, as a second epoch on this rollout would see them")
    show_change(run, experience, old, new)


def train_until_grpo(run: Run, supervised_training_step: Callable) -> None:
    """Begin the GRPO phase, after some of the supervised steps that come before it."""
    if run.progress.phase == len(run.phases):
        raise ValueError("--explain: this run is finished; explain its last policy with --model_path RUN/final")
    phase = run.phase
    run.begin_phase(phase)
    if phase.name == "grpo":
        return
    steps = min(phase.steps, COLD_STEPS)
    run.folder.print(f"first {steps} supervised steps of {phase.name}, or nothing would be right")
    while run.progress.phase_step < steps:
        supervised_training_step(run, next(run.batches))
    run.end_phase()
    run.begin_phase(run.phase)


def find_group(run: Run, sample_groups: Callable) -> Groups | None:
    """Return the first group that is not tied, sampled as in training; None if there is none in BATCHES batches."""
    for number in range(1, BATCHES + 1):
        groups = sample_groups(run, next(run.batches))
        if not groups.tied.all():
            first = int((~groups.tied).nonzero()[0])
            tied, all_groups = int(groups.tied.sum()), len(groups.tied)
            run.folder.print(f"{tied} of {all_groups} groups of batch {number} are tied; this is the first other one")
            return groups.select(torch.arange(all_groups) == first)
    return None


def surprising(rollout, row: int) -> list[int]:
    """Positions of the least likely tokens of a completion, in order."""
    logp = rollout.sampling_logp[row].masked_fill(~rollout.completion_mask[row], torch.inf)
    count = min(TOKENS_SHOWN, int(rollout.completion_mask[row].sum()))
    return sorted(logp.topk(count, largest=False).indices.tolist())


# ---- what is shown ---------------------------------------------------------------------------------------------------


def show(run: Run, title: str, head: list[str], lines: list[list[str]]) -> None:
    """A table. Cells are shown as they are: a model's text is no markup."""
    table = Table(*head, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for line in lines:
        table.add_row(*map(Text, line))
    console = run.folder.console
    console.print(table, soft_wrap=False, width=None if console.is_terminal else 160)            # else rich takes 80


def show_completions(run: Run, groups: Groups, experience: Experience) -> None:
    """The prompt, its completions, their points, and what these are compared with."""
    grpo, rollout, points = run.config.grpo, groups.rollout, groups.rewards
    run.folder.print(f"\nprompt: {groups.examples[0]['prompt']!r}, answer: {groups.examples[0].get('answer')!r}")
    show(run, "1. Completions, sampled one token after the other", ["", "completion", "tokens", "log-probability", "ended"], [
        [str(g), repr(as_text(completion)), str(int(mask.sum())), f"{float(logp[mask].sum()):.3f} nat",
         "itself" if done else "at the limit"]
        for g, (completion, mask, logp, done) in enumerate(zip(
            rollout.completions, rollout.completion_mask, rollout.sampling_logp, rollout.finished.tolist(), strict=True))
    ])
    weights = [f"{name} x {weight:g}" for name, weight in zip(groups.per_function, grpo.weights, strict=True)]
    columns = {**dict(zip(weights, groups.per_function.values(), strict=True)), "r": groups.scores}
    if not torch.equal(groups.scores.nan_to_num(), points.nan_to_num()):
        columns["r, clipped or penalised"] = points
    advantages = experience.advantages.mean(dim=1).tolist()
    show(run, "2. Points by reward function, their weighted sum r, and the advantage A", ["", *columns, "A"], [
        [str(g), *(points_text(or_none(of_group[0, g])) for of_group in columns.values()), f"{advantage:+.4f}"]
        for g, advantage in enumerate(advantages)
    ])
    if run.value_head is not None:
        run.folder.print("   A is the mean over the completion's tokens: the value head gives each its own (GAE)")
        return
    b, s = baseline_and_scale(run, points)
    what = "not scaled" if grpo.scale == "none" else "standard deviation"
    penalty = ", less the KL penalty, centred" if run.reference is not None and grpo.kl_in == "reward" else ""
    run.folder.print(f"   b = {b:.4f} ({grpo.baseline}), s = {s:.4f} ({what}): A = (r - b) / s{penalty}")


def baseline_and_scale(run: Run, points: Tensor) -> tuple[float, float]:
    """b and s of the completion that is farthest from its baseline, taken from the advantages: (r - b) / 1 and (r - b) / s."""
    grpo, mean = run.config.grpo, run.progress.mean_reward
    centred, scaled = (
        compute_group_advantages(points, baseline=grpo.baseline, scale=scale, epsilon=grpo.advantage_epsilon, global_mean=mean)
        for scale in ("none", grpo.scale)
    )
    g = int(centred.abs().argmax())
    return float((points - centred).flatten()[g]), float((centred / scaled).flatten()[g])


def show_tokens(run: Run, experience: Experience, logp: Tensor, picked: list[tuple[int, int]], title: str) -> None:
    """What the loss makes of some tokens, when the policy gives them logp (G, T)."""
    grpo, mask, rollout = run.config.grpo, experience.mask, experience.rollout
    log_ratio = torch.where(mask, logp - experience.old_logp, 0.0)               # (G, T)
    loss, clipped = LOSSES[grpo.loss_type].per_token(                            # (G, T) each
        logp=torch.where(mask, logp, 0.0), log_ratio=log_ratio, advantages=experience.advantages, mask=mask,
        clip_low=grpo.clip_low, clip_high=grpo.clip_high, dual_clip=grpo.dual_clip or torch.inf,
    )
    ratio = log_ratio.clamp(-20, 20).exp()
    head, columns = ["", "token", "old logp", "new logp", "ratio", "A", "clipped", "loss"], []
    if experience.reference_logp is not None:
        head.append("KL to reference")
        columns.append(kl_penalty(logp, experience.reference_logp, estimator="k3"))
    advantages = experience.advantages.expand_as(logp)
    show(run, title, head, [
        [str(row), repr(run.tokenizer.decode([rollout.completion_ids[row, t].item()])), f"{experience.old_logp[row, t]:.4f}",
         f"{logp[row, t]:.4f}", f"{ratio[row, t]:.4f}", f"{advantages[row, t]:+.4f}",
         "yes" if clipped[row, t] else "no", f"{loss[row, t]:+.4f}", *(f"{kl[row, t]:.5f}" for kl in columns)]
        for row, t in picked
    ])


def show_loss(run: Run, losses: dict, denominators: dict) -> None:
    """The terms of the loss with their weights, and what is divided by."""
    grpo = run.config.grpo
    aggregation = grpo.loss_aggregation or LOSSES[grpo.loss_type].aggregation
    weights = {"policy_loss": 1.0, "kl": run.progress.kl_coef, "entropy": -grpo.entropy_coef, "value_loss": grpo.value_coef}
    lines = [[name, f"{losses[name]:+.6f}", f"{weight:+g}"] for name, weight in weights.items() if name in losses and weight]
    show(run, "4. The loss", ["term", "value", "weight"], [*lines, ["total_loss", f"{losses['total_loss']:+.6f}", ""]])
    tokens, completions, limit = (denominators[name] for name in ("num_tokens", "num_sequences", "max_tokens"))
    divided_by = {
        "token_mean": f"{tokens} tokens", "sequence_mean": f"its completion's length and {completions} completions",
        "constant": f"{completions} completions x {limit} tokens, the limit",
    }[aggregation]
    run.folder.print(f"   {grpo.loss_type}, {aggregation}: a token's loss is divided by {divided_by}")
    if aggregation != "token_mean" and {"kl", "entropy"} & {line[0] for line in lines}:
        run.folder.print("   and so is its KL and entropy in total_loss; the table has their means over all tokens")
    run.folder.print("   on policy every ratio is 1, so the value only averages the advantages: what teaches is its gradient")


def show_change(run: Run, experience: Experience, old: Tensor, new: Tensor) -> None:
    """Whether the step did what the advantages asked for."""
    mask = experience.rollout.completion_mask
    before, after = ((logp * mask).sum(dim=1) for logp in (old, new))            # (G,) nats
    advantages = experience.advantages.mean(dim=1)
    show(run, "7. log-probability of each completion", ["", "A", "before", "after", "change"], [
        [str(g), f"{advantages[g]:+.4f}", f"{before[g]:.4f}", f"{after[g]:.4f}", f"{after[g] - before[g]:+.4f} nat"]
        for g in range(len(before))
    ])
    for sign, what, became in (1, "positive", "likelier"), (-1, "negative", "less likely"):
        asked = (advantages.sign() == sign).nonzero().flatten()
        did = int(((after - before)[asked].sign() == sign).sum())
        run.folder.print(f"   {did} of {len(asked)} completions with {what} advantage became {became}")
