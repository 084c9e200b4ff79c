"""
The training doctor: at most one open advice, on the metrics of a run and the flags to change, and a verdict
at the end.

RULES is a table in order of severity: a condition on the metrics now, a short and a long time ago, and the
advice. An advice is given once, stays open while its condition holds, and is then withdrawn; a rule above it
replaces it. A change counts from ERRORS standard errors on. To add a rule, add a row, and a history to
tests/runs/test_doctor.py.
"""

import math
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

WINDOW = 5                      # rollouts that a metric is averaged over
SHORT, LONG = 10, 100           # rollouts between the means that are compared
COOLDOWN = 20                   # rollouts before the same rule gives advice again
ERRORS = 3                      # standard errors of a change that is no noise
WITHDRAWN = "withdrawn, as it no longer holds"
SUCCESS = [f"reward/{name}" for name in (        # functions that tell right from wrong; the first one known
    "correctness", "math_equality", "passes_tests", "countdown", "multiple_choice")]


def mean_of(lines: list[dict], metric: str) -> float:
    """Return the mean of a metric over the lines where it is a finite number; NaN if there are none."""
    values = [line.get(metric) for line in lines]
    values = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


class Metrics:
    """Means over WINDOW rollouts of a run. Comparisons with NaN are False: what is missing gets no advice."""

    def __init__(self, history: list[dict], config, is_open: bool = False):
        """history: metrics of the rollouts, the newest last. is_open: its limits are lower, to stay open."""
        self.history, self.config, self.grpo, self.is_open = history, config, config.grpo, is_open
        self.right = next((name for name in SUCCESS if name in history[-1]), "")

    def now(self, name: str) -> float:
        """Return the mean over the last rollouts."""
        return mean_of(self.history[-WINDOW:], name)

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

    def grew(self, name: str, rollouts: float) -> float:
        """Return the mean now divided by that many rollouts ago."""
        return self.now(name) / (self.ago(name, rollouts) or math.nan)

    def was(self, name: str, form: str = ".2f") -> str:
        """Return the mean LONG ago and now as "from 0.97 to 0.00"."""
        return f"from {self.ago(name):{form}} to {self.now(name):{form}}"

    @cached_property
    def success(self) -> float:
        """Return the share of right completions."""
        return self.now(self.right)

    @cached_property
    def improves(self) -> bool:
        """Check that more completions are right than LONG ago; where that is not known, that rewards rose."""
        return self.change(self.right or "mean_reward") > 0

    @property
    def smaller_updates(self) -> str:
        """Return flags that limit what an update changes, without those that would change nothing."""
        flags = [f"a lower --learning_rate (now {self.config.training.learning_rate:g})"]
        flags += [f"fewer --ppo_epochs (now {self.grpo.ppo_epochs})"] * (self.grpo.ppo_epochs > 1)
        kl = f"a higher --kl_penalty_coef (now {self.history[-1].get('kl_coef', self.grpo.kl_coef):g})"
        return " or ".join([*flags, kl if self.grpo.kl_coef else "--use_kl_penalty true"])


def expected_ties(success: float, group_size: int) -> float:
    """Return the expected share of groups with all completions correct or all wrong: p^G + (1 - p)^G."""
    return success**group_size + (1 - success) ** group_size


def all_tied(m: Metrics) -> str:
    """Return the advice if no group has different rewards."""
    explore = (f"raise --generation_temperature (now {m.grpo.generation_temperature:g}) or "
               f"--num_completions_per_prompt (now {m.grpo.num_completions_per_prompt})")
    found = f"in {SHORT} rollouts no group had two different rewards, so nothing was learned from them"
    if m.success == 0:
        return (f"{found}: no completion is correct: learn from demonstrations first, with more "
                f"--cold_start_steps (now {m.config.training.cold_start_steps}), take easier problems or a "
                f"reward function with partial credit, or {explore}")
    return f"{found}: {explore}, or take a reward function that distinguishes them"


def most_tied(m: Metrics) -> bool:
    """Check that most groups are tied, and more than chance ties if most completions are right."""
    lines = m.history[-2 * SHORT :]
    tied, success = mean_of(lines, "tied_groups"), mean_of(lines, m.right)
    by_chance = success > 0.5 and tied < 0.2 + expected_ties(success, m.grpo.num_completions_per_prompt)
    enough = len(lines) == 2 * SHORT and tied > (0.4 if m.is_open else 0.5)
    return enough and not by_chance and not m.grpo.use_value_head


def ties(m: Metrics) -> str:
    """Return the advice if most groups are tied, by its reason: chance, or problems of unequal difficulty."""
    size, tied, success = m.grpo.num_completions_per_prompt, m.now("tied_groups"), m.success
    or_replace = "" if m.grpo.dynamic_sampling else ", or --dynamic_sampling 3"
    found = f"{tied:.0%} of groups have equal rewards and give no gradient"
    if not 0 < success < 1:
        return f"{found}: take a reward function with partial credit, or other problems{or_replace}"
    expected = expected_ties(success, size)
    found += f"; with success {success:.2f} and {size} completions {expected:.0%} is expected"
    if expected < tied - 0.2 and or_replace:
        return f"{found}: some problems are always solved, others never; --dynamic_sampling 3 replaces them"
    larger = next((n for n in (2 * size, 4 * size, 8 * size) if expected_ties(success, n) < 0.5), 0)
    if larger and expected > 0.5:
        return f"{found}: raise --num_completions_per_prompt to {larger}"
    return f"{found}: take {'easier' if success < 0.5 else 'harder'} problems{or_replace}"


def reward_hacking(m: Metrics) -> str:
    """Return the advice if the reward rises and fewer completions are right: which function gained."""
    names = [name.rpartition(":")[2] for name in m.grpo.reward_functions]
    gains = [weight * m.change(f"reward/{name}") for name, weight in zip(names, m.grpo.weights, strict=True)]
    gained = max(zip(gains, names, strict=True), key=lambda pair: pair[0] if pair[0] > 0 else 0)[1]
    return (f"the reward rose {m.was('mean_reward')} and {m.right} fell {m.was(m.right)}: {gained} rewards "
            "something else; read completions, run rewards.py --lint, and lower its --reward_weights")


def collapse(m: Metrics) -> str:
    """Return the advice if most of what was reached is lost."""
    fallen = "mean_reward" if m.fell("mean_reward") else m.right
    return (f"{fallen} fell from {m.best(fallen):.2f}, its best, to {m.now(fallen):.2f}: stop, and begin a "
            f"run from a checkpoint before that (--model_path), with {m.smaller_updates}")


# Name -> condition, advice: functions of Metrics.
RULES: dict[str, tuple[Callable[[Metrics], bool], Callable[[Metrics], str]]] = {
    "not_finite": (
        lambda m: m.now("skipped") > 0,
        lambda m: "updates had a loss or gradient that is not finite and were skipped: take "
                  f"{m.smaller_updates}, and inspect skipped.jsonl with --replay"),
    "nothing_scored": (
        lambda m: m.now("unscored") == 1,
        lambda m: f"none of the completions of {WINDOW} rollouts could be scored, so nothing is learned: "
                  "stop, and look for the reason in reward_errors.jsonl or with --check"),
    "unscored": (
        lambda m: m.now("unscored") > (0.05 if m.is_open else 0.1),
        lambda m: f"{m.now('unscored'):.0%} of the completions could not be scored and give no gradient: see "
                  "rollouts.jsonl"),
    "length_hacking": (
        lambda m: (m.grew("completion_tokens", LONG) > (1.3 if m.is_open else 1.5) and not m.improves
                   and not m.fell("mean_reward") and bool(m.right or m.now("truncated") > 0.3)),
        lambda m: f"completions grew {m.was('completion_tokens', '.0f')} tokens, and no more of them are "
                  "right: see in rollouts.jsonl what they earn points with" + (
                      "; --overlong penalise takes points off near the limit" * (m.grpo.overlong == "keep"))),
    "reward_hacking": (lambda m: m.change("mean_reward") > 0 > m.change(m.right), reward_hacking),
    "collapse": (
        lambda m: m.fell("mean_reward") or (m.best(m.right) > 0.1 and m.fell(m.right)),
        collapse),
    "saturated": (
        lambda m: m.success > (0.85 if m.is_open else 0.95) and m.now("tied_groups") > 0.5,
        lambda m: f"{m.success:.0%} of the completions are correct, so little is left to learn: take harder "
                  "problems, or stop"),
    "all_tied": (
        lambda m: (mean_of(m.history[-SHORT:], "tied_groups") == 1 and len(m.history) >= SHORT
                   and not m.grpo.use_value_head),
        all_tied),
    "kl_drift": (
        lambda m: m.now("kl") - m.ago("kl") > (0.05 if m.is_open else 0.1) and not m.improves,
        lambda m: f"KL to the reference rose {m.was('kl')} nat/token, and no more completions are right: "
                  f"take {m.smaller_updates}"),
    "length_collapse": (
        lambda m: m.grew("completion_tokens", LONG) < (0.7 if m.is_open else 0.5) and not m.improves,
        lambda m: f"completions shrank {m.was('completion_tokens', '.0f')} tokens, and no more of them are "
                  "right: see in rollouts.jsonl what they still earn, and lower its --reward_weights"),
    "entropy_falls": (
        lambda m: (min(m.grew("entropy", SHORT), m.grew("entropy", LONG)) < (0.65 if m.is_open else 0.5)
                   and not m.improves and not m.success > 0.8),
        lambda m: f"entropy fell {m.was('entropy')} nat/token, and no more completions are right: take "
                  + m.smaller_updates + " or --entropy_coef 0.01" * (not m.grpo.entropy_coef)),
    "truncation": (
        lambda m: min(m.now("truncated"), m.ago("truncated", math.inf)) > (0.2 if m.is_open else 0.3),
        lambda m: f"{m.now('truncated'):.0%} of the completions are truncated, and were from the start: "
                  f"raise --generation_max_length (now {m.grpo.generation_max_length})"),
    "clipping": (               # the clip of gspo is so narrow that this is usual
        lambda m: m.now("clip_fraction") > (0.2 if m.is_open else 0.3) and m.grpo.loss_type != "gspo",
        lambda m: f"{m.now('clip_fraction'):.0%} of the tokens are clipped: the updates move too far from "
                  f"the policy that sampled; take {m.smaller_updates}"),
    "ties": (most_tied, ties),
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
    current, recent = open_advice(history), history[-COOLDOWN:]
    given = {str(line["advice"]).partition(":")[0] for line in recent if line.get("advice")}
    urgent = "not_finite", "nothing_scored"               # before there are two windows to compare
    if len(history) < WINDOW:
        return None
    metrics = Metrics(history, config)
    for name, (holds, advice) in RULES.items():
        if name == current:
            break
        if name not in given and (len(history) >= 2 * WINDOW or name in urgent) and holds(metrics):
            return f"{name}: {advice(metrics)}"
    if not current:
        return None
    latest = (history[: len(history) - i] for i in range(WINDOW))
    held = any(RULES[current][0](Metrics(lines, config, is_open=True)) for lines in latest)
    return None if held else f"{current}: {WITHDRAWN}"


def verdict(history: list[dict], config) -> str:
    """Return a line on a run: its reward and its right completions at the start and the end, open advice."""
    if not history:
        return "no rollouts"
    m, names = Metrics(history, config), ["mean_reward", Metrics(history, config).right]
    changes = [f"{name} {m.ago(name, math.inf):.2f} -> {m.now(name):.2f}" for name in filter(None, names)]
    advice = open_advice(history)
    return f"{', '.join(changes)} in {len(history)} rollouts; open advice: {advice or 'none'}"
