"""
From prompts to what an update learns from: groups that are sampled and scored, and an Experience, which holds everything
about a rollout that stays the same while the policy is updated on it.

Nothing here has a gradient. What has one is in train.py, add_up_gradient.
Shapes: P prompts, G completions of each, B = P*G rows with siblings adjacent, T completion tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import torch
from torch import Tensor

from engine.devices import all_sum, gather_from_ranks, data_parallel_size, lockstep_batches, rank_slice
from engine.packing import completion_lengths, micro_batches
from engine.sampling_state import occurrences
from engine.sharding import gathered_weights
from environments.loading import responders
from grpo import (
    compute_group_advantages, generalized_advantage_estimation, importance_weights, kl_penalty,
    overlong_penalty,
)
from logprobs import LogProbs, completion_log_probs
from model import moved_to
from rewards import compute_rewards_for_completions, weighted_sum
from sample import Rollout, join_rollouts, sample_completions_for_prompts, select_groups


@dataclass
class Groups:
    """Prompts with their completions and what those are worth."""

    examples: list[dict]                # P
    rollout: Rollout
    rewards: Tensor                     # (P, G) points as the reward functions gave them; NaN where they could not score
    per_function: dict[str, Tensor]     # (P, G) points of each reward function
    points: Tensor                      # (P, G) what is learned from: rewards clipped, and penalised for being overlong
    replaced: int = 0                   # groups of equal points that dynamic sampling put others in place of
    failures: list[dict] = field(default_factory=list)   # calls of reward functions that raised or took too long

    @property
    def tied(self) -> Tensor:
        """(P,) bool: points all equal, nothing to learn."""
        return (compute_group_advantages(self.points) == 0).all(dim=1)

    def where(self, keep: Tensor) -> "Groups":
        """Those of the prompts where keep (P,) is True."""
        return replace(
            self, examples=[example for example, kept in zip(self.examples, keep.tolist(), strict=True) if kept],
            rollout=select_groups(self.rollout, keep), rewards=self.rewards[keep], points=self.points[keep],
            per_function={name: points[keep] for name, points in self.per_function.items()},
        )

    def and_also(self, more: "Groups") -> "Groups":
        """These and more."""
        return Groups(
            self.examples + more.examples, join_rollouts([self.rollout, more.rollout]),
            torch.cat([self.rewards, more.rewards]),
            {name: torch.cat([points, more.per_function[name]]) for name, points in self.per_function.items()},
            torch.cat([self.points, more.points]), self.replaced + more.replaced, self.failures + more.failures,
        )


@dataclass
class Experience:
    """A rollout as the updates see it, on the CPU; (B, T) unless said otherwise."""

    rollout: Rollout
    mask: Tensor                        # bool, the tokens that are trained on
    advantages: Tensor                  # (B, 1), or (B, T) from a value head
    old_logp: Tensor                    # nats, what ratios are taken to; sampling_logp unless importance weights are used
    weights: Tensor | None = None       # importance weights
    reference_logp: Tensor | None = None
    old_values: Tensor | None = None    # points expected before each token
    returns: Tensor | None = None       # points, what values should have been

    def counts(self, rows: Tensor, max_tokens: int) -> dict[str, int]:
        """Denominators of a loss over some rows, for grpo.aggregate. max_tokens: the generation limit."""
        mask = self.mask[rows]                            # (b, T)
        return dict(
            num_tokens=max(1, int(mask.sum())), num_sequences=max(1, int(mask.any(dim=1).sum())), max_tokens=max_tokens
        )

    def part(self, rows: Tensor, device) -> "Experience":
        """Everything about some rows, on a device. The rollout stays whole: rows are counted in it."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rollout"}
        return replace(self, **{name: None if t is None else t[rows].to(device) for name, t in tensors.items()})


def sample_groups(run, examples: list[dict]) -> Groups:
    """A group of scored completions for each prompt.

    With dynamic sampling (DAPO, arXiv:2503.14476 sec. 3.2) groups of equal points are replaced by groups of the next
    prompts of the data, in a bounded number of rounds; what is still equal after the last one stays.
    """
    groups = score_groups(run, examples, attempt=0)
    earned = [groups]
    for attempt in range(1, run.config.grpo.dynamic_sampling + 1):
        tied = groups.tied
        if not tied.any():
            break
        fresh = score_groups(run, run.batches.take(int(tied.sum())), attempt)
        groups = groups.where(~tied).and_also(replace(fresh, replaced=int(tied.sum())))
        earned.append(fresh)
    for some in earned:                                   # when nothing can raise any more
        run.memory.record([example["prompt"] for example in some.examples], some.rewards.tolist())
    return groups


def score_groups(run, examples: list[dict], attempt: int) -> Groups:
    """Sample once and score, each process its share of the prompts.

    The random numbers depend on the run's seed, the step, the attempt and each prompt alone.
    """
    grpo = run.config.grpo
    seed = (run.config.training.seed << 32) + run.step + 1 + (attempt << 96)     # evaluations use step 0's
    mine, earlier = rank_slice(examples), rank_slice(occurrences([example["prompt"] for example in examples]))

    def sample_and_score():
        if not mine:
            return None
        rollout = sample_completions_for_prompts(
            run.model, run.tokenizer, [example["prompt"] for example in mine], grpo, seed=seed,
            shared_prompt=run.shared_prompt, prompt_occurrences=earlier, responders=responders(run.environment, mine),
        )
        failures: list[dict] = []
        rewards, per_function = compute_rewards_for_completions(
            run.reward_functions, grpo.weights, rollout, mine, on_error=grpo.reward_errors, clips=grpo.reward_clips,
            timeout=grpo.reward_timeout, failures=failures, turn_points=rollout.turn_points,
        )
        return rollout, rewards, per_function, failures

    with gathered_weights(run.model):
        rollouts, rewards, by_function, failures = zip(*filter(None, gather_from_ranks(sample_and_score)), strict=True)
    rollout, rewards = join_rollouts(rollouts), torch.cat(rewards)
    assert len(rollout.completions) == len(examples) * grpo.num_completions_per_prompt, f"{len(rollout.completions)=}"
    per_function = {name: torch.cat([points[name] for points in by_function]) for name in by_function[0]}
    points = shape_rewards(grpo, rollout, rewards, per_function)
    return Groups(examples, rollout, rewards, per_function, points, failures=list(chain(*failures)))


def shape_rewards(grpo, rollout: Rollout, rewards: Tensor, per_function: dict[str, Tensor] | None = None) -> Tensor:
    """(P, G) points -> (P, G) points: combined, clipped, then penalised: --reward_combination, --reward_clip, --overlong.

    gdpo (arXiv:2601.05242) adds up the functions' own group advantages instead of their points, so that one whose points
    hardly differ counts as much as one whose points lie far apart:  sum of weight * (r - mean(group)) / std(group)
    """
    if grpo.reward_combination == "gdpo" and per_function:
        advantages = {}
        for (name, points), clip in zip(per_function.items(), grpo.reward_clips or [0] * len(per_function), strict=True):
            clipped = points.clamp(-(clip or torch.inf), clip or torch.inf)
            scaled = compute_group_advantages(clipped, epsilon=grpo.advantage_epsilon)
            advantages[name] = scaled.to(points.dtype).masked_fill(points.isnan(), torch.nan)
        rewards = weighted_sum(advantages, grpo.weights)
    points = rewards.clamp(-grpo.reward_clip, grpo.reward_clip) if grpo.reward_clip else rewards         # NaN stays NaN
    if grpo.overlong != "penalise":
        return points
    limit = grpo.generation_max_length
    lengths = completion_lengths(rollout.completion_mask).view_as(points)
    return points + overlong_penalty(lengths, max_tokens=limit, buffer=grpo.overlong_buffer or max(1, limit // 5))


def describe_groups(groups: Groups, experience: Experience) -> dict:
    """Metrics of what was sampled."""
    rewards, mask = groups.rewards, groups.rollout.completion_mask
    advantages = experience.advantages
    advantages = advantages[experience.mask] if advantages.shape[1] > 1 else advantages          # of tokens, or of completions
    return {
        "mean_reward": float(rewards.nanmean()),
        "mean_advantage": float(advantages.mean()),
        "std_advantage": float(advantages.std()),
        "tied_groups": float(groups.tied.float().mean()),
        "replaced_groups": groups.replaced,
        "unscored": float(rewards.isnan().float().mean()),
        "reward_errors": len(groups.failures),
        "completion_tokens": float(mask.sum()) / len(mask),
        "truncated": float((~groups.rollout.finished).float().mean()),
    } | {f"reward/{name}": float(points.nanmean()) for name, points in groups.per_function.items()}


def prepare_experience(run, rollout: Rollout, points: Tensor) -> tuple[Experience, dict]:
    """Advantages, and the passes without gradient that the updates need. points (P, G). Also returns metrics."""
    grpo, metrics = run.config.grpo, {}
    # What could not be scored is not trained on, and not counted either.
    mask = rollout.completion_mask & ~points.reshape(-1, 1).isnan()              # (B, T)
    if grpo.overlong == "mask":
        mask = mask & rollout.finished[:, None]
    reference_logp = logp = values = weights = returns = None
    if run.reference is not None and grpo.estimator != "exact":
        with moved_to(run.reference, run.device):
            reference_logp = log_probs_of_rollout(run, run.reference, rollout).logp
    if grpo.importance_cap or run.value_head is not None:
        before = log_probs_of_rollout(run, run.model, rollout, run.value_head)
        logp, values = before.logp, before.values
    if grpo.importance_cap:
        weights = importance_weights(logp, rollout.sampling_logp, mask, cap=grpo.importance_cap)
        metrics["importance_weight"] = float(weights[mask].mean())
    penalty = torch.zeros(mask.shape)                                            # (B, T) points
    if run.reference is not None and grpo.kl_in == "reward":
        kl = torch.where(mask, kl_penalty(rollout.sampling_logp, reference_logp, estimator="k1"), 0.0)
        metrics["kl"] = float(kl.sum() / mask.sum())                             # NaN where nothing is trained on
        penalty = run.kl_coef * kl

    if run.value_head is None:
        advantages = group_advantages(run, points, penalty.sum(dim=1).view_as(points)).view(-1, 1)
    else:
        advantages, returns = token_advantages(
            grpo, points.reshape(-1, 1), penalty, values, mask, turn_points=rollout.turn_points
        )
    old_logp = rollout.sampling_logp if weights is None else logp
    return Experience(rollout, mask, advantages, old_logp, weights, reference_logp, values, returns), metrics


def group_advantages(run, points: Tensor, penalty: Tensor) -> Tensor:
    """points, penalty (P, G) -> advantages (P, G) float32; the running mean of the run's points is carried on.

    The penalty is centred within the group and not scaled, so that its weight means the same in every group, and the
    same as in the loss. Divided by the spread of the points it would be enormous where all of them are equal.
    """
    grpo = run.config.grpo
    scored = points[~points.isnan()]
    run.reward_sum += float(scored.sum())
    run.reward_count += len(scored)
    advantages = compute_group_advantages(
        points, baseline=grpo.baseline, scale=grpo.scale, epsilon=grpo.advantage_epsilon,
        global_mean=run.reward_sum / max(1, run.reward_count),
    )
    if grpo.baseline in ("group_mean", "leave_one_out"):
        off_centre, largest = float(advantages.sum(dim=1).abs().max()), float(advantages.abs().max())
        assert off_centre <= 1e-3 * max(1.0, largest), f"siblings' advantages must add up to 0: {off_centre=} {largest=}"
    return (advantages + compute_group_advantages(-penalty, scale="none")).float()


def token_advantages(
    grpo, points: Tensor, penalty: Tensor, values: Tensor, mask: Tensor, turn_points: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """points (B, 1), penalty, values, mask (B, T) -> advantages, returns (B, T).

    A completion's points come with its last token, penalties with each. Of those points the environment's, turn_points (B, T),
    come with the last token of their turn, if they count among the rewards. A completion that was cut ends like any other.
    """
    last = torch.arange(mask.shape[1]) == completion_lengths(mask)[:, None] - 1  # (B, T)
    early = torch.zeros(mask.shape)                       # (B, T) points
    if turn_points is not None:
        early = torch.where(mask, turn_points * grpo.environment_weight, 0.0)
    rewards = torch.where(last, points.float() - early.sum(dim=1, keepdim=True), 0.0) + early - penalty
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, gamma=grpo.gae_gamma, lam=grpo.gae_lambda)
    if grpo.normalize_advantages and mask.sum() > 1:
        # Centred as well as scaled: here the baseline is the value, and early on what it misses is the same everywhere.
        scaled = (advantages - advantages[mask].mean()) / (advantages[mask].std() + grpo.advantage_epsilon)
        advantages = torch.where(mask, scaled, 0.0)
    return advantages, returns


@torch.no_grad()
def log_probs_of_rollout(run, model, rollout: Rollout, value_head=None) -> LogProbs:
    """What a model says about the whole rollout as it is now, on the CPU."""
    shape, grpo = rollout.completion_mask.shape, run.config.grpo
    found = {name: torch.zeros(shape) for name in ["logp", "entropy"] + ["values"] * (value_head is not None)}
    for rows, counts in passes(run, rollout, torch.arange(shape[0])):
        now = completion_log_probs(model, rollout, rows, **grpo.policy, shared_prompt=run.shared_prompt, value_head=value_head)
        for name in found if counts else ():
            found[name][rows] = getattr(now, name).cpu()
    return LogProbs(**{name: all_sum(part) for name, part in found.items()})     # each row is 0 but in one process


def passes(run, rollout: Rollout, rows: Tensor) -> Iterator[tuple[Tensor, bool]]:
    """What this process forwards of some rows: micro-batches, and whether each counts (devices.rounds)."""
    limit = run.config.training.max_tokens_per_forward
    return lockstep_batches(micro_batches(rollout, rows, limit, run.shared_prompt, data_parallel_size(), run.device))


def minibatches(run, num_rows: int) -> Iterator[Tensor]:
    """Rows of each update on a rollout: every row once an epoch, in a new order each time. Groups stay together, unless
    --minibatch_size is not a multiple of them. Without it an update takes all rows.
    """
    grpo = run.config.grpo
    size = grpo.minibatch_size or num_rows
    generator = torch.Generator().manual_seed((run.config.training.seed << 32) + run.step)
    for _ in range(grpo.ppo_epochs):
        groups = torch.arange(num_rows).view(-1, grpo.num_completions_per_prompt)
        groups = groups[torch.randperm(len(groups), generator=generator)] if size < num_rows else groups
        yield from groups.flatten().split(size)
