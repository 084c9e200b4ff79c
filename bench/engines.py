"""
The built-in sampler and vLLM on a CPU: do they agree with the trainer, how fast are they, what do they take?

    make .venv-vllm/ready
    OMP_NUM_THREADS=2 .venv-vllm/bin/python bench/engines.py [agreement] [speed] [demo]

agreement  three architectures, weights and adapters, before and after ten updates: a table of differences
speed      128 prompts of 16 tokens x 8 completions of 256, each sampler in a process of its own: tokens a second, memory, and
           the time in which weights go over to vLLM
demo       the demonstration with three seeds: GRPO with either sampler, resumed from the same cold start

A CPU says nothing about a GPU: vLLM is made for the latter.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs.folder import read_jsonl  # noqa: E402

PROMPTS, PROMPT_TOKENS, GROUP_SIZE, NEW_TOKENS = 128, 16, 8, 256


def print_agreement() -> None:
    """Print a row for each model: how far engine and trainer are apart, and how far with weights that were not sent."""
    import test_vllm as t

    from engine.precision import with_precision

    tokenizer = t.byte_tokenizer()
    print("| model | precision | trained | mean ratio before, after | largest difference before, after (nat) | without sending |")
    print("|---|---|---|---|---|---|")
    for name, build in t.ARCHITECTURES.items():
        for precision, trained in ("float32", "weights"), ("float32", "adapter"), ("bfloat16", "weights"), ("bfloat16", "adapter"):
            torch.manual_seed(0)
            model = build().eval()
            if trained == "adapter":
                t.add_adapter(model, t.ModelConfig(lora_rank=4), False)
            with_precision(model, precision)
            engine, found = t.engine_of(model, tokenizer), []
            for _ in range(2):
                rollout, config = t.sample(engine)
                found.append(t.compare(engine, rollout, config))
                t.update(model, 10)
            stale = t.compare(engine, rollout, config)
            ratios = ", ".join(f"{x['engine_ratio']:.6f}" for x in found)
            differences = ", ".join(f"{x['engine_deviation']:.1e}" for x in found)
            print(f"| {name} | {precision} | {trained} | {ratios} | {differences} | {stale['engine_deviation']:.2f} |", flush=True)


def print_speed() -> None:
    """Print a row for each model and sampler."""
    print("| model | sampler | tokens a second | peak GB of the process | weights over, s |")
    print("|---|---|---|---|---|")
    for size in "small", "medium":
        for sampler in "auto", "vllm":
            command = [sys.executable, __file__, "--measure", size, sampler]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            row = json.loads(done.stdout.splitlines()[-1])
            print(f"| {row['parameters']:.1f}M | {sampler} | {row['speed']:.0f} | {row['peak']:.2f} | {row['transfer']} |", flush=True)


def measure(size: str, sampler: str) -> None:
    """Print the figures of one sampler as JSON, from the second of two rollouts."""
    from workloads import MEDIUM, SMALL

    from config import GRPOConfig
    from engine import make_engine
    from engine.devices import peak_memory_gb
    from model import byte_tokenizer
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    tokenizer, sizes = byte_tokenizer(), {"small": SMALL, "medium": MEDIUM}[size]
    config = Gemma3TextConfig(**sizes, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model = Gemma3ForCausalLM(config).eval()
    prompts = torch.randint(3, 260, (PROMPTS, PROMPT_TOKENS)).tolist()
    settings = GRPOConfig(
        num_completions_per_prompt=GROUP_SIZE, generation_max_length=NEW_TOKENS, generation_temperature=1.0,
        generation_top_p=1.0, generation_top_k=0)
    tokenizer.eos_token = model.generation_config.eos_token_id = None            # every completion has 256 tokens
    name, transfer = "shared" if sampler == "auto" else sampler, "-"
    engine = make_engine(name, model, tokenizer, max_length=PROMPT_TOKENS + NEW_TOKENS, memory=0.5)
    for seed in range(2):
        with engine.sampling():
            started = time.perf_counter()
            rollout = engine.sample(prompts, settings, seed=seed)
            seconds = time.perf_counter() - started
    if sampler == "vllm":
        started = time.perf_counter()
        engine.send_weights()
        transfer = f"{time.perf_counter() - started:.3f}"
    print(json.dumps({
        "parameters": sum(p.numel() for p in model.parameters()) / 1e6, "transfer": transfer,
        "speed": int(rollout.completion_mask.sum()) / seconds, "peak": peak_memory_gb(torch.device("cpu")),
    }))


def print_demo() -> None:
    """Print held-out accuracy with each sampler, from the checkpoint at the end of one cold start for both."""
    print("| seed | after the cold start | auto | vllm | auto, s | vllm, s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            start = Path(folder) / f"start-{seed}"
            flags = ["--seed", str(seed), "--eval_steps", "20", "--report_to", "none"]
            begin = ["train.py", "--use_grpo", *flags, "--eval_steps", "15", "--save_steps", "0", "--output_dir", str(start)]
            cold_start = subprocess.Popen([sys.executable, *begin], cwd=ROOT, stdout=subprocess.DEVNULL)
            while not (saved := sorted((start / "checkpoints").glob("step-*"))):
                time.sleep(0.2)
            cold_start.terminate()
            cold_start.wait()
            for newer in sorted((start / "checkpoints").glob("step-*")):
                if newer != saved[0]:
                    shutil.rmtree(newer)
            running = {}
            for engine in "auto", "vllm":
                run = Path(folder) / f"{engine}-{seed}"
                shutil.copytree(start, run)
                resume = ["train.py", "--output_dir", str(run), "--resume", "--engine", engine, *flags]
                running[engine] = subprocess.Popen([sys.executable, *resume], cwd=ROOT, stdout=subprocess.DEVNULL)
            metrics = {name: process.wait() or read_jsonl(Path(folder) / f"{name}-{seed}/metrics.jsonl")
                       for name, process in running.items()}
            evaluations = {name: [m for m in lines if m["phase"] == "eval"] for name, lines in metrics.items()}
            before = [m for m in evaluations["vllm"] if m["step"] == int(saved[0].name[5:])][-1]
            seconds = {name: sum(m.get("step_seconds", 0) for m in lines if m["phase"] == "grpo") for name, lines in metrics.items()}
            cells = [accuracy(before), *(accuracy(found[-1]) for found in evaluations.values())]
            print(f"| {seed} | {' | '.join(cells)} | {' | '.join(f'{s:.0f}' for s in seconds.values())} |", flush=True)


def accuracy(found: dict) -> str:
    """Return an accuracy with its interval."""
    return f"{found['eval_accuracy']:.3f} [{found['eval_accuracy_low']:.3f}, {found['eval_accuracy_high']:.3f}]"


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(*sys.argv[2:])
    else:
        chosen = sys.argv[1:] or ["agreement", "speed"]
        for part in chosen:
            {"agreement": print_agreement, "speed": print_speed, "demo": print_demo}[part]()
