"""
The flags of infer.py, and which of them cannot be combined. Imports no torch: mistakes come at once.
"""

import argparse
from pathlib import Path

from config import DataConfig, GRPOConfig, ModelConfig, TrainingConfig, validate_functions
from runs.command_line import OneLineParser, add_flags, section_of

EXAMPLES = """
  python infer.py --model_path RUN/final --question "47+85=?"
  python infer.py --model_path RUN/final --evaluate arithmetic --limit 256
  python infer.py --report RUN"""
FLAGS_OF_CONFIG = [
    "model_path", "prompt_column", "answer_column", "instruction", "reward_functions", "reward_weights",
    "reward_errors", "environment", "max_turns", "generation_max_length", "generation_temperature",
    "generation_top_p", "generation_top_k", "generation_min_p", "generation_batch_size", "seed", "precision",
    "attn_implementation", "trust_remote_code", "device", "chat_template", "chat_template_kwargs",
]
NEEDS = {                       # flag -> flags of which it needs one
    "answers": ["questions"], "json": ["evaluate"], "against_model": ["evaluate"],
    "reward_functions": ["evaluate"], "reward_weights": ["reward_functions"],
    "samples": ["evaluate", "questions"],
}


def build_infer_parser() -> OneLineParser:
    """Return the parser with every flag."""
    parser = OneLineParser(
        prog="infer.py", usage=EXAMPLES,
        description="Sample from a model, evaluate it, or write the report of a run.",
    )
    modes, add = parser.add_mutually_exclusive_group(required=True).add_argument, parser.add_argument
    modes("--question", help="print the model's answer to this prompt")
    modes("--chat", action="store_true", help="hold a conversation with the model")
    modes("--questions", metavar="DATASET", help="answer the prompts of a file, hub id or built-in task")
    modes("--evaluate", metavar="DATASET",
          help="print accuracy and points on the problems of a file, hub id or built-in task")
    modes("--merge_into", metavar="FOLDER",
          help="add the LoRA adapter to the weights and write them to FOLDER")
    modes("--report", metavar="RUN", nargs="+",
          help="write RUN/report.html: curves, advice, settings, completions; of several runs print a table")
    add("--answers", metavar="FILE", help="write the answers to --questions there; without it, print them")
    add("--samples", type=int, default=1,
        help="completions per problem [%(default)s]; with several, --evaluate prints pass@k too")
    add("--against_model", metavar="MODEL", default="", help="evaluate it too, and print the difference")
    add("--json", metavar="FILE", default="", help="write the results of --evaluate to FILE")
    add("--split", default="test", help="train, test, or another split of a hub data set [%(default)s]")
    add("--limit", type=int, default=0,
        help="use the first n problems; 0: 256 for --evaluate, all for --questions [%(default)s]")
    add_flags(
        parser, FLAGS_OF_CONFIG, reward_functions=[], generation_temperature=1.0, generation_top_p=1.0,
        generation_top_k=0, generation_batch_size=64)
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Raises ValueError, one line, for mistakes and flags that cannot be combined."""
    parser = build_infer_parser()
    args = parser.parse_all(argv)
    reject_incompatible(args, parser)
    validate_functions(sampling_config(args))             # and the values
    for section in ModelConfig, DataConfig, TrainingConfig:
        section_of(args, section)
    return args


def sampling_config(args: argparse.Namespace) -> GRPOConfig:
    """Return the settings of sampling and scoring."""
    return section_of(args, GRPOConfig, reward_functions=args.reward_functions or ["correctness"])


def reject_incompatible(args: argparse.Namespace, parser: OneLineParser) -> None:
    """Raise ValueError, one line, for what the user has to change."""
    for name, least in ("samples", 1), ("limit", 0):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}={getattr(args, name)}: must be at least {least}")
    if args.samples > 1 and args.generation_temperature == 0:
        raise ValueError(f"--samples={args.samples}: all equal with --generation_temperature=0; try 1")
    for name, needed in NEEDS.items():
        given = getattr(args, name) != parser.get_default(name)
        if given and not any(getattr(args, flag) for flag in needed):
            raise ValueError(f"--{name}: needs {' or '.join(f'--{flag}' for flag in needed)}")
    for name in "question", "questions", "evaluate", "merge_into", "report":
        if getattr(args, name) in ("", [""]):
            raise ValueError(f"--{name}: is empty")
    if args.merge_into and Path(args.merge_into).is_file():
        raise ValueError(f"--merge_into={args.merge_into}: name a folder, not a file")
    for name, path in ("json", args.json), ("answers", args.answers):
        if path and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
            raise ValueError(f"--{name}={path}: name a file, in a folder that exists")
        if path and Path(path).resolve() == Path(args.questions or args.evaluate).resolve():
            raise ValueError(f"--{name}={path}: is the file of the problems; name another one")
