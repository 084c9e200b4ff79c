"""
The training doctor: after a step, at most one plain sentence on what the numbers mean and which flag to turn.

A rule looks at the steps so far and answers with a sentence or None. The first rule that speaks is heard, and then stays
silent for a while. To add one, write it and enter it into RULES; its place there is its rank.
"""

import math
from collections.abc import Callable

WINDOW = 5                      # rollouts that a figure is averaged over
LOOK_BACK = 10                  # rollouts between then and now, where something has changed
SILENCE = 20                    # rollouts before the same rule speaks again


def diagnose(history: list[dict], config) -> str | None:
    """history: metrics of the GRPO rollouts so far, as in metrics.jsonl, the newest last. Returns 'rule: sentence' or None."""
    if len(history) < WINDOW:
        return None
    recent = {(line.get("advice") or "").partition(":")[0] for line in history[-SILENCE:]}
    for name, rule in RULES.items():
        sentence = None if name in recent else rule(history, config)
        if sentence:
            return f"{name}: {sentence}"
    return None


def now(history: list[dict], metric: str) -> float:
    """Mean of a metric over the newest steps; NaN where it is not known."""
    return mean_of(history[-WINDOW:], metric)


def then(history: list[dict], metric: str) -> float:
    """The same, some steps ago; NaN where there were none."""
    return mean_of(history[-WINDOW - LOOK_BACK : -LOOK_BACK], metric)


def mean_of(lines: list[dict], metric: str) -> float:
    """Mean of a metric over the lines where it is known and finite; NaN if it nowhere is."""
    values = [line[metric] for line in lines if isinstance(line.get(metric), int | float) and math.isfinite(line[metric])]
    return sum(values) / len(values) if values else math.nan


def expected_ties(success: float, group_size: int) -> float:
    """Share of groups whose completions are all right or all wrong: p^G + (1 - p)^G."""
    return success**group_size + (1 - success) ** group_size


# ---- rules: the comparisons are False for NaN, so a metric that is not there says nothing ---------------------------


def not_finite(history, config):
    """Steps were skipped."""
    skipped = sum(line.get("skipped") or 0 for line in history[-WINDOW:])
    if skipped:
        return (f"{skipped} of the last updates had a loss or gradient that is not finite and were skipped: lower "
                f"--learning_rate (now {config.training.learning_rate:g}), and look at skipped.jsonl with --replay")


def nothing_scored(history, config):
    """Reward functions answer None, always."""
    if now(history, "unscored") == 1:
        return (f"none of the completions of {WINDOW} rollouts could be scored, so nothing is learned: stop, and see in "
                "reward_errors.jsonl or with --check why")


def unscored(history, config):
    """Reward functions answer None."""
    share = now(history, "unscored")
    if 0.1 < share < 1:
        return f"{share:.0%} of the completions could not be scored and teach nothing: look at them in rollouts.jsonl"


def saturated(history, config):
    """Nothing left to learn."""
    success = now(history, "reward/correctness")
    if success > 0.98:
        return f"{success:.0%} of the completions are correct: nothing is left to learn here; take harder problems, or stop"


def ties(history, config):
    """Most groups have equal rewards."""
    tied, success = now(history, "tied_groups"), now(history, "reward/correctness")
    size = config.grpo.num_completions_per_prompt
    if config.grpo.use_value_head or not tied > 0.5:
        return None
    found = f"{tied:.0%} of groups have equal rewards and teach nothing"
    replace_them = "" if config.grpo.dynamic_sampling else ", or --dynamic_sampling 3"
    if not 0 < success < 1:
        return f"{found}: take easier or harder problems, or a reward function with partial credit"
    expected = expected_ties(success, size)
    found += f"; with success {success:.2f} and {size} completions {expected:.0%} is expected"
    wanted = next((n for n in (2 * size, 4 * size, 8 * size) if expected_ties(success, n) < 0.5), None)
    if expected < tied - 0.2 and replace_them:
        return f"{found}: some problems are always solved and others never; --dynamic_sampling 3 replaces them"
    if wanted is None:
        return f"{found}: take {'easier' if success < 0.5 else 'harder'} problems{replace_them}"
    return f"{found}: raise --num_completions_per_prompt to {wanted}"


def entropy_falls(history, config):
    """The policy stops exploring."""
    before, after = then(history, "entropy"), now(history, "entropy")
    if after < 0.6 * before:
        return (f"entropy fell from {before:.2f} to {after:.2f} nat/token in {LOOK_BACK} rollouts: if the reward does not rise "
                f"with it, lower --learning_rate (now {config.training.learning_rate:g}), or try --entropy_coef 0.01")


def lengths_explode(history, config):
    """Completions grow."""
    before, after = then(history, "completion_tokens"), now(history, "completion_tokens")
    if after > 2 * before:
        return (f"completions grew from {before:.0f} to {after:.0f} tokens in {LOOK_BACK} rollouts: see in rollouts.jsonl "
                "whether they say more; --overlong penalise takes points from those near the limit")


def lengths_collapse(history, config):
    """Completions shrink: often a format reward that is had without the work."""
    before, after = then(history, "completion_tokens"), now(history, "completion_tokens")
    if after < 0.5 * before:
        return (f"completions shrank from {before:.0f} to {after:.0f} tokens in {LOOK_BACK} rollouts: see in rollouts.jsonl "
                "what they still earn, and lower the --reward_weights of what is had without the work")


def truncation(history, config):
    """Completions do not end."""
    share, limit = now(history, "truncated"), config.grpo.generation_max_length
    if share > 0.3:
        return f"{share:.0%} of the completions were cut at {limit} tokens: raise --generation_max_length to {2 * limit}"


def kl_runs_away(history, config):
    """The policy leaves the reference."""
    before, after = then(history, "kl"), now(history, "kl")
    coefficient = history[-1].get("kl_coef", config.grpo.kl_penalty_coef)
    if after > 0.1 and after > 3 * before:
        return (f"KL to the reference rose from {before:.2f} to {after:.2f} nat/token in {LOOK_BACK} rollouts: raise "
                f"--kl_penalty_coef (now {coefficient:g}), or lower --learning_rate")


def clipping(history, config):
    """Updates go too far from what was sampled."""
    share = now(history, "clip_fraction")
    if share > 0.3 and config.grpo.loss_type != "gspo":   # whose clip is so close that this is usual
        return (f"{share:.0%} of the tokens are held back by the clip: their updates go too far from the rollout; lower "
                f"--ppo_epochs (now {config.grpo.ppo_epochs}) or --learning_rate")


RULES: dict[str, Callable] = {
    rule.__name__: rule
    for rule in (
        not_finite, nothing_scored, unscored, saturated, lengths_collapse, kl_runs_away, entropy_falls, lengths_explode,
        truncation, clipping, ties,
    )
}
