"""
How near this project is to what the machine can do, and how its time and memory grow.

    python bench/alone.py          prints tables, draws docs/growth.png

Training is compared with the rate of a large matrix product, counting the operations that have to be done: every token of
prompts and completions once through the layers, completion tokens through the head, every visible pair through attention,
forward and backward. Decoding is compared with the rate at which memory is read: all weights once for each token of the
batch, and the keys and values of what is visible. Each point is a fresh process.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH.parent))

from workloads import WORKLOADS, Workload, write_workload  # noqa: E402

GROWTH = {
    "prompt tokens": ("prompt_tokens", [128, 256, 512, 1024, 2048]),
    "completions of a prompt, G": ("group_size", [4, 8, 16, 32]),
    "completion tokens": ("new_tokens", [32, 64, 128, 256]),
    "vocabulary": ("vocab_size", [8192, 32768, 131072, 262144]),
}


def changed(workload: Workload, name: str, value: int) -> Workload:
    if name == "vocab_size":
        return replace(workload, model=workload.model | {"vocab_size": value})
    return replace(workload, **{name: value})


def operations(model, w: Workload) -> float:
    """Multiplications and additions that a training pass has to do."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    layers = sum(p.numel() for p in model.parameters() if p.ndim == 2) - head
    prompt, completions, length = w.prompt_tokens, w.group_size, w.new_tokens
    pairs = prompt * (prompt + 1) / 2 + completions * (length * prompt + length * (length + 1) / 2)
    a_prompt = (
        2 * layers * (prompt + completions * length) + 2 * head * completions * length
        + 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers * pairs
    )
    return 3 * a_prompt * w.prompts


def bytes_of_decoding(model, w: Workload) -> float:
    """What has to be read for a rollout after the prompts."""
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4
    seen = w.prompts * (w.prompt_tokens + w.group_size * w.new_tokens / 2)       # on average
    return w.new_tokens * (4 * sum(p.numel() for p in model.parameters()) + token * seen)


def measure(w: Workload) -> dict:
    """Best of three, in this process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from config import GRPOConfig
    from devices import keep_freed_memory
    from grpo import policy_loss
    from logprobs import completion_log_probs
    from packing import micro_batches
    from sample import sample_completions_for_prompts

    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_workload(w, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "model")
        lines = (Path(folder) / "prompts.jsonl").read_text().splitlines()
    model.generation_config.eos_token_id = tokenizer.eos_token = None            # every completion goes to the limit
    prompts = [json.loads(line)["prompt"] for line in lines[: w.prompts]]
    config = GRPOConfig(
        num_completions_per_prompt=w.group_size, generation_max_length=w.new_tokens, generation_temperature=1.0,
        generation_top_k=0, generation_top_p=1.0,
    )
    best = {"sampling": 1e9, "prefill": 1e9, "training": 1e9}
    for _ in range(3):
        began = time.perf_counter()
        sample_completions_for_prompts(model, tokenizer, prompts, replace(config, generation_max_length=1), seed=0)
        prefilled = time.perf_counter()
        rollout = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0)
        sampled = time.perf_counter()
        for rows in micro_batches(rollout, torch.arange(len(rollout.completions)), 8192):
            new = completion_log_probs(model, rollout, rows)
            loss, _ = policy_loss(
                new.logp, rollout.sampling_logp[rows], torch.linspace(-1, 1, len(rows)), rollout.completion_mask[rows],
                num_tokens=rollout.completion_mask.sum(),
            )
            loss.backward()
        times = {"prefill": prefilled - began, "sampling": sampled - prefilled, "training": time.perf_counter() - sampled}
        best = {name: min(best[name], times[name]) for name in best}
    decoding = best["sampling"] - best["prefill"]
    return best | {
        "operations": operations(model, w) / best["training"], "bytes": bytes_of_decoding(model, w) / decoding,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def in_a_fresh_process(name: str, field: str = "", value: int = 0) -> dict:
    command = [sys.executable, __file__, "--one", name, field, str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def machine_rates() -> tuple[float, float]:
    """(operations, bytes read) a second: a large matrix product, and a sum over more memory than any cache holds."""
    square, long = torch.randn(4096, 4096), torch.ones(2**27)

    def best(function):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
        return min(times)

    return 2 * 4096**3 / best(lambda: square @ square), 4 * len(long) / best(long.sum)


def main() -> None:
    from matplotlib.figure import Figure

    peak_operations, peak_bytes = machine_rates()
    print(f"this machine: {peak_operations / 1e9:.0f} GFLOP/s in a matrix product, {peak_bytes / 1e9:.1f} GB/s read\n")
    print("| workload | prefill s | sampling s | training s | training / matrix rate | decoding / memory rate |")
    print("|---|---|---|---|---|---|")
    for name in "short", "long", "wide", "vocab":
        m = in_a_fresh_process(name)
        print(
            f"| {name} | {m['prefill']:.2f} | {m['sampling']:.2f} | {m['training']:.2f} | "
            f"{m['operations'] / peak_operations:.0%} | {m['bytes'] / peak_bytes:.0%} |", flush=True
        )
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(2, len(GROWTH), sharey="row")
    print("\n| `long`, with | sampling s | training s | peak GB |\n|---|---|---|---|")
    for (title, (field, values)), (times, memory) in zip(GROWTH.items(), axes.T, strict=True):
        points = [in_a_fresh_process("long", field, value) for value in values]
        for value, m in zip(values, points, strict=True):
            print(f"| {title} {value} | {m['sampling']:.2f} | {m['training']:.2f} | {m['peak_gb']:.2f} |", flush=True)
        times.plot(values, [m["sampling"] for m in points], "o-", label="sampling")
        times.plot(values, [m["training"] for m in points], "s-", label="training pass")
        memory.plot(values, [m["peak_gb"] for m in points], "o-", color="black")
        memory.set(xlabel=title)
        for panel in times, memory:
            panel.set(xscale="log")
            panel.set_xticks(values, [str(value) if value < 8192 else f"{value // 1024}K" for value in values], minor=False)
            panel.minorticks_off()
    for row in axes:                                      # shares one scale
        row[0].set_ylim(bottom=0)
    axes[0, 0].set(ylabel="seconds")
    axes[0, 0].legend()
    axes[1, 0].set(ylabel="peak memory, GB")
    both = in_a_fresh_process("vocab", "new_tokens", 256)                        # would hold V * T numbers if anything did
    print(f"| `vocab` with 256 completion tokens | {both['sampling']:.2f} | {both['training']:.2f} | {both['peak_gb']:.2f} |")
    figure.savefig(BENCH.parent / "docs/growth.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, field, value = sys.argv[2], sys.argv[3], int(sys.argv[4])
        print(json.dumps(measure(changed(WORKLOADS[name], field, value) if field else WORKLOADS[name])))
    else:
        main()
