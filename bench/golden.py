"""
Hashes of nine short runs: two versions of the program that print the same lines train bit for bit alike.

    OMP_NUM_THREADS=1 python bench/golden.py FOLDER [--only conversations] [--processes 2] [--more "--engine plain"]

A line is the run and the hashes of its weights, of metrics.jsonl without seconds and memory, and of rollouts.jsonl.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = "--eval_limit 16 --report_to none --log_rollouts_every 1 --save_steps 0 --eval_steps 0"
SMALL = f"{QUICK} --batch_size 8 --max_steps 6 --generation_max_length 16 --cold_start_steps 6"
GAME = f"{QUICK} --profile guess_letter --batch_size 4 --max_steps 6 --cold_start_steps 6"
RUNS = {
    "demo": f"--use_grpo {QUICK} --max_steps 30",
    "LoRA, gspo": f"--use_grpo {SMALL} --lora_rank 4 --loss_type gspo --ppo_epochs 2",
    "value head": f"--use_grpo {SMALL} --use_value_head --ppo_epochs 2 --minibatch_size 16 --use_kl_penalty --reference_mode ema "
                  "--ema_alpha 0.9",
    "KL in reward": f"--use_grpo {SMALL} --use_kl_penalty --kl_in reward --importance_cap 2 --dynamic_sampling 2",
    "exact KL, gdpo": f"--use_grpo {SMALL} --use_kl_penalty --kl_estimator exact --reward_combination gdpo",
    "cispo, k2, queue": f"--use_grpo {SMALL} --loss_type cispo --ppo_epochs 2 --use_kl_penalty --kl_estimator k2 "
                        "--generation_batch_size 12 --generation_top_k 20 --generation_top_p 0.9",
    "conversations": f"--use_grpo {GAME} --use_value_head false",
    "conversations, value head": f"--use_grpo {GAME}",
    "supervised bfloat16": f"--use_grpo false {QUICK} --precision bfloat16 --max_steps 6 --batch_size 8",
}
NOT_COMPARED = {"peak_memory_gb", "step_seconds", "sampling_seconds", "training_seconds"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--more", default="")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.processes)]
    for name, flags in RUNS.items():
        if args.only not in name:
            continue
        folder = args.folder / name.replace(", ", "-").replace(" ", "_")
        command = [sys.executable, *(several if args.processes > 1 else []), str(ROOT / "train.py"), "--output_dir", str(folder)]
        subprocess.run([*command, *flags.split(), *args.more.split()], check=True, stdout=subprocess.DEVNULL, env=os.environ)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = [{key: value for key, value in sorted(line.items()) if key not in NOT_COMPARED} for line in lines]
        weights = b"".join(path.read_bytes() for path in sorted((folder / "final").glob("*.safetensors")))
        rollouts = (folder / "rollouts.jsonl").read_bytes()
        print(f"{name:28}{digest(weights)}  {digest(json.dumps(kept).encode())}  {digest(rollouts)}", flush=True)


if __name__ == "__main__":
    main()
