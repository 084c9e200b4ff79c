"""
The owner of a run folder: owner.json in it names the path and the user that it belongs to.

Files of another path or user may come from somebody else: code that their settings name runs only if the user
names it again. This does not protect against somebody who knows both.
"""

import json
import os
from pathlib import Path
from typing import Any

OWNER = "owner.json"


def owner_of(run: Path) -> dict[str, Any]:
    """Return what owner.json of a run folder of this user holds."""
    return {"path": str(run.resolve()), "user": os.getuid()}


def is_own(run: Path) -> bool:
    """Check that owner.json names this path and user."""
    try:
        return json.loads((run / OWNER).read_text(encoding="utf-8")) == owner_of(run)
    except (OSError, ValueError):
        return False


def refuse_foreign_code(run: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise ValueError if settings that were saved by another path or user run code that is not given again.

    saved   settings in config.json of the run;  given  flags and settings that the user names
    """
    if is_own(run):
        return
    names = "reward_functions", "environment", "trust_remote_code"
    code = {name: saved[name] for name in names if name not in given and runs_code(saved.get(name))}
    if code:
        flags = [f"--{name} {' '.join(as_list(value))}" for name, value in code.items()]
        raise ValueError(
            f"{run}/config.json runs code, and {OWNER} does not name this folder and user; if you trust it, "
            f"give again {' '.join(flags)}"
        )


def as_list(value) -> list[str]:
    """Return a setting as the words of its flag."""
    return [str(word) for word in value] if isinstance(value, list) else [str(value).lower()]


def runs_code(value) -> bool:
    """Check for trust_remote_code, or a function from a file: neither built in nor a Python object."""
    names = value if isinstance(value, list) else [value]
    return any(name is True or (":" in str(name) and not str(name).startswith("python:")) for name in names)
