"""
Self-distillation: the teacher is the policy itself, with a solution in its prompt.

    loss  grpo_loss + COEF * mean((logp - teacher_logp)**2 / 2)

    python examples/ideas/self_distillation.py --max_steps 2 --model_path MODEL --dataset DATA

On policy its expected gradient is that of KL(policy || teacher): make one update per rollout. Needs
a column completion or answer, and a model that can use a solution; the built-in one cannot.

Two papers train on such a divergence alone, over the vocabulary. In SDPO (arXiv:2601.20802) the
prompt shows feedback or a right completion of the group, and the teacher is a moving average; in
OPSD (arXiv:2601.18734) the reference solution, and the initial policy. Users report a collapse, and
lower accuracy in mathematics (lasgroup/SDPO issues 25 and 26, RUCBM/G-OPD issue 10).
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from runs.command_line import parse_config  # before torch

from data import encode_prompt
from grpo import kl_penalty, weighted_loss
from sample import left_pad
from train import grpo_loss, train

COEF = 0.1


def with_solution(example: dict) -> dict:
    """Return an example whose prompt, or the last message in it, begins with a solution."""
    prompt, solution = example["prompt"], f"{example.get('completion') or example['answer']}\n"
    if isinstance(prompt, str):
        return example | {"prompt": solution + prompt}
    *earlier, last = prompt
    return example | {"prompt": [*earlier, last | {"content": solution + last["content"]}]}


def columns(run, experience, batch) -> dict:
    """Return the teacher's logp (b, T) of the same completions, without gradient."""
    policy = run.policy
    prompts = [encode_prompt(policy.tokenizer, with_solution(each)) for each in experience.examples]
    ids, mask = left_pad(prompts, policy.tokenizer.pad_token_id)
    of_teacher = replace(batch.rollout, prompt_ids=ids, prompt_mask=mask)
    return {"teacher_logp": policy.log_probs(of_teacher, batch.rows).logp}


def loss(grpo_config, new, batch) -> tuple[dict, dict]:
    """Add the distance from the teacher to the terms of grpo_loss."""
    terms, metrics = grpo_loss(grpo_config, new, batch)
    distance = kl_penalty(new.logp, batch.extra["teacher_logp"], estimator="k2")
    terms["distillation"] = COEF * weighted_loss(distance, batch.weights)
    return terms, metrics


if __name__ == "__main__":
    train(parse_config(["--use_grpo", *sys.argv[1:]]), columns=columns, loss=loss)
