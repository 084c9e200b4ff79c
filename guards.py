"""
The schema of an example, for the load_examples of data.py and of sources/: rows that do not fit are refused.

Messages say what is invalid, and the `map` or `filter` of `datasets` that corrects it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import islice
from numbers import Number


def as_map(column: str, value: str = "...") -> str:
    """Return the end of a message: the map of `datasets` that corrects a column."""
    return f"data.map(lambda row: {{'{column}': {value}}})"


def validate_examples(source: str | Sequence, rows: Iterable, limit: int | None = None) -> list[dict]:
    """Return the first `limit` rows (None or 0: all) as examples. Raises ValueError that names a row."""
    if not isinstance(source, str) and (hasattr(source, "keys") or not hasattr(source, "__getitem__")):
        raise ValueError(
            "dataset: must be a list of examples or a datasets.Dataset, not a "
            f"{type(source).__name__}: choose a split, or pass a list of dicts")
    name, examples = source if isinstance(source, str) else "dataset", []
    try:
        for row in islice(rows, limit or None):
            examples.append(validate_example(row))
    except ValueError as error:
        raise ValueError(f"{name}: example {len(examples) + 1}: {error}") from None
    if not examples:
        raise ValueError(f"{name}: no examples in it")
    return examples


def validate_example(row) -> dict:
    """Return a row as an example: numbers become text, and an assistant's message at the end of a prompt the
    completion. Raises ValueError for other types.
    """
    row = row if isinstance(row, Mapping) else {"prompt": row}
    prompt, completion, answer = (row.get(name) for name in ("prompt", "completion", "answer"))
    if isinstance(prompt, list):
        prompt = read_messages(prompt)
        if prompt and prompt[-1]["role"] == "assistant":
            if completion is not None:
                raise ValueError(f"completion and prompt end with a reply; {as_map('completion', 'None')}")
            prompt, completion = prompt[:-1], prompt[-1:]
    if not isinstance(prompt, str | list):
        raise ValueError(
            f"the prompt must be text or chat messages, not {prompt!r:.60}; the row has the columns "
            f"{', '.join(map(str, row))}: name one with --prompt_column, or a text such as '... "
            f"{{{'} ... {'.join(map(str, row))}}}'")
    text = prompt if isinstance(prompt, str) else "".join(message["content"] or "" for message in prompt)
    text.encode()                                         # raises ValueError for half of a surrogate pair
    if not text.strip():
        raise ValueError("the prompt is empty: data.filter(lambda row: row['prompt'])")
    if isinstance(prompt, str) and re.match(r"\s*\[\s*\{\s*['\"](role|from)['\"]", prompt):
        raise ValueError(f"the prompt is the text of chat messages: {as_map('prompt', 'json.loads(...)')}")
    example = copy(row)                                   # of its class, which sources/columns.py needs
    example["prompt"] = prompt
    if completion is not None:
        example["completion"] = read_completion(completion)
    if isinstance(answer, Number):
        example["answer"] = str(answer)
    elif not isinstance(answer, str | list | None):
        raise ValueError(
            f"the answer must be text, a number or a list, not the {type(answer).__name__} {answer!r:.60}: "
            f"{as_map('answer', 'str(...)')}; or name a field: --answer_column a.b")
    return example


def read_completion(completion) -> str | list[dict] | None:
    """Return a completion: text, also for an assistant's message with nothing but content; or messages."""
    if isinstance(completion, list):
        completion = read_messages(completion)
        own = [message["role"] == "assistant" for message in completion]
        if own == [True] and completion[0].keys() == {"role", "content"}:
            completion = completion[0]["content"]
        elif own == [True, False] * (len(own) // 2) + [True]:
            return completion
    if not isinstance(completion, str):
        raise ValueError(
            "the completion must be text, or the assistant's messages with one other message between each "
            f"two, not {completion!r:.120}: {as_map('completion')}")
    return completion if completion.strip() else None


def read_messages(messages: list) -> list[dict]:
    """Return chat messages with text as content: parts of text are joined, and null entries, which Parquet
    adds, are dropped. The content may be None beside tool calls. Raises ValueError for anything else.
    """
    read = []
    for message in without_nulls(messages):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError(
                f'chat messages must look like {{"role": "user", "content": "..."}}, not {message!r:.80}: '
                + as_map("prompt", "[{'role': 'user', 'content': ...}]"))
        content = message.get("content")
        parts = content if isinstance(content, list) else [None]
        if all(isinstance(part, dict) and part.get("type") == "text" and "text" in part for part in parts):
            content = "".join(part["text"] for part in parts)
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            raise ValueError(
                "the content of a message must be text or parts such as {'type': 'text', 'text': '...'}, "
                f"not {content!r:.60}: {as_map('prompt')}, or data.filter")
        read.append(message | {"content": content})
    return read


def without_nulls(value, name: str = ""):
    """Return a JSON value without null entries of objects, and with `arguments` that are JSON text parsed."""
    if name == "arguments" and not isinstance(value, dict):
        try:
            value = json.loads(value or "{}")
        except (ValueError, TypeError):
            message = f"arguments of a call must be an object, not {value!r:.60}: {as_map('messages')}"
            raise ValueError(message) from None
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if entry is not None or key == "arguments"}
        return {key: without_nulls(entry, key) for key, entry in kept.items()}
    return list(map(without_nulls, value)) if isinstance(value, list) else value
