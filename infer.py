"""
Ask a language model, evaluate it, or report on runs.

    python infer.py --model_path RUN/final --question "47+85=?"
    python infer.py --model_path RUN/final --evaluate arithmetic --limit 256
    python infer.py --report RUN

--evaluate prints the accuracy, if a reward function says what is right, and the mean of the others, with 95 %
intervals; with several --samples per problem also pass@k and majority@n. --json FILE has these and all
completions, also for prompts without answers. It is written after every batch of problems, and the same
command continues it. Not supported: chat and serving; use transformers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from runs.exits import exit_on_errors  # first, see runs/__init__.py

from analysis import evaluation, report
from config import GRPOConfig, ModelConfig
from data import as_text
from engine.devices import best_device
from engine.fingerprints import fingerprint_of_examples, fingerprint_of_model
from engine.host import idle_cores
from engine.models import check_context_length, load_any_policy, resolve_precision
from engine.network import Network, move
from environments.instances import load_environment, offer_tools, refuse_missing_columns
from experience import Groups
from reward_functions.loading import load_reward_functions, require_columns
from rewards import extract_answer, is_missing, text_of
from runs.command_line import parse_infer, section_of
from runs.console import with_interval, with_limits
from runs.folder import replace_text, without_nan
from runs.groups import Scoring
from runs.engine_choice import build_policy
from sources import load_examples
from sources.readers import refuse_split
from sources.token_check import encode_prompts, refuse_wrong_ids
from sources.training_data import instructed


def main(argv: list[str]) -> None:
    """Print a report on runs, the answers to a question, or an evaluation."""
    args = parse_infer(argv, __doc__)
    if args.report:
        run, *others = args.report
        print(report.compare_runs(args.report) if others else report.write_report(run))
        return
    functions = load_reward_functions(args.reward_functions)
    environment, problems = load_environment(args.environment), [{"prompt": args.question}]
    if args.evaluate is not None:
        problems = load_problems(args, functions, environment)
    problems = [instructed(problem, args.instruction) for problem in problems]
    args.precision = resolve_precision(args.precision, best_device(args.device))          # not auto
    args.model, args.examples = fingerprint_of_model(args.model_path), fingerprint_of_examples(problems)
    records = read_results(args)
    if len(records) < len(problems):
        try:
            for groups in sample_answers(args, problems, functions, environment, done=len(records)):
                records += evaluation.records_of(groups)
                write_results(args, records)
        finally:
            if args.json and len(records) < len(problems):
                print(f"{args.json}: {len(records)} of {len(problems)} problems", file=sys.stderr)
    if args.evaluate is None:
        print_answers(args, records)
    else:
        print_evaluation(args, records)


def load_problems(args: argparse.Namespace, functions: list, environment: Callable | None) -> list[dict]:
    """Load the first --limit examples of --evaluate. Raise ValueError if a column is missing."""
    columns = {"prompt": args.prompt_column, "answer": args.answer_column}
    refuse_split("split", args.split, "test", args.evaluate)
    notify = partial(print, file=sys.stderr)
    problems = load_examples(args.evaluate, args.split, limit=args.limit, columns=columns, notify=notify)
    refuse_missing_columns(args.environment, environment, problems)
    is_answered = any(not is_missing(problem.get("answer")) for problem in problems)
    if is_answered or args.reward_functions != ["correctness"]:
        require_columns(functions, problems, args.evaluate)
    elif not args.json:
        raise ValueError(
            f"--evaluate={args.evaluate}: no example has an answer; name its column with --answer_column, "
            "choose --reward_functions that need none, or use --json to write only completions")
    return problems


def sample_answers(
    args: argparse.Namespace, problems: list[dict], functions: list, environment: Callable | None, done: int
) -> Iterator[Groups]:
    """Load the model of --model_path, and return an iterator over batches of problems behind those done."""
    if not args.model_path:
        print("no --model_path: using the built-in model with random weights, untrained", file=sys.stderr)
    device = best_device(args.device)
    config = section_of(args, GRPOConfig)
    model, tokenizer = load_any_policy(section_of(args, ModelConfig), trainable=False)
    to_stderr = partial(print, file=sys.stderr)
    offer_tools(tokenizer, environment, to_stderr)
    shares = args.evaluate or device.type == "xla"        # else the seconds of its check are not worth it
    policy, _ = build_policy(
        Network(move(model, device)), tokenizer, ["1+1=?"],
        config if shares else replace(config, engine="plain"), notify=lambda note: None)
    prompts = encode_prompts(problems, tokenizer, args.evaluate or "--question")
    refuse_wrong_ids(policy.model, tokenizer, prompts)
    check_context_length(policy.model, max(map(len, prompts)), config.generation_max_length)
    idle_cores.choose_threads(to_stderr)
    return evaluation.sample_and_score_problems(
        policy, problems, config, Scoring(functions, config.weights, environment), seed=args.seed,
        num_completions=args.samples, done=done, notify=to_stderr)


# ---- results -----------------------------------------------------------------------------------------------


def read_results(args: argparse.Namespace) -> list[dict]:
    """Return the problems in --json with their completions, [] if there is no such file.

    Raise OSError if it cannot be written, ValueError if it was written with other settings or problems.
    """
    if not args.json:
        return []
    args.json.open("a").close()                           # raises OSError before sampling
    if not (text := args.json.read_text()):
        return []
    try:
        saved = json.loads(text)
        records = saved["problems"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--json={args.json}: is not a file of infer.py; name another one") from None
    for name, value in settings_of(args).items():
        if name != "generation_batch_size" and saved.get(name) != value:
            raise ValueError(f"--json={args.json}: was written with {name} {saved.get(name)!s:.60}, not "
                             f"{value!s:.60}; name another file, or remove it")
    print(f"{args.json}: has {len(records)} problems already", file=sys.stderr)
    return records


def settings_of(args: argparse.Namespace) -> dict:
    """Return the flags, and the fingerprints of model and problems, as JSON."""
    return without_nan({name: value for name, value in vars(args).items() if name != "json"})


def write_results(args: argparse.Namespace, records: list[dict]) -> None:
    """Replace --json by the settings, the estimates so far, and the problems with their completions."""
    if args.json:
        results = settings_of(args) | {"estimates": estimates_of(records), "problems": records}
        replace_text(args.json, json.dumps(results, indent=1) + "\n")


def estimates_of(records: list[dict]) -> dict[str, dict]:
    """Estimate accuracy, mean rewards of the other functions and, if there are any, of the weighted sum."""
    estimates = evaluation.estimate_all(records)
    right = estimates.get("accuracy", {}).get("function", "correctness")         # without answers, nothing
    estimates.pop(f"reward/{right}", None)
    if any(name.startswith("reward/") for name in estimates):
        estimates["reward"] = evaluation.estimate_rewards(evaluation.rewards_of(records))
    return estimates


def print_answers(args: argparse.Namespace, records: list[dict]) -> None:
    """Print the completions of a question."""
    for completion in records[0]["completions"]:
        print(report.escape(as_text(completion["completion"])))
        if not completion["finished"]:
            print(f"(truncated at --generation_max_length={args.generation_max_length})")


def print_evaluation(args: argparse.Namespace, records: list[dict]) -> None:
    """Print accuracy and mean rewards over the problems, with 95 % intervals, and the path of --json."""
    estimates = estimates_of(records)
    for name, estimate in estimates.items():
        values = estimate["mean"], estimate["low"], estimate["high"]
        mean = with_interval(dict(zip(with_limits(name), values, strict=True)), name)
        samples = f" x {args.samples}" if args.samples > 1 else ""
        cut = f", cut {estimate['truncated']:.0%}" if "truncated" in estimate else ""
        print(report.escape(f"{name} {mean} of {estimate['problems']}{samples}{cut}"))
    texts = [text_of(each["completion"]) for record in records for each in record["completions"]]
    accuracy = estimates.get("accuracy", {"mean": 1})
    none_right = accuracy["mean"] == 0 and accuracy["function"] == "correctness"
    if none_right and not any(map(extract_answer, texts)):
        print("no completion has an <answer>...</answer> or a \\boxed{}: request it with --instruction, or "
              "choose other --reward_functions, such as last_number", file=sys.stderr)
    if args.json:
        print(f"{args.json}: {len(records)} prompts with their completions")


if __name__ == "__main__":
    with exit_on_errors("infer.py", stopped="the same command continues --json FILE"):
        main(sys.argv[1:])
