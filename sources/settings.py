"""
Settings by name: from JSON files, from the run that is resumed, and from profiles.
"""

import math
import os
from pathlib import Path
from typing import Any

import config
from data import parse_json


def read_settings(path: Path) -> dict[str, Any]:
    """Read a JSON file of settings as {name: value}, without its sections. Raises ValueError, one line."""
    try:
        settings = parse_json(path.read_text(encoding="utf-8-sig"))              # without a byte-order mark
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable JSON file of settings: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f'{path}: must hold an object such as {{"use_grpo": true}}')
    flat = {}
    for name, value in settings.items():
        is_section = isinstance(value, dict) and name not in ("chat_template_kwargs", "loss_options")
        flat |= value if is_section else {name: value}
    return {name: value for name, value in flat.items() if CONSTANT.get(name) != value}


def refuse_foreign_code(file: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError if the settings in a file of another user run code that is not given again.

    Without this, to resume a run in a shared folder would run any file that its config.json names.
    """
    if file.stat().st_uid == os.getuid():
        return
    again = []
    for name in "reward_functions", "environment", "trust_remote_code":
        words = saved.get(name) if isinstance(saved.get(name), list) else [saved.get(name, "")]
        paths = [word for word in map(str, words) if ":" in word and not word.startswith("python:")]
        if name not in given and (paths or words == [True]):
            again.append(f"--{name} {' '.join(map(str, words))}")
    if again:
        raise ValueError(
            f"{file}: is of another user, and names code; if you trust it, give again {' '.join(again)}")


def fill_in(flags: dict[str, Any]) -> dict[str, Any]:
    """Return flags with what they imply: the settings of a run that is resumed, or a profile."""
    run = Path(flags["output_dir"]) if flags.get("resume") and flags.get("output_dir") else None
    if run and not (run / "config.json").exists():
        raise ValueError(f"--output_dir={run}: there is no run in it to resume")
    if run:
        saved = read_settings(run / "config.json")
        refuse_foreign_code(run / "config.json", saved, flags)
        if any(flags.get(name, saved.get(name)) != saved.get(name) for name in ("engine", "loss_type")):
            saved.pop("importance_cap", None)             # its default depends on both
        return saved | flags
    profile = flags.get("profile", "")
    if not profile and not flags.get("model_path"):
        profile = "demo" if flags.get("use_grpo") else "demo_supervised"
    return profile_values(profile, flags.get("batch_size")) | flags | {"profile": profile}


def profile_values(profile: str, batch_size: int | None = None) -> dict[str, Any]:
    """Return the values of a profile, {} if there is none.

    Those of the built-in model are adapted to another batch size than their own: numbers of steps so that
    they count as many examples, learning rates by the square root of the ratio, and never raised.
    """
    if profile not in ("", *PROFILES):
        raise ValueError(f"--profile={profile}: choose one of {', '.join(PROFILES)}")
    values = dict(PROFILES.get(profile, {}))
    if profile in BUILT_IN_MODEL and type(batch_size) is int and batch_size > 0:
        ratio = batch_size / values["batch_size"]
        for name in values.keys() & {"cold_start_steps", "eval_steps", "save_steps"}:
            values[name] = math.ceil(values[name] / ratio)
        for name in values.keys() & {"cold_start_learning_rate", "learning_rate"}:
            values[name] = float(f"{values[name] * math.sqrt(min(1, ratio)):.3g}")
    return values


CONSTANT = {"advantage_epsilon": 1e-8, "value_clip": 0.2}      # settings of other systems that hold here
BUILT_IN_MODEL = "demo", "guess_letter", "demo_supervised"                       # profiles
# Values that replace defaults; flags replace both. Without a model_path the profile is demo, or
# demo_supervised without use_grpo. The last three are ordered from small to large learning rates.
PROFILES: dict[str, dict[str, Any]] = {
    "demo": dict(
        num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0,
        generation_top_k=0, generation_top_p=1.0, use_kl_penalty=False, cold_start_steps=300,
        cold_start_accuracy=0.33, cold_start_learning_rate=1e-3, batch_size=64, num_epochs=1.6,
        learning_rate=4e-4, warmup_ratio=0.1, eval_steps=15, save_steps=100,
    ),
    "guess_letter": dict(
        dataset="guess_letter", environment="guess_letter", max_turns=4, reward_functions=["environment"],
        num_completions_per_prompt=4, generation_max_length=40, generation_temperature=1.0,
        generation_top_k=0, generation_top_p=1.0, use_kl_penalty=False, use_value_head=True,
        cold_start_steps=200, cold_start_learning_rate=2e-3, batch_size=32, num_epochs=3, learning_rate=5e-4,
        warmup_ratio=0.1, eval_steps=40, save_steps=100,
    ),
    "demo_supervised": dict(
        generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0,
        batch_size=32, learning_rate=2e-3, warmup_ratio=0.1, eval_steps=100, save_steps=200,
    ),
    "conservative": dict(
        num_completions_per_prompt=32, batch_size=8, learning_rate=1e-6, max_grad_norm=0.5, warmup_ratio=0.2,
        eval_steps=25,
    ),
    "balanced": dict(
        num_completions_per_prompt=16, batch_size=4, learning_rate=5e-6, max_grad_norm=1.0, warmup_ratio=0.1,
        eval_steps=50,
    ),
    "aggressive": dict(
        num_completions_per_prompt=8, batch_size=2, learning_rate=1e-5, max_grad_norm=2.0, warmup_ratio=0.05,
        eval_steps=100,
    ),
}

config.fill_in = fill_in                                  # in Python's Config(...) too
