"""
GRPO and supervised training of a language model.

    python train.py --use_grpo --num_completions_per_prompt 4      train the small built-in model to add:
                                                                   supervised first, then GRPO; no downloads
    python train.py --help                                         list all flags

Reading order: examples/minimal.py is a training step without options, in one short program. Here, read
grpo_training_step, the functions that it calls, and training_loop, which repeats it. Then read policy.py.

Shapes: P prompts, G completions per prompt, B = P*G rows, b rows in a micro-batch, T completion tokens.
Units: log-probabilities (logp) and KL are in nats; rewards have no unit.
    reference      a second model; the KL penalty keeps the policy close to it
    group          the G completions of one prompt, which are compared with each other
    score          of a completion: the weighted sum of what the reward functions return for it. In
                   metrics.jsonl, mean_reward is its mean
    reward         the score after --reward_combination, --reward_clip and --overlong
    zero variance  the rewards of a group are equal: its advantages are 0 (tied_groups in metrics.jsonl)
    rollout        completions, and the logp of their tokens when they were sampled
    experience     a rollout with everything that its updates need: advantages, old_logp, reference_logp
    batch          the rows of one update, with the weight of each token in the loss
    update         one optimiser step: what --max_steps and step in metrics.jsonl count. A training step is
                   one rollout and the updates on it, by default one update
    phase          a part of a run: grpo, a supervised cold_start before it, or supervised
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

from runs.command_line import parse_config  # before torch: runs/__init__.py sets environment variables

import torch

from config import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig
from engine.devices import shutdown
from environments.messages import encode_turns
from experience import (
    Batch, Experience, Groups, compute_experience, demonstrations_as_experience, minibatches, sampled_kl,
    shape_rewards,
)
from grpo import CENTERED_BASELINES, compute_group_advantages, policy_loss, value_loss, weighted_loss
from logprobs import LogProbs
from runs.errors import exit_on_errors
from runs.groups import sample_and_score, summarize_groups, summarize_updates
from runs.run import Run
from runs.setup import set_up, validate_grpo_setup
from sample import demonstrations_as_rollout
from sources.settings import resumed

__all__ = [
    "Config", "DataConfig", "GRPOConfig", "ModelConfig", "TrainingConfig", "grpo_training_step",
    "supervised_training_step", "train", "validate_grpo_setup",
]
VALUE_COEF = 0.1                # coefficient of value_loss


def grpo_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Sample a group for each prompt, and make completions with rewards above the group's mean more likely.

        A      (reward - mean(group)) / std(group)        the baseline is the group's mean, not a critic
        ratio  exp(logp - old_logp)                       policy now / policy that sampled
        loss   sum over tokens of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) * weight

    By default the weight of a token is 1 / number of tokens in the update; grpo.token_weights has the
    alternatives. grpo_loss adds the KL penalty and other terms. Returns metrics and the experience.
    """
    config, policy, progress = run.config.grpo, run.policy, run.progress
    P, G = len(examples), config.num_completions_per_prompt

    # 1. Sample G completions of each prompt, and compute their rewards (P, G).
    started = time.perf_counter()
    groups = sample_groups(run, examples)
    require(groups.rewards.shape == (P, G), f"{groups.rewards.shape=} {P=} {G=}")
    sampling_seconds = time.perf_counter() - started

    # 2. Compare each completion with the other completions of its group.
    advantages = compute_group_advantages(                                       # (P, G)
        groups.rewards, baseline=config.baseline, scale=config.scale, global_mean=progress.mean_of_rewards)
    if config.baseline in CENTERED_BASELINES:
        off_center = float(advantages.sum(dim=1).abs().max() / advantages.abs().max().clamp(min=1))
        require(off_center <= 1e-3, f"the advantages of a group must sum to 0: {off_center=}")

    # 3. Compute what stays constant during the updates, (B, T) each: mask, old_logp and advantages. Flags
    #    add the reference's logp, the KL in the reward and importance weights. With a value head, its
    #    advantages (GAE) replace those of the group.
    experience = compute_experience(groups, advantages, config, policy, run.reference)

    # 4. Update the policy: once by default, else on every minibatch of each of the --ppo_epochs.
    loss_fn = partial(grpo_loss, config)
    kl_reference = run.reference if config.exact_kl else None        # forwarded with every micro-batch
    seed = (run.config.training.seed << 32) + progress.step          # of the shuffled minibatches
    policy_has_changed, updates = False, []
    for rows in islice(minibatches(config, P * G, seed), run.updates_left):
        batch = experience.batch(rows, config.aggregation, max_tokens=config.generation_max_length)
        stats = policy.forward_backward(batch, loss_fn, reference=kl_reference)
        if not policy_has_changed:
            policy.require_ratios_of_1(
                experience.metrics.get("sampler_deviation", stats["ratio_deviation"]))
        stats |= policy.optimizer_step(run.config.training.max_grad_norm)
        policy_has_changed |= stats["grad_norm"] > 0 and not stats["skipped"]
        updates.append(stats)
        progress.count(stats)
        move_reference(run, stats)

    metrics = summarize_groups(groups, experience) | summarize_updates(updates)
    return metrics | {"sampling_seconds": sampling_seconds}, experience


def sample_groups(run: Run, examples: list[dict]) -> Groups:
    """Sample and score a group for each example; --dynamic_sampling replaces zero-variance groups."""
    groups = sample_once(run, examples, attempt=0)
    for attempt in range(1, run.config.grpo.dynamic_sampling + 1):               # arXiv:2503.14476 sec. 3.2
        no_signal = groups.without_signal(run.config.grpo)           # (P,); kept after the last attempt
        if not no_signal.any():
            break
        new_examples = run.batches.take(int(no_signal.sum()))
        groups = groups.replace(no_signal, sample_once(run, new_examples, attempt))
    return groups


def sample_once(run: Run, examples: list[dict], attempt: int) -> Groups:
    """Sample and score a group for each example, and add the rewards to the mean over the run."""
    config, progress = run.config.grpo, run.progress
    seeds = [(run.config.training.seed, progress.step, attempt, p) for p in range(len(examples))]
    groups = sample_and_score(run.policy, examples, seeds, config, **run.scoring)
    groups = replace(groups, rewards=shape_rewards(config, groups))
    progress.add_rewards(groups.rewards)                  # for --baseline global_mean
    return groups


def grpo_loss(config: GRPOConfig, new: LogProbs, batch: Batch) -> tuple[dict, dict]:
    """Compute the terms of the loss for the rows of a micro-batch, under the current policy.

        loss = policy_loss + kl_coef * KL - entropy_coef * entropy + VALUE_COEF * value_loss

    By default KL is estimated by k3 * ratio, whose expected gradient is that of KL(policy || reference).

    new      (b, T) log-probabilities, entropy and values, with gradient
    batch    (b, T) what was computed before the updates, and the weight of each token in the loss
    returns  terms, which are scalars whose sum is the loss; and metrics to log: tensors (b, T) are averaged
             over all forwarded tokens, scalars are added up over the micro-batches
    """
    mask, weights = batch.mask, batch.weights
    loss, metrics = policy_loss(
        new.logp, batch.old_logp, batch.advantages, mask, weights, **config.loss_arguments)
    terms = {"policy_loss": loss}
    metrics["entropy"] = new.entropy
    if config.kl_term:
        kl = new.kl if config.exact_kl else sampled_kl(new.logp, batch, config)  # (b, T)
        metrics["kl"] = kl
        terms["kl_term"] = config.kl_coef * weighted_loss(kl, weights)
    if config.entropy_coef:
        terms["entropy_term"] = -config.entropy_coef * weighted_loss(new.entropy, weights)
    if config.use_value_head:
        error = value_loss(new.values, batch.old_values, batch.returns, mask, weights)
        metrics["value_loss"] = error
        terms["value_term"] = VALUE_COEF * error
    return terms, metrics


def move_reference(run: Run, stats: dict) -> None:
    """Move the reference, if there is one, after an update of the policy: see --reference_mode."""
    config, reference = run.config.grpo, run.reference
    if reference is None:
        return
    if config.reference_mode == "ema" and not stats["skipped"]:
        run.policy.update_reference(reference, config.ema_alpha)
    elif config.reference_mode == "periodic" and run.progress.phase_step % config.reference_update_freq == 0:
        run.policy.update_reference(reference, alpha=0.0)


def supervised_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Make one update on demonstrations. The loss is the mean of -logp over all tokens of the assistant."""
    policy = run.policy
    rollout = demonstrations_as_rollout(policy.model, policy.tokenizer, examples, encode=encode_turns)
    experience = demonstrations_as_experience(examples, rollout)
    batch = experience.batch(torch.arange(len(examples)))
    stats = policy.forward_backward(batch, supervised_loss)
    stats |= policy.optimizer_step(run.config.training.max_grad_norm)
    run.progress.count(stats)
    return stats | {"completion_tokens": int(batch.mask.sum()) / len(examples)}, experience


def supervised_loss(new: LogProbs, batch: Batch) -> tuple[dict, dict]:
    """Compute the loss of demonstrations, the sum of -logp * weight over tokens; and the entropy, to log."""
    return {"loss": weighted_loss(-new.logp, batch.weights)}, {"entropy": new.entropy}


def train(config: Config, *, on_step: Callable | None = None, **objects) -> tuple:
    """Train a model, and return it with its tokenizer.

    on_step  called as on_step(run, metrics, experience) after each step
    objects  reward_functions, dataset, ...: arguments of set_up
    """
    if config.training.check:
        raise ValueError("check: is for the command line, train.py --check")
    run = set_up(resumed(config), **objects)
    training_loop(run, on_step)
    return run.policy.model, run.policy.tokenizer


def training_loop(run: Run, on_step: Callable | None = None) -> None:
    """Run all phases step by step, and write the trained model to final/ in the run folder.

    evaluation    before the first step of a new run, every --eval_steps updates, and at the end of a phase
    checkpoint    every --save_steps updates, at the end of a phase, when the run stops, and when a step
                  raises before its first update: then it holds the state before that step
    stop          after the current step, on Ctrl-C, SIGTERM or SIGHUP; --resume continues the run
    """
    if not run.phases_left:                               # the run is complete
        return
    with run.started() as stop_requested:
        for phase in run.phases_left:
            run.begin_phase()
            take_step = grpo_training_step if phase.name == "grpo" else supervised_training_step
            run.evaluate_if_due()
            while not phase.is_over(run.progress):
                stopping = stop_requested()
                run.save_if_due(stopping)
                if stopping:
                    return
                with run.saved_on_error():
                    started = time.perf_counter()
                    metrics, experience = take_step(run, next(run.batches))
                    metrics["step_seconds"] = time.perf_counter() - started
                run.log_step(metrics, experience, on_step)
                run.evaluate_if_due()
            run.end_phase()


def require(condition: bool, message: str) -> None:
    """Raise AssertionError unless the condition holds. Unlike assert, this also works under python -O."""
    if not condition:
        raise AssertionError(message)


def main(argv: list[str] | None = None) -> None:
    """Set up the run that flags describe (None: sys.argv); then train, or with --check print its rewards."""
    with exit_on_errors("train.py"):
        run = set_up(parse_config(sys.argv[1:] if argv is None else argv))
        if run.config.training.check:
            from analysis.reward_linter import print_rewards  # imported for --check only

            print_rewards(run)
            return shutdown()
    with exit_on_errors("train.py", mistakes=()):         # from here on a ValueError is a bug
        training_loop(run)
    shutdown()


if __name__ == "__main__":
    main()
