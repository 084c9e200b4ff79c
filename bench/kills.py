"""
A run that is killed again and again, against one that is left alone: the same metrics and the same weights, bit for bit.

    python bench/kills.py --kills 25          five kinds of run, about 40 minutes on two cores

SIGKILL, to all processes of the run at once, comes at a random moment after the first new step, every third time as soon as a
checkpoint begins to be written. Prints how many kills there were, how many of them left a half-written checkpoint behind, and what differed.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = (
    "--eval_limit 4 --eval_steps 7 --report_to none --batch_size 4 --num_completions_per_prompt 4 --save_steps 1 "
    "--generation_max_length 12 --log_rollouts_every 3 --learning_rate 1e-3"
)
KINDS = {
    "several epochs": "--use_grpo --cold_start_steps 3 --use_kl_penalty true --ppo_epochs 2 --minibatch_size 8",
    "EMA reference": "--use_grpo --cold_start_steps 3 --use_kl_penalty true --reference_mode ema --ema_alpha 0.9",
    "value head": "--use_grpo --cold_start_steps 3 --use_kl_penalty true --use_value_head true",
    "supervised": "--use_grpo false",
    "two processes": "--use_grpo --cold_start_steps 3 --use_kl_penalty true",
}


def start(folder: Path, *flags: str, processes: int = 1) -> subprocess.Popen:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), "--output_dir", str(folder), *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def kill(process: subprocess.Popen) -> None:
    """Kill the process and its children, which torchrun puts into sessions of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [process.pid, *map(int, children)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def finish(process: subprocess.Popen) -> None:
    error = process.communicate()[1]
    assert process.returncode == 0, error[-2000:]


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def outcome(folder: Path) -> tuple[list[dict], str]:
    """What must not depend on kills: metrics but for times and memory, and a digest of the final weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "seconds" not in k and "memory" not in k} for line in lines]
    return kept, hashlib.sha256((folder / "final/model.safetensors").read_bytes()).hexdigest()


def killed_run(folder: Path, flags: list[str], kills: int, draws: random.Random, processes: int = 1) -> tuple[int, int]:
    """Run to the end in spite of so many kills. Returns how many came, and how many of them while a checkpoint was written."""
    killed = during_save = 0
    process = start(folder, *flags, processes=processes)
    while killed < kills:
        before = num_steps(folder)
        while process.poll() is None and num_steps(folder) == before:
            time.sleep(0.005)
        if killed % 3 == 1:                               # in the middle of a save
            while process.poll() is None and not (folder / "checkpoints/writing").exists():
                pass
        else:
            time.sleep(draws.random())
        if process.poll() is not None:                    # it came to its end first
            break
        kill(process)
        killed, during_save = killed + 1, during_save + (folder / "checkpoints/writing").exists()
        process = start(folder, *(["--resume"] if (folder / "config.json").exists() else flags), processes=processes)
    finish(process)
    return killed, during_save


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill runs and compare.", allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--max_steps", type=int, default=120)
    args = parser.parse_args()
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as name:
            flags = [*QUICK.split(), *KINDS[kind].split(), "--num_epochs", "50", "--max_steps", str(args.max_steps)]
            processes = 2 if kind == "two processes" else 1
            finish(start(Path(name) / "whole", *flags, processes=processes))
            killed, during_save = killed_run(Path(name) / "killed", flags, args.kills, random.Random(kind), processes)
            same = outcome(Path(name) / "whole") == outcome(Path(name) / "killed")
            verdict = "the same bit for bit" if same else "DIFFERENT"
            print(f"{kind}: {killed} kills, {during_save} while a checkpoint was written: {verdict}", flush=True)


if __name__ == "__main__":
    main()
