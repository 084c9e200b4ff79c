"""
Advantages that depend on lengths: the length reward of Kimi k1.5, for short right completions.

    reward  reward + WEIGHT * (bonus if right else min(0, bonus))
    bonus   0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))

    python examples/ideas/length_estimator.py --max_steps 2

lengths are those of the group, in tokens; if all are equal, the bonus is 0. Advantages are those of
GRPO, (reward - mean) / std, so groups in which all are right, or none, have a learning signal too.

A completion is right if the first of --reward_functions, by default correctness, returns 1. The
function below replaces what --baseline and --advantage_scale choose, so these flags have no effect.

Source: arXiv:2501.12599 sec. 2.3.3. The paper trains without this reward first, because it slows
training down at the start; here it applies from the first step on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.command_line import parse_config  # before torch

import torch
from torch import Tensor

from grpo import compute_group_advantages
from train import train

WEIGHT = 0.5


def advantages(run, groups) -> Tensor:
    """Return the advantages (P, G) of rewards with the length reward."""
    lengths = groups.rollout.completion_mask.sum(dim=1).view_as(groups.rewards)  # (P, G)
    shortest, longest = lengths.amin(dim=1, keepdim=True), lengths.amax(dim=1, keepdim=True)
    bonus = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
    bonus = torch.where(longest > shortest, bonus, 0.0)
    right = next(iter(groups.per_function.values())) >= 1
    return compute_group_advantages(
        groups.rewards + WEIGHT * torch.where(right, bonus, bonus.clamp(max=0)))


if __name__ == "__main__":
    train(parse_config(["--use_grpo", *sys.argv[1:]]), advantages=advantages)
