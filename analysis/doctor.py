"""
The training doctor: problems that the metrics of a run show at its end, and the flags to change.

To add a rule, add a row to the table in find_problems, and a history in tests/analysis/test_doctor.py.
"""

import math
from collections import defaultdict

from runs.groups import SUCCESS, mean_of

LEAST = 10                      # with fewer rollouts, no rule is applied


def diagnose(lines: list[dict], flags: dict) -> list[str]:
    """Return a line that summarises a run, and the findings of find_problems.

    lines  the lines of metrics.jsonl;  flags  the settings of the run by name, as in config.json
    """
    rollouts = [line for line in lines if line["phase"] == "grpo"]
    if not rollouts:
        return []
    size = max(5, len(rollouts) // 10)
    tenths = [means(rollouts[i : i + size]) for i in range(0, len(rollouts), size)]
    tenths.append(means(rollouts[-size:]))                # the last tenth may be shorter
    start, end = tenths[0], tenths[-1]
    right = next((f"reward/{name}" for name in SUCCESS if f"reward/{name}" in rollouts[-1]), "")
    changes = [f"{name} {start[name]:.2f} -> {end[name]:.2f}" for name in ("mean_reward", right) if name]
    changes.append(f"zero-variance groups {end['zero_variance_groups']:.0%}")
    course = f"{', '.join(changes)} in {len(rollouts)} rollouts"
    is_judged = len(rollouts) >= LEAST and flags["reward_functions"] != ["none"]     # not with a teacher
    return [course, *(find_problems(tenths, right, flags) if is_judged else [])]


def means(rollouts: list[dict]) -> dict[str, float]:
    """Return the mean of each metric; NaN for a missing one, with which every comparison is False."""
    names = set().union(*rollouts)
    return defaultdict(lambda: math.nan, {name: mean_of(rollouts, name) for name in names})


def find_problems(tenths: list[dict], right: str, flags: dict) -> list[str]:
    """Return "rule: advice" for each rule whose condition holds, the most severe first.

    tenths  the means of each tenth of the run;  right  the metric for the share of right completions, or ""
    """
    def course(name: str, form: str = ".2f") -> str:
        return f"from {start[name]:{form}} to {end[name]:{form}}"

    start, end, goal = tenths[0], tenths[-1], right or "mean_reward"
    reward, before = end["mean_reward"], start["mean_reward"]
    best = max((t["mean_reward"] for t in tenths if not math.isnan(t["mean_reward"])), default=math.nan)
    improves = end[goal] - start[goal] > 0.05 * abs(start[goal])
    longer = end["completion_tokens"] > 1.5 * start["completion_tokens"] and not improves
    is_cut, no_signal = end["truncated"] > 0.3, cause_of_no_signal(end, flags)
    higher_kl = f"a higher --kl_penalty_coef (now {flags['kl_penalty_coef']})"
    smaller_updates = (
        f"use a lower --learning_rate (now {flags['learning_rate'] or 'the default'}), fewer --ppo_epochs "
        f"(now {flags['ppo_epochs']}) or {higher_kl if flags['use_kl_penalty'] else '--use_kl_penalty'}")
    rules = [
        ("not_finite", end["skipped"] > 0,
         f"updates that were not finite were skipped, and their batches are in skipped.jsonl: "
         f"{smaller_updates}"),
        ("unscored", end["unscored"] > 0.1,
         f"{end['unscored']:.0%} of the completions could not be scored and have no advantage: look for the "
         "reason in rollouts.jsonl, reward_errors.jsonl or with --check"),
        ("collapse", best - reward > max(0.05, 0.5 * abs(best), 0.5 * (best - before)),
         f"mean_reward fell from its maximum, {best:.2f}, to {reward:.2f}: start a run from an earlier "
         f"checkpoint (--model_path), and {smaller_updates}"),
        ("reward_hacking", reward > before and start[right] - end[right] > max(0.02, 0.2 * start[right]),
         f"the reward rose {course('mean_reward')} and {right} fell {course(right)}: another reward "
         "function rewards something else; see --check, and lower its --reward_weights"),
        ("length", longer,
         f"completions grew {course('completion_tokens', '.0f')} tokens, but no more of them are right: "
         "find the reason in rollouts.jsonl, or use --overlong penalise"),
        ("entropy", end["entropy"] < 0.5 * start["entropy"] and not improves,
         f"entropy fell {course('entropy')} nat/token, but no more completions are right: "
         f"{smaller_updates} or --entropy_coef 0.01"),
        ("truncation" if is_cut else "no_signal", no_signal and not (longer and is_cut), no_signal),
    ]
    return [f"{name}: {advice}" for name, holds, advice in rules if holds]


def cause_of_no_signal(
    metrics: dict, flags: dict, right: dict[str, int] | None = None, seen: str = ""
) -> str:
    """Return why completions teach nothing, with the flag to change; "" if they teach.

    A cause comes before its symptoms: completions that are cut have no answer, and equal rewards.

    metrics  of GRPO steps, as in metrics.jsonl;  flags  the settings by name
    right    number of right completions by reward function, those that were not chosen too; None: not known
    seen     what the completions contain, such as "11 of 16 end with \\boxed{}"
    """
    cut, equal = metrics["truncated"], metrics["zero_variance_groups"]
    limit, right = flags["generation_max_length"], right or {}
    if cut > 0.3:
        longer = f"--generation_max_length {2 * limit}"
        return f"{cut:.0%} of the completions were cut at {limit} tokens: {longer}"
    if not equal > 0.7 or flags["use_value_head"]:
        return ""
    if flags["environment"] and metrics.get("turns", math.nan) <= 1:
        return "no completion was answered by the environment: it read no call or guess in any of them"
    chosen = next((name for name in flags["reward_functions"] if name in right), "")
    best = max(right, key=right.get, default="")
    if chosen and right[chosen] == 0 and right[best] > 0:
        return f"none is right by {chosen} ({seen}), {right[best]} by {best}: --reward_functions {best}"
    if chosen and right[chosen] == 0 and seen:
        return (f"none is right by {chosen} ({seen}): ask for the form of the answer by --instruction, or "
                "use easier problems")
    text = f"{equal:.0%} of the groups have zero variance (equal rewards), so their advantages are 0: "
    if metrics["zero_variance_right_groups"] > equal / 2:
        return f"{text}all completions are right in most: use harder problems, or --dynamic_sampling 3"
    return (f"{text}use easier problems (harder ones, if rewards are high), a reward function with partial "
            "credit, more --cold_start_steps or more --num_completions_per_prompt")
