"""
The run folder: files that a run writes, and lines that it prints.

    config.json          every setting
    owner.json           path, user and process of the run; locked while the process writes
    metrics.jsonl        one object per optimiser step or evaluation; docs/metrics.md defines each number
    rollouts.jsonl       every few steps: prompts, completions, rewards by function, advantages, token ids
    skipped.jsonl        the same of steps that were not finite, if any
    reward_errors.jsonl  calls of reward functions that raised or timed out, if any
    curves.png           the learning curve
    report.html          everything above, for a browser
    tensorboard/         the same metrics; with --report_to wandb its local files
    checkpoints/, final/
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from analysis.report import write_report
from config import Config
from engine.adapters import has_adapter
from engine.devices import all_gather_object, gather_from_ranks, is_main, num_processes
from engine.errors import RunError, first_line
from engine.text_model import has_experts
from runs.command_line import printable
from runs.curves import draw_curves
from runs.doctor import verdict
from runs.flag_notes import flag_notes
from runs.records import cut_after, held_out_text, or_none, points_text, read_jsonl, replace_text
from runs.trackers import open_tracker, refuse_missing
from sources.run_owner import lock_folder, take_over
from sources.settings import PROFILES

UNITS = {                       # the console line: metric, label; in order of importance, as not all may fit
    "loss": "loss {:.3f}",
    "mean_reward": "reward {:.2f}",
    "reward/correctness": "correct {:.0%}",
    "skipped": "skipped {} not finite",
    "unscored": "unscored {:.0%}",
    "tied_groups": "tied {:.0%}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.2f}",
    "truncated": "cut {:.0%}",
    "completion_tokens": "len {:.0f}",
    "turns": "{:.1f} turns",
    "grad_norm": "grad {:.2f}",
}
PHASES = {"cold_start": "after the cold start", "grpo": "after GRPO", "supervised": "after training"}


class RunFolder:
    """The folder of one run, and its console. A context manager around the training loop."""

    def __init__(self, config: Config):
        training = config.training
        default = time.strftime("outputs/%Y-%m-%d_%H-%M-%S")
        self.path = Path(all_gather_object(training.output_dir or default)[0])   # the same on all ranks
        self.config = config
        if not training.resume:
            self.refuse_other_run(ValueError)
        folders = self.path.resolve(), *self.path.resolve().parents
        existing = next(folder for folder in folders if os.path.exists(folder))
        read_only = training.check or training.explain or bool(training.replay)
        if not read_only and not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise ValueError(f"--output_dir={self.path}: {existing} is not a writable folder; name a new one")
        refuse_missing(training.report_to)
        self.writes, self.lock, self.created = is_main(), None, training.resume
        if training.resume and not read_only:             # before a checkpoint is chosen
            gather_from_ranks(self.acquire_lock)
        self.console = Console(soft_wrap=True, highlight=False, quiet=not self.writes)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self.console, disable=not self.writes, speed_estimate_period=3600,
        )
        self.tracker = None
        self.bars: dict[str, int] = {}                    # progress bar of each phase
        self.history: list[dict] = []                     # metrics of the GRPO steps

    def refuse_other_run(self, error: type[Exception]) -> None:
        """Raise the error if the folder of a new run holds a run already."""
        if (self.path / "config.json").exists():
            raise error(
                f"--output_dir={self.path}: holds another run; continue it with --resume, or name a new one"
            )

    def acquire_lock(self) -> None:
        """Keep other processes from writing to the folder, in the process that writes."""
        if self.writes and (self.lock is None or self.lock.closed):
            self.lock = lock_folder(self.path)

    def create(self) -> Path:
        """Create the folder and lock it; return its path. Raises RunError if another run has begun in it."""
        if self.writes:
            try:
                self.path.mkdir(parents=True, exist_ok=self.created or bool(self.config.training.output_dir))
            except FileExistsError:                       # the default of a run begun in the same second
                self.path = Path(f"{self.path}-{os.getpid()}")
                self.path.mkdir()
            self.acquire_lock()
            if not self.created:
                self.refuse_other_run(RunError)
            self.created = True                           # a notebook may go on after Ctrl-C
            take_over(self.lock, self.path)
        return self.path

    def open(self, last_step: int) -> None:
        """Create the folder, or remove the lines of steps after last_step: a resumed run repeats these.

        raises  RunError, on all ranks, if another run writes to it
        """
        self.path = gather_from_ranks(self.create)[0]
        if not self.writes:
            return
        replace_text(self.path / "config.json", json.dumps(self.config.as_dict(), indent=2) + "\n")
        for name in "metrics.jsonl", "rollouts.jsonl", "skipped.jsonl", "reward_errors.jsonl":
            if name in ("metrics.jsonl", "rollouts.jsonl"):
                (self.path / name).touch()
            cut_after(self.path / name, last_step)
        self.history = [line for line in read_jsonl(self.path / "metrics.jsonl") if line["phase"] == "grpo"]
        config = self.config
        self.tracker = open_tracker(config.training.report_to, self.path, config.as_dict(), last_step)

    def print(self, text: str = "") -> None:
        """Print a line on the console, above the progress bar."""
        wraps = self.console.is_terminal                  # lines in a file stay whole
        self.console.print(printable(text), markup=False, emoji=False, soft_wrap=not wraps)

    def log(self, step: int, phase: str, metrics: dict) -> None:
        """Append a line to metrics.jsonl and pass it to the tracker. NaN becomes null: JSON has no NaN."""
        if not self.writes:
            return
        line = {"step": step, "phase": phase}
        for name, value in metrics.items():
            line.setdefault(name, or_none(value) if isinstance(value, float) else value)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if phase == "grpo":
            self.history.append(line)
        if self.tracker:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            numbers.pop("step")
            self.tracker.log(step, {f"{phase}/{name}": value for name, value in numbers.items()})

    def describe(self, model, device, phases: list, num_train: int, num_eval: int) -> None:
        """Print the settings, the model and the amount of work."""
        training, config = self.config.training, self.config
        values = {name: value for part in config.as_dict().values() for name, value in part.items()}
        settings = ", ".join(f"{name} {values[name]}" for name in PROFILES.get(training.profile, {}))
        self.print(f"profile {training.profile or 'none'}: {settings}")
        size = sum(p.numel() for p in model.parameters()) / 1e6
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        count = num_processes()
        where = f"on {device}" if count == 1 else f"over {count} processes on {device.type}"
        part = "the adapter" if has_adapter(model) else "the text model"
        trained = f", {trainable:.2f}M of them in {part} that is trained" if trainable < size else ""
        name = config.model.model_path or "built-in tiny Gemma 3"
        self.print(f"model {name}: {size:.1f}M parameters, {config.model.precision}, {where}{trained}")
        self.print(f"data {config.data.dataset}: {num_train} examples to train on, {num_eval} held out")
        for phase in phases:
            group_size = config.grpo.num_completions_per_prompt if phase.name == "grpo" else 1
            rows = training.batch_size * group_size
            amount = f"{training.batch_size} prompts, {rows} completions"
            self.print(f"phase {phase.name}: {phase.steps} steps of {amount}")
        self.print(f"passes of up to {training.max_tokens_per_forward} tokens: --max_tokens_per_forward")
        left_out = "lora_rank: experts and routers get no adapter; docs/scale.md, Mixtures of experts"
        for line in flag_notes(config) + [left_out] * (config.model.lora_rank > 0 and has_experts(model)):
            self.print(f"  note   {line}")

    def print_step(self, phase: str, step: int, total: int, step_of_run: int, metrics: dict) -> None:
        """Print a line for a step, with the time that its phase has left. step, total: of the phase."""
        if phase not in self.bars:
            for bar in self.progress.tasks:               # a cold start may end early
                self.progress.update(bar.id, total=bar.completed)
            self.bars[phase] = self.progress.add_task(phase)
        self.progress.update(self.bars[phase], completed=step, total=total)
        left = self.progress.tasks[-1].time_remaining
        line = f"{phase} {step_of_run:>4}/{step_of_run - step + total}"
        end = "" if left is None else f"  left {timedelta(seconds=left)}"
        optional = "unscored", "skipped", "truncated"
        known = {name: value for name, value in metrics.items() if value or name not in optional}
        known = {name: value for name, value in known.items() if value == value}                     # no NaN
        for item in (form.format(known[name]) for name, form in UNITS.items() if name in known):
            line += f"  {item}" if len(line + item + end) + 2 <= 80 else ""
        self.print(line + end)
        if "advice" in metrics:
            self.print(f"  doctor: {metrics['advice']}")

    def print_completions(self, step: int, completions: list[dict], logged: bool) -> None:
        """Print rewards and advantages of the first --log_groups groups.

        If logged, the tracker gets all completions and one is printed whole: curves do not show a policy that
        exploits a reward function.
        """
        group_size, training = self.config.grpo.num_completions_per_prompt, self.config.training
        for start in range(0, min(len(completions), training.log_groups * group_size), group_size):
            group = completions[start : start + group_size]
            self.print(f"  {group[0]['prompt']!r}")
            self.print("    rewards    " + " ".join(points_text(c["reward"]) for c in group))
            self.print("    advantages " + " ".join(f"{c['advantage']:+.2f}" for c in group))
        if logged:
            if self.tracker:
                self.tracker.show(step, completions)
            first = completions[0]
            points = points_text(first["reward"])
            self.print(f"  {first['prompt']!r} -> {first['completion']!r}: {points} points")

    def append(self, name: str, step: int, phase: str, records: list[dict]) -> None:
        """Append records to a file of the folder."""
        if not self.writes:
            return
        with (self.path / name).open("a") as file:
            lines = ({"step": step, "phase": phase} | record for record in records)
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)

    def print_summary(self) -> None:
        """Print what was learned, by held-out results around each phase, and where the files are."""
        if not self.writes:
            return
        metrics = read_jsonl(self.path / "metrics.jsonl")
        ends = {m["step"]: PHASES[m["phase"]] for m in metrics if m["phase"] != "eval"}
        ends = {0: "before training" if self.config.model.model_path else "untrained"} | ends
        last_of = {when: step for step, when in ends.items()}                    # the last step of each phase
        lines = [f"  {ends[m['step']]:<22}{held_out_text(m, self.config)}" for m in metrics
                 if m["phase"] == "eval" and last_of.get(ends.get(m["step"])) == m["step"]]
        self.print("\n".join(["", "what was learned, on held-out problems:", *lines] if lines else [""]))
        if self.history:
            self.print(f"doctor: {verdict(self.history, self.config)}")
        for name, file in ("final model", "final"), ("curves", "curves.png"), ("report", "report.html"):
            self.print(f"{name + ':':<13}{self.path}/{file}")

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *exception):
        self.progress.stop()
        try:
            if self.writes:
                draw_curves(self.path)
                write_report(self.path)
        except Exception as error:                        # pages of results do not decide how a run ends
            self.print(f"  note   curves.png or report.html is not written: {first_line(error)}")
        finally:
            if self.tracker:
                self.tracker.close()
            if self.lock:
                self.lock.close()
                self.lock = None
