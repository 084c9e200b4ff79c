"""
The training doctor: what the metrics of a run show at its end, and which flags to change.

find_problems is a table of rules: a name, a condition on means over the first and the last tenth of the run,
and the advice. To add a rule, add a row, and a history to tests/analysis/test_doctor.py.
"""

import math

from runs.groups import SUCCESS, mean_of

LEAST = 10                      # rollouts below which nothing is found


class History:
    """Means over the first and the last tenth of a run, of at least 5 rollouts.

    A comparison with NaN, the mean of a metric that is missing, is False: no finding.
    """

    def __init__(self, rollouts: list[dict]):
        self.rollouts, self.window = rollouts, max(5, len(rollouts) // 10)
        self.right = next((f"reward/{name}" for name in SUCCESS if f"reward/{name}" in rollouts[-1]), "")

    def start(self, name: str) -> float:
        """Return the mean over the first tenth."""
        return mean_of(self.rollouts[: self.window], name)

    def end(self, name: str) -> float:
        """Return the mean over the last tenth."""
        return mean_of(self.rollouts[-self.window :], name)

    def change(self, name: str) -> float:
        """Return the change from start to end."""
        return self.end(name) - self.start(name)

    def course(self, name: str, form: str = ".2f") -> str:
        """Return the means at the start and the end as "from 0.97 to 0.00"."""
        return f"from {self.start(name):{form}} to {self.end(name):{form}}"

    def best_reward(self) -> float:
        """Return the highest mean reward over a tenth of the run."""
        parts = range(0, len(self.rollouts), self.window)
        means = [mean_of(self.rollouts[i : i + self.window], "mean_reward") for i in parts]
        return max((mean for mean in means if not math.isnan(mean)), default=math.nan)

    def improves(self) -> bool:
        """Return True if more completions are right than at the start, or, if unknown, rewards are higher."""
        name = self.right or "mean_reward"
        return self.change(name) > 0.05 * abs(self.start(name))


def find_problems(h: History, flags: dict) -> list[str]:
    """Return "rule: advice" for each rule whose condition holds, the most severe first."""
    best, reward = h.best_reward(), h.end("mean_reward")
    lost = max(0.05, 0.5 * abs(best), 0.5 * (best - h.start("mean_reward")))     # reward, in a collapse
    tied, tied_right = h.end("tied_groups"), h.end("tied_right_groups")
    fewer_right = max(0.02, 0.2 * h.start(h.right))       # share of the completions, in reward hacking
    longer = h.end("completion_tokens") > 1.5 * h.start("completion_tokens") and not h.improves()
    remedy = ("take easier problems, a reward function with partial credit, more --cold_start_steps or more "
              "--num_completions_per_prompt")
    if tied_right > tied / 2:
        remedy = "most of them are all right: take harder problems, or --dynamic_sampling 3"
    smaller_updates = (
        f"take a lower --learning_rate (now {flags['learning_rate']}), fewer --ppo_epochs (now "
        f"{flags['ppo_epochs']}) or a KL penalty (--kl_penalty_coef, now {flags['kl_penalty_coef']})")
    rules = [
        ("not_finite", h.end("skipped") > 0,
         f"updates that were not finite were skipped, and their batches are in skipped.jsonl: "
         f"{smaller_updates}"),
        ("unscored", h.end("unscored") > 0.1,
         f"{h.end('unscored'):.0%} of the completions could not be scored, and nothing is learned from them: "
         "look for the reason in rollouts.jsonl, reward_errors.jsonl or with --check"),
        ("collapse", best - reward > lost,
         f"mean_reward fell from {best:.2f}, its best, to {reward:.2f}: begin a run from a checkpoint before "
         f"that (--model_path), and {smaller_updates}"),
        ("reward_hacking", h.change("mean_reward") > 0 and -h.change(h.right) > fewer_right,
         f"the reward rose {h.course('mean_reward')} and {h.right} fell {h.course(h.right)}: another reward "
         "function pays for something else; see --check, and lower its --reward_weights"),
        ("length", longer,
         f"completions grew {h.course('completion_tokens', '.0f')} tokens, and no more are right: see in "
         "rollouts.jsonl why, or take --overlong penalise"),
        ("entropy", h.end("entropy") < 0.5 * h.start("entropy") and not h.improves(),
         f"entropy fell {h.course('entropy')} nat/token, and no more completions are right: "
         f"{smaller_updates} or --entropy_coef 0.01"),
        ("ties", tied > 0.7 and not flags["use_value_head"],
         f"{tied:.0%} of the groups have equal rewards, so nothing is learned from them: {remedy}"),
        ("truncation", h.end("truncated") > 0.3 and not longer,
         f"{h.end('truncated'):.0%} of the completions are truncated: raise --generation_max_length (now "
         f"{flags['generation_max_length']})"),
    ]
    return [f"{name}: {advice}" for name, holds, advice in rules if holds]


def diagnose(lines: list[dict], flags: dict) -> list[str]:
    """Return a line on the course of a run, and what find_problems finds.

    lines  of metrics.jsonl;  flags  settings of the run by name, as in config.json
    """
    rollouts = [line for line in lines if line["phase"] == "grpo"]
    if not rollouts:
        return []
    h = History(rollouts)
    names = filter(None, ["mean_reward", h.right])
    changes = [f"{name} {h.start(name):.2f} -> {h.end(name):.2f}" for name in names]
    changes.append(f"tied groups {h.end('tied_groups'):.0%}")
    course = f"{', '.join(changes)} in {len(rollouts)} rollouts"
    by_teacher = flags["reward_functions"] == ["none"]    # alone: rewards say nothing
    return [course, *(find_problems(h, flags) if len(rollouts) >= LEAST and not by_teacher else [])]
