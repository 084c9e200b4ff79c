"""
The command line of the linter. Imports no torch before flags are read: mistakes come at once.

    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl --limit 20
    python rewards.py --lint --rollouts RUN/rollouts.jsonl

prints a table of mean points, then one line per flag. With --rollouts the settings are those of the run,
unless flags are given, and gold is the best completion of each of its prompts. The exit code is 1 if there
are flags, 0 if not.
"""

import argparse
import dataclasses
from pathlib import Path

from config import FLAGS, Config, DataConfig, validate_functions
from runs.command_line import OneLineParser, add_flags
from runs.errors import exit_on_errors
from sources.settings import complete, read_settings, refuse_foreign_code


def build_lint_parser() -> OneLineParser:
    """Return the parser of the flags, without defaults: what is given."""
    parser = OneLineParser(
        prog="rewards.py", description="Lint reward functions.", argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("--lint", action="store_true", required=True, help="score correct, wrong and cheating completions")
    add("--rollouts", metavar="FILE", help="rollouts.jsonl of a run, whose best completions are gold")
    add("--limit", type=int, default=8, help="use the first n examples, the newest of --rollouts [8]")
    columns = [f.name for f in dataclasses.fields(DataConfig) if f.name.endswith("_column")]
    add_flags(parser, ["reward_functions", "reward_weights", "dataset", *columns])
    return parser


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code: 1 if there are flags, else 0."""
    given = vars(build_lint_parser().parse_all(argv))
    flags = {name: value for name, value in given.items() if name in FLAGS}
    settings, path = {}, Path(given.get("rollouts", ""))
    if "rollouts" in given:
        settings = read_settings(path.parent / "config.json")
        refuse_foreign_code(path.parent / "config.json", settings, flags)
        settings |= {"reward_weights": []} if "reward_functions" in flags else {}
    config = Config.of(**complete(settings | flags) | {"eval_limit": 0})         # nothing is held out
    validate_functions(config.grpo)

    from analysis.reward_linter import examples_of_run, lint  # slow to import
    from reward_functions.loading import load_reward_function, require_columns
    from sources.training_data import load_data

    examples = load_data(config)[0]
    if "rollouts" in given:
        examples = examples_of_run(path, examples)
    weights = dict(zip(config.grpo.reward_functions, config.grpo.weights, strict=True))
    if weights.pop("environment", None) is not None:
        print("environment is left out: its points are those of whole conversations")
    functions = [load_reward_function(name) for name in weights]
    require_columns(functions, examples, config.data.dataset)
    table, found = lint(functions, list(weights.values()), list(examples[: max(1, given["limit"])]))
    print("\n".join(table))
    print("".join(f"\n- {flag}" for flag in found))
    print("\nColumns and flags: docs/rewards.md, Points of right, wrong and cheating completions")
    return int(bool(found))


def run_command_line(argv: list[str]) -> None:
    """Run the command line and end the program: with exit code 2 for a mistake, else with main's."""
    with exit_on_errors("rewards.py"):
        raise SystemExit(main(argv))
