"""
The demonstration with several seeds, one after the other: how far the cold start goes, where GRPO ends, how long it takes.

    python bench/demo_seeds.py --seeds 0 1 2 3 4
    python bench/demo_seeds.py --seeds 0 --figure docs/demo_curve.png
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runs.folder import read_jsonl  # noqa: E402


def draw_accuracy(runs: list[list[dict]], path: str) -> None:
    """Draw the held-out accuracy of runs over their steps, with its interval and the end of the cold start.

    runs  the lines of metrics.jsonl of each
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for metrics in runs:
        points = [m for m in metrics if m["phase"] == "eval"]
        steps = [m["step"] for m in points]
        axes.plot(steps, [m["eval_accuracy"] for m in points], color="tab:blue", marker=".")
        low, high = ([m[f"eval_accuracy_{end}"] for m in points] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color="tab:blue", alpha=0.2, linewidth=0)
    start = sum(m["phase"] == "cold_start" for m in runs[0])
    axes.axvline(start, color="grey", linestyle=":")
    axes.text(start, 1.04, "supervised start \N{LEFTWARDS ARROW} ", ha="right", va="bottom", color="grey")
    axes.text(start, 1.04, " \N{RIGHTWARDS ARROW} GRPO", ha="left", va="bottom", color="grey")
    axes.set(xlabel="optimiser step", ylabel="share of held-out sums that are right", ylim=(-0.02, 1.02), xlim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run train.py as a user would and print a row of a table for each seed. Flags that follow -- are passed on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--figure", default="", help="draw the accuracy of the runs there")
    parser.add_argument("flags", nargs="*", help="more flags for train.py, after --")
    args = parser.parse_args()
    runs = []
    print("| seed | before | after the cold start | after GRPO, 95 % interval | steps | seconds |\n|---|---|---|---|---|---|")
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            command = [sys.executable, "train.py", "--use_grpo", "--seed", str(seed), "--output_dir", f"{folder}/run"]
            command += args.flags
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            seconds = time.perf_counter() - started
            if done.returncode:
                sys.exit(done.stderr)
            metrics = read_jsonl(Path(folder) / "run/metrics.jsonl")
        runs.append(metrics)
        evals = [m for m in metrics if m["phase"] == "eval"]
        cold_steps = sum(m["phase"] == "cold_start" for m in metrics)
        grpo_steps = sum(m["phase"] == "grpo" for m in metrics)
        cold = next(m for m in evals if m["step"] == cold_steps)
        last = evals[-1]
        interval = f"{last['eval_accuracy']:.3f} [{last['eval_accuracy_low']:.3f}, {last['eval_accuracy_high']:.3f}]"
        before, after_cold = f"{evals[0]['eval_accuracy']:.3f}", f"{cold['eval_accuracy']:.3f}"
        row = [str(seed), before, after_cold, interval, f"{cold_steps} + {grpo_steps}", f"{seconds:.0f}"]
        print("| " + " | ".join(row) + " |", flush=True)
    if args.figure:
        draw_accuracy(runs, args.figure)


if __name__ == "__main__":
    main()
