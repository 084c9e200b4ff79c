"""
Ask a language model, evaluate it, or write the report of a run.

    python infer.py --model_path RUN/final --question "47+85=?"
    python infer.py --model_path RUN/final --evaluate arithmetic --limit 256
    python infer.py --report RUN

--evaluate prints accuracy, where answers are known, and the mean of each reward function, with 95 %
intervals; with several --samples of each problem pass@k and majority@n too. --json FILE writes them and all
completions, also of prompts without answers. Not supported: chat and serving, which transformers has.
"""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

from runs.errors import exit_on_errors  # first, see runs/__init__.py

from analysis import evaluation, report
from config import GRPOConfig, ModelConfig, validate_functions
from data import as_text, encode_prompt
from engine import make_engine
from engine.devices import best_device, keep_freed_memory, leave_busy_cores
from engine.policy import check_context_length, load_any_policy, move
from engine.precision import resolve_precision
from engine.ranks import Ranks
from environments.instances import tools_of
from environments.loading import load_environment, refuse_missing_columns
from experience import Groups
from reward_functions.loading import load_reward_function, refuse_equal_names, require_columns
from rewards import correctness, is_missing, text_of
from runs.command_line import OneLineParser, add_flags
from runs.folder import or_none
from runs.startup_check import choose_engine, refuse_wrong_sampler
from sources import load_examples
from sources.training_data import instructed

FLAGS_OF_CONFIG = [
    "model_path", "prompt_column", "answer_column", "instruction", "reward_functions", "reward_weights",
    "reward_errors", "environment", "max_turns", "generation_max_length", "generation_temperature",
    "generation_top_p", "generation_top_k", "generation_min_p", "generation_batch_size", "seed", "precision",
    "attn_implementation", "trust_remote_code", "device", "chat_template", "chat_template_kwargs",
]
WHOLE = {"generation_temperature": 1.0, "generation_top_p": 1.0, "generation_top_k": 0}     # distribution


def main(argv: list[str]) -> None:
    """Answer a question, evaluate a model, or write a report."""
    args = parse_arguments(argv)
    if args.report:
        print_report([Path(folder) for folder in args.report])
        return
    if not args.model_path:
        print("no --model_path: this is the built-in model with random weights, untrained", file=sys.stderr)
    keep_freed_memory()                                   # to use it again, as glibc alone would not
    leave_busy_cores(partial(print, file=sys.stderr))
    if args.evaluate is None:
        print_answers(args)
    else:
        print_evaluation(args)


def print_answers(args: argparse.Namespace) -> None:
    """Print the completions of --question."""
    rollout = sample_answers(args, [instructed({"prompt": args.question}, args.instruction)]).rollout
    for completion, finished in zip(rollout.completions, rollout.finished.tolist(), strict=True):
        print(report.escape(as_text(completion)))
        if not finished:
            print(f"(truncated at --generation_max_length={args.generation_max_length})")


def print_report(folders: list[Path]) -> None:
    """Write the report of a run and print its path, or print a comparison of several runs."""
    if len(folders) == 1:
        print(report.write_report(folders[0]))
    else:
        print(report.compare_runs(folders))


# ---- evaluation --------------------------------------------------------------------------------------------


def print_evaluation(args: argparse.Namespace) -> None:
    """Print the estimates of --evaluate, and write --json."""
    functions = [load_reward_function(name) for name in args.reward_functions]
    refuse_equal_names(functions)
    examples = examples_to_evaluate(args, functions)
    if args.json:
        open(args.json, "a").close()                      # raises OSError now, not after all samples
    groups = sample_answers(args, examples, functions)
    estimates = evaluation.estimate_all(groups)
    del estimates["reward/correctness"]                   # it is the accuracy
    if functions != [correctness]:
        scores = groups.scores.nanmean(dim=1)
        estimates["reward"] = evaluation.estimate_mean(scores[~scores.isnan()].numpy(), is_share=False)
    for name, estimate in estimates.items():
        mean, low, high, problems = estimate.values()
        shown = "?" if mean is None else f"{mean:.3f}"
        interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        print(f"{name} {shown}{interval} of {problems}" + (f" x {args.samples}" if args.samples > 1 else ""))
    tagged = any("</answer>" in text_of(completion) for completion in groups.rollout.completions)
    if not tagged and estimates.get("accuracy", {}).get("mean") == 0:
        print("no completion has an <answer>...</answer>: ask for it with --instruction", file=sys.stderr)
    if args.json:
        written = vars(args) | {"estimates": estimates, "problems": records_of(groups)}
        Path(args.json).write_text(json.dumps(written, indent=1, default=str) + "\n")
        print(f"{args.json}: {len(examples)} prompts with their completions")


def examples_to_evaluate(args: argparse.Namespace, functions: list) -> list[dict]:
    """Return the first --limit examples of --evaluate, which may be prompts alone if --json is given."""
    columns = {"prompt": args.prompt_column, "answer": args.answer_column}
    examples = load_examples(args.evaluate, args.split, limit=args.limit or None, columns=columns)
    refuse_missing_columns(args.environment, load_environment(args.environment), examples)
    if functions != [correctness] or not all(is_missing(example.get("answer")) for example in examples):
        require_columns(functions, examples, args.evaluate)
    elif not args.json:
        raise ValueError(
            f"--evaluate={args.evaluate}: no example has an answer; name its column with --answer_column, or "
            "--reward_functions that need none, or take --json to write completions alone")
    return [instructed(example, args.instruction) for example in examples]


def records_of(groups: Groups) -> list[dict]:
    """Return each example with its completions; rewards are None where a function could not score."""
    rows = zip(groups.rollout.completions, groups.rollout.finished.tolist(), strict=True)
    records = []
    for p, example in enumerate(groups.examples):
        completions = []
        for g, score in enumerate(groups.scores[p]):
            completion, finished = next(rows)
            rewards = {name: or_none(values[p, g]) for name, values in groups.per_function.items()}
            completions.append({
                "completion": completion, "finished": finished, "reward": or_none(score), "rewards": rewards})
        records.append(example | {"completions": completions})
    return records


# ---- sampling ----------------------------------------------------------------------------------------------


def sample_answers(args: argparse.Namespace, examples: list[dict], functions=(correctness,)) -> Groups:
    """Load the model, and sample and score --samples completions of each example."""
    config, environment = section_of(args, GRPOConfig), load_environment(args.environment)
    device = best_device(args.device)
    args.precision = resolve_precision(args.precision, device)
    model, tokenizer = load_any_policy(section_of(args, ModelConfig), trainable=False)
    tokenizer.tools = tools_of(environment)
    longest = max(len(encode_prompt(tokenizer, example["prompt"])) for example in examples)
    check_context_length(model, longest, config.generation_max_length)
    engine, ranks = make_engine("plain", move(model, device), tokenizer), Ranks(device)
    if args.evaluate or device.type == "xla":             # a single prompt is not worth the check
        engine, _ = choose_engine(engine, ranks, ["1+1=?"], GRPOConfig(**WHOLE))
    refuse_wrong_sampler(engine)
    return evaluation.sample_and_score_problems(
        engine, ranks, examples, config, seed=args.seed, num_completions=args.samples,
        reward_functions=functions, weights=config.weights, environment=environment,
    )


# ---- the command line --------------------------------------------------------------------------------------


def build_infer_parser() -> OneLineParser:
    """Return the parser with every flag."""
    parser = OneLineParser(
        prog="infer.py", usage="infer.py --flag value ...", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes = parser.add_mutually_exclusive_group().add_argument
    modes("--question", help="print the model's answer to this prompt")
    modes("--evaluate", metavar="DATASET", help="a file, hub id or built-in task with problems or prompts")
    modes("--report", metavar="RUN", nargs="+",
          help="write RUN/report.html: curves, advice, settings, completions; print a comparison of several")
    add = parser.add_argument
    add("--json", metavar="FILE", help="write the results of --evaluate and all completions to FILE")
    add("--samples", type=int, default=1, help="completions of each prompt [%(default)s]")
    add("--split", default="test", help="train, test, or another split of a hub data set [%(default)s]")
    add("--limit", type=int, default=256, help="evaluate the first n problems, 0: all [%(default)s]")
    add_flags(parser, FLAGS_OF_CONFIG, reward_functions=["correctness"], generation_batch_size=64, **WHOLE)
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Raises ValueError, one line, for mistakes and flags that cannot be combined."""
    args = build_infer_parser().parse_all(argv)
    if args.question is None and args.evaluate is None and not args.report:
        raise ValueError("give one of --question, --evaluate and --report")
    for name, least in ("samples", 1), ("limit", 0):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}={getattr(args, name)}: must be at least {least}")
    if args.evaluate is None and (args.json or args.reward_functions != ["correctness"]):
        raise ValueError("--json and --reward_functions: need --evaluate")
    if args.json and Path(args.json).resolve() == Path(args.evaluate).resolve():
        raise ValueError(f"--json={args.json}: is the file of the problems; name another one")
    validate_functions(section_of(args, GRPOConfig))
    section_of(args, ModelConfig)
    return args


def section_of(args: argparse.Namespace, section: type):
    """Return a section of the configuration from the flags that infer.py shares with it."""
    shared = {f.name for f in dataclasses.fields(section)} & vars(args).keys()
    return section(**{name: getattr(args, name) for name in shared})


if __name__ == "__main__":
    with exit_on_errors("infer.py"):
        main(sys.argv[1:])
