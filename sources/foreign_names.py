"""
Names of settings in other systems: they are not accepted as flags, since their meaning often differs, but an
error names the flag here and the difference. The table of names is the one in docs/coming-from.md.
"""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/coming-from.md"


@cache
def foreign_names() -> dict[str, str]:
    """Return {name: what to write here}, the table of the page where it is installed."""
    table = PAGE.read_text(encoding="utf-8").partition("\n## Names\n")[2] if PAGE.exists() else ""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: here for names, _, here in rows[1:] for name in names.split(", ")}


def explain_unknown(typed: Iterable[str], known: Iterable[str]) -> str:
    """Return a sentence about names that are no flags: the flag for the same in a system that has the name.

    typed  as on a command line or in a file: num_generations, --beta, actor_rollout_ref.rollout.n=8
    known  the names of flags
    """
    known, answers, table = set(known), [], foreign_names()
    for word in typed:
        name = word.lstrip("-").partition("=")[0]
        suffixes = [name[match.end() :] for match in re.finditer(r"^|\.", name)]     # a.b.c, b.c, c
        near = difflib.get_close_matches(suffixes[-1], [*known, *table], n=1, cutoff=0.8)        # misspelt
        found = next((suffix for suffix in [*suffixes, *near] if suffix in known | table.keys()), "")
        flags = set(re.findall(r"--(\w+)", table.get(found, "")))
        if found in known:
            answers.append(f"{word}: unknown flag; did you mean --{found}?")
        elif found and (not flags or flags & known):
            answers.append(f"{word}: unknown flag; here {table[found]}")
        else:
            answers.append(f"{word}: unknown flag; see --help")
    more = " (more in docs/coming-from.md)" if any("; here " in answer for answer in answers) else ""
    return " | ".join(answers) + more
