"""
Sharing a prompt against plain rows, in training and in sampling, over prompt lengths, completion lengths and group sizes.

    python bench/grid.py                              prints a table of ratios, above 1 where sharing is faster
    python bench/grid.py --against FOLDER             beside plain rows also what another checkout of this project does

A Gemma 3 of two layers, one thread. Each system is a process of its own that stays; they take turns on every point of the
grid, and a ratio is a median over the turns with its range.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

BENCH = Path(__file__).parent
SYSTEMS = ("shared", "rows", "other")


def worker(root: str, shared: bool) -> None:
    """Answer each line {prompt, new, group, prompts} with {training, sampling} in seconds, using the code in a folder."""
    sys.path.insert(0, root)
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.set_num_threads(1)
    import sample
    from config import GRPOConfig
    from model import byte_tokenizer

    def find(name: str, *modules: str):                   # older versions have other files
        for module in modules:
            try:
                return getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                continue

    keep_freed_memory = find("keep_freed_memory", "engine.devices", "devices")
    keep_freed_memory()
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64, query_pre_attn_scalar=64, sliding_window=512, max_position_embeddings=4096,
        layer_types=["sliding_attention", "full_attention"], eos_token_id=None, pad_token_id=0, bos_token_id=2,
    )).eval()
    model.generation_config.eos_token_id = None
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    if make_engine := find("make_engine", "engine"):
        engine = make_engine("shared" if shared else "plain", model, tokenizer, max_tokens=2048)
        draw, split, score = engine.sample, engine.micro_batches, partial(engine.log_probs, policy={})
    else:
        draw = partial(sample.sample_completions_for_prompts, model, tokenizer, shared_prompt=shared)
        split = partial(find("micro_batches", "engine.packing", "packing"), max_tokens=2048, shared_prompt=shared)
        score = partial(find("completion_log_probs", "logprobs"), model, shared_prompt=shared)
    for line in sys.stdin:
        w = json.loads(line)
        rows = w["prompts"] * w["group"]
        prompts = torch.randint(3, 4096, (w["prompts"], w["prompt"]), generator=torch.Generator().manual_seed(1))
        config = GRPOConfig(
            num_completions_per_prompt=w["group"], generation_max_length=w["new"], generation_temperature=1.0,
            generation_top_k=0, generation_top_p=1.0,
        )
        began = time.perf_counter()
        rollout = draw(prompts.tolist(), config, seed=0)
        sampled = time.perf_counter()
        assert rollout.completion_mask.all() and isinstance(rollout, sample.Rollout)
        for batch in split(rollout, torch.arange(rows)):
            score(rollout, batch).logp.sum().backward()
        trained = time.perf_counter()
        model.zero_grad()
        print(json.dumps({"sampling": sampled - began, "training": trained - sampled}), flush=True)


class System:
    """A worker process."""

    def __init__(self, name: str, root: str):
        command = [sys.executable, __file__, "--worker", root, "rows" if name == "rows" else "shared"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def measure(self, point: dict) -> dict:
        print(json.dumps(point), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description="Sharing a prompt against plain rows.", allow_abbrev=False)
    parser.add_argument("--against", help="a folder with another version of this project")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--new", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--group", type=int, nargs="+", default=[4, 16])
    args = parser.parse_args()
    roots = {"shared": str(BENCH.parent), "rows": str(BENCH.parent)} | ({"other": args.against} if args.against else {})
    systems = {name: System(name, root) for name, root in roots.items()}
    columns = [f"{kind}, {name} / shared" for kind in ("training", "sampling") for name in systems if name != "shared"]
    print("| prompt x new x G x prompts | training s | sampling s | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 3) + "|")
    for prompt in args.prompt:
        for new in args.new:
            for group in args.group:
                # Enough prompts for a pass of some 2000 tokens, and no more than a slow machine can do.
                point = dict(prompt=prompt, new=new, group=group, prompts=max(1, 2048 // (prompt + group * new)))
                found = {name: [] for name in systems}
                for turn in range(args.turns + 1):
                    for name in list(systems)[:: 1 if turn % 2 else -1]:
                        measured = systems[name].measure(point)
                        found[name] += [measured] if turn else []                # the first warms up
                cells = []
                for kind in "training", "sampling":
                    for name in systems:
                        if name != "shared":
                            ratios = sorted(a[kind] / b[kind] for a, b in zip(found[name], found["shared"], strict=True))
                            cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")
                seconds = [statistics.median(m[kind] for m in found["shared"]) for kind in ("training", "sampling")]
                shape = f"{prompt} x {new} x {group} x {point['prompts']}"
                print(f"| {shape} | {seconds[0]:.3f} | {seconds[1]:.3f} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3] == "shared")
    else:
        main()
