"""
Names of settings in other systems: they are not accepted as flags, since their meaning often differs, but an
error names the flag here and the difference. The table of names is the one in docs/coming-from.md. The same
for flags of earlier versions; in saved settings these are accepted with the value that holds now.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import config

PAGE = Path(__file__).parents[1] / "docs/coming-from.md"

# Flags of earlier versions: the value that holds now, and what to write for another one.
REMOVED: dict[str, tuple[Any, str]] = {
    "advantage_epsilon": (1e-8, "it is always 1e-8"),
    "bad_lines": ("error", "correct the line that the error names"),
    "dual_clip": (0.0, "--loss_options dual_clip=3"),
    "engine_timeout": (600.0, "there is no limit"),
    "kl_horizon": (10_000, "it is always 10000 completions"),
    "limit": (0, "--train_split train[:1000] for a part of a split, or a shorter file"),
    "log_groups": (0, "the first group is printed every --log_rollouts_every steps"),
    "max_skipped_steps": (3, "it is always 3"),
    "overlong_buffer": (0, "it is always a fifth of --generation_max_length"),
    "prefer_mixed": (False, "--dynamic_sampling 3 replaces groups of equal rewards"),
    "reward_clips": ([], "--reward_clip limits the total; a function of your own can limit its points"),
    "shared_prompt": ("auto", "--engine plain"),
    "value_clip": (0.2, "it is always 0.2 points"),
}


def without_removed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the flags of earlier versions. Raises ValueError if a value no longer holds."""
    settings = dict(settings)
    if settings.pop("shared_prompt", "auto") == "never" and settings.get("engine") != "vllm":
        settings["engine"] = "plain"
    if dual_clip := settings.pop("dual_clip", 0.0):
        settings["loss_options"] = [*settings.get("loss_options", []), f"dual_clip={dual_clip}"]
    for name in settings.keys() & REMOVED.keys():
        holds, words = REMOVED[name]
        if (value := settings.pop(name)) != holds:
            raise ValueError(f"--{name}={value!s:.60}: is no flag any more; here {words}")
    return settings


@cache
def foreign_names() -> dict[str, str]:
    """Return {name: what to write here} of REMOVED and, where it is installed, of the table of the page."""
    table = PAGE.read_text(encoding="utf-8").partition("\n## Names\n")[2] if PAGE.exists() else ""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    foreign = {name: here for names, _, here in rows[1:] for name in names.split(", ")}
    return foreign | {name: words for name, (_, words) in REMOVED.items()}


def explain_unknown(typed: Iterable[str], known: Iterable[str]) -> str:
    """Return a sentence about names that are no flags: the flag for the same in a system that has the name.

    typed  as on a command line or in a file: num_generations, --beta, actor_rollout_ref.rollout.n=8
    known  the names of flags
    """
    known, answers, foreign, table = set(known), [], False, foreign_names()
    for word in typed:
        name = word.lstrip("-").partition("=")[0]
        suffixes = [name[match.end() :] for match in re.finditer(r"^|\.", name)]     # a.b.c, b.c, c
        found = next((suffix for suffix in suffixes if suffix in table), None)
        near = difflib.get_close_matches(suffixes[-1], [*known, *table], n=1)
        if found is None and near and near[0] not in known:
            misspelt = difflib.get_close_matches(suffixes[-1], table, n=1, cutoff=0.85)
            found = next(iter(misspelt), None)            # a misspelt name of another system
        here = table.get(found, "")
        if here and (not (named := re.findall(r"--(\w+)", here)) or known & set(named)):
            answers.append(f"{word}: unknown flag; here {here}")
            foreign = foreign or found not in REMOVED
        else:
            hint = f"did you mean --{near[0]}?" if near and near[0] in known else "see --help"
            answers.append(f"{word}: unknown flag; {hint}")
    return " | ".join(answers) + " (more in docs/coming-from.md)" * foreign


config.explain_unknown = explain_unknown                  # in the errors of Python's Config(...) too
