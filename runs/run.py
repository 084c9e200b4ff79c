"""A run: its policy, progress, data, log and checkpoints."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from config import Config
from data import Batches
from engine.devices import idle_cores, num_processes, seed_generators
from engine.errors import RunError
from engine.sharding import full_tensor
from experience import Experience
from policy import Policy
from runs.checkpoint import (
    load_optimizer_state, optimizer_state, read_state, versions, write_checkpoint, write_policy,
)
from runs.console import RunConsole
from runs.errors import RAISED_BY_ALL, stop_on_signal
from runs.folder import RunFolder
from runs.phases import Phase, first_reference, is_due, train_in_phase
from runs.results import evaluate_and_log, print_summary, write_curves_and_report, write_step

MOST_SKIPPED = 3                # steps in a row without a finite loss or gradient, after which a run ends


@dataclass
class Progress:
    """Progress of a run, in plain numbers. A checkpoint saves all of it."""

    phase: int = 0                                        # index of the current phase
    phase_step: int = 0                                   # optimiser steps taken in this phase
    step: int = 0                                         # optimiser steps taken in all
    evaluated_at: int = -1                                # step of the last evaluation
    accuracy: float = math.nan                            # in that evaluation
    best_step: int = -1                                   # step of the policy in best/; -1: there is none
    best_score: float = -math.inf                         # its held-out score
    skipped: int = 0                                      # steps without a finite loss or gradient
    skipped_in_a_row: int = 0                             # the latest of these in a row
    reward_sum: float = 0.0                               # over all completions of the run
    reward_count: int = 0                                 # number of these completions

    def count(self, update: dict) -> None:
        """Count an update. skipped_in_a_row excludes overflows that a smaller loss scale may avoid."""
        self.step, self.phase_step = self.step + 1, self.phase_step + 1
        self.skipped += update["skipped"]
        if not update["skipped"]:
            self.skipped_in_a_row = 0
        elif update.get("loss_scale", 1) <= 1 or not math.isfinite(update["total_loss"]):
            self.skipped_in_a_row += 1

    def add_rewards(self, rewards: torch.Tensor) -> None:
        """Add rewards (P, G) to the running mean. NaN is excluded."""
        scored = rewards[~rewards.isnan()]
        self.reward_sum += float(scored.sum())
        self.reward_count += len(scored)

    @property
    def mean_of_rewards(self) -> float:
        return self.reward_sum / max(1, self.reward_count)


@dataclass
class Run:
    """The objects of a run, what happens around its steps, and its checkpoints."""

    # Set up once; only some limits in config are halved when memory runs out.
    config: Config
    folder: RunFolder
    reward_functions: list[Callable]
    environment: Callable | None
    train_set: Sequence[dict]
    eval_set: Sequence[dict]
    fingerprints: dict[str, str]                          # of dataset and eval_dataset
    phases: list[Phase]
    # The policy and its progress.
    policy: Policy
    progress: Progress = field(default_factory=Progress)
    make_optimizer: Callable | None = None                # from set_up; None: AdamW
    teacher: torch.nn.Module | None = None                # a reference that is not a copy of the policy
    saved_state: dict = field(default_factory=dict)       # from a checkpoint, until its phase begins
    saved_at: int = 0                                     # step of the last checkpoint
    # Objects of the current phase.
    batches: Batches | None = None
    reference: Policy | None = None                       # None without a KL penalty

    def __post_init__(self):
        self.policy.on_less_memory = self.change_setting

    @property
    def console(self) -> RunConsole:
        return self.folder.console

    @property
    def phase(self) -> Phase:
        return self.phases[self.progress.phase]

    @property
    def phases_left(self) -> list[Phase]:
        """Return the current phase and those after it, or [] if the run is complete."""
        complete = self.has_taken_all_steps and (self.folder.path / "final").exists()
        return [] if complete else self.phases[self.progress.phase :]

    @property
    def updates_left(self) -> int:
        """Return the number of updates until the end of the phase."""
        return self.phase.steps - self.progress.phase_step

    @property
    def has_taken_all_steps(self) -> bool:
        """Return True if the last phase has taken all its steps."""
        return self.phase is self.phases[-1] and self.updates_left <= 0

    @property
    def trainer_state(self) -> SimpleNamespace:
        """Return the progress in the last phase, in steps and epochs, for reward functions, as in TRL."""
        step = self.progress.phase_step if self.phase is self.phases[-1] else 0
        epoch = step and self.batches.position / len(self.train_set)
        return SimpleNamespace(global_step=step, max_steps=self.phases[-1].steps, epoch=epoch)

    @property
    def scoring(self) -> dict:
        """Return the arguments with which sample_and_score scores completions."""
        return dict(
            reward_functions=self.reward_functions, weights=self.config.grpo.weights,
            environment=self.environment, trainer_state=self.trainer_state)

    # ---- from the beginning to the end ---------------------------------------------------------------------

    @contextmanager
    def started(self) -> Iterator[Callable[[], bool]]:
        """Open the run folder; yield a function that returns True after a signal. All ranks call both."""
        self.folder.open(self.progress.step, self.saved_state.get("file_sizes", {}))
        with stop_on_signal(self.folder.ranks) as stop_requested, closing(self.folder):
            try:
                yield stop_requested
            finally:
                write_curves_and_report(self.folder)

    def begin_phase(self) -> None:
        """Create optimiser, schedule, value head, data order and reference; restore them from saved_state."""
        phase, training, config = self.phase, self.config.training, self.config.grpo
        seed = training.seed + self.progress.phase
        self.batches = Batches(self.train_set, training.batch_size, seed, self.config.data.shuffle)
        if phase.name == "grpo" and config.kl_coef > 0 and self.reference is None:
            self.reference = first_reference(self.policy, config, self.teacher)
        train_in_phase(self.policy, phase, self.config, self.make_optimizer)
        saved, self.saved_state = self.saved_state, {}
        if "optimizer" in saved:                          # saved within this phase
            load_optimizer_state(self.policy, saved)
            self.batches.position = saved["position"]

    def end_phase(self) -> None:
        """Save a checkpoint that begins with the next phase; after the last, write the model to final/."""
        is_last = self.phase is self.phases[-1]           # this phase may get more steps later
        if not is_last:
            self.progress.phase += 1
            self.progress.phase_step = 0
            self.policy.optimizer = None
        self.save_checkpoint()
        if is_last:
            write_policy(self.policy.model, self.policy.tokenizer, self.folder.path / "final")
            print_summary(self.folder)

    # ---- one step ------------------------------------------------------------------------------------------

    @contextmanager
    def saved_on_error(self):
        """If a step or an evaluation raises, save the state before it, so that a resumed run repeats it.

        Nothing is saved after an update, because weights and optimiser may be inconsistent, or if not all of
        several processes raise. The global random generators, which reward functions may use, are seeded by
        the step, so that a repeated step draws the same numbers.
        """
        idle_cores.choose_threads(self.console.print)
        position, before, begun = self.batches.position, replace(self.progress), self.policy.steps_begun
        seed_generators(f"{self.config.training.seed} {self.progress.step} {self.folder.ranks.rank}")
        try:
            yield
        except Exception as error:
            on_all_ranks = num_processes() == 1 or isinstance(error, RAISED_BY_ALL)
            if on_all_ranks and self.progress.step == before.step and self.policy.steps_begun == begun:
                self.batches.position, self.progress = position, before
                try:
                    self.save_checkpoint(notify=True)
                except RunError as problem:               # a full disk; still report the first error
                    self.console.print(str(problem))
            raise

    def evaluate_if_due(self) -> None:
        """Evaluate before the first step, every eval_steps of a phase, and at its end, but once per step."""
        progress, phase = self.progress, self.phase
        after, since = progress.phase_step, progress.step - progress.evaluated_at
        at_an_end = progress.evaluated_at < 0 or after >= phase.steps
        if self.eval_set and since and (at_an_end or is_due(after - since, after, phase.eval_steps)):
            with self.saved_on_error():
                evaluate_and_log(self)

    def log_step(self, metrics: dict, experience: Experience, on_step: Callable | None = None) -> None:
        """Write and print metrics, call on_step. Raises RunError after MOST_SKIPPED skips in a row."""
        with self.saved_on_error():                       # the step is complete, not repeated
            write_step(self, metrics, experience)
            if on_step:
                on_step(self, metrics, experience)
        if self.progress.skipped_in_a_row >= MOST_SKIPPED:
            checkpoint = self.save_checkpoint()
            raise RunError(
                f"{MOST_SKIPPED} steps in a row had a loss or gradient that is not finite. The weights "
                f"before them are in {checkpoint}, the batches in skipped.jsonl; lower --learning_rate")

    def change_setting(self, name: str, half: int, line: str) -> None:
        """Store a setting that was halved when memory ran out, for the rest of the run and in config.json."""
        self.console.print(line)
        part = "grpo" if name == "generation_batch_size" else "training"
        if part == "training":
            for policy in filter(None, (self.policy, self.reference)):           # as in a resumed run
                policy.max_tokens = half
        section = replace(getattr(self.config, part), **{name: half})
        self.config = replace(self.config, **{part: section})
        if self.folder.lock:                              # no lock if nothing is written (--check)
            self.folder.write_config(self.config)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def save_checkpoint(self, notify: bool = False) -> Path:
        """Save everything to checkpoints/step-<step> of the run folder, on all ranks. Raises RunError.

        notify  print its path, and the command that continues the run
        """
        policy, reference = self.policy, self.reference and self.reference.model
        kept = getattr(reference, "kept", None)           # of an AdapterReference
        state = {
            "progress": asdict(self.progress), "settings": self.config.as_dict(),
            "fingerprints": self.fingerprints,
            "own_optimizer": self.make_optimizer is not None, "versions": versions(policy),
            "file_sizes": self.folder.file_sizes(), "reference_adapter": full_tensor(kept),
        } | optimizer_state(policy, self.batches)
        checkpoint = write_checkpoint(
            self.folder.path / "checkpoints", self.progress.step, policy.model, policy.tokenizer,
            reference if self.teacher is None and kept is None else None, state,
            keep=self.config.training.keep_checkpoints,
        )
        self.saved_at = self.progress.step
        if notify:
            self.console.print(f"saved to {checkpoint}; continue with: "
                               f"python train.py --output_dir {self.folder.path} --resume")
        return checkpoint

    def save_if_due(self, stopping: bool = False) -> None:
        """Save a checkpoint every --save_steps of the phase, and when the run is stopped."""
        after, since = self.progress.phase_step, self.progress.step - self.saved_at
        if stopping or is_due(after - since, after, self.config.training.save_steps):
            self.save_checkpoint(notify=stopping)

    def restore(self, checkpoint: Path) -> None:
        """Restore progress from a checkpoint; begin_phase restores the rest."""
        state = read_state(checkpoint, mmap=num_processes() > 1)                 # each copies its shards
        if "own_optimizer" not in state or "accuracy" not in state["progress"]:
            raise ValueError(f"{checkpoint}: of an earlier version; start a new run with it as --model_path")
        if state["own_optimizer"] != (self.make_optimizer is not None):
            again = "pass it to train() again" if state["own_optimizer"] else "the run began without one"
            raise ValueError(f"optimizer: {again}")
        self.progress = Progress(**state.pop("progress"))
        self.saved_at = self.progress.step
        if state.get("scaler") and hasattr(self.policy, "scaler"):               # else float32 now
            self.policy.scaler.load_state_dict(state["scaler"])
        begun, notify = state["versions"], self.console.print
        if (now := versions(self.policy)) != begun:
            notify(f"  note   resumed with {now}, begun with {begun}: equal up to rounding, not bit for bit")
        self.saved_state = state
        if not self.phases_left:
            final = self.folder.path / "final"
            notify(f"this run is complete; start a new run with --model_path {final}")
