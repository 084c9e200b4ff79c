"""Started by test_sharding with torchrun: the memory of each process while a model is loaded and sharded.

Prints for each process, in GB: its shards, and the peak of its own ("anonymous") memory above what it held before.
"""

import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from config import ModelConfig
from engine.devices import all_gather_object, best_device, num_processes, shutdown
from engine.policy import load_policy, move
from engine.recomputation import layers_of
from engine.sharding import shard
from model import byte_tokenizer


def own_memory() -> float:
    """Return the anonymous memory of this process in GB: mapped pages of files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024 / 1e9


def write_model(folder: str) -> None:
    """Write a random Qwen 3 of 0.74 GB in bfloat16, in files of at most 500 MB."""
    config = Qwen3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    byte_tokenizer().save_pretrained(folder)


def load(folder: str) -> None:
    """Load and shard, as at the start of a run, and print a line for each process."""
    device, before, peak, done = best_device(), own_memory(), [0.0], threading.Event()

    def sample():
        while not done.wait(0.005):
            peak[0] = max(peak[0], own_memory() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    model, _ = load_policy(ModelConfig(model_path=folder))
    done.set()
    thread.join()
    move(model, device)
    shard(model, layers_of(model), {"replicate": 1, "fsdp": num_processes(), "tp": 1})
    parameters = list(model.parameters())
    shards = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in parameters) / 1e9
    found = {"parameters": sum(p.numel() for p in parameters) / 1e9, "shards": shards, "loading": peak[0]}
    for rank, line in enumerate(all_gather_object(found)):
        if os.environ["RANK"] == "0":
            print(f"process {rank}:", json.dumps(line), flush=True)
    shutdown()


if __name__ == "__main__":
    {"write": write_model, "load": load}[sys.argv[1]](sys.argv[2])
