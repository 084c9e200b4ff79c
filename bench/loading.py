"""
Memory of each process while a model is loaded and sharded.

    python bench/loading.py                              2 processes, bfloat16 files of 0.95 billion parameters
    python bench/loading.py --dtype float32 --layers 4 --processes 3

Writes a Qwen3 with random weights as safetensors of at most 500 MB to a temporary folder, starts the processes with
torchrun on the CPU, and prints for each, in GB: its shards; the peak of its own ("anonymous") memory, sampled every
5 ms, above what it held before, while loading, and while sharding with the first forward pass; and VmHWM, the
kernel's peak, which counts Python, and the mapped pages of the files although they belong to the file cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from config import ModelConfig
from engine.devices import all_gather_object, best_device, num_processes, shutdown
from engine.recomputation import layers_of
from engine.sharding import shard
from engine.policy import load_policy, move
from model import byte_tokenizer


def kilobytes(name: str) -> int:
    """Read a number of /proc/self/status: RssAnon, RssFile, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def write_model(folder: str, dtype: str, layers: int) -> None:
    config = Qwen3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    byte_tokenizer().save_pretrained(folder)


def load(folder: str) -> None:
    """Load and shard, as at the start of a run, and print a line for each process."""
    device, before, peaks, done = best_device(), kilobytes("RssAnon"), [0, 0], threading.Event()
    model = None

    def sample():
        while not done.wait(0.005):
            stage = model is not None
            peaks[stage] = max(peaks[stage], kilobytes("RssAnon") - before)

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    model, _ = load_policy(ModelConfig(model_path=folder))
    move(model, device)
    shard(model, layers_of(model), {"replicate": 1, "fsdp": num_processes(), "tp": 1})
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    found = {
        "parameters": sum(p.numel() for p in model.parameters()) / 1e9, "seconds": seconds,
        "shards": sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in model.parameters()) / 1e9, "loading": peaks[0] * 1024 / 1e9,
        "first pass": peaks[1] * 1024 / 1e9, "VmHWM": kilobytes("VmHWM") * 1024 / 1e9,
    }
    for rank, line in enumerate(all_gather_object(found)):
        if os.environ.get("RANK", "0") == "0":
            print(f"process {rank}:", json.dumps({name: round(value, 2) for name, value in line.items()}), flush=True)
    shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the files")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--load", metavar="FOLDER", help="used by the script itself: load in this process")
    args = parser.parse_args()
    if args.load:
        return load(args.load)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.dtype, args.layers)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.processes)]
        command = [sys.executable, *launcher * (args.processes > 1), __file__, "--load", folder]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
