"""
Steps of this project against steps of TRL, on the same models, prompts and lengths, in fresh processes that alternate.

    python bench/against_trl.py                                 everything, hours on two cores
    python bench/against_trl.py long wide --pairs 5 --peers trl-1.10
    make real && python bench/against_trl.py sums taught        with a teacher: half an hour

Builds an environment for every TRL first (bench/requirements-trl-*.txt). Each peer runs once as it is and once with
activation checkpointing, which is TRL's default; the one that is fastest on a workload then runs in pairs with us. Prints a
table of ratios, medians over the pairs with their range, and writes all runs to --output.

With a teacher it is TRL 1.16's DistillationTrainer, and here the exact KL and that estimated from the sampled tokens. `sums`:
SmolLM2-135M-Instruct as it was before `make real`, taught by what it is after that; `taught`: random weights, and a teacher of
the same size. TRL samples one completion of each prompt, this project two, the fewest that it allows.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from workloads import WORKLOADS, run_steps, write_workload

BENCH = Path(__file__).parent
OUTPUTS = BENCH.parent / "outputs"
PEERS = ("trl-1.10", "trl-1.16")
TEACHERS = "sums", "taught"
HEADS = {                                                 # of the tables with and without a teacher
    True: "| workload | system | step s | peak GB |",
    False: "| workload | fastest TRL | step | sampling | training | memory, activations kept | memory, recomputed |",
}
TAUGHT = ["--reward_functions", "none", "--use_kl_penalty", "true", "--kl_penalty_coef", "1"]


def environment(peer: str) -> Path:
    """Return the python of a peer's environment, built if need be."""
    folder = BENCH.parent / f".venv-{peer}"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        requirements = BENCH / f"requirements-{peer}.txt"
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--requirement", requirements], check=True)
        (folder / "ready").touch()
    return folder / "bin/python"


def run(system: str, workload: str, folder: Path, seed: int, *flags) -> dict:
    """Measure a system, "ours" or a peer; with "+checkpointing" it recomputes activations."""
    name, _, checkpointing = system.partition("+")
    python, program = (sys.executable, "our_steps.py") if name == "ours" else (environment(name), "trl_steps.py")
    more = ["--gradient_checkpointing"] if checkpointing else []
    measured = {"system": system, "workload": workload, "seed": seed}
    measured |= run_steps(python, program, workload, folder, seed, *more, *flags)
    print("   " + ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in measured.items()), flush=True)
    return measured


def ratio(pairs: list[tuple[dict, dict]], part: str) -> str:
    """Return median and range of theirs / ours."""
    ratios = sorted(theirs[part] / ours[part] for theirs, ours in pairs)
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]"


def compare(workload: str, peers: list[str], num_pairs: int, folder: Path) -> tuple[list[dict], list[str]]:
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
    return [*alone, small, *(measured for pair in pairs for measured in pair)], [row]


def write_sums(folder: Path) -> None:
    """Write model/ and prompts.jsonl of the workload sums; each prompt once."""
    (folder / "model").symlink_to(OUTPUTS / "SmolLM2-135M-Instruct")
    with open(BENCH.parent / "examples/sums.csv") as file, open(folder / "prompts.jsonl", "w") as out:
        for row in csv.DictReader(file):
            out.write(json.dumps({"prompt": [{"role": "user", "content": f"What is {row['a']} + {row['b']}?"}]}) + "\n")


def compare_with_teacher(workload: str, num_pairs: int, folder: Path) -> tuple[list[dict], list[str]]:
    """Return all runs on a workload with a teacher, and its rows: step and memory of each system, beside TRL."""
    student, teacher = folder / "student", folder / "teacher/model"
    student.mkdir()
    if workload == "sums":
        write_sums(student)
        teacher = OUTPUTS / "real/final"
    else:
        write_workload(WORKLOADS[workload], student)
        write_workload(WORKLOADS[workload], teacher.parent, seed=1)
    systems = {
        "TRL": ("trl-1.16", "--teacher", teacher),
        "exact": ("ours", "--reference_path", teacher, *TAUGHT, "--kl_estimator", "exact"),
        "sampled": ("ours", "--reference_path", teacher, *TAUGHT, "--kl_estimator", "ratio_k3"),
    }
    found = {name: [] for name in systems}
    for seed in range(num_pairs):
        for name in [*systems][:: 1 if seed % 2 else -1]:
            system, *flags = systems[name]
            found[name].append(run(system, workload, student, seed, *flags))
    rows = []
    for name, runs in found.items():
        pairs = list(zip(found["TRL"], runs, strict=True))
        shown = [f"{statistics.median(measured[part] for measured in runs):.2f}, TRL / this {ratio(pairs, part)}"
                 for part in ("step", "peak_gb")]
        rows.append(f"| {workload} | {name} | {' | '.join(shown)} |")
    return [measured for runs in found.values() for measured in runs], rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Ours against TRL, as ratios.", allow_abbrev=False)
    parser.add_argument("workloads", nargs="*", help="names of bench/workloads.py; by default those for CPUs")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", default="outputs/against_trl.jsonl")
    args = parser.parse_args()
    runs, rows = [], {True: [], False: []}
    for workload in args.workloads or [name for name in WORKLOADS if not name.startswith("qwen3")]:
        with tempfile.TemporaryDirectory() as folder:
            if workload in TEACHERS:
                found = compare_with_teacher(workload, args.pairs, Path(folder))
            else:
                found = compare(workload, args.peers, args.pairs, Path(folder))
        runs += found[0]
        rows[workload in TEACHERS] += found[1]
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(measured) + "\n" for measured in runs))
    for with_teacher, head in HEADS.items():
        if rows[with_teacher]:
            print(head, "|---" * (head.count("|") - 1) + "|", *rows[with_teacher], "", sep="\n")


if __name__ == "__main__":
    main()
