"""
First contact with a model: what it writes, what rewards extract from it, the time of a run.

`train.py --check` prints all of it; a run prints once why there is no learning signal.
"""

import math
import re
import time
from dataclasses import replace
from datetime import timedelta

from analysis.doctor import cause_of_no_signal
from analysis.evaluation import sample_and_score_problems
from analysis.reward_linter import print_rewards
from config import Config
from data import as_text
from engine.host import peak_memory_gb
from experience import Groups
from grpo import compute_group_advantages
from reward_functions.calling import missing_columns
from reward_functions.loading import load_reward_function
from rewards import text_of
from runs.groups import SUCCESS, Scoring, score, summarize_sampling

PROMPTS, COMPLETIONS = 4, 4     # of --check
SECONDS = 120                   # the limit of sampling on a CPU: then completions are shorter
CALIBRATION = 8                 # tokens that are sampled first, for an estimate of the time
FORMS = {                       # how models mark answers: what is printed, and the text that shows it
    "<answer> tags": re.compile(r"<answer>.*</answer>", re.DOTALL), "\\boxed{}": re.compile(r"\\boxed\{"),
    "a number in the last line": re.compile(r"\d[^\n]*\s*\Z"),
}


def check(run) -> None:
    """Print what a user has to know about a Run before it begins; the last line names a flag to change."""
    notify, names = run.console.print, run.config.grpo.reward_functions
    has_rewards = run.plan.reward_functions and names != ["none"]
    groups, limit = sample_and_describe(run) if has_rewards else (None, 0)
    print_rewards(run, groups)
    notify("the model and the sampler agree: the start-up check has passed")
    if groups:
        metrics, counts = summarize_sampling(groups), counts_of_right(groups, run.config)
        listed = ", ".join(f"{name} {count}" for name, count in counts.items()) or "not known"
        notify(f"right, of {len(groups.rollout.completions)}: {listed}")
        if run.plan.phases[0].name != "grpo":
            notify("a cold start comes first, so completions will change")
        elif limit < run.config.grpo.generation_max_length and metrics["truncated"] > 0.3:
            cut = f"{metrics['truncated']:.0%} had not ended after {limit} tokens"
            notify(f"{cut}: too slow here to judge them")
        else:
            learns = "rewards differ within groups: there is something to learn"
            notify(cause_of(metrics, run.config, groups, counts) or learns)


def sample_and_describe(run) -> tuple[Groups, int]:
    """Sample some completions of a Run's first prompts. Print one, and the time and memory of the run.

    Returns the completions, and the length at which they were cut.
    """
    config, policy, notify = run.config, run.policy, run.console.print
    device, limit = policy.device, config.grpo.generation_max_length

    def sample(num_prompts: int, num_completions: int, limit: int) -> tuple[Groups, float]:
        started, examples = time.perf_counter(), run.plan.data.train_set[:num_prompts]
        grpo_config = replace(config.grpo, generation_max_length=limit, generation_batch_size=0)
        (groups,) = sample_and_score_problems(
            policy, examples, grpo_config, run.scoring, seed=0, num_completions=num_completions)
        groups.advantages = compute_group_advantages(groups.scores)              # (P, G)
        return groups, time.perf_counter() - started

    notify("sampling, about two minutes at most on a CPU")
    size = config.training.batch_size, config.grpo.num_completions_per_prompt
    prompt_seconds, short_seconds = (sample(*size, length)[1] for length in (1, CALIBRATION))
    seconds_per_token = max(1e-9, (short_seconds - prompt_seconds) / (CALIBRATION - 1))
    shorter = limit
    if device.type == "cpu":
        shorter = min(limit, max(CALIBRATION, int((SECONDS - prompt_seconds) / seconds_per_token)))
    groups, _ = sample(PROMPTS, COMPLETIONS, shorter)
    rollout, mask = groups.rollout, groups.rollout.completion_mask
    prompt = policy.tokenizer.decode(rollout.prompt_ids[0][rollout.prompt_mask[0]])
    notify(f"the first prompt, as it is tokenised: {prompt!r}")
    notify(f"its first completion, {int(mask[0].sum())} tokens: {as_text(rollout.completions[0])!r}")
    if shorter < limit:
        notify(f"  note   here completions were cut at {shorter} tokens to save time, not at {limit}")
    started = time.perf_counter()
    policy.log_probs(rollout)
    seconds_per_row = 3 * (time.perf_counter() - started) / len(mask)            # backward counts as two
    longest = mask.shape[1] * limit / shorter             # in tokens, if none is cut to save time
    sampling_seconds = prompt_seconds + seconds_per_token * longest
    notify(time_of_run(run, sampling_seconds, seconds_per_row))
    notify(f"peak memory so far {peak_memory_gb(device):.1f} GB")
    return groups, shorter


def counts_of_right(groups: Groups, config: Config) -> dict[str, int]:
    """Return the number of right completions by each function of SUCCESS that has the columns it needs."""
    columns = {name for example in groups.examples for name, value in example.items() if value is not None}
    counts = {}
    for name in SUCCESS:
        if name in groups.per_function:
            rewards = groups.per_function[name]
        elif missing_columns(function := load_reward_function(name), columns):
            continue
        else:
            alone, lenient = Scoring([function], [1.0]), replace(config.grpo, reward_errors="none")
            rewards = score(groups.rollout, groups.examples, alone, lenient).per_function[name]
        if not rewards.isnan().all():
            counts[name] = int((rewards >= 1).sum())
    return counts


def cause_of(
    metrics: dict, config: Config, groups: Groups | None = None, counts: dict[str, int] | None = None
) -> str:
    """Return why there is no learning signal in groups with these metrics, and the flag to change; or "".

    groups  to look at their completions too;  counts  their counts_of_right, if they are known
    """
    if groups is None:
        return cause_of_no_signal(metrics, config.flags)
    texts = [text_of(completion) for completion in groups.rollout.completions]
    found = [f"{sum(bool(form.search(text)) for text in texts)} have {name}" for name, form in FORMS.items()]
    seen = f"of {len(texts)}, {', '.join(found)}"
    counts = counts_of_right(groups, config) if counts is None else counts
    return cause_of_no_signal(metrics, config.flags, counts, seen)


def time_of_run(run, sampling_seconds: float, seconds_per_row: float) -> str:
    """Return a line with the time of a step and of a run's GRPO phase.

    sampling_seconds  of a rollout;  seconds_per_row  of an update, for each completion
    """
    config, steps = run.config, run.plan.phases[-1].steps
    every, problems, size = config.training.eval_steps, len(run.plan.data.eval_set), config.rollout_size
    evaluations = 2 + (steps // every if every else 0) if problems else 0
    batches = math.ceil(problems * config.training.eval_samples / size)          # of an evaluation
    of_step = sampling_seconds + seconds_per_row * size * config.grpo.ppo_epochs
    of_run = steps / config.updates_per_rollout * of_step + evaluations * batches * sampling_seconds
    of_step, of_run = (timedelta(seconds=round(seconds)) for seconds in (of_step, of_run))
    return (f"a step of {size} completions takes about {of_step}; {steps} updates and {evaluations} "
            f"evaluations of {problems} problems about {of_run}, if lengths stay")
