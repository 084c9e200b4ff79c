"""
The data of a training step, in three classes:

    Groups      prompts with their completions and rewards
    Experience  a rollout with everything that stays constant while the policy is updated on it
    Batch       the rows of one update, with the weight of each token in the loss

Forward passes in this file compute no gradient.
Shapes: P prompts, G completions of each, B = P*G rows with the completions of a prompt adjacent, b rows of an
update or a micro-batch, T completion tokens. Units: log-probabilities (logp) and KL in nats.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo import (
    compute_group_advantages, generalized_advantage_estimation, importance_weights, kl_penalty,
    overlong_penalty, token_weights,
)
from logprobs import completion_lengths
from rewards import weighted_sum
from sample import Rollout, concatenate, select


@dataclass
class Groups:
    """P prompts with their completions and rewards."""

    examples: list[dict]                # P
    rollout: Rollout
    scores: Tensor                      # (P, G) weighted sums of rewards; NaN: not scored
    per_function: dict[str, Tensor]     # (P, G) rewards of each reward function
    rewards: Tensor                     # (P, G) what advantages are computed from: see shape_rewards
    extra: list[dict] = field(default_factory=list)      # B, what reward functions log for each completion
    reports: object = None              # on the calls of reward functions: reward_functions/calling.py
    replaced: int = 0                   # number of groups that dynamic sampling replaced

    @property
    def tied(self) -> Tensor:
        """Return (P,) bool, True for zero-variance groups: their rewards are equal, or fewer than two."""
        return (compute_group_advantages(self.rewards) == 0).all(dim=1)

    def without_signal(self, config) -> Tensor:
        """Return (P,) bool, True for groups with zero variance, with or without the length penalty."""
        rewards = combine_and_clip(config, self.scores, self.per_function)
        return self.tied | (compute_group_advantages(rewards) == 0).all(dim=1)

    def select(self, kept: Tensor) -> "Groups":
        """Return the groups where kept (P,) is True, with the reports on all calls."""
        return replace(select(replace(self, reports=None), kept), reports=self.reports)

    def replace(self, which: Tensor, new: "Groups") -> "Groups":
        """Return the groups where which (P,) is False, followed by the new groups."""
        count = self.replaced + len(new.rewards)
        return replace(concatenate([replace(self.select(~which), replaced=0), new]), replaced=count)


def shape_rewards(config, groups: Groups) -> Tensor:
    """Compute the rewards (P, G) from scores: combine them, clip them, add the length penalty."""
    rewards = combine_and_clip(config, groups.scores, groups.per_function)
    if config.overlong != "penalise":
        return rewards
    limit = config.generation_max_length
    lengths = completion_lengths(groups.rollout.completion_mask).view_as(rewards)
    return rewards + overlong_penalty(lengths, max_tokens=limit, buffer=max(1, limit // 5))


def combine_and_clip(config, scores: Tensor, per_function: dict[str, Tensor]) -> Tensor:
    """Compute the rewards (P, G) without the length penalty.

    With --reward_combination gdpo (arXiv:2601.05242) the scores are replaced by
        sum of weight * (r - mean(group)) / std(group), r: the rewards of a function
    so that the influence of a function does not depend on the variance of its rewards.
    """
    if config.reward_combination == "gdpo":
        advantages = {}
        for name, rewards in per_function.items():
            scaled = compute_group_advantages(rewards.masked_fill(scores.isnan(), torch.nan))
            advantages[name] = scaled.masked_fill(rewards.isnan(), torch.nan)
        scores = weighted_sum(advantages, config.weights).masked_fill(scores.isnan(), torch.nan)
    if config.reward_clip:
        scores = scores.clamp(-config.reward_clip, config.reward_clip)           # NaN stays NaN
    return scores


@dataclass
class Experience:
    """A rollout with everything that its updates need. Tensors are (B, T), on the CPU.

    Log-probabilities of a token, in nats:
        sampling_logp       by the sampler, when the token was sampled (a field of the rollout)
        trainer_logp        by the trainer's forward pass before the updates; sampling_logp if there is none
        reference_logp      by the reference
        old_logp            the denominator of the ratio in the loss: sampling_logp, or with importance
                            weights (--importance_cap, or vLLM) trainer_logp

    With importance weights, batch multiplies advantages by importance_weights: see grpo.importance_weights.
    """

    examples: list[dict]                # P
    rollout: Rollout
    mask: Tensor                        # bool, True on tokens that are trained on
    advantages: Tensor
    trainer_logp: Tensor
    old_logp: Tensor
    reference_logp: Tensor | None = None
    old_values: Tensor | None = None    # the value head's expected reward before each token
    returns: Tensor | None = None       # targets of the value head
    importance_weights: Tensor | None = None
    groups: Groups | None = None        # None for demonstrations
    metrics: dict = field(default_factory=dict)

    def batch(
        self, rows: Tensor, aggregation: str = "token_mean", *, max_tokens: int | None = None
    ) -> "Batch":
        """Return the batch of an update on rows (b,), with token_weights over all of them."""
        per_prompt = self.mask.reshape(len(self.rollout.prompt_ids), -1).sum(dim=1)              # (P,)
        group_tokens = per_prompt.repeat_interleave(len(self.mask) // len(per_prompt))[:, None]  # (B, 1)
        weights = torch.zeros(self.mask.shape)
        weights[rows] = token_weights(
            self.mask[rows], aggregation, group_tokens=group_tokens[rows], max_tokens=max_tokens)
        importance = 1.0 if self.importance_weights is None else self.importance_weights         # (B, T)
        fields = vars(self) | {"advantages": self.advantages * importance}
        return Batch(**fields, rows=rows, weights=weights)

    @property
    def by_token(self) -> bool:
        """Return True if tokens of the same completion have different advantages."""
        return bool((self.advantages != self.advantages[:, :1]).any())


@dataclass(kw_only=True)
class Batch(Experience):
    """The rows of one update on an experience: the input of Policy.forward_backward and of its loss function.

    Tensors are (B, T) and cover the whole rollout; after select they are (b, T) for some rows. advantages are
    already multiplied by importance_weights.
    """

    rows: Tensor                        # (b,) indices of completions
    weights: Tensor                     # factor of each token in the loss

    def select(self, rows: Tensor, device="cpu") -> "Batch":
        """Return the part of the batch with these rows, with its tensors on a device."""
        tensors = {name: x[rows].to(device) for name, x in vars(self).items()
                   if isinstance(x, Tensor) and name != "rows"}
        return replace(self, rows=rows, **tensors)

    def rows_with_gradient(self, *, of_policy_loss_alone: bool) -> Tensor:
        """Return the rows with tokens to train on; of_policy_loss_alone: with nonzero advantages only."""
        trained = self.mask[self.rows]
        if of_policy_loss_alone:
            trained = trained & (self.advantages[self.rows] != 0)
        return self.rows[trained.any(dim=1)]


def compute_experience(groups: Groups, advantages: Tensor, config, policy, reference=None) -> Experience:
    """Compute once, without gradient, everything that all updates on a rollout share.

    advantages  (P, G) of the groups;  config  a GRPOConfig
    policy, reference  each a Policy; reference is None without a KL penalty
    """
    rollout = groups.rollout
    mask = rollout.completion_mask & ~groups.rewards.reshape(-1, 1).isnan()      # (B, T), NaN: not scored
    if config.overlong == "mask":
        mask = mask & rollout.finished[:, None]           # exclude truncated completions
    advantages = advantages.float().reshape(-1, 1).expand(mask.shape)            # (B, T)
    logp = rollout.sampling_logp
    experience = Experience(groups.examples, rollout, mask, advantages, logp, logp, groups=groups)
    if reference is not None and not config.exact_kl:
        experience.reference_logp = reference.log_probs(rollout).logp
    if config.importance_weight_cap or policy.value_head is not None or not policy.same_arithmetic:
        add_trainer_logp(experience, policy)
    penalty = None                                        # (B, T), to subtract from rewards
    if reference is not None and config.kl_in == "reward":
        penalty = kl_in_reward(experience, config.kl_coef)
    if policy.value_head is not None:                     # replaces the group's advantages
        experience.advantages, experience.returns = token_advantages(
            config, groups.rewards.reshape(-1, 1), penalty, experience.old_values, mask, rollout.turn_points)
    elif penalty is not None:
        experience.advantages = advantages + penalty_advantages(penalty, mask, groups.rewards.shape)
    shown = experience.advantages[mask] if experience.by_token else experience.advantages[:, 0]
    experience.metrics |= {"mean_advantage": float(shown.mean()), "std_advantage": float(shown.std())}
    if config.importance_weight_cap:
        add_importance_weights(experience, config.importance_weight_cap)
    return experience


def add_trainer_logp(experience: Experience, policy) -> None:
    """Add log-probabilities and values by the trainer's forward pass, and compare them with the sampler's.

    The metric sampler_deviation is the mean of |trainer / sampler - 1| over all sampled tokens.
    """
    before, rollout = policy.log_probs(experience.rollout), experience.rollout
    experience.trainer_logp, experience.old_values = before.logp, before.values
    ratio = (before.logp - rollout.sampling_logp)[rollout.completion_mask].clamp(-20, 20).exp()
    experience.metrics["sampler_deviation"] = float((ratio - 1).abs().mean())


def kl_in_reward(experience: Experience, kl_coef: float) -> Tensor:
    """Return the KL penalty of each token, (B, T), which --kl_in reward subtracts from the reward."""
    kl = kl_penalty(experience.trainer_logp, experience.reference_logp, estimator="k1")
    kl = torch.where(experience.mask, kl, 0.0)
    experience.metrics["kl"] = float(kl.sum() / experience.mask.sum())           # NaN: no token is trained on
    return kl_coef * kl


def penalty_advantages(penalty: Tensor, mask: Tensor, shape: torch.Size) -> Tensor:
    """Return the advantages (B, 1) of the penalties (B, T) of tokens, to be added to those of the rewards.

    They are centred within the group but not scaled, so that kl_coef has the same meaning in all groups and
    in the loss: division by the std of almost equal rewards would make them enormous. Completions that are
    not trained on are excluded (NaN), because a penalty of 0 would shift the mean of the group.
    """
    rewards = -penalty.sum(dim=1).masked_fill(~mask.any(dim=1), torch.nan)
    return compute_group_advantages(rewards.view(shape), scale="none").float().view(-1, 1)


def add_importance_weights(experience: Experience, cap: float) -> None:
    """Add the weights min(trainer / sampler, cap), and make trainer_logp the denominator of ratios."""
    mask, experience.old_logp = experience.mask, experience.trainer_logp
    experience.importance_weights = importance_weights(
        experience.trainer_logp, experience.rollout.sampling_logp, mask, cap=cap)
    experience.metrics["importance_weight"] = float(experience.importance_weights[mask].mean())


def sampled_kl(logp: Tensor, batch: Batch, config) -> Tensor:
    """Estimate KL(policy || reference) (b, T) in nats, from logp (b, T) with gradient.

    ratio_k3 is k3 times the differentiable ratio exp(logp - trainer_logp). A ratio above the importance cap
    is scaled down to the cap, and its gradient by the same factor. With top-k or top-p, the policy and the
    reference are each truncated to their own likely tokens, unlike in the exact KL.
    """
    estimator = config.kl_estimator or "ratio_k3"
    if estimator != "ratio_k3":
        return kl_penalty(logp, batch.reference_logp, estimator=estimator)
    ratio = torch.where(batch.mask, logp - batch.trainer_logp, 0.0).clamp(-20, 20).exp()
    cap = config.importance_weight_cap or torch.inf
    ratio = ratio * (cap / ratio.detach()).clamp(max=1)   # keeps a gradient
    return kl_penalty(logp, batch.reference_logp, estimator="k3", ratio=ratio)


def demonstrations_as_experience(examples: list[dict], rollout: Rollout) -> Experience:
    """Return demonstrations as an experience with advantage 1, for supervised training."""
    mask, logp = rollout.completion_mask, rollout.sampling_logp
    return Experience(examples, rollout, mask, torch.ones(mask.shape), logp, logp)


def token_advantages(
    config, rewards: Tensor, penalty: Tensor | None, values: Tensor, mask: Tensor,
    turn_points: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns (B, T) by GAE.

    rewards      (B, 1) of completions, assigned to their last tokens
    penalty      (B, T) subtracted at each token, or None;  values, mask  (B, T)
    turn_points  (B, T) the environment's rewards of turns, assigned to the last token of each turn
    """
    last = torch.arange(mask.shape[1]) == completion_lengths(mask)[:, None] - 1  # (B, T)
    turn_rewards = torch.zeros(mask.shape)                                       # (B, T)
    if turn_points is not None:
        turn_rewards = torch.where(mask, turn_points * config.environment_weight, 0.0)
    remaining = rewards.float() - turn_rewards.sum(dim=1, keepdim=True)          # (B, 1)
    token_rewards = torch.where(last, remaining, 0.0) + turn_rewards             # (B, T)
    if penalty is not None:
        token_rewards = token_rewards - penalty
    advantages, returns = generalized_advantage_estimation(
        token_rewards, values, mask, gamma=config.gae_gamma, lam=config.gae_lambda
    )
    if config.normalize_advantages and mask.sum() > 1:
        # Centred too: early in training the value head has about the same error on all tokens.
        scaled = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)
        advantages = torch.where(mask, scaled, 0.0)
    return advantages, returns


def minibatches(config, num_rows: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each update on a rollout, over all --ppo_epochs: every row once per epoch.

    With several minibatches, groups are shuffled in every epoch. They are not split if --minibatch_size is a
    multiple of the group size; 0: all rows in one update.
    """
    size = config.minibatch_size or num_rows
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.ppo_epochs):
        groups = torch.arange(num_rows).view(-1, config.num_completions_per_prompt)
        groups = groups[torch.randperm(len(groups), generator=generator)] if size < num_rows else groups
        yield from groups.flatten().split(size)
