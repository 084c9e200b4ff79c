"""
The command line of the linter. Imports no torch before flags are read: mistakes come at once.

    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl --limit 20
    python rewards.py --lint --rollouts RUN/rollouts.jsonl

prints a table of mean points, or of a run's changed completions (with the run's settings, unless flags are
given), then one line per flag. The exit code is 1 if there are flags, 0 if not.
"""

import argparse
import dataclasses
from pathlib import Path

from config import FLAGS, Config, DataConfig
from runs.command_line import OneLineParser, add_flags, exit_on_mistake, section_of
from sources.settings import read_settings, refuse_foreign_code


def build_parser() -> OneLineParser:
    """Return the parser of the flags."""
    parser = OneLineParser(prog="rewards.py", description="Lint reward functions.")
    add = parser.add_argument
    add("--lint", action="store_true", required=True, help="score correct, wrong and cheating completions")
    add("--rollouts", metavar="FILE", default="", help="rollouts.jsonl of a run: change its completions")
    add("--limit", type=int, default=8,
        help="use the first n examples [%(default)s]; n groups of --rollouts [256 completions]")
    columns = [f.name for f in dataclasses.fields(DataConfig) if f.name.endswith("_column")]
    add_flags(parser, ["reward_functions", "reward_weights", "dataset", *columns], reward_functions=[])
    return parser


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code: 1 if there are flags, else 0."""
    parser = build_parser()
    args = parser.parse_all(argv)
    if args.rollouts:
        for action in parser._actions:                    # without defaults: what is given
            action.default = argparse.SUPPRESS
        table, flags = lint_run(Path(args.rollouts), vars(parser.parse_all(argv)))
    else:
        table, flags = lint_data(args)
    print("\n".join(table))
    print("".join(f"\n- {flag}" for flag in flags))
    print("\nColumns and flags: docs/rewards.md, Points of right, wrong and cheating completions")
    return int(bool(flags))


def lint_data(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Lint reward functions on examples of a data set."""
    from analysis.reward_linter import applicable_functions, lint  # slow to import
    from sources import load_examples
    from reward_functions.loading import load_reward_function, require_columns

    data = section_of(args, DataConfig)
    examples = load_examples(data.dataset, limit=max(1, args.limit), columns=data.columns)
    functions = [load_reward_function(name) for name in args.reward_functions]
    require_columns(functions, examples, args.dataset)
    functions = functions or applicable_functions(examples)
    weights = args.reward_weights or [1.0] * len(functions)
    if len(weights) != len(functions):
        raise ValueError(f"--reward_weights: {len(weights)} weights for {len(functions)} functions")
    return lint(functions, weights, examples)


def lint_run(path: Path, given: dict) -> tuple[list[str], list[str]]:
    """Lint the completions of a run with its settings, and flags that are given in their place."""
    if not path.is_file():
        raise ValueError(f"--rollouts={path}: no such file; name the rollouts.jsonl of a run")
    settings = read_settings(path.parent / "config.json")
    flags = {name: value for name, value in given.items() if name in FLAGS}
    refuse_foreign_code(path.parent / "config.json", settings, flags)
    reset = {"reward_weights": []} if "reward_functions" in flags else {}
    config = Config.of(**settings | reset | flags | {"eval_limit": 0})           # nothing is held out
    config.grpo.validate_functions()
    from analysis.rollout_linter import lint_rollouts, read_groups  # slow to import
    from reward_functions.loading import load_reward_function, require_columns
    from sources.training_data import load_data

    groups, line = read_groups(path, load_data(config)[0], max(0, given.get("limit", 0)))
    weights = dict(zip(config.grpo.reward_functions, config.grpo.weights, strict=True))
    if weights.pop("environment", None) is not None:
        line += "; environment is left out: its points are those of whole conversations"
    functions = list(map(load_reward_function, weights))
    require_columns(functions, [example for example, _ in groups], config.data.dataset)
    table, flags = lint_rollouts(functions, list(weights.values()), groups)
    return [line, "", *table], flags


def run_command_line(argv: list[str]) -> None:
    """Run the command line and end the program: with exit code 2 for a mistake, else with main's."""
    with exit_on_mistake("rewards.py"):
        raise SystemExit(main(argv))
