"""
Ask a model, or measure it.

    python infer.py --model_path outputs/demo/final --question "47+85=?"
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --limit 256
"""

import argparse
import math
import sys

from check import can_share_prompts
from config import GRPOConfig
from data import load_examples, with_instruction
from devices import best_device, keep_freed_memory
from model import load_policy, move
from rewards import FORM, compute_rewards_for_completions, correctness
from runs import accuracy_text
from sample import sample_completions_for_prompts


def evaluate(
    model, tokenizer, examples: list[dict], config, *, seed: int, reward_functions=(correctness,), on_error: str = "raise",
    batch_size: int = 64, shared_prompt: bool = True,
) -> dict:
    """One sampled completion for each problem, scored.

    config   and shared_prompt as for sample_completions_for_prompts; on_error as for compute_rewards_for_completions;
             batch_size: completions sampled at once, the others wait until half of these are done
    returns  eval_accuracy (share correct) with eval_accuracy_low, eval_accuracy_high (95 %, Wilson), eval_problems,
             eval_reward/<function> (mean points) and eval_truncated (share). No accuracy where no answer is known.
    """
    functions = list(dict.fromkeys([correctness, *reward_functions]))
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(
        model, tokenizer, prompts, config, seed=seed, num_completions=1, shared_prompt=shared_prompt, at_once=batch_size
    )
    truncated = int((~rollout.finished).sum())
    asked = [{"answer": None} | example for example in examples]
    _, scored = compute_rewards_for_completions(functions, [1.0] * len(functions), rollout, asked, on_error=on_error)
    columns = {name: values[:, 0] for name, values in scored.items()}
    correct = columns["correctness"][~columns["correctness"].isnan()]
    result = {f"eval_reward/{name}": float(values.nanmean()) for name, values in columns.items()}
    result |= {"eval_problems": len(correct) or len(examples), "eval_truncated": truncated / len(examples)}
    if len(correct):
        low, high = wilson_interval(float(correct.sum()), len(correct))
        result |= {"eval_accuracy": float(correct.mean()), "eval_accuracy_low": low, "eval_accuracy_high": high}
    return result


def wilson_interval(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share. E. B. Wilson, JASA 22 (1927): unlike the textbook's, it is right near 0 and 1."""
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def main(argv: list[str]) -> None:
    """The command line."""
    defaults = GRPOConfig()
    parser = argparse.ArgumentParser(description="Ask a model, or measure it.", allow_abbrev=False)
    parser.add_argument("--model_path", default="", help="folder or hub id, such as RUN/final")
    parser.add_argument("--question", help="print the model's answer to this")
    parser.add_argument("--evaluate", metavar="DATASET", help="print its accuracy on this: arithmetic, a file, or a hub id")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=256, help="problems to evaluate (default %(default)s)")
    parser.add_argument("--instruction", default="", help="text put before every prompt, as in training")
    parser.add_argument("--generation_max_length", type=int, default=defaults.generation_max_length, help="new tokens")
    parser.add_argument("--generation_temperature", type=float, default=1.0, help="0 takes the likeliest token")
    parser.add_argument("--generation_top_p", type=float, default=1.0)
    parser.add_argument("--generation_top_k", type=int, default=0)
    parser.add_argument("--attn_implementation", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if bool(args.question) == bool(args.evaluate):
        raise ValueError("give --question \"...\" or --evaluate DATASET, one of them")
    if args.limit < 1:
        raise ValueError(f"--limit={args.limit}: at least one problem has to be asked")
    config = GRPOConfig(
        generation_max_length=args.generation_max_length, generation_temperature=args.generation_temperature,
        generation_top_p=args.generation_top_p, generation_top_k=args.generation_top_k,
    )
    examples = load_examples(args.evaluate, args.split, limit=args.limit) if args.evaluate else [{"prompt": args.question}]
    examples = [with_instruction(example, args.instruction) for example in examples]
    keep_freed_memory()
    model, tokenizer = load_policy(args)
    move(model, best_device())
    shared_prompt = can_share_prompts(model, tokenizer, examples[0]["prompt"])
    if args.evaluate:
        result = evaluate(model, tokenizer, examples, config, seed=args.seed, shared_prompt=shared_prompt)
        print("accuracy " + accuracy_text(result))
        return
    prompts = [example["prompt"] for example in examples]
    rollout = sample_completions_for_prompts(
        model, tokenizer, prompts, config, seed=args.seed, num_completions=1, shared_prompt=shared_prompt
    )
    text = rollout.completions[0]
    form = FORM.search(text)
    print(f"reasoning: {form[1].strip()}\nanswer: {form[2].strip()}" if form else text)
    if not rollout.finished[0]:
        print(f"(cut off at --generation_max_length={args.generation_max_length})")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"infer.py: error: {error}", file=sys.stderr)
        sys.exit(2)
