"""
The training doctor: at most one sentence of advice after a step, on the metrics and the flag to change.

A rule takes the metrics so far and returns a sentence or None. The first rule in RULES with a sentence gives
the advice, and is then skipped for COOLDOWN rollouts. To add a rule, write a function and enter it into
RULES, in order of priority.
"""

import math
from collections.abc import Callable

WINDOW = 5                      # rollouts that a metric is averaged over
DISTANCE = 10                   # rollouts between earlier_mean and recent_mean
PATIENCE = 10                   # rollouts of tied groups alone before all_tied gives advice
COOLDOWN = 20                   # rollouts before the same rule gives advice again


def diagnose(history: list[dict], config) -> str | None:
    """Return 'rule: sentence' or None. history: metrics of the GRPO rollouts so far, the newest last."""
    if len(history) < WINDOW:
        return None
    recent = {(line.get("advice") or "").partition(":")[0] for line in history[-COOLDOWN:]}
    for name, rule in RULES.items():
        sentence = None if name in recent else rule(history, config)
        if sentence:
            return f"{name}: {sentence}"
    return None


def recent_mean(history: list[dict], metric: str) -> float:
    """Return the mean of a metric over the last WINDOW rollouts; NaN if it is missing."""
    return mean_of(history[-WINDOW:], metric)


def earlier_mean(history: list[dict], metric: str) -> float:
    """Return recent_mean as it was DISTANCE rollouts ago; NaN if there were none."""
    return mean_of(history[-WINDOW - DISTANCE : -DISTANCE], metric)


def mean_of(lines: list[dict], metric: str) -> float:
    """Return the mean of a metric over the lines where it is a finite number; NaN if there are none."""
    values = [line.get(metric) for line in lines]
    values = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def expected_ties(success: float, group_size: int) -> float:
    """Return the expected share of groups with all completions correct or all wrong: p^G + (1 - p)^G."""
    return success**group_size + (1 - success) ** group_size


# ---- rules: comparisons with NaN are False, so a missing metric gives no advice ----------------------------


def not_finite(history, config):
    """Report skipped updates."""
    skipped = sum(line.get("skipped") or 0 for line in history[-WINDOW:])
    if skipped:
        return (f"{skipped} of the last updates had a loss or gradient that is not finite and were skipped: "
                f"lower --learning_rate (now {config.training.learning_rate:g}), and inspect skipped.jsonl "
                "with --replay")


def nothing_scored(history, config):
    """Report that reward functions scored no completion."""
    if recent_mean(history, "unscored") == 1:
        return (f"none of the completions of {WINDOW} rollouts could be scored, so nothing is learned: stop, "
                "and look for the reason in reward_errors.jsonl or with --check")


def unscored(history, config):
    """Report that reward functions could not score some completions."""
    share = recent_mean(history, "unscored")
    if 0.1 < share < 1:
        return f"{share:.0%} of the completions could not be scored and give no gradient: see rollouts.jsonl"


def all_tied(history, config):
    """Report that PATIENCE rollouts had no gradient from rewards, and why."""
    lines, success = history[-PATIENCE:], mean_of(history[-PATIENCE:], "reward/correctness")
    tied = len(lines) == PATIENCE and all(line.get("tied_groups") == 1 for line in lines)
    if config.grpo.use_value_head or not tied:
        return None
    found = f"in {PATIENCE} rollouts no group had two different rewards, so nothing was learned from them"
    explore = (f"raise --generation_temperature (now {config.grpo.generation_temperature:g}) or "
               f"--num_completions_per_prompt (now {config.grpo.num_completions_per_prompt})")
    if success == 1:
        return f"{found}: all completions are correct: take harder problems"
    if success == 0:
        return (f"{found}: no completion is correct: learn from demonstrations first, with more "
                f"--cold_start_steps (now {config.training.cold_start_steps}), take easier problems or a "
                f"reward function with partial credit, or {explore}")
    return f"{found}: {explore}, or take a reward function that tells them apart"


def saturated(history, config):
    """Report that almost all completions are correct."""
    success = recent_mean(history, "reward/correctness")
    if success > 0.98:
        return f"{success:.0%} of the completions are correct, so little can be learned: take harder problems"


def ties(history, config):
    """Report that most groups have equal rewards, and why."""
    tied, success = recent_mean(history, "tied_groups"), recent_mean(history, "reward/correctness")
    size = config.grpo.num_completions_per_prompt
    if config.grpo.use_value_head or not tied > 0.5:
        return None
    found = f"{tied:.0%} of groups have equal rewards and give no gradient"
    or_replace = "" if config.grpo.dynamic_sampling else ", or --dynamic_sampling 3"
    if not 0 < success < 1:
        return f"{found}: take easier or harder problems, or a reward function with partial credit"
    expected = expected_ties(success, size)
    found += f"; with success {success:.2f} and {size} completions {expected:.0%} is expected"
    wanted = next((n for n in (2 * size, 4 * size, 8 * size) if expected_ties(success, n) < 0.5), None)
    if expected < tied - 0.2 and or_replace:
        return f"{found}: some problems are always solved, others never; --dynamic_sampling 3 replaces them"
    if wanted is None:
        return f"{found}: take {'easier' if success < 0.5 else 'harder'} problems{or_replace}"
    return f"{found}: raise --num_completions_per_prompt to {wanted}"


def entropy_falls(history, config):
    """Report a loss of entropy: the policy explores less."""
    before, after = earlier_mean(history, "entropy"), recent_mean(history, "entropy")
    if after < 0.6 * before:
        return (f"entropy fell from {before:.2f} to {after:.2f} nat/token in {DISTANCE} rollouts: if the "
                f"reward does not rise, lower --learning_rate (now {config.training.learning_rate:g}), "
                "or try --entropy_coef 0.01")


def lengths_explode(history, config):
    """Report completions that grow."""
    before, after = earlier_mean(history, "completion_tokens"), recent_mean(history, "completion_tokens")
    if after > 2 * before:
        return (f"completions grew from {before:.0f} to {after:.0f} tokens in {DISTANCE} rollouts: check in "
                "rollouts.jsonl that the text is useful; --overlong penalise takes points off near the limit")


def lengths_collapse(history, config):
    """Report completions that shrink, often to collect a format reward without solving the problem."""
    before, after = earlier_mean(history, "completion_tokens"), recent_mean(history, "completion_tokens")
    if after < 0.5 * before:
        return (f"completions shrank from {before:.0f} to {after:.0f} tokens in {DISTANCE} rollouts: see in "
                "rollouts.jsonl which rewards they still get, and lower the --reward_weights of those that "
                "need no solution")


def truncation(history, config):
    """Report completions that are truncated at the limit."""
    share, limit = recent_mean(history, "truncated"), config.grpo.generation_max_length
    if share > 0.3:
        return (f"{share:.0%} of the completions were truncated at {limit} tokens: raise "
                f"--generation_max_length to {2 * limit}")


def kl_runs_away(history, config):
    """Report a fast rise of the KL to the reference."""
    before, after = earlier_mean(history, "kl"), recent_mean(history, "kl")
    coefficient = history[-1].get("kl_coef", config.grpo.kl_penalty_coef)
    if after > 0.1 and after > 3 * before:
        return (f"KL to the reference rose from {before:.2f} to {after:.2f} nat/token in {DISTANCE} "
                f"rollouts: raise --kl_penalty_coef (now {coefficient:g}), or lower --learning_rate")


def clipping(history, config):
    """Report that the clip removes the gradient of many tokens."""
    share = recent_mean(history, "clip_fraction")
    if share > 0.3 and config.grpo.loss_type != "gspo":   # gspo's clip range is so narrow that this is usual
        return (f"{share:.0%} of the tokens are clipped: the updates move too far from the rollout's policy; "
                f"lower --ppo_epochs (now {config.grpo.ppo_epochs}) or --learning_rate")


RULES: dict[str, Callable] = {
    rule.__name__: rule
    for rule in (
        not_finite, nothing_scored, unscored, all_tied, saturated, lengths_collapse, kl_runs_away,
        entropy_falls, lengths_explode, truncation, clipping, ties,
    )
}
