"""
The run folder: what a run writes down, and what it shows on the console.

    config.json      every setting
    metrics.jsonl    one object per optimiser step or evaluation; docs/metrics.md says what each number means
    rollouts.jsonl   every few steps: prompts, completions, rewards by function, advantages, token ids
    skipped.jsonl    the same of steps that were not finite, if there were any
    reward_errors.jsonl  calls of reward functions that raised or took too long, if there were any
    curves.png       the learning curve
    report.html      everything above, to look at in a browser
    tensorboard/     the same metrics, or with --report_to wandb what that keeps here
    checkpoints/, final/
"""

import itertools
import json
import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from analysis.report import write_report
from config import PROFILES, Config
from engine.devices import all_gather_object, is_main, num_processes
from runs.records import held_out_text, or_none, points_text, read_jsonl, replace_text
from runs.trackers import open_tracker, refuse_missing

UNITS = {                       # the console line: metric, label, format
    "loss": "loss {:.3f} nat",
    "mean_reward": "reward {:.2f}",
    "reward/correctness": "correct {:.0%}",
    "tied_groups": "tied {:.0%}",
    "completion_tokens": "len {:.0f} tok",
    "turns": "{:.1f} turns",
    "truncated": "cut {:.0%}",
    "unscored": "unscored {:.0%}",
    "skipped": "skipped {} not finite",
    "kl": "kl {:.4f} nat",
    "entropy": "entropy {:.2f} nat",
    "grad_norm": "grad {:.2f}",
    "step_seconds": "{:.2f} s",
}


class RunFolder:
    """The folder of one run, and its voice. Use as a context manager around the training loop."""

    def __init__(self, config: Config):
        training = config.training
        self.path = Path(all_gather_object(training.output_dir or time.strftime("outputs/%Y-%m-%d_%H-%M-%S"))[0])
        self.config = config
        if training.resume and not (self.path / "config.json").exists():
            raise ValueError(f"--output_dir={self.path}: there is no run in it to resume")
        if not training.resume and (self.path / "config.json").exists():
            raise ValueError(f"--output_dir={self.path}: holds another run; continue it with --resume, or name another folder")
        writes = not (training.check or training.explain or training.replay)
        there = next(folder for folder in (self.path.resolve(), *self.path.resolve().parents) if os.path.exists(folder))
        if writes and not (there.is_dir() and os.access(there, os.W_OK)):
            raise ValueError(f"--output_dir={self.path}: {there} is no folder that can be written to; name another one")
        refuse_missing(training.report_to)
        self.writes = is_main()
        self.console = Console(soft_wrap=True, highlight=False, quiet=not self.writes)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self.console,
            disable=not self.writes,
        )
        self.tracker = None
        self.history: list[dict] = []                     # what was logged of GRPO steps

    def open(self, last_step: int) -> None:
        """Create the folder, or drop what was written after the checkpoint at last_step and will be written again."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(self.path / "config.json", json.dumps(self.config.as_dict(), indent=2) + "\n")
        for name in "metrics.jsonl", "rollouts.jsonl", "skipped.jsonl", "reward_errors.jsonl":
            lines = read_jsonl(self.path / name)
            kept = [line for line in lines if last_step > 0 and line["step"] <= last_step]
            if kept or name in ("metrics.jsonl", "rollouts.jsonl"):
                replace_text(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))
        self.history = [line for line in read_jsonl(self.path / "metrics.jsonl") if line["phase"] == "grpo"]
        self.tracker = open_tracker(self.config.training.report_to, self.path, self.config.as_dict(), last_step)

    def say(self, text: str = "") -> None:
        """A line on the console, above the progress bar."""
        self.console.print(text, markup=False)

    def log(self, step: int, phase: str, metrics: dict) -> None:
        """Append a line to metrics.jsonl and pass it to the tracker. NaN becomes null: JSON has no NaN."""
        if not self.writes:
            return
        line = {"step": step, "phase": phase}
        line |= {name: or_none(value) if isinstance(value, float) else value for name, value in metrics.items()}
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if phase == "grpo":
            self.history.append(line)
        if self.tracker:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
            self.tracker.log(step, {f"{phase}/{name}": value for name, value in numbers.items()})

    def describe(self, model, device, phases: list, num_train: int, num_eval: int) -> None:
        """What is about to happen: the settings, the model and the amount of work."""
        training, data, grpo = self.config.training, self.config.data, self.config.grpo
        values = {name: value for section in self.config.as_dict().values() for name, value in section.items()}
        settings = ", ".join(f"{name} {values[name]}" for name in PROFILES.get(training.profile, {}))
        self.say(f"profile {training.profile or 'none'}: {settings}")
        name = self.config.model.model_path or "built-in tiny Gemma 3"
        size, precision = sum(p.numel() for p in model.parameters()) / 1e6, self.config.model.precision
        where = f"on {device}" if num_processes() == 1 else f"over {num_processes()} processes on {device.type}"
        learned = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        adapter = f", {learned:.2f}M of them in the adapter that is trained" if learned < size else ""
        self.say(f"model {name}: {size:.1f}M parameters, {precision}, {where}{adapter}")
        self.say(f"data {data.dataset}: {num_train} examples to train on, {num_eval} held out")
        for phase in phases:
            rows = training.batch_size * (grpo.num_completions_per_prompt if phase.name == "grpo" else 1)
            self.say(f"phase {phase.name}: {phase.steps} steps of {training.batch_size} prompts, {rows} completions")
        self.say(f"passes of up to {training.max_tokens_per_forward} tokens: --max_tokens_per_forward")
        for line in self.config.remarks():
            self.say(f"  note   {line}")

    def show_step(self, phase: str, step: int, total: int, step_of_run: int, metrics: dict) -> None:
        """One readable line for a step, with units."""
        known = {name: value for name, value in metrics.items() if value or name not in ("unscored", "skipped")}
        shown = [form.format(known[name]) for name, form in UNITS.items() if name in known]
        counted = f" (step {step_of_run})" if step != step_of_run else ""
        self.say(f"{phase} {step:>4}/{total}{counted}  " + "  ".join(shown))
        if "advice" in metrics:
            self.say(f"  doctor: {metrics['advice']}")

    def show_completions(self, step: int, updates: int, completions: list[dict]) -> None:
        """Now and then a whole completion with its reward, for a curve does not show a model gaming the checker.

        step, updates  optimiser steps so far, and how many of them were taken on these completions
        """
        group_size, training = self.config.grpo.num_completions_per_prompt, self.config.training
        for start in range(0, min(len(completions), training.log_groups * group_size), group_size):
            group = completions[start : start + group_size]
            self.say(f"  {group[0]['prompt']!r}")
            self.say("    rewards    " + " ".join(points_text(c["reward"]) for c in group))
            self.say("    advantages " + " ".join(f"{c['advantage']:+.2f}" for c in group))
        if self.keeps_completions(step, updates):
            self.keep("rollouts.jsonl", step, "grpo", completions)
            if self.tracker:
                self.tracker.show(step, completions)
            shown = completions[0]
            self.say(f"  {shown['prompt']!r} -> {shown['completion']!r}: {points_text(shown['reward'])} points")

    def keeps_completions(self, step: int, updates: int) -> bool:
        """Whether a rollout goes into rollouts.jsonl: if its updates hold the run's step 1, 1 + n, 1 + 2n, ..."""
        every = self.config.training.log_rollouts_every
        return every > 0 and (step - 1) // every > (step - 1 - updates) // every

    def keep(self, name: str, step: int, phase: str, completions: list[dict]) -> None:
        """Append completions to a file of the folder, whole: --replay computes their loss again."""
        if not self.writes:
            return
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps({"step": step, "phase": phase} | record) + "\n" for record in completions)

    def sum_up(self) -> None:
        """What the run achieved, and where it is."""
        if not self.writes:
            return
        metrics = read_jsonl(self.path / "metrics.jsonl")
        ends = {0: "before training"} | {m["step"]: f"after {m['phase']}" for m in metrics if m["phase"] != "eval"}
        last_of = {when: step for step, when in ends.items()}                    # the last step of each phase
        for m in metrics:
            if m["phase"] == "eval" and last_of.get(ends.get(m["step"])) == m["step"]:
                self.say(f"held out {ends[m['step']]}: {held_out_text(m, self.config)}")
        self.say(f"final model: {self.path / 'final'}, learning curve: {self.path / 'curves.png'}, all of it: "
                 f"{self.path / 'report.html'}")

    def draw_curves(self) -> None:
        """curves.png from metrics.jsonl."""
        from matplotlib.figure import Figure  # slow to import

        metrics = read_jsonl(self.path / "metrics.jsonl")
        evals = [m for m in metrics if m["phase"] == "eval"]
        steps = [m for m in metrics if m["phase"] != "eval"]
        figure = Figure(figsize=(8, 6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)

        def line(axes, lines, name, label, **style):
            points = [(m["step"], m[name]) for m in lines if m.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, **style)

        line(top, steps, "mean_reward", "mean reward in training (points)", color="tab:orange", alpha=0.6)
        scores = {name for m in evals for name in m if name.startswith("eval_reward/")} - {"eval_reward/correctness"}
        for i, name in enumerate(sorted(scores)):
            line(top, evals, name, f"held out: {name.removeprefix('eval_reward/')} (points)", color=f"C{i + 2}", linestyle="--")
        line(top, evals, "eval_accuracy", "held out: accuracy, sampled, 95 % interval", color="tab:blue", marker=".")
        known = [m for m in evals if m.get("eval_accuracy") is not None]
        if known:
            low, high = [m["eval_accuracy_low"] for m in known], [m["eval_accuracy_high"] for m in known]
            top.fill_between([m["step"] for m in known], low, high, color="tab:blue", alpha=0.2)
        line(bottom, steps, "loss", "supervised loss (nat/token)")
        line(bottom, steps, "entropy", "entropy (nat/token)")
        line(bottom, steps, "tied_groups", "tied groups (share)")
        for previous, current in itertools.pairwise(steps):
            if previous["phase"] != current["phase"]:
                for axes in top, bottom:
                    axes.axvline(previous["step"], color="grey", linestyle=":")
                top.annotate(f" {current['phase']}", (previous["step"], top.get_ylim()[1]), va="top", color="grey")
        for axes in top, bottom:
            if axes.lines:
                axes.legend(loc="best")
        top.set_ylabel("accuracy (share), reward (points)")
        bottom.set_xlabel("optimiser step")
        figure.savefig(self.path / "curves.png", dpi=120)

    def __enter__(self):
        self.progress.start()
        return self

    def __exit__(self, *exception):
        self.progress.stop()
        if self.writes:
            self.draw_curves()
            write_report(self.path)
        if self.tracker:
            self.tracker.close()
