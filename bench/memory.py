"""
The estimate of memory that a run prints before its first step, and the peak that the process then has.

    OMP_NUM_THREADS=1 python bench/memory.py [name ...]        prints a table

Each line is a fresh process on the CPU: two steps with untrained weights, with which hardly a completion ends before the
limit. Both numbers include Python and its libraries, 0.4 GB.
"""

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from transformers import Gemma2Config, Qwen3Config, Qwen3MoeConfig
from workloads import QWEN3, Workload, qwen3, write_workload

ROOT = Path(__file__).parents[1]
LAYERS = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=6, num_key_value_heads=1, head_dim=128,
    sliding_window=512, vocab_size=32768,
)
GEMMA3 = LAYERS | {"query_pre_attn_scalar": 128}          # 127 million parameters
GEMMA3_270M = dict(
    vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
    head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
)
EXPERTS = LAYERS | dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=768, num_hidden_layers=6)   # 212 million
GRPO, NO_KL = "--use_grpo", "--use_grpo --use_kl_penalty false"
LONG_PROMPTS = Workload(GEMMA3, prompts=2, prompt_tokens=512, group_size=4, new_tokens=64, measured_steps=2)
LONG_ANSWERS = Workload(GEMMA3, prompts=1, prompt_tokens=32, group_size=8, new_tokens=256, measured_steps=2)
RAGGED = replace(LONG_ANSWERS, model=GEMMA3 | {"vocab_size": 263}, measured_steps=6)     # EOS is one of 263 tokens
MANY_WORDS = Workload(GEMMA3_270M, prompts=1, prompt_tokens=32, group_size=4, new_tokens=128, measured_steps=2)
QWEN3_06B = Workload(qwen3(*QWEN3["0.6B"]), prompts=1, prompt_tokens=32, group_size=4, new_tokens=64, measured_steps=2,
                     architecture=Qwen3Config)
SETTINGS = {
    "Gemma 3, 127 M, no KL": (LONG_PROMPTS, NO_KL),
    "Gemma 3, 127 M": (LONG_PROMPTS, GRPO),
    "Gemma 3, 127 M, passes of 512 tokens": (LONG_PROMPTS, f"{GRPO} --max_tokens_per_forward 512"),
    "Gemma 3, 127 M, recomputing": (LONG_PROMPTS, f"{GRPO} --gradient_checkpointing"),
    "Gemma 3, 127 M, value head": (LONG_PROMPTS, f"{GRPO} --use_value_head"),
    "Gemma 3, 127 M, LoRA": (LONG_PROMPTS, f"{GRPO} --lora_rank 16"),
    "Gemma 3, 127 M, bfloat16": (LONG_PROMPTS, f"{GRPO} --precision bfloat16"),
    "Gemma 3, 127 M, bfloat16, recomputing": (LONG_PROMPTS, f"{GRPO} --precision bfloat16 --gradient_checkpointing"),
    "Gemma 3, 127 M, bfloat16, LoRA": (LONG_PROMPTS, f"{GRPO} --precision bfloat16 --lora_rank 16"),
    "Gemma 3, 127 M, plain rows": (LONG_PROMPTS, f"{GRPO} --shared_prompt never"),
    "Gemma 3, 127 M, long completions": (LONG_ANSWERS, GRPO),
    "Gemma 3, 127 M, long completions, LoRA": (LONG_ANSWERS, f"{GRPO} --lora_rank 16"),
    "Gemma 3, 102 M, ragged completions": (RAGGED, GRPO),
    "Gemma 3 270m": (MANY_WORDS, NO_KL),
    "Gemma 3 270m, LoRA": (MANY_WORDS, f"{GRPO} --lora_rank 16"),
    "Gemma 2, 127 M": (replace(LONG_PROMPTS, architecture=Gemma2Config), GRPO),
    "Qwen 3 MoE, 212 M": (replace(LONG_PROMPTS, model=EXPERTS, architecture=Qwen3MoeConfig), NO_KL),
    "Qwen 3 MoE, 212 M, LoRA": (replace(LONG_PROMPTS, model=EXPERTS, architecture=Qwen3MoeConfig), f"{GRPO} --lora_rank 16"),
    "Qwen 3 0.6B, LoRA": (QWEN3_06B, f"{GRPO} --lora_rank 16"),
    "Qwen 3 0.6B, LoRA, recomputing": (QWEN3_06B, f"{GRPO} --lora_rank 16 --gradient_checkpointing"),
}


def measure(workload: Workload, flags: list[str]) -> tuple[float, float]:
    """Gigabytes: estimate and measured peak."""
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own: a program's peak, ru_maxrss, begins with that of the process that starts it.
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            other.submit(write_workload, workload, Path(name)).result()
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
