"""
The console of a run: settings at the start, a line of 80 columns for each step, what was learned at the end.
"""

import math
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from config import Config
from engine.adapters import has_adapter
from data import as_text
from engine.devices import num_processes
from engine.text_model import has_experts
from runs.doctor import verdict
from runs.flag_notes import flag_notes
from runs.records import held_out_text, points_text, read_jsonl
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
MAIN_SETTINGS = [               # of GRPO; printed where there is no profile
    "num_completions_per_prompt", "generation_max_length", "generation_temperature", "generation_top_p",
    "generation_top_k", "use_kl_penalty", "kl_penalty_coef", "learning_rate",
]
PHASES = {"cold_start": "after the cold start", "grpo": "after GRPO", "supervised": "after training"}


class RunConsole:
    """Print the lines of a run above a progress bar for each phase. quiet: on ranks that print nothing."""

    def __init__(self, config: Config, quiet: bool):
        self.config = config
        self.rich = Console(soft_wrap=True, highlight=False, quiet=quiet)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self.rich, disable=quiet, speed_estimate_period=3600,
        )

    def print(self, text: str = "") -> None:
        """Print a line on the console, above the progress bar."""
        wraps = self.rich.is_terminal                     # lines in a file stay whole
        self.rich.print(text, markup=False, emoji=False, soft_wrap=not wraps)

    def describe(self, model, device, num_train: int, num_eval: int, phases: list) -> None:
        """Print the settings, the model, the data and the rewards, and the length of each phase."""
        training, config = self.config.training, self.config
        values = {name: value for part in config.as_dict().values() for name, value in part.items()}
        names = PROFILES.get(training.profile) or (MAIN_SETTINGS if training.use_grpo else [])
        settings = ", ".join(f"{name} {values[name]}" for name in names)
        if settings:
            profile = f"profile {training.profile}" if training.profile else "no profile"
            self.print(f"{profile}: {settings}")
        size = sum(p.numel() for p in model.parameters()) / 1e6
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
        count = num_processes()
        where = f"on {device}" if count == 1 else f"over {count} processes on {device.type}"
        part = "the adapter" if has_adapter(model) else "the text model"
        trained = f", {trainable:.2f}M of them in {part} that is trained" if trainable < size else ""
        name = config.model.model_path or "built-in tiny Gemma 3"
        self.print(f"model {name}: {size:.1f}M parameters, {config.model.precision}, {where}{trained}")
        self.print(f"data {config.data.dataset}: {num_train} examples to train on, {num_eval} held out")
        if training.use_grpo:
            weighted = zip(config.grpo.reward_functions, config.grpo.weights, strict=True)
            self.print("rewards " + ", ".join(f"{name} x {weight:g}" for name, weight in weighted))
        if config.data.instruction:
            self.print(f"instruction, before every prompt: {config.data.instruction!r}")
        self.print(f"passes of up to {training.max_tokens_per_forward} tokens: --max_tokens_per_forward")
        left_out = "lora_rank: experts and routers get no adapter; docs/scale.md, Mixtures of experts"
        for line in flag_notes(config) + [left_out] * (config.model.lora_rank > 0 and has_experts(model)):
            self.print(f"  note   {line}")
        for phase in phases:
            group_size = config.grpo.num_completions_per_prompt if phase.name == "grpo" else 1
            rows = training.batch_size * group_size
            amount = f"{training.batch_size} prompts, {rows} completions"
            self.print(f"phase {phase.name}: {phase.steps} steps of {amount}")
        if len(phases) == 2 and phases[0].steps < training.cold_start_steps:
            self.print(f"  note   max_steps shortens the cold start of {training.cold_start_steps} steps: "
                       "without right answers at its end, GRPO has nothing to reinforce")
        if phases[-1].steps < training.max_steps:
            self.print(f"  note   max_steps is {training.max_steps}, but num_epochs ends the run before")

    def print_step(self, phase: str, step: int, total: int, step_of_run: int, metrics: dict) -> None:
        """Print a line for a step, with the time that its phase has left. step, total: of the phase."""
        if phase not in [bar.description for bar in self.progress.tasks]:
            for bar in self.progress.tasks:               # a cold start may end early
                self.progress.update(bar.id, total=bar.completed)
            self.progress.add_task(phase)
        bar = self.progress.tasks[-1]
        self.progress.update(bar.id, completed=step, total=total)
        left = bar.time_remaining
        line = f"{phase} {step_of_run:>4}/{step_of_run - step + total}"
        end = "" if left is None else f"  left {timedelta(seconds=left)}"
        optional = "unscored", "skipped", "truncated"
        for name, form in UNITS.items():
            value = metrics.get(name, math.nan)
            shown = not math.isnan(value) and (value or name not in optional)
            item = f"  {form.format(value)}" if shown else ""
            line += item if len(line + item + end) <= 80 else ""
        self.print(line + end)
        if "advice" in metrics:
            self.print(f"  doctor: {metrics['advice']}")

    def print_completions(self, completions: list[dict]) -> None:
        """Print a whole completion, and the rewards and advantages of its group.

        Curves do not show a policy that exploits a reward function.
        """
        group = completions[: self.config.grpo.num_completions_per_prompt]
        points, prompt = points_text(group[0]["reward"]), as_text(group[0]["prompt"])
        self.print(f"  {prompt!r} -> {group[0]['completion']!r}: {points} points")
        self.print("    rewards    " + " ".join(points_text(c["reward"]) for c in group))
        self.print("    advantages " + " ".join(f"{c['advantage']:+.2f}" for c in group))

    def print_summary(self, folder: Path) -> None:
        """Print what was learned, by held-out results around each phase, and where the files are."""
        if self.rich.quiet:                               # the folder may be of another machine
            return
        metrics = read_jsonl(folder / "metrics.jsonl")
        when = "before training" if self.config.model.model_path else "untrained"
        last: dict[str, str] = {}                         # the last result of each phase, in order
        for line in metrics:
            if line["phase"] == "eval":
                last[when] = held_out_text(line, self.config)
            else:
                when = PHASES[line["phase"]]
        self.print("\nwhat was learned, on held-out problems:" if last else "")
        for when, result in last.items():
            self.print(f"  {when:<22}{result}")
        if history := [line for line in metrics if line["phase"] == "grpo"]:
            self.print(f"doctor: {verdict(history, self.config)}")
        for name, file in ("final model", "final"), ("curves", "curves.png"), ("report", "report.html"):
            self.print(f"{name + ':':<13}{folder}/{file}")
