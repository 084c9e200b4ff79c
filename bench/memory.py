"""
The estimate of memory that a run prints before its first step, and the peak that the process then has.

    OMP_NUM_THREADS=1 python bench/memory.py [name ...]        prints a table

Each line is a fresh process on the CPU: two steps with untrained weights, with which hardly a completion ends before the
limit. Both numbers include Python and its libraries, 0.5 GB.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from workloads import Workload, write_workload

ROOT = Path(__file__).parents[1]
LAYERS = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=6, num_key_value_heads=1, head_dim=128,
    query_pre_attn_scalar=128, sliding_window=512,
)
MODEL = LAYERS | {"vocab_size": 32768}                    # 127 million parameters
WIDE = LAYERS | {"vocab_size": 262144, "hidden_size": 384, "num_hidden_layers": 6}       # 128 million, 101 of them the head
GRPO, NO_KL = "--use_grpo", "--use_grpo --use_kl_penalty false"
LONG_PROMPTS = Workload(MODEL, prompts=2, prompt_tokens=512, group_size=4, new_tokens=64, measured_steps=2)
LONG_ANSWERS = Workload(MODEL, prompts=1, prompt_tokens=32, group_size=8, new_tokens=256, measured_steps=2)
MANY_WORDS = Workload(WIDE, prompts=2, prompt_tokens=128, group_size=8, new_tokens=48, measured_steps=2)
SETTINGS = {
    "float32, no KL": (LONG_PROMPTS, NO_KL),
    "float32": (LONG_PROMPTS, GRPO),
    "float32, passes of 512 tokens": (LONG_PROMPTS, f"{GRPO} --max_tokens_per_forward 512"),
    "float32, recomputing": (LONG_PROMPTS, f"{GRPO} --gradient_checkpointing"),
    "float32, long completions": (LONG_ANSWERS, GRPO),
    "float32, value head": (LONG_PROMPTS, f"{GRPO} --use_value_head"),
    "float32, vocabulary of 262,144": (MANY_WORDS, GRPO),
    "LoRA, rank 16": (LONG_PROMPTS, f"{GRPO} --lora_rank 16"),
    "bfloat16": (LONG_PROMPTS, f"{GRPO} --precision bfloat16"),
    "bfloat16, recomputing": (LONG_PROMPTS, f"{GRPO} --precision bfloat16 --gradient_checkpointing"),
    "bfloat16, vocabulary of 262,144": (MANY_WORDS, f"{GRPO} --precision bfloat16"),
    "bfloat16, LoRA, rank 16": (LONG_PROMPTS, f"{GRPO} --precision bfloat16 --lora_rank 16"),
}


def measure(workload: Workload, flags: list[str]) -> tuple[float, float]:
    """Gigabytes: estimate and measured peak."""
    with tempfile.TemporaryDirectory() as name:
        write_workload(workload, Path(name))
        done = subprocess.run(
            [
                sys.executable, str(ROOT / "train.py"), "--model_path", f"{name}/model", "--dataset", f"{name}/prompts.jsonl",
                "--output_dir", f"{name}/run", "--reward_functions", f"{ROOT}/bench/workloads.py:share_of_even",
                "--batch_size", str(workload.prompts), "--num_completions_per_prompt", str(workload.group_size),
                "--generation_max_length", str(workload.new_tokens), "--eval_limit", "0", "--max_prompt_length", "2048",
                "--max_steps", str(workload.measured_steps), "--learning_rate", "1e-6", "--save_steps", "0",
                "--report_to", "none", *flags,
            ],
            cwd=ROOT, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        print(re.search(r"memory: .*", done.stdout)[0], file=sys.stderr)
        steps = [json.loads(line) for line in Path(f"{name}/run/metrics.jsonl").read_text().splitlines()]
    return float(re.search(r"memory: about ([\d.]+) of", done.stdout)[1]), max(step["peak_memory_gb"] for step in steps)


def main(names: list[str]) -> None:
    print("| setting | estimate GB | measured GB | ratio |\n|---|---|---|---|")
    for name in names or SETTINGS:
        workload, flags = SETTINGS[name]
        estimate, measured = measure(workload, flags.split())
        print(f"| {name} | {estimate:.2f} | {measured:.2f} | {estimate / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
