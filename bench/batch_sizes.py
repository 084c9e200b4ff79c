"""
The demonstration with other batch sizes: does held-out accuracy rise beyond its interval with each of them?

    python bench/batch_sizes.py --folder /tmp/batch_sizes --batch_sizes 2 4 8 16 32 64 --seeds 0 1 2

The only flags that a run gets besides its seed are --batch_size and, if given, --num_epochs: the program fits step counts and learning rates to it. A run
that is complete in the folder is not repeated, an interrupted one is resumed. Seconds are those of the steps, on one thread, without
evaluations and the start. A run rises if the cold start reaches 0.33 and the last interval lies above the one after it.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runs.folder import read_jsonl  # noqa: E402

COLUMNS = (
    "batch size", "seed", "cold start steps", "accuracy after it, 95 % interval", "GRPO steps", "first step above that interval",
    "final accuracy, 95 % interval", "rises", "seconds",
)


def train(folder: Path, batch_size: int, seed: int, num_epochs: float) -> None:
    """Run train.py as a user would, unless it is complete."""
    if (folder / "final").exists():
        return
    command = [sys.executable, "train.py", "--use_grpo", "--output_dir", str(folder), "--report_to", "none"]
    resumes = (folder / "config.json").exists()
    flags = ["--batch_size", str(batch_size), "--seed", str(seed)] + ["--num_epochs", str(num_epochs)] * (num_epochs > 0)
    command += ["--resume"] if resumes else flags
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{folder}: {done.stderr[-2000:]}"


def row(folder: Path, batch_size: int, seed: int) -> list[str]:
    """Return what is measured of a run, in the order of COLUMNS. Steps of GRPO are counted from its first."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    evals = [line for line in metrics if line["phase"] == "eval"]
    phases = {name: [line for line in metrics if line["phase"] == name] for name in ("cold_start", "grpo")}
    num_cold = len(phases["cold_start"])
    cold, last = next(line for line in evals if line["step"] == num_cold), evals[-1]
    above = [line["step"] - num_cold for line in evals if line["eval_accuracy_low"] > cold["eval_accuracy_high"]]
    rises = cold["eval_accuracy"] >= 0.33 and last["eval_accuracy_low"] > cold["eval_accuracy_high"]
    seconds = sum(line["step_seconds"] for lines in phases.values() for line in lines)
    return [
        str(batch_size), str(seed), str(num_cold), with_interval(cold), str(len(phases["grpo"])),
        str(above[0]) if above else "never", with_interval(last), "yes" if rises else "NO", f"{seconds:.0f}",
    ]


def with_interval(line: dict) -> str:
    return "{eval_accuracy:.3f} [{eval_accuracy_low:.3f}, {eval_accuracy_high:.3f}]".format(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description="The demonstration with other batch sizes.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs; those that are complete are not repeated")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_epochs", type=float, default=0, help="of GRPO; 0: those of the demonstration, 1.6")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    args = parser.parse_args()

    def measure(run: tuple[int, int]) -> list[str]:
        folder = args.folder.resolve() / "batch_size_{}_seed_{}".format(*run)
        train(folder, *run, args.num_epochs)
        return row(folder, *run)

    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for cells in pool.map(measure, [(size, seed) for size in args.batch_sizes for seed in args.seeds]):
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
