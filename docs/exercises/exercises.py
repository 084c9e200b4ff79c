"""
The exercises of docs/lecture.md. Write the functions; the tests name the error until all are right:

    python -m pytest -q -rN --tb=short docs/exercises              all of them
    python -m pytest -q -rN --tb=short docs/exercises -k test_1    the first one

Solutions are in solutions.py. Shapes: P prompts, G completions of each, B = P*G rows, T tokens of a completion.
No function may change its arguments in place: the caller still needs them.
"""

import math
import re

import torch
from torch import Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """1. Compare each completion with its group: (r - mean) / (std + 1e-8), std divided by G - 1.

    rewards (P, G) float32 -> (P, G). A group of equal rewards must come back as exact zeros, whatever the rewards are.
    Hint: mean and std take dim=1, keepdim=True. Compare amax with amin of each row, and use torch.where.
    """
    raise NotImplementedError("exercise 1 is empty: replace this line, in docs/exercises/exercises.py")


def leave_one_out(rewards: Tensor) -> Tensor:
    """2. Subtract from each reward the mean reward of its siblings; do not scale. (P, G) -> (P, G).

    Hint: the sum of the siblings is the sum of the row minus the completion's own reward.
    """
    raise NotImplementedError("exercise 2 is empty: replace this line, in docs/exercises/exercises.py")


def clipped_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """3. Return PPO's loss of each token: -min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A), ratio = exp(logp - old_logp).

    logp (with gradient), old_logp, advantages (B, T) -> (B, T)
    Hint: torch.minimum of two tensors, and Tensor.clamp. Mind the minus sign.
    """
    raise NotImplementedError("exercise 3 is empty: replace this line, in docs/exercises/exercises.py")


def micro_batch_loss(loss: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    """4. Return what a micro-batch adds to the loss of a step, which is the mean over all its tokens.

    loss   (b, T) of this micro-batch's tokens; may be NaN where mask is False
    mask   (b, T) bool, True on tokens that count;  num_tokens counts those of the whole step
    returns a scalar; those of all micro-batches of a step add up to its loss
    Hint: torch.where replaces what is not counted before the sum.
    """
    raise NotImplementedError("exercise 4 is empty: replace this line, in docs/exercises/exercises.py")


def kl_term(logp: Tensor, old_logp: Tensor, ref_logp: Tensor) -> Tensor:
    """5. Return a KL penalty for a loss, from the tokens that were sampled: nats per token, (B, T).

    The value is that of k3, exp(x) - x - 1 with x = ref_logp - logp, times the ratio exp(logp - old_logp). Averaged over
    tokens drawn from the policy, its gradient with respect to logp must be that of KL(policy || reference).
    Hint: the ratio is 1 on policy, but its gradient is not 0. Do not detach it.
    """
    raise NotImplementedError("exercise 5 is empty: replace this line, in docs/exercises/exercises.py")


def right_number(completions: list[str], answer: list[str], **columns) -> list[float]:
    """6. Return 1.0 for a completion whose only <answer>...</answer> contains the right number, else 0.0.

    72, 72.0 and " 72 " are the same number, 1,000 is 1000, and a number may be -3 or 0.5. A comma separates groups of
    three digits, so 7,2 and 1,0000 and 1234,567 are not numbers. Two answers earn 0.
    Never raise an error, whatever a model writes.
    Hint: re.findall finds the tags; float() reads "nan" and "inf" too; math.isfinite.
    """
    raise NotImplementedError("exercise 6 is empty: replace this line, in docs/exercises/exercises.py")
