r"""
TRL on the task of examples/smollm2.json, with its settings: seconds of each step, memory, and a model to evaluate.

    .venv-trl-1.10/bin/python bench/trl_smollm2.py MINUTES OUTPUT [MODEL [SEED]]         prints one line of JSON
    .venv/bin/python infer.py --model_path OUTPUT --evaluate examples/sums_held_out.csv --prompt_column "What is {a} + {b}?" \
        --reward_functions examples/smollm2_rewards.py:last_number --generation_max_length 24 --generation_temperature 1 \
        --generation_top_k 0 --generation_top_p 1

It stops after the first step that ends later than MINUTES. MODEL is a folder or hub id, as model_path in that file.
bench/against_trl.py makes the environment of TRL.
"""

import csv
import json
import re
import resource
import sys
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

EXAMPLES = Path(__file__).parents[1] / "examples"


def last_number(completions, answer, **columns):
    """Score as examples/smollm2_rewards.py does, for completions that are lists of messages."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(found[-1:] == [str(truth)]) for found, truth in zip(numbers, answer, strict=True)]


class Clock(TrainerCallback):
    """Record the seconds of each step, and stop when they are used up."""

    def __init__(self, seconds):
        self.steps, self.seconds = [], seconds

    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.steps.append(time.perf_counter() - self.began)
        control.should_training_stop = sum(self.steps) > self.seconds


def main(minutes: float, output: str, model_path: str, seed: int) -> None:
    settings, clock = json.loads((EXAMPLES / "smollm2.json").read_text()), Clock(60 * minutes)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    with open(EXAMPLES / "sums.csv") as file:
        rows = [
            {"prompt": [{"role": "user", "content": settings["prompt_column"].format(**row)}], "answer": row["answer"]}
            for row in csv.DictReader(file)
        ]
    config = trl.GRPOConfig(
        output_dir=output, per_device_train_batch_size=settings["batch_size"] * settings["num_completions_per_prompt"],
        num_generations=settings["num_completions_per_prompt"], max_completion_length=settings["generation_max_length"],
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, max_steps=1000, learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant_with_warmup", warmup_steps=4, adam_beta2=0.95,
        gradient_checkpointing=False, bf16=False, use_cpu=not torch.cuda.is_available(),
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, seed=seed,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32), reward_funcs=last_number, args=config,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[clock],
    )
    trainer.train()
    trainer.save_model(output)
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "system": f"trl {trl.__version__}", "step": clock.steps, "peak_gb": peak / 1e9,
        "reward": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    }))


if __name__ == "__main__":
    model = sys.argv[3] if len(sys.argv) > 3 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    main(float(sys.argv[1]), sys.argv[2], model, seed=int(sys.argv[4]) if len(sys.argv) > 4 else 0)
