"""
Compare variants: each is trained with several seeds from one cold start, and evaluated on the same problems.

    python -m analysis.comparison settings.json --variant base "" --variant gspo "--loss_type gspo"
    python -m analysis.comparison DIR                    the table of the runs in DIR again
    python -m analysis.comparison A/seed-0 A/seed-1 B/seed-0 B/seed-1

    DIR/settings.json          the settings of all runs; DIR is --output_dir
    DIR/cold_start             the policy that they begin with, if there is a cold start
    DIR/base/seed-0            a run folder; with evaluation.json, several completions for each problem
    DIR/base/seed-0.txt        what its programs printed
    DIR/base-twin/seed-0       the first variant with other random numbers: what differs by chance

Given again, the first command goes on: complete runs are skipped, others resumed. Several machines can share
DIR, once the cold start is there: a run that another process writes to is left to it. Left out on purpose:
variants that start from other weights, or are evaluated on other problems.

The unit is the seed: a variant's accuracy is the mean over its seeds, and a difference that over the seeds
which both have, with Student's t interval. A second interval has the problem as its unit (clustered: E.
Miller, arXiv:2411.00640 sec. 2.2): would it be the same on other problems? Beside both stands the difference
of the first variant from its twin: a difference by chance.

Shapes: S seeds, P problems. Values are shares of right completions, or mean points if no answers are known.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from runs.command_line import OneLineParser, exit_on_mistake, parse_config
from analysis.evaluation import student_quantile, t_interval
from analysis.infer_flags import FLAGS_OF_CONFIG
from config import START_FLAGS, Config
from sources.readers import READERS
from sources.settings import read_settings

ROOT = Path(__file__).parents[1]
SAME = {                        # settings that a variant may not change: evaluation, start, what a run is
    "use_grpo", "dataset", "eval_dataset", "eval_split", "eval_limit", "prompt_column", "answer_column",
    "instruction", "environment", "max_turns", "chat_template", "chat_template_kwargs", "model_path",
    "lora_rank", "lora_alpha", "cold_start_steps", "cold_start_accuracy", "cold_start_learning_rate", "seed",
    "output_dir", *START_FLAGS,
}
# A run that ends with its cold start: one step of GRPO, which changes nothing.
COLD_START_ALONE = "--num_epochs", "1e-6", "--learning_rate", "0"
TWIN = "-twin"
TWIN_SEEDS = 10**6              # added to the seeds of the twin; others are smaller
QUANTILE = 0.84                 # of a normal distribution, 80 %: so often a difference is found
MOST_SEEDS = 1000


def main(words: list[str]) -> int:
    """Train and evaluate the variants, if there are any, and print the table.

    returns  the exit code: 1 if a run is missing
    raises   ValueError, one line, before anything runs
    """
    parser = OneLineParser(prog="analysis.comparison", description="Compare variants of a run.")
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="settings.json of all runs; or folders of runs, for their table")
    add("--variant", nargs=2, action="append", metavar=("NAME", "FLAGS"), help="flags of a variant, quoted")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of each variant [0 1 2]")
    add("--samples", type=int, default=4, help="completions for each held-out problem [%(default)s]")
    add("--output_dir", type=Path, default=Path("outputs/compare"), help="folder of the runs [%(default)s]")
    argv = list(words)
    for i in [i + 2 for i, word in enumerate(argv[:-2]) if word == "--variant"]:
        argv[i] += " "                                    # with a space argparse takes it for a value
    args = parser.parse_all(argv)
    if not args.variant:
        print(comparison_table(*read_variants(args.paths)))
        return 0
    complete = train_variants(args)
    print(comparison_table(*read_variants([args.output_dir])))
    return int(not complete)


# ---- runs --------------------------------------------------------------------------------------------------


def train_variants(args) -> bool:
    """Train and evaluate all variants. Returns whether no run is missing."""
    config = parse_config([str(args.paths[0])])
    variants = check_comparison(config, args)
    settings = read_settings(args.paths[0]) | {"profile": config.training.profile}
    settings = {name: value for name, value in settings.items() if name not in ("output_dir", *START_FLAGS)}
    write_once(json.dumps(settings, indent=2), args.output_dir / "settings.json")
    for name, flags in variants.items():
        write_once(shlex.join(flags), args.output_dir / name / "flags.txt")
    first, *others = variants
    runs = [(name, seed) for seed in args.seeds for name in (first, first + TWIN, *others)]
    begin = ["--cold_start_steps", "0"]
    if config.training.cold_start_steps:
        cold_start, seed = args.output_dir / "cold_start", str(config.training.seed)
        if not train_run(cold_start, args.output_dir, [*COLD_START_ALONE, "--seed", seed]):
            raise ValueError(f"{cold_start}: the cold start did not end; see {cold_start}.txt")
        begin += ["--model_path", str(cold_start / "final")]
    complete = True
    for name, seed in runs:
        folder, flags = args.output_dir / name / f"seed-{seed}", variants[name.removesuffix(TWIN)]
        flags = [*flags, *begin, "--seed", str(seed + TWIN_SEEDS * name.endswith(TWIN))]
        trained = train_run(folder, args.output_dir, flags)
        complete &= trained and evaluate_run(folder, config, args.samples)
    return complete


def check_comparison(config: Config, args) -> dict[str, list[str]]:
    """Return the flags of each variant. Raises ValueError, one line, for what the user has to change."""
    settings, data = args.paths[0], config.data
    variants: dict[str, list[str]] = {}
    for name, text in args.variant:
        if not re.fullmatch(r"[\w-]+", name) or name.endswith(TWIN) or name == "cold_start":
            raise ValueError(f"--variant {name!r}: name it by letters, digits and hyphens")
        try:
            variants[name] = shlex.split(text)
            other = parse_config([str(settings), *variants[name]])
        except ValueError as error:
            raise ValueError(f"--variant {name}: {error}") from None
        same = SAME - ({"dataset"} if data.eval_dataset else set())
        if changed := [n for n in sorted(same) if flags_of(other)[n] != flags_of(config)[n]]:
            raise ValueError(
                f"--variant {name}: it would change {' '.join(changed)}, the same for all; leave it out, "
                f"or name it in {settings}, if the profile changes it")
    wrong = {
        "--variant: name each differently": len(variants) < len(args.variant),
        f"--seeds={args.seeds[0]}: at least two, each once, from 0 to {TWIN_SEEDS - 1}":
            len({s for s in args.seeds if 0 <= s < TWIN_SEEDS}) < max(2, len(args.seeds)),
        f"--samples={args.samples}: must be at least 1": args.samples < 1,
        f"{settings}: use_grpo is false; it compares runs of GRPO": not config.training.use_grpo,
        f"--eval_limit={data.eval_limit}: runs are compared on held-out problems": not data.eval_limit,
        f"--dataset={data.dataset}: each seed would hold out other problems; name an eval_dataset":
            not data.eval_dataset and Path(data.dataset).suffix in READERS,
    }
    if message := next((message for message, holds in wrong.items() if holds), ""):
        raise ValueError(message)
    return variants


def flags_of(config: Config) -> dict:
    """Return the value of each flag."""
    return vars(config.model) | vars(config.data) | vars(config.grpo) | vars(config.training)


def write_once(text: str, path: Path) -> None:
    """Write what the runs beside a file begin with. Raises ValueError if it holds something else."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif path.read_text() != text:
        raise ValueError(f"{path}: runs there have other settings; take another --output_dir or --variant")


def train_run(folder: Path, parent: Path, flags: list[str]) -> bool:
    """Train a run to its end, unless it has been. Returns False, and prints why, if it did not get there."""
    resume = ["--resume"] * (folder / "config.json").exists()
    command = ["train.py", str(parent / "settings.json"), *flags, "--output_dir", str(folder), *resume]
    final = folder / "final"
    return final.exists() or (run_program(command, folder) and final.exists())


def evaluate_run(folder: Path, config: Config, samples: int) -> bool:
    """Write evaluation.json on the held-out problems, with the settings of sampling that all runs share."""
    data, new, target = config.data, folder / f"evaluation.{os.getpid()}", folder / "evaluation.json"
    command = [
        "infer.py", "--model_path", str(folder / "final"), "--evaluate", data.eval_dataset or data.dataset,
        "--split", data.eval_split, "--limit", str(data.eval_limit), "--samples", str(samples),
        "--json", str(new),
    ]
    values = flags_of(config)
    for name in sorted({*FLAGS_OF_CONFIG} - {"model_path", "seed"}):
        if value := values[name]:
            words = value if isinstance(value, list) else [value]
            command += [f"--{name}", *map(str, words)] if isinstance(value, list) else [f"--{name}={value}"]
    if target.exists() and json.loads(target.read_text())["samples"] == samples:
        return True
    return run_program(command, folder) and new.replace(target).exists()


def run_program(command: list[str], folder: Path) -> bool:
    """Run a program of the project, its output in a file beside the run's folder, and print how it ended.

    After Ctrl-C, which the program gets too, wait until it has saved its run.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    started, log = time.monotonic(), folder.with_suffix(".txt")
    with log.open("a") as output:
        command = [sys.executable, str(ROOT / command[0]), *command[1:]]
        program = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = program.wait()
        except KeyboardInterrupt:
            program.wait()
            raise
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    end = f"{time.monotonic() - started:.0f} s" if code == 0 else f"ended with code {code}: {last}"
    print(f"{folder.parent.name}/{folder.name} {Path(command[1]).name}: {end}", flush=True)
    return code == 0


# ---- the table ---------------------------------------------------------------------------------------------


def read_variants(paths: list[Path]) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """Return {variant: {run: values (P,)}}, the one that has a twin first, and what the values are.

    A run's variant is the folder that it is in, and its name there pairs it with runs of other variants.

    raises  ValueError, one line, if runs are missing or were evaluated on other problems
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
            raise ValueError(f"{file.parent}: it is not evaluated; {command}")
        evaluation = json.loads(file.read_text())
        results = evaluation.pop("results")[0]["problems"]
        if not variants:
            problems, settings, measure = results, evaluation, measure_of(results, evaluation)
        if [p["prompt"] for p in results] != [p["prompt"] for p in problems] or evaluation != settings:
            raise ValueError(f"{file.parent}: evaluated on other problems than {found[0].parent}")
        runs = variants.setdefault(file.parent.parent.name, {})
        if file.parent.name in runs:
            raise ValueError(f"{file.parent}: another run has its name and variant")
        runs[file.parent.name] = values = problem_values(results, measure)
        if np.isnan(values).all():
            raise ValueError(f"{file.parent}: no problem of its evaluation has {measure}")
    if not variants:
        raise ValueError(f"{paths[0]}: no run in it is complete and evaluated")
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


def comparison_table(variants: dict[str, dict], measure: str) -> str:
    """Return the table, of each variant and its difference from the first one, and notes on it."""
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
    return "\n".join(lines + notes)


def interval_text(interval: tuple[float, float], form: str) -> str:
    """Return "[low, high]", or "[?]" if it is unknown."""
    return "[?]" if math.isnan(interval[0]) else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


if __name__ == "__main__":
    with exit_on_mistake("analysis.comparison"):
        sys.exit(main(sys.argv[1:]))
