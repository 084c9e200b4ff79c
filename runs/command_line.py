"""
The parser of train.py, infer.py and the reward linter, and what their console shows.

A mistake is a ValueError of one line. Neither torch nor transformers is imported here or in config.py, as
they take seconds to load: help and mistakes are printed before.
"""

import argparse
import dataclasses
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args, get_origin

from config import FLAGS, Config
from engine.errors import RunError
from sources.foreign_names import explain_unknown, without_removed
from sources.run_owner import refuse_foreign_code
from sources.settings import read_settings

DESCRIPTION = """\
Train a language model with GRPO or supervised fine-tuning.

    python train.py --use_grpo                   the demonstration, no downloads
    python train.py --use_grpo --model_path MODEL --dataset DATA
    python train.py --output_dir RUN --resume    continue a run

A file of settings, such as config.json of a run, comes before all flags. Flags
override the file, which overrides the profile, which overrides the defaults.
--compare trains variants with several seeds each: docs/rewards.md."""
COMMON = {                      # flags that --help shows; --help_all shows every one
    "model_path", "precision", "lora_rank", "dataset", "eval_dataset", "prompt_column", "instruction",
    "max_prompt_length", "num_completions_per_prompt", "generation_max_length", "generation_temperature",
    "engine", "reward_functions", "reward_weights", "loss_type", "use_kl_penalty", "kl_penalty_coef",
    "use_grpo", "output_dir", "resume", "check", "num_epochs", "max_steps", "batch_size", "learning_rate",
}
HEADINGS = {                    # of --help and docs/configuration.md: first flag under a heading -> heading
    "model_path": "Model", "dataset": "Data", "num_completions_per_prompt": "Sampling",
    "environment": "Conversations", "reward_functions": "Rewards", "normalize_advantages": "Advantages",
    "loss_type": "Loss", "use_value_head": "Value head", "ppo_epochs": "Updates on a rollout",
    "use_kl_penalty": "KL to a reference", "use_grpo": "The run", "num_epochs": "Length",
    "learning_rate": "Optimiser", "max_tokens_per_forward": "Memory and processes",
    "eval_steps": "Measured and written",
}
UNSAFE = re.compile(                                     # see printable
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


# ---- shared by train.py, infer.py and the reward linter ----------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Raise ValueError with one line for a mistake, and suggest a flag for each unknown one.

    Flags may be written with hyphens too.
    """

    def error(self, message: str):
        raise ValueError(message)

    def parse_all(self, argv: list[str], file_hint: str = "see --help") -> argparse.Namespace:
        """Parse the flags and reject unknown words. file_hint: what to do about the name of a .json file."""
        for word in argv:
            if word != word.encode(errors="replace").decode():
                raise ValueError(f"{word!a:.60}: is not UTF-8")
        words = [re.sub(r"(?<=^--)[\w-]+", lambda flag: flag[0].replace("-", "_"), word) for word in argv]
        self._negative_number_matcher = re.compile(r"-\.?\d")                    # -5e-05 too is no flag
        args, unknown = self.parse_known_args(words)
        pairs = zip(["", *unknown], unknown, strict=False)               # the word before, the word
        flags = [word for before, word in pairs if word.startswith("--") or (
            re.match(r"[\w.]+=", word) and not before.startswith("--"))]
        if flags:
            raise ValueError(explain_unknown(flags, [action.dest for action in self._actions]))
        if unknown:
            hint = file_hint if unknown[0].endswith(".json") else "see --help"
            raise ValueError(f"{unknown[0]}: belongs to no flag; {hint}")
        return args


class Console(io.TextIOWrapper):
    """Standard output or error of a program. Whatever happens to it, the program goes on.

    Characters that it cannot encode are shown as \\x.., and when its reader or terminal has gone, what is
    printed is dropped.
    """

    def __init__(self, stream: io.TextIOWrapper):
        options = dict(line_buffering=stream.line_buffering, write_through=stream.write_through)
        super().__init__(stream.buffer, stream.encoding, errors="backslashreplace", **options)

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def report_exception(kind: type, error: BaseException, traceback) -> None:
    """Print a traceback, but for Ctrl-C one line. For sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        print("\nstopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


@contextmanager
def exit_on_mistake(program: str):
    """Turn these errors into one line on stderr and exit code 2; print to a Console.

    Ctrl-C outside a run ends the program, also after this context, without a traceback.
    """
    sys.excepthook = report_exception
    for name in "stdout", "stderr":
        stream = getattr(sys, name)
        if stream and stream is getattr(sys, f"__{name}__"):                     # None: closed
            setattr(sys, name, Console(stream))
    try:
        yield
    except (ValueError, OSError, RunError) as error:
        if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0":         # see torchrun
            print(f"{program}: error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


def check_flags(program: str, parse: Callable[[list[str]], Any]) -> Any:
    """Parse the command line of a program, and return the result: --help and mistakes end it here."""
    with exit_on_mistake(program):
        return parse(sys.argv[1:])


def printable(text: str) -> str:
    """Replace what a terminal acts on by escapes such as \\x1b, so that text of a model cannot control it.

    These are the control characters (C0 and C1) but for newline and tab, and those that set the direction of
    text. Files keep the text as it is.
    """
    return UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def described_flags() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (heading, name, kind, default, help) of every flag. The kind of a choice is its alternatives."""
    heading = ""
    for f in FLAGS.values():
        heading, choices = HEADINGS.get(f.name, heading), get_args(f.type)
        is_list = f.default_factory is not dataclasses.MISSING
        default = " ".join(f.default_factory()) if is_list else f.default
        kind = f"{choices[0].__name__} ..." if is_list else "|".join(filter(None, choices)) or f.type.__name__
        default = str(default).lower() if isinstance(default, bool) else str(default)
        yield heading, f.name, kind, default, f.metadata["help"]


def parse_bool(text: str) -> bool:
    """Return the value of a word such as true or no."""
    if text.lower() not in TRUE + FALSE:
        raise argparse.ArgumentTypeError(f"invalid bool value: {text!r} (choose from true, false)")
    return text.lower() in TRUE


def add_flag(parser, name: str, kind: str, help: str, **options) -> None:
    """Add a flag of the configuration to a parser or a group of one."""
    type_of_value = FLAGS[name].type
    choices = get_args(type_of_value)
    if type_of_value is bool:
        options |= {"type": parse_bool, "nargs": "?", "const": True}
    elif get_origin(type_of_value) is list:
        options |= {"type": choices[0], "nargs": "+"}
    else:
        options |= {"type": str if choices else type_of_value}
    parser.add_argument(f"--{name}", metavar=kind.removesuffix(" ..."), help=help, **options)


def add_flags_of_config(parser: argparse.ArgumentParser, **defaults) -> None:
    """Add flags of the configuration to another program's parser, with their defaults there."""
    for _, name, kind, _, help in described_flags():
        if name in defaults:
            help += "" if defaults[name] in ("", []) else " [%(default)s]"
            add_flag(parser, name, kind, help, default=defaults[name])


def section_of(args: argparse.Namespace, section: type, **others):
    """Return a section of the configuration from the flags that a program shares with it, and others."""
    shared = {f.name for f in dataclasses.fields(section)} & vars(args).keys()
    return section(**{name: getattr(args, name) for name in shared} | others)


# ---- train.py ----------------------------------------------------------------------------------------------


def build_parser(show_all: bool) -> OneLineParser:
    """Return the parser of train.py, with a flag for each field of the configuration.

    show_all  the help shows all flags, not only those in COMMON
    """
    parser = OneLineParser(
        prog="train.py", usage="train.py [settings.json] [--flag value ...]", description=DESCRIPTION,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32),
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--help_all", action="help", help=f"show all {len(FLAGS)} flags")
    for heading, rows in groupby(described_flags(), key=itemgetter(0)):
        group = parser.add_argument_group(heading)
        for _, name, kind, default, help in rows:
            text = f"{help} [{default}]".replace("%", "%%").removesuffix(" []")
            add_flag(group, name, kind, text if show_all or name in COMMON else argparse.SUPPRESS)
            if kind == "bool":
                group.add_argument(f"--no_{name}", dest=name, action="store_false", help=argparse.SUPPRESS)
    # Of earlier versions; --engine plain takes its place.
    parser.add_argument("--shared_prompt", choices=["auto", "never"], help=argparse.SUPPRESS)
    return parser


def run_train() -> None:
    """Run train.py as a program, for the installed command plain-grpo."""
    runpy.run_module("train", run_name="__main__", alter_sys=True)


def parse_config(argv: list[str]) -> Config:
    """Return the configuration of a command line. Raises ValueError, one line."""
    is_file = argv and not argv[0].startswith("-") and "=" not in Path(argv[0]).name
    settings, words = (read_settings(Path(argv[0])), argv[1:]) if is_file else ({}, argv)
    parser = build_parser(show_all="--help_all" in words)
    flags = vars(parser.parse_all(words, "a file of settings comes before all flags"))
    if is_file and Path(argv[0]).name == "config.json":   # of a run, which another user may have written
        refuse_foreign_code(Path(argv[0]).parent, settings, flags)
    config = Config.of(**without_removed(settings | flags))
    config.grpo.validate_functions()
    return config
