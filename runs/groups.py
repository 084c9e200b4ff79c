"""Sample and score the groups of a step or an evaluation, and compute the metrics in docs/metrics.md."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from data import prompt_of
from experience import Experience, Groups
from logprobs import completion_lengths
from policy import Policy
from reward_functions.calling import wrap_reward_functions
from rewards import compute_rewards_for_completions
from sample import Rollout, concatenate

SUCCESS = "correctness", "math_equality", "passes_tests", "countdown", "multiple_choice"     # 1 if right


def sample_and_score(
    policy: Policy, examples: list[dict], seeds: Sequence[tuple], config, *, reward_functions: list[Callable],
    weights: list[float], environment: Callable | None = None, num_completions: int | None = None,
    trainer_state=None,
) -> Groups:
    """Sample and score a group for each example. Each process handles a slice of the examples.

    seeds        as for Policy.sample;  config  a GRPOConfig
    environment  replies to the policy; None: completions are single messages
    """
    def of_slice(examples: list[dict], seeds: Sequence[tuple]) -> Groups:
        if environment is None:
            prompts = [prompt_of(policy.tokenizer, example) for example in examples]
            rollout = policy.sample(prompts, config, seeds, num_completions=num_completions)
        else:
            from environments.conversations import sample_with_environment  # only with an environment

            rollout = sample_with_environment(
                policy, environment, examples, config, seeds, num_completions=num_completions)
        groups = score(rollout, examples, reward_functions, weights, config, trainer_state)
        return replace(groups, examples=[])               # all processes have them; they may be large

    return replace(concatenate(policy.map_over_processes(of_slice, examples, seeds)), examples=examples)


def score(
    rollout: Rollout, examples: list[dict], reward_functions: list[Callable], weights: list[float], config,
    trainer_state=None,
) -> Groups:
    """Call the reward functions on a rollout, then close its environments.

    config, trainer_state  as for wrap_reward_functions
    returns                Groups, whose rewards are still the scores: see shape_rewards
    """
    try:
        functions, reports = wrap_reward_functions(reward_functions, rollout, config, trainer_state)
        scores, per_function = compute_rewards_for_completions(functions, weights, rollout, examples)
    finally:
        if rollout.environments:
            from environments.instances import close_all  # only with environments

            close_all(rollout.environments, config.reward_timeout)
    rollout = replace(rollout, environments=None)
    return Groups(
        examples, rollout, scores, per_function, rewards=scores, extra=reports.extra,
        reports=replace(reports, extra=[]))


# ---- metrics -----------------------------------------------------------------------------------------------


def mean_of(lines: list[dict], metric: str) -> float:
    """Return the mean of a metric over the lines in which it is a finite number; NaN if there are none."""
    values = [line.get(metric) for line in lines]
    values = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def summarize_updates(updates: list[dict]) -> dict:
    """Return the means of metrics over the updates of a step; for approx_kl, the last value."""
    means = {name: mean_of(updates, name) for name in updates[0]}                # NaN: nothing was forwarded
    skipped = sum(update["skipped"] for update in updates)
    return means | {"approx_kl": updates[-1]["approx_kl"], "updates": len(updates), "skipped": skipped}


def summarize_groups(groups: Groups, experience: Experience) -> dict:
    """Return the metrics of sampled groups. tied_groups is the share of zero-variance groups."""
    scores, mask = groups.scores, groups.rollout.completion_mask
    known = [rewards for name, rewards in groups.per_function.items() if name in SUCCESS]
    all_right = (known[0] >= 1).all(dim=1) if known else torch.tensor(torch.nan)
    return groups.reports.means() | experience.metrics | {
        "mean_reward": float(scores.nanmean()),
        "tied_groups": float(groups.tied.float().mean()),
        "tied_right_groups": float((groups.tied * all_right).float().mean()),
        "replaced_groups": groups.replaced,
        "unscored": float(scores.isnan().float().mean()),
        "reward_errors": len(groups.reports.failures),
        "completion_tokens": float(mask.sum()) / len(mask),
        "truncated": float((~groups.rollout.finished).float().mean()),
    } | {
        f"reward/{name}": float(rewards.nanmean()) for name, rewards in groups.per_function.items()
    } | describe_conversations(groups.rollout)


def describe_conversations(rollout) -> dict:
    """Return the mean numbers of the policy's turns and the environment's tokens per completion."""
    if rollout.turn_points is None:
        return {}
    mask = rollout.completion_mask                        # (B, T), False on the tokens of the environment
    num_turns = mask[:, 0].sum() + (mask[:, 1:] & ~mask[:, :-1]).sum()           # beginnings of turns
    num_forced = completion_lengths(mask).sum() - mask.sum()
    return {"turns": float(num_turns) / len(mask), "environment_tokens": float(num_forced) / len(mask)}
