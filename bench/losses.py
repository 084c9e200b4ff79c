"""
Every loss on a small task, three seeds each: does held-out accuracy rise beyond its interval? And does the KL term hold
the policy near the reference?

    python bench/losses.py --seeds 0 1 2

The task is the demonstration's, smaller: sums of two numbers made of the digits 0 to 4, answered without reasoning, 497 to
train on and 128 others. A supervised cold start, one for each seed, then GRPO with every loss from the same weights.
"""

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from config import GRPOConfig  # noqa: E402
from data import load_examples  # noqa: E402
from engine import make_engine  # noqa: E402
from grpo import LOSSES  # noqa: E402
from engine.policy import load_policy  # noqa: E402
from runs.folder import read_jsonl  # noqa: E402

COLD = "--max_steps 100 --batch_size 32 --num_epochs 100 --learning_rate 1e-3"
GRPO = (
    "--use_grpo --max_steps 100 --num_epochs 100 --batch_size 32 --num_completions_per_prompt 4 --learning_rate 4e-4 "
    "--generation_max_length 8 --generation_temperature 1 --generation_top_p 1 --generation_top_k 0 "
    "--reward_functions correctness"
)
# Points and advantages small enough that a coefficient of 0.01 has something to say.
WEAK_REWARD = "--normalize_advantages false --reward_weights 0.1"
COMMON = "--eval_limit 128 --eval_steps 0 --save_steps 0 --report_to none"


def write_task(folder: Path) -> None:
    """train.jsonl and test.jsonl."""
    examples = load_examples("arithmetic", "train") + load_examples("arithmetic", "test")
    examples = sorted((e for e in examples if set(e["prompt"]) <= set("01234+=?")), key=lambda e: e["prompt"])
    random.Random(0).shuffle(examples)
    for example in examples:
        example["completion"] = f"<answer>{example['answer']}</answer>"
    for name, part in ("test", examples[:128]), ("train", examples[128:]):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(example) + "\n" for example in part))


def run(folder: Path, name: str, flags: str) -> list[dict]:
    """Train as the command line would, once; returns the evaluations before and after."""
    output = folder / name
    if not output.exists():
        data = f"--dataset {folder}/train.jsonl --eval_dataset {folder}/test.jsonl --output_dir {output}"
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(f"{flags} {COMMON} {data}".split())
    return [line for line in read_jsonl(output / "metrics.jsonl") if line["phase"] == "eval"]


def learn(folder: Path, seed: int, name: str, flags: str = "") -> tuple[dict, dict]:
    """GRPO from the seed's cold start: the evaluations before it and after it."""
    run(folder, f"cold-{seed}", f"{COLD} --seed {seed}")
    before, after = run(folder, f"{name}-{seed}", f"--model_path {folder}/cold-{seed}/final {GRPO} --seed {seed} {flags}")
    return before, after


@torch.no_grad()
def distance(folder: Path, seed: int, name: str) -> float:
    """Exact KL(policy || cold start) in nats per token, over completions of the held-out prompts by the policy."""
    (policy, tokenizer), (reference, _) = (
        load_policy(train.ModelConfig(model_path=f"{folder}/{which}-{seed}/final")) for which in (name, "cold")
    )
    prompts = [example["prompt"] for example in load_examples(str(folder / "test.jsonl"))]
    config = GRPOConfig(generation_max_length=8, generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
    engine = make_engine("shared", policy, tokenizer)
    rollout = engine.sample(prompts, config, seed=0)
    kl = engine.log_probs(rollout, None, {}, reference=reference).kl
    return float(kl.sum() / rollout.completion_mask.sum())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        print("| loss | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " |")
        print("|---|" + "---|" * len(args.seeds))
        for loss_type in LOSSES:
            cells = []
            for seed in args.seeds:
                before, after = learn(folder, seed, loss_type, f"--use_kl_penalty false --loss_type {loss_type}")
                interval = f"[{after['eval_accuracy_low']:.2f}, {after['eval_accuracy_high']:.2f}]"
                cells.append(f"{before['eval_accuracy']:.3f} → {after['eval_accuracy']:.3f} {interval}")
            print(f"| {loss_type} | " + " | ".join(cells) + " |", flush=True)
        print("\n| KL coefficient | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " |")
        print("|---|" + "---|" * len(args.seeds))
        for coefficient in "0", "0.01":
            cells = []
            for seed in args.seeds:
                flags = f"{WEAK_REWARD} --max_steps 150 --kl_penalty_coef {coefficient}"
                _, after = learn(folder, seed, f"kl{coefficient}", flags)
                kl = distance(folder, seed, f"kl{coefficient}")
                cells.append(f"{kl:.3f} nat/token, accuracy {after['eval_accuracy']:.3f}")
            print(f"| {coefficient} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
