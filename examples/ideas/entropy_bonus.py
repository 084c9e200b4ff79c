"""
An entropy bonus for right completions only, in which long ones count as much as short ones.

    loss  grpo_loss - COEF * mean(mean(entropy of its tokens) for each right completion)

    python examples/ideas/entropy_bonus.py --max_steps 2

The bonus of --entropy_coef also raises the entropy of wrong completions, and long ones count more.
arXiv:2604.04894 argues for keeping entropy in right completions alone, by changing advantages; this
file restricts the textbook bonus to them.

A completion is right if the first of --reward_functions, by default correctness, returns 1; its
score also has other rewards. Right completions are counted in `columns`, over the whole update,
because the loss sees only the rows of a micro-batch.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.command_line import parse_config  # before torch

from grpo import token_weights, weighted_loss
from train import grpo_loss, train

COEF = 0.01                     # in units of advantage per nat


def columns(run, experience, batch) -> dict:
    """Return the weight of each token (b, T): 1 / length / number of right completions, else 0."""
    first, *_ = experience.groups.per_function.values()                          # (P, G)
    right = (first >= 1).reshape(-1, 1)[batch.rows]                              # (b, 1)
    return {"right_weights": token_weights(batch.mask & right, "sequence_mean")}


def loss(grpo_config, new, batch) -> tuple[dict, dict]:
    """Add the bonus to the terms of grpo_loss."""
    terms, metrics = grpo_loss(grpo_config, new, batch)
    terms["entropy_bonus"] = -COEF * weighted_loss(new.entropy, batch.extra["right_weights"])
    return terms, metrics


if __name__ == "__main__":
    train(parse_config(["--use_grpo", *sys.argv[1:]]), columns=columns, loss=loss)
