"""
Helpers of this package's reward functions: lists in the data, \\boxed{...} and fenced blocks. Helpers for
tagged answers are in rewards.py. A model may print anything, so nothing here raises.
"""

import ast
import re
import textwrap
from contextlib import suppress

from rewards import extract_answer, is_missing

LONGEST_ANSWER = 1000           # in characters; longer ones are compared as text
BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])(?:\[[^][]*\])*\s*")
UNBRACED = re.compile(r"-?\$?\d(?:[\d,./]*\d)?|[A-Za-z]\b|\\[A-Za-z]+[^\s$]*")         # "\boxed 4"
TEXT = re.compile(r"\\(?:text\w*|mbox|math[a-z]{2,}|operatorname)\s*\{([^{}]*)\}")
WRAPPED = re.compile(r"(\$\$?|\*{1,3}|`)(.+)\1\.?|\\[([](.+)\\[])]\.?", re.DOTALL)


def as_texts(value) -> list[str]:
    """Return a list in the data as texts. A single text or number becomes a list; a missing value, []."""
    single = isinstance(value, str | dict) or not hasattr(value, "__iter__")
    return list(map(str, [value] if single else value)) if not is_missing(value) else []


def as_list(text: str) -> list | None:
    """Parse a list in JSON or Python; return None for other texts: as_list("['7']") == ["7"]."""
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(text.strip()) if re.match(r"\s*\[.*\]\s*$", text, re.DOTALL) else None


def extract_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, \\fbox{...} or \\framebox{...}, or None.

    extract_boxed("so \\boxed 4$") == extract_boxed("\\fbox{4}") == "4"
    """
    *before, last = BOX.split(text)
    if before and (unbraced := UNBRACED.match(last)):
        return unbraced[0]
    depth = 0
    for end, character in enumerate(last if before and last[:1] == "{" else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return last[1:end].strip() or None
    return None


def final_answer(text: str) -> str | None:
    """Return the tagged answer, without a box; in a text without tags, the content of the only box."""
    tagged = extract_answer(text)
    answer = tagged if "<answer>" in text else text
    return extract_boxed(answer) if answer and len(BOX.findall(answer)) == 1 else tagged


def unwrap(text: str) -> str:
    """Return an answer without \\text{...}, and without marks of emphasis or dollar signs around all of it.

    unwrap("**$\\text{(C)}$**") == "(C)"
    """
    text = TEXT.sub(r"\1", text)
    while len(text) <= LONGEST_ANSWER and (match := WRAPPED.fullmatch(text := text.strip())):
        text = match[match.lastindex]
    return text


def extract_block(text: str, language: str) -> str:
    """Return the last fenced block of a language, else the last one without a language. Search the tagged
    answer if there is one, else the whole text, and return all of it if it has no block. language: a pattern.

    extract_block("So:\\n```python\\nx = 1\\n```", "python") == "x = 1\\n"
    """
    text = extract_answer(text) or text
    blocks = re.findall(r"```([^`\n]*)\n(.*?)```", text, re.DOTALL)
    named, bare = (
        [code for name, code in blocks if re.fullmatch(wanted, name.strip(), re.IGNORECASE)]
        for wanted in (language, ""))
    return textwrap.dedent((named or bare or [text])[-1])
