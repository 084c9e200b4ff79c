"""
Writes docs/configuration.md from the dataclasses in config.py. A test compares the two.

    python docs/make_configuration.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runs.command_line import described_flags  # noqa: E402
from config import PROFILES  # noqa: E402

HEAD = """\
# Every flag

Written by `python docs/make_configuration.py` from [config.py](../config.py), a line for each flag; `python train.py --help_all`
shows the same, `--help` the flags that most runs need. A setting is taken from the last of these that has it: defaults,
profile, settings file, flags.

    python train.py --use_grpo --profile balanced --seed 1

- A settings file is the first argument, `python train.py settings.json --seed 1`. It is JSON with the same names, in
  sections or not: the `config.json` of a run is one.
- `true|false`: `--gradient_checkpointing` alone means true. A flag that is true by default is switched off by
  `--no_use_kl_penalty` or `--use_kl_penalty false`.
- `str ...` and `float ...`: several words, such as `--reward_weights 1 0.2`.
- Incompatible settings are rejected with the reason, before anything is loaded.
"""

PROFILES_HEAD = """
## Profiles

`--profile NAME` replaces the defaults by these values; flags replace both. Without a profile and without `--model_path`, the
profile is `demo` with `--use_grpo`, and `demo_supervised` otherwise. An empty cell is the default.

The three profiles of the built-in model fit every batch size: with another `--batch_size` b than their own, B, numbers of steps
(`cold_start_steps`, `eval_steps`, `save_steps`) are multiplied by B / b, and learning rates by the square root of b / B if that is
below 1.
"""


def cell(text: str) -> str:
    """Text in a table: its bars are no borders, and <time> is no tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def page() -> str:
    """docs/configuration.md."""
    lines, last, defaults = [HEAD], "", {}
    for heading, name, kind, default, help in described_flags():
        if heading != last:
            lines += [f"\n## {heading}\n", "| flag | kind | default | what it does |", "|---|---|---|---|"]
        kind, last, defaults[name] = "true|false" if kind == "bool" else kind, heading, default
        shown = f"`{default}`" if default else ""
        lines.append(f"| `--{name}` | {cell(kind)} | {shown} | {cell(help)} |")
    lines += [PROFILES_HEAD, f"| flag | default | {' | '.join(PROFILES)} |", "|---" * (len(PROFILES) + 2) + "|"]
    for name, default in defaults.items():
        values = [as_text(profile[name]) if name in profile else "" for profile in PROFILES.values()]
        if any(values):
            lines.append(f"| `--{name}` | {default} | {' | '.join(values)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def as_text(value) -> str:
    """A setting as it would be typed."""
    return " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    (ROOT / "docs/configuration.md").write_text(page())
