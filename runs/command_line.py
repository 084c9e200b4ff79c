"""
The command-line parser of train.py, infer.py and the commands in analysis/.

Mistakes raise ValueError with one line.
"""

import argparse
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args, get_origin

from config import DEFAULTS, FLAGS, Config, GRPOConfig, ModelConfig, expand_home, reject, validate_functions
from sources.foreign_names import explain_unknown
from sources.settings import complete, read_settings

DESCRIPTION = """\
Train a language model with GRPO or supervised fine-tuning.

    python train.py --use_grpo                   the demonstration, no downloads
    python train.py --use_grpo --model_path MODEL --dataset DATA
    python train.py --output_dir RUN --resume    continue a run

A file of settings, such as config.json of a run, comes before all flags. Flags
override the file, which overrides the profile, which overrides the defaults.
--use_grpo means true; --use_grpo false and --no_use_grpo mean false."""
COMMON = {                      # flags that --help shows; --help_all shows every one
    "model_path", "precision", "lora_rank", "dataset", "eval_dataset", "prompt_column", "instruction",
    "max_prompt_length", "num_completions_per_prompt", "generation_max_length", "generation_temperature",
    "engine", "reward_functions", "reward_weights", "loss_type", "use_kl_penalty", "kl_penalty_coef",
    "use_grpo", "output_dir", "resume", "check", "num_epochs", "max_steps", "batch_size", "learning_rate",
}
HEADINGS = {                    # of --help: first flag under a heading -> heading
    "model_path": "Model", "dataset": "Data", "num_completions_per_prompt": "A step of GRPO",
    "generation_top_p": "Sampling", "environment": "Conversations", "reward_errors": "Rewards",
    "normalize_advantages": "Advantages", "loss_options": "Loss", "kl_in": "KL to a reference",
    "use_value_head": "Value head", "use_grpo": "The run", "num_epochs": "Length",
    "learning_rate": "Optimiser", "max_tokens_per_forward": "Memory and processes",
    "eval_steps": "Measured and written",
}


# ---- shared by the programs --------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises ValueError with one line for a mistake, and suggests a flag for an unknown one."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")                    # -5e-05 is no flag either
        self.add_argument("--debug", action="store_true", help="print the traceback of an error")

    def error(self, message: str):
        raise ValueError(message)

    def parse_all(self, argv: list[str]) -> argparse.Namespace:
        """Parse the flags, which may have hyphens, and reject unknown words."""
        words = [re.sub(r"(?<=^--)[\w-]+", lambda flag: flag[0].replace("-", "_"), word) for word in argv]
        args, unknown = self.parse_known_args(words)
        if unknown:
            flags = [word for word in unknown if word.startswith("--")]
            if not flags and "=" not in "".join(unknown):
                raise ValueError(
                    f"{' '.join(unknown)}: a second value, but the flag before it takes one; of several "
                    "files make one: cat a.jsonl b.jsonl > both.jsonl")
            raise ValueError(explain_unknown(flags or unknown, [action.dest for action in self._actions]))
        vars(args).pop("debug", None)                     # runs/exits.py reads it
        return args


def true_or_false(text: str) -> bool:
    """Convert a word to a bool. argparse prints the name of this function in its error message."""
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str], shown=FLAGS, **defaults) -> None:
    """Add flags of the configuration to a parser, under their headings.

    names, shown  the flags, and those that the help shows;  defaults  values that replace those of config.py
    """
    group = parser
    for name, field in FLAGS.items():
        if name in HEADINGS:
            group = parser.add_argument_group(HEADINGS[name])
        if name not in names:
            continue
        kind, choices, default = field.type, get_args(field.type), defaults.get(name, DEFAULTS[name])
        text = str(default)
        if kind is bool:
            options = {"type": true_or_false, "nargs": "?", "const": True, "metavar": "bool"}
            text = text.lower()
            group.add_argument(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)
        elif get_origin(kind) is list:
            options = {"type": choices[0], "nargs": "+", "metavar": choices[0].__name__}
            text = " ".join(default)
        elif choices:
            options = {"metavar": "|".join(filter(None, choices))}
        else:
            options = {"type": kind, "metavar": kind.__name__}
        help = f"{field.metadata['help']} [{text}]".replace("%", "%%").removesuffix(" []")
        group.add_argument(f"--{name}", help=help if name in shown else argparse.SUPPRESS, **options)
        if parser.argument_default != argparse.SUPPRESS:
            parser.set_defaults(**{name: default})


# ---- train.py ----------------------------------------------------------------------------------------------


def build_parser(show_all: bool) -> OneLineParser:
    """Return the parser of train.py. show_all: its help shows all flags, not only those in COMMON."""
    parser = OneLineParser(
        prog="train.py", usage="train.py [settings.json] [--flag value ...]", description=DESCRIPTION,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        argument_default=argparse.SUPPRESS)
    parser.add_argument(
        "--task", metavar="FILE.py", help="a task: examples(split), reward(completions, ...), SETTINGS")
    parser.add_argument("--help_all", action="help", help=f"show all {len(FLAGS)} flags")
    add_flags(parser, FLAGS, shown=FLAGS if show_all else COMMON)
    return parser


def parse_config(argv: list[str]) -> Config:
    """Return the configuration of a command line. Raises ValueError with one line."""
    is_file = argv and not argv[0].startswith("-") and "=" not in Path(argv[0]).name
    words = argv[1:] if is_file else argv
    flags = vars(build_parser(show_all=bool({"--help_all", "--help-all"} & {*words})).parse_all(words))
    if is_file:
        flags = read_settings(Path(argv[0]), flags) | flags
    default = DEFAULTS["reward_functions"]
    names, flags = flags.get("reward_functions", default), complete(flags)       # names: not of a profile
    if unknown := [name for name in flags if name not in FLAGS]:                 # in a file
        raise ValueError(explain_unknown(unknown, FLAGS))
    config = Config.of(**flags)
    validate_functions(config.grpo)
    if names != default and not config.training.use_grpo:
        raise ValueError("--reward_functions: not used in supervised training; add --use_grpo, or remove it")
    return config


# ---- infer.py ----------------------------------------------------------------------------------------------


def user_path(text: str) -> Path:
    """Return a path, with the folder of the user for ~/."""
    return Path(text).expanduser()


def parse_infer(argv: list[str], description: str) -> argparse.Namespace:
    """Parse a command line of infer.py. Raises ValueError with one line for a mistake."""
    parser = OneLineParser(
        prog="infer.py", usage="infer.py --flag value ...", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    modes, add = parser.add_mutually_exclusive_group().add_argument, parser.add_argument
    modes("--question", help="print the model's answer to this prompt")
    modes("--evaluate", metavar="DATASET", help="a file, hub id or built-in task with problems or prompts")
    modes("--report", metavar="RUN", nargs="+", type=user_path,
          help="write RUN/report.html: curves, advice, settings, completions; or compare several runs")
    add("--json", metavar="FILE", type=user_path,
        help="write results of --evaluate and all completions to FILE, or continue it with the same settings")
    add("--samples", type=int, default=1, help="completions of each prompt [%(default)s]")
    add("--split", default="test", help="train, test, or another split of a hub data set [%(default)s]")
    add("--limit", type=int, default=256, help="evaluate the first n problems, 0: all [%(default)s]")
    shared = [
        "model_path", "prompt_column", "answer_column", "instruction", "reward_functions", "reward_weights",
        "reward_errors", "environment", "max_turns", "generation_max_length", "generation_temperature",
        "generation_top_p", "generation_top_k", "generation_min_p", "generation_batch_size", "seed",
        "precision", "attn_implementation", "trust_remote_code", "device", "chat_template",
        "chat_template_kwargs",
    ]
    add_flags(
        parser, shared, reward_functions=["correctness"], generation_batch_size=64,
        generation_temperature=1.0, generation_top_p=1.0, generation_top_k=0)
    args = parser.parse_all(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("WORLD_SIZE: infer.py runs in one process; start it without torchrun")
    args.evaluate, args.model_path = expand_home(args.evaluate), expand_home(args.model_path)
    if (args.question, args.evaluate, args.report) == (None, None, None):
        raise ValueError("give one of --question, --evaluate and --report")
    if args.evaluate is None and (args.json or args.reward_functions != ["correctness"]):
        raise ValueError("--json and --reward_functions: need --evaluate")
    same_file = args.json and args.json.resolve() == Path(args.evaluate).resolve()
    reject(
        args,
        ("samples", args.samples < 1, "must be at least 1"),
        ("limit", args.limit < 0, "must be at least 0"),
        ("json", same_file, "is the file of the problems; name another one"),
    )
    validate_functions(section_of(args, GRPOConfig))
    section_of(args, ModelConfig)
    return args


def section_of(args: argparse.Namespace, section: type):
    """Return a section of the configuration with the flags that infer.py shares with it."""
    return section(**{f.name: getattr(args, f.name) for f in fields(section) if f.name in args})
