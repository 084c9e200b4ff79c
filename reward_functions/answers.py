"""
Lists in the data, marks around an answer, and fenced blocks, for reward functions; rewards.py says what the
answer of a completion is. A model may print anything, so nothing here raises.
"""

import ast
import re
import textwrap
from contextlib import suppress

from rewards import after_thoughts, is_missing, tagged_answer

TEXT = re.compile(r"\\(?:text\w*|mbox|math[a-z]{2,}|operatorname)\s*\{([^{}]*)\}")
WRAPPED = re.compile(r"(\$\$?|\*{1,3}|`)(.+)\1\.?|\\[([](.+)\\[])]\.?", re.DOTALL)
# A fence has at least three characters. The last block may be unclosed.
BLOCK = re.compile(r"(?<![`~])(`{3,}|~{3,})([^`~\n]*)\n(.*?)(?:\1|\Z)", re.DOTALL)


def as_texts(value) -> list[str]:
    """Return a list, or the text of one, as texts; [] for a missing value, else a list of the only value."""
    if is_missing(value):
        return []
    value = value if not isinstance(value, str) or (listed := as_list(value)) is None else listed
    single = isinstance(value, str | dict) or not hasattr(value, "__iter__")
    return list(map(str, [value] if single else value))


def as_list(text: str) -> list | None:
    """Parse a list in JSON or Python; return None for other texts: as_list("['7']") == ["7"]."""
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(text.strip()) if re.match(r"\s*\[.*\]\s*$", text, re.DOTALL) else None


def unwrap(text: str) -> str:
    """Return an answer without \\text{...}, and without marks of emphasis or dollar signs around all of it.

    unwrap("**$\\text{(C)}$**") == "(C)"
    """
    text = TEXT.sub(r"\1", text)
    while len(text) <= 1000 and (match := WRAPPED.fullmatch(text := text.strip())):
        text = match[match.lastindex]
    return text


def answer_text(text: str) -> str:
    """Return the text that a program or JSON is read from: the tagged answer, or all after the thoughts."""
    text = after_thoughts(text)
    return tagged_answer(text) or text


def fenced_blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language (a pattern) in answer_text, else those without a language."""
    blocks = [(name.strip(), textwrap.dedent(code)) for _, name, code in BLOCK.findall(answer_text(text))]
    named = [code for name, code in blocks if re.match(language, name, re.IGNORECASE)]
    return named or [code for name, code in blocks if not name]
