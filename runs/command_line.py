"""
The parser of train.py, infer.py and the reward linter; the flags, settings files and profiles of train.py.

A mistake is a ValueError of one line. Neither torch nor transformers is imported here or in config.py, as
they take seconds to load: help and mistakes are printed before.
"""

import argparse
import dataclasses
import difflib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from config import PROFILES, Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig

SECTIONS = (ModelConfig, DataConfig, GRPOConfig, TrainingConfig)
FIELDS = [f for section in SECTIONS for f in dataclasses.fields(section)]
USAGE = """\
Train a language model with GRPO or supervised fine-tuning.

    python train.py [settings.json] [--flag value ...]

Later sources override earlier ones: defaults, profile, settings.json, flags. A settings.json holds flags by
name; the config.json of a run is one. Mistakes are reported in one line before anything is loaded."""
HEADINGS = {                    # of --help and docs/configuration.md: first flag under a heading -> heading
    "model_path": "Model", "dataset": "Data", "num_completions_per_prompt": "Sampling",
    "environment": "Conversations", "reward_functions": "Rewards", "normalize_advantages": "Advantages",
    "loss_type": "Loss", "use_value_head": "Value head", "ppo_epochs": "Updates on a rollout",
    "use_kl_penalty": "KL to a reference", "use_grpo": "The run", "num_epochs": "Length",
    "learning_rate": "Optimiser", "max_tokens_per_forward": "Memory and processes",
    "eval_steps": "Measured and written",
}
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


# ---- shared by train.py, infer.py and the reward linter ----------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Raise ValueError with one line for a mistake, and suggest the nearest flag for an unknown one."""

    def error(self, message: str):
        raise ValueError(message)

    def parse_all(self, argv: list[str], file_hint: str = "see --help") -> argparse.Namespace:
        """Parse the flags and reject unknown words. file_hint: what to do about the name of a .json file."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            near = difflib.get_close_matches(unknown[0], [f"--{name}" for name in vars(args)], n=1)
            hint = file_hint if unknown[0].endswith(".json") else "see --help"
            raise ValueError(f"{unknown[0]}: unknown flag; " + (f"did you mean {near[0]}?" if near else hint))
        return args


@contextmanager
def exit_on_mistake(program: str):
    """Turn a ValueError into one line on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK") == "0":         # see torchrun
            print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(2)


# ---- train.py ----------------------------------------------------------------------------------------------


def described_flags() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (heading, name, kind, default, help) of every flag. The kind of a choice is its alternatives."""
    heading = ""
    for f in FIELDS:
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


class TrainParser(OneLineParser):
    """Parse a flag for each field of the configuration, and print help under headings."""

    def __init__(self):
        super().__init__(prog="train.py", allow_abbrev=False)
        for f in FIELDS:
            flags, choices = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"]), get_args(f.type)
            if f.type is bool:
                self.add_argument(*flags, type=parse_bool, nargs="?", const=True, default=f.default)
                if f.default:                             # switched off by --no_use_kl_penalty as well
                    negated = [f"--no_{f.name}", f"--no-{f.name.replace('_', '-')}"]
                    self.add_argument(*negated, dest=f.name, action="store_false", default=True)
            elif f.default_factory is not dataclasses.MISSING:
                self.add_argument(*flags, type=choices[0], nargs="+", default=f.default_factory())
            else:
                kind = str if choices else f.type
                self.add_argument(*flags, type=kind, choices=choices or None, default=f.default)

    def format_help(self) -> str:
        lines, last, width = [USAGE], "", min(128, shutil.get_terminal_size().columns)
        for heading, name, kind, default, help in described_flags():
            lines += ["", heading] if heading != last else []
            flag, last = f"  --{name} {kind}", heading
            lines += [flag] if len(flag) > 38 else []
            first = "" if len(flag) > 38 else flag
            text = help + (f" [{default}]" if default else "")
            lines += textwrap.wrap(text, width, initial_indent=first.ljust(40), subsequent_indent=" " * 40)
        return "\n".join(lines) + "\n"


def parse_config(argv: list[str]) -> Config:
    """Return the configuration of a command line. Raises ValueError, one line."""
    words = flags_from_file(argv[0]) + argv[1:] if argv and not argv[0].startswith("-") else list(argv)
    known = TrainParser().parse_known_args(words)[0]
    run = Path(known.output_dir) if known.resume and known.output_dir else None
    run = run or (Path(known.replay).parent if known.replay else None)
    if known.resume and run and not (run / "config.json").exists():
        raise ValueError(f"--output_dir={run}: there is no run in it to resume")
    if run and (known.resume or (run / "config.json").exists()):     # flags override the run's settings
        without = ["model_path", "output_dir"] if known.replay else []    # a checkpoint's or flag's
        return parse_flags(flags_from_file(str(run / "config.json"), without) + words)
    profile = known.profile
    if profile not in PROFILES:                           # these flags must be compatible without a profile's
        without_profile = parse_flags(words)
        if not without_profile.model.model_path:
            profile = "demo" if without_profile.training.use_grpo else "demo_supervised"
    return parse_flags(as_flags(PROFILES.get(profile, {}) | {"profile": profile}) + words)


def parse_flags(argv: list[str]) -> Config:
    """Return the configuration of flags alone, without a settings file, profile or run."""
    args = vars(TrainParser().parse_all(argv, "a file of settings comes before all flags"))
    values = ({f.name: args[f.name] for f in dataclasses.fields(section)} for section in SECTIONS)
    return Config(*(section(**fields) for section, fields in zip(SECTIONS, values, strict=True)))


def flags_from_file(path: str, without: Sequence[str] = ()) -> list[str]:
    """Read a JSON file of settings as a list of flags. They may be in sections, as in config.json, or not."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file of settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f'{path}: must hold an object such as {{"use_grpo": true}}')
    flat = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return as_flags({name: value for name, value in flat.items() if name not in without})


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return {"batch_size": 4} as ["--batch_size", "4"]. Empty lists are left out: they are the default."""
    argv = []
    for name, value in settings.items():
        if value != []:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv
