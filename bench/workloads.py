"""
The workloads that are measured, as files: a model with random weights, a tokenizer, prompts.

    python bench/workloads.py NAME FOLDER          writes one

Seven are for CPUs, and one of each QWEN3 is for a GPU (gpu.py). Needs torch and transformers alone, so that it runs in every
environment.

What a completion says does not matter for time and memory; how long it is does. Where a workload gives lengths, every
system has to end a completion at exactly its length, otherwise at the limit or a stop token, whichever is first.
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast, Qwen3Config

SMALL = dict(                                             # a million parameters: the built-in tiny Gemma
    vocab_size=263, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=64,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
MEDIUM = dict(                                            # 14 million, 8.4 of them the embedding
    vocab_size=32768, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=1, head_dim=64, query_pre_attn_scalar=64, sliding_window=512,
)
QWEN3 = {                                                 # hidden size, columns of the MLP, layers, heads
    "tiny": (64, 128, 2, 4), "0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32),
}


def qwen3(hidden: int, columns: int, layers: int, heads: int) -> dict:
    """Qwen 3, with fewer words and narrower heads if it is tiny."""
    tiny = hidden < 1024
    return dict(
        vocab_size=263 if tiny else 151936, hidden_size=hidden, intermediate_size=columns, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2 if tiny else 8, head_dim=16 if tiny else 128,
    )


@dataclass(frozen=True)
class Workload:
    """P prompts of so many tokens, G completions of each of up to so many new ones."""

    model: dict
    prompts: int
    prompt_tokens: int
    group_size: int
    new_tokens: int
    measured_steps: int
    mean_length: int = 0                                  # of geometric lengths; 0: as the model happens to end
    architecture: type = Gemma3TextConfig
    dtype: torch.dtype = torch.float32                    # of the file


WORKLOADS = {
    "short": Workload(SMALL, prompts=32, prompt_tokens=10, group_size=4, new_tokens=64, measured_steps=5),
    "long": Workload(MEDIUM, prompts=2, prompt_tokens=512, group_size=8, new_tokens=64, measured_steps=2),
    "wide": Workload(MEDIUM, prompts=1, prompt_tokens=1024, group_size=16, new_tokens=64, measured_steps=2),
    "vocab": Workload(MEDIUM | {"vocab_size": 262144}, prompts=1, prompt_tokens=512, group_size=8, new_tokens=64,
                      measured_steps=2),
    "reasoning": Workload(MEDIUM, prompts=2, prompt_tokens=128, group_size=8, new_tokens=384, measured_steps=1),
    "gsm8k": Workload(MEDIUM, prompts=4, prompt_tokens=128, group_size=8, new_tokens=192, measured_steps=1),
    "ragged": Workload(MEDIUM, prompts=2, prompt_tokens=512, group_size=8, new_tokens=512, measured_steps=1, mean_length=64),
} | {
    f"qwen3-{name}": Workload(
        qwen3(*sizes), prompts=2 if name == "tiny" else 8, prompt_tokens=16 if name == "tiny" else 512,
        group_size=4 if name == "tiny" else 8, new_tokens=8 if name == "tiny" else 256, measured_steps=2,
        architecture=Qwen3Config, dtype=torch.bfloat16)
    for name, sizes in QWEN3.items()
}


def lengths_of(workload: Workload, step: int, seed: int) -> list[int] | None:
    """Return how long each completion of a step has to be, or None where nothing is prescribed."""
    if not workload.mean_length:
        return None
    drawn = np.random.default_rng([seed, step]).geometric(1 / workload.mean_length, workload.prompts * workload.group_size)
    return np.minimum(drawn, workload.new_tokens).tolist()


def share_of_even(completions, completion_ids, **columns):
    """A reward that every completion gets a different value of: no group is tied, so every group is trained on."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) + len(set(ids)) / 1000 for ids in completion_ids]


def workload_config(workload: Workload):
    """Configuration of the model, for transformers."""
    return workload.architecture(
        **workload.model, max_position_embeddings=4096, pad_token_id=0, eos_token_id=1, bos_token_id=2, tie_word_embeddings=True
    )


def write_workload(workload: Workload, folder: Path) -> None:
    """model/ (weights and tokenizer) and prompts.jsonl."""
    torch.manual_seed(0)
    size = workload.model["vocab_size"]
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {f"w{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )
    config = workload_config(workload)
    with torch.device("cuda" if workload.architecture is Qwen3Config and torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=workload.dtype).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    draws = np.random.default_rng(0)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(8 * workload.prompts):
            count = workload.prompt_tokens + (int(draws.integers(-2, 3)) if workload.prompt_tokens < 100 else 0)
            file.write(json.dumps({"prompt": " ".join(f"w{i}" for i in draws.integers(3, size, count))}) + "\n")


def run_steps(python, program: str, workload: str, folder: Path, seed: int, *flags) -> dict:
    """Run our_steps.py or trl_steps.py on the CPU, in a process of its own.

    returns  medians in seconds of the steps after the first: "step", "sampling", "training"; and "peak_gb"
    """
    command = [python, Path(__file__).with_name(program), workload, folder, seed, *flags]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{program} on {workload} failed:\n{done.stderr[-2000:]}")
    result = json.loads(done.stdout.strip().splitlines()[-1])
    step, sampling = (statistics.median(result[part]) for part in ("step", "sampling"))
    return {"step": step, "sampling": sampling, "training": step - sampling, "peak_gb": result["peak_gb"]}


if __name__ == "__main__":
    write_workload(WORKLOADS[sys.argv[1]], Path(sys.argv[2]))
