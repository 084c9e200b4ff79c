"""
Plot of the learning curve of a run.
"""

import itertools
import re
from pathlib import Path

from runs.records import read_jsonl


def draw_curves(folder: Path) -> None:
    """Draw curves.png of a run folder from its metrics.jsonl."""
    from matplotlib.figure import Figure  # slow to import

    metrics = read_jsonl(folder / "metrics.jsonl")
    evals = [m for m in metrics if m["phase"] == "eval"]
    steps = [m for m in metrics if m["phase"] != "eval"]
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)

    def line(axes, lines, name, label, **style):
        points = [(m["step"], m[name]) for m in lines if m.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)

    line(top, steps, "mean_reward", "mean reward in training (points)", color="tab:orange", alpha=0.6)
    scores = {name for m in evals for name in m if name.startswith("eval_reward/")}
    scores.discard("eval_reward/correctness")             # the accuracy
    some_right = not scores or any(m.get("eval_accuracy") for m in evals)      # else of another form
    for i, name in enumerate([*sorted(scores), *["eval_accuracy"] * some_right]):
        what = name.removeprefix("eval_reward/") + " (points)" if name in scores else "accuracy"
        color = f"C{i + 2}" if name in scores else "tab:blue"
        line(top, evals, name, f"held out: {what}, 95 % interval", color=color, marker=".")
        low, high = (re.sub("^eval_(reward|accuracy)", rf"eval_\1_{end}", name) for end in ("low", "high"))
        known = [(m["step"], m[low], m[high]) for m in evals if m.get(low) is not None]
        if known:
            top.fill_between(*zip(*known, strict=True), color=color, alpha=0.2, linewidth=0)
    line(bottom, steps, "loss", "supervised loss (nat/token)")
    line(bottom, steps, "entropy", "entropy (nat/token)")
    line(bottom, steps, "tied_groups", "tied groups (share)")
    for previous, current in itertools.pairwise(steps):
        if previous["phase"] != current["phase"]:
            for axes in top, bottom:
                axes.axvline(previous["step"], color="grey", linestyle=":")
            corner = previous["step"], top.get_ylim()[1]
            top.annotate(f" {current['phase']}", corner, va="top", color="grey")
    for axes in top, bottom:
        if axes.lines:
            axes.legend(loc="best")
    top.set_ylabel("accuracy (share), reward (points)")
    bottom.set_xlabel("optimiser step")
    figure.savefig(folder / "curves.png", dpi=120)
