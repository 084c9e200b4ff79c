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
    "prompt tokens": ("prompt_tokens", [128, 512, 2048]),
    "completions of a prompt, G": ("group_size", [4, 8, 16]),
    "completion tokens, prompts of 128": ("new_tokens", [64, 128, 256, 512, 1024]),
    "vocabulary": ("vocab_size", [8192, 32768, 262144]),
}


PASS = [1024, 2048, 4096, 8192]                           # tokens of a pass of one prompt of 128 and eight completions


def changed(workload: Workload, name: str, value: int) -> Workload:
    """A workload with another value of a field; completion lengths are varied behind prompts of 128."""
    if name == "vocab_size":
        return replace(workload, model=workload.model | {"vocab_size": value})
    if name == "new_tokens":
        workload = replace(workload, prompt_tokens=128)
    if name == "pass_tokens":
        return replace(workload, prompts=1, prompt_tokens=128, new_tokens=(value - 128) // workload.group_size)
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


def bytes_of_decoding(model, w: Workload, size: int = 4) -> float:
    """What has to be read for a rollout after the prompts, at `size` bytes a number."""
    config = model.config
    token = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * size
    seen = w.prompts * (w.prompt_tokens + w.group_size * w.new_tokens / 2)       # on average
    return w.new_tokens * (size * sum(p.numel() for p in model.parameters()) + token * seen)


def measure(w: Workload, shared: bool = True, tokens: int = 0) -> dict:
    """Best of two, in this process. tokens: of a pass in training; 0: the default of --max_tokens_per_forward."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from config import GRPOConfig
    from engine import make_engine
    from engine.devices import keep_freed_memory
    from grpo import policy_loss

    tokens = tokens or max(2048, 2 * w.prompt_tokens)
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
    engine = make_engine("shared" if shared else "plain", model, tokenizer, max_tokens=tokens)
    best = {"sampling": 1e9, "prefill": 1e9, "training": 1e9}
    for _ in range(2):
        began = time.perf_counter()
        one = replace(config, generation_max_length=1)
        engine.sample(prompts, one, seed=0)
        prefilled = time.perf_counter()
        rollout = engine.sample(prompts, config, seed=0)
        sampled = time.perf_counter()
        for rows in engine.micro_batches(rollout, torch.arange(len(rollout.completions))):
            new = engine.log_probs(rollout, rows, {})
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


def in_a_fresh_process(name: str, field: str = "", value: int = 0, shared: bool = True, tokens: int = 0) -> dict:
    command = [sys.executable, __file__, "--one", name, field, str(value), "shared" if shared else "rows", str(tokens)]
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
    for name in "short", "long", "wide", "vocab", "reasoning", "gsm8k":
        m = in_a_fresh_process(name)
        print(
            f"| {name} | {m['prefill']:.2f} | {m['sampling']:.2f} | {m['training']:.2f} | "
            f"{m['operations'] / peak_operations:.0%} | {m['bytes'] / peak_bytes:.0%} |", flush=True
        )
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(2, len(GROWTH), sharey="row")
    print("\n| `long`, with | sampling s, plain rows | training s, plain rows | peak GB |\n|---|---|---|---|")
    for (title, (field, values)), (times, memory) in zip(GROWTH.items(), axes.T, strict=True):
        points = [in_a_fresh_process("long", field, value) for value in values]
        rows = [in_a_fresh_process("long", field, value, shared=False) for value in values]
        for value, m, r in zip(values, points, rows, strict=True):
            times_of = " | ".join(f"{m[kind]:.2f}, {r[kind]:.2f}" for kind in ("sampling", "training"))
            print(f"| {title} {value} | {times_of} | {m['peak_gb']:.2f} |", flush=True)
        for kind, marker, colour in ("sampling", "o", "tab:blue"), ("training", "s", "tab:orange"):
            times.plot(values, [m[kind] for m in points], f"{marker}-", color=colour, label=f"{kind}, prompts shared")
            times.plot(values, [m[kind] for m in rows], f"{marker}:", color=colour, label=f"{kind}, plain rows", alpha=0.6)
        memory.plot(values, [m["peak_gb"] for m in points], "o-", color="black")
        memory.set(xlabel=title)
        for panel in times, memory:
            panel.set(xscale="log", yscale="log" if panel is times else "linear")
            panel.set_xticks(values, [str(value) if value < 8192 else f"{value // 1024}K" for value in values], minor=False)
            panel.minorticks_off()
    axes[0, 0].set(ylabel="seconds")
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].set(ylabel="peak memory, GB", ylim=(0, None))
    both = in_a_fresh_process("vocab", "new_tokens", 256)                        # would hold V * T numbers if anything did
    print(f"| `vocab` with 256 completion tokens | {both['sampling']:.2f} | {both['training']:.2f} | {both['peak_gb']:.2f} |")
    print("\n| tokens of a training pass, one prompt of 128 | training s | peak GB |\n|---|---|---|")
    for tokens in PASS:
        m = in_a_fresh_process("long", "pass_tokens", tokens, tokens=2 * tokens)
        print(f"| {tokens} | {m['training']:.2f} | {m['peak_gb']:.2f} |", flush=True)
    figure.savefig(BENCH.parent / "docs/growth.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, field, value, how, tokens = sys.argv[2:]
        workload = changed(WORKLOADS[name], field, int(value)) if field else WORKLOADS[name]
        print(json.dumps(measure(workload, how == "shared", int(tokens))))
    else:
        main()
