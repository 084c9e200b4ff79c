"""
The command line of train.py.

    python train.py [settings.json] [--flag value ...]

Later wins: defaults, profile, settings.json, flags. A settings.json holds flags under the same names; the config.json of
a run is one. User mistakes end here, in one line, before anything is loaded.
"""

import argparse
import dataclasses
import difflib
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from config import PROFILES, Config, DataConfig, GRPOConfig, ModelConfig, TrainingConfig

SECTIONS = (ModelConfig, DataConfig, GRPOConfig, TrainingConfig)
HEADINGS = {                    # of --help and docs/configuration.md, each from this flag to the next one that has one
    "model_path": "Model", "dataset": "Data", "num_completions_per_prompt": "Sampling", "environment": "Conversations",
    "reward_functions": "Rewards", "normalize_advantages": "Advantages", "loss_type": "Loss", "use_value_head": "Value head",
    "ppo_epochs": "Updates on a rollout", "use_kl_penalty": "KL to a reference", "use_grpo": "The run", "num_epochs": "Length",
    "learning_rate": "Optimiser", "max_tokens_per_forward": "Memory and processes", "eval_steps": "Measured and written",
}


def described_flags() -> Iterator[tuple[str, str, str, str, str]]:
    """(heading, name, kind, default, help) of every flag, in order; of a choice, the kind is what can be chosen."""
    heading = ""
    for f in (f for section in SECTIONS for f in dataclasses.fields(section)):
        heading, chosen = HEADINGS.get(f.name, heading), get_args(f.type)
        several = f.default_factory is not dataclasses.MISSING
        default = " ".join(f.default_factory()) if several else f.default
        kind = f"{chosen[0].__name__} ..." if several else "|".join(filter(None, chosen)) or f.type.__name__
        yield heading, f.name, kind, str(default).lower() if isinstance(default, bool) else str(default), f.metadata["help"]


class OneLineParser(HfArgumentParser):
    """transformers' parser of dataclasses, with help under headings and errors of one line."""

    def format_help(self) -> str:
        lines, last, width = [__doc__.strip()], "", min(128, shutil.get_terminal_size().columns)
        for heading, name, kind, default, help in described_flags():
            lines += ["", heading] if heading != last else []
            flag, last = f"  --{name} {kind}", heading
            lines += [flag] if len(flag) > 38 else []
            first = "" if len(flag) > 38 else flag
            text = help + (f" [{default}]" if default else "")
            lines += textwrap.wrap(text, width, initial_indent=first.ljust(40), subsequent_indent=" " * 40)
        return "\n".join(lines) + "\n"

    def error(self, message: str):
        raise ValueError(message)


def parse_config(argv: list[str]) -> Config:
    """Command line -> Config. Raises ValueError, one line."""
    given = flags_of_file(argv[0]) + argv[1:] if argv and not argv[0].startswith("-") else list(argv)
    where = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    where.add_argument("--resume", nargs="?", const="true", default="false", type=string_to_bool)
    where.add_argument("--output_dir", default="")
    where.add_argument("--replay", default="")
    where.add_argument("--profile", default="")
    known = where.parse_known_args(given)[0]
    run = Path(known.output_dir) if known.resume and known.output_dir else Path(known.replay).parent if known.replay else None
    if known.resume and run and not (run / "config.json").exists():
        raise ValueError(f"--output_dir={run}: there is no run in it to resume")
    if run and (known.resume or (run / "config.json").exists()):                 # a run's own settings lie below the flags
        without = ["model_path", "output_dir"] if known.replay else []           # its weights are a checkpoint's, or a flag's
        return parse_flags(flags_of_file(str(run / "config.json"), without) + given)
    profile = known.profile
    if profile not in PROFILES:                           # settings that go with a profile need not make sense without it
        first = parse_flags(given)
        if not first.model.model_path:
            profile = "demo" if first.training.use_grpo else "demo_supervised"
    return parse_flags(as_flags(PROFILES.get(profile, {}) | {"profile": profile}) + given)


def parse_flags(argv: list[str]) -> Config:
    """Flags alone -> Config."""
    parser = OneLineParser(SECTIONS, prog="train.py", allow_abbrev=False)
    *sections, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        names = [f"--{f.name}" for section in SECTIONS for f in dataclasses.fields(section)]
        near = difflib.get_close_matches(unknown[0], names, n=1)
        fix = "a file of settings comes before all flags" if unknown[0].endswith(".json") else "see --help"
        raise ValueError(f"{unknown[0]}: unknown flag; " + (f"did you mean {near[0]}?" if near else fix))
    return Config(*sections)


def flags_of_file(path: str, without: Sequence[str] = ()) -> list[str]:
    """A JSON file of settings as if they had been typed; sections as in config.json may be there or not."""
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
    """{"batch_size": 4} -> ["--batch_size", "4"]. Empty lists stand for the default."""
    argv = []
    for name, value in settings.items():
        if value != []:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return argv
