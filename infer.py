"""
Ask a model, or measure it, or look at a run.

    python infer.py --model_path outputs/demo/final --question "47+85=?"
    python infer.py --model_path outputs/demo/final --chat --environment calculator --max_turns 4
    python infer.py --model_path outputs/demo/final --questions problems.jsonl --answers answers.jsonl --samples 4
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --limit 256
    python infer.py --model_path outputs/demo/final --evaluate arithmetic --samples 16 --against_model outputs/sft/final
    python infer.py --model_path outputs/lora/final --merge_into merged
    python infer.py --report outputs/demo --against outputs/other
"""

import argparse
import difflib
import json
import sys
from dataclasses import replace
from pathlib import Path

from analysis.chat import ChatModel, answer_file, chat
from analysis.evaluation import ask_and_score, compare, evaluate, majority_vote, summarise  # noqa: F401
from analysis.report import write_report
from config import GRPOConfig, ModelConfig
from data import load_examples, with_instruction
from engine.devices import best_device, keep_freed_memory
from environments.loading import load_environment, refuse_missing_columns
from model import has_adapter, load_policy, merged_copy, move, save_policy
from runs.startup_check import can_share_prompts


def measure(source: ModelConfig, examples: list[dict], config, *, seed: int, samples: int, environment=None) -> dict:
    """What analysis/evaluation.py finds out about a model on problems with known answers, as --json writes it.

    returns  model_path, truncated (share), estimates (see evaluation.summarise) and problems: for each its prompt, answer,
             which of the samples are right, and the majority's vote
    """
    model, tokenizer = load_policy(source)
    tokenizer.tools = getattr(environment, "tools", None)
    move(model, best_device())
    texts, points, cut = ask_and_score(
        model, tokenizer, examples, config, seed=seed, num_completions=samples,
        shared_prompt=can_share_prompts(model, tokenizer, examples[0]["prompt"]), environment=environment,
    )
    right = points["correctness"].bool().tolist()                                # (P, n)
    votes = [majority_vote(texts[i * samples : (i + 1) * samples], e["answer"]) for i, e in enumerate(examples)]
    problems = [
        {"prompt": e["prompt"], "answer": e["answer"], "right": of_problem, "majority": vote}
        for e, of_problem, vote in zip(examples, right, votes, strict=True)
    ]
    return {
        "model_path": source.model_path, "truncated": cut / len(texts), "estimates": summarise(problems), "problems": problems
    }


def evaluate_as_asked(args, source: ModelConfig, config, environment) -> None:
    """--evaluate: print the estimates, and with --json write them and every problem down."""
    columns = {"prompt": args.prompt_column, "answer": args.answer_column}
    found = load_examples(args.evaluate, args.split, limit=args.limit or 256, columns=columns)
    examples = [example for example in found if example.get("answer") is not None]
    if not examples:
        raise ValueError(f"--evaluate={args.evaluate}: no example has an answer to compare with")
    examples = [with_instruction(example, args.instruction) for example in examples]
    refuse_missing_columns(args.environment, environment, examples)
    result = {
        "dataset": args.evaluate, "split": args.split, "samples": args.samples, "seed": args.seed,
        "environment": args.environment, "max_turns": args.max_turns,
        **{name: value for name, value in vars(args).items() if name.startswith("generation_")},
    }
    result["results"] = []
    for flag in ["model_path", *(["against_model"] if args.against_model else [])]:
        one = replace(source, model_path=getattr(args, flag))
        try:
            measured = measure(one, examples, config, seed=args.seed, samples=args.samples, environment=environment)
        except ValueError as error:
            raise ValueError(str(error).replace("--model_path=", f"--{flag}=")) from None
        result["results"].append(measured)
    for measured in result["results"]:
        if args.against_model:
            print(measured["model_path"] or "built-in model")
        for name, estimate in measured["estimates"].items():
            print(estimate_text(name, estimate, len(examples), args.samples))
    if args.against_model:
        result["differences"] = compare(*(measured["problems"] for measured in result["results"]))
        print(f"{args.model_path or 'built-in model'} minus {args.against_model}")
        for name, estimate in result["differences"].items():
            print(estimate_text(name, estimate, len(examples), args.samples))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def estimate_text(name: str, estimate: dict, problems: int, samples: int) -> str:
    """'accuracy 0.910 [0.870, 0.940] of 256', for people."""
    of = f"of {problems}" + (f" x {samples}, {estimate['interval']}" if samples > 1 else "")
    return f"{name} {estimate['mean']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}] {of}"


class OneLineParser(argparse.ArgumentParser):
    """With errors of one line, and "did you mean" for a flag that there is not."""

    def error(self, message: str):
        raise ValueError(message)

    def parse_all(self, argv: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            near = difflib.get_close_matches(unknown[0], [f"--{name}" for name in vars(args)], n=1)
            raise ValueError(f"{unknown[0]}: unknown flag; " + (f"did you mean {near[0]}?" if near else "see --help"))
        return args


def main(argv: list[str]) -> None:
    """The command line."""
    parser = OneLineParser(description="Ask a model, or measure it.", allow_abbrev=False)
    parser.add_argument("--model_path", default="", help="folder or hub id, such as RUN/final")
    parser.add_argument("--question", help="print the model's answer to this")
    parser.add_argument("--chat", action="store_true", help="a conversation on the console")
    parser.add_argument("--questions", metavar="DATASET", help="answer all prompts of this: what --dataset of train.py takes")
    parser.add_argument("--answers", metavar="FILE", help="where to write those answers, a line of JSON each")
    parser.add_argument("--evaluate", metavar="DATASET", help="print its accuracy on this: what --dataset of train.py takes")
    parser.add_argument("--merge_into", metavar="FOLDER", help="write the model there with its adapter added to its weights")
    parser.add_argument("--report", metavar="RUN", help="write RUN/report.html: curves, advice, settings, completions")
    parser.add_argument("--against", metavar="RUN", default="", help="another run, to lie beside it in the report")
    parser.add_argument("--samples", type=int, default=1, help="completions of each problem [%(default)s]; above 1 also pass@k")
    parser.add_argument("--against_model", metavar="MODEL", default="", help="evaluate this one too, and the difference")
    parser.add_argument("--json", metavar="FILE", default="", help="write what was evaluated there")
    parser.add_argument("--split", default="test", help="train, test, or what a hub has; a file has one [%(default)s]")
    parser.add_argument("--limit", type=int, help="problems to evaluate or answer; default 256 to evaluate, all to answer")
    parser.add_argument("--prompt_column", default="", help="as in training")
    parser.add_argument("--answer_column", default="", help="as in training")
    parser.add_argument("--environment", default="", help="who answers the model, as in training")
    parser.add_argument("--max_turns", type=int, default=1, help="of the model in a conversation with it [%(default)s]")
    parser.add_argument("--instruction", default="", help="text put before every prompt, as in training")
    parser.add_argument("--generation_max_length", type=int, default=GRPOConfig.generation_max_length,
                        help="new tokens, in a conversation of all turns [%(default)s]")
    parser.add_argument("--generation_temperature", type=float, default=1.0, help="0: the likeliest token [%(default)s]")
    parser.add_argument("--generation_top_p", type=float, default=1.0, help="of the likeliest tokens; 1: all [%(default)s]")
    parser.add_argument("--generation_top_k", type=int, default=0, help="likeliest tokens to keep; 0: all [%(default)s]")
    parser.add_argument("--attn_implementation", default="sdpa", choices=["sdpa", "eager"], help="its attention [%(default)s]")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16", "float16"],
                        help="of the layers; weights and head stay float32 [%(default)s]")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the Python that comes with a model")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; the same one gives the same answers [%(default)s]")
    args = parser.parse_all(argv)
    refuse_contradictions(args)
    if args.report:
        print(write_report(Path(args.report), Path(args.against) if args.against else None))
        return
    config = GRPOConfig(
        generation_max_length=args.generation_max_length, generation_temperature=args.generation_temperature,
        generation_top_p=args.generation_top_p, generation_top_k=args.generation_top_k, environment=args.environment,
        max_turns=args.max_turns,
    )
    environment = load_environment(args.environment)
    source = ModelConfig(args.model_path, args.attn_implementation, args.precision, trust_remote_code=args.trust_remote_code)
    if args.merge_into:
        model, tokenizer = load_policy(source)
        if not has_adapter(model):
            raise ValueError(f"--merge_into={args.merge_into}: {args.model_path or 'the built-in model'} has no adapter")
        save_policy(merged_copy(model), tokenizer, args.merge_into)
        print(f"{args.merge_into}: {args.model_path} with its adapter added to its weights")
        return
    if not args.model_path:
        print("no --model_path: this is the built-in model with random weights, and it knows nothing yet", file=sys.stderr)
    keep_freed_memory()
    if args.evaluate:
        evaluate_as_asked(args, source, config, environment)
        return
    columns = {"prompt": args.prompt_column, "answer": args.answer_column}
    questions = load_examples(args.questions, args.split, limit=args.limit, columns=columns) if args.questions else []
    speaker = ChatModel.load(source, config, args.seed)
    if args.chat:
        chat(speaker, args.instruction)
    elif args.questions:
        examples = [with_instruction(example, args.instruction) for example in questions]
        answer_file(speaker, examples, args.samples, Path(args.answers))
        print(f"{args.answers}: {len(examples) * args.samples} answers to {len(examples)} prompts")
    else:
        speaker.answer(with_instruction({"prompt": args.question}, args.instruction)["prompt"])


def refuse_contradictions(args) -> None:
    """Raise ValueError, one line, for what the user has to change."""
    if sum(map(bool, (args.question is not None, args.chat, args.questions, args.evaluate, args.merge_into, args.report))) != 1:
        raise ValueError("give --question, --chat, --questions, --evaluate, --merge_into or --report, one of them; see --help")
    if args.question is not None and not args.question.strip():
        raise ValueError("--question: is empty; ask something")
    if bool(args.questions) != bool(args.answers):
        raise ValueError("--questions DATASET and --answers FILE belong together")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit={args.limit}: at least one problem has to be asked")
    if args.samples < 1:
        raise ValueError(f"--samples={args.samples}: at least one completion of each problem")
    if args.samples > 1 and args.generation_temperature == 0:
        raise ValueError(f"--samples={args.samples}: at --generation_temperature=0 all of them would be the same; try 1")
    if args.samples > 1 and not args.evaluate and not args.questions:
        raise ValueError(f"--samples={args.samples}: belongs to --evaluate or --questions")
    for name, asked in ("against_model", args.against_model), ("json", args.json):
        if asked and not args.evaluate:
            raise ValueError(f"--{name}={getattr(args, name)}: belongs to --evaluate DATASET")
    for name, path in ("json", args.json), ("answers", args.answers):
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"--{name}={path}: there is no folder {Path(path).parent} to write it to")
    if args.against and not args.report:
        raise ValueError(f"--against={args.against}: belongs to --report RUN; for two models see --against_model")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"infer.py: error: {error}", file=sys.stderr)
        sys.exit(2)
