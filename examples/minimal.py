"""
GRPO over the core files alone: a model of a million parameters learns to add. The same as `python train.py --use_grpo`.

    python examples/minimal.py --output_dir outputs/minimal

First it is shown sums with their answers, until a third of the held-out ones are right; then rewards alone teach it. The weights are
those of `train.py --use_grpo --engine plain` with the same flags, bit for bit. P prompts, G completions of each, B = P*G rows with the
completions of a prompt adjacent, b rows of a forward pass, T completion tokens.
"""

import argparse
import itertools
import math
import random
import sys
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
    num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
PROMPTS, TOKENS = 64, 2048                                # prompts of a step; tokens of a forward pass, with padding
REWARDS = {correctness: 1.0, reasoning_coherence: 0.2, explanation_quality: 0.1}


def accumulate_gradients(model, rollout: Rollout, advantages: torch.Tensor, loss_type: str) -> None:
    """Add up the gradient of the mean over all tokens of -min(ratio * A, clip(ratio) * A), with ratio = exp(logp - old_logp).

    The ratio is 1 before an update, so this is the gradient of -A * logp; "reinforce", for demonstrations, is that at once.
    advantages  A (B, 1). Rows with A = 0 have no gradient and are not forwarded, but their tokens count in the mean
    """
    mask, old_logp = rollout.completion_mask, rollout.sampling_logp              # (B, T)
    for rows in micro_batches(rollout, advantages[:, 0].nonzero()[:, 0], TOKENS):
        logp = completion_log_probs(model, rollout, rows, **CONFIG.policy).logp  # (b, T)
        loss, _ = policy_loss(
            logp, old_logp[rows], advantages[rows], mask[rows], loss_type=loss_type, num_tokens=int(mask.sum()))
        loss.backward()


def supervised_step(model, tokenizer, examples: list[dict], seed: int) -> None:
    """Make demonstrations more likely."""
    rollout = demonstrations_as_rollout(model, tokenizer, examples)
    accumulate_gradients(model, rollout, torch.ones(len(examples), 1), "reinforce")


def grpo_step(model, tokenizer, examples: list[dict], seed: int) -> None:
    """Sample a group for each prompt, score it, make completions above their group's mean likelier, the others less likely."""
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, CONFIG, seed=seed)
    rewards, _ = compute_rewards_for_completions(list(REWARDS), list(REWARDS.values()), rollout, examples)      # (P, G)
    advantages = compute_group_advantages(rewards)                               # (P, G)
    assert advantages.sum(dim=1).abs().max() < 1e-3, "advantages of a group must sum to 0"
    accumulate_gradients(model, rollout, advantages.float().view(-1, 1), "dapo")


def accuracy(model, tokenizer, examples: list[dict], seed: int) -> float:
    """Return the share of right answers, of one sampled for each problem. Its seed is used by no step."""
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, CONFIG, seed=seed << 32, num_completions=1)
    return float(compute_rewards_for_completions([correctness], [1.0], rollout, examples)[0].mean())


def shuffled(examples: list[dict], seed: int):
    """Yield examples without end, in a new order every epoch."""
    for epoch in itertools.count():
        order = list(range(len(examples)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from (examples[i] for i in order)


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise over a tenth of the steps, then fall as a cosine."""
    warmup = math.ceil(0.1 * steps)
    cosine = (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    return (step + 1) / warmup if step < warmup else cosine


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
    plan = [(supervised_step, flags.cold_start_steps, 1e-3, 5), (grpo_step, math.ceil(1.6 * len(examples) / PROMPTS), 4e-4, 15)]
    phases = [(take_step, min(most, flags.max_steps), *others) for take_step, most, *others in plan if most]
    seeds = itertools.count((flags.seed << 32) + 1)       # of the sampling of each step
    for phase, (take_step, steps, learning_rate, every) in enumerate(phases):
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, steps=steps: learning_rate_factor(step, steps))
        data = shuffled(examples, flags.seed + phase)
        for step in range(1, steps + 1):
            take_step(model, tokenizer, [next(data) for _ in range(PROMPTS)], next(seeds))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % every == 0 or step == steps:
                right = accuracy(model, tokenizer, held_out, flags.seed)
                print(f"{take_step.__name__} {step}: accuracy {right:.3f}", flush=True)
                if take_step is supervised_step and right >= 0.33:
                    break
    save_policy(model, tokenizer, flags.output_dir / "final")


if __name__ == "__main__":
    main()
