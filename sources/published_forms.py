"""
Forms in which data sets are published: what belongs to a prompt, the turns of a conversation, and the answer
at the end of a solution.
"""

import re
from collections.abc import Mapping

from data import COLUMNS, cell, demonstration, find_columns, normalize_example
from reward_functions.answers import BOX, extract_boxed
from reward_functions.formats import LETTERS

STATED = re.compile(r"\banswer(?: is:?|:)[ *]*(\S+?(?: \S+?){0,2})[.*]*\s*\Z", re.IGNORECASE)   # "Answer: 16"
ANSWER_FIRST = re.compile(rf"[$ *]*({BOX.pattern}|(the )?(final )?answer\b)", re.IGNORECASE)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def as_published_example(row: dict, where: str, columns: dict[str, str]) -> dict:
    """Return a row as an example, as data.as_example does, with its prompt and its answer in these forms.

    columns  the prompt may also be a text with columns in braces, and is then complete
    """
    row, template = dict(row) if isinstance(row, Mapping) else {"prompt": row}, columns.get("prompt", "")
    named = set(re.findall(r"\{(\w+)\}", template))
    is_template = named and named <= row.keys()
    found = find_columns(row, where, columns | {"prompt": ""} if is_template else columns)
    plain = row | {name: cell(row, column) for name, column in found.items()}
    if is_template:
        cells = {name: "" if row[name] is None else str(row[name]) for name in named}
        plain["prompt"] = re.sub(r"\{(\w+)\}", lambda name: cells[name[1]], template)
    elif "prompt" in found:
        plain["prompt"] = complete_prompt(found["prompt"], row)
    else:
        names = f"{', '.join(COLUMNS['prompt'])}, or --prompt_column, a name or a text such as"
        existing, braces = ", ".join(row) or "none", "} ... {".join(row)
        raise ValueError(f"{where} has columns {existing}; it needs one of {names} '... {{{braces}}}'")
    example = normalize_example(plain, where)
    if "nums" in row:
        example.setdefault("numbers", row["nums"])        # Countdown, for the reward function of that name
    if isinstance(example.get("answer"), str):
        example["answer"], reasoning = split_answer(plain["answer"], row)
        if reasoning and not example.get("completion"):
            example["completion"] = demonstration(reasoning, example["answer"])
    return example


def complete_prompt(column: str, row: dict):
    """Return a prompt with what belongs to it: after an `instruction` Alpaca's `input` or Dolly's `context`,
    after a question the texts in `choices` (MMLU) as lettered lines, unless they are in it with letters. The
    turns of ShareGPT (from, value) become chat messages.
    """
    prompt = cell(row, column)
    if isinstance(prompt, list):
        turns = [
            {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in prompt
        ]
        *before, last = turns or [None]
        asks = isinstance(last, dict) and last.get("role") == "user" and isinstance(last.get("content"), str)
        return [*before, last | {"content": with_choices(last["content"], row)}] if asks else turns
    if not isinstance(prompt, str):
        return prompt
    for name in ("input", "context") if column == "instruction" else ():
        prompt += f"\n\n{row[name]}" if isinstance(row.get(name), str) and row[name].strip() else ""
    return with_choices(prompt, row)


def with_choices(question: str, row: dict) -> str:
    """Return a question followed by its lettered choices, if they are not in it."""
    options = list(zip(LETTERS, text_choices(row), strict=False))
    if all(re.search(rf"\b{letter}\W+{re.escape(text)}", question) for letter, text in options):
        return question
    return question + "".join(f"\n{letter}. {text}" for letter, text in options)


def text_choices(row: dict) -> list[str]:
    """Return the column `choices` if it is a list of texts, at most as many as letters; or []."""
    choices = row.get("choices")
    are_texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    return choices if are_texts and len(choices) <= len(LETTERS) else []


def split_answer(answer, row: dict) -> tuple:
    """Return an answer, and the reasoning before it or "".

    A solution is split whose last line is `#### 72` (GSM8K), which has a \\boxed{...} (MATH), of which the
    last one counts, or which ends with "The answer is: 72." and at most three words in place of 72. An index
    into the column `choices` (MMLU) becomes a letter.
    """
    if type(answer) is int and 0 <= answer < len(text_choices(row)):
        return LETTERS[answer], ""
    text = str(answer)
    if end := re.search(r"(?:^|\n)#### *([-+]?[$€£]?[\d,]*\.?\d+(?: *%)?)\s*\Z", text):
        return end[1].replace(",", ""), re.sub(r"<<.*?>>", "", text[: end.start()]).strip()      # annotations
    stated = STATED.search(text)
    found = extract_boxed(text) or (stated and stated[1])
    return found or text, text if found and not ANSWER_FIRST.match(text) else ""
