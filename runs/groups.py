"""
Groups of a step: sampled on all ranks, joined, and tied ones replaced (--dynamic_sampling). Metrics of a
step, which docs/metrics.md lists.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor

from environments import closing_environments
from experience import Experience, Groups
from reward_functions.calling import Reports
from logprobs import completion_lengths
from sample import Rollout, count_repeats, pad_rows
from sources.batches import prompt_key

SUCCESS = "correctness", "math_equality", "passes_tests", "countdown", "multiple_choice"     # right: 1 point


def sample_completions(
    engine, environment: Callable | None, examples: list[dict], config, **of_sample,
) -> Rollout:
    """Sample a group for each example's prompt, as Engine.sample; with an environment, conversations."""
    if environment is None:
        return engine.sample([example["prompt"] for example in examples], config, **of_sample)
    from environments.conversations import sample_with_environment  # here: with an environment alone

    return sample_with_environment(engine, environment, examples, config, **of_sample)


@closing_environments()
def sample_on_all_ranks(engine, ranks, sample_slice: Callable, examples: list[dict]) -> Groups:
    """Call sample_slice(examples, repeats=) with each rank's slice of examples, join the groups.

    repeats  of each prompt of the slice: how often it came before in the examples of all ranks
    """
    def of_this_rank(examples: list[dict], repeats: list[int]) -> Groups:
        groups = sample_slice(examples, repeats=repeats)  # examples may be large, and all ranks have them
        return replace(groups, examples=[], rollout=replace(groups.rollout, environments=None))

    with engine.sampling():
        repeats = count_repeats([prompt_key(example["prompt"]) for example in examples])
        parts = ranks.gather(of_this_rank, examples, repeats)
    return replace(join(parts), examples=examples)


def replace_groups(groups: Groups, which: Tensor, new: Groups) -> Groups:
    """Return the groups without those in which (P,), and behind them the new ones."""
    return join([select(groups, ~which), replace(new, replaced=len(new.rewards))])


def select(groups: Groups, keep: Tensor) -> Groups:
    """Return the groups of the prompts where keep (P,) is True."""
    rows = keep.repeat_interleave(groups.scores.shape[1])                        # (B,)
    return Groups(
        list(compress(groups.examples, keep.tolist())), select_groups(groups.rollout, keep, rows),
        groups.scores[keep], {name: points[keep] for name, points in groups.per_function.items()},
        groups.rewards[keep], groups.replaced,
        replace(groups.reports, extra=list(compress(groups.reports.extra, rows.tolist()))),
    )


def join(parts: list[Groups]) -> Groups:
    """Concatenate along P."""
    return Groups(
        [example for part in parts for example in part.examples],
        join_rollouts([part.rollout for part in parts]), torch.cat([part.scores for part in parts]),
        {name: torch.cat([part.per_function[name] for part in parts]) for name in parts[0].per_function},
        torch.cat([part.rewards for part in parts]), sum(part.replaced for part in parts),
        Reports.join([part.reports for part in parts]),
    )


def select_groups(rollout: Rollout, keep: Tensor, rows: Tensor) -> Rollout:
    """Return the prompts where keep (P,) is True, with their completions: rows (B,)."""
    by_row = rollout.completion_ids, rollout.completion_mask, rollout.sampling_logp, rollout.finished
    texts = list(compress(rollout.completions, rows.tolist()))
    points = None if rollout.turn_points is None else rollout.turn_points[rows]
    prompts = rollout.prompt_ids[keep], rollout.prompt_mask[keep]
    return Rollout(*prompts, *(tensor[rows] for tensor in by_row), texts, points)


def join_rollouts(rollouts: list[Rollout]) -> Rollout:
    """Join rollouts of one group size into one, padded to the longest."""
    def join(name, left=False):
        return pad_rows([row for rollout in rollouts for row in getattr(rollout, name)], left=left)

    return Rollout(
        join("prompt_ids", left=True), join("prompt_mask", left=True), join("completion_ids"),
        join("completion_mask"), join("sampling_logp"), torch.cat([rollout.finished for rollout in rollouts]),
        [text for rollout in rollouts for text in rollout.completions],
        None if rollouts[0].turn_points is None else join("turn_points"),
    )


# ---- metrics -----------------------------------------------------------------------------------------------


def mean_of(lines: list[dict], metric: str) -> float:
    """Return the mean of a metric over the lines where it is a finite number; NaN if there are none."""
    values = [line.get(metric) for line in lines]
    values = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def summarize_updates(updates: list[dict]) -> dict:
    """Return the means of the metrics of a step's updates, and the last approx_kl."""
    means = {name: mean_of(updates, name) for name in updates[0]}
    skipped = sum(update["skipped"] for update in updates)
    return means | {"approx_kl": updates[-1]["approx_kl"], "updates": len(updates), "skipped": skipped}


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


def describe_conversations(rollout) -> dict:
    """Return metrics, means over completions: turns of the policy, and tokens of the environment."""
    if rollout.turn_points is None:
        return {}
    mask = rollout.completion_mask                        # (B, T), False on the tokens of the environment
    num_turns = mask[:, 0].sum() + (mask[:, 1:] & ~mask[:, :-1]).sum()           # each where it begins
    num_forced = completion_lengths(mask).sum() - mask.sum()
    return {"turns": float(num_turns) / len(mask), "environment_tokens": float(num_forced) / len(mask)}
