"""
What precision, recomputation, LoRA and a second process cost in time and memory: GRPO steps on the `long` workload.

    python bench/scale.py          prints a table

Each line is a fresh run: a warm-up step and two more, of which the faster one counts. Two processes, by torchrun, have one
thread each, one process has both cores. Memory is the peak of the first process, which is also the one that writes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from workloads import WORKLOADS, write_workload

ROOT = Path(__file__).parents[1]
VARIANTS = {
    "float32": "", "bfloat16": "--precision bfloat16", "float32, recomputing": "--gradient_checkpointing",
    "bfloat16, recomputing": "--precision bfloat16 --gradient_checkpointing", "LoRA, rank 16": "--lora_rank 16",
    "LoRA, rank 16, recomputing": "--lora_rank 16 --gradient_checkpointing",
    "LoRA and KL to the bare model": "--lora_rank 16 --use_kl_penalty true", "float32 and KL": "--use_kl_penalty true",
}


def measure(folder: Path, processes: int, flags: list[str]) -> tuple[float, float, float]:
    """Seconds of a step, of its sampling, and gigabytes."""
    workload = WORKLOADS["long"]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [
                *launcher, str(ROOT / "train.py"), "--use_grpo", "--model_path", str(folder / "model"), "--dataset",
                str(folder / "prompts.jsonl"), "--output_dir", f"{name}/run", "--use_kl_penalty", "false",
                "--reward_functions", f"{ROOT}/bench/workloads.py:share_of_even", "--batch_size", str(workload.prompts),
                "--num_completions_per_prompt", str(workload.group_size), "--generation_max_length",
                str(workload.new_tokens), "--eval_limit", "0", "--max_prompt_length", "2048", "--max_steps", "3",
                "--learning_rate", "1e-6", "--save_steps", "0", "--report_to", "none", *flags,
            ],
            cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": str(2 // processes)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in Path(f"{name}/run/metrics.jsonl").read_text().splitlines()]
    best = min(lines[1:], key=lambda line: line["step_seconds"])
    return best["step_seconds"], best["sampling_seconds"], max(line["peak_memory_gb"] for line in lines)


def main() -> None:
    print("| `long` | processes | step s | sampling s | peak GB of a process |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_workload(WORKLOADS["long"], Path(folder))
        for name, flags in VARIANTS.items():
            for processes in (1, 2):
                step, sampling, memory = measure(Path(folder), processes, flags.split())
                print(f"| {name} | {processes} | {step:.2f} | {sampling:.2f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
