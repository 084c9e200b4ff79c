"""
Make right completions more likely, also in groups without a learning signal: VAPO's LM loss.

    loss  grpo_loss + COEF * mean(-logp of all tokens in right completions)

    python examples/ideas/nll_of_right.py --max_steps 2

Without the term, a group of right completions with equal rewards has no gradient.

Source: arXiv:2504.05118 sec. 4.3 (positive-example LM loss, 0.1). NeMo-RL's option
positive_example_nll_weight divides by the number of right tokens of a micro-batch, so its loss
depends on how rows are split. Here `columns` counts those of the whole update.

A completion is right if the first of --reward_functions, by default correctness, returns 1; its
score also has other rewards. NeMo-RL takes all completions with a score above 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.command_line import parse_config  # before torch

from grpo import token_weights, weighted_loss
from train import grpo_loss, train

COEF = 0.1


def columns(run, experience, batch) -> dict:
    """Return the weight of each token (b, T): 1 / number of tokens in right completions, else 0."""
    first, *_ = experience.groups.per_function.values()                          # (P, G)
    right = (first >= 1).reshape(-1, 1)[batch.rows]                              # (b, 1)
    return {"right_weights": token_weights(batch.mask & right, "token_mean")}


def loss(grpo_config, new, batch) -> tuple[dict, dict]:
    """Add the negative log-likelihood to the terms of grpo_loss."""
    terms, metrics = grpo_loss(grpo_config, new, batch)
    terms["nll_of_right"] = COEF * weighted_loss(-new.logp, batch.extra["right_weights"])
    return terms, metrics


if __name__ == "__main__":
    train(parse_config(["--use_grpo", *sys.argv[1:]]), columns=columns, loss=loss)
