"""
IPO, the default policy loss of prime-rl since August 2026: drop tokens whose probability has moved.

    -ratio * A if abs(exp(logp) - exp(old_logp)) <= eps else 0
    ratio  exp(logp - old_logp): policy / sampler, also with vLLM

    python examples/ideas/ipo.py --max_steps 2 --loss_options eps=0.1 --ppo_epochs 2

dppo of grpo.py keeps a token that has moved against the sign of A; IPO drops it too. It was made
for asynchronous training, where tokens have moved before their first update.

Source: github.com/PrimeIntellect-ai/prime-rl, pull requests 1930 (a variant of arXiv:2602.04879),
3418 (the default) and 3586 (eps=0.3, no KL term). There advantages are not divided by the standard
deviation: add --normalize_advantages false. Needs an entry of LOSSES, and nothing else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.command_line import parse_config  # before torch

import torch
from torch import Tensor

from grpo import LOSSES, Loss
from train import train


def ipo(
    logp: Tensor, log_ratio: Tensor, advantages: Tensor, *, eps: float = 0.3, **unused
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and whether it was dropped, (B, T) each: see above."""
    ratio = log_ratio.clamp(-20, 20).exp()
    moved = logp.detach().exp() - (logp - log_ratio).detach().exp()
    dropped = moved.abs() > eps
    return torch.where(dropped, 0.0, -ratio * advantages), dropped


LOSSES["ipo"] = Loss(ipo, "token_mean", {"eps": (0.0, 1.0)}, corrects_sampler=True)

if __name__ == "__main__":
    train(parse_config(["--use_grpo", "--loss_type", "ipo", *sys.argv[1:]]))
