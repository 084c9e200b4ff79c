"""
Convert formats of published data sets: columns that belong to the prompt, turns of conversations, and answers
at the end of a solution.
"""

import ast
import re
from contextlib import suppress

from data import BRACES, as_messages, cell, choose_columns, demonstration
from guards import Row, messages_in_text, read_message
from reward_functions.answers import as_list, unwrap
from reward_functions.formats import LETTERS
from rewards import BOX, as_number, extract_boxed

STATED = re.compile(r"\banswer(?: is:?|:)[ *]*(\S+?(?: \S+?){0,2})[.*]*\s*\Z", re.IGNORECASE)   # "Answer: 16"
AFTER_HASHES = re.compile(r"(?<!#)####(?!#| *\d+ of \d) *([^\n]*[^\s.])\.?\s*\Z")
COUNTED = re.compile(                     # "72 apples", not "72 million", "7 pm", "3 and a half" or "7 of 9"
    r"([-+]?[$€£]?[\d.,]*\d(?: *%)?)(?: *[$€£]| +(?!([mbtr]+illion|hundred|thousand|dozen|lakh|crore|and|or"
    r"|to|[ap]m|noon|pi|mod|BCE?|AD)\b)([A-Za-z]{2}|[mghsl]\b)[^\d]*)?")
ANSWER_FIRST = re.compile(rf"[$ *]*({BOX.pattern}|(the )?(final )?answer\b)", re.IGNORECASE)
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def as_published(row, columns: dict[str, str]) -> dict:
    """Return a row like data.choose_columns, with its prompt and its answer converted from these formats.

    A prompt made from text with columns in braces is already complete.
    """
    row = choose_columns(row, columns)
    given, answer = dict(row), row.get("answer")
    choices = without_letters(text_choices(given))
    row["prompt"] = messages_in_text(row["prompt"])
    if not BRACES.search(columns.get("prompt", "")):
        row["prompt"] = complete_prompt(row["prompt"], row, choices)
    for name, column in ("numbers", "nums"), ("tests", "test_list"):             # Countdown, MBPP
        if column in row:                                 # for the reward function that needs this name
            row = row | {name: row.get(name, row.get(column))}
    if isinstance(answer, str | int | float):
        typed = str not in (type(given.get("choices")), type(given.get("options")))  # a CSV file has no types
        row["answer"], reasoning = split_answer(answer, choices, typed)
        demonstrated = isinstance(row["prompt"], list) and row["prompt"][-1]["role"] == "assistant"
        if reasoning and not row.get("completion") and not demonstrated:
            row["completion"] = demonstration(reasoning, row["answer"])
    if choices:
        row.read |= {"choices", "options"}
        row["choices"] = list(choices.values())
    return row


def complete_prompt(prompt, row: Row, choices: dict[str, str]):
    """Complete a prompt from other columns: put a `system` message before it, Alpaca's `input` or Dolly's
    `context` after an `instruction`, and lettered choices after a question that does not contain them. The
    turns of ShareGPT (from, value) become chat messages.
    """
    if not isinstance(prompt, str | list):
        return prompt
    for name in ("input", "context") if prompt == dict(row).get("instruction") else ():
        prompt += f"\n\n{text}" if (text := text_in(row, name)) else ""
    if isinstance(prompt, str):
        prompt = with_choices(prompt, choices)
    else:
        turns = [
            {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
            if isinstance(turn, dict) and {"from", "value"} <= turn.keys() else turn for turn in prompt
        ]
        *before, last = map(read_message, turns or [None])
        if last["role"] == "user" and last["content"]:
            last = last | {"content": with_choices(last["content"], choices)}
        prompt = [*before, last]
    if isinstance(prompt, list) and prompt[0]["role"] == "system":
        return prompt
    system = text_in(row, "system")
    return [{"role": "system", "content": system}, *as_messages(prompt)] if system else prompt


def text_in(row: Row, column: str) -> str:
    """Return the text in a column, "" if it is blank or not text, which does not count as read."""
    is_text = isinstance(dict.get(row, column), str) and row[column].strip()
    return row.get(column) if is_text else ""


def without_letters(choices: dict[str, str]) -> dict[str, str]:
    """Return choices without their letters: 21 for "A)21" (AQuA)."""
    pairs = list(zip(LETTERS, choices.items(), strict=False))
    own = {label: re.sub(rf"^\(?{letter}[).:]\s*", "", text) for letter, (label, text) in pairs}
    return choices if any(own[label] == choices[label] for label in own) else own


def with_choices(question: str, choices: dict[str, str]) -> str:
    """Return a question followed by its lettered choices, if they are not in it."""
    options = list(zip(LETTERS, choices.values(), strict=False))
    if all(re.search(rf"\b{letter}\W+{re.escape(text)}", question) for letter, text in options):
        return question
    return question + "".join(f"\n{letter}. {text}" for letter, text in options)


def text_choices(row: dict) -> dict[str, str]:
    """Return the texts in the column `choices` or `options` by label, at most as many as letters; or {}.

    ["no", "yes"] (MMLU), {"text": ["no", "yes"], "label": ["1", "2"]} (ARC), {"A": "no", "B": "yes"} (MedQA),
    or one of these as text.
    """
    choices = cell(row, "options" if row.get("choices") is None else "choices")
    with suppress(ValueError, SyntaxError, TypeError):
        if isinstance(choices, str):                      # pandas writes no commas: ['no' 'yes']
            choices = ast.literal_eval(re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", choices))
        if isinstance(choices, list):
            choices = dict(zip(LETTERS[: len(choices)], choices, strict=True))
        elif "label" in choices:
            choices = dict(zip(choices["label"], choices["text"], strict=True))
        if all(len(label) == 1 and isinstance(text, str) for label, text in dict(choices).items()):
            return choices
    return {}


def split_answer(answer, choices: dict[str, str], typed: bool = True) -> tuple[str | list[str], str]:
    """Return an answer, and the reasoning before it or "".

    A label (ARC) or an index into the choices (MMLU), also as "2" or 2.0, becomes a letter; but if columns
    are typed, a text that is itself a choice is kept. The text of a list of texts becomes the list.

    A solution is split if its last line ends with `#### 72` (GSM8K; a unit after the number is dropped), if
    it has a \\boxed{...} (MATH; the last one counts), or if it ends with "The answer is: 72.", with at most
    three words in place of 72.
    """
    text, labels = str(answer), list(choices)
    name = text.strip().removesuffix(".0")
    is_text = typed and isinstance(answer, str) and text in choices.values()
    names = labels if name in labels or is_text else list(map(str, range(len(labels))))
    if name in names:
        return LETTERS[names.index(name)], ""
    if (texts := as_list(text)) and all(isinstance(one, str) for one in texts):
        return texts, ""
    if end := AFTER_HASHES.search(text):
        found, _ = split_answer(unwrap(end[1]), {})
        if (counted := COUNTED.fullmatch(str(found))) and as_number(counted[1]) is not None:
            found = counted[1].replace(",", "")
        reasoning = re.sub(r"<<.*?>>", "", text[: end.start()]).strip()             # without annotations
        return found, reasoning if isinstance(found, str) else ""
    stated = STATED.search(text)
    found = extract_boxed(text) or (stated and stated[1])
    return found or text, text if found and not ANSWER_FIRST.match(text) else ""
