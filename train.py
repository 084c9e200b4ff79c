"""
GRPO and supervised training of a language model.

    python train.py --use_grpo --num_completions_per_prompt 4      a small model learns sums: a supervised
                                                                   start, then GRPO; without downloads
    python train.py --help                                         every flag

Reading order here: grpo_training_step; what it calls, in order; then learn, the loop around the steps.
examples/minimal.py is the same as one short program, with the settings of the command above.

Shapes: P prompts, G completions of each, B = P*G rows, b rows of a micro-batch, T completion tokens.
Units: points for scores and rewards, nats for log-probabilities (logp) and KL.
    score          weighted sum of what the reward functions give to a completion
    reward         what is learned from: the score after --reward_combination, --reward_clip, --overlong
    tied           of a group: its rewards are equal, or fewer than two, so that its advantages are 0
    rollout        completions, and their logp when they were sampled
    experience     a rollout with advantages, old_logp (usually logp when sampled) and the reference's logp
    update         one optimiser step; a training step makes one or several. All counters and flags named
                   step(s) count updates
    phase          grpo, after a supervised cold_start if there is one; or supervised alone
    run            policy, reference (another model that it stays close to), optimiser, data, progress
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial

from runs.command_line import parse_config  # first, see runs/__init__.py

import torch

from config import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig
from engine.devices import shutdown
from engine.errors import require
from engine.policy import follow_policy
from engine.sharding import sum_and_clip_gradient
from environments.messages import encode_turns
from experience import Experience, Groups, compute_experience, demonstrations_as_experience
from experience import minibatches, shape_rewards
from grpo import CENTERED_BASELINES, LOSSES, aggregate, compute_group_advantages, policy_loss, value_loss
from logprobs import LogProbs
from reward_functions.calling import wrap_reward_functions
from rewards import compute_rewards_for_completions
from runs.checkpoint import write_policy
from runs.errors import exit_on_errors, halved_when_out_of_memory
from runs.groups import replace_groups, sample_on_all_ranks, summarize_groups, summarize_updates
from runs.run import Run
from runs.setup import set_up, validate_grpo_setup
from sample import demonstrations_as_rollout
from sources.settings import resumed

__all__ = [
    "Config", "DataConfig", "GRPOConfig", "ModelConfig", "TrainingConfig", "grpo_training_step",
    "supervised_training_step", "train", "validate_grpo_setup",
]
VALUE_COEF = 0.1                # weight of value_loss, which is half of the squared error


def grpo_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Sample a group for each prompt, score it, make those above the group's mean more likely, others less.

        A      (reward - mean(group)) / std(group)        the group is the baseline: no critic
        ratio  exp(logp - old_logp)                       policy now / policy that sampled
        loss   mean over all tokens of -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    These are the defaults; grpo.py has the other choices. Returns metrics and the experience.
    """
    config = run.config.grpo

    # 1. Sample G completions of each prompt, and score them.
    started = time.perf_counter()
    groups = sample_groups(run, examples)
    sampling_seconds = time.perf_counter() - started

    # 2. Compare each completion with the others of its group.
    advantages = group_advantages(run, groups)                                   # (P, G)

    # 3. Add what all updates share: old_logp, and with their flags the reference's, values and weights.
    experience = experience_of(run, groups, advantages)

    # 4. Update the policy: once, or --ppo_epochs times on every minibatch (minibatches yields all epochs).
    updates = []
    for rows in minibatches(config, advantages.numel(), seed=run.minibatch_seed):
        losses = accumulate_gradients(run, experience, rows, config)
        run.require_first_ratios_of_1(experience, losses, updates)   # until an update has moved the policy
        updates.append(losses | optimizer_step(run, losses["total_loss"]))
        if run.progress.phase_step == run.phase.steps:    # optimizer_step has counted the update
            break

    metrics = summarize_groups(groups, experience) | summarize_updates(updates)
    return metrics | {"sampling_seconds": sampling_seconds}, experience


def sample_groups(run: Run, examples: list[dict]) -> Groups:
    """Sample and score a group for each example. --dynamic_sampling replaces tied ones, by new prompts."""
    def sample(examples: list[dict], attempt: int) -> Groups:
        work = partial(sample_and_score, run, seed=run.sampling_seed(attempt))   # of a slice, on each rank
        groups = sample_on_all_ranks(run.engine, run.ranks, work, examples)
        run.progress.add_rewards(groups.rewards)          # for --baseline global_mean
        return groups

    config, groups = run.config.grpo, sample(examples, attempt=0)
    for attempt in range(1, config.dynamic_sampling + 1):  # DAPO: arXiv:2503.14476 sec. 3.2
        tied = groups.without_signal(config)              # (P,); after the last attempt they stay
        if tied.any():
            groups = replace_groups(groups, tied, sample(run.batches.take(int(tied.sum())), attempt))
    P, G = len(examples), config.num_completions_per_prompt
    require(groups.rewards.shape == (P, G), f"{groups.rewards.shape=} {P=} {G=}")
    return groups


def sample_and_score(run: Run, examples: list[dict], *, seed: int, repeats: list[int]) -> Groups:
    """Sample and score the groups of this rank: its examples, and how often each prompt came before."""
    config = run.config.grpo
    rollout = run.sample_completions(examples, seed=seed, repeats=repeats)       # sample.py, or --engine
    functions, reports = wrap_reward_functions(run.reward_functions, rollout, config, run.trainer_state)
    scores, per_function = compute_rewards_for_completions(functions, config.weights, rollout, examples)
    rewards = shape_rewards(config, rollout, scores, per_function)
    return Groups(examples, rollout, scores, per_function, rewards, reports=reports)


def group_advantages(run: Run, groups: Groups) -> torch.Tensor:
    """Compute the advantages (P, G) of completions: 0 in tied groups. analysis/explain.py shows them too."""
    config = run.config.grpo
    advantages = compute_group_advantages(
        groups.rewards, baseline=config.baseline, scale=config.scale, global_mean=run.progress.mean_reward)
    if config.baseline in CENTERED_BASELINES:
        off_center = float(advantages.sum(dim=1).abs().max() / advantages.abs().max().clamp(min=1))
        require(off_center <= 1e-3, f"the advantages of a group must sum to 0: {off_center=}")
    return advantages


@halved_when_out_of_memory("max_tokens_per_forward")
def experience_of(run: Run, groups: Groups, advantages: torch.Tensor) -> Experience:
    """Return what all updates on a rollout share. Row p*G + g is completion g of prompt p."""
    return compute_experience(
        groups, advantages, run.config.grpo, run.engine, run.ranks, reference=run.reference,
        value_head=run.value_head)


@halved_when_out_of_memory("max_tokens_per_forward")
def accumulate_gradients(run: Run, experience: Experience, rows: torch.Tensor, config: GRPOConfig) -> dict:
    """Add up the gradient of one update over micro-batches. Returns total_loss, its terms and statistics.

    rows    completions of the experience. The denominators of the loss count all of them, so that
            micro-batches add up. Rows without a gradient, such as tied groups without KL, are not forwarded.
    """
    denominators = experience.denominators(rows, config.generation_max_length)   # for policy_loss
    with_gradient = rows[experience.has_gradient(rows, config)]
    micro_batches = run.engine.micro_batches(experience.rollout, with_gradient, run.ranks.size)
    results = []
    for micro_batch, is_real in run.ranks.in_lockstep(micro_batches):  # 0: only to keep ranks together
        current = run.engine.log_probs(
            experience.rollout, micro_batch, config.distribution,
            value_head=run.value_head,                    # None without --use_value_head
            reference=run.reference if config.exact_kl else None,
        )
        batch = experience.select(micro_batch, current.logp.device)
        terms = compute_loss_terms(current, batch, config, denominators)
        run.scaler.scale(terms["total_loss"] * is_real).backward()               # scales with float16 alone
        results.append({name: term.detach() * is_real for name, term in terms.items()})
    share_forwarded = int(experience.mask[with_gradient].sum()) / denominators["num_tokens"]
    return run.sum_terms(results, config.loss_terms, share_forwarded)


def compute_loss_terms(
    current: LogProbs, batch: Experience, config: GRPOConfig, denominators: dict
) -> dict[str, torch.Tensor]:
    """Compute the loss of some rows under the current policy, its terms and statistics, each a scalar.

        total_loss = policy_loss + kl_coef * KL - entropy_coef * entropy + VALUE_COEF * value_loss
        KL         = exp(logp - trainer_logp) * (exp(x) - x - 1), x = reference logp - logp, by default

    current  (b, T) log-probabilities, entropy, values under the current policy, with gradient
    batch    the same rows of the experience
    """
    mask = batch.mask                                                            # (b, T)
    denominators = denominators | {"group_tokens": batch.group_tokens}           # (b, 1)
    aggregation = LOSSES[config.loss_type].aggregation    # dapo: token_mean
    loss, terms = policy_loss(
        current.logp, batch.old_logp, batch.advantages, mask, weights=batch.importance_weights,
        **config.loss_arguments, **denominators)  # loss_type, clip_low, clip_high, ...; num_tokens, ...
    # Entropy and KL are logged as means over tokens; in the loss they are averaged as the policy loss is.
    terms |= {"policy_loss": loss, "entropy": aggregate(current.entropy, mask, "token_mean", **denominators)}
    if config.kl_in_loss:
        kl = current.kl if config.exact_kl else batch.sampled_kl(current.logp, config)
        terms["kl"] = aggregate(kl, mask, "token_mean", **denominators)
        loss = loss + config.kl_coef * aggregate(kl, mask, aggregation, **denominators)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * aggregate(current.entropy, mask, aggregation, **denominators)
    if config.use_value_head:
        terms["value_loss"] = value_loss(
            current.values, batch.old_values, batch.returns, mask, num_tokens=denominators["num_tokens"])
        loss = loss + VALUE_COEF * terms["value_loss"]
    return terms | {"total_loss": loss}


def optimizer_step(run: Run, loss: float) -> dict:
    """Take one optimiser step with the accumulated gradient. Returns grad_norm, before clipping, and skipped.

    A step whose loss or gradient is not finite is skipped: it counts, but parameters and schedule stay.
    """
    progress, scaler = run.progress, run.scaler_of_gradient          # run.scaler, if there is a gradient
    scaler.unscale_(run.optimizer)
    norm = sum_and_clip_gradient(run.parameters, run.config.training.max_grad_norm)      # of all ranks
    progress.step, progress.phase_step = progress.step + 1, progress.phase_step + 1
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if skipped:
        run.count_skipped(loss)
    else:
        scaler.step(run.optimizer)
        run.scheduler.step()
        progress.skipped_in_a_row = 0
    scaler.update()
    run.zero_gradient()
    follow_policy(run.reference, run.model, run.config.grpo, progress.phase_step, skipped=skipped)
    return {"grad_norm": norm, "skipped": int(skipped)}


def supervised_training_step(run: Run, examples: list[dict]) -> tuple[dict, Experience]:
    """Make demonstrations more likely: one update with the loss -logp, that is with advantage 1."""
    rollout = demonstrations_as_rollout(run.model, run.tokenizer, examples, encode=encode_turns)
    experience = demonstrations_as_experience(examples, rollout)
    config = run.config.grpo.with_supervised_loss
    losses = accumulate_gradients(run, experience, torch.arange(len(examples)), config)
    tokens = int(experience.mask.sum()) / len(examples)
    metrics = {"loss": losses["total_loss"], "entropy": losses["entropy"], "completion_tokens": tokens}
    return metrics | optimizer_step(run, losses["total_loss"]), experience


def train(config: Config, **objects) -> tuple:
    """Train, and return model and tokenizer. objects: reward_functions, dataset, ... as for set_up."""
    run = set_up(resumed(config), **objects)
    learn(run)
    return run.model, run.tokenizer


def learn(run: Run) -> None:
    """Take the steps of all phases, and write what they learned to final/ in the run folder.

    evaluation    before the first step of a new run, every eval_steps of a phase, and at its end
    checkpoint    every --save_steps, at the end of a phase, at a stop, and in front of a step that raises
    stop          Ctrl-C, SIGTERM or SIGHUP: after the current step

    What is due follows from run.progress, so a resumed run repeats an evaluation that raised.
    """
    if run.is_complete():
        return
    with run.started() as stop:
        for phase in run.phases[run.progress.phase :]:
            run.begin_phase(phase)
            take_step = grpo_training_step if phase.name == "grpo" else supervised_training_step
            while True:
                accuracy = run.log_evaluation() if run.evaluation_is_due() else math.nan
                if phase.is_over(run.progress.phase_step, accuracy):
                    break
                if stop.requested():
                    run.save_checkpoint(notify=True)
                    return
                run.save_if_due()
                take_and_log_step(run, take_step)
            run.end_phase()
            run.save_checkpoint()
        write_policy(run.model, run.tokenizer, run.folder.path / "final")
        run.print_summary()


def take_and_log_step(run: Run, take_step: Callable) -> None:
    """Take one training step, log it, and end the run if too many in a row were skipped."""
    run.seed_generators()
    with run.saved_on_error():
        started = time.perf_counter()
        metrics, experience = take_step(run, next(run.batches))
        metrics["step_seconds"] = time.perf_counter() - started
    with run.saved_on_error():                            # the step is complete: it will not be repeated
        run.log_step(metrics, experience)
    run.refuse_skipped_in_a_row()


def main(argv: list[str]) -> None:
    """Parse the flags and set up the run; then train, or with --check print its table of rewards."""
    with exit_on_errors("train.py"):
        run = set_up(parse_config(argv))
        if run.config.training.check:
            from analysis.reward_linter import print_points  # here: for this flag alone

            print_points(run)
            run.console.print("the start-up check is ok")
    if not run.config.training.check:
        with exit_on_errors("train.py", mistakes=()):
            learn(run)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
