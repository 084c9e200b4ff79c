"""
Guards against wrong input, for data.py: rows that are not examples, text that a chat template leaves out,
special tokens in a user's text. Each function raises ValueError, one line, or returns the corrected input.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice


def require_sequence(source) -> Sequence:
    """Return a list of examples or a datasets.Dataset. Raises ValueError for anything else."""
    if hasattr(source, "keys") or not hasattr(source, "__getitem__"):            # a DataFrame has keys too
        raise ValueError(
            "dataset: must be a list of examples or a datasets.Dataset, not a "
            f"{type(source).__name__}: choose a split, or pass a list of dicts")
    return source


def parse_json(content: bytes):
    """Parse JSON in UTF-8, with or without a byte-order mark.

    Raises ValueError, also for half of a surrogate pair, which cannot be encoded as tokens.
    """
    text = content.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def validate_examples(source: str | Sequence, rows: Iterable[dict], limit: int | None = None) -> list[dict]:
    """Return the first `limit` rows (None or 0: all), each as validate_example returns it.

    Raises ValueError, which names the source and the number of the row.
    """
    name = source if isinstance(source, str) else "dataset"
    examples = []
    try:
        for row in islice(rows, limit or None):
            examples.append(validate_example(row))
    except ValueError as error:
        raise ValueError(f"{name}: example {len(examples) + 1}: {error}") from None
    if not examples:
        raise ValueError(f"{name}: no examples in it")
    return examples


def validate_example(row: dict) -> dict:
    """Return a row with columns of the types that the program reads. Raises ValueError for other types.

        prompt      text or chat messages; the assistant's last message becomes the completion
        completion  text, or the messages of a conversation
        answer      text, a list or a dict: 72 becomes "72", an array its elements
    """
    prompt, last_turn = split_prompt(row["prompt"])
    completion, answer = row.get("completion"), row.get("answer")
    example = row | {"prompt": prompt}
    if last_turn:
        if completion not in (None, last_turn["content"]):
            raise ValueError("a completion, and a prompt that ends with one; leave one out")
        completion = last_turn["content"]
    if completion is not None:
        example["completion"] = read_completion(completion)
    if answer is not None and not isinstance(answer, str | dict):
        example["answer"] = list(answer) if hasattr(answer, "__iter__") else str(answer)
    return example


def split_prompt(prompt) -> tuple[str | list[dict], dict | None]:
    """Return a prompt, and the assistant's turn that chat messages end with: a demonstration."""
    if not isinstance(prompt, str | list):
        raise ValueError(f"the prompt must be text or chat messages, not {type(prompt).__name__}: {prompt!r}")
    last_turn = None
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            raise ValueError('chat messages must look like {"role": "user", "content": "..."}')
        if prompt and prompt[-1]["role"] == "assistant":
            *prompt, last_turn = prompt
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError("the prompt is empty")
    return prompt, last_turn


def read_completion(completion) -> str | list[dict] | None:
    """Return a completion: text, also of an assistant's message alone, or the messages of a conversation."""
    match completion:
        case str():
            return completion
        case [{"content": str() | [{"text": str()}, *_] as content}]:            # a message, its parts
            return "".join(texts_of(content))
        case [{"text": str()}, *_]:
            return "".join(texts_of(completion))
        case [{"content": None}]:
            return None
        case list() if is_alternating(completion):
            return completion
    raise ValueError(
        "the completion must be text, an assistant's message, or such messages with others between them, "
        f"not {completion!r}")


def is_alternating(messages: list) -> bool:
    """Return True for chat messages that alternate, from the assistant's to the assistant's."""
    return len(messages) % 2 == 1 and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) and "role" in message
        and (message["role"] == "assistant") == (number % 2 == 0) for number, message in enumerate(messages))


def texts_of(content: str | list | None) -> list[str]:
    """Return the texts in a message: itself, or those of its parts."""
    parts = content if isinstance(content, list) else [content]
    return [str((part.get("text") if isinstance(part, dict) else part) or "") for part in parts]


def refuse_lost_text(messages: list[dict], rendered: str) -> None:
    """Raise ValueError if a rendered prompt lacks the text of a message: templates skip unknown roles.

    An assistant's message may lose its thoughts (Qwen 3), and a tool's may be written as JSON.
    """
    for message in messages:
        role, content = message["role"], message["content"]
        written = rendered.replace(str(content), "") if isinstance(content, list) else rendered
        lost = [text for text in texts_of(content) if text.strip() not in written]
        if lost and role not in ("assistant", "tool"):
            raise ValueError(
                f"the prompt leaves out the {role}'s message {lost[0]!r:.60}: the chat template does not "
                "write its role, or its form (text, a list of parts); change it, or pass another "
                "--chat_template")


def without_special_tokens(tokenizer, messages: list[dict]) -> list[dict]:
    """Return messages with the text of special tokens removed from all but the assistant's.

    A question that contains "<|im_end|>" must not end its turn.
    """
    pattern = special_token_pattern(tokenizer, (len(tokenizer), *tokenizer.all_special_tokens))

    def clean(content):
        if isinstance(content, list):
            return [clean(part) for part in content]
        if isinstance(content, dict) and "text" in content:
            return content | {"text": clean(content["text"])}
        while isinstance(content, str) and pattern.search(content):
            content = pattern.sub("", content)            # <|im_<|im_end|>end|> has another one
        return content

    return [
        message if message["role"] == "assistant" else message | {"content": clean(message["content"])}
        for message in messages]


@lru_cache(maxsize=8)
def special_token_pattern(tokenizer, version: tuple) -> re.Pattern:
    """Return a pattern of the texts of all special tokens. version: changes when tokens are added."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = {*texts, *tokenizer.all_special_tokens} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
