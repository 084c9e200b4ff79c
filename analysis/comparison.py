"""
Compare variants: each is trained with several seeds from one cold start, with the same held-out problems.

    python -m analysis.comparison settings.json --variant base "" --variant gspo "--loss_type gspo"
    python -m analysis.comparison DIR                    the table of the runs in DIR again

    DIR/settings.json          the settings of all runs; DIR is --output_dir
    DIR/cold_start             the policy that they begin with, if there is a cold start
    DIR/base/seed-0            a run folder
    DIR/base/seed-0.txt        what train.py printed

Given again, the first command goes on: complete runs are skipped, others resumed. Left out on purpose:
variants that start from other weights, or are evaluated on other problems.

The unit is the seed: a variant's value is the mean over its seeds of a run's last eval_accuracy, or another
--metric. Its difference from the variant without flags, or the first by name, is that over the seeds which
both have. Each has Student's t interval.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from runs.command_line import OneLineParser, parse_config
from analysis.evaluation import t_interval
from config import START_FLAGS, Config
from runs.errors import exit_on_errors
from runs.folder import read_jsonl
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


def main(words: list[str]) -> int:
    """Train the variants, if there are any, and print the table.

    returns  the exit code: 1 if a run is missing
    raises   ValueError, one line, before anything runs
    """
    parser = OneLineParser(prog="analysis.comparison", description="Compare variants of a run.")
    add = parser.add_argument
    add("path", type=Path, help="settings.json of all runs; or a folder of runs, for their table")
    add("--variant", nargs=2, action="append", metavar=("NAME", "FLAGS"), help="flags of a variant, quoted")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of each variant [0 1 2]")
    add("--metric", default="eval_accuracy", help="of the held-out problems, in metrics.jsonl [%(default)s]")
    add("--output_dir", type=Path, default=Path("outputs/compare"), help="folder of the runs [%(default)s]")
    argv = list(words)
    for i in [i + 2 for i, word in enumerate(argv[:-2]) if word == "--variant"]:
        argv[i] += " "                                    # with a space argparse takes it for a value
    args = parser.parse_all(argv)
    complete = train_variants(args) if args.variant else True
    variants = read_variants(args.output_dir if args.variant else args.path, args.metric)
    print(comparison_table(variants, args.metric))
    return int(not complete)


# ---- runs --------------------------------------------------------------------------------------------------


def train_variants(args) -> bool:
    """Train all variants. Returns whether no run is missing."""
    config = parse_config([str(args.path)])
    variants = check_comparison(config, args)
    settings = read_settings(args.path) | {"profile": config.training.profile}
    settings = {name: value for name, value in settings.items() if name not in ("output_dir", *START_FLAGS)}
    write_once(json.dumps(settings, indent=2), args.output_dir / "settings.json")
    for name, flags in variants.items():
        write_once(shlex.join(flags), args.output_dir / name / "flags.txt")
    begin = ["--cold_start_steps", "0"]
    if config.training.cold_start_steps:
        cold_start, seed = args.output_dir / "cold_start", str(config.training.seed)
        if not train_run(cold_start, args.output_dir, [*COLD_START_ALONE, "--seed", seed]):
            raise ValueError(f"{cold_start}: the cold start did not end; see {cold_start}.txt")
        begin += ["--model_path", str(cold_start / "final")]
    complete = True
    for seed in args.seeds:
        for name, flags in variants.items():
            folder = args.output_dir / name / f"seed-{seed}"
            complete &= train_run(folder, args.output_dir, [*flags, *begin, "--seed", str(seed)])
    return complete


def check_comparison(config: Config, args) -> dict[str, list[str]]:
    """Return the flags of each variant. Raises ValueError, one line, for what the user has to change."""
    data = config.data
    variants: dict[str, list[str]] = {}
    for name, text in args.variant:
        if not re.fullmatch(r"[\w-]+", name) or name == "cold_start":
            raise ValueError(f"--variant {name!r}: name it by letters, digits and hyphens")
        try:
            variants[name] = shlex.split(text)
            other = parse_config([str(args.path), *variants[name]])
        except ValueError as error:
            raise ValueError(f"--variant {name}: {error}") from None
        same = SAME - ({"dataset"} if data.eval_dataset else set())
        if changed := [n for n in sorted(same) if other.flags[n] != config.flags[n]]:
            raise ValueError(
                f"--variant {name}: it would change {' '.join(changed)}, the same for all; leave it out, "
                f"or name it in {args.path}, if the profile changes it")
    wrong = {
        "--variant: name each differently": len(variants) < len(args.variant),
        f"{args.path}: use_grpo is false; it compares runs of GRPO": not config.training.use_grpo,
        f"--eval_limit={data.eval_limit}: runs are compared on held-out problems": not data.eval_limit,
        f"--dataset={data.dataset}: each seed would hold out other problems; name an eval_dataset":
            not data.eval_dataset and Path(data.dataset).suffix in READERS,
    }
    if message := next((message for message, holds in wrong.items() if holds), ""):
        raise ValueError(message)
    return variants


def write_once(text: str, path: Path) -> None:
    """Write what the runs beside a file begin with. Raises ValueError if it holds something else."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif path.read_text() != text:
        raise ValueError(f"{path}: runs there have other settings; take another --output_dir or --variant")


def train_run(folder: Path, parent: Path, flags: list[str]) -> bool:
    """Train a run to its end, unless it has been, and print how it ended. Returns whether it got there."""
    if (folder / "final").exists():
        return True
    resume = ["--resume"] * (folder / "config.json").exists()
    words = [str(parent / "settings.json"), *flags, "--output_dir", str(folder), *resume]
    code = run_training(words, folder.with_suffix(".txt"))
    done = (folder / "final").exists()                    # code 0 also after SIGTERM
    end = "done" if done else f"ended with code {code}, see {folder}.txt"
    print(f"{folder.parent.name}/{folder.name}: {end}", flush=True)
    return done


def run_training(words: list[str], log: Path) -> int:
    """Run train.py with its output added to a file. Returns the exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        program = [sys.executable, str(ROOT / "train.py"), *words]
        return subprocess.run(program, stdout=output, stderr=subprocess.STDOUT).returncode


# ---- the table ---------------------------------------------------------------------------------------------


def read_variants(folder: Path, metric: str) -> dict[str, dict[str, float]]:
    """Return {variant: {run: last value of a metric of held-out problems}}, the one without flags first.

    raises  ValueError, one line, if there are no complete runs, or one does not have the metric
    """
    variants: dict[str, dict[str, float]] = {}
    folders = [final.parent for final in sorted(folder.glob("*/seed-*/final"))]
    for run in sorted(folders, key=lambda run: (run.parent / "flags.txt").read_text() != ""):
        last = [line for line in read_jsonl(run / "metrics.jsonl") if line["phase"] == "eval"][-1]
        if last.get(metric) is None:
            names = [name for name, value in last.items() if name.startswith("eval_") and value is not None]
            raise ValueError(f"--metric={metric}: {run} has {' '.join(names)}")
        variants.setdefault(run.parent.name, {})[run.name] = last[metric]
    if not variants:
        raise ValueError(f"{folder}: no run in it is complete")
    return variants


def comparison_table(variants: dict[str, dict[str, float]], metric: str) -> str:
    """Return the table: each variant's mean and its difference from the first one, over seeds."""
    first, base = next(iter(variants.items()))
    rows = [["variant", "seeds", metric, f"minus {first}, over seeds"]]
    for name, runs in variants.items():
        both = [runs[run] - base[run] for run in runs if run in base and name != first]
        difference = mean_and_interval(both, "+.3f") if both else ""
        rows.append([name, str(len(runs)), mean_and_interval([*runs.values()], ".3f"), difference])
    form = "  ".join(f"{{:<{max(map(len, column))}}}" for column in zip(*rows, strict=True))
    lines = [form.format(*row).rstrip() for row in rows]
    return "\n".join([*lines, "", "Intervals of 95 %, Student's t. What is not shown may still be there."])


def mean_and_interval(values: list[float], form: str) -> str:
    """Return "mean [low, high]", or the mean alone of a single value."""
    mean = f"{np.mean(values):{form}}"
    if len(values) == 1:
        return mean
    low, high = t_interval(np.array(values))
    return f"{mean} [{low:{form}}, {high:{form}}]"


if __name__ == "__main__":
    with exit_on_errors("analysis.comparison"):
        sys.exit(main(sys.argv[1:]))
