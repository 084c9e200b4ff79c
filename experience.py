"""
The data of an update: groups of scored completions, and an Experience, which holds everything about a rollout
that stays the same while the policy is updated on it.

Forward passes here compute no gradient; those that do are in train.py, accumulate_gradients.
Shapes: P prompts, G completions of each, B = P*G rows with the completions of a prompt adjacent, b rows of a
micro-batch, T completion tokens.
Units: rewards and values in points, log-probabilities (logp) and KL in nats.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo import (
    compute_group_advantages, generalized_advantage_estimation, importance_weights, kl_penalty,
    overlong_penalty,
)
from logprobs import LogProbs, completion_lengths
from rewards import weighted_sum
from sample import Rollout


@dataclass
class Groups:
    """Prompts with their completions and rewards."""

    examples: list[dict]                # P
    rollout: Rollout
    scores: Tensor                      # (P, G) points, weighted sum of the reward functions; NaN: not scored
    per_function: dict[str, Tensor]     # (P, G) points of each reward function
    rewards: Tensor                     # (P, G) points, see shape_rewards
    replaced: int = 0                   # number of groups that dynamic sampling replaced
    reports: object = None              # of the reward functions, beside points: reward_functions/calling.py

    @property
    def tied(self) -> Tensor:
        """Return (P,) bool: the rewards of the group are equal, or fewer than two: advantages are 0."""
        return (compute_group_advantages(self.rewards) == 0).all(dim=1)

    def without_signal(self, config) -> Tensor:
        """Return (P,) bool: the group is tied, or would be without the penalty for length."""
        rewards = combine_and_clip(config, self.scores, self.per_function)
        return self.tied | (compute_group_advantages(rewards) == 0).all(dim=1)


def shape_rewards(config, rollout: Rollout, scores: Tensor, per_function: dict[str, Tensor]) -> Tensor:
    """Compute the rewards (P, G) that are learned from: scores combined, clipped and penalised by length."""
    rewards = combine_and_clip(config, scores, per_function)
    if config.overlong != "penalise":
        return rewards
    limit = config.generation_max_length
    lengths = completion_lengths(rollout.completion_mask).view_as(rewards)
    return rewards + overlong_penalty(lengths, max_tokens=limit, buffer=max(1, limit // 5))


def combine_and_clip(config, scores: Tensor, per_function: dict[str, Tensor]) -> Tensor:
    """Compute the rewards (P, G) without the penalty for length.

    With --reward_combination gdpo (arXiv:2601.05242) the scores are replaced, before advantages are taken, by
        sum of weight * (r - mean(group)) / std(group)
    so that a function whose points differ little counts as much as one whose points differ widely.
    """
    if config.reward_combination == "gdpo":
        advantages = {}
        for name, points in per_function.items():
            scaled = compute_group_advantages(points.masked_fill(scores.isnan(), torch.nan))
            advantages[name] = scaled.masked_fill(points.isnan(), torch.nan)
        scores = weighted_sum(advantages, config.weights).masked_fill(scores.isnan(), torch.nan)
    if config.reward_clip:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)           # NaN stays NaN
    return scores


@dataclass
class Experience:
    """A rollout with everything that its updates need. Tensors are (B, T) unless stated.

    Log-probabilities of a token, in nats:
        sampling_logp       of the rollout: when the token was sampled, by the sampler
        trainer_logp        before the updates, by the trainer's forward pass; without one, sampling_logp
        reference_logp      of the reference
        old_logp            what the ratio of the loss divides by: see the table

        --importance_cap    old_logp        weight of a token's loss
        0                   sampling_logp   1
        cap                 trainer_logp    min(exp(trainer_logp - sampling_logp), cap)

    With a cap this is truncated importance sampling: weights correct the sampler, ratios what updates
    changed.
    """

    examples: list[dict]                # P
    rollout: Rollout
    mask: Tensor                        # bool, tokens that are trained on and counted in denominators
    advantages: Tensor                  # (B, 1), or (B, T) from a value head
    trainer_logp: Tensor
    old_logp: Tensor
    group_tokens: Tensor                # (B, 1) tokens that are trained on, of all completions of the prompt
    importance_weights: Tensor | None = None            # None: all 1
    reference_logp: Tensor | None = None
    old_values: Tensor | None = None    # points that the value head expected before each token
    returns: Tensor | None = None       # points, targets of the value head
    groups: Groups | None = None        # None: demonstrations
    metrics: dict = field(default_factory=dict)

    def denominators(self, rows: Tensor, max_tokens: int) -> dict[str, float]:
        """Return the denominators of a loss over rows, for grpo.aggregate. max_tokens: the length limit.

        num_prompts is a fraction where --minibatch_size splits a group: that of its tokens in these rows.
        """
        mask = self.mask[rows]                            # (b, T)
        num_prompts = round(float((mask / self.group_tokens[rows].double()).sum()), 9)
        return dict(
            num_tokens=max(1, int(mask.sum())), num_sequences=max(1, int(mask.any(dim=1).sum())),
            max_tokens=max_tokens, num_prompts=num_prompts or 1.0)

    def has_gradient(self, rows: Tensor, config) -> Tensor:
        """Return (b,) bool: the rows that have a gradient.

        Rows whose advantages are all 0 have none, unless a term of the loss does not depend on advantages.
        """
        always = bool(config.kl_in_loss or config.entropy_coef or config.use_value_head)
        return self.mask[rows].any(dim=1) & (always | (self.advantages[rows] != 0).any(dim=1))

    def sampled_kl(self, logp: Tensor, config) -> Tensor:
        """Estimate KL(policy || reference) (b, T) in nats, from logp (b, T) with gradient.

        ratio_k3 is k3 times the differentiable ratio exp(logp - trainer_logp); a ratio above the cap is
        scaled down to it, with its gradient. With top-k or top-p policy and reference are truncated to
        tokens of their own, unlike in the exact KL.
        """
        if config.effective_kl_estimator != "ratio_k3":
            return kl_penalty(logp, self.reference_logp, estimator=config.effective_kl_estimator)
        ratio = torch.where(self.mask, logp - self.trainer_logp, 0.0).clamp(-20, 20).exp()
        cap = config.effective_importance_cap or torch.inf
        ratio = ratio * (cap / ratio.detach()).clamp(max=1)                      # keeps the gradient
        return kl_penalty(logp, self.reference_logp, estimator="k3", ratio=ratio)

    def select(self, rows: Tensor, device) -> "Experience":
        """Return the tensors of some rows, on a device. The rollout stays whole: rows are indices into it."""
        tensors = {name: t[rows].to(device) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, **tensors)


def compute_experience(
    groups: Groups, advantages: Tensor, config, engine, ranks, *, reference=None, value_head=None,
) -> Experience:
    """Compute what all updates on a rollout share, once and without gradient.

    advantages  (P, G) of the groups; with a value head those of its values (GAE) take their place
    config      a GRPOConfig
    """
    rollout, cap = groups.rollout, config.effective_importance_cap
    mask = rollout.completion_mask & ~groups.rewards.reshape(-1, 1).isnan()      # (B, T), NaN: not scored
    if config.overlong == "mask":
        mask = mask & rollout.finished[:, None]           # without completions that were cut
    reference_logp = None
    if reference is not None and config.effective_kl_estimator != "exact":
        with engine.on_device(reference):
            reference_logp = log_probs_of_rollout(
                engine, ranks, rollout, config.distribution, model=reference).logp

    trainer_logp, values, metrics = rollout.sampling_logp, None, {}
    if cap or value_head is not None or not engine.same_arithmetic:
        before = log_probs_of_rollout(engine, ranks, rollout, config.distribution, value_head=value_head)
        trainer_logp, values = before.logp, before.values
        metrics = compare_with_sampler(trainer_logp, rollout)
    old_logp, weights = rollout.sampling_logp, None
    if cap:
        old_logp = trainer_logp
        weights = importance_weights(trainer_logp, rollout.sampling_logp, mask, cap=cap)
        metrics["importance_weight"] = float(weights[mask].mean())

    penalty = torch.zeros(mask.shape)                                            # (B, T), in points
    if reference is not None and config.kl_in == "reward":
        kl = torch.where(mask, kl_penalty(trainer_logp, reference_logp, estimator="k1"), 0.0)
        metrics["kl"] = float(kl.sum() / mask.sum())      # NaN if no token is trained on
        penalty = config.kl_coef * kl
    returns = None
    if value_head is None:
        advantages = advantages + penalty_advantages(penalty, mask, advantages.shape)
        advantages = advantages.float().view(-1, 1)
    else:
        advantages, returns = token_advantages(
            config, groups.rewards.reshape(-1, 1), penalty, values, mask, turn_points=rollout.turn_points)
    return Experience(
        groups.examples, rollout, mask, advantages, trainer_logp, old_logp,
        group_tokens=tokens_of_groups(mask, len(rollout.prompt_ids)), importance_weights=weights,
        reference_logp=reference_logp, old_values=values, returns=returns, groups=groups, metrics=metrics,
    )


def penalty_advantages(penalty: Tensor, mask: Tensor, shape: torch.Size) -> Tensor:
    """Return the advantages (P, G) that penalties (B, T) in points add, with --kl_in reward.

    Centred within the group and not scaled, so that kl_coef means the same in all groups and in the loss:
    divided by the standard deviation of almost equal rewards it would be enormous. Completions that are not
    trained on have none: as 0 it would move the mean of the others.
    """
    points = -penalty.sum(dim=1).masked_fill(~mask.any(dim=1), torch.nan)
    return compute_group_advantages(points.view(shape), scale="none")


def compare_with_sampler(logp: Tensor, rollout: Rollout) -> dict[str, float]:
    """Compare the trainer's log-probabilities (B, T) with those of sampling, over all sampled tokens.

    returns  sampler_deviation, the mean of |ratio - 1| with ratio = exp(logp - sampling_logp)
    """
    ratio = (logp - rollout.sampling_logp)[rollout.completion_mask].clamp(-20, 20).exp()
    return {"sampler_deviation": float((ratio - 1).abs().mean())}


def demonstrations_as_experience(examples: list[dict], rollout: Rollout) -> Experience:
    """Return demonstrations as an experience with advantage 1, for supervised training."""
    mask, logp = rollout.completion_mask, rollout.sampling_logp
    advantages, group_tokens = torch.ones(len(mask), 1), tokens_of_groups(mask, len(mask))
    return Experience(examples, rollout, mask, advantages, logp, logp, group_tokens)


def tokens_of_groups(mask: Tensor, num_prompts: int) -> Tensor:
    """Count the tokens of a mask (B, T) in the group of each row, at least 1: (B, 1)."""
    per_group = mask.view(num_prompts, -1).sum(dim=1).clamp(min=1)               # (P,)
    return per_group.repeat_interleave(len(mask) // num_prompts)[:, None]


def token_advantages(
    config, rewards: Tensor, penalty: Tensor, values: Tensor, mask: Tensor, turn_points: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns (B, T) by GAE.

    rewards      (B, 1) points of completions, assigned to their last tokens
    penalty      (B, T) points, subtracted at each token;  values, mask  (B, T)
    turn_points  (B, T) the environment's part of the rewards, assigned to the last token of each turn
    """
    last = torch.arange(mask.shape[1]) == completion_lengths(mask)[:, None] - 1  # (B, T)
    turn_rewards = torch.zeros(mask.shape)                                       # (B, T)
    if turn_points is not None:
        turn_rewards = torch.where(mask, turn_points * config.environment_weight, 0.0)
    remaining = rewards.float() - turn_rewards.sum(dim=1, keepdim=True)          # (B, 1)
    token_rewards = torch.where(last, remaining, 0.0) + turn_rewards - penalty   # (B, T)
    advantages, returns = generalized_advantage_estimation(
        token_rewards, values, mask, gamma=config.gae_gamma, lam=config.gae_lambda
    )
    if config.normalize_advantages and mask.sum() > 1:
        # Centred as well as scaled: early in training the value head is wrong by about the same everywhere.
        scaled = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)
        advantages = torch.where(mask, scaled, 0.0)
    return advantages, returns


@torch.no_grad()
def log_probs_of_rollout(
    engine, ranks, rollout: Rollout, distribution: dict, *, model=None, value_head=None
) -> LogProbs:
    """Compute log-probabilities of a whole rollout, on the CPU. Each rank forwards some of its rows.

    distribution  temperature, top_k, top_p, min_p;  model  in place of the engine's
    """
    shape = rollout.completion_mask.shape
    results = {"logp": torch.zeros(shape), "entropy": torch.zeros(shape)}
    if value_head is not None:
        results["values"] = torch.zeros(shape)
    for rows, is_real in ranks.in_lockstep(engine.micro_batches(rollout, torch.arange(shape[0]), ranks.size)):
        new = engine.log_probs(rollout, rows, distribution, model=model, value_head=value_head)
        if is_real:
            for name, result in results.items():
                result[rows] = getattr(new, name).cpu()
    return LogProbs(**{name: ranks.sum(result) for name, result in results.items()})  # 0 on the other ranks


def minibatches(config, num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each update on a rollout, for all --ppo_epochs: every row once per epoch.

    Every epoch has a new order, if there are several minibatches. Groups stay together if --minibatch_size is
    a multiple of their size; 0: all rows in one update.
    """
    size = config.minibatch_size or num_rows
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.ppo_epochs):
        groups = torch.arange(num_rows).view(-1, config.num_completions_per_prompt)
        groups = groups[torch.randperm(len(groups), generator=generator)] if size < num_rows else groups
        yield from groups.flatten().split(size)
