"""
GRPO and supervised training of a language model.

    python train.py --use_grpo --num_completions_per_prompt 4      a demonstration that needs nothing else
    python train.py --help                                         every flag

Reading order: learn (the loop), grpo_training_step (what it is about) with add_up_gradient and loss_and_parts,
supervised_training_step. What comes before the first step is in runs/setup.py.
A run goes through phases: cold_start and grpo with --use_grpo, else supervised. They share everything but the step.
"""

import errno
import math
import sys
import time

import torch

from analysis.evaluation import evaluate
from analysis.explain import explain
from analysis.replay import replay
from config import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig  # noqa: F401
from engine.devices import all_sum, cut_graph, is_main, shutdown, peak_memory_gb
from engine.sharding import clip_gradient
from environments.conversations import EnvironmentRaised, describe_conversations
from experience import (
    Experience, describe_groups, log_probs_of_rollout, minibatches, passes, prepare_experience,
    sample_groups,
)
from grpo import LOSSES, adapt_kl_coefficient, aggregate, kl_penalty, policy_loss, value_loss
from logprobs import LogProbs, completion_log_probs
from model import precision_of, update_reference
from reward_functions.calling import RewardError
from runs.checkpoint import Diverged, NotSaved, save_checkpoint, save_final, saved_if_it_raises
from runs.command_line import parse_config
from runs.doctor import diagnose, mean_of
from runs.exit import StopOnSignal
from runs.phases import begin_phase
from runs.records import completion_records, held_out_text
from runs.run import Phase, Run
from runs.setup import keep_base, set_up, validate_grpo_setup  # noqa: F401
from sample import demonstrations_as_rollout


def train(config: Config) -> None:
    """Train as configured: set up, go through the phases, save the policy to <output_dir>/final."""
    learn(set_up(config))


def learn(run: Run) -> None:
    """The loop. Ctrl-C or SIGTERM ends it after the current step with a checkpoint to go on from."""
    training = run.config.training
    final = run.folder.path / "final"
    if run.phase == len(run.phases) and final.exists():
        run.folder.say(f"this run is complete; to go on from it: --model_path {final} and a new --output_dir")
        return
    run.folder.open(run.step)
    keep_base(run)
    with run.folder as folder, StopOnSignal() as stop:
        if run.step == 0:
            log_evaluation(run)
        while run.phase < len(run.phases):
            phase = run.phases[run.phase]
            begin_phase(run, phase)
            take_step = grpo_training_step if phase.name == "grpo" else supervised_training_step
            bar, measured = folder.progress.add_task(phase.name, total=phase.steps), -1
            while run.phase_step < phase.steps and not stop.asked():
                before, skipped = run.phase_step, run.skipped
                with saved_if_it_raises(run):
                    metrics, completions = take_step(run, next(run.batches))     # one optimiser step, or several on a rollout
                metrics["skipped"] = run.skipped - skipped
                log_step(run, phase, metrics, completions)
                folder.progress.update(bar, completed=run.phase_step)
                if due(before, run.phase_step, training.eval_steps):
                    with saved_if_it_raises(run):
                        accuracy, measured = log_evaluation(run), run.step
                    if phase.name == "cold_start" and accuracy >= training.cold_start_accuracy:
                        phase.steps = run.phase_step      # it has learned what it is there for
                        folder.progress.update(bar, total=phase.steps)
                if due(before, run.phase_step, training.save_steps) and run.phase_step < phase.steps:
                    try:
                        save_checkpoint(run)
                    except NotSaved as problem:           # perhaps there is room for the next one
                        folder.say(f"{problem}; going on without")
                if run.skipped_in_a_row >= training.max_skipped_steps:
                    raise Diverged(run, save_checkpoint(run))
            if run.phase_step < phase.steps:
                folder.say(f"stopped at step {run.step}, saved to {save_checkpoint(run)}")
                folder.say(f"continue with: python train.py --output_dir {folder.path} --resume")
                return
            if measured < run.step:
                with saved_if_it_raises(run):
                    log_evaluation(run)
            run.phase, run.phase_step, run.optimizer = run.phase + 1, 0, None
            save_checkpoint(run)
        save_final(run, final)
        folder.sum_up()


def grpo_training_step(run: Run, examples: list[dict]) -> tuple[dict, list[dict]]:
    """Sample a group for each prompt, score it, push towards those that beat their siblings. Returns metrics, completions.

    One optimiser step on the rollout, or with --ppo_epochs and --minibatch_size several.
    """
    grpo, started, first_step = run.config.grpo, time.perf_counter(), run.phase_step == 0
    groups = sample_groups(run, examples)
    rollout, num_rows = groups.rollout, len(groups.rollout.completions)
    assert groups.points.shape == (len(examples), grpo.num_completions_per_prompt), f"{groups.points.shape=} {len(examples)=}"
    assert len(rollout.completion_mask) == groups.points.numel() == num_rows, f"{rollout.completion_mask.shape=} {num_rows=}"
    sampled = time.perf_counter()

    experience, metrics = prepare_experience(run, rollout, groups.points)
    updates: list[dict] = []
    for rows in minibatches(run, num_rows):
        losses = add_up_gradient(run, experience, rows)
        if first_step and not updates:
            deviation, rounding = losses["ratio_deviation"], 0.01 if precision_of(run.model) == "float32" else 0.1
            assert not deviation >= rounding, f"sampler and trainer disagree: first ratios are 1, not off by {deviation}"
        if updates and 0 < grpo.max_policy_kl < losses["policy_kl"]:
            run.optimizer.zero_grad()                     # the policy has left the rollout behind
            break
        updates.append(losses | {"grad_norm": update(run, losses["total_loss"])})
        if run.phase_step == run.phases[run.phase].steps:
            break
    metrics = {name: mean_of(updates, name) for name in updates[0]} | metrics
    metrics |= {"policy_kl": updates[-1]["policy_kl"], "updates": len(updates)}
    if grpo.kl_target and math.isfinite(metrics["kl"]):
        run.kl_coef = metrics["kl_coef"] = adapt_kl_coefficient(
            run.kl_coef, metrics["kl"], target=grpo.kl_target, num_samples=num_rows, horizon=grpo.kl_horizon
        )
    finished = time.perf_counter()
    if groups.failures:
        run.folder.keep("reward_errors.jsonl", run.step, "grpo", groups.failures)
    metrics |= describe_groups(groups, experience) | describe_conversations(rollout) | {
        "sampling_seconds": sampled - started, "training_seconds": finished - sampled, "step_seconds": finished - started
    }
    after = log_probs_of_rollout(run, run.model, rollout) if run.folder.keeps_completions(run.step, len(updates)) else None
    return metrics, completion_records(
        groups.examples, rollout, groups.rewards, groups.per_function, experience.advantages, after
    )


def add_up_gradient(run: Run, experience: Experience, rows: torch.Tensor) -> dict:
    """Gradient of the loss of one update, one micro-batch after the other. Returns the loss and its parts.

    rows  which completions of the experience. The denominators count them all; what cannot change the gradient, such as
          a tied group where there is no KL term, is left out of the passes.
    """
    grpo, mask = run.config.grpo, experience.mask[rows]                          # (b, T)
    kl_in_loss = run.reference is not None and grpo.kl_in == "loss"
    to_all = kl_in_loss or grpo.entropy_coef > 0 or run.value_head is not None   # terms that do not need an advantage
    needed = mask.any(dim=1) & (to_all | (experience.advantages[rows] != 0).any(dim=1))
    counts = experience.counts(rows, grpo.generation_max_length)
    names = ["total_loss", "policy_loss", "entropy", "clip_fraction", "ratio_deviation", "policy_kl"]
    losses = dict.fromkeys(names + ["kl"] * kl_in_loss + ["value_loss"] * (run.value_head is not None), 0.0)
    for batch, counted in passes(run, experience.rollout, rows[needed]):
        new = completion_log_probs(
            run.model, experience.rollout, batch, **grpo.policy, shared_prompt=run.shared_prompt, value_head=run.value_head,
            reference=run.reference if kl_in_loss and grpo.estimator == "exact" else None,
        )
        part = experience.part(batch, new.logp.device)
        parts = loss_and_parts(run, new, part, experience.rollout.sampling_logp[batch], counts)
        run.scaler.scale(parts["total_loss"] * counted).backward()
        cut_graph(run.device)
        for name, value in parts.items():
            losses[name] += value.item() * counted
    losses = {name: all_sum(value) for name, value in losses.items()}
    # What describes the policy, not the loss, is a mean over the tokens that were looked at; none: nobody knows.
    share = int(mask[needed].sum()) / counts["num_tokens"]
    for name in "entropy", "ratio_deviation", "policy_kl":
        losses[name] = losses[name] / share if share else math.nan
    return losses


def loss_and_parts(run: Run, new: LogProbs, part: Experience, sampling_logp: torch.Tensor, counts: dict) -> dict:
    """The loss of some rows under the policy as it is now, and what it is made of, each a scalar. counts: denominators.

        total_loss = policy_loss + kl_coef * KL - entropy_coef * entropy + value_coef * value_loss
    """
    grpo, mask = run.config.grpo, part.mask                                      # (b, T)
    loss, parts = policy_loss(new.logp, part.old_logp, part.advantages, mask, **grpo.loss, **counts, weights=part.weights)
    parts |= {"policy_loss": loss, "entropy": aggregate(new.entropy, mask, "token_mean", **counts)}
    how = grpo.loss_aggregation or LOSSES[grpo.loss_type][1]
    if run.reference is not None and grpo.kl_in == "loss":
        ratio = torch.where(mask, new.logp - sampling_logp.to(mask.device), 0.0).clamp(-20, 20).exp()
        kl = {
            "exact": lambda: new.kl,
            "ratio_k3": lambda: kl_penalty(new.logp, part.reference_logp, estimator="k3", ratio=ratio),
            "k3": lambda: kl_penalty(new.logp, part.reference_logp, estimator="k3"),
            "k2": lambda: kl_penalty(new.logp, part.reference_logp, estimator="k2"),
        }[grpo.estimator]()
        parts["kl"] = aggregate(kl, mask, "token_mean", **counts)
        loss = loss + run.kl_coef * aggregate(kl, mask, how, **counts)
    if grpo.entropy_coef:
        loss = loss - grpo.entropy_coef * aggregate(new.entropy, mask, how, **counts)
    if run.value_head is not None:
        parts["value_loss"] = value_loss(
            new.values, part.old_values, part.returns, mask, num_tokens=counts["num_tokens"], clip=grpo.value_clip
        )
        loss = loss + grpo.value_coef * parts["value_loss"]
    return parts | {"total_loss": loss}


def supervised_training_step(run: Run, examples: list[dict]) -> tuple[dict, list[dict]]:
    """Make demonstrations likelier: REINFORCE with advantage 1 on completions that somebody else wrote."""
    started = time.perf_counter()
    batch = demonstrations_as_rollout(run.model, run.tokenizer, examples)
    num_tokens = int(batch.completion_mask.sum())
    metrics = {"loss": 0.0, "entropy": 0.0}
    for part, counted in passes(run, batch, torch.arange(len(examples))):
        new = completion_log_probs(run.model, batch, part, shared_prompt=run.shared_prompt)
        mask = batch.completion_mask[part].to(new.logp.device)
        one = torch.ones(len(part), device=mask.device)
        loss, _ = policy_loss(new.logp, new.logp.detach(), one, mask, loss_type="reinforce", num_tokens=num_tokens)
        run.scaler.scale(loss * counted).backward()
        cut_graph(run.device)
        metrics["loss"] += loss.item() * counted
        metrics["entropy"] += new.entropy.detach().sum().item() / num_tokens * counted
    metrics = {name: all_sum(value) for name, value in metrics.items()}
    metrics["grad_norm"] = update(run, metrics["loss"])
    seconds = time.perf_counter() - started
    metrics |= {"completion_tokens": num_tokens / len(examples), "training_seconds": seconds, "step_seconds": seconds}
    return metrics, completion_records(examples, batch) if run.skipped_in_a_row else []


def update(run: Run, loss: float) -> float:
    """One optimiser step on the gradients that were added up. Returns their norm before clipping.

    A step whose loss or gradient is not finite is skipped: it counts as a step and changes nothing.
    """
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    run.scaler.unscale_(run.optimizer)
    norm = clip_gradient(parameters, run.config.training.max_grad_norm)
    run.step, run.phase_step = run.step + 1, run.phase_step + 1
    if math.isfinite(loss) and math.isfinite(norm):
        run.scaler.step(run.optimizer)                    # the optimiser's step, once --precision float16 has had its say
        run.scheduler.step()
        run.skipped_in_a_row = 0
    else:
        run.skipped += 1                                  # a gradient beyond float16 is no fault until its scale is down to 1
        run.skipped_in_a_row += not (math.isfinite(loss) and run.scaler.get_scale() > 1)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=run.device.type != "xla")                # there, always to add is one program less
    if run.reference is not None:
        refresh_reference(run)
    cut_graph(run.device)
    return norm


def refresh_reference(run: Run) -> None:
    """Let the reference follow the policy, where --reference_mode asks for it."""
    grpo = run.config.grpo
    if grpo.reference_mode == "ema" and run.skipped_in_a_row == 0:
        update_reference(run.reference, run.model, grpo.ema_alpha)
    elif grpo.reference_mode == "periodic" and run.phase_step % grpo.reference_update_freq == 0:
        update_reference(run.reference, run.model, 0.0)


# ---- what is said and written ----------------------------------------------------------------------------------------


def log_evaluation(run: Run) -> float:
    """Measure the policy on the held-out problems, with the same random numbers every time. Returns the accuracy or NaN."""
    if not run.eval_set:
        return math.nan
    training, grpo = run.config.training, run.config.grpo
    result = evaluate(
        run.model, run.tokenizer, run.eval_set, grpo, seed=training.seed << 32, reward_functions=run.reward_functions,
        on_error=grpo.reward_errors, reward_timeout=grpo.reward_timeout, shared_prompt=run.shared_prompt,
        environment=run.environment,
        batch_size=grpo.generation_batch_size or training.batch_size * grpo.num_completions_per_prompt,        # as in a step
    )
    run.folder.log(run.step, "eval", result)
    run.folder.say(f"held out at step {run.step}: {held_out_text(result, run.config)}")
    return result.get("eval_accuracy", math.nan)


def log_step(run: Run, phase: Phase, metrics: dict, completions: list[dict]) -> None:
    """Write down a step, show it, and now and then show a whole completion."""
    metrics |= {"learning_rate": float(run.scheduler.get_last_lr()[0]), "peak_memory_gb": peak_memory_gb(run.device)}
    if phase.name == "grpo" and (advice := diagnose([*run.folder.history, metrics], run.config)):
        metrics["advice"] = advice
    run.folder.log(run.step, phase.name, metrics)
    run.folder.show_step(phase.name, run.phase_step, phase.steps, run.step, metrics)
    if phase.name == "grpo":
        run.folder.show_completions(run.step, metrics["updates"], completions)
    if metrics["skipped"]:
        run.folder.keep("skipped.jsonl", run.step, phase.name, completions)


def due(before: int, after: int, every: int) -> bool:
    """Whether something that happens every so many steps happened between two counts of steps; never for 0."""
    return every > 0 and after // every > before // every


def main(argv: list[str]) -> None:
    """The command line. A user's mistake is one line and exit code 2, a run that diverged one line and exit code 1."""
    try:
        config = parse_config(argv)
        if config.training.replay:
            replay(config, add_up_gradient)
            return
        run = set_up(config)
        if config.training.explain:
            explain(run, supervised_training_step, add_up_gradient, update)
    except ValueError as error:
        leave_with(f"error: {error}", 2)
    except (RewardError, EnvironmentRaised) as error:
        leave_with(str(error), 1)
    if config.training.check or config.training.explain:
        return
    try:
        learn(run)
    except (Diverged, NotSaved, RewardError, EnvironmentRaised) as error:
        leave_with(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        leave_with(f"{error.strerror}: {run.folder.path}; make room, then continue with --resume", 1)
    except KeyboardInterrupt:
        leave_with(f"stopped at once; continue from the last checkpoint with --output_dir {run.folder.path} --resume", 130)
    shutdown()


def leave_with(message: str, code: int) -> None:
    """End the program with one line, said by one process."""
    if is_main():
        print(f"train.py: {message}", file=sys.stderr)
    shutdown()
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
