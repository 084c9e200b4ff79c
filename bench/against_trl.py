"""
Steps of this project against steps of TRL, on the same models, prompts and lengths, in fresh processes that alternate.

    python bench/against_trl.py                                 everything, hours on two cores
    python bench/against_trl.py long wide --pairs 5 --peers trl-1.10

Builds an environment for every TRL first (bench/requirements-trl-*.txt). Each peer runs once as it is and once with
activation checkpointing, which is TRL's default; the one that is fastest on a workload then runs in pairs with us. Prints a
table of ratios, medians over the pairs with their range, and writes all runs to --output.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workloads import WORKLOADS, run_steps, write_workload

BENCH = Path(__file__).parent
PEERS = ("trl-1.10", "trl-1.16")
HEAD = "| workload | fastest TRL | step | sampling | training | memory, activations kept | memory, recomputed |"


def environment(peer: str) -> Path:
    """Return the python of a peer's environment, built if need be."""
    folder = BENCH.parent / f".venv-{peer}"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        requirements = BENCH / f"requirements-{peer}.txt"
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--requirement", requirements], check=True)
        (folder / "ready").touch()
    return folder / "bin/python"


def run(system: str, workload: str, folder: Path, seed: int) -> dict:
    """Measure a system, "ours" or a peer; with "+checkpointing" it recomputes activations."""
    name, _, checkpointing = system.partition("+")
    python, program = (sys.executable, "our_steps.py") if name == "ours" else (environment(name), "trl_steps.py")
    more = ["--gradient_checkpointing"] if checkpointing else []
    measured = {"system": system, "workload": workload, "seed": seed}
    measured |= run_steps(python, program, workload, folder, seed, *more)
    print("   " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in measured.items()), flush=True)
    return measured


def ratio(pairs: list[tuple[dict, dict]], part: str) -> str:
    """Return median and range of theirs / ours."""
    ratios = sorted(theirs[part] / ours[part] for theirs, ours in pairs)
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


def compare(workload: str, peers: list[str], num_pairs: int, folder: Path) -> tuple[list[dict], str]:
    """Return all runs on a workload, and its row of the table."""
    write_workload(WORKLOADS[workload], folder)
    alone = [run(peer + how, workload, folder, 0) for peer in peers for how in ("", "+checkpointing")]
    small = run("ours+checkpointing", workload, folder, 0)
    fastest = min(alone, key=lambda measured: measured["step"])["system"]
    pairs = []
    for seed in range(num_pairs):
        order = [fastest, "ours"] if seed % 2 else ["ours", fastest]
        measured = {system: run(system, workload, folder, seed) for system in order}
        pairs.append((measured[fastest], measured["ours"]))
    ours = statistics.median(measured["peak_gb"] for _, measured in pairs)
    kept = min(measured["peak_gb"] for measured in alone if "+" not in measured["system"])
    recomputed = min(measured["peak_gb"] for measured in alone if "+" in measured["system"])
    row = (
        f"| {workload} | {fastest} | {ratio(pairs, 'step')} | {ratio(pairs, 'sampling')} | {ratio(pairs, 'training')} | "
        f"{kept / ours:.2f} ({kept:.2f} / {ours:.2f} GB) | "
        f"{recomputed / small['peak_gb']:.2f} ({recomputed:.2f} / {small['peak_gb']:.2f} GB) |"
    )
    return [*alone, small, *(measured for pair in pairs for measured in pair)], row


def main() -> None:
    parser = argparse.ArgumentParser(description="Ours against TRL, as ratios.", allow_abbrev=False)
    parser.add_argument("workloads", nargs="*", help="names of bench/workloads.py; by default those for CPUs")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", default="outputs/against_trl.jsonl")
    args = parser.parse_args()
    runs, rows = [], []
    for workload in args.workloads or [name for name in WORKLOADS if not name.startswith("qwen3")]:
        with tempfile.TemporaryDirectory() as folder:
            found, row = compare(workload, args.peers, args.pairs, Path(folder))
        runs += found
        rows.append(row)
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(measured) + "\n" for measured in runs))
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows, sep="\n")


if __name__ == "__main__":
    main()
