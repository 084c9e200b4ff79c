"""
Compare the mean gradient of each advantage and each loss with the true gradient.

    python docs/truth_table.py                prints tables, and draws docs/preferences.svg

The world: each prompt is answered rightly with its own probability p = sigmoid(theta), a decision in one token, so
the true gradient of its success rate is p * (1 - p) and nothing else is to be learned. A group of G completions has k
right ones with the probability of a binomial distribution: expectations are exact sums over k, with the functions of
grpo.py as they stand. A rollout is n updates old if theta has moved by n * STEP since it was sampled.

Columns, over prompts with p from 0.01 to 0.99:
    weight       mean gradient / true gradient, at some p, 1 at p = 0.5: which prompts a choice prefers
    cosine       between the mean gradients of all prompts and the true ones
    length       norm of the mean gradients / norm of the true ones
    noise        standard deviation of one group's gradient / length of the mean, over all prompts
    no signal    share of groups whose gradient is 0
"""

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from grpo import BASELINES, LOSSES, SCALES, compute_group_advantages, policy_loss  # noqa: E402

P = torch.tensor([0.01, 0.02, 0.05, *(n / 10 for n in range(1, 10)), 0.95, 0.98, 0.99], dtype=torch.float64)
SHOWN = 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99
STEP = 0.1                      # by which an update moves the logit of a prompt: p = 0.5 to 0.525
AGES = 0, 1, 4, 8               # updates since a rollout was sampled
LENGTH = 4                      # tokens of a completion: the decision is the first, of the others each is certain


def groups_of(G: int) -> Tensor:
    """Return rewards of the groups that there are: k = 0 ... G right completions, (G + 1, G)."""
    return (torch.arange(G) < torch.arange(G + 1)[:, None]).double()


def probability_of_groups(p: Tensor, G: int) -> Tensor:
    """Return the probability that k of G completions are right, (len(p), G + 1)."""
    k = torch.arange(G + 1, dtype=torch.float64)
    return torch.distributions.Binomial(G, p[:, None]).log_prob(k).exp()


def gradients(right: Tensor, advantages: Tensor, p: Tensor, age: int, **options) -> Tensor:
    """Compute each group's gradient with respect to its prompt's theta, uphill, as a mean over completions.

    right, advantages  (N, G) of N groups;  p  (N,) success rates now;  options  of policy_loss
    returns            (N,)
    """
    p = p[:, None].expand_as(right)
    before = torch.sigmoid(torch.logit(p) - age * STEP)
    logp, old_logp = (torch.where(right > 0, q, 1 - q).log().view(-1, 1) for q in (p, before))
    rest = torch.zeros(len(logp), LENGTH - 1, dtype=torch.float64)
    mask = torch.ones(len(logp), LENGTH, dtype=torch.bool)
    logp = logp.detach().requires_grad_()
    weights = mask.double() / right.shape[1]              # completions are of one length, for which all averages are the same
    loss, _ = policy_loss(
        torch.cat([logp, rest], dim=1), torch.cat([old_logp, rest], dim=1), advantages.reshape(-1), mask, weights, **options)
    (slope,) = torch.autograd.grad(loss, logp)
    score = torch.where(right > 0, 1 - p, -p)                                    # derivative of log p by theta
    return -(slope.view_as(right) * score).sum(dim=1)


def exact(G: int, baseline: str, scale: str, loss_type: str = "dapo", age: int = 0, **options) -> dict[str, Tensor]:
    """Compute mean and variance of a group's gradient, and the share of groups without one, at every p: (len(P),)."""
    rewards, before = groups_of(G), torch.sigmoid(torch.logit(P) - age * STEP)
    advantages = compute_group_advantages(rewards, baseline=baseline, scale=scale, global_mean=float(P.mean()))
    chance = probability_of_groups(before, G)                                    # (len(P), G + 1)
    by_group = gradients(
        rewards.repeat(len(P), 1), advantages.repeat(len(P), 1), P.repeat_interleave(G + 1), age, loss_type=loss_type, **options)
    by_group = by_group.view_as(chance)
    mean = (chance * by_group).sum(dim=1)
    variance = (chance * (by_group - mean[:, None]).square()).sum(dim=1)
    return {"mean": mean, "variance": variance, "no_signal": (chance * (by_group.abs() < 1e-12)).sum(dim=1)}


def summary(result: dict[str, Tensor]) -> dict[str, float]:
    """Return cosine, length and noise over all prompts, and the mean share of groups without a signal."""
    mean, true = result["mean"], P * (1 - P)
    return {
        "cosine": float(torch.cosine_similarity(mean, true, dim=0)), "length": float(mean.norm() / true.norm()),
        "noise": float(result["variance"].sum().sqrt() / mean.norm()), "no_signal": float(result["no_signal"].mean()),
    }


def show(title: str, rows: list[dict]) -> None:
    """Print a table in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print("| " + " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()) + " |")


def weights(mean: Tensor) -> dict[str, float]:
    """Return mean gradient / true gradient at some p, 1 at p = 0.5."""
    ratio = mean / (P * (1 - P))
    at = {float(p): n for n, p in enumerate(P)}
    return {f"{p:g}": float(ratio[at[p]] / ratio[at[0.5]]) for p in SHOWN}


def show_advantages(G: int) -> None:
    """Print a row for each baseline and scale, on policy."""
    scales = [scale for scale in SCALES if scale != "batch"]       # which couples groups
    rows = []
    for baseline, scale in itertools.product(BASELINES, scales):
        result = exact(G, baseline, scale)
        rows.append({"advantage": f"{baseline}, {scale}", **weights(result["mean"]), **summary(result)})
    show(f"Advantages, on policy, G = {G}: weight of prompts by p", rows)


def show_losses(G: int) -> None:
    """Print a row for each loss, on rollouts of each age, with unbiased advantages (leave_one_out, none)."""
    rows = []
    for loss_type in LOSSES:
        row = {"loss": loss_type}
        for age in AGES:
            result = summary(exact(G, "leave_one_out", "none", loss_type, age))
            row |= {f"cosine, {age} old": result["cosine"], f"length, {age} old": result["length"], f"noise, {age} old": result["noise"]}
        rows.append(row)
    show(f"Losses, G = {G}, an update moves a logit by {STEP:g}", rows)


def draw(path: Path) -> None:
    """Draw what each advantage prefers, and the share of groups without a signal."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams |= {"svg.hashsalt": "plain-grpo", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for scale, label in ("none", "none: success rate"), ("group", "group: arcsine of its root"), ("mean", "mean: logarithm"):
        ratio = exact(8, "group_mean", scale)["mean"] / (P * (1 - P))
        left.plot(P, ratio / ratio[P == 0.5], label=label)
    left.set(yscale="log", xlabel="success rate p of a prompt", ylabel="weight, 1 at p = 0.5", title="--advantage_scale, G = 8")
    left.legend(frameon=False, fontsize=8)
    for G in 2, 4, 8, 16:
        right.plot(P, exact(G, "group_mean", "group")["no_signal"], label=f"G = {G}")
    right.set(xlabel="success rate p of a prompt", ylabel="share of groups", title="groups without a signal")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    for size in 4, 16, 64:
        show_advantages(size)
    show_losses(8)
    draw(ROOT / "docs/preferences.svg")
