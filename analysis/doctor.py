"""
The training doctor: what the metrics of a run show at its end, and which flags to change.

find_problems is a table of rules: a name, a condition on the means of the first and the last rollouts, and
the advice. A change counts from ERRORS standard errors on. To add a rule, add a row, and a history to
tests/analysis/test_doctor.py.
"""

import math
from itertools import pairwise

from runs.groups import SUCCESS, mean_of

WINDOW = 5                      # rollouts that a metric is averaged over
LEAST = 10                      # rollouts below which nothing is found
ERRORS = 3                      # standard errors of a change that is no noise


class History:
    """Means over WINDOW rollouts of a run. Comparisons with NaN are False: what is missing is no finding.

    rollouts  metrics of all rollouts, the newest last;  flags  settings of the run, by name
    """

    def __init__(self, rollouts: list[dict], flags: dict):
        self.rollouts, self.flags = rollouts, flags
        self.right = next((f"reward/{name}" for name in SUCCESS if f"reward/{name}" in rollouts[-1]), "")

    def start(self, name: str) -> float:
        """Return the mean over the first rollouts."""
        return mean_of(self.rollouts[:WINDOW], name)

    def end(self, name: str, rollouts: int = WINDOW) -> float:
        """Return the mean over the last rollouts."""
        return mean_of(self.rollouts[-rollouts:], name)

    def noise(self, name: str) -> float:
        """Return ERRORS standard errors of a difference of means, from those of successive rollouts."""
        values = [mean_of([line], name) for line in self.rollouts]
        squares = [(b - a) ** 2 for a, b in pairwise(values) if not math.isnan(b - a)]
        return ERRORS * math.sqrt(sum(squares) / max(1, len(squares)) / WINDOW)

    def change(self, name: str) -> float:
        """Return the change from start to end, 0 if it may be noise."""
        change = self.end(name) - self.start(name)
        return 0.0 if abs(change) <= self.noise(name) else change

    def growth(self, name: str) -> float:
        """Return the mean at the end divided by that at the start."""
        return self.end(name) / (self.start(name) or math.nan)

    def course(self, name: str, form: str = ".2f") -> str:
        """Return the means at the start and the end as "from 0.97 to 0.00"."""
        return f"from {self.start(name):{form}} to {self.end(name):{form}}"

    def best_reward(self) -> float:
        """Return the highest mean reward over WINDOW rollouts."""
        parts = range(0, len(self.rollouts), WINDOW)
        means = [mean_of(self.rollouts[i : i + WINDOW], "mean_reward") for i in parts]
        return max((mean for mean in means if not math.isnan(mean)), default=math.nan)

    def reward_fell(self) -> bool:
        """Check that half of the best mean is lost, or of what it had gained since the start, and 0.01."""
        best = self.best_reward()
        share = max(0.01, 0.5 * abs(best), 0.5 * (best - self.start("mean_reward")))
        return best - self.end("mean_reward") > max(share, self.noise("mean_reward"))

    def improves(self) -> bool:
        """Check that more completions are right than at the start, or, if unknown, that rewards rose."""
        return self.change(self.right or "mean_reward") > 0

    def tied_beyond_chance(self) -> bool:
        """Check that most groups are tied, and more than chance ties if most completions are right."""
        tied, success = self.end("tied_groups", 4 * WINDOW), self.end(self.right, 4 * WINDOW)
        size = self.flags["num_completions_per_prompt"]
        by_chance = success**size + (1 - success) ** size
        return tied > 0.5 and not (success > 0.5 and tied < 0.2 + by_chance)

    def remedy_of_ties(self) -> str:
        """Return what to change: groups that are all right need harder problems, others the opposite."""
        tied, right = self.end("tied_groups"), self.end("tied_right_groups")
        if min(right, tied - right) > 0.2:
            return f"{right:.0%} are right, {tied - right:.0%} wrong: --dynamic_sampling 3 replaces them"
        if right > tied / 2:
            return "nearly all of them are right: take harder problems"
        return ("take easier problems, a reward function with partial credit, more --cold_start_steps "
                "or more --num_completions_per_prompt")


def find_problems(h: History) -> list[str]:
    """Return "rule: advice" for each rule whose condition holds, the most severe first."""
    flags, fell, no_more_right = h.flags, h.reward_fell(), not h.improves()
    rewards = [name for name in h.rollouts[-1] if name.startswith("reward/")]
    gained = max(rewards, key=h.change, default="")       # the function whose points rose most
    smaller_updates = (
        f"take a lower --learning_rate (now {flags['learning_rate']}), fewer --ppo_epochs (now "
        f"{flags['ppo_epochs']}) or a KL penalty (--kl_penalty_coef, now {flags['kl_penalty_coef']})")
    rules = [
        ("not_finite", h.end("skipped") > 0,
         f"updates that were not finite were skipped: {smaller_updates}, and inspect skipped.jsonl with "
         "analysis.replay"),
        ("unscored", h.end("unscored") > 0.1,
         f"{h.end('unscored'):.0%} of the completions could not be scored, and nothing is learned from them: "
         "look for the reason in rollouts.jsonl, reward_errors.jsonl or with --check"),
        ("length_hacking", h.growth("completion_tokens") > 1.5 and no_more_right and not fell
         and bool(h.right or h.end("truncated") > 0.3),
         f"completions grew {h.course('completion_tokens', '.0f')} tokens, and no more are right: see in "
         "rollouts.jsonl why, or take --overlong penalise"),
        ("reward_hacking", h.change("mean_reward") > 0 and h.change(h.right) < -0.01,
         f"the reward rose {h.course('mean_reward')} and {h.right} fell {h.course(h.right)}: {gained} pays "
         "for something else; see --check, and lower its --reward_weights"),
        ("collapse", fell,
         f"mean_reward fell from {h.best_reward():.2f}, its best, to {h.end('mean_reward'):.2f}: begin a run "
         f"from a checkpoint before that (--model_path), and {smaller_updates}"),
        ("saturated", h.end(h.right) > 0.95 and h.end("tied_groups") > 0.5,
         f"{h.end(h.right):.0%} of the completions are correct: take harder problems"),
        ("kl_drift", h.end("kl") - h.start("kl") > 0.1 and no_more_right,
         f"KL to the reference rose {h.course('kl')} nat/token, and no more completions are right: "
         f"{smaller_updates}"),
        ("length_collapse", h.growth("completion_tokens") < 0.5 and no_more_right,
         f"completions shrank {h.course('completion_tokens', '.0f')} tokens, and no more are right: see in "
         "rollouts.jsonl what they still earn, and lower its --reward_weights"),
        ("entropy_falls", h.growth("entropy") < 0.5 and no_more_right and not h.end(h.right) > 0.8,
         f"entropy fell {h.course('entropy')} nat/token, and no more completions are right: "
         f"{smaller_updates} or --entropy_coef 0.01"),
        ("ties", h.tied_beyond_chance() and not flags["use_value_head"],
         f"{h.end('tied_groups'):.0%} of groups have equal rewards, of which nothing is learned: "
         f"{h.remedy_of_ties()}"),
        ("truncation", min(h.end("truncated"), h.start("truncated")) > 0.3,
         f"{h.end('truncated'):.0%} of the completions are truncated, and were from the start: raise "
         f"--generation_max_length (now {flags['generation_max_length']})"),
    ]
    return [f"{name}: {advice}" for name, holds, advice in rules if holds]


def diagnose(lines: list[dict], flags: dict) -> list[str]:
    """Return a line on the course of a run, and what find_problems finds.

    lines  of metrics.jsonl;  flags  settings of the run by name, as in config.json
    """
    rollouts = [line for line in lines if line["phase"] == "grpo"]
    if not rollouts:
        return []
    h = History(rollouts, flags)
    names = filter(None, ["mean_reward", h.right])
    changes = [f"{name} {h.start(name):.2f} -> {h.end(name):.2f}" for name in names]
    tied, right = h.end("tied_groups"), h.end("tied_right_groups")
    if tied >= 0:
        parts = f", {right:.0%} all right and {tied - right:.0%} not" if h.right and right >= 0 else ""
        changes.append(f"tied groups {tied:.0%}{parts}")
    course = f"{', '.join(changes)} in {len(rollouts)} rollouts"
    by_teacher = flags["reward_functions"] == ["none"]    # alone: rewards say nothing
    return [course, *(find_problems(h) if len(rollouts) >= LEAST and not by_teacher else [])]
