"""
Metrics of a step, which docs/metrics.md lists, and its durations.
"""

import math
import time
from collections.abc import Callable
from functools import wraps

import torch

from environments.conversations import describe_conversations
from experience import Experience, Groups

SUCCESS = "correctness", "math_equality", "passes_tests", "countdown", "multiple_choice"     # right: 1 point


def timed(name: str) -> Callable:
    """Decorate a function of a run: write the duration of each call to run.seconds[name]."""
    def decorate(function):
        @wraps(function)
        def call(run, *args, **kwargs):
            started = time.perf_counter()
            result = function(run, *args, **kwargs)
            run.seconds[name] = time.perf_counter() - started
            return result

        return call

    return decorate


def mean_of(lines: list[dict], metric: str) -> float:
    """Return the mean of a metric over the lines where it is a finite number; NaN if there are none."""
    values = [line.get(metric) for line in lines]
    values = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def summarize_updates(updates: list[dict]) -> dict:
    """Return the means of the metrics of a step's updates, and the last policy_kl."""
    means = {name: mean_of(updates, name) for name in updates[0]}
    skipped = sum(update["skipped"] for update in updates)
    return means | {"policy_kl": updates[-1]["policy_kl"], "updates": len(updates), "skipped": skipped}


def summarize_groups(groups: Groups, experience: Experience) -> dict:
    """Return the metrics of sampled groups."""
    scores, mask, advantages = groups.scores, groups.rollout.completion_mask, experience.advantages
    if advantages.shape[1] > 1:                           # of tokens
        advantages = advantages[experience.mask]
    known = [points for name, points in groups.per_function.items() if name in SUCCESS]
    all_right = (known[0] >= 1).all(dim=1) if known else torch.tensor(torch.nan)
    return groups.reports.means() | experience.metrics | {
        "mean_reward": float(scores.nanmean()),
        "mean_advantage": float(advantages.mean()),
        "std_advantage": float(advantages.std()),
        "tied_groups": float(groups.tied.float().mean()),
        "tied_right_groups": float((groups.tied * all_right).float().mean()),
        "replaced_groups": groups.replaced,
        "unscored": float(scores.isnan().float().mean()),
        "reward_errors": len(groups.reports.failures),
        "completion_tokens": float(mask.sum()) / len(mask),
        "truncated": float((~groups.rollout.finished).float().mean()),
    } | {
        f"reward/{name}": float(points.nanmean()) for name, points in groups.per_function.items()
    } | describe_conversations(groups.rollout)
