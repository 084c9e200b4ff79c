"""
GRPO and supervised training of a language model.

    python train.py --use_grpo --num_completions_per_prompt 4      a small model, without downloads
    python train.py --help                                         every flag

Reading order: grpo_training_step, with sample_groups above it and accumulate_gradients below it; then learn,
the loop around the steps. Phases of a run: cold_start (supervised) and grpo with --use_grpo, else supervised.

Shapes: P prompts, G completions of each, B = P*G rows, b rows of a micro-batch, T completion tokens. Units:
rewards in points, log-probabilities (logp) and KL in nats. Scores are weighted sums of reward functions;
rewards are scores clipped and penalised. A group of equal rewards is tied. A rollout holds completions and
their logp when they were sampled; an experience adds what updates need: advantages, old_logp (usually that of
sampling), and logp of the reference, a copy of the policy that is frozen or follows it.
"""

import math
import sys
from functools import partial

from runs.command_line import exit_on_mistake, parse_config

if __name__ == "__main__":
    with exit_on_mistake("train.py"):                     # --help and mistakes: before the slow imports below
        CONFIG = parse_config(sys.argv[1:])

import torch

from analysis.explain import explain
from analysis.replay import replay
from config import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig  # noqa: F401
from engine.devices import shutdown
from engine.errors import require
from engine.sharding import clip_gradient
from environments.conversations import sample_with_environment
from experience import (
    Experience, Groups, compute_experience, demonstrations_as_experience, minibatches, replace_tied_groups,
    require_first_ratios_of_1, sample_on_all_ranks, shape_rewards,
)
from grpo import CENTERED_BASELINES, LOSSES, aggregate, compute_group_advantages, policy_loss, value_loss
from logprobs import LogProbs
from model import follow_policy
from reward_functions.calling import wrap_reward_functions
from rewards import compute_rewards_for_completions
from runs.checkpoint import write_final
from runs.exit import MOST_SKIPPED, Diverged, StopOnSignal, exit_on_run_errors, exit_on_setup_errors
from runs.fitting_flags import print_estimate
from runs.metrics import summarize_groups, summarize_updates, timed
from runs.phases import is_due
from runs.run import Run
from runs.setup import set_up, validate_grpo_setup  # noqa: F401
from sample import demonstrations_as_rollout


@timed("sampling_seconds")
def sample_groups(run: Run, examples: list[dict]) -> Groups:
    """Sample and score a group of completions for each prompt. --dynamic_sampling replaces tied groups."""
    config = run.config.grpo

    def sample_and_score(examples: list[dict], earlier: list[int], attempt: int) -> Groups:
        rollout = sample_with_environment(
            run.engine, run.environment, examples, config, seed=run.sampling_seed(attempt), earlier=earlier)
        functions, reports = wrap_reward_functions(run.reward_functions, rollout, config, run.trainer_state)
        scores, per_function = compute_rewards_for_completions(                  # (P, G)
            functions, config.weights, rollout, examples)
        rewards = shape_rewards(config, rollout, scores, per_function)
        return Groups(examples, rollout, scores, per_function, rewards, reports=reports)

    sample_all = partial(sample_on_all_ranks, run.engine, run.ranks, sample_and_score)
    groups, sampled = replace_tied_groups(sample_all, examples, run.batches.take, config.dynamic_sampling)
    run.progress.add_rewards(torch.cat([each.rewards for each in sampled]))      # of replaced groups as well
    return groups


@timed("step_seconds")
def grpo_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Sample a group for each prompt, score it, make completions above their group's mean more likely.

    The group's mean is the baseline, so no critic is needed. Returns metrics, and what was learned from.
    """
    config, progress = run.config.grpo, run.progress
    P, G = len(examples), config.num_completions_per_prompt

    # 1. Sample G completions of each prompt, and score them.
    groups = sample_groups(run, examples)
    require(groups.rewards.shape == (P, G), f"{groups.rewards.shape=} {P=} {G=}")
    require(len(groups.rollout.completion_ids) == P * G, f"{groups.rollout.completion_ids.shape=} {P=} {G=}")

    # 2. Compare each completion with the others of its group: by default (reward - mean) / std.
    advantages = compute_group_advantages(                                       # (P, G)
        groups.rewards, **config.advantage_options, global_mean=progress.mean_reward
    )
    off_center, largest = float(advantages.sum(dim=1).abs().max()), float(advantages.abs().max())
    centered = config.baseline in CENTERED_BASELINES
    require(off_center <= 1e-3 * max(1.0, largest) or not centered, f"rows must sum to 0: {off_center=}")

    # 3. Compute once what all updates need, in B rows p*G + g: old and reference logp, values, weights.
    experience = compute_experience(
        groups, advantages, config, run.engine, run.ranks, reference=run.reference,
        value_head=run.value_head, kl_coef=progress.kl_coef,
    )

    # 4. Update the policy once (all ratios are 1), or several times with --ppo_epochs and --minibatch_size.
    updates = []
    for rows in minibatches(config, P * G, seed=run.minibatch_seed):
        losses = accumulate_gradients(run, experience, rows, config)
        unchanged = run.device.type != "xla" or not updates      # XLA: zeros as gradients move weights too
        if unchanged and all(math.isnan(update["ratio_deviation"]) for update in updates):
            require_first_ratios_of_1(experience, losses["ratio_deviation"], run.engine)
        if updates and 0 < config.max_policy_kl < losses["policy_kl"]:
            run.optimizer.zero_grad()                     # too far from the policy that sampled
            break
        grad_norm = optimizer_step(run, losses["total_loss"])
        updates.append(losses | {"grad_norm": grad_norm})
        if progress.phase_step == run.phase.steps:
            break

    metrics = summarize_groups(groups, experience) | summarize_updates(updates)
    progress.adapt_kl_coef(metrics, config, num_samples=P * G)                   # with --kl_target
    return metrics, experience


def accumulate_gradients(run: Run, experience: Experience, rows: torch.Tensor, config: GRPOConfig) -> dict:
    """Add up the gradient of one update over micro-batches. Returns total_loss, its terms and statistics.

    rows    completions of the experience. The denominators of means count all of them, so that micro-batches
            add up. Rows without a gradient, such as tied groups without a KL term, are not forwarded.
    """
    denominators = experience.denominators(rows, config.generation_max_length)
    with_gradient = rows[experience.has_gradient(rows, config)]
    kl_in_loss = config.kl_coef > 0 and config.kl_in == "loss"
    micro_batches = run.engine.micro_batches(experience.rollout, with_gradient, run.ranks.size)
    results = []
    for micro_batch, counts in run.ranks.steps(micro_batches):       # counts: 0 keeps ranks in step
        new = run.engine.log_probs(
            experience.rollout, micro_batch, config.policy,
            value_head=run.value_head if config.use_value_head else None,
            reference=run.reference if kl_in_loss and config.estimator == "exact" else None,
        )
        batch = experience.select(micro_batch, new.logp.device)
        loss, terms = total_loss(new, batch, config, denominators, run.progress.kl_coef)
        run.scaler.scale(loss * counts).backward()
        results.append({name: value.detach() * counts for name, value in terms.items()})
    names = ["total_loss", "policy_loss", "entropy", "clip_fraction", "ratio_deviation", "policy_kl"]
    names += ["kl"] * kl_in_loss + ["value_loss"] * config.use_value_head
    sums = {name: run.ranks.sum(sum((terms[name].item() for terms in results), 0.0)) for name in names}
    share = int(experience.mask[with_gradient].sum()) / denominators["num_tokens"]
    for name in "entropy", "clip_fraction", "ratio_deviation", "policy_kl":      # of forwarded tokens, or NaN
        sums[name] = sums[name] / share if share else math.nan
    return sums


def total_loss(
    new: LogProbs, batch: Experience, config: GRPOConfig, denominators: dict, kl_coef: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of some rows under the current policy, and its terms and statistics, each a scalar.

        total_loss = policy_loss + kl_coef * KL - entropy_coef * entropy + value_coef * value_loss
        policy_loss = mean of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), by default

        KL = mean of ratio * (exp(d) - d - 1), d = reference logp - logp, by default

    with ratio = exp(logp - old_logp) and A the advantage; in the KL old_logp is always the policy's, and the
    ratio is at most importance_cap, if that is set. The other choices are in grpo.py.
    new    under the current policy, (b, T), with gradient;  batch  the same rows of the experience
    """
    mask = batch.mask                                                            # (b, T)
    loss, terms = policy_loss(
        new.logp, batch.old_logp, batch.advantages, mask, **config.loss, **denominators, weights=batch.weights
    )
    terms |= {"policy_loss": loss, "entropy": aggregate(new.entropy, mask, "token_mean", **denominators)}
    aggregation = config.loss_aggregation or LOSSES[config.loss_type].aggregation
    if config.kl_coef > 0 and config.kl_in == "loss":
        kl = new.kl if config.estimator == "exact" else batch.sampled_kl(new.logp, config)
        terms["kl"] = aggregate(kl, mask, "token_mean", **denominators)
        loss = loss + kl_coef * aggregate(kl, mask, aggregation, **denominators)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * aggregate(new.entropy, mask, aggregation, **denominators)
    if config.use_value_head:
        terms["value_loss"] = value_loss(
            new.values, batch.old_values, batch.returns, mask, num_tokens=denominators["num_tokens"]
        )
        loss = loss + config.value_coef * terms["value_loss"]
    return loss, terms | {"total_loss": loss}


@timed("step_seconds")
def supervised_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Make demonstrations more likely: one update with advantage 1 and the loss -logp * A."""
    rollout = demonstrations_as_rollout(run.model, run.tokenizer, examples)
    experience = demonstrations_as_experience(examples, rollout)
    losses = accumulate_gradients(run, experience, torch.arange(len(examples)), run.config.grpo.supervised)
    grad_norm = optimizer_step(run, losses["total_loss"])
    return {
        "loss": losses["total_loss"], "entropy": losses["entropy"], "grad_norm": grad_norm,
        "completion_tokens": int(experience.mask.sum()) / len(examples),
    }, experience


def optimizer_step(run: Run, loss: float) -> float:
    """Take one optimiser step with the accumulated gradient. Returns its norm before clipping.

    A step whose loss or gradient is not finite is skipped: it counts, and leaves weights and schedule.
    """
    progress, finite = run.progress, math.isfinite(loss)
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    scaler = run.scaler_for(parameters)
    scaler.unscale_(run.optimizer)
    norm = clip_gradient(parameters, run.config.training.max_grad_norm)
    progress.step, progress.phase_step = progress.step + 1, progress.phase_step + 1
    skipped = not (finite and math.isfinite(norm))
    if not skipped:
        scaler.step(run.optimizer)
        run.scheduler.step()
        progress.skipped_in_a_row = 0
    else:
        progress.skipped += 1
        progress.skipped_in_a_row += not finite or run.scaler.get_scale() <= 1   # else float16's scale falls
    scaler.update()
    run.optimizer.zero_grad(set_to_none=run.device.type != "xla")     # XLA: zeros avoid a recompilation
    if run.reference is not None:
        follow_policy(run.reference, run.model, run.config.grpo, progress.phase_step, skipped=skipped)
    run.ranks.end_program()
    return norm


def train(config: Config, **objects) -> tuple:
    """Train, and return model and tokenizer. objects: reward_functions, dataset, ... as for set_up."""
    run = set_up(config, **objects)
    learn(run)
    return run.model, run.tokenizer


def learn(run: Run) -> None:
    """Go through the phases of a run: steps, evaluations, checkpoints.

    Ctrl-C, SIGTERM or SIGHUP ends it after the current step, with a checkpoint to continue from.
    """
    training, progress, folder = run.config.training, run.progress, run.folder
    if progress.phase == len(run.phases) and (folder.path / "final").exists():
        run.console.print(f"this run is complete; a new one can begin with --model_path {folder.path}/final")
        return
    folder.open(progress.step)
    run.require_equal_ranks()
    run.save_base_of_adapter()
    with StopOnSignal(run.ranks) as stop, folder:
        if progress.step == 0:
            run.log_evaluation()
        for phase in run.phases[progress.phase :]:
            run.begin_phase(phase)
            take_step = grpo_training_step if phase.name == "grpo" else supervised_training_step
            evaluated_at = None
            while progress.phase_step < phase.steps and not stop.requested():
                before, skipped = progress.phase_step, progress.skipped
                with run.checkpoint_on_error():
                    metrics, experience = take_step(run, next(run.batches))
                with run.checkpoint_on_error():
                    run.log_step(metrics | {"skipped": progress.skipped - skipped}, experience)
                if is_due(before, progress.phase_step, phase.eval_steps):
                    accuracy, evaluated_at = run.log_evaluation(), progress.step
                    if phase.name == "cold_start" and accuracy >= training.cold_start_accuracy:
                        phase.steps = progress.phase_step                        # ends the phase
                if is_due(before, progress.phase_step, training.save_steps):
                    run.save_checkpoint_if_possible()
                if progress.skipped_in_a_row >= MOST_SKIPPED:
                    raise Diverged(progress.skipped_in_a_row, checkpoint=run.save_checkpoint())
            if progress.phase_step < phase.steps:
                run.save_and_print_how_to_resume()
                return
            if evaluated_at != progress.step:
                run.log_evaluation()
            run.end_phase()
            run.save_checkpoint()
        write_final(run.model, run.tokenizer, folder.path / "final")
        run.console.print_summary(folder.path)


def main(argv: list[str], config: Config | None = None) -> None:
    """Parse the flags, unless config is given; then replay, estimate, explain, check or train."""
    with exit_on_setup_errors():
        config = config or parse_config(argv)
        if config.training.replay or config.training.estimate:
            return replay(config, accumulate_gradients) if config.training.replay else print_estimate(config)
        run = set_up(config)
        if config.training.explain:
            explain(run, supervised_training_step, sample_groups, accumulate_gradients, optimizer_step)
    if not (config.training.check or config.training.explain):
        with exit_on_run_errors(run.folder):
            learn(run)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:], CONFIG)
