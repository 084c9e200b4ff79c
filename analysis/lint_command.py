"""
The command line of the linter. Imports no torch before flags are read: mistakes come at once.

    python rewards.py --lint --reward_functions correctness mine.py:short --dataset data.jsonl --limit 20

prints a table of mean points, then one line per flag. The exit code is 1 if there are flags, 0 if not.
"""

from config import DataConfig
from runs.command_line import OneLineParser, add_flags_of_config, exit_on_mistake, section_of


def build_parser() -> OneLineParser:
    """Return the parser of the flags."""
    parser = OneLineParser(prog="rewards.py", description="Lint reward functions.", allow_abbrev=False)
    add = parser.add_argument
    add("--lint", action="store_true", required=True, help="score correct, wrong and cheating completions")
    add("--limit", type=int, default=8, help="use the first n examples [%(default)s]")
    add_flags_of_config(
        parser, reward_functions=[], reward_weights=[], dataset="arithmetic", prompt_column="",
        answer_column="", completion_column="",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code: 1 if there are flags, else 0."""
    args = build_parser().parse_all(argv)
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
    table, flags = lint(functions, weights, examples)
    print("\n".join(table))
    print("".join(f"\n- {flag}" for flag in flags))
    print("\nColumns and flags: docs/rewards.md, Points of right, wrong and cheating completions")
    return int(bool(flags))


def run_command_line(argv: list[str]) -> None:
    """Run the command line and end the program: with exit code 2 for a mistake, else with main's."""
    with exit_on_mistake("rewards.py"):
        raise SystemExit(main(argv))
