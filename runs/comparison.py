"""
Comparison of variants: each is trained with several seeds from one cold start, and evaluated.

    python train.py --compare settings.json --variant base "" --variant gspo "--loss_type gspo" --seeds 0 1 2

    DIR/settings.json          the settings of all runs
    DIR/cold_start             the policy that they begin with, if there is a cold start
    DIR/base/seed-0            a run folder; with evaluation.json, several completions for each problem
    DIR/base/seed-0.txt        what its programs printed
    DIR/base-twin/seed-0       the first variant with other random numbers: what differs by chance

Given again, the command goes on: complete runs are skipped, others resumed. Several machines can share DIR,
once the cold start is there: a run that another process writes to is left to it. The table is that of
infer.py --compare DIR. Left out on purpose: variants that start from other weights, or are evaluated on
other problems.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from analysis.infer_flags import build_parser
from config import START_FLAGS, Config
from runs.command_line import OneLineParser, parse_config
from sources.readers import READERS

ROOT = Path(__file__).parents[1]
SAME = {                        # settings that a variant may not change: evaluation, start, what a run is
    "use_grpo", "dataset", "eval_dataset", "eval_split", "eval_limit", "prompt_column", "answer_column",
    "instruction", "environment", "max_turns", "chat_template", "chat_template_kwargs", "model_path",
    "lora_rank", "lora_alpha", "cold_start_steps", "cold_start_accuracy", "cold_start_learning_rate", "seed",
    "output_dir", "resume", "check", "explain", "estimate", "replay",
}
# A run that ends with its cold start: one step of GRPO, which changes nothing.
COLD_START_ALONE = "--num_epochs", "1e-6", "--learning_rate", "0"
TWIN = "-twin"
TWIN_SEEDS = 10**6              # added to the seeds of the twin; others are smaller


def parse_or_compare(argv: list[str]) -> Config:
    """Return the configuration of train.py's command line; with --compare, run that and end the program."""
    if argv[:1] == ["--compare"]:
        sys.exit(run_comparison(argv))
    return parse_config(argv)


def run_comparison(argv: list[str]) -> int:
    """Train and evaluate all variants, and print the table. Returns the exit code: 1 if a run is missing.

    raises  ValueError, one line, before anything runs
    """
    parser = OneLineParser(prog="train.py", allow_abbrev=False)
    parser.add_argument("--compare", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/compare"))
    pairs, rest = split_variants(argv)
    args = parser.parse_all(rest)
    config = parse_config([args.compare])
    variants = check_comparison(config, args, pairs)
    settings = config.given_flags | {"profile": config.training.profile}
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
            return 1
        begin += ["--model_path", str(cold_start / "final")]
    missing = 0
    for name, seed in runs:
        folder, flags = args.output_dir / name / f"seed-{seed}", variants[name.removesuffix(TWIN)]
        flags = [*flags, *begin, "--seed", str(seed + TWIN_SEEDS * name.endswith(TWIN))]
        trained = train_run(folder, args.output_dir, flags)
        missing += not (trained and evaluate_run(folder, config, args.samples))

    from analysis.comparison import write_comparison      # here: it imports torch, which takes seconds

    print(write_comparison([args.output_dir]))
    return int(missing > 0)


def split_variants(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs after each --variant, of which argparse takes the second for a flag, and the rest."""
    starts = [i for i, word in enumerate(words) if word == "--variant"]
    pairs = [[*words, "", ""][i + 1 : i + 3] for i in starts]
    taken = {i + offset for i in starts for offset in range(3)}
    return [tuple(pair) for pair in pairs], [word for i, word in enumerate(words) if i not in taken]


def check_comparison(config: Config, args, pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the flags of each variant. Raises ValueError, one line, for what the user has to change."""
    variants: dict[str, list[str]] = {}
    for name, text in pairs:
        if not re.fullmatch(r"[\w-]+", name) or name.endswith(TWIN) or name == "cold_start":
            raise ValueError(f"--variant {name!r}: name it by letters, digits and hyphens")
        try:
            variants[name] = shlex.split(text)
            other = parse_config([args.compare, *variants[name]])
        except ValueError as error:
            raise ValueError(f"--variant {name}: {error}") from None
        same = SAME - ({"dataset"} if config.data.eval_dataset else set())
        if changed := [n for n in sorted(same) if flags_of(other)[n] != flags_of(config)[n]]:
            typed = [n for n in changed if n in other.given_flags]
            raise ValueError(
                f"--variant {name}: leave out --{typed[0]}, which is the same for all runs" if typed else
                f"--variant {name}: it would change {changed[0]} of the profile; name that in {args.compare}")
    data = config.data
    own_split = data.eval_dataset or Path(data.dataset).suffix not in READERS
    wrong = {
        '--variant: name at least one, NAME "FLAGS", each differently': len(variants) < max(1, len(pairs)),
        f"--seeds={args.seeds[0]}: at least two, each once, from 0 to {TWIN_SEEDS - 1}":
            len({s for s in args.seeds if 0 <= s < TWIN_SEEDS}) < max(2, len(args.seeds)),
        f"--samples={args.samples}: must be at least 1": args.samples < 1,
        f"{args.compare}: use_grpo is false; it compares runs of GRPO": not config.training.use_grpo,
        f"--eval_limit={data.eval_limit}: runs are compared on held-out problems": not data.eval_limit,
        f"--dataset={data.dataset}: each seed would hold out other problems; name an eval_dataset":
            not own_split,
        "--compare: start it without torchrun": os.environ.get("WORLD_SIZE", "1") != "1",
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
    for name in vars(build_parser().parse_args([])).keys() & values.keys() - {"model_path", "seed"}:
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
