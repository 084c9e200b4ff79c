"""
A table and a picture of finished runs of examples/smollm2*.json: held-out points with intervals, seconds, memory.

    for seed in 0 1 2; do python train.py examples/smollm2.json --seed $seed --output_dir outputs/sums-$seed; done
    python bench/smollm2_runs.py outputs/sums-* --figure docs/smollm2_curve.png
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from runs.folder import read_jsonl


def points_of(line: dict) -> tuple[float, float, float]:
    """Return mean points of the reward function of a line of evaluation, and its interval; equal points have none."""
    name = next(name for name in line if name.startswith("eval_reward/") and name != "eval_reward/correctness")
    found = [line[name.replace("eval_reward", f"eval_reward{end}")] for end in ("", "_low", "_high")]
    return tuple(found[0] if points is None else points for points in found)


def draw(runs: list[list[dict]], path: str) -> None:
    """Draw the held-out points of runs over their steps, with intervals, and the mean reward of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for i, metrics in enumerate(runs):
        evals, steps = ([m for m in metrics if (m["phase"] == "eval") == wanted] for wanted in (True, False))
        mean, low, high = zip(*map(points_of, evals), strict=True)
        axes.plot([m["step"] for m in steps], [m["mean_reward"] for m in steps], color="tab:blue", alpha=0.25, linewidth=0.8,
                  label=None if i else "mean reward of each step's 64 completions")
        axes.errorbar([m["step"] for m in evals], mean, (differences(mean, low), differences(high, mean)), color="tab:blue", marker=".",
                      capsize=3, label=None if i else "256 held-out problems, 95 % interval")
    axes.set(xlabel="optimiser step", ylabel="share that is right", ylim=(-0.02, 1.02), xlim=(-1, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)


def differences(left, right) -> list[float]:
    """Return left - right for each pair of numbers."""
    return [a - b for a, b in zip(left, right, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--figure", default="")
    args = parser.parse_args()
    found = [read_jsonl(folder / "metrics.jsonl") for folder in args.runs]
    for folder, metrics in zip(args.runs, found, strict=True):
        seed = json.loads((folder / "config.json").read_text())["training"]["seed"]
        steps = [m for m in metrics if m["phase"] == "grpo"]
        shown = [f"{m['step']}: {mean:.3f} [{low:.3f}, {high:.3f}]"
                 for m in metrics if m["phase"] == "eval" for mean, low, high in [points_of(m)]]
        ends = [[m[name] for m in steps[part]] for name in ("truncated", "completion_tokens") for part in (slice(5), slice(-5, None))]
        cut, still_cut, tokens, still_tokens = (sum(values) / len(values) for values in ends)
        seconds, memory = sum(m["step_seconds"] for m in steps) / len(steps), max(m["peak_memory_gb"] for m in steps)
        print(f"| {folder.name} | {seed} | {' | '.join(shown)} | cut {cut:.2f} -> {still_cut:.2f} | tokens {tokens:.0f} -> "
              f"{still_tokens:.0f} | {seconds:.1f} s a step | {memory:.1f} GB |")
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
