"""
What this project does on a GPU, in one table: tests, tokens a second, shares of the card's rates, memory, and TRL.

    python bench/gpu.py            on the first GPU, at most 25 minutes
    python bench/gpu.py --tiny     a tiny model and some of the tests, about a minute on two cores; also chosen without CUDA

Prints the table in Markdown, a line as soon as it is known, and writes it to --output. Every part is a process of its own with a time limit; what fails or takes
too long has its reason in the table. Models are Qwen 3 with random weights, in bfloat16, on 8 prompts of 512 tokens x 8
completions of 256. Rates of the card are those of a large product of bfloat16 matrices and of a large copy, measured here. The
shares count the operations and bytes that cannot be avoided: every token of prompts and completions once through the layers,
completion tokens through the head, every visible pair through attention, forward and backward; in decoding all weights once for
each token of the batch, and the keys and values of what is visible. TRL takes part where bench/against_trl.py has built its
environment, or where it can be imported.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from workloads import WORKLOADS, Workload, workload_config

BENCH = Path(__file__).parent
ROOT = BENCH.parent
SECONDS = {                                               # limits of the parts: 1500 in all
    "tests": 240, "rates": 60, "write": 60, "0.6B": 150, "0.6B, TRL": 240, "1.7B": 210, "4B": 240, "4B, LoRA": 180,
}
FLAGS = {"4B, LoRA": ["--lora_rank", "16"]}
HEADINGS = "model | step s | sampling tokens/s | of the memory rate | training tokens/s | of the matrix rate | peak GB"


def run_part(part: str, command: list, **env: str) -> tuple[str, str]:
    """Run a command within the time of a part. Returns what it printed, and why it failed, or ""."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [str(word) for word in command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True,
            timeout=SECONDS[part])
    except subprocess.TimeoutExpired:
        return "", f"took more than {SECONDS[part]} s"
    print(f"  {part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
    return done.stdout, f"failed: {lines[-1]:.120}" if done.returncode else ""


def operations_and_bytes(w: Workload) -> tuple[float, float]:
    """Count the operations of a training pass, and the bytes that a rollout reads after its prompts."""
    config = workload_config(w)
    with torch.device("meta"):
        parameters = list(AutoModelForCausalLM.from_config(config).parameters())
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for p in parameters if p.ndim == 2) - head
    prompt, completions, length = w.prompt_tokens, w.group_size, w.new_tokens
    pairs = prompt * (prompt + 1) / 2 + completions * (length * prompt + length * (length + 1) / 2)
    a_prompt = (
        2 * layers * (prompt + completions * length) + 2 * head * completions * length
        + 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * pairs
    )
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers      # keys and values
    visible = w.prompts * (prompt + completions * length / 2)                    # tokens, on average over a rollout
    read = length * (sum(p.numel() for p in parameters) + token * visible)
    return 3 * a_prompt * w.prompts, 2 * read            # bfloat16


def machine_rates(size: int, length: int, device: str) -> tuple[float, float]:
    """Measure operations a second in a product of square matrices, and bytes read and written a second in a copy."""
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    source = torch.ones(length, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)

    def best_seconds(function) -> float:
        times = []
        for _ in range(10):
            began = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    return 2 * size**3 / best_seconds(lambda: left @ right), 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


def measure_rates(tiny: bool) -> dict:
    """Return the name of the device, and its rates in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix, memory = machine_rates(*((256, 2**22) if tiny else (8192, 2**30)), device)
    return {"name": torch.cuda.get_device_name() if device == "cuda" else "CPU", "matrix": matrix, "memory": memory}


def run_tests(tiny: bool) -> str:
    """One line for the tests on a GPU, and one for each that failed."""
    chosen, env = (["-k", "sharded_over or tf32"], {"TEST_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}) if tiny else ([], {})
    printed, failure = run_part(
        "tests", [sys.executable, "-m", "pytest", "-q", "-n", "4", "-p", "no:warnings", "tests/test_gpu.py", *chosen], **env)
    lines = printed.strip().splitlines()
    failed = [f"- {line}" for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "\n".join([f"tests/test_gpu.py: {lines[-1] if lines else failure}", *failed])


def table_row(part: str, name: str, printed: str, failure: str, rates: dict) -> str:
    """A row of the table, from the JSON that our_steps.py or trl_steps.py printed last."""
    if failure:
        return f"| {part} | {failure} |" + " |" * 5
    w, result = WORKLOADS[name], json.loads(printed.strip().splitlines()[-1])
    step, sampling = (statistics.median(result[kind]) for kind in ("step", "sampling"))
    completions = w.prompts * w.group_size * w.new_tokens
    operations, read = operations_and_bytes(w)
    operations *= 2 / 3 if part in FLAGS else 1           # LoRA: no gradient of the weights
    return (
        f"| {part} | {step:.2f} | {completions / sampling:.0f} | {read / sampling / rates['memory']:.0%} | "
        f"{(w.prompts * w.prompt_tokens + completions) / (step - sampling):.0f} | "
        f"{operations / (step - sampling) / rates['matrix']:.0%} | {result['peak_gb']:.1f} |"
    )


def python_with_trl() -> str:
    """The interpreter that can import TRL, "" if there is none."""
    built = [path for path in sorted(ROOT.glob(".venv-trl-*")) if (path / "ready").exists()]
    return str(built[0] / "bin/python") if built else sys.executable if importlib.util.find_spec("trl") else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="One table of what a GPU does.", allow_abbrev=False)
    parser.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available())
    parser.add_argument("--output", default="outputs/gpu.md")
    args = parser.parse_args()
    printed, failure = run_part("rates", [sys.executable, __file__, "--rates", args.tiny])
    if failure:
        sys.exit(f"bench/gpu.py: rates: {failure}")
    rates = json.loads(printed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("")

    def add(line: str) -> None:
        print(line, flush=True)
        with open(output, "a") as file:
            print(line, file=file)

    add(f"{date.today()}, {rates['name']}, {rates['matrix'] / 1e12:.3g} TFLOP/s and {rates['memory'] / 1e9:.3g} GB/s measured, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, commit {commit or 'unknown'}\n")
    add(f"{run_tests(args.tiny)}\n\n| {HEADINGS} |\n{'|---' * 7}|")
    parts = ["tiny", "tiny, LoRA", "tiny, TRL"] if args.tiny else [part for part in SECONDS if part[0].isdigit()]
    if args.tiny:
        SECONDS.update(dict.fromkeys(parts, 120))
        FLAGS["tiny, LoRA"] = ["--lora_rank", "4"]
    device = ["--device", "cpu"] if args.tiny else []
    for size in dict.fromkeys(part.partition(",")[0] for part in parts):
        name = f"qwen3-{size}"
        with tempfile.TemporaryDirectory() as folder:
            _, unwritten = run_part("write", [sys.executable, BENCH / "workloads.py", name, folder])
            for part in [part for part in parts if part.partition(",")[0] == size]:
                flags = ["--precision", "bfloat16", *device, *FLAGS.get(part, [])]
                python, command = sys.executable, ["our_steps.py", name, folder, 0, *flags]
                if part.endswith("TRL"):
                    python, command = python_with_trl(), ["trl_steps.py", name, folder, 0, "--bfloat16", "--rows", 8]
                result = ("", unwritten or "TRL is not installed: bench/against_trl.py builds its environment")
                if python and not unwritten:
                    result = run_part(part, [python, BENCH / command[0], *command[1:]], HF_HUB_OFFLINE="1")
                add(table_row(part, name, *result, rates))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rates"]:
        print(json.dumps(measure_rates(sys.argv[2] == "True")))
    else:
        main()
