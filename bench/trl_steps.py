"""
GRPO steps of TRL on a workload, measured from outside; runs in an environment of its own (requirements-trl-*.txt).

    python bench/trl_steps.py NAME FOLDER SEED [--gradient_checkpointing] [--bfloat16]        prints one line of JSON
    python bench/trl_steps.py NAME FOLDER SEED --bfloat16 --rows 8                            so many completions in a pass
"""

import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from workloads import WORKLOADS, lengths_of, share_of_even


class EndAt(LogitsProcessor):
    """Nothing but the stop token at a row's last position, never the stop token before it."""

    def __init__(self, lengths: list[int], prompt_width: int, eos: int):
        self.lengths, self.prompt_width, self.eos = torch.tensor(lengths), prompt_width, eos

    def __call__(self, input_ids, scores):
        last = self.lengths <= input_ids.shape[1] - self.prompt_width + 1
        scores[:, self.eos] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.eos] = 0.0
        return scores


class Clock(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.steps.append(time.perf_counter() - self.began)


def main(name: str, folder: Path, seed: int, checkpointing: bool, half: bool, rows: int) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    workload, clock, sampling = WORKLOADS[name], Clock(), []
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    dataset = Dataset.from_list([json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()])
    total = workload.prompts * workload.group_size
    settings = dict(
        output_dir=str(folder / "trl"), per_device_train_batch_size=rows or total, gradient_accumulation_steps=total // (rows or total),
        max_completion_length=workload.new_tokens, temperature=1.0, top_p=1.0, top_k=0, max_steps=1 + workload.measured_steps,
        learning_rate=1e-6, gradient_checkpointing=checkpointing, bf16=half, use_cpu=not torch.cuda.is_available(),
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=seed,
    )
    config = trl.GRPOConfig(num_generations=workload.group_size, beta=0.0, num_iterations=1, loss_type="dapo", **settings)
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=share_of_even, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[clock])
    generate = model.generate

    def timed_generate(*args, **kwargs):
        lengths = lengths_of(workload, len(clock.steps), seed)
        if lengths:
            width = (args[0] if args else kwargs["input_ids"]).shape[1]
            kwargs["logits_processor"] = LogitsProcessorList([EndAt(lengths, width, tokenizer.eos_token_id)])
        began = time.perf_counter()
        result = generate(*args, **kwargs)
        sampling.append(time.perf_counter() - began)
        return result

    model.generate = timed_generate
    trainer.train()
    assert len(sampling) == len(clock.steps) == 1 + workload.measured_steps, f"{len(sampling)=} {len(clock.steps)=}"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "system": f"trl {trl.__version__}", "step": clock.steps[1:], "sampling": sampling[1:],
        "peak_gb": (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak) / 1e9,
    }))


if __name__ == "__main__":
    main(
        sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), "--gradient_checkpointing" in sys.argv, "--bfloat16" in sys.argv,
        int(sys.argv[-1]) if "--rows" in sys.argv else 0,
    )
