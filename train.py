"""
GRPO and supervised training of a language model.

    python train.py --use_grpo --num_completions_per_prompt 4      a demonstration that needs nothing else
    python train.py --help                                         every flag

Reading order: train (the loop), grpo_training_step (what it is about), supervised_training_step, then how a run is set up.
A run goes through phases: cold_start and grpo with --use_grpo, else supervised. They share everything but the step.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from checkpoint import latest_checkpoint, restore_counters, restore_phase, save_checkpoint
from config import Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig, parse_config  # noqa: F401
from data import ShuffledBatches
from devices import best_device, peak_memory_gb
from grpo import compute_group_advantages, kl_penalty, policy_loss
from infer import evaluate
from logprobs import completion_log_probs, micro_batches
from model import frozen_copy, load_policy, load_tokenizer, save_policy
from prepare import (
    check_positions, fit_prompts, load_data, load_reward_functions, start_up_check, validate_demonstrations,
    validate_grpo_setup,
)
from rewards import compute_rewards_for_completions
from runs import RunFolder, StopOnCtrlC, accuracy_text, completion_records
from sample import Rollout, demonstrations_as_rollout, sample_completions_for_prompts


@dataclass
class Phase:
    """A stretch of training with one kind of step, an optimiser and a schedule of its own."""

    name: str                   # cold_start, supervised or grpo
    take_step: Callable
    steps: int
    learning_rate: float


@dataclass
class Run:
    """Everything that a run is. What changes during it: the model, and the fields from `phase` on."""

    config: Config
    folder: RunFolder
    device: torch.device
    model: torch.nn.Module
    tokenizer: object
    reward_functions: list
    train_set: list
    eval_set: list
    phases: list[Phase]
    shared_prompt: bool = True                            # pack siblings behind one prompt; the start-up check decides
    phase: int = 0                                        # index into phases
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    saved_state: dict = field(default_factory=dict)       # of the checkpoint to go on from
    batches: ShuffledBatches | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: object = None
    reference: torch.nn.Module | None = None              # frozen; None where nothing asks for it


def train(config: Config) -> None:
    """Train as configured: set up, go through the phases, save the policy to <output_dir>/final."""
    learn(set_up(config))


def learn(run: Run) -> None:
    """The loop. Ctrl-C ends it after the current step with a checkpoint to go on from."""
    training = run.config.training
    run.folder.open(run.step)
    with run.folder as folder, StopOnCtrlC() as ctrl_c:
        if run.step == 0:
            log_evaluation(run)
        while run.phase < len(run.phases):
            phase = run.phases[run.phase]
            begin_phase(run, phase)
            bar = folder.progress.add_task(phase.name, total=phase.steps)
            while run.phase_step < phase.steps and not ctrl_c.pressed:
                metrics, completions = phase.take_step(run, next(run.batches))
                run.step += 1
                run.phase_step += 1
                log_step(run, phase, metrics, completions)
                folder.progress.update(bar, completed=run.phase_step)
                if due(run.phase_step, training.eval_steps) or run.phase_step == phase.steps:
                    accuracy = log_evaluation(run)
                    if phase.name == "cold_start" and accuracy >= training.cold_start_accuracy:
                        phase.steps = run.phase_step      # it has learned what it is there for
                if due(run.phase_step, training.save_steps) and run.phase_step < phase.steps:
                    save_checkpoint(run)
            if run.phase_step < phase.steps:
                folder.say(f"stopped at step {run.step}, saved to {save_checkpoint(run)}")
                folder.say(f"continue with: python train.py --output_dir {folder.path} --resume")
                return
            run.phase, run.phase_step, run.optimizer = run.phase + 1, 0, None
            save_checkpoint(run)
        save_policy(run.model, run.tokenizer, folder.path / "final")
        folder.sum_up()


def grpo_training_step(run: Run, examples: list[dict]) -> tuple[dict, list[dict]]:
    """Sample a group for each prompt, score it, push towards those that beat their siblings. Returns metrics, completions."""
    grpo, started = run.config.grpo, time.perf_counter()
    num_prompts, group_size = len(examples), grpo.num_completions_per_prompt
    seed = (run.config.training.seed << 32) + run.step + 1                       # evaluations use step 0's
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(run.model, run.tokenizer, prompts, grpo, seed=seed)
    num_rows = len(rollout.completions)
    assert num_rows == num_prompts * group_size, f"{num_rows=} {num_prompts=} {group_size=}"
    assert len(rollout.prompt_ids) == num_prompts, f"every group has one prompt: {len(rollout.prompt_ids)=} {num_prompts=}"
    sampled = time.perf_counter()

    rewards, per_function = compute_rewards_for_completions(
        run.reward_functions, grpo.weights, rollout, examples, on_error=grpo.reward_errors
    )                                                                            # (P, G) points
    advantages = compute_group_advantages(
        rewards, baseline=grpo.baseline, scale="group" if grpo.normalize_advantages else "none", epsilon=grpo.advantage_epsilon
    ).float()                                                                    # (P, G)
    assert advantages.shape == rewards.shape == (num_prompts, group_size), f"{advantages.shape=} {rewards.shape=}"
    if grpo.baseline in ("group_mean", "leave_one_out"):
        off_centre, largest = float(advantages.sum(dim=1).abs().max()), float(advantages.abs().max())
        assert off_centre <= 1e-3 * max(1.0, largest), f"siblings' advantages must add up to 0: {off_centre=} {largest=}"
    tied = (advantages == 0).all(dim=1)                                          # (P,) equal rewards have nothing to teach

    losses = add_up_policy_gradient(run, rollout, advantages)
    if run.phase_step == 0:
        deviation = losses["ratio_deviation"]
        assert deviation < 0.01, f"sampler and trainer disagree: on the first step ratios are 1, not off by {deviation}"
    grad_norm = update(run)

    finished = time.perf_counter()
    metrics = losses | {
        "mean_reward": float(rewards.nanmean()),
        "mean_advantage": float(advantages.mean()),
        "std_advantage": float(advantages.std()),
        "tied_groups": float(tied.float().mean()),
        "unscored": float(rewards.isnan().float().mean()),
        "completion_tokens": float(rollout.completion_mask.sum()) / num_rows,
        "truncated": float((~rollout.finished).float().mean()),
        "grad_norm": grad_norm,
        "sampling_seconds": sampled - started,
        "training_seconds": finished - sampled,
        "step_seconds": finished - started,
    } | {f"reward/{name}": float(points.nanmean()) for name, points in per_function.items()}
    return metrics, completion_records(examples, rollout, rewards, per_function, advantages)


def add_up_policy_gradient(run: Run, rollout: Rollout, advantages: torch.Tensor) -> dict:
    """Gradient of the whole step's loss, one micro-batch after the other. advantages (P, G). Returns the loss and its parts."""
    grpo, max_tokens = run.config.grpo, run.config.training.max_tokens_per_forward
    # Tied groups are left out of the passes unless the KL term needs them; the denominators count them.
    needed = (advantages != 0).any(dim=1) | (run.reference is not None)          # (P,)
    rows = needed.repeat_interleave(advantages.shape[1]).nonzero()[:, 0]
    num_tokens, num_forwarded = int(rollout.completion_mask.sum()), int(rollout.completion_mask[rows].sum())
    per_row = advantages.reshape(-1)                                             # (B,), siblings adjacent as in the rollout
    policy = dict(**grpo.policy, shared_prompt=run.shared_prompt)

    losses = {"policy_loss": 0.0, "entropy": 0.0, "clip_fraction": 0.0, "ratio_deviation": 0.0}
    for part in micro_batches(rollout, rows, max_tokens, run.shared_prompt):     # any split gives the same gradient
        old_logp, mask, part_advantages = (
            tensor[part].to(run.device) for tensor in (rollout.sampling_logp, rollout.completion_mask, per_row)
        )
        new = completion_log_probs(run.model, rollout, part, **policy)
        loss, stats = policy_loss(
            new.logp, old_logp, part_advantages, mask, loss_type=grpo.loss_type, num_tokens=num_tokens,
            num_sequences=len(per_row), max_tokens=grpo.generation_max_length, clip_low=grpo.clip_low, clip_high=grpo.clip_high,
        )
        if run.reference:
            with torch.no_grad():
                reference_logp = completion_log_probs(run.reference, rollout, part, **policy).logp
            kl = kl_penalty(new.logp, reference_logp, ratio=(new.logp - old_logp).exp()).sum() / num_tokens
            loss = loss + grpo.kl_coef * kl
            losses["kl"] = losses.get("kl", 0.0) + kl.item()
        loss.backward()
        losses["policy_loss"] += loss.item()
        losses["entropy"] += new.entropy.detach().sum().item() / num_forwarded
        losses["clip_fraction"] += stats["clip_fraction"].item()
        losses["ratio_deviation"] += stats["ratio_deviation"].item()
    return losses


def supervised_training_step(run: Run, examples: list[dict]) -> tuple[dict, list[dict]]:
    """Make demonstrations likelier: REINFORCE with advantage 1 on completions that somebody else wrote."""
    started = time.perf_counter()
    batch = demonstrations_as_rollout(run.model, run.tokenizer, examples)
    num_tokens = int(batch.completion_mask.sum())
    metrics = {"loss": 0.0, "entropy": 0.0}
    for part in micro_batches(batch, torch.arange(len(examples)), run.config.training.max_tokens_per_forward):
        new = completion_log_probs(run.model, batch, part, shared_prompt=run.shared_prompt)
        mask = batch.completion_mask[part].to(run.device)
        one = torch.ones(len(part), device=run.device)
        loss, _ = policy_loss(new.logp, new.logp.detach(), one, mask, loss_type="reinforce", num_tokens=num_tokens)
        loss.backward()
        metrics["loss"] += loss.item()
        metrics["entropy"] += new.entropy.detach().sum().item() / num_tokens
    grad_norm = update(run)
    seconds = time.perf_counter() - started
    metrics |= {"grad_norm": grad_norm, "completion_tokens": num_tokens / len(examples)}
    return metrics | {"training_seconds": seconds, "step_seconds": seconds}, []


def update(run: Run) -> float:
    """One optimiser step on the gradients that were added up. Returns their norm before clipping."""
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(parameters, run.config.training.max_grad_norm, error_if_nonfinite=True)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad()
    return float(norm)


# ---- the life of a run ---------------------------------------------------------------------------------------------


def begin_phase(run: Run, phase: Phase) -> None:
    """A new optimiser, schedule, data order and, where the KL term asks for one, reference; or the saved ones."""
    training = run.config.training
    run.batches = ShuffledBatches(run.train_set, training.batch_size, training.seed + run.phase)
    run.optimizer = torch.optim.AdamW(
        run.model.parameters(), lr=phase.learning_rate, betas=(0.9, training.adam_beta2), weight_decay=training.weight_decay,
        fused=True,
    )
    warmup = math.ceil(training.warmup_ratio * phase.steps)
    factor = partial(learning_rate_factor, steps=phase.steps, warmup=warmup, schedule=training.lr_schedule)
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, factor)
    if phase.name == "grpo" and run.config.grpo.kl_coef > 0 and run.reference is None:
        run.reference = frozen_copy(run.model)
    if not restore_phase(run) and phase.name == "grpo":
        run.folder.say("the loss stays near 0 by construction (siblings' advantages cancel): watch reward and entropy")


def learning_rate_factor(step: int, *, steps: int, warmup: int, schedule: str) -> float:
    """Share of the peak learning rate at a step, counted from 0. It is never 0: no step is for nothing."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]


def set_up(config: Config) -> Run:
    """Everything that comes before the first step. Raises ValueError, one line, for what the user has to change."""
    device = best_device()
    folder = RunFolder(config)
    functions = load_reward_functions(config)
    train_set, eval_set = load_data(config)
    validate_demonstrations(config, train_set)
    checkpoint = latest_checkpoint(folder.path) if config.training.resume else None
    model_config = replace(config.model, model_path=str(checkpoint)) if checkpoint else config.model
    tokenizer = load_tokenizer(model_config)
    if config.training.use_grpo:
        validate_grpo_setup(config, tokenizer, train_set)
    train_set, eval_set = (fit_prompts(part, tokenizer, config, folder.say) for part in (train_set, eval_set))

    torch.manual_seed(config.training.seed)
    model, tokenizer = load_policy(model_config)
    run = Run(config, folder, device, model.to(device), tokenizer, functions, train_set, eval_set, plan(config, len(train_set)))
    check_positions(config, model, tokenizer, train_set + eval_set)
    folder.describe(model, device, run.phases, len(train_set), len(eval_set))
    run.shared_prompt = start_up_check(model, tokenizer, train_set, config, functions, folder.say)
    if checkpoint:
        restore_counters(run, checkpoint)
        if (checkpoint / "reference").exists():
            reference, _ = load_policy(replace(config.model, model_path=str(checkpoint / "reference")))
            run.reference = reference.to(device).eval().requires_grad_(False)
    return run


def plan(config: Config, num_examples: int) -> list[Phase]:
    """The phases of a run and their lengths in optimiser steps."""
    training = config.training
    limit = training.max_steps or math.inf
    steps = int(min(limit, math.ceil(training.num_epochs * num_examples / training.batch_size)))
    if not training.use_grpo:
        return [Phase("supervised", supervised_training_step, steps, training.learning_rate)]
    cold = int(min(limit, training.cold_start_steps))
    grpo = Phase("grpo", grpo_training_step, steps, training.learning_rate)
    return [Phase("cold_start", supervised_training_step, cold, training.cold_start_learning_rate), grpo] if cold else [grpo]


def log_evaluation(run: Run) -> float:
    """Measure the policy on the held-out problems, with the same random numbers every time. Returns the accuracy or NaN."""
    if not run.eval_set:
        return math.nan
    training, grpo = run.config.training, run.config.grpo
    result = evaluate(
        run.model, run.tokenizer, run.eval_set, grpo, seed=training.seed << 32, reward_functions=run.reward_functions,
        on_error=grpo.reward_errors, batch_size=training.batch_size * grpo.num_completions_per_prompt,  # as in a step
    )
    run.folder.log(run.step, "eval", result)
    run.folder.say(f"held-out accuracy at step {run.step}: {accuracy_text(result)}")
    return result.get("eval_accuracy", math.nan)


def log_step(run: Run, phase: Phase, metrics: dict, completions: list[dict]) -> None:
    """Write down a step, show it, and now and then show a whole completion."""
    metrics |= {"learning_rate": run.scheduler.get_last_lr()[0], "peak_memory_gb": peak_memory_gb(run.device)}
    run.folder.log(run.step, phase.name, metrics)
    run.folder.show_step(phase.name, run.phase_step, phase.steps, metrics)
    run.folder.show_completions(run.step, completions, run.config)


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps happens now; never for 0."""
    return every > 0 and step % every == 0


def main(argv: list[str]) -> None:
    """The command line. A user's mistake is one line and exit code 2."""
    try:
        config = parse_config(argv)
        run = set_up(config)
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    if not config.training.check:
        learn(run)


if __name__ == "__main__":
    main(sys.argv[1:])
