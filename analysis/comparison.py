"""
Compare variants: runs of several seeds each, all evaluated on the same problems.

    python infer.py --compare DIR                    that train.py --compare has filled
    python infer.py --compare A/seed-0 A/seed-1 B/seed-0 B/seed-1

The unit is the seed: a variant's accuracy is the mean over its seeds, and a difference that over the seeds
which both have, with Student's t interval. A second interval has the problem as its unit (clustered: E.
Miller, arXiv:2411.00640 sec. 2.2): would it be the same on other problems? Beside both stands the difference
of the first variant from its twin, the same settings with other random numbers: a difference by chance.

Shapes: S seeds, P problems. Values are shares of right completions, or mean points if no answers are known.
"""

import json
import math
from pathlib import Path

import numpy as np

from analysis.evaluation import student_quantile, t_interval

TWIN = "-twin"                  # as in runs/comparison.py, which calls this
QUANTILE = 0.84                 # of a normal distribution, 80 %: so often a difference is found
MOST_SEEDS = 1000


def write_comparison(paths: list[Path]) -> str:
    """Return the table of the runs in some folders, and draw comparison.png in the folder that holds them.

    raises  ValueError, one line, if runs are missing or were evaluated on other problems
    """
    variants, measure = read_variants(paths)
    text = "\n".join(comparison_table(variants, measure))
    folder = paths[0] if len(paths) == 1 else Path(".")
    draw_comparison(variants, measure, folder / "comparison.png")
    return f"{text}\n\npicture: {folder / 'comparison.png'}"


def read_variants(paths: list[Path]) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """Return {variant: {run: values (P,)}}, the one that has a twin first, and what the values are.

    A run's variant is the folder that it is in, and its name there pairs it with runs of other variants.
    """
    found = [file for path in map(Path.resolve, paths) for file in (
        [path / "evaluation.json"] if (path / "config.json").exists()
        else sorted(path.glob("*/seed-*/evaluation.json")))]
    variants: dict[str, dict[str, np.ndarray]] = {}
    problems: list[dict] = []
    settings: dict = {}
    for file in found:
        if not file.exists():
            command = f"python infer.py --model_path {file.parent}/final --evaluate DATA --json {file}"
            raise ValueError(f"--compare {file.parent}: it is not evaluated; {command}")
        evaluation = json.loads(file.read_text())
        results = evaluation.pop("results")[0]["problems"]
        if not variants:
            problems, settings, measure = results, evaluation, measure_of(results, evaluation)
        if [p["prompt"] for p in results] != [p["prompt"] for p in problems] or evaluation != settings:
            raise ValueError(f"--compare {file.parent}: evaluated on other problems than {found[0].parent}")
        runs = variants.setdefault(file.parent.parent.name, {})
        if file.parent.name in runs:
            raise ValueError(f"--compare {file.parent}: another run has its name and variant")
        runs[file.parent.name] = values = problem_values(results, measure)
        if np.isnan(values).all():
            raise ValueError(f"--compare {file.parent}: no problem of its evaluation has {measure}")
    if not variants:
        raise ValueError(f"--compare {paths[0]}: no run in it is complete and evaluated")
    first = next((name for name in variants if name + TWIN in variants), next(iter(variants)))
    order = sorted(variants, key=lambda name: (not name.startswith(first), name))
    return {name: variants[name] for name in order}, f"{measure} of {len(problems)} held-out problems"


def measure_of(problems: list[dict], settings: dict) -> str:
    """Return "accuracy" if answers are known and correctness is a reward or there is none, else "points"."""
    names = settings.get("reward_functions") or ["correctness"]
    known = any(p["right"] for p in problems)
    return "accuracy" if known and {"correctness", "none"} & {*names} else "points"


def problem_values(problems: list[dict], measure: str) -> np.ndarray:
    """Return (P,) the share of right completions of each problem, or mean points, NaN if unscored."""
    rows = [
        p["right"] or [] if measure == "accuracy" else
        [value for value in p["points"].get("reward", []) if value is not None]
        for p in problems
    ]
    return np.array([np.mean(row) if row else math.nan for row in rows])


def differences(variant: dict, other: dict) -> np.ndarray:
    """Return (S, P) variant - other of the runs that both have, without problems that were not scored."""
    both = [name for name in variant if name in other]
    problems = len(next(iter(variant.values())))
    table = np.array([variant[name] - other[name] for name in both]).reshape(len(both), problems)
    return table[:, ~np.isnan(table).any(axis=0)]


def compare(table: np.ndarray, chance: float) -> dict:
    """Return the difference, its two intervals and the verdict.

    table   (S, P) differences;  chance  the absolute difference of the twin, 0 without one
    A variant is better or worse if both intervals leave out 0 and the twin differs by less.
    """
    mean, by_seed = float(table.mean()), table.mean(axis=1)
    over_seeds, over_problems = t_interval(by_seed), t_interval(table.mean(axis=0))
    excludes_zero = [low > 0 or high < 0 for low, high in (over_seeds, over_problems)]
    verdict = "no difference shown"
    if not excludes_zero[0]:
        needed = seeds_needed(by_seed)
        verdict += f"; one of this size would take {needed} seeds" if needed else ""
    elif abs(mean) <= chance:
        verdict += ": the twin differs as much"
    elif not excludes_zero[1]:
        verdict += ": take more problems (--eval_limit)"
    else:
        verdict = "better" if mean > 0 else "worse"
    return {"mean": mean, "over_seeds": over_seeds, "over_problems": over_problems, "verdict": verdict}


def seeds_needed(by_seed: np.ndarray) -> str:
    """Return how many seeds would show differences by_seed (S,) in 80 % of the cases; "" if unknown.

        smallest n > S with (t(n - 1) + QUANTILE) * s / sqrt(n) <= |mean|, s the standard deviation over seeds
    """
    mean, deviation = abs(float(by_seed.mean())), float(by_seed.std(ddof=1)) if len(by_seed) > 1 else 0.0
    if not mean or not deviation:
        return ""
    for n in range(max(3, len(by_seed) + 1), MOST_SEEDS + 1):
        if (student_quantile(n - 1) + QUANTILE) * deviation / math.sqrt(n) <= mean:
            return str(n)
    return f"more than {MOST_SEEDS}"


def comparison_table(variants: dict[str, dict], measure: str) -> list[str]:
    """Return the lines of the table: each variant, and its difference from the first one."""
    first = next(iter(variants))
    base, twin = variants[first], first + TWIN
    by_chance = differences(variants.get(twin, base), base)           # zeros without a twin
    chance = abs(float(by_chance.mean())) if len(by_chance) else 0.0
    rows = [["variant", "seeds", measure, f"minus {first}", "over seeds", "over problems", "verdict"]]
    for name, runs in variants.items():
        means = np.array([np.nanmean(values) for values in runs.values()])
        row = [name, str(len(runs)), f"{means.mean():.3f} {interval_text(t_interval(means), '.3f')}"]
        table = differences(runs, base)
        if name != first and len(table):
            found = compare(table, 0.0 if name == twin else chance)
            row += [f"{found['mean']:+.3f}"] + [
                interval_text(found[of], "+.3f") for of in ("over_seeds", "over_problems")]
            row.append("by chance" if name == twin else found["verdict"])
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    form = "  ".join(f"{{:<{max(map(len, column))}}}" for column in zip(*rows, strict=True))
    lines = [form.format(*row).rstrip() for row in rows]
    notes = [
        "", "Intervals of 95 %, Student's t; that of an accuracy is over seeds.",
        "By chance: the same settings, other random numbers. What is not shown may still be there.",
    ]
    if len(by_chance) and compare(by_chance, 0.0)["verdict"] in ("better", "worse"):
        notes.append("The twin differs: these intervals are too short here. Take more seeds.")
    return lines + notes


def interval_text(interval: tuple[float, float], form: str) -> str:
    """Return "[low, high]", or "[?]" if it is unknown."""
    return "[?]" if math.isnan(interval[0]) else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def draw_comparison(variants: dict[str, dict], measure: str, path: Path) -> None:
    """Draw each variant: a dot for each run, their mean and its interval."""
    from matplotlib.figure import Figure                  # slow to import

    figure = Figure(figsize=(7, 1 + 0.5 * len(variants)), layout="constrained")
    axes = figure.subplots()
    for row, runs in enumerate(variants.values()):
        means = np.array([np.nanmean(values) for values in runs.values()])
        low, high = t_interval(means)
        axes.plot(means, [row + 0.15] * len(means), "o", color="tab:grey", alpha=0.6)
        axes.plot([low, high], [row, row], color="tab:blue")
        axes.plot(means.mean(), row, "D", color="tab:blue")
    axes.set_yticks(range(len(variants)), list(variants))
    axes.invert_yaxis()
    axes.set_xlabel(f"{measure}; dots: runs; line: mean over seeds, 95 %")
    figure.savefig(path, dpi=120)
