"""
Write and print the results of a run: metrics of a step, evaluations on the held-out problems (always with the
same seeds), the best policy, and at the end the report and the summary.
"""

import math
from dataclasses import replace

from engine.devices import peak_memory_gb
from engine.errors import first_line
from experience import Experience
from rewards import name_of
from runs.checkpoint import write_policy
from runs.console import held_out_text, shows_accuracy
from runs.folder import RunFolder, completion_records, read_jsonl
from runs.phases import is_due
from sources.settings import read_settings


def evaluate_and_log(run) -> None:
    """Evaluate the policy of a Run on its held-out problems, log the result, and write best/."""
    from analysis.evaluation import evaluate  # only for evaluations

    progress, training, grpo = run.progress, run.config.training, run.config.grpo
    at_once = grpo.generation_batch_size or run.config.rollout_size              # as many as in a step
    config = replace(grpo, generation_batch_size=at_once)
    result = evaluate(
        run.policy, run.eval_set, config, seed=training.seed, **run.scoring | {"weights": None})
    score = held_out_score(run, result)
    if training.keep_best and score > progress.best_score:                       # the first of equal ones
        write_policy(run.policy.model, run.policy.tokenizer, run.folder.path / "best")
        progress.best_step, progress.best_score = progress.step, score
    run.folder.log(progress.step, "eval", result)
    progress.evaluated_at, progress.accuracy = progress.step, result.get("eval_accuracy", math.nan)
    best = ", the best so far" if progress.best_step == progress.step else ""
    run.console.print(f"held out at step {progress.step}: {held_out_text(result, run.config)}{best}")


def write_step(run, metrics: dict, experience: Experience) -> None:
    """Write and print the metrics of a step. Every --log_rollouts_every steps write its completions."""
    folder, step, phase = run.folder, run.progress.step, run.phase.name
    metrics |= {
        "training_seconds": metrics["step_seconds"] - metrics.get("sampling_seconds", 0.0),
        "learning_rate": float(run.policy.scheduler.get_last_lr()[0]),
        "peak_memory_gb": peak_memory_gb(next(run.policy.model.parameters()).device),
    }
    records = []
    if phase == "grpo":
        if failures := experience.groups.reports.failures:
            folder.append("reward_errors.jsonl", step, phase, failures)
        before, every = step - metrics["updates"], run.config.training.log_rollouts_every
        if is_due(before - 1, step - 1, every):           # the updates include step 1 or 1 + n, ...
            records = completion_records(experience)
            folder.append("rollouts.jsonl", step, phase, records)
    if metrics["skipped"]:
        folder.append("skipped.jsonl", step, phase, completion_records(experience))
    folder.log(step, phase, metrics)
    run.console.print_step(phase, run.progress.phase_step, run.phase.steps, step, metrics)
    if records:
        run.console.print_completions(records)


def held_out_score(run, result: dict) -> float:
    """Return the accuracy, or if rewards are shown instead, their weighted sum; NaN if there are none."""
    if shows_accuracy(result, run.config.flags):
        return result["eval_accuracy"]
    means = [result[f"eval_reward/{name_of(function)}"] for function in run.reward_functions]
    weighted = zip(means, run.config.grpo.weights, strict=False)                 # supervised: no rewards
    known = [weight * mean for mean, weight in weighted if mean is not None]
    return sum(known) if known else math.nan


def write_curves_and_report(folder: RunFolder) -> None:
    """Write curves.png and report.html. An error is only printed, since the run itself is complete."""
    from analysis import report  # imported at the end only

    try:
        if folder.writes:
            report.write_report(folder.path)
    except Exception as error:
        folder.console.print(f"  note   curves.png or report.html was not written: {first_line(error)}")


def print_summary(folder: RunFolder) -> None:
    """Print the held-out results, the findings of the training doctor, and the paths of the files."""
    from analysis.doctor import diagnose

    if folder.writes:                                     # other ranks may have another folder
        path = folder.path
        lines, flags = read_jsonl(path / "metrics.jsonl"), read_settings(path / "config.json")
        folder.console.print_summary(path, lines, diagnose(lines, flags))
