"""
Evaluate a model: sample completions of problems, score them, and estimate accuracy and mean rewards, and with
several completions also pass@k and majority@n, each with a 95 % interval.

Intervals are computed over problems, because the n completions of one problem are not independent.
"""

import math
from collections import Counter

import numpy as np
from torch import Tensor

from experience import Groups
from rewards import correctness, extract_answer, same_answer, text_of
from runs.console import with_limits
from runs.groups import sample_and_score

EVALUATION = 2**32 - 1          # replaces the step in the seeds of a training step


def evaluate(policy, examples: list[dict], config, **options) -> dict:
    """Return eval_accuracy and so on (docs/metrics.md). options: see sample_and_score_problems."""
    groups = sample_and_score_problems(policy, examples, config, num_completions=1, **options)
    estimates = estimate_all(groups)
    metrics = groups.reports.means() | {
        "problems": estimates["reward/correctness"]["problems"] or len(examples),
        "truncated": float((~groups.rollout.finished).double().mean()),
    }
    metrics = {f"eval_{name}": value for name, value in metrics.items()}
    for name, estimate in estimates.items():
        values = estimate["mean"], estimate["low"], estimate["high"]
        metrics |= zip(with_limits(f"eval_{name}"), values, strict=True)
    return metrics


def sample_and_score_problems(
    policy, examples: list[dict], config, *, seed: int, num_completions: int, reward_functions=(),
    weights=None, **options,
) -> Groups:
    """Sample num_completions of each problem, and score them. Each process handles a slice of the problems.

    weights  weights of the reward functions in the score of a completion; None: 1 each. correctness is always
             computed; if it is not a reward function, its weight is 0
    options  environment and trainer_state of sample_and_score
    """
    added = [] if correctness in reward_functions else [correctness]
    return sample_and_score(
        policy, [{"answer": None} | example for example in examples],
        [(seed, EVALUATION, number) for number in range(len(examples))], config,
        reward_functions=[*added, *reward_functions], num_completions=num_completions,
        weights=[0.0] * len(added) + list(weights or [1.0] * len(reward_functions)), **options)


# ---- estimates ---------------------------------------------------------------------------------------------


def estimate_all(groups: Groups) -> dict[str, dict]:
    """Estimate, by estimate_mean, reward/<function>; if answers are known, accuracy; and with n > 1
    completions of each problem also pass@k and majority@n.
    """
    estimates = {f"reward/{name}": estimate_rewards(rewards) for name, rewards in groups.per_function.items()}
    correct = groups.per_function["correctness"]                                 # (P, n)
    known = [p for p, row in enumerate(correct.tolist()) if not any(map(math.isnan, row))]
    if not known:
        return estimates
    n = correct.shape[1]
    counts = correct[known].sum(dim=1).int().tolist()
    values = {"accuracy": [count / n for count in counts]}
    if n > 1:
        for k in sorted({2**i for i in range(1, n.bit_length())} | {n}):         # 2, 4, ... and n
            values[f"pass@{k}"] = [pass_at_k(n, count, k) for count in counts]
        completions, examples = groups.rollout.completions, groups.examples
        values[f"majority@{n}"] = [
            majority_vote(completions[p * n : (p + 1) * n], examples[p]["answer"]) for p in known]
    return {name: estimate_mean(np.array(of_one), True) for name, of_one in values.items()} | estimates


def estimate_rewards(rewards: Tensor) -> dict:
    """Estimate, by estimate_mean, the mean of rewards (P, n), NaN where a function could not score."""
    means = rewards.nanmean(dim=1)                                               # (P,)
    is_share = set(rewards[~rewards.isnan()].tolist()) == {0.0, 1.0}
    return estimate_mean(means[~means.isnan()].numpy(), is_share)


def estimate_mean(values: np.ndarray, is_share: bool) -> dict:
    """Return {"mean", "low", "high", "problems"} for P values; low and high limit a 95 % interval.

        mean +- 1.96 std / sqrt(P)

    is_share  the values are between 0 and 1. Then two more 0s and two more 1s are added for the interval,
              because a few equal values do not exclude rare others. Agresti and Coull, The American
              Statistician 52 (1998).

    If values without bounds are equal, no variation can be estimated, and low and high are None. Without
    values, mean is None.
    """
    mean = float(values.mean()) if len(values) else None
    padded = np.append(values, [0.0, 0.0, 1.0, 1.0]) if is_share else values
    if len(padded) == 0 or np.ptp(padded) < 1e-12:
        return {"mean": mean, "low": None, "high": None, "problems": len(values)}
    half = 1.96 * float(padded.std(ddof=1)) / math.sqrt(len(padded))
    low, high = float(padded.mean()) - half, float(padded.mean()) + half
    if is_share:
        low, high = max(0.0, low), min(1.0, high)
    return {"mean": mean, "low": low, "high": high, "problems": len(values)}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of k completions is correct, if `correct` of n were.

        1 - comb(n - correct, k) / comb(n, k)

    Unbiased for n >= k: arXiv:2107.03374 eq. 1. 1 - (1 - correct / n)**k would be too low on average.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(completions: list, truth: str) -> float:
    """Return 1 if the most frequent answer is correct, else 0; if several are, the share that is correct.

    Completions without a readable answer are ignored; without any readable answer the result is 0.
    arXiv:2203.11171.
    """
    counts = Counter(filter(None, (extract_answer(text_of(completion)) for completion in completions)))
    votes = {answer: sum(n for other, n in counts.items() if same_answer(answer, other)) for answer in counts}
    leading = [answer for answer in votes if votes[answer] == max(votes.values())]
    right = sum(counts[answer] for answer in leading if same_answer(answer, truth))
    return right / max(1, sum(counts[answer] for answer in leading))
