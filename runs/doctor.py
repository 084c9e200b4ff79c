"""
The training doctor: at most one open advice, on the metrics of a run and the flags to change, and a verdict
at the end.

RULES is a table in order of severity: a condition on the metrics now and a while ago, and the advice. An
advice is given when its condition holds, and withdrawn when it has not held for STAYS rollouts; a rule above
it replaces it. A change counts from ERRORS standard errors on. To add a rule, add a row, and a history to
tests/runs/test_doctor.py.
"""

import math
from collections.abc import Callable
from itertools import pairwise

from runs.metrics import SUCCESS, mean_of

WINDOW = 5                      # rollouts that a metric is averaged over
SHORT, LONG = 10, 100           # rollouts between the means that are compared
STAYS = 20                      # rollouts without its condition after which an advice is withdrawn
ERRORS = 3                      # standard errors of a change that is no noise
WITHDRAWN = "withdrawn, as it no longer holds"


class Metrics:
    """Means over WINDOW rollouts of a run. Comparisons with NaN are False: what is missing gets no advice."""

    def __init__(self, history: list[dict], config):
        """history: metrics of the rollouts, the newest last."""
        self.history, self.config, self.grpo = history, config, config.grpo
        self.right = next((f"reward/{name}" for name in SUCCESS if f"reward/{name}" in history[-1]), "")
        self.taught = config.grpo.reward_functions == ["none"]                   # by a teacher alone

    def now(self, name: str, rollouts: int = WINDOW) -> float:
        """Return the mean over the last rollouts."""
        return mean_of(self.history[-rollouts:], name)

    def ago(self, name: str, rollouts: float = LONG) -> float:
        """Return the mean that many rollouts ago, or over the first ones."""
        start = int(max(0, len(self.history) - WINDOW - rollouts))
        return mean_of(self.history[start : start + WINDOW], name)

    def change(self, name: str) -> float:
        """Return the change in LONG rollouts, 0 if it may be noise."""
        change = self.now(name) - self.ago(name)
        return 0.0 if abs(change) <= self.noise(name) else change

    def noise(self, name: str) -> float:
        """Return ERRORS standard errors of a difference of means, from those of successive rollouts."""
        values = [mean_of([line], name) for line in self.history[-LONG - WINDOW :]]
        squares = [(b - a) ** 2 for a, b in pairwise(values) if not math.isnan(b - a)]
        return ERRORS * math.sqrt(sum(squares) / max(1, len(squares)) / WINDOW)

    def best(self, name: str) -> float:
        """Return the highest mean so far."""
        means = [mean_of(self.history[i : i + WINDOW], name) for i in range(0, len(self.history), WINDOW)]
        return max((mean for mean in means if not math.isnan(mean)), default=math.nan)

    def fell(self, name: str) -> bool:
        """Check that half of the best mean is lost, and of what it had gained since the start, and 0.01."""
        best = self.best(name)
        share = max(0.01, 0.5 * abs(best), 0.5 * (best - self.ago(name, math.inf)))
        return best - self.now(name) > max(share, self.noise(name))

    def fallen(self) -> str:
        """Return "mean_reward" or the metric of right completions, if it fell, else ""."""
        names = [self.right] if self.best(self.right) > 0.1 else []
        return next((name for name in ["mean_reward", *names] if self.fell(name)), "")

    def grew(self, name: str, rollouts: float = LONG) -> float:
        """Return the mean now divided by that many rollouts ago."""
        return self.now(name) / (self.ago(name, rollouts) or math.nan)

    def was(self, name: str, form: str = ".2f") -> str:
        """Return the mean LONG ago and now as "from 0.97 to 0.00"."""
        return f"from {self.ago(name):{form}} to {self.now(name):{form}}"

    def improves(self) -> bool:
        """Check that more completions are right than LONG ago; where that is not known, that rewards rose, or
        that the KL to a teacher fell.
        """
        return self.change("kl") < 0 if self.taught else self.change(self.right or "mean_reward") > 0

    def most_tied(self) -> bool:
        """Check that all groups are tied, or for longer most, and more than chance ties if most are right."""
        tied, success = self.now("tied_groups", 2 * SHORT), self.now(self.right, 2 * SHORT)
        expected = expected_ties(success, self.grpo.num_completions_per_prompt)
        most = len(self.history) >= 2 * SHORT and tied > 0.5
        by_chance = success > 0.5 and tied < 0.2 + expected
        return self.now("tied_groups", SHORT) == 1 or (most and not by_chance)

    def remedy_of_ties(self) -> str:
        """Return what to change: groups that are all right need harder problems, others the opposite."""
        tied, right = self.now("tied_groups"), self.now("tied_right_groups")
        if min(right, tied - right) > 0.2:
            return f"{right:.0%} are right, {tied - right:.0%} wrong: --dynamic_sampling 3 replaces them"
        if right > tied / 2:
            return "nearly all of them are right: take harder problems"
        if right <= tied / 2:
            return ("nearly all of them are wrong: take easier problems, more --cold_start_steps "
                    f"(now {self.config.training.cold_start_steps}) or --num_completions_per_prompt")
        return "take other problems, a reward function with partial credit, or --dynamic_sampling 3"

    def gained(self) -> str:
        """Return the reward function whose points rose most."""
        return max((name for name in self.history[-1] if name.startswith("reward/")), key=self.change)

    def smaller_updates(self) -> str:
        """Return flags that limit what an update changes, without those that would change nothing."""
        epochs = f", fewer --ppo_epochs (now {self.grpo.ppo_epochs})" * (self.grpo.ppo_epochs > 1)
        kl = "a higher --kl_penalty_coef" if self.grpo.kl_coef else "--use_kl_penalty true"
        return f"a lower --learning_rate (now {self.config.training.learning_rate:g}){epochs} or {kl}"


def expected_ties(success: float, group_size: int) -> float:
    """Return the expected share of groups with all completions correct or all wrong: p^G + (1 - p)^G."""
    return success**group_size + (1 - success) ** group_size


# Name -> condition, advice: functions of Metrics.
RULES: dict[str, tuple[Callable[[Metrics], bool], Callable[[Metrics], str]]] = {
    "not_finite": (
        lambda m: m.now("skipped") > 0,
        lambda m: f"updates that were not finite were skipped: take {m.smaller_updates()}, and inspect "
                  "skipped.jsonl with --replay"),
    "unscored": (
        lambda m: m.now("unscored") > 0.1,
        lambda m: f"{m.now('unscored'):.0%} of the completions could not be scored, and nothing is learned "
                  "from them: look for the reason in rollouts.jsonl, reward_errors.jsonl or with --check"),
    "length_hacking": (
        lambda m: (m.grew("completion_tokens") > 1.5 and not m.improves() and not m.fell("mean_reward")
                   and bool(m.right or m.now("truncated") > 0.3)),
        lambda m: f"completions grew {m.was('completion_tokens', '.0f')} tokens, and no more are right: see "
                  "in rollouts.jsonl why" + ", or take --overlong penalise" * (m.grpo.overlong == "keep")),
    "reward_hacking": (
        lambda m: m.change("mean_reward") > 0 > m.change(m.right),
        lambda m: f"the reward rose {m.was('mean_reward')} and {m.right} fell {m.was(m.right)}: {m.gained()} "
                  "pays for something else; run rewards.py --lint, and lower its --reward_weights"),
    "collapse": (
        lambda m: m.fallen() != "",
        lambda m: f"{m.fallen()} fell from {m.best(m.fallen()):.2f}, its best, to {m.now(m.fallen()):.2f}: "
                  "stop, and begin a run from a checkpoint before that (--model_path), with "
                  f"{m.smaller_updates()}"),
    "saturated": (
        lambda m: m.now(m.right) > 0.95 and m.now("tied_groups") > 0.5,
        lambda m: f"{m.now(m.right):.0%} of the completions are correct: take harder problems, or stop"),
    "kl_drift": (
        lambda m: m.now("kl") - m.ago("kl") > 0.1 and not m.improves(),
        lambda m: f"KL to the reference rose {m.was('kl')} nat/token, and no more completions are right: "
                  f"take {m.smaller_updates()}"),
    "length_collapse": (
        lambda m: m.grew("completion_tokens") < 0.5 and not m.improves(),
        lambda m: f"completions shrank {m.was('completion_tokens', '.0f')} tokens, and no more are right: "
                  "see in rollouts.jsonl what they still earn, and lower its --reward_weights"),
    "entropy_falls": (
        lambda m: (min(m.grew("entropy", SHORT), m.grew("entropy")) < 0.5 and not m.improves()
                   and not m.now(m.right) > 0.8 and not m.taught),
        lambda m: f"entropy fell {m.was('entropy')} nat/token, and no more completions are right: take "
                  + m.smaller_updates() + " or --entropy_coef 0.01" * (not m.grpo.entropy_coef)),
    "ties": (
        lambda m: m.most_tied() and not m.grpo.use_value_head and not m.taught,
        lambda m: f"{m.now('tied_groups'):.0%} of groups have equal rewards, of which nothing is learned: "
                  + m.remedy_of_ties()),
    "truncation": (
        lambda m: min(m.now("truncated"), m.ago("truncated", math.inf)) > 0.3,
        lambda m: f"{m.now('truncated'):.0%} of the completions are truncated, and were from the start: "
                  f"raise --generation_max_length (now {m.grpo.generation_max_length})"),
    "clipping": (               # the clip of gspo is so narrow that this is usual
        lambda m: m.now("clip_fraction") > 0.3 and m.grpo.loss_type != "gspo",
        lambda m: f"{m.now('clip_fraction'):.0%} of the tokens are clipped: take {m.smaller_updates()}"),
}


def open_advice(history: list[dict]) -> str:
    """Return the name of the rule whose advice is open, "" if there is none."""
    given = next((str(line["advice"]) for line in reversed(history) if line.get("advice")), "")
    name, _, sentence = given.partition(": ")
    return "" if sentence == WITHDRAWN or name not in RULES else name


def diagnose(history: list[dict], config) -> str | None:
    """Return "rule: sentence" for a new advice, "rule: withdrawn, ..." for one that no longer holds, or None.

    history  metrics of the GRPO rollouts so far, the newest last, with the advice given before
    """
    if len(history) < 2 * WINDOW:
        return None
    current, metrics = open_advice(history), Metrics(history, config)
    for name, (holds, advice) in RULES.items():
        if name == current:
            break
        if holds(metrics):
            return f"{name}: {advice(metrics)}"
    lately = (Metrics(history[:n], config) for n in range(len(history), max(0, len(history) - STAYS), -1))
    if current and not any(RULES[current][0](metrics) for metrics in lately):
        return f"{current}: {WITHDRAWN}"
    return None


def verdict(history: list[dict], config) -> str:
    """Return a line on a run: its reward and its right completions at the start and the end, open advice."""
    if not history:
        return "no rollouts"
    m = Metrics(history, config)
    names = filter(None, ["mean_reward", m.right])
    changes = [f"{name} {m.ago(name, math.inf):.2f} -> {m.now(name):.2f}" for name in names]
    advice, tied, right = open_advice(history), m.now("tied_groups"), m.now("tied_right_groups")
    of_these = f", {right:.0%} all right and {tied - right:.0%} not" if m.right and right >= 0 else ""
    changes += [f"tied groups {tied:.0%}{of_these}"] * (tied >= 0)
    return f"{', '.join(changes)} in {len(history)} rollouts; open advice: {advice or 'none'}"
