"""
The mathematics of GRPO: tensors in, tensors out. No model, no files, no devices. Every function stands alone: copied out
together with `import torch` and `from torch import Tensor`, it works.

Reading order: compute_group_advantages (who did better than their siblings), policy_loss (push towards them, carefully),
kl_penalty (but stay near the reference); then value_loss and generalized_advantage_estimation, for training with a critic.

Departures from the GRPO paper (arXiv:2402.03300): groups of equal rewards have exactly zero advantage, the default
aggregation is DAPO's token mean, and every denominator is an argument, so that micro-batches add up to one big batch.

Shapes: P prompts per step, G completions of each, B = P*G rows (or a micro-batch of them) with siblings adjacent,
T completion tokens, right-padded. Units: rewards in points, log-probabilities (logp) and KL in nats.
"""

import torch
from torch import Tensor

BASELINES = ("group_mean", "group_median", "global_mean", "leave_one_out")
SCALES = ("group", "batch", "none")
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo", "reinforce")
KL_ESTIMATORS = ("k1", "k2", "k3")


def compute_group_advantages(
    rewards: Tensor, *, baseline: str = "group_mean", scale: str = "group", epsilon: float = 1e-8
) -> Tensor:
    """How much better each completion did than its siblings.

        A[p, g] = (r[p, g] - b[p, g]) / s[p]

        baseline       b[p, g]                              scale  s[p]
        group_mean     mean_g r[p, :]                       group  std_g r[p, :] + epsilon
        group_median   median_g r[p, :]                     batch  std of all rewards + epsilon
        global_mean    mean of all rewards                  none   1, so A stays in points
        leave_one_out  mean of the siblings of g

    rewards  (P, G) points; NaN where a completion could not be scored: it takes no part in b or s and gets 0
    returns  (P, G) float32 (float64 for float64 rewards), in standard deviations, or in points with scale="none".
             A tied group (max - min <= 1e-6 * max(1, |max|)) comes back as exact zeros, and so does one with fewer
             than two scored completions. Under group_mean and leave_one_out rows sum to 0.

    std divides by n - 1 (torch's default): a group of two scores about +0.71 and -0.71. The result is not centred
    again: that would cancel the choice of baseline. GRPO: arXiv:2402.03300 sec. 4.1.2; scale="none": Dr. GRPO,
    arXiv:2503.20783; leave_one_out: RLOO, arXiv:2402.14740 sec. 2.2.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must be (prompts, group) with group >= 2, got {tuple(rewards.shape)}: "
            "a lone completion has no siblings. For a flat list: rewards.view(-1, group_size)."
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    scored = ~rewards.isnan()                                                    # (P, G)
    count = scored.sum(dim=1, keepdim=True)                                      # (P, 1)
    mean = rewards.nanmean(dim=1, keepdim=True)                                  # (P, 1)
    baselines = {
        "group_mean": lambda: mean,
        "group_median": lambda: rewards.nanquantile(0.5, dim=1, keepdim=True),   # halfway between the two middle ones
        "global_mean": lambda: rewards.nanmean(),
        "leave_one_out": lambda: (mean * count - rewards) / (count - 1),         # (P, G)
    }
    scales = {
        "group": lambda: ((rewards - mean).square().nansum(dim=1, keepdim=True) / (count - 1)).sqrt() + epsilon,
        "batch": lambda: rewards[scored].std() + epsilon,
        "none": lambda: 1.0,
    }
    if baseline not in baselines or scale not in scales:
        raise ValueError(f"{baseline=} must be one of {', '.join(baselines)}; {scale=} one of {', '.join(scales)}")
    # Ties are found in the rewards, not in the result: the float32 mean of eight 0.7s is not 0.7,
    # and that last bit divided by a tiny std would pass for an advantage of 5.96.
    highest = rewards.masked_fill(~scored, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.masked_fill(~scored, torch.inf).amin(dim=1, keepdim=True)
    tied = highest - lowest <= 1e-6 * highest.abs().clamp(min=1)                 # (P, 1), also where fewer than two are scored
    return torch.where(scored & ~tied, (rewards - baselines[baseline]()) / scales[scale](), 0.0)


def policy_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, loss_type: str = "dapo", num_tokens,
    num_sequences=None, max_tokens=None, clip_low: float = 0.2, clip_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss whose gradient makes completions with positive advantage more likely.

        ratio = exp(logp - old_logp)                        how much likelier the policy has made this token
        gain  = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)                per token (PPO)

        loss_type   loss                                                            source
        dapo        -sum of gain / num_tokens                                       arXiv:2503.14476 eq. 8
        grpo        -mean over sequences of their mean gain                         arXiv:2402.03300 eq. 3
        dr_grpo     -sum of gain / (num_sequences * max_tokens)                     arXiv:2503.20783 sec. 3.2
        gspo        as grpo, ratio = exp(mean over the sequence of logp - old_logp) arXiv:2507.18071 eq. 5
        cispo       -sum of min(sg(ratio), 1 + clip_high) * A * logp / num_tokens   arXiv:2506.13585 eq. 4, no floor
        reinforce   -sum of A * logp / num_tokens                                   Williams 1992

    logp        (B, T) nats, with gradient;  old_logp  (B, T) nats, anything where mask is False
    advantages  (B,), (B, 1) or (B, T);      mask      (B, T) bool, True on tokens that the policy chose
    num_tokens, num_sequences, max_tokens count the whole optimiser step: every micro-batch, every process.
        grpo, dr_grpo and gspo need num_sequences; dr_grpo needs max_tokens, the generation limit (a constant).
    returns     loss, a scalar; and stats, to be added up over micro-batches as well: clip_fraction (share of num_tokens
                whose gradient the clip removed), ratio_deviation (mean over num_tokens of |ratio - 1|)
    """
    assert logp.shape == old_logp.shape == mask.shape, f"{logp.shape=} {old_logp.shape=} {mask.shape=}"
    if loss_type in ("grpo", "dr_grpo", "gspo") and num_sequences is None:
        raise ValueError(f"{loss_type=} averages over sequences: pass num_sequences for the whole optimiser step")
    if loss_type == "dr_grpo" and max_tokens is None:
        raise ValueError("loss_type='dr_grpo' divides by the generation limit: pass max_tokens")
    if advantages.ndim == 1:
        advantages = advantages[:, None]                                         # (B, 1)

    # Mask before exp(): padding may hold -inf, and nan * 0 is nan, in the gradient as well.
    log_ratio = torch.where(mask, logp - old_logp, 0.0)                          # (B, T), 0 on policy
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)                         # (B, 1)
    if loss_type == "gspo":
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(mask)   # one ratio a sequence
    ratio = log_ratio.exp()

    no_clip = torch.zeros_like(mask)
    if loss_type == "reinforce":
        gain, clipped = advantages * torch.where(mask, logp, 0.0), no_clip
    elif loss_type == "cispo":
        weight = ratio.detach().clamp(max=1 + clip_high)
        gain, clipped = weight * advantages * torch.where(mask, logp, 0.0), no_clip
    elif loss_type in ("dapo", "grpo", "dr_grpo", "gspo"):
        # The minimum is the pessimist's choice: no reward for leaving the trust region,
        # and still a full gradient for coming back into it.
        inside = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
        gain = torch.minimum(ratio * advantages, inside)
        clipped = inside < ratio * advantages
    else:
        raise ValueError(f"unknown {loss_type=}: see the table in the docstring")
    gain = torch.where(mask, gain, 0.0)                                          # (B, T)

    if loss_type in ("grpo", "gspo"):
        loss = -(gain / lengths).sum() / num_sequences
    elif loss_type == "dr_grpo":
        loss = -gain.sum() / (num_sequences * max_tokens)
    else:
        loss = -gain.sum() / num_tokens
    stats = {
        "clip_fraction": (clipped & mask).sum() / num_tokens,
        "ratio_deviation": torch.where(mask, ratio.detach() - 1, 0.0).abs().sum() / num_tokens,
    }
    return loss, stats


def kl_penalty(logp: Tensor, ref_logp: Tensor, *, estimator: str = "k3", ratio: Tensor | None = None) -> Tensor:
    """KL(policy || reference) per token, estimated from the tokens that were sampled.

        x = ref_logp - logp;    k1 = -x,    k2 = x^2 / 2,    k3 = exp(x) - x - 1;    with ratio: ratio * k

    logp, ref_logp  (B, T) nats
    ratio           (B, T) exp(logp - old_logp) with its gradient, or None
    returns         (B, T) nats; k2 and k3 are never negative

    What matters in a loss is the gradient, and on policy it differs from what the value suggests: k1 has none at all,
    k3 has that of KL(reference || policy), ratio * k3 has exactly that of KL(policy || reference). So pass ratio when
    the penalty is part of a loss. Estimators: J. Schulman, "Approximating KL divergence", 2020.
    """
    x = ref_logp - logp
    estimators = {"k1": lambda: -x, "k2": lambda: x.square() / 2, "k3": lambda: torch.expm1(x) - x}
    if estimator not in estimators:
        raise ValueError(f"{estimator=} must be one of {', '.join(estimators)}")
    kl = estimators[estimator]()
    return kl if ratio is None else ratio * kl


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, num_tokens, clip: float = 0.2
) -> Tensor:
    """Squared error of a critic that may not move further than clip from its values at sampling time.

        0.5 * sum of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / num_tokens

    values (with gradient), old_values, returns  (B, T) points;  mask  (B, T) bool;  returns a scalar, points^2
    num_tokens counts the whole optimiser step. PPO's value clipping: arXiv:2005.12729 sec. 3.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    error = torch.maximum((values - returns).square(), (near - returns).square())
    return 0.5 * torch.where(mask, error, 0.0).sum() / num_tokens


def generalized_advantage_estimation(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 0.99, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Token-level advantages from a critic.

        delta[t] = r[t] + gamma * V[t+1] - V[t];    A[t] = delta[t] + gamma * lam * A[t+1];    return[t] = A[t] + V[t]

    rewards, values  (B, T) points; V[t] is the value before token t, and 0 after the last one
    mask             (B, T) bool; tokens that the policy did not choose are stepped over: t+1 means the next chosen one
    returns          advantages, returns: (B, T) points, 0 where mask is False; no gradient

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
