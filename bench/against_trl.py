"""
Steps of this project against steps of TRL, on the same models, prompts and lengths, in fresh processes that alternate.

    python bench/against_trl.py                                 everything, hours on two cores
    python bench/against_trl.py --workloads long wide --pairs 5 --peers trl-1.10

Builds an environment for every TRL first (bench/requirements-trl-*.txt). Each peer runs once as it is and once with
activation checkpointing, which is TRL's default; the one that is fastest on a workload then runs in pairs with us. Prints a
table of ratios, medians over the pairs with their range, and writes all runs to --output.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workloads import WORKLOADS, write_workload

BENCH = Path(__file__).parent
PEERS = ("trl-1.10", "trl-1.16")


def environment(peer: str) -> Path:
    """The python of a peer's environment, built if need be."""
    folder = BENCH.parent / f".venv-{peer}"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        requirements = BENCH / f"requirements-{peer}.txt"
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--requirement", requirements], check=True)
        (folder / "ready").touch()
    return folder / "bin/python"


def run(system: str, workload: str, folder: Path, seed: int) -> dict:
    """One process of warm-up and measured steps: medians in seconds, and the peak of its memory."""
    name, _, checkpointing = system.partition("+")
    ours = name == "ours"
    command = [sys.executable, BENCH / "our_steps.py"] if ours else [environment(name), BENCH / "trl_steps.py"]
    flags = ["--gradient_checkpointing"] if checkpointing else []
    done = subprocess.run(
        [*map(str, command), workload, str(folder), str(seed), *flags], capture_output=True, text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{system} on {workload} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = {part: statistics.median(result[part]) for part in ("step", "sampling")}
    seconds["training"] = seconds["step"] - seconds["sampling"]
    measured = {"system": system, "workload": workload, "seed": seed, "peak_gb": result["peak_gb"], **seconds}
    print("   " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in measured.items()), flush=True)
    return measured


def ratio(pairs: list[tuple[dict, dict]], part: str) -> str:
    """Median and range of theirs / ours."""
    ratios = sorted(theirs[part] / ours[part] for theirs, ours in pairs)
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Ours against TRL, as ratios.", allow_abbrev=False)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", default="outputs/against_trl.jsonl")
    args = parser.parse_args()
    runs, rows = [], []
    for workload in args.workloads:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_workload(WORKLOADS[workload], folder)
            alone = [run(peer + how, workload, folder, 0) for peer in args.peers for how in ("", "+checkpointing")]
            small = run("ours+checkpointing", workload, folder, 0)
            fastest = min(alone, key=lambda measured: measured["step"])["system"]
            pairs = []
            for seed in range(args.pairs):
                order = [fastest, "ours"] if seed % 2 else ["ours", fastest]
                measured = {system: run(system, workload, folder, seed) for system in order}
                pairs.append((measured[fastest], measured["ours"]))
        runs += [*alone, small, *(measured for pair in pairs for measured in pair)]
        ours = statistics.median(measured["peak_gb"] for _, measured in pairs)
        kept = min(measured["peak_gb"] for measured in alone if "+" not in measured["system"])
        recomputed = min(measured["peak_gb"] for measured in alone if "+" in measured["system"])
        rows.append(
            f"| {workload} | {fastest} | {ratio(pairs, 'step')} | {ratio(pairs, 'sampling')} | {ratio(pairs, 'training')} | "
            f"{kept / ours:.2f} ({kept:.2f} / {ours:.2f} GB) | "
            f"{recomputed / small['peak_gb']:.2f} ({recomputed:.2f} / {small['peak_gb']:.2f} GB) |"
        )
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(measured) + "\n" for measured in runs))
    print("| workload | fastest TRL | step | sampling | training | memory, activations kept | memory, recomputed |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
