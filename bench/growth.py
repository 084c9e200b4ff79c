"""
Seconds and memory of a step, with shared prompts and with plain rows, over the sizes of a workload.

    python bench/growth.py                                          one size of `long` after the other; draws docs/growth.png
    python bench/growth.py --grid long prompt_tokens=16,1024 group_size=4,16 new_tokens=16,128          every combination
    python bench/growth.py --grid short --busy --turns 5            beside a process that multiplies matrices all the time

Each point is a process of its own (our_steps.py); engines alternate, and a ratio is a median over the turns with its range. The
operations that a step has to do are counted, and compared with the rate of a large matrix product: every token of prompts and
completions once through the layers, completion tokens through the head, every visible pair through attention, forward and
backward. So are the bytes that decoding has to read: all weights once for each token of the batch, and the keys and values of
what is visible.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from workloads import Workload, find_workload, run_steps, workload_config

BENCH = Path(__file__).parent
GROWTH = {
    "prompt tokens": ("long", "prompt_tokens", [128, 512, 2048]),
    "completions of a prompt, G": ("long", "group_size", [4, 8, 16]),
    "completion tokens, prompts of 128": ("long:prompt_tokens=128", "new_tokens", [64, 128, 256, 512, 1024]),
    "vocabulary": ("long", "vocab_size", [8192, 32768, 262144]),
}
PARTS = "step", "sampling", "training"
HEAD = f"| workload | {' s | '.join(PARTS)} s | peak GB | of the matrix rate | of the memory rate |"


def operations_and_bytes(w: Workload, bytes_of_a_number: int) -> tuple[float, float]:
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
    return 3 * a_prompt * w.prompts, bytes_of_a_number * read


def machine_rates(dtype=torch.float32, size: int = 4096, length: int = 2**27, device: str = "cpu") -> tuple[float, float]:
    """Measure operations a second in a product of square matrices, and bytes read and written a second in a copy."""
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    source = torch.ones(length, dtype=dtype, device=device)
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


@contextmanager
def busy_process(wanted: bool):
    """Keep another process multiplying matrices meanwhile."""
    program = "import torch\nx = torch.randn(1024, 1024)\nwhile True: x @ x"
    process = subprocess.Popen([sys.executable, "-c", program]) if wanted else None
    try:
        yield
    finally:
        if process:
            process.kill()


def measure(name: str, engines: list[str], turns: int) -> dict[str, list[dict]]:
    """Measure a workload with each engine in turn."""
    found = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: some systems count a parent's peak of memory as their own.
        subprocess.run([sys.executable, BENCH / "workloads.py", name, folder], check=True)
        for turn in range(turns):
            for engine in engines[:: -1 if turn % 2 else 1]:
                found[engine].append(run_steps(sys.executable, "our_steps.py", name, Path(folder), turn, "--engine", engine))
    return found


def print_row(name: str, found: dict[str, list[dict]], rates: tuple[float, float]) -> None:
    """Print medians of the first engine, and the ratios of the others to it."""
    (first, runs), *others = found.items()
    median = {part: statistics.median(run[part] for run in runs) for part in (*PARTS, "peak_gb")}
    operations, read = operations_and_bytes(find_workload(name), bytes_of_a_number=4)
    shares = operations / median["training"] / rates[0], read / median["sampling"] / rates[1]
    cells = [f"{median[part]:.2f}" for part in (*PARTS, "peak_gb")] + [f"{share:.0%}" for share in shares]
    for _, slower in others:
        for part in (*PARTS, "peak_gb"):
            ratios = sorted(a[part] / b[part] for a, b in zip(slower, runs, strict=True))
            cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
    print(f"| {name}, {first} | {' | '.join(cells)} |", flush=True)


def draw(points: dict[str, list[dict[str, list[dict]]]]) -> None:
    """Draw docs/growth.png: a column for each size that was varied, seconds above, memory below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(2, len(GROWTH), sharey="row")
    for (title, found), (times, memory) in zip(points.items(), panels.T, strict=True):
        values = GROWTH[title][2]
        for engine, line in ("shared", "o-"), ("plain", "o:"):
            for part, colour in ("sampling", "tab:blue"), ("training", "tab:orange"):
                seconds = [statistics.median(run[part] for run in point[engine]) for point in found]
                times.plot(values, seconds, line, color=colour, label=f"{part}, {engine}")
        memory.plot(values, [max(run["peak_gb"] for run in point["shared"]) for point in found], "o-", color="black")
        memory.set(xlabel=title)
        for panel in times, memory:
            panel.set(xscale="log", yscale="log" if panel is times else "linear")
            panel.set_xticks(values, [str(value) if value < 8192 else f"{value // 1024}K" for value in values], minor=False)
            panel.minorticks_off()
    panels[0, 0].set(ylabel="seconds")
    panels[0, 0].legend(fontsize=7)
    panels[1, 0].set(ylabel="peak memory, GB", ylim=(0, None))
    figure.savefig(BENCH.parent / "docs/growth.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds and memory of a step.", allow_abbrev=False)
    parser.add_argument("--grid", nargs="+", metavar="WORKLOAD", help="a workload, then sizes, as field=value,value")
    parser.add_argument("--engines", nargs="+", default=["shared", "plain"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="beside a busy process")
    args = parser.parse_args()
    rates = machine_rates()
    print(f"this machine: {rates[0] / 1e9:.0f} GFLOP/s in a matrix product, {rates[1] / 1e9:.1f} GB/s in a copy\n")
    ratios = [f"{part}, {engine} / {args.engines[0]}" for engine in args.engines[1:] for part in (*PARTS, "memory")]
    print(" | ".join([HEAD[:-2], *ratios]) + " |", "|---" * (7 + len(ratios)) + "|", sep="\n", flush=True)

    def measure_and_print(name: str) -> dict[str, list[dict]]:
        found = measure(name, args.engines, args.turns)
        print_row(name, found, rates)
        return found

    with busy_process(args.busy):
        if args.grid:
            workload, *sizes = args.grid
            fields = [[f"{field}={value}" for value in values.split(",")]
                      for field, _, values in (size.partition("=") for size in sizes)]
            for changes in itertools.product(*fields):
                measure_and_print(",".join([f"{workload}:{changes[0]}", *changes[1:]]) if changes else workload)
        else:
            draw({title: [measure_and_print(f"{name}{',' if ':' in name else ':'}{field}={value}") for value in values]
                  for title, (name, field, values) in GROWTH.items()})


if __name__ == "__main__":
    main()
