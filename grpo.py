"""
The mathematics of GRPO: tensors in, tensors out. No model, no files, no devices.

A training step calls compute_group_advantages, then policy_loss: by default the sum of clipped_loss * weight
over all tokens. To add a loss, write a function and an entry of LOSSES, the choices of --loss_type. The loss
must be 0 where the advantage is 0: such rows are skipped if the loss has no other term. loss_type selects
the loss of a token and how tokens are averaged; set the paper's baseline, sampling and clip range separately.

Departures from the GRPO paper (arXiv:2402.03300):
    - zero-variance groups, whose rewards are equal, have advantages of exactly 0
    - the default aggregation is DAPO's mean over tokens
    - the KL in the loss is k3 times the ratio: kl_penalty explains why
    - weights of tokens are an argument, so the losses of micro-batches add up to that of the whole batch

Shapes: P prompts per step, G completions of each, B = P*G rows (or some of them) with the completions of a
prompt adjacent, T completion tokens, right-padded. Units: logp (log-probabilities) and KL in nats.

Formulas in docstrings are Python expressions. To copy a function out, put it below `import torch` and
`from torch import Tensor`; only policy_loss, token_loss, value_loss and gspo call others of this file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

BASELINES = "group_mean", "group_median", "global_mean", "leave_one_out"         # choices of --baseline
CENTERED_BASELINES = "group_mean", "leave_one_out"        # under these the advantages of a group sum to 0
SCALES = "group", "batch", "mean", "none"                 # none: --normalize_advantages false


def compute_group_advantages(
    rewards: Tensor, *, baseline: str = "group_mean", scale: str = "group", epsilon: float = 1e-8,
    global_mean: float | None = None,
) -> Tensor:
    """Compute advantages: compare the reward of each completion with those of its group.

        A = (r - mean(group)) / (std(group) + epsilon)    by default
        A = (r - b) / s                                   in general

    for each completion, where r is its reward and b and s are chosen by

        baseline       b                   scale   s
        group_mean     mean(group)         group   std(group) + epsilon
        group_median   median(group)       batch   std(everything) + epsilon
        global_mean    the argument        mean    mean(group) if mean(group) > 0 else inf
        leave_one_out  mean(siblings)      none    1

    group: the rewards of the completion's group; siblings: the group without r; everything: all groups.

    rewards  (P, G), a tensor or lists; NaN for a completion that could not be scored, which is excluded from
             b and s, and has an advantage of 0
    global_mean  the baseline of that name, such as the mean over a run; None: mean(everything)
    returns  (P, G) float32 (float64 for float64 rewards). Exactly 0 in zero-variance ("tied") groups, where
             max - min <= 1e-6 * max(1, |max|), under every baseline, and in groups with fewer than two scored
             completions. With group_mean or leave_one_out each row sums to 0.

    std divides by n - 1 (torch's default): a group of two gets about +0.71 and -0.71. The result is not
    centred again, which would cancel the choice of baseline. GRPO: arXiv:2402.03300 sec. 4.1.2; scale="none":
    Dr. GRPO, arXiv:2503.20783; leave_one_out: RLOO, arXiv:2402.14740 sec. 2.2; scale="mean": MaxRL, for
    rewards >= 0, arXiv:2602.02710. docs/algorithm.md (Which one?) compares them.
    """
    rewards = torch.as_tensor(rewards)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must be (prompts, group) with group >= 2, got {tuple(rewards.shape)}. For a flat list: "
            "torch.tensor(rewards).view(-1, group_size).")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    scored = ~rewards.isnan()                                                    # (P, G)
    count = scored.sum(dim=1, keepdim=True)                                      # (P, 1)
    mean = rewards.nanmean(dim=1, keepdim=True)                                  # (P, 1)
    std = ((rewards - mean).square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt()           # (P, 1)

    b: Tensor | float = mean                              # baseline="group_mean"
    if baseline == "group_median":
        b = rewards.nanquantile(0.5, dim=1, keepdim=True)            # G even: mean of the middle two
    elif baseline == "global_mean":
        b = rewards.nanmean() if global_mean is None else global_mean
    elif baseline == "leave_one_out":
        b = (mean * count - rewards) / (count - 1)                               # (P, G)
    elif baseline != "group_mean":
        raise ValueError(f"{baseline=}: must be one of group_mean, group_median, global_mean, leave_one_out")

    s: Tensor | float = std + epsilon                     # scale="group"
    if scale == "batch":
        s = ((rewards - rewards.nanmean()).square().nansum() / (count.sum() - 1)).sqrt() + epsilon
    elif scale == "mean":
        s = torch.where(mean > 0, mean, torch.inf)                               # r / inf is 0
    elif scale == "none":
        s = 1.0
    elif scale != "group":
        raise ValueError(f"{scale=}: must be one of group, batch, mean, none")

    # Equal rewards are detected before the division: the float32 mean of eight 0.7s is not exactly 0.7,
    # and this rounding error divided by a tiny std would give an advantage of 0.8.
    highest = rewards.masked_fill(~scored, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(~scored, torch.inf).amin(dim=1, keepdim=True)
    tied = highest - lowest <= 1e-6 * highest.abs().clamp(min=1)                 # (P, 1), True if count < 2
    return torch.where(scored & ~tied, (rewards - b) / s, 0.0)


# ---- the loss of a step ------------------------------------------------------------------------------------


def policy_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None = None, *,
    loss_type: str = "dapo", **options,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy loss. Minimising it makes completions with positive advantages more likely.

    logp        (B, T) nats, with gradient;  old_logp  (B, T) nats, any value where mask is False
    advantages  (B,), (B, 1) or (B, T);      mask      (B, T) bool, True on tokens that the policy sampled
    weights     (B, T) factor of each token's loss, see token_weights; None: computed over these rows, as the
                loss type averages
    loss_type   a key of LOSSES;  options  clip_low, clip_high, off_policy_limit and others: see token_loss
    returns     loss, a scalar; and statistics (B, T) without gradient, to be averaged over tokens:
                clip_fraction    1 where the gradient was removed or the weight capped
                ratio_deviation  |ratio - 1|
                approx_kl        ratio - 1 - log(ratio), nats: its mean estimates KL(old || policy), where
                                 old is the policy of old_logp
    """
    token_losses, clipped, log_ratio = token_loss(                               # (B, T) each
        logp, old_logp, advantages, mask, loss_type=loss_type, **options)
    assert weights is None or weights.shape == mask.shape, f"{weights.shape=} {mask.shape=}"
    aggregation = LOSSES[loss_type].aggregation
    weights = token_weights(mask, aggregation) if weights is None else weights * mask
    ratio = log_ratio.clamp(-20, 20).exp()                                       # 1 where mask is False
    statistics = {
        "clip_fraction": (clipped & mask).float(), "ratio_deviation": (ratio - 1).abs(),
        "approx_kl": ratio - 1 - log_ratio}
    return weighted_loss(token_losses, weights), statistics


def token_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, loss_type: str = "dapo",
    clip_low: float = 0.2, clip_high: float = 0.2, off_policy_limit: float = torch.inf, **options: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for each token the loss, whether it was clipped (or its weight capped), and log_ratio.

    logp, old_logp, advantages, mask  as for policy_loss
    clip_low, clip_high  the ratio is clipped to 1 - clip_low ... 1 + clip_high; cispo: only the upper limit
    off_policy_limit     nats: see off_policy_mask
    options    options of the loss type: the parameters of its function after *, such as dual_clip=3.0 of dapo
    returns    (B, T) each: loss; clipped, bool; log_ratio = logp - old_logp, 0 where mask is False
    """
    assert logp.shape == old_logp.shape == mask.shape, f"{logp.shape=} {old_logp.shape=} {mask.shape=}"
    if loss_type not in LOSSES:
        raise ValueError(f"unknown {loss_type=}: choose one of {', '.join(LOSSES)}")
    if unknown := sorted(options.keys() - LOSSES[loss_type].bounds):
        raise ValueError(f"{loss_type} has no option {unknown}; its options: {[*LOSSES[loss_type].bounds]}")
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages     # (B, 1) or (B, T)
    if advantages.shape not in (mask.shape, (len(mask), 1)):
        raise ValueError(
            f"advantages must be (B,), (B, 1) or (B, T), got {tuple(advantages.shape)} for (B, T) = "
            f"{tuple(mask.shape)}; use .view(-1, 1) on the (P, G) result of compute_group_advantages")
    # Mask before exp(): padding may hold -inf, and nan * 0 is nan, in the gradient as well.
    log_ratio = torch.where(mask, logp - old_logp, 0.0)                          # (B, T), 0 on policy
    loss, clipped = LOSSES[loss_type].per_token(                                 # (B, T) each
        logp=torch.where(mask, logp, 0.0), log_ratio=log_ratio, advantages=advantages, mask=mask,
        clip_low=clip_low, clip_high=clip_high, **options,
    )
    dropped = off_policy_mask(log_ratio, advantages, mask, off_policy_limit)
    return torch.where(dropped, 0.0, loss), clipped | dropped, log_ratio.detach()


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, *, dual_clip: float = torch.inf,
    **unused,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped loss (arXiv:1707.06347 eq. 7), or with dual_clip arXiv:1912.09729 eq. 5.

        -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    With dual_clip:

        -max(min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), dual_clip * A if A < 0 else -inf)

    log_ratio (B, T);  advantages (B, 1) or (B, T). Returns loss and clipped, (B, T) each. unused holds
    arguments that only other losses use.
    """
    if advantages.shape not in (log_ratio.shape, (len(log_ratio), 1)):  # (1, G) would broadcast if T = G
        raise ValueError(f"advantages {tuple(advantages.shape)} must be (B, 1) or (B, T): .view(-1, 1)")
    # The gradient is 0 if A > 0 and ratio > 1 + clip_high, if A < 0 and ratio < 1 - clip_low, and with
    # dual_clip also if A < 0 and ratio > dual_clip.
    ratio = log_ratio.clamp(-20, 20).exp()                # at most e^20: inf * 0 would be NaN
    unclipped = ratio * advantages
    gain = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = gain < unclipped
    if dual_clip < torch.inf:
        floor = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        gain, clipped = torch.maximum(gain, floor), clipped | (gain < floor)
    return -gain, clipped


def off_policy_mask(log_ratio: Tensor, advantages: Tensor, mask: Tensor, off_policy_limit: float) -> Tensor:
    """Select tokens with negative advantages in completions that have become too unlikely since sampling.

        A < 0 and mean(old_logp - logp) > off_policy_limit

    The mean is taken over the completion (arXiv:2512.02556 eq. 9). Returns bool, in the shape of advantages.
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    distance = -log_ratio.detach().sum(dim=1, keepdim=True) / lengths            # (B, 1)
    return (advantages < 0) & (distance > off_policy_limit)


def token_weights(
    mask: Tensor, aggregation: str = "token_mean", *, group_tokens: Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Compute the factor of each token in the loss of an update: loss = (token_losses * weights).sum().

        token_mean      1 / num_tokens                      all tokens have equal weight
        sequence_mean   1 / length / num_sequences          all completions have equal weight
        prompt_mean     1 / group_tokens / num_prompts      all prompts have equal weight
        constant        1 / (num_sequences * max_tokens)

    Weights are computed once over all rows of an update, so the losses of micro-batches add up. Only tokens
    where mask is True count: length is their number in a row, num_tokens their number in all rows, and
    num_sequences the number of rows that have any. In num_prompts, a group that is split between updates
    counts by the share of its tokens in this one.

    mask          (B, T) bool
    group_tokens  (B, 1) tokens of all completions of the row's prompt; None: the rows are one group
    max_tokens    the limit of a completion's length; None: T
    returns       (B, T) float32, 0 where mask is False. All but constant sum to 1
    """
    lengths = mask.sum(dim=1, keepdim=True)                                      # (B, 1)
    assert group_tokens is None or group_tokens.ndim != 1, f"{group_tokens.shape=} must be (B, 1)"
    num_sequences = (lengths > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        divisor = lengths.sum().clamp(min=1)
    elif aggregation == "sequence_mean":
        divisor = lengths.clamp(min=1) * num_sequences
    elif aggregation == "prompt_mean":
        group_tokens = (lengths.sum() if group_tokens is None else group_tokens).clamp(min=1)
        # In float64, so that the order of rows does not matter; on the CPU, since mps has none.
        num_prompts = (lengths.cpu().double() / group_tokens.cpu()).sum().float().to(mask.device)
        divisor = group_tokens * torch.where(num_prompts > 0, num_prompts, 1.0)
    elif aggregation == "constant":
        divisor = num_sequences * (max_tokens or mask.shape[1])
    else:
        raise ValueError(f"{aggregation=} must be token_mean, sequence_mean, prompt_mean or constant")
    return mask / divisor


def weighted_loss(x: Tensor, weights: Tensor) -> Tensor:
    """Sum x * weights, (B, T) each. Where a weight is 0, x may be -inf or NaN, but its gradient may not."""
    assert x.shape == weights.shape, f"{x.shape=} {weights.shape=}"
    return (torch.where(weights != 0, x, 0.0) * weights).sum()


# ---- other losses ------------------------------------------------------------------------------------------
# token_loss passes to each function logp and log_ratio (both 0 where mask is False), advantages (B, 1) or
# (B, T), mask, clip_low and clip_high. Parameters after * are options, with bounds in LOSSES; unused holds
# arguments that only other losses use. Each function returns, (B, T) each, the loss and clipped: True if the
# gradient is 0 or the weight of the token is capped.


def gspo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float, *,
    dual_clip: float = torch.inf, **unused,
) -> tuple[Tensor, Tensor]:
    """Clip the geometric mean of a completion's ratios, not those of tokens (arXiv:2507.18071 eq. 5, 7).

        -min(sequence_ratio * A, clip(sequence_ratio, 1 - clip_low, 1 + clip_high) * A)

    The clip range is far narrower than for tokens: the paper uses 3e-4 and 4e-4. dual_clip: see clipped_loss.
    """
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)                         # (B, 1)
    mean_log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(mask)
    return clipped_loss(mean_log_ratio, advantages, clip_low, clip_high, dual_clip=dual_clip)


def cispo(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, clip_high: float, **unused
) -> tuple[Tensor, Tensor]:
    """Cap the weight of a token, but keep its gradient (arXiv:2506.13585 eq. 4 and 5).

        -sg(min(ratio, 1 + clip_high)) * A * logp

    sg is stop-gradient. There is no lower limit, and the cap is meant to be high: set clip_high to about 4.
    """
    ratio = log_ratio.detach().clamp(-20, 20).exp()
    return -ratio.clamp(max=1 + clip_high) * advantages * logp, ratio > 1 + clip_high


def reinforce(logp: Tensor, advantages: Tensor, **unused) -> tuple[Tensor, Tensor]:
    """Compute the loss of REINFORCE (Williams 1992), which is correct only for one update per rollout.

        -A * logp
    """
    return -advantages * logp, torch.zeros_like(logp, dtype=torch.bool)


def sapo(
    log_ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05, **unused
) -> tuple[Tensor, Tensor]:
    """Reduce the gradient smoothly with the distance of the ratio from 1, without a clip (arXiv:2511.20347).

        -4 / tau * sigmoid(tau * (ratio - 1)) * A
        tau  tau_positive if A > 0 else tau_negative
    """
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    gate = 4 / tau * torch.sigmoid(tau * (log_ratio.clamp(-20, 20).exp() - 1))
    return -gate * advantages, torch.zeros_like(log_ratio, dtype=torch.bool)


def dppo(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, *, delta: float = 0.2, **unused
) -> tuple[Tensor, Tensor]:
    """Drop a token whose probability has moved by more than delta in the direction of A (arXiv:2602.04879).

        -ratio * A if sign(A) * (exp(logp) - exp(old_logp)) <= delta else 0

    The absolute difference is a lower bound of the total variation between the policies at that position.
    The ratio is not: when a probability rises from 0.001 to 0.002, it is 2, but the policies hardly differ.
    old_logp is that of the sampler, also with vLLM, as in the authors' code.
    """
    ratio = log_ratio.clamp(-20, 20).exp()
    moved = logp.detach().exp() - (logp - log_ratio).detach().exp()
    clipped = advantages.sign() * moved > delta
    return torch.where(clipped, 0.0, -ratio * advantages), clipped


def icepop(
    log_ratio: Tensor, advantages: Tensor, *, alpha: float = 0.5, beta: float = 5.0, **unused
) -> tuple[Tensor, Tensor]:
    """Drop a token whose ratio is outside alpha ... beta: masked importance weights (arXiv:2510.18855).

        -ratio * A if alpha <= ratio <= beta else 0

    One ratio, policy / sampler, replaces the two ratios of the paper and its clip.
    """
    ratio = log_ratio.clamp(-20, 20).exp()
    clipped = (ratio < alpha) | (ratio > beta)
    return torch.where(clipped, 0.0, -ratio * advantages), clipped


def sequence_mask(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, *, alpha: float = 0.0, beta: float = 3.0, **unused
) -> tuple[Tensor, Tensor]:
    """Weight a completion by the product of its ratios; drop it outside alpha ... beta (as TRL with vLLM).

        -sg(product) * A * logp if alpha <= product <= beta else 0

    Without limits the gradient would be unbiased for any sampler, with a variance that grows with the length.
    """
    product = log_ratio.detach().sum(dim=1, keepdim=True).clamp(-20, 20).exp().expand_as(logp)
    clipped = (product < alpha) | (product > beta)
    return torch.where(clipped, 0.0, -product * advantages * logp), clipped


@dataclass(frozen=True)
class Loss:
    """An entry of LOSSES. If per_token has no parameter log_ratio, a rollout allows only one update."""

    per_token: Callable
    aggregation: str                                      # see token_weights
    bounds: dict = field(default_factory=dict)            # option -> its least and its largest value
    corrects_sampler: bool = False                        # its ratio is already policy / sampler


DUAL_CLIP = {"dual_clip": (1.0, torch.inf)}
LIMITS = {"alpha": (0.0, 1.0), "beta": (1.0, torch.inf)}
TAUS = {"tau_positive": (0.01, 100.0), "tau_negative": (0.01, 100.0)}
LOSSES = {                      # the keys are the choices of --loss_type
    "dapo": Loss(clipped_loss, "token_mean", DUAL_CLIP),                        # arXiv:2503.14476 eq. 8
    "grpo": Loss(clipped_loss, "sequence_mean", DUAL_CLIP),                     # arXiv:2402.03300 eq. 3
    "dr_grpo": Loss(clipped_loss, "constant", DUAL_CLIP),                       # arXiv:2503.20783 sec. 3.2
    "gspo": Loss(gspo, "sequence_mean", DUAL_CLIP),
    "cispo": Loss(cispo, "token_mean"),
    "scale_rl": Loss(cispo, "prompt_mean"),                                     # arXiv:2510.13786 sec. 3.2
    "sapo": Loss(sapo, "sequence_mean", TAUS),
    "dppo": Loss(dppo, "token_mean", {"delta": (0.0, 1.0)}, corrects_sampler=True),
    "icepop": Loss(icepop, "token_mean", LIMITS, corrects_sampler=True),
    "sequence_mask": Loss(sequence_mask, "token_mean", LIMITS, corrects_sampler=True),
    "reinforce": Loss(reinforce, "token_mean"),
}


# ---- other parts of a step ---------------------------------------------------------------------------------


def kl_penalty(
    logp: Tensor, ref_logp: Tensor, *, estimator: str = "k3", ratio: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token, from the tokens that were sampled.

    With x = ref_logp - logp:

        k1   -x
        k2   x**2 / 2
        k3   exp(x) - x - 1

    If ratio is given, the result is multiplied by it.

    logp, ref_logp  (B, T) nats
    ratio           (B, T) exp(logp - logp before the updates) with its gradient, or None
    returns         (B, T) nats; k2 and k3 are never negative

    In a loss only the gradient matters. On policy, its expectation at each position is 0 for k1, the gradient
    of KL(policy || reference) for k2 and ratio * k3, and that of KL(reference || policy) for k3. So pass
    ratio if the penalty is a term of a loss. J. Schulman, "Approximating KL divergence", 2020.
    """
    assert logp.shape == ref_logp.shape, f"{logp.shape=} {ref_logp.shape=}"
    x = ref_logp - logp
    estimators = {"k1": -x, "k2": x.square() / 2, "k3": torch.expm1(x) - x}
    if estimator not in estimators:
        raise ValueError(f"{estimator=} must be one of {', '.join(estimators)}")
    return estimators[estimator] if ratio is None else ratio * estimators[estimator]


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Compute the penalty to add to rewards: it falls linearly from 0 to -1 over the last `buffer` tokens.

        min(0, (max_tokens - buffer - length) / buffer)

    lengths  (B,) tokens, at most max_tokens;  returns (B,), from 0 down to -1 at the limit
    DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(max=0)


def importance_weights(trainer_logp: Tensor, sampling_logp: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Compute factors for advantages that correct for a sampler, such as vLLM, with other rounding.

        min(exp(trainer_logp - sampling_logp), cap)

    This weight is trainer / sampler at the same parameters; the ratio is policy now / policy before updates.
    Weights are not negative, so with advantages * weight every loss of LOSSES is multiplied by the weight.

    trainer_logp, sampling_logp  (B, T) nats, before the first update; any value in padding
    returns  (B, T) without gradient, 1 in padding. Truncated importance sampling: Ionides 2008, JCGS 17.
    """
    assert trainer_logp.shape == sampling_logp.shape, f"{trainer_logp.shape=} {sampling_logp.shape=}"
    return torch.where(mask, trainer_logp - sampling_logp, 0.0).detach().exp().clamp(max=cap)


# ---- training with a critic --------------------------------------------------------------------------------


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor | None = None, *,
    clip: float = 0.2,
) -> Tensor:
    """Compute the loss of PPO's critic: the larger error of its value and of the value clipped near old_V.

        0.5 * max((V - R)**2, (clip(V, old_V - c, old_V + c) - R)**2) * weight

    The result is summed over the tokens where mask is True; c is the argument clip.

    values (with gradient), old_values, returns  (B, T): V, old_V, R;  mask  (B, T) bool
    weights  (B, T) as for policy_loss; None: a mean over tokens
    returns  a scalar. PPO's value clipping: arXiv:2005.12729 sec. 3.
    """
    assert values.shape == old_values.shape == returns.shape, f"{old_values.shape=} {returns.shape=}"
    assert weights is None or weights.shape == mask.shape, f"{weights.shape=} {mask.shape=}"
    near = old_values + (values - old_values).clamp(-clip, clip)
    error = 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
    return weighted_loss(error, token_weights(mask) if weights is None else weights * mask)


def generalized_advantage_estimation(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 0.99, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Compute token-level advantages from a critic.

        delta    r + gamma * next_V - V
        A        delta + gamma * lam * next_A
        R        A + V

    This is computed from the last token to the first; after the last token next_V and next_A are 0.

    rewards, values  (B, T), r and V: V is the expected reward before a token
    mask             (B, T) bool, True on tokens that the policy sampled; all others are skipped
    returns          advantages A and value targets R: (B, T), 0 where mask is False; no gradient

    lam=1 gives return minus value, lam=0 the one-step TD error. arXiv:1506.02438 eq. 16.
    """
    assert rewards.shape == values.shape == mask.shape, f"{rewards.shape=} {values.shape=} {mask.shape=}"
    values = values.detach()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])                                  # (B,)
    next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, torch.where(mask, advantages + values, 0.0)
