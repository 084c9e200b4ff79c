"""
Helpers of the reward functions here: lists in the data, \\boxed{...} and fenced blocks.
Those of tagged answers are in rewards.py. A model may print anything, so nothing here raises.
"""

import re
import textwrap

from rewards import extract_answer, is_missing


def as_texts(value) -> list[str]:
    """Return a list of the data as texts: [] if it is missing; a single text or number is a list of one."""
    single = isinstance(value, str | dict) or not hasattr(value, "__iter__")
    return list(map(str, [value] if single else value)) if not is_missing(value) else []


def extract_boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, None without one."""
    *before, last = re.split(r"\\boxed\s*\{", text)
    depth = 1
    for end, character in enumerate(last if before else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return last[:end].strip() or None
    return None


def extract_block(text: str, language: str) -> str:
    """Return the last fenced block of a language, else the last one without a language, in the tagged answer
    if there is one, else in the whole text; without such a block, all of that. language: a pattern.

    extract_block("So:\\n```python\\nx = 1\\n```", "python") == "x = 1\\n"
    """
    text = extract_answer(text) or text
    blocks = re.findall(r"```([^`\n]*)\n(.*?)```", text, re.DOTALL)
    named, bare = (
        [code for name, code in blocks if re.fullmatch(wanted, name.strip(), re.IGNORECASE)]
        for wanted in (language, "")
    )
    return textwrap.dedent((named or bare or [text])[-1])
