"""
The owner of a run folder: owner.json in it names the path and the user that it belongs to.

Files of another path or user are not trusted: code that their settings name runs only if the user
names it again. This does not protect against files that were made for this path and user.
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
    flags = []
    for name in "reward_functions", "environment", "trust_remote_code":
        words = saved.get(name)
        words = words if isinstance(words, list) else [words]
        if name not in given and any(map(runs_code, words)):
            flags.append(f"--{name} {' '.join(map(str, words))}")
    if flags:
        raise ValueError(
            f"{run}/config.json runs code, and {OWNER} does not name this folder and user; if you trust it, "
            f"give again {' '.join(flags)}"
        )


def runs_code(value) -> bool:
    """Check for trust_remote_code, or a function from a file: neither built in nor a Python object."""
    return value is True or (":" in str(value) and not str(value).startswith("python:"))
