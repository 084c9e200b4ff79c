"""
Sample from a model, evaluate it, or write the report of a run. The flags are in analysis/infer_flags.py.

    python infer.py --model_path outputs/demo/final --question "47+85=?"
    python infer.py --model_path outputs/demo/final --chat --environment calculator --max_turns 4
    python infer.py --model_path outputs/demo/final --questions problems.jsonl --answers out.jsonl --samples 4
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --limit 256
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --against_model outputs/sft/final
    python infer.py --model_path outputs/lora/final --merge_into merged
    python infer.py --report outputs/demo --against outputs/other
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from analysis.infer_flags import parse_arguments, sampling_config
from config import GRPOConfig, ModelConfig
from runs.command_line import exit_on_mistake

if __name__ == "__main__":
    with exit_on_mistake("infer.py"):                     # --help and mistakes: before the slow imports below
        parse_arguments(sys.argv[1:])

from analysis.chat import ChatModel, chat, write_answers
from analysis.evaluation import compare, evaluate, majority_vote, sample_and_score, summarise  # noqa: F401
from analysis.report import write_report
from data import load_examples, with_instruction
from engine.devices import best_device, keep_freed_memory
from environments.loading import load_environment, refuse_missing_columns
from model import has_adapter, load_policy, merged_copy, move, save_policy
from runs.startup_check import can_share_prompts


def measure(
    source: ModelConfig, examples: list[dict], config: GRPOConfig, *, seed: int, samples: int,
    environment=None,
) -> dict:
    """Evaluate a model on problems with known answers.

    returns  model_path, truncated (share of completions), estimates (see evaluation.summarise) and problems:
             the prompt, answer, correctness of each sample ("right") and majority vote of each. --json
             writes the same
    """
    model, tokenizer = load_policy(source)
    tokenizer.tools = getattr(environment, "tools", None)
    move(model, best_device())
    texts, points, num_truncated = sample_and_score(
        model, tokenizer, examples, config, seed=seed, num_completions=samples,
        shared_prompt=can_share_prompts(model, tokenizer, examples[0]["prompt"]), environment=environment,
    )
    correct = points["correctness"].bool().tolist()                              # (P, n)
    problems = []
    for i, (example, right) in enumerate(zip(examples, correct, strict=True)):
        vote = majority_vote(texts[i * samples : (i + 1) * samples], example["answer"])
        problems.append(
            {"prompt": example["prompt"], "answer": example["answer"], "right": right, "majority": vote}
        )
    return {
        "model_path": source.model_path, "truncated": num_truncated / len(texts),
        "estimates": summarise(problems), "problems": problems,
    }


def main(argv: list[str]) -> None:
    """Run the mode that the command line chooses."""
    args = parse_arguments(argv)
    if args.report:
        print(write_report(Path(args.report), Path(args.against) if args.against else None))
        return
    load_environment(args.environment)                    # reports mistakes in it before a model is loaded
    source = ModelConfig(
        args.model_path, args.attn_implementation, args.precision, trust_remote_code=args.trust_remote_code
    )
    if args.merge_into:
        merge_adapter(source, args.merge_into)
        return
    if not args.model_path:
        print("no --model_path: this is the built-in model with random weights, untrained", file=sys.stderr)
    keep_freed_memory()
    if args.evaluate:
        run_evaluation(args, source)
    elif args.questions:
        answer_questions(args, source)
    else:
        chat_model = ChatModel.load(source, sampling_config(args), args.seed)
        if args.chat:
            chat(chat_model, args.instruction)
        else:
            chat_model.answer(with_instruction({"prompt": args.question}, args.instruction)["prompt"])


def merge_adapter(source: ModelConfig, folder: str) -> None:
    """Write a model to a folder with its adapter added to its weights."""
    model, tokenizer = load_policy(source)
    if not has_adapter(model):
        raise ValueError(f"--merge_into={folder}: {source.model_path or 'the built-in model'} has no adapter")
    save_policy(merged_copy(model), tokenizer, folder)
    print(f"{folder}: {source.model_path} with its adapter added to its weights")


def answer_questions(args, source: ModelConfig) -> None:
    """Write the answers to the prompts of --questions into the file --answers."""
    examples = load_dataset(args, args.questions, args.limit)
    chat_model = ChatModel.load(source, sampling_config(args), args.seed)
    write_answers(chat_model, examples, args.samples, Path(args.answers))
    print(f"{args.answers}: {len(examples) * args.samples} answers to {len(examples)} prompts")


def run_evaluation(args, source: ModelConfig) -> None:
    """Print the estimates of --evaluate, and with --json write them and all problems to a file."""
    environment = load_environment(args.environment)
    examples = load_dataset(args, args.evaluate, args.limit or 256)
    examples = [example for example in examples if example.get("answer") is not None]
    if not examples:
        raise ValueError(f"--evaluate={args.evaluate}: no example has an answer to compare with")
    refuse_missing_columns(args.environment, environment, examples)
    results = []
    for flag in ["model_path", *(["against_model"] if args.against_model else [])]:
        evaluated = replace(source, model_path=getattr(args, flag))
        try:
            results.append(measure(
                evaluated, examples, sampling_config(args), seed=args.seed, samples=args.samples,
                environment=environment,
            ))
        except ValueError as error:
            raise ValueError(str(error).replace("--model_path=", f"--{flag}=")) from None
    for result in results:
        if args.against_model:
            print(result["model_path"] or "built-in model")
        print_estimates(result["estimates"], len(examples), args.samples)
    written = {
        "dataset": args.evaluate, "split": args.split, "samples": args.samples, "seed": args.seed,
        "environment": args.environment, "max_turns": args.max_turns,
        **{name: value for name, value in vars(args).items() if name.startswith("generation_")},
        "results": results,
    }
    if args.against_model:
        written["differences"] = compare(*(result["problems"] for result in results))
        print(f"{args.model_path or 'built-in model'} minus {args.against_model}")
        print_estimates(written["differences"], len(examples), args.samples)
    if args.json:
        Path(args.json).write_text(json.dumps(written, indent=1) + "\n")


def load_dataset(args, source: str, limit: int | None) -> list[dict]:
    """Return the examples of a data set with --instruction before each prompt."""
    columns = {"prompt": args.prompt_column, "answer": args.answer_column}
    examples = load_examples(source, args.split, limit=limit, columns=columns)
    return [with_instruction(example, args.instruction) for example in examples]


def print_estimates(estimates: dict[str, dict], num_problems: int, samples: int) -> None:
    """Print a line such as 'accuracy 0.910 [0.870, 0.940] of 256' for each estimate."""
    for name, estimate in estimates.items():
        of = f"of {num_problems}" + (f" x {samples}, {estimate['interval']}" if samples > 1 else "")
        print(f"{name} {estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}] {of}")


if __name__ == "__main__":
    with exit_on_mistake("infer.py"):
        main(sys.argv[1:])
