"""
GRPO over the core files alone: a model of a million parameters learns to add.

    python examples/minimal.py --output_dir outputs/minimal

First it is shown sums with their answers, until a third of the held-out ones are right; then rewards alone
teach it. The weights are those of `train.py --use_grpo --engine plain` with the same flags, bit for bit.
P prompts, G completions of each, B = P*G rows with those of a prompt adjacent, b in a micro-batch, T tokens.
"""

import argparse
import itertools
import math
import random
import sys
from functools import partial
from pathlib import Path

import torch
sys.path.insert(0, str(Path(__file__).parents[1]))
from config import GRPOConfig, ModelConfig
from data import load_examples
from grpo import compute_group_advantages, policy_loss
from logprobs import completion_log_probs, micro_batches
from model import load_policy, save_policy
from rewards import compute_rewards_for_completions, correctness, explanation_quality, reasoning_coherence
from sample import Rollout, demonstrations_as_rollout, sample_completions_for_prompts

CONFIG = GRPOConfig(
    num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0, generation_top_k=0,
    generation_top_p=1.0)
FUNCTIONS = [correctness, reasoning_coherence, explanation_quality]
WEIGHTS = [1.0, 0.2, 0.1]
PROMPTS_PER_STEP = 64
TOKENS_PER_FORWARD = 2048                                 # of a micro-batch, with padding


def grpo_step(model, tokenizer, examples: list[dict], seed: int) -> None:
    """Sample a group for each prompt, score it, make completions above their group's mean more likely."""
    # 1. Sample G completions of each prompt, with the log-probabilities of their tokens.
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, CONFIG, seed=seed)
    # 2. Score them: rewards (P, G) in points.
    rewards, _ = compute_rewards_for_completions(FUNCTIONS, WEIGHTS, rollout, examples)
    # 3. Compare each with its group: A = (r - mean) / std, (P, G). The group is the baseline: no critic.
    advantages = compute_group_advantages(rewards)
    assert advantages.sum(dim=1).abs().max() < 1e-3, "advantages of a group must sum to 0"
    # 4. Add up the gradient of the clipped loss; train() makes the step.
    accumulate_gradients(model, rollout, advantages.float().view(-1, 1), "dapo")


def supervised_step(model, tokenizer, examples: list[dict], seed: int) -> None:
    """Make demonstrations more likely: they are a rollout in which each completion has advantage 1."""
    rollout = demonstrations_as_rollout(model, tokenizer, examples)
    accumulate_gradients(model, rollout, torch.ones(len(examples), 1), "reinforce")


def accumulate_gradients(model, rollout: Rollout, advantages: torch.Tensor, loss_type: str) -> None:
    """Add up the gradient of a loss, its mean over all tokens of the rollout, over micro-batches.

        ratio      exp(logp - old_logp)              policy now / policy that sampled: 1 before the update
        dapo       -min(ratio * A, clip(ratio) * A)
        reinforce  -logp * A

    advantages  A (B, 1). Rows with A = 0 have no gradient and are not forwarded; their tokens count.
    """
    mask, old_logp = rollout.completion_mask, rollout.sampling_logp              # (B, T)
    num_tokens = int(mask.sum())                          # of the step: micro-batches add up to it
    for rows in micro_batches(rollout, advantages[:, 0].nonzero()[:, 0], TOKENS_PER_FORWARD):
        logp = completion_log_probs(model, rollout, rows, **CONFIG.distribution).logp  # (b, T), with gradient
        loss, _ = policy_loss(
            logp, old_logp[rows], advantages[rows], mask[rows], loss_type=loss_type, num_tokens=num_tokens)
        loss.backward()


def accuracy(model, tokenizer, examples: list[dict], seed: int) -> float:
    """Return the share of right answers, one sampled for each problem."""
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, CONFIG, seed=seed, num_completions=1)
    points, _ = compute_rewards_for_completions([correctness], [1.0], rollout, examples)
    return float(points.mean())


def train(model, tokenizer, take_step, data, evaluate, seeds, *, steps, lr, eval_steps) -> None:
    """Take steps of one kind. Supervised ones end as soon as a third of the held-out answers are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    for step in range(1, steps + 1):
        examples = [next(data) for _ in range(PROMPTS_PER_STEP)]
        take_step(model, tokenizer, examples, next(seeds))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % eval_steps == 0 or step == steps:
            right = evaluate()
            print(f"{take_step.__name__} {step}: accuracy {right:.3f}", flush=True)
            if take_step is supervised_step and right >= 0.33:
                return


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise over a tenth of the steps, then fall as a cosine."""
    warmup = math.ceil(0.1 * steps)
    cosine = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return (step + 1) / warmup if step < warmup else cosine


def shuffled(examples: list[dict], seed: int):
    """Yield examples without end, in a new order every epoch."""
    for epoch in itertools.count():
        order = list(examples)
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cold_start_steps", type=int, default=300, help="supervised steps, at most")
    parser.add_argument("--max_steps", type=int, default=300, help="steps of each phase, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/minimal"))
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    model, tokenizer = load_policy(ModelConfig())         # in evaluation mode: no dropout
    examples = load_examples("arithmetic", seed=flags.seed)
    held_out = load_examples("arithmetic", "test", limit=256, seed=flags.seed)
    evaluate = partial(accuracy, model, tokenizer, held_out, seed=flags.seed << 32)
    seeds = itertools.count((flags.seed << 32) + 1)       # of the sampling of each step
    steps = min(flags.cold_start_steps, flags.max_steps)
    data = shuffled(examples, flags.seed)
    train(model, tokenizer, supervised_step, data, evaluate, seeds, steps=steps, lr=1e-3, eval_steps=5)
    data = shuffled(examples, flags.seed + (steps > 0))   # another order than that of the demonstrations
    steps = min(math.ceil(1.6 * len(examples) / PROMPTS_PER_STEP), flags.max_steps)
    train(model, tokenizer, grpo_step, data, evaluate, seeds, steps=steps, lr=4e-4, eval_steps=15)
    save_policy(model, tokenizer, flags.output_dir / "final")


if __name__ == "__main__":
    main()
