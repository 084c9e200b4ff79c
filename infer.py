"""
Ask a language model, evaluate it, or report on runs.

    python infer.py --model_path RUN/final --question "47+85=?"
    python infer.py --model_path RUN/final --evaluate arithmetic --limit 256
    python infer.py --report RUN

--evaluate prints the accuracy, if answers are known, and the mean of each reward function, with 95 %
intervals; with several --samples per problem also pass@k and majority@n. --json FILE writes these and all
completions, also for prompts without answers. Not supported: chat and serving; use transformers.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

from runs.errors import exit_on_errors  # first, see runs/__init__.py

from analysis import evaluation, report
from config import GRPOConfig, ModelConfig
from data import as_text
from engine.device_policy import DevicePolicy
from engine.devices import best_device, idle_cores
from engine.models import check_context_length, load_any_policy, move, resolve_precision
from environments.instances import load_environment, refuse_missing_columns, tools_of
from experience import Groups
from reward_functions.loading import load_reward_functions, require_columns
from rewards import is_missing, text_of
from runs.command_line import parse_infer, section_of
from runs.folder import or_none
from runs.groups import Scoring
from runs.startup_check import choose_engine, refuse_wrong_sampler
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
    environment = load_environment(args.environment)
    if args.evaluate is None:
        print_answers(args, sample_answers(args, [{"prompt": args.question}], functions, environment))
    else:
        problems = load_problems(args, functions, environment)
        print_evaluation(args, sample_answers(args, problems, functions, environment))


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
    if args.json:
        args.json.open("a").close()                       # raises OSError before sampling
    return problems


def sample_answers(
    args: argparse.Namespace, examples: list[dict], functions: list, environment: Callable | None
) -> Groups:
    """Sample --samples completions of each example with the model of --model_path, and score them."""
    if not args.model_path:
        print("no --model_path: using the built-in model with random weights, untrained", file=sys.stderr)
    device = best_device(args.device)
    args.precision = resolve_precision(args.precision, device)                   # not auto, in --json too
    config = section_of(args, GRPOConfig)
    model, tokenizer = load_any_policy(section_of(args, ModelConfig), trainable=False)
    tokenizer.tools = tools_of(environment)               # for the chat template
    policy = DevicePolicy(move(model, device), tokenizer)
    if args.evaluate or device.type == "xla":             # checking takes some seconds
        policy, _ = choose_engine(policy, ["1+1=?"], config)
    refuse_wrong_sampler(policy)
    examples = [instructed(example, args.instruction) for example in examples]
    prompts = encode_prompts(examples, tokenizer, args.evaluate or "--question")
    refuse_wrong_ids(policy.model, tokenizer, prompts)
    check_context_length(policy.model, max(map(len, prompts)), config.generation_max_length)
    idle_cores.choose_threads(partial(print, file=sys.stderr))
    return evaluation.sample_and_score_problems(
        policy, examples, config, Scoring(functions, config.weights, environment), seed=args.seed,
        num_completions=args.samples)


def print_answers(args: argparse.Namespace, groups: Groups) -> None:
    """Print the completions of a question."""
    rollout = groups.rollout
    for completion, finished in zip(rollout.completions, rollout.finished.tolist(), strict=True):
        print(report.escape(as_text(completion)))
        if not finished:
            print(f"(truncated at --generation_max_length={args.generation_max_length})")


def print_evaluation(args: argparse.Namespace, groups: Groups) -> None:
    """Print accuracy and mean rewards over the problems, with 95 % intervals, and write --json."""
    estimates = evaluation.estimate_all(groups)
    del estimates["reward/correctness"]                   # the accuracy
    if args.reward_functions != ["correctness"]:
        estimates["reward"] = evaluation.estimate_rewards(groups.scores)
    for name, estimate in estimates.items():
        mean, low, high, problems = estimate.values()
        shown = "?" if mean is None else f"{mean:.3f}"
        interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        print(f"{name} {shown}{interval} of {problems}" + (f" x {args.samples}" if args.samples > 1 else ""))
    is_tagged = any("</answer>" in text_of(completion) for completion in groups.rollout.completions)
    if not is_tagged and estimates.get("accuracy", {}).get("mean") == 0:
        print("no completion has an <answer>...</answer>: request it with --instruction", file=sys.stderr)
    if args.json:
        results = vars(args) | {"estimates": estimates, "problems": with_completions(groups)}
        args.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
        print(f"{args.json}: {len(groups.examples)} prompts with their completions")


def with_completions(groups: Groups) -> list[dict]:
    """Return each example with its completions; rewards are None where a function could not score."""
    rollout, n, records = groups.rollout, groups.scores.shape[1], []
    for p, example in enumerate(groups.examples):
        completions = [{
            "completion": rollout.completions[p * n + g], "finished": bool(rollout.finished[p * n + g]),
            "reward": or_none(groups.scores[p, g]),
            "rewards": {name: or_none(rewards[p, g]) for name, rewards in groups.per_function.items()},
        } for g in range(n)]
        records.append(example | {"completions": completions})
    return records


if __name__ == "__main__":
    with exit_on_errors("infer.py"):
        main(sys.argv[1:])
