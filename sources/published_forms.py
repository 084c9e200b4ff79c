"""
Forms in which data sets are published: what belongs to a prompt, the turns of a conversation, and the answer
at the end of a solution. data.py applies them to the columns that it has chosen.
"""

import re

from reward_functions.answers import extract_boxed
from reward_functions.formats import LETTERS

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def complete_prompt(column: str, row: dict):
    """Return a prompt with what belongs to it: after an `instruction` Alpaca's `input` or Dolly's `context`,
    after a question the texts in `choices` (MMLU) as lettered lines, unless they are in it with letters. The
    turns of ShareGPT (from, value) become chat messages.
    """
    prompt = row[column]
    if isinstance(prompt, list):
        return [
            {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in prompt
        ]
    if not isinstance(prompt, str):
        return prompt
    for name in ("input", "context") if column == "instruction" else ():
        prompt += f"\n\n{row[name]}" if isinstance(row.get(name), str) and row[name].strip() else ""
    options = list(zip(LETTERS, text_choices(row), strict=False))
    if all(re.search(rf"\b{letter}\W+{re.escape(text)}", prompt) for letter, text in options):
        return prompt
    return prompt + "".join(f"\n{letter}. {text}" for letter, text in options)


def text_choices(row: dict) -> list[str]:
    """Return the column `choices` if it is a list of texts, else []."""
    choices = row.get("choices")
    return choices if isinstance(choices, list) and all(isinstance(text, str) for text in choices) else []


def split_answer(answer, row: dict) -> tuple:
    """Return an answer, and the reasoning before it or "".

    A solution is split whose last line is `#### 72` (GSM8K) or which has a \\boxed{...} (MATH), of which the
    last one counts. An index into the column `choices` (MMLU) becomes a letter. Lists and dicts are kept.
    """
    if isinstance(answer, list | dict | None):
        return answer, ""
    if type(answer) is int and 0 <= answer < len(text_choices(row)):
        return LETTERS[answer], ""
    text = str(answer)
    if end := re.search(r"(?:^|\n)#### *([-+]?[$€£]?[\d,]*\.?\d+(?: *%)?)\s*\Z", text):
        return end[1].replace(",", ""), re.sub(r"<<.*?>>", "", text[: end.start()]).strip()      # annotations
    boxed = extract_boxed(text)
    is_solution = boxed and not text.strip("$ ").startswith("\\boxed")
    return boxed or text, text if is_solution else ""
