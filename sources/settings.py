"""Read settings by name, from JSON files and from a run that is resumed."""

import json
import os
import re
from pathlib import Path
from typing import Any

from config import DEFAULTS, Config, expand_home, profile_values
from sources import GYM


def read_settings(path: Path, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file of settings as {name: value}, without sections. Raises ValueError with one line.

    given  flags that override the file. Code that the config.json of another user names must be in them
    """
    try:
        settings = json.loads(path.read_bytes())
        json.dumps(settings, ensure_ascii=False).encode()            # raises ValueError for half of a pair
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file of settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f'{path}: must hold an object such as {{"use_grpo": true}}')
    flat = {}
    for name, value in settings.items():
        is_section = isinstance(value, dict) and name not in ("chat_template_kwargs", "loss_options")
        flat |= value if is_section else {name: value}
    if given is not None and path.name == "config.json" and path.stat().st_uid != os.getuid():
        refuse_foreign_code(path, {name: value for name, value in flat.items() if name not in given})
    return {name: value for name, value in flat.items() if CONSTANT.get(name) != value}


def refuse_foreign_code(path: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError if settings run code. The message has the flags to add."""
    again = []
    for name in "reward_functions", "environment", "trust_remote_code", "dataset", "eval_dataset":
        value = settings.get(name, "")
        words = list(map(str, value if isinstance(value, list) else [value]))
        runs = r".*\.py$" if "dataset" in name else r"(?!python:).*:"
        if value is True or any(re.match(runs, word) for word in words):
            again.append(f"--{name} {' '.join(words)}")
    if again:
        raise ValueError(
            f"{path}: belongs to another user and names code; if you trust it, add {' '.join(again)}")


def complete(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags and the settings that they imply on a command line: of a run, a task, a profile."""
    if task := expand_home(flags.pop("task", "")):
        flags = task_settings(task) | flags
    if flags.get("resume") and flags.get("output_dir"):
        file = Path(flags["output_dir"]) / "config.json"
        if not file.exists():
            raise ValueError(f"--output_dir={file.parent}: there is no run in it to resume")
        return read_settings(file, flags) | flags
    profile = flags.get("profile", "")
    if not profile and not flags.get("model_path"):
        profile = "demo" if flags.get("use_grpo") else "demo_supervised"
    values = profile_values(profile, flags.get("batch_size"))
    if str(flags.get("dataset")).startswith(GYM) and "reward_functions" not in flags:
        from sources.gym_tasks import implied_rewards     # only for these tasks

        values |= implied_rewards(flags["dataset"])
    return values | flags | {"profile": profile}


def task_settings(path: str) -> dict[str, Any]:
    """Return the settings of a task: a Python file with examples(split) and reward(completions, ...).

    Its SETTINGS, {flag: value}, are optional. Raises ValueError with one line.
    """
    from reward_functions.loading import attribute_of_file                       # only for tasks

    settings = attribute_of_file("task", path, "SETTINGS", {})
    if not isinstance(settings, dict):
        raise ValueError(f'--task {path}: SETTINGS must be flags and values such as {{"batch_size": 8}}')
    return {"use_grpo": True, "dataset": path, "reward_functions": [f"{path}:reward"]} | settings


def resumed(config: Config) -> Config:
    """Return the configuration of a run that Python resumes: its own, with values that are not defaults."""
    if not config.training.resume:
        return config
    return Config.of(**complete({n: value for n, value in config.flags.items() if value != DEFAULTS[n]}))


CONSTANT = {"advantage_epsilon": 1e-8, "value_clip": 0.2}      # fixed values of settings in other systems
