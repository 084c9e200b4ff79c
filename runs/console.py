"""
The console of a run: settings at the start, a line of 80 columns for each step, held-out results at the end.

Texts of models and data sets are printed with repr(), so that their characters cannot control the terminal.
"""

import math
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from config import Config
from data import as_text
from engine.devices import num_processes

UNITS = {                       # the console line: metric -> label, in order of importance: not all may fit
    "loss": "loss {:.3f}",
    "mean_reward": "reward {:.2f}",
    "correct": "correct {:.0%}",
    "skipped": "skipped {} not finite",
    "unscored": "unscored {:.0%}",
    "truncated": "cut {:.0%}",  # before its symptoms
    "zero_variance_groups": "zero-var {:.0%}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.2f}",
    "completion_tokens": "len {:.0f}",
    "turns": "{:.1f} turns",
    "grad_norm": "grad {:.2f}",
}
MAIN_SETTINGS = [               # printed for GRPO
    "num_completions_per_prompt", "generation_max_length", "generation_temperature", "generation_top_p",
    "generation_top_k", "use_kl_penalty", "kl_penalty_coef", "learning_rate",
]
SILENCE = 20                    # seconds without a line, after which sampling prints one
PHASES = {"cold_start": "after the cold start", "grpo": "after GRPO", "supervised": "after training"}


class RunConsole:
    """Print the lines of a run. quiet: True on ranks that print nothing."""

    def __init__(self, quiet: bool):
        self.rich = Console(soft_wrap=True, highlight=False, quiet=quiet)
        self.last_line = time.monotonic()
        self.evaluation_seconds = 0.0                     # of the last evaluation

    def on_tokens(self, num_tokens: int, num_rows: int) -> None:
        """Print a line if sampling takes long: see SILENCE."""
        if time.monotonic() - self.last_line > SILENCE:
            self.print(f"  sampling: {num_tokens} tokens, {num_rows} completions are not finished")

    def print(self, text: str = "") -> None:
        self.last_line = time.monotonic()
        with suppress(SystemExit):                        # rich raises it in `train.py | head`
            self.rich.print(text, markup=False, emoji=False)

    def describe(self, plan, model) -> None:
        """Print the settings, the model, the data, the rewards and the phases of a Plan."""
        config, training = plan.config, plan.config.training
        if training.use_grpo:
            shown = config.flags | {"learning_rate": config.peak_learning_rate}
            settings = ", ".join(f"{name} {shown[name]}" for name in MAIN_SETTINGS)
            self.print(f"profile {training.profile or 'none'}: {settings}")
        size, trained = model.num_parameters() / 1e6, model.num_parameters(only_trainable=True) / 1e6
        name, count = config.model.model_path or "built-in tiny Gemma 3", num_processes()
        where = f"on {plan.device}" if count == 1 else f"over {count} processes on {plan.device.type}"
        numbers = f"{size:.1f}M parameters, {trained:.2f}M of them trained"
        self.print(f"model {name}: {numbers}, {config.model.precision}, {where}")
        num_train, num_eval = len(plan.data.train_set), len(plan.data.eval_set)
        self.print(f"data {config.data.dataset}: {num_train} examples to train on, {num_eval} held out")
        if training.use_grpo:
            weighted = zip(config.grpo.reward_functions, config.grpo.weights, strict=True)
            self.print("rewards " + ", ".join(f"{name} x {weight:g}" for name, weight in weighted))
        if config.data.instruction:
            self.print(f"instruction, before every prompt: {config.data.instruction!r}")
        for phase in plan.phases:
            rows = config.rollout_size if phase.name == "grpo" else training.batch_size
            amount = f"{training.batch_size} prompts, {rows} completions"
            self.print(f"phase {phase.name}: {phase.steps} steps of {amount}")

    def print_step(self, phase, step: int, step_of_run: int, metrics: dict) -> None:
        """Print a line for a step of a phase, with the remaining time of this phase and its evaluations."""
        total, every = phase.steps, phase.eval_steps
        steps_left = (total - step) / metrics.get("updates", 1)
        evaluations_left = math.ceil((total - step) / every) if every else 1
        seconds = steps_left * metrics["step_seconds"] + evaluations_left * self.evaluation_seconds
        line = f"{phase.name} {step_of_run:>4}/{step_of_run - step + total}"
        end = f"  left {timedelta(seconds=round(seconds))}"
        optional = "unscored", "skipped", "truncated"
        for name, form in UNITS.items():
            value = math.nan if metrics.get(name) is None else metrics[name]
            shown = not math.isnan(value) and (value or name not in optional)
            item = f"  {form.format(value)}" if shown else ""
            line += item if len(line + item + end) <= 80 else ""
        self.print(line + end)

    def print_completions(self, group: list[dict]) -> None:
        """Print the first completion of a group, and the rewards and advantages of all.

        Curves do not show whether a policy exploits a reward function; completions do.
        """
        reward, prompt = reward_text(group[0]["reward"]), as_text(group[0]["prompt"])
        self.print(f"  {prompt!r} -> {group[0]['completion']!r}: reward {reward}")
        self.print("    rewards    " + " ".join(reward_text(c["reward"]) for c in group))
        self.print("    advantages " + " ".join(reward_text(c["advantage"]) for c in group))

    def print_summary(self, config: Config, folder: Path, lines: list[dict], findings: list[str]) -> None:
        """Print the held-out results before and after each phase, and the paths of the files.

        lines, findings  the lines of metrics.jsonl; the findings of the training doctor about them
        """
        when = "before training" if config.model.model_path else "untrained"
        last: dict[str, str] = {}                         # the last result of each phase, in order
        for line in lines:
            if line["phase"] == "eval":
                last[when] = held_out_text(line, config)
            else:
                when = PHASES[line["phase"]]
        self.print("\nresults on held-out problems:" if last else "")
        for when, result in last.items():
            self.print(f"  {when:<22}{result}")
        for finding in findings:
            self.print(f"doctor: {finding}")
        for name, file in ("final model", "final"), ("curves", "curves.png"), ("report", "report.html"):
            self.print(f"{name + ':':<13}{folder}/{file}")


def reward_text(reward: float | None) -> str:
    """Return a reward or an advantage as text: "+1.30", or "?" if it is unknown."""
    return "?" if reward is None else f"{reward:+.2f}"


def held_out_text(result: dict, config: Config) -> str:
    """Return "accuracy 0.910 [0.870, 0.940] of 256, cut 3%", or rewards if the accuracy is unknown."""
    if "eval_accuracy" in result:
        n = config.training.eval_samples
        text = f"accuracy {with_interval(result, 'eval_accuracy')} of {result['eval_problems']}"
        text += f" x {n}, pass@{n} {result[f'eval_pass@{n}']:.3f}" if n > 1 else ""
        return f"{text}, cut {result['eval_truncated']:.0%}"
    scored = []
    for metric, mean in result.items():
        kind, _, name = metric.partition("/")
        if kind == "eval_reward" and mean is not None:
            scored.append(f"reward {name} {with_interval(result, metric)}")
    return ", ".join(scored) or "nothing could be scored"


def with_interval(result: dict, metric: str) -> str:
    """Return a mean of an evaluation as text: "0.910 [0.870, 0.940]", or "?" if nothing could be scored."""
    mean, low, high = (result.get(name) for name in with_limits(metric))
    interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
    return "?" if mean is None else f"{mean:.3f}{interval}"


def with_limits(metric: str) -> tuple[str, ...]:
    """Return the names of a metric and of the limits of its interval: eval_reward_low/length, and so on."""
    kind, slash, name = metric.partition("/")
    return metric, f"{kind}_low{slash}{name}", f"{kind}_high{slash}{name}"
