"""
The demonstration with several seeds, one after the other: how far the cold start goes, where GRPO ends, how long it takes.

    python bench/demo_seeds.py --seeds 0 1 2 3 4
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runs.records import read_jsonl  # noqa: E402


def main() -> None:
    """Run train.py as a user would and print a row of a table for each seed. Flags that follow -- are passed on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("flags", nargs="*", help="more flags for train.py, after --")
    args = parser.parse_args()
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
        evals = [m for m in metrics if m["phase"] == "eval"]
        cold_steps = sum(m["phase"] == "cold_start" for m in metrics)
        grpo_steps = sum(m["phase"] == "grpo" for m in metrics)
        cold = next(m for m in evals if m["step"] == cold_steps)
        last = evals[-1]
        interval = f"{last['eval_accuracy']:.3f} [{last['eval_accuracy_low']:.3f}, {last['eval_accuracy_high']:.3f}]"
        before, after_cold = f"{evals[0]['eval_accuracy']:.3f}", f"{cold['eval_accuracy']:.3f}"
        row = [str(seed), before, after_cold, interval, f"{cold_steps} + {grpo_steps}", f"{seconds:.0f}"]
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
