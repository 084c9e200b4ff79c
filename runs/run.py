"""
The state of a run: what stays the same, its progress, and the objects of the current phase; saving and
restoring it, and the log of a step.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch

from analysis.evaluation import evaluate
from config import Config, GRPOConfig
from engine.adapters import AdapterReference, has_adapter, merged_copy, trainable_parameters
from engine.devices import all_gather_object, num_processes, peak_memory_gb, process_rank
from engine.errors import RunError, first_line, is_out_of_memory
from engine.plain import Engine
from engine.policy import frozen_copy, move, save_policy
from engine.ranks import ManyRanks, OneRank
from engine.sharding import replicated_sums
from experience import Experience, log_probs_of_rollout
from grpo import adapt_kl_coefficient
from model import ValueHead
from runs.checkpoint import (
    NotSaved, load_optimizer_state, optimizer_state, random_states, read_state, reference_state,
    set_random_states, versions, weights_of, write_checkpoint,
)
from runs.console import RunConsole
from runs.doctor import diagnose
from runs.exit import StopOnSignal
from runs.folder import RunFolder
from runs.memory_estimate import less_memory
from runs.phases import Phase, is_due, make_optimizer, make_scheduler
from runs.records import completion_records, held_out_text
from sources.batches import ShuffledBatches

KL_HORIZON = 10_000             # completions over which --kl_target changes the weight by at most 20 %


@dataclass
class Progress:
    """Progress of a run, in plain numbers. A checkpoint saves all of it."""

    phase: int = 0                                        # index of the current phase
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    skipped: int = 0                                      # steps that were not finite and changed nothing
    skipped_in_a_row: int = 0                             # the latest of them
    kl_coef: float = 0.0                                  # points per nat; constant unless kl_target is set
    reward_sum: float = 0.0                               # points, of all completions of the steps so far
    reward_count: int = 0                                 # number of these completions

    def add_rewards(self, rewards: torch.Tensor) -> None:
        """Add rewards (P, G) to the running mean; NaN is left out."""
        scored = rewards[~rewards.isnan()]
        self.reward_sum += float(scored.sum())
        self.reward_count += len(scored)

    def adapt_kl_coef(self, metrics: dict, config: GRPOConfig, *, num_samples: int) -> None:
        """With --kl_target, adapt the KL penalty's weight to the KL of a rollout, and add it to metrics."""
        if config.kl_target and math.isfinite(metrics["kl"]):
            self.kl_coef = metrics["kl_coef"] = adapt_kl_coefficient(
                self.kl_coef, metrics["kl"], target=config.kl_target, num_samples=num_samples,
                horizon=max(KL_HORIZON, num_samples),
            )

    @property
    def mean_reward(self) -> float:
        """Return the mean reward of all completions of the steps so far, in points."""
        return self.reward_sum / max(1, self.reward_count)


@dataclass
class Run:
    """Everything that a run consists of."""

    # Constants.
    config: Config
    folder: RunFolder
    device: torch.device
    tokenizer: object
    reward_functions: list[Callable]
    environment: Callable | None
    train_set: Sequence[dict]
    eval_set: Sequence[dict]
    phases: list[Phase]
    ranks: OneRank | ManyRanks
    # The policy and its progress.
    engine: Engine
    progress: Progress = field(default_factory=Progress)
    make_optimizer: Callable | None = None                # the caller's, of named parameters; None: AdamW
    teacher: torch.nn.Module | None = None                # a reference that is no copy of the policy
    saved_state: dict = field(default_factory=dict)       # of a checkpoint, until its phase begins
    # Objects of the current phase.
    batches: ShuffledBatches | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))
    reference: torch.nn.Module | AdapterReference | None = None                  # None without a KL penalty
    value_head: ValueHead | None = None
    evaluated_at: int | None = None                       # step of the last evaluation
    seconds: dict[str, float] = field(default_factory=dict)               # durations, see runs/metrics.py

    @property
    def console(self) -> RunConsole:
        """Return the console of the run."""
        return self.folder.console

    @property
    def phase(self) -> Phase:
        """Return the current phase."""
        return self.phases[self.progress.phase]

    @property
    def minibatch_seed(self) -> int:
        """Return the seed of the order of minibatches in this step."""
        return (self.config.training.seed << 32) + self.progress.step

    def require_first_ratios_of_1(self, experience: Experience, losses: dict, updates: list[dict]) -> None:
        """Raise RunError if the policy is not the one that sampled, unless earlier updates have moved it.

        losses, updates  of accumulate_gradients now; of the updates on this rollout so far
        """
        moved = updates if self.device.type == "xla" else [u for u in updates if u["ratio_deviation"] >= 0]
        if not moved:                                     # NaN: no gradient; but on XLA zeros move weights
            deviation = experience.metrics.get("sampler_deviation", losses["ratio_deviation"])
            self.engine.require_ratios_of_1(deviation)

    def sampling_seed(self, attempt: int) -> int:
        """Return the seed of an attempt at sampling in this step (--dynamic_sampling makes several)."""
        return self.minibatch_seed + 1 + (attempt << 96)

    @property
    def model(self) -> torch.nn.Module:
        """Return the policy."""
        return self.engine.model

    def scaler_for(self, parameters: list) -> torch.amp.GradScaler:
        """Return the scaler; without a gradient, as in tied groups, which it rejects, one without effect."""
        has_gradient = any(p.grad is not None for p in parameters)
        return self.scaler if has_gradient else torch.amp.GradScaler(enabled=False)

    @property
    def trainer_state(self) -> SimpleNamespace:
        """Return the progress of the last phase for reward functions, in steps and epochs, as in TRL."""
        step = self.progress.phase_step if self.phase is self.phases[-1] else 0
        epoch = step and self.batches.position / len(self.train_set)
        return SimpleNamespace(global_step=step, max_steps=self.phases[-1].steps, epoch=epoch)

    def is_complete(self) -> bool:
        """Return whether the run has ended before, and say so."""
        final = self.folder.path / "final"
        complete = self.progress.phase == len(self.phases) and final.exists()
        if complete:
            self.console.print(f"this run is complete; a new one can begin with --model_path {final}")
        return complete

    @contextmanager
    def started(self):
        """Open the run folder; the context tells whether the user has asked to stop. Call on all ranks."""
        self.folder.open(self.progress.step)
        self.require_equal_ranks()
        self.save_base_of_adapter()
        with StopOnSignal(self.ranks) as stop, self.folder:
            yield stop

    def begin_phase(self, phase: Phase) -> None:
        """Create the objects of a phase: optimiser, schedule, data order, reference, value head.

        A run that is resumed within the phase restores them from saved_state.
        """
        training, config = self.config.training, self.config.grpo
        seed = training.seed + self.progress.phase
        self.batches = ShuffledBatches(self.train_set, training.batch_size, seed)
        modules = [self.model]
        if phase.name == "grpo" and config.kl_coef > 0 and self.reference is None:
            self.reference = self.teacher
            if self.teacher is None:
                self.reference = frozen_copy(self.model, exact=config.reference_mode == "ema")
            move(self.reference, torch.device("cpu") if config.reference_offload else self.device)
        if phase.name == "grpo" and config.use_value_head:
            hidden_size = self.model.config.get_text_config().hidden_size
            self.value_head = ValueHead(hidden_size, training.seed).to(self.device)
            modules.append(self.value_head)
        if self.make_optimizer:
            named = chain(*(module.named_parameters() for module in modules))
            self.optimizer = self.make_optimizer([pair for pair in named if pair[1].requires_grad])
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise RunError(f"optimizer: returned a {type(self.optimizer).__name__}, no torch Optimizer")
            if not {"state", "param_groups"} <= self.optimizer.state_dict().keys():
                raise RunError("optimizer: its state_dict has no state and param_groups: not to be resumed")
        else:
            parameters = [{"params": trainable_parameters(module)} for module in modules]
            self.optimizer = make_optimizer(parameters, phase, training, self.device)
        self.scheduler = make_scheduler(self.optimizer, phase, training)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.model.precision == "float16")
        saved, self.saved_state = self.saved_state, {}
        if states := saved.get("random_states"):          # of each rank
            set_random_states(states[process_rank() % len(states)])
        if "optimizer" in saved:                          # saved within this phase
            load_optimizer_state(self.optimizer, self.scheduler, self.scaler, saved)
            self.batches.position = saved["position"]
            if self.value_head is not None:
                self.value_head.load_state_dict(saved["value_head"])
        self.require_equal_ranks()

    def require_equal_ranks(self) -> None:
        """Raise RunError, on all ranks, if their settings, choices or replicated parameters differ."""
        choices = {name: value for part in self.config.as_dict().values() for name, value in part.items()}
        for name in "output_dir", "model_path", "dataset", "eval_dataset", "reward_functions", "environment":
            del choices[name]                             # paths, of which each machine may have its own
        choices |= {"engine in use": type(self.engine).__name__, "examples": len(self.train_set)}
        sums: dict[str, float] = {}
        for name in "model", "reference", "value_head":
            module = getattr(self, name)
            sums |= replicated_sums(name, module) if isinstance(module, torch.nn.Module) else {}
        self.ranks.agree({name: str(value) for name, value in choices.items()} | sums)

    def end_phase(self) -> None:
        """Advance to the next phase."""
        self.progress.phase += 1
        self.progress.phase_step, self.optimizer = 0, None

    def save_checkpoint(self) -> Path:
        """Save everything to checkpoints/step-<step> of the run folder, on all ranks. Raises NotSaved."""
        state = {
            "progress": asdict(self.progress), "settings": self.config.as_dict(), "versions": versions(),
            "engine": type(self.engine).__name__, "shared_prompt": self.engine.shares_prompts,
            "handed_in": self.handed_in, "weights_of_teacher": self.weights_of_teacher,
            "random_states": all_gather_object(random_states()),
            "reference_adapter": reference_state(self.reference),
        } | optimizer_state(self.optimizer, self.scheduler, self.scaler, self.value_head, self.batches)
        return write_checkpoint(
            self.folder.path / "checkpoints", self.progress.step, self.model, self.tokenizer,
            self.reference if self.teacher is None else None, state,
            keep=self.config.training.keep_checkpoints,
        )

    def save_checkpoint_if_possible(self) -> None:
        """Save a checkpoint within a phase; print an error and continue, because the next one may succeed."""
        if self.progress.phase_step < self.phase.steps:
            try:
                self.save_checkpoint()
            except NotSaved as problem:
                self.console.print(f"{problem}; continuing without")

    @property
    def handed_in(self) -> dict[str, bool]:
        """Return which objects of the caller replace those of the flags and have a part in checkpoints."""
        passed = self.teacher is not None and not self.config.grpo.reference_path
        return {"optimizer": self.make_optimizer is not None, "reference": passed}

    @cached_property
    def weights_of_teacher(self) -> str:
        """Return what tells the weights of --reference_path from others, "" without it. Call on all ranks."""
        path = self.config.grpo.reference_path
        return weights_of(self.teacher, path) if self.teacher is not None and path else ""

    @property
    def how_to_resume(self) -> str:
        """Return the command that continues this run."""
        return f"python train.py --output_dir {self.folder.path} --resume"

    def save_and_print_how_to_resume(self) -> None:
        """Save a checkpoint within a phase, and print how to continue."""
        self.console.print(f"stopped at step {self.progress.step}, saved to {self.save_checkpoint()}")
        self.console.print(f"continue with: {self.how_to_resume}")

    def save_base_of_adapter(self) -> None:
        """Save the built-in model that an adapter was made for: its weights can be downloaded nowhere."""
        if has_adapter(self.model) and not self.config.model.model_path:
            base = self.folder.path.resolve() / "base"
            self.model.peft_config["default"].base_model_name_or_path = str(base)
            if self.progress.step == 0:
                save_policy(merged_copy(self.model), self.tokenizer, base)       # a new adapter adds 0

    def restore(self, checkpoint: Path) -> None:
        """Restore progress from a checkpoint; begin_phase restores the rest, random states too."""
        state = read_state(checkpoint, mmap=num_processes() > 1)                 # each copies its shards
        self.progress = Progress(**state.pop("progress"))
        if not self.config.grpo.kl_target:
            self.progress.kl_coef = self.config.grpo.kl_coef                     # a flag may have changed it
        if state["versions"] != versions():
            self.console.print(
                f"  note   resumed with {versions()}, begun with {state['versions']}: equal up to rounding, "
                "not bit for bit"
            )
        engine, before = state.get("engine", "Engine"), state.get("handed_in", {})
        differs = {name: given != before.get(name, False) for name, given in self.handed_in.items()}
        differs["engine"] = engine not in ("Engine", "Shared", "VLLM", type(self.engine).__name__)
        for name in filter(differs.get, differs):
            raise ValueError(
                f"{name}: a Python object of the program that began this run, or none; pass it again: "
                f"train(config, {name}=...)"
            )
        if state.get("weights_of_teacher", "") != self.weights_of_teacher:
            path = self.config.grpo.reference_path
            raise ValueError(
                f"--reference_path={path}: its weights are not those with which this run began; pass the "
                "first one again, or start a new run with a checkpoint as --model_path"
            )
        self.saved_state = state

    @contextmanager
    def checkpoint_on_error(self):
        """Save a checkpoint if a step, its log or an evaluation raises; say in the error how to continue.

        The checkpoint is that in front of the step, which leaves no trace and is repeated by a resumed run.
        An error within or after the first update of a step is followed by none: weights and optimiser may be
        between two states. In several processes only errors that all of them raise are followed by one.
        """
        position, before, states = self.batches.position, replace(self.progress), random_states()
        try:
            yield
        except Exception as error:
            advice = f"fix it and continue with {self.how_to_resume}"
            if out_of_memory := is_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)                      # frees the step's tensors
                advice = f"continue with less: {self.how_to_resume} {less_memory(self.config)}"
                reason = first_line(error).rstrip(".")
                error = RunError(f"out of memory after step {before.step}: {reason}.")
            of_one_rank = num_processes() > 1 and (out_of_memory or not isinstance(error, RunError))
            if of_one_rank or self.progress.step > before.step:
                end = f"From the last checkpoint: {advice}"
            else:
                self.batches.position, self.progress = position, before
                set_random_states(states)
                try:
                    end = f"Saved to {self.save_checkpoint()}: {advice}"
                except NotSaved as problem:
                    end = f"And {problem}: {advice}"
            if isinstance(error, RunError):
                raise type(error)(f"{error} {end}") from (None if out_of_memory else error)
            error.add_note(end)                           # printed below the traceback
            raise

    def log_evaluation(self) -> float:
        """Evaluate the policy on the held-out problems, always with one seed. Return the accuracy or NaN."""
        if not self.eval_set:
            return math.nan
        training, config = self.config.training, self.config.grpo
        num_rows = training.batch_size * config.num_completions_per_prompt
        with self.checkpoint_on_error() if self.batches else nullcontext():      # None: before any phase
            result = evaluate(
                self.engine, self.ranks, self.eval_set,
                replace(config, generation_batch_size=config.generation_batch_size or num_rows),
                seed=training.seed << 32, reward_functions=self.reward_functions,
                environment=self.environment, trainer_state=self.trainer_state,
            )
        self.folder.log(self.progress.step, "eval", result)
        self.evaluated_at = self.progress.step
        self.console.print(f"held out at step {self.progress.step}: {held_out_text(result, self.config)}")
        return result.get("eval_accuracy", math.nan)

    def log_step(self, metrics: dict, experience: Experience) -> None:
        """Write and print the metrics of a step. Every --log_rollouts_every steps write its completions."""
        folder, step, phase = self.folder, self.progress.step, self.phase.name
        sampling = self.seconds.get("sampling_seconds", 0.0)  # in phases before GRPO: none
        metrics |= self.seconds | {
            "training_seconds": self.seconds["step_seconds"] - sampling,
            "learning_rate": float(self.scheduler.get_last_lr()[0]),
            "peak_memory_gb": peak_memory_gb(self.device),
        }
        records = []
        if phase == "grpo":
            if advice := diagnose([*folder.history, metrics], self.config):
                metrics["advice"] = advice
            if failures := experience.groups.reports.failures:
                folder.append("reward_errors.jsonl", step, phase, failures)
            before, every = step - metrics["updates"], self.config.training.log_rollouts_every
            if is_due(before - 1, step - 1, every):       # the updates include step 1, 1 + n, ...
                policy = self.config.grpo.policy
                after = log_probs_of_rollout(self.engine, self.ranks, experience.rollout, policy)
                records = completion_records(experience, after)
                folder.append("rollouts.jsonl", step, phase, records)
        if metrics["skipped"]:
            folder.append("skipped.jsonl", step, phase, completion_records(experience))
        folder.log(step, phase, metrics)
        self.console.print_step(phase, self.progress.phase_step, self.phase.steps, step, metrics)
        if records:
            self.console.print_completions(records)
            folder.show(step, records)
