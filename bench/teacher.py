"""
Steps with a teacher: this project's, exact and estimated from the sampled tokens, and those of TRL's DistillationTrainer.

    make real && python bench/teacher.py [--pairs 3]                          half an hour on two cores

On the same weights, in float32, in fresh processes that alternate: `sums`, SmolLM2-135M-Instruct as it was before `make real`, taught
by what it is after that, 64 completions of up to 24 tokens; `taught`, a Gemma 3 of 14 million random weights and a teacher of the
same size, V = 32768, 16 prompts of 128 tokens with 192 new ones. TRL samples one completion of each prompt, this project two, the
fewest that it allows. Prints medians with their range, and the ratio to TRL.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from against_trl import environment
from workloads import WORKLOADS, write_workload

BENCH = Path(__file__).parent
OUTPUTS = BENCH.parent / "outputs"
TAUGHT = ["--reward_functions", "none", "--use_kl_penalty", "true", "--kl_penalty_coef", "1"]
SYSTEMS = {
    "TRL": [],
    "exact": [*TAUGHT, "--kl_estimator", "exact"],
    "sampled": [*TAUGHT, "--kl_estimator", "ratio_k3"],
}


def write_sums(folder: Path) -> None:
    """model/ and prompts.jsonl of the workload sums; each prompt once."""
    (folder / "model").symlink_to(OUTPUTS / "SmolLM2-135M-Instruct")
    with open(BENCH.parent / "examples/sums.csv") as file, open(folder / "prompts.jsonl", "w") as out:
        for row in csv.DictReader(file):
            out.write(json.dumps({"prompt": [{"role": "user", "content": f"What is {row['a']} + {row['b']}?"}]}) + "\n")


def steps(system: str, workload: str, folder: Path, teacher: Path, seed: int) -> tuple[float, float]:
    """Median seconds of a step, and peak of the process in GB."""
    if system == "TRL":
        command = [environment("trl-1.16"), BENCH / "trl_steps.py", workload, folder, seed, "--teacher", teacher]
    else:
        command = [sys.executable, BENCH / "our_steps.py", workload, folder, seed, "--reference_path", teacher, *SYSTEMS[system]]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{system} on {workload} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{workload}, {system}: {found}", flush=True)
    return statistics.median(found["step"]), found["peak_gb"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps with a teacher against TRL.", allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    for workload in "sums", "taught":
        with tempfile.TemporaryDirectory() as name:
            folder, teacher = Path(name) / "student", Path(name) / "teacher/model"
            folder.mkdir()
            if workload == "sums":
                write_sums(folder)
                teacher = OUTPUTS / "real/final"
            else:
                write_workload(WORKLOADS[workload], folder)
                write_workload(WORKLOADS[workload], teacher.parent, seed=1)
            found = {system: [] for system in SYSTEMS}
            for seed in range(args.pairs):
                for system in [*SYSTEMS][:: 1 if seed % 2 else -1]:
                    found[system].append(steps(system, workload, folder, teacher, seed))
        for system, runs in found.items():
            shown = []
            for part in 0, 1:
                values = [run[part] for run in runs]
                ratio = statistics.median(a[part] / b[part] for a, b in zip(found["TRL"], runs, strict=True))
                shown.append(f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}], TRL / this {ratio:.2f}")
            print(f"| {workload} | {system} | " + " | ".join(shown) + " |", flush=True)


if __name__ == "__main__":
    main()
