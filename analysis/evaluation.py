"""
Evaluate a model: sample completions, score them, and estimate accuracy, pass@k, majority@n, the points of
reward functions and the difference between two models, each with a 95 % interval.

The unit of every interval is the problem: the n completions of one problem are not independent.

The functions from summarise on need no model. A problem is a dict as measure returns it, and there are P of
them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from experience import Groups
from runs.groups import sample_completions, sample_on_all_ranks
from reward_functions.calling import wrap_reward_functions
from rewards import (
    compute_rewards_for_completions, correctness, extract_answer, name_of, same_answer, text_of, weighted_sum,
)
from runs.folder import or_none

def evaluate(engine, ranks, examples: list[dict], config, *, seed: int, **options) -> dict:
    """Sample one completion of each problem and score it. Options: as for answer_and_score.

    returns  eval_accuracy (share correct) with eval_accuracy_low, eval_accuracy_high (95 %),
             eval_problems, eval_reward/<function> (mean points), eval_reward_low/ and eval_reward_high/
             (95 %) and eval_truncated (share). Without known answers: no eval_accuracy.
    """
    groups = answer_and_score(engine, ranks, examples, config, seed=seed, num_completions=1, **options)
    result = {f"eval_{name}": value for name, value in groups.reports.means().items()}
    ends = {"": "mean", "_low": "low", "_high": "high"}
    for name, points in groups.per_function.items():
        found = estimate_points(points.tolist())
        result |= {f"eval_reward{end}/{name}": found[of] for end, of in ends.items()}    # None: unknown
    correct = groups.per_function["correctness"]
    correct = correct[~correct.isnan()]
    result["eval_problems"] = len(correct) or len(examples)
    result["eval_truncated"] = float((~groups.rollout.finished).double().mean())
    if len(correct):
        found = estimate_mean(correct.numpy())
        result |= {f"eval_accuracy{end}": found[of] for end, of in ends.items()}
    return result


def answer_and_score(
    engine, ranks, examples: list[dict], config, *, seed: int, num_completions: int,
    reward_functions=(correctness,), environment=None, trainer_state=None,
) -> Groups:
    """Sample num_completions of each problem, and score them. Each rank takes a slice of the problems.

    config       a GRPOConfig: of its generation_batch_size completions that are sampled at once, waiting ones
                 start when half are finished
    environment  replies to the policy; None: no conversation
    returns      groups with the points of correctness and the reward functions, which are not weighted
    """
    functions = [correctness, *(f for f in reward_functions if f is not correctness)]

    def sample_slice(examples: list[dict], repeats: list[int]) -> Groups:
        rollout = sample_completions(
            engine, environment, examples, config, seed=seed, num_completions=num_completions,
            repeats=repeats,
        )
        wrapped, reports = wrap_reward_functions(functions, rollout, config, trainer_state)
        total, points = compute_rewards_for_completions(wrapped, [1.0] * len(functions), rollout, examples)
        return Groups(examples, rollout, total, points, total, reports=reports)

    examples = [{"answer": None} | example for example in examples]
    return sample_on_all_ranks(engine, ranks, sample_slice, examples)


def measure(
    engine, ranks, examples: list[dict], config, *, samples: int, reward_functions=(), **options
) -> dict:
    """Evaluate a model with n completions of each problem. Options: as for answer_and_score.

    reward_functions  those of config, which has their weights, or none
    returns           truncated and tagged (shares of completions, tagged: those with an <answer>), estimates
                      (see summarise) and problems: prompt, answer; right (n bools) and majority (its
                      majority_vote), None without an answer; points by name (n each, None: unscored)
    """
    groups = answer_and_score(
        engine, ranks, examples, config, num_completions=samples, reward_functions=reward_functions, **options
    )
    points, completions = groups.per_function, groups.rollout.completions
    rewards = {f"reward/{name_of(function)}": points[name_of(function)] for function in reward_functions}
    if rewards:                                           # as in training
        unscored = groups.scores.isnan()
        rewards["reward"] = weighted_sum(rewards, config.weights).masked_fill(unscored, torch.nan)
    problems = []
    for p, example in enumerate(examples):
        correct, answer = points["correctness"][p], example.get("answer")
        votes, known = completions[p * samples : (p + 1) * samples], not correct.isnan().any()
        problems.append({
            "prompt": example["prompt"], "answer": answer,
            "right": correct.bool().tolist() if known else None,
            "majority": majority_vote(votes, answer) if known else None,
            "points": {name: list(map(or_none, values[p])) for name, values in rewards.items()},
        })
    return {
        "truncated": float((~groups.rollout.finished).double().mean()),
        "tagged": sum("</answer>" in text_of(completion) for completion in completions) / len(completions),
        "estimates": summarise(problems), "problems": problems,
    }


# ---- estimates from samples --------------------------------------------------------------------------------


def summarise(*models: list[dict]) -> dict[str, dict]:
    """Estimate values_by_problem and points of a model, or of two on the same problems the differences.

    A difference is the first minus the second. "problems" is the number of those that could be scored.
    """
    answered = [row for row in zip(*models, strict=True) if all(problem["right"] for problem in row)]
    values = [values_by_problem(problems) for problems in zip(*answered, strict=True)]
    shares = {
        name: estimate_mean(of_one) if len(models) == 1 else estimate_by_t(of_one - values[1][name])
        for name, of_one in (values[0] if values else {}).items()
    }
    return shares | {
        name: estimate_points(*([problem["points"][name] for problem in problems] for problems in models))
        for name in models[0][0].get("points", {})
    }


def values_by_problem(problems: Sequence[dict]) -> dict[str, np.ndarray]:
    """Return (P,) values from 0 to 1 by name: accuracy, pass@1, pass@2, pass@4, ... pass@n and majority@n.

    With one completion per problem all of these are equal, and accuracy alone is returned.
    """
    correct, n = [sum(problem["right"]) for problem in problems], len(problems[0]["right"])
    values = {"accuracy": np.array(correct) / n}
    if n > 1:
        powers = sorted({2**i for i in range(n.bit_length())} | {n})             # 1, 2, 4, ... and n
        values |= {f"pass@{k}": np.array([pass_at_k(n, c, k) for c in correct]) for k in powers}
        values[f"majority@{n}"] = np.array([problem["majority"] for problem in problems], dtype=float)
    return values


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of k completions is correct, when `correct` of n were.

        1 - comb(n - correct, k) / comb(n, k)

    Unbiased for n >= k: arXiv:2107.03374 eq. 1. 1 - (1 - correct / n)**k would be too low on average.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(completions: list, truth: str) -> float:
    """Return 1 if the most frequent answer is correct, else 0; of several, the share that is correct.

    Completions without a readable answer are ignored; without any readable answer the result is 0.
    arXiv:2203.11171.
    """
    counts = Counter(filter(None, (extract_answer(text_of(completion)) for completion in completions)))
    votes = {answer: sum(n for other, n in counts.items() if same_answer(answer, other)) for answer in counts}
    leading = [answer for answer in votes if votes[answer] == max(votes.values())]
    right = sum(counts[answer] for answer in leading if same_answer(answer, truth))
    return right / max(1, sum(counts[answer] for answer in leading))


# ---- intervals ---------------------------------------------------------------------------------------------


def estimate_mean(values: np.ndarray) -> dict:
    """Return {"mean", "low", "high", "problems"} of P values from 0 to 1, with a 95 % interval.

    The interval is Clopper and Pearson's (Biometrika 26, 1934), exact if every value is 0 or 1. Fractional
    values vary less, as if there were more problems: it is then that of the number of 0/1 problems with the
    same variance (C. Franco et al., J. Survey Stat. Methodol. 7, 2019). Their mean and variance are taken
    with two more problems, of 0 and of 1, since values that are all alike say little about rare others.
    docs/rewards.md has its coverage.
    """
    mean, extended = float(values.mean()), np.append(values, [0.0, 1.0])
    problems = len(values) * float(extended.mean() * (1 - extended.mean()) / extended.var())
    low, high = share_interval(mean * problems, problems)
    return {"mean": mean, "low": low, "high": high, "problems": len(values)}


def share_interval(successes: float, n: float) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval: at its ends results as far or farther have 2.5 %."""
    failures = n - successes
    low = beta_quantile(0.025, successes, failures + 1) if successes > 1e-9 else 0.0
    return low, beta_quantile(0.975, successes + 1, failures) if failures > 1e-9 else 1.0


def beta_quantile(share: float, a: float, b: float) -> float:
    """Return x with P(X < x) = share for X ~ Beta(a, b).

    Of X = sin(t)**2, t has density ~ sin(t)**(2a - 1) cos(t)**(2b - 1).
    """
    edges = np.linspace(0, math.pi / 2, 20_001)
    t = (edges[1:] + edges[:-1]) / 2
    density = (2 * a - 1) * np.log(np.sin(t)) + (2 * b - 1) * np.log(np.cos(t))
    shares = np.append(0, np.exp(density - density.max()).cumsum())              # of t below each edge
    return math.sin(np.interp(share, shares / shares[-1], edges)) ** 2


def estimate_by_t(values: np.ndarray) -> dict:
    """Return the same of P values without bounds, such as points or differences, with Student's t interval.

    From equal values, or one, no variation can be estimated: low and high are None.
    """
    mean, low, high = float(values.mean()) if len(values) else None, None, None
    if len(values) and np.ptp(values) > 1e-12:
        low, high = t_interval(values)
    return {"mean": mean, "low": low, "high": high, "problems": len(values)}


def estimate_points(*models: list[list[float | None]]) -> dict:
    """Estimate mean points of a model, or of two models on the same problems the difference, first - second.

    models  points (P, n), None where unscored; problems without points are left out

    The values are the problems' means, or their differences: paired, so that the difficulty of a problem
    cancels. If all points of a model are 0 or 1, and both occur, the interval is that of estimate_mean.
    """
    points = np.ma.masked_invalid(np.array(models, dtype=float))                 # (models, P, n)
    means = points.mean(axis=2).filled(np.nan)
    means = means[:, ~np.isnan(means).any(axis=0)]                               # (models, scored problems)
    shares = len(models) == 1 and set(points.compressed()) == {0.0, 1.0}
    estimate = estimate_mean(means[0]) if shares else estimate_by_t(means[0] - sum(means[1:]))
    return estimate | {"unscored": int(np.ma.count_masked(points))}


def t_interval(values: np.ndarray) -> tuple[float, float]:
    """Return Student's 95 % interval of the mean of n > 1 values: mean +- t s / sqrt(n)."""
    half = student_quantile(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - half, float(values.mean()) + half


@cache
def student_quantile(freedom: int) -> float:
    """Return t with P(|T| < t) = 95 %. T**2 / (T**2 + freedom) has the distribution Beta(1/2, freedom/2)."""
    share = beta_quantile(0.95, 0.5, freedom / 2)
    return math.sqrt(freedom * share / (1 - share))


def describe_estimates(estimates: dict[str, dict], samples: int) -> str:
    """Return a line such as "accuracy 0.910 [0.870, 0.940] of 256" for each estimate."""
    lines = []
    for name, estimate in estimates.items():
        mean, low, high, unscored = map(estimate.get, ("mean", "low", "high", "unscored"))
        shown = ("?" if mean is None else f"{mean:.3f}") + " points" * (unscored is not None)
        shown += "" if low is None else f" [{low:.3f}, {high:.3f}]"
        shown += f" of {estimate['problems']}" + f" x {samples}" * (samples > 1)
        lines.append(f"{name} {shown}" + (f", {unscored} completions unscored" if unscored else ""))
    return "\n".join(lines)
