"""
The state of a run: what stays the same, its progress, and the objects of the current phase; saving and
restoring it, and the log of a step.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.evaluation import evaluate
from config import Config
from engine.adapters import AdapterReference, trainable_parameters
from engine.devices import cut_graph, limit_threads, num_processes, peak_memory_gb
from engine.errors import RunError, first_line
from engine.plain import Engine
from engine.policy import make_reference, move
from engine.ranks import Ranks
from engine.sharding import full_tensor
from experience import Experience
from model import ValueHead
from rewards import name_of
from runs.checkpoint import (
    load_optimizer_state, optimizer_state, read_state, versions, write_checkpoint, write_policy,
)
from runs.console import RunConsole, held_out_text, shows_accuracy
from runs.errors import StopOnSignal, halved_when_out_of_memory
from runs.folder import RunFolder, completion_records, read_jsonl
from runs.groups import sample_completions
from runs.phases import Phase, is_due, make_optimizer, make_scheduler
from sample import Rollout
from sources.batches import Batches
from sources.settings import read_settings

MOST_SKIPPED = 3                # steps in a row without a finite loss or gradient that end a run


@dataclass
class Progress:
    """Progress of a run, in plain numbers. A checkpoint saves all of it."""

    phase: int = 0                                        # index of the current phase
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    evaluated_at: int = -1                                # step of the last evaluation
    best_step: int = -1                                   # of the policy in best/; -1: there is none
    best_score: float = -math.inf                         # its held-out score
    skipped: int = 0                                      # steps that were not finite and changed nothing
    skipped_in_a_row: int = 0                             # the latest of them
    reward_sum: float = 0.0                               # points, of all completions of the steps so far
    reward_count: int = 0                                 # number of these completions

    def add_rewards(self, rewards: torch.Tensor) -> None:
        """Add rewards (P, G) to the running mean; NaN is left out."""
        scored = rewards[~rewards.isnan()]
        self.reward_sum += float(scored.sum())
        self.reward_count += len(scored)

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
    ranks: Ranks
    # The policy and its progress.
    engine: Engine
    progress: Progress = field(default_factory=Progress)
    make_optimizer: Callable | None = None                # the caller's, of named parameters; None: AdamW
    teacher: torch.nn.Module | None = None                # a reference that is no copy of the policy
    saved_state: dict = field(default_factory=dict)       # of a checkpoint, until its phase begins
    saved_at: int = 0                                     # step of the last checkpoint
    # Objects of the current phase.
    batches: Batches | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    scaler: torch.amp.GradScaler = field(default_factory=partial(torch.amp.GradScaler, enabled=False))
    reference: torch.nn.Module | AdapterReference | None = None                  # None without a KL penalty
    value_head: ValueHead | None = None

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
        # NaN: there was no gradient, so the weights stayed; on XLA, where it is zeros, AdamW moves them.
        had_gradient = [u for u in updates if not math.isnan(u["ratio_deviation"])]
        if not (updates if self.device.type == "xla" else had_gradient):
            deviation = experience.metrics.get("sampler_deviation", losses["ratio_deviation"])
            self.engine.require_ratios_of_1(deviation)

    def seed_generators(self) -> None:
        """Seed the global random generators, which reward functions may use, for this step and rank.

        So no state of theirs is saved, and a resumed run draws the same numbers.
        """
        of_step = f"{self.config.training.seed} {self.progress.step} {self.ranks.rank}"
        number = random.Random(of_step).getrandbits(32)
        for seed in random.seed, np.random.seed, torch.manual_seed:
            seed(number)

    def sampling_seed(self, attempt: int) -> int:
        """Return the seed of an attempt at sampling in this step (--dynamic_sampling makes several)."""
        return self.minibatch_seed + 1 + (attempt << 96)

    @property
    def model(self) -> torch.nn.Module:
        """Return the policy."""
        return self.engine.model

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the optimiser."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def scaler_of_gradient(self) -> torch.amp.GradScaler:
        """Return the scaler; without a gradient, as in tied groups, which it rejects, one without effect."""
        has_gradient = any(p.grad is not None for p in self.parameters)
        return self.scaler if has_gradient else torch.amp.GradScaler(enabled=False)

    @halved_when_out_of_memory("generation_batch_size")
    def sample_completions(self, examples: list[dict], **seed_and_repeats) -> Rollout:
        """Sample a group for each prompt; with an environment, conversations."""
        return sample_completions(
            self.engine, self.environment, examples, self.config.grpo, **seed_and_repeats)

    def sum_terms(self, results: list[dict], names: list[str], share_forwarded: float) -> dict[str, float]:
        """Return the terms of an update: those of its micro-batches, on all ranks, added up.

        share_forwarded  of the update's tokens, in rows that were forwarded: statistics are means over these
        """
        rows = [torch.stack([terms[name] for name in names]).tolist() for terms in results]
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        sums = {name: self.ranks.sum(sum(column)) for name, column in zip(names, columns, strict=True)}
        for name in sums.keys() - {"total_loss", "policy_loss"}:
            sums[name] = sums[name] / share_forwarded if share_forwarded else math.nan
        return sums

    def count_skipped(self, loss: float) -> None:
        """Count a skipped step; not as one in a row if halving the loss scale may cure it."""
        self.progress.skipped += 1
        if not math.isfinite(loss) or self.scaler.get_scale() <= 1:
            self.progress.skipped_in_a_row += 1

    def refuse_skipped_in_a_row(self) -> None:
        """Save a checkpoint and raise RunError once too many steps in a row were skipped."""
        if self.progress.skipped_in_a_row >= MOST_SKIPPED:
            checkpoint = self.save_checkpoint()
            raise RunError(
                f"{MOST_SKIPPED} steps in a row had a loss or gradient that is not finite. The weights "
                f"before them are in {checkpoint}, the batches in skipped.jsonl; lower --learning_rate")

    def zero_gradient(self) -> None:
        """Set the gradient to zero, and end the program of the update on XLA."""
        self.optimizer.zero_grad(set_to_none=self.device.type != "xla")          # zeros: no recompilation
        cut_graph(self.device)

    @property
    def trainer_state(self) -> SimpleNamespace:
        """Return the progress of the last phase for reward functions, in steps and epochs, as in TRL."""
        step = self.progress.phase_step if self.phase is self.phases[-1] else 0
        epoch = step and self.batches.position / len(self.train_set)
        return SimpleNamespace(global_step=step, max_steps=self.phases[-1].steps, epoch=epoch)

    def is_complete(self) -> bool:
        """Return whether the run has ended before, and say so."""
        final = self.folder.path / "final"
        complete = self.has_taken_all_steps and final.exists()
        if complete:
            self.console.print(f"this run is complete; a new one can begin with --model_path {final}")
        return complete

    @property
    def has_taken_all_steps(self) -> bool:
        """Return whether the last phase has had its steps."""
        return self.phase is self.phases[-1] and self.progress.phase_step >= self.phase.steps

    @contextmanager
    def started(self):
        """Open the run folder; the context tells whether the user has asked to stop. Call on all ranks."""
        self.folder.open(self.progress.step, self.saved_state.get("file_sizes", {}))
        self.compare_settings_of_ranks()
        with StopOnSignal(self.ranks) as stop, self.folder:
            try:
                yield stop
            finally:
                self.write_report()

    def write_report(self) -> None:
        """Write curves.png and report.html. An error is one line: they do not decide how a run ends."""
        from analysis.report import write_report  # here: what reads a run is no part of its steps

        try:
            if self.folder.writes:
                write_report(self.folder.path)
        except Exception as error:
            self.console.print(f"  note   curves.png or report.html is not written: {first_line(error)}")

    def print_summary(self) -> None:
        """Print what was learned, the findings of the training doctor, and where the files are."""
        from analysis.doctor import diagnose

        if self.folder.writes:                            # elsewhere the folder may be of another machine
            path = self.folder.path
            lines, flags = read_jsonl(path / "metrics.jsonl"), read_settings(path / "config.json")
            self.console.print_summary(path, lines, diagnose(lines, flags))

    def begin_phase(self, phase: Phase) -> None:
        """Create the objects of a phase: optimiser, schedule, data order, reference, value head.

        A run that is resumed within the phase restores them from saved_state.
        """
        training, config = self.config.training, self.config.grpo
        seed = training.seed + self.progress.phase
        self.batches = Batches(self.train_set, training.batch_size, seed, self.config.data.shuffle)
        modules = [self.model]
        if phase.name == "grpo" and config.kl_coef > 0 and self.reference is None:
            self.reference = self.teacher
            if self.teacher is None:
                self.reference = make_reference(self.model, exact=config.reference_mode == "ema")
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
            self.optimizer = make_optimizer(parameters, phase, self.device)
        self.scheduler = make_scheduler(self.optimizer, phase, training)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.model.precision == "float16")
        saved, self.saved_state = self.saved_state, {}
        if "optimizer" in saved:                          # saved within this phase
            load_optimizer_state(self.optimizer, self.scheduler, self.scaler, saved)
            self.batches.position = saved["position"]
            if self.value_head is not None:
                self.value_head.load_state_dict(saved["value_head"])

    def compare_settings_of_ranks(self) -> None:
        """Raise RunError, on all ranks, if their settings or numbers of examples differ."""
        settings = dict(self.config.flags)
        for name in "output_dir", "model_path", "dataset", "eval_dataset", "reward_functions", "environment":
            del settings[name]                            # paths, of which each machine may have its own
        self.ranks.agree(settings | {"examples": len(self.train_set)})

    def end_phase(self) -> None:
        """Advance to the next phase. The last one stays, for a run that is resumed with more steps."""
        if self.phase is not self.phases[-1]:
            self.progress.phase += 1
            self.progress.phase_step, self.optimizer = 0, None

    def save_checkpoint(self, notify: bool = False) -> Path:
        """Save everything to checkpoints/step-<step> of the run folder, on all ranks. Raises RunError.

        notify  print where it is, and the command that continues the run
        """
        state = {
            "progress": asdict(self.progress), "settings": self.config.as_dict(),
            "own_optimizer": self.make_optimizer is not None, "versions": versions(self.engine),
            "file_sizes": self.folder.file_sizes(),
            "reference_adapter": full_tensor(getattr(self.reference, "kept", None)),     # AdapterReference
        } | optimizer_state(self.optimizer, self.scheduler, self.scaler, self.value_head, self.batches)
        checkpoint = write_checkpoint(
            self.folder.path / "checkpoints", self.progress.step, self.model, self.tokenizer,
            self.reference if self.teacher is None else None, state,
            keep=self.config.training.keep_checkpoints,
        )
        self.saved_at = self.progress.step
        if notify:
            self.console.print(f"saved to {checkpoint}; continue with: "
                               f"python train.py --output_dir {self.folder.path} --resume")
        return checkpoint

    def save_if_due(self) -> None:
        """Save a checkpoint every --save_steps of the phase."""
        after, since = self.progress.phase_step, self.progress.step - self.saved_at
        if is_due(after - since, after, self.config.training.save_steps):
            self.save_checkpoint()

    def restore(self, checkpoint: Path) -> None:
        """Restore progress from a checkpoint; begin_phase restores the rest."""
        state = read_state(checkpoint, mmap=num_processes() > 1)                 # each copies its shards
        if "own_optimizer" not in state:
            raise ValueError(f"{checkpoint}: of an earlier version; begin a new run with it as --model_path")
        if state["own_optimizer"] != (self.make_optimizer is not None):
            again = "pass it to train() again" if state["own_optimizer"] else "the run began without one"
            raise ValueError(f"optimizer: {again}")
        self.progress = Progress(**state.pop("progress"))
        self.saved_at = self.progress.step
        limit_threads(state["versions"]["threads"], "the number that the run began with", self.console.print)
        now, begun = versions(self.engine), state["versions"]
        if now != begun:
            self.console.print(
                f"  note   resumed with {now}, begun with {begun}: equal up to rounding, not bit for bit")
        self.saved_state = state

    @contextmanager
    def saved_on_error(self):
        """Save a checkpoint of the state in front of a step that raises, which a resumed run repeats.

        There is none after an update, when weights and optimiser may be between two states, and in several
        processes after errors that not all of them raise.
        """
        position, before = self.batches.position, replace(self.progress)
        try:
            yield
        except Exception as error:
            on_all_ranks = num_processes() == 1 or isinstance(error, RunError)
            if on_all_ranks and self.progress.step == before.step:
                self.batches.position, self.progress = position, before
                try:
                    self.save_checkpoint(notify=True)
                except RunError as problem:               # a full disk: the first error is the one to report
                    self.console.print(str(problem))
            raise

    def change_setting(self, name: str, value: int) -> None:
        """Change max_tokens_per_forward or generation_batch_size within the run, and in its config.json."""
        part = "grpo" if name == "generation_batch_size" else "training"
        section = replace(getattr(self.config, part), **{name: value})
        self.config = replace(self.config, **{part: section})
        for engine in self.engine, getattr(self.engine, "trainer", self.engine):         # that of vllm
            engine.max_tokens = self.config.training.max_tokens_per_forward
        if self.folder.lock:                              # none where nothing is written (--check)
            self.folder.write_config(self.config)

    @halved_when_out_of_memory("generation_batch_size")
    def evaluate(self) -> dict:
        """Return the metrics of an evaluation on the held-out problems."""
        self.seed_generators()
        config = self.config.grpo
        at_once = config.generation_batch_size or self.config.rollout_size
        return evaluate(
            self.engine, self.ranks, self.eval_set, replace(config, generation_batch_size=at_once),
            seed=self.config.training.seed << 32, reward_functions=self.reward_functions,
            environment=self.environment, trainer_state=self.trainer_state,
        )

    def evaluation_is_due(self) -> bool:
        """Return True before the first step, every eval_steps of a phase, and at its end; once at a step."""
        progress, phase = self.progress, self.phase
        if not self.eval_set or progress.evaluated_at == progress.step:
            return False
        after, since = progress.phase_step, progress.step - progress.evaluated_at
        at_an_end = progress.evaluated_at < 0 or after >= phase.steps
        return at_an_end or is_due(after - since, after, phase.eval_steps)

    def log_evaluation(self) -> float:
        """Evaluate the policy on the held-out problems, always with one seed. Return the accuracy or NaN."""
        with self.saved_on_error():
            result = self.evaluate()
            if self.config.training.keep_best:
                self.update_best(self.held_out_score(result))
        self.folder.log(self.progress.step, "eval", result)
        self.progress.evaluated_at = self.progress.step
        best = ", the best so far" if self.progress.best_step == self.progress.step else ""
        text = held_out_text(result, self.config)
        self.console.print(f"held out at step {self.progress.step}: {text}{best}")
        return result.get("eval_accuracy", math.nan)

    def held_out_score(self, result: dict) -> float:
        """Return the accuracy, or the weighted sum of points where these are shown, NaN if there are none."""
        if shows_accuracy(result, self.config.flags):
            return result["eval_accuracy"]
        points = [result[f"eval_reward/{name_of(function)}"] for function in self.reward_functions]
        weighted = zip(points, self.config.grpo.weights, strict=False)           # supervised: no points
        known = [weight * mean for mean, weight in weighted if mean is not None]
        return sum(known) if known else math.nan

    def update_best(self, score: float) -> None:
        """Write the policy to best/ if its score is the highest so far; of equal ones the first stays."""
        if score > self.progress.best_score:
            write_policy(self.model, self.tokenizer, self.folder.path / "best")
            self.progress.best_step, self.progress.best_score = self.progress.step, score

    def log_step(self, metrics: dict, experience: Experience) -> None:
        """Write and print the metrics of a step. Every --log_rollouts_every steps write its completions."""
        folder, step, phase = self.folder, self.progress.step, self.phase.name
        metrics |= {
            "training_seconds": metrics["step_seconds"] - metrics.get("sampling_seconds", 0.0),
            "learning_rate": float(self.scheduler.get_last_lr()[0]),
            "peak_memory_gb": peak_memory_gb(self.device),
        }
        records = []
        if phase == "grpo":
            if failures := experience.groups.reports.failures:
                folder.append("reward_errors.jsonl", step, phase, failures)
            before, every = step - metrics["updates"], self.config.training.log_rollouts_every
            if is_due(before - 1, step - 1, every):       # the updates include step 1, 1 + n, ...
                records = completion_records(experience)
                folder.append("rollouts.jsonl", step, phase, records)
        if metrics["skipped"]:
            folder.append("skipped.jsonl", step, phase, completion_records(experience))
        folder.log(step, phase, metrics)
        self.console.print_step(phase, self.progress.phase_step, self.phase.steps, step, metrics)
        if records:
            self.console.print_completions(records)
