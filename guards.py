"""
Validation of input, for data.py: rows that are not examples, text that a chat template omits, special tokens
in a user's text. Each function raises ValueError with one line, or returns the corrected input.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice

# Keys of an assistant's message beside content.
OUTPUT = "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")               # in a chat template


def require_sequence(source) -> Sequence:
    """Return a list of examples or a datasets.Dataset. Raises ValueError for anything else."""
    if hasattr(source, "keys") or not hasattr(source, "__getitem__"):            # a DataFrame has keys too
        raise ValueError(
            "dataset: must be a list of examples or a datasets.Dataset, not a "
            f"{type(source).__name__}: choose a split, or pass a list of dicts")
    return source


def parse_json(content: bytes):
    """Parse JSON in UTF-8, with or without a byte-order mark.

    Raises ValueError, also for an unpaired surrogate, which cannot be encoded as tokens.
    """
    text = content.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


class Row(dict):
    """An example that records in `read` which columns `get` has read, so that a run can list the unused."""

    def __init__(self, columns: Mapping, read: Iterable[str] = ()):
        super().__init__(columns)
        self.read = set(read)

    def get(self, name: str, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __or__(self, other: dict) -> "Row":
        return Row({**self, **other}, self.read | other.keys())


def as_value(value):
    """Return a cell as Python types: bytes as text, arrays and tensors as lists or numbers."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list):
        return list(map(as_value, value))
    if isinstance(value, dict):
        return {name: as_value(entry) for name, entry in value.items()}
    if str(getattr(value, "dtype", "")).endswith("float32"):                     # 0.1, not 0.100000001490
        value = (value.numpy() if hasattr(value, "numpy") else value).astype(str).astype(float)
    return as_value(value.tolist()) if hasattr(value, "tolist") else value


def validate_examples(source: str | Sequence, rows: Iterable[dict], limit: int | None = None) -> list[dict]:
    """Return the first `limit` rows (None or 0: all), each as validate_example returns it.

    Raises ValueError that names the source and the number of the row.
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
    """Return a row whose columns have the types that the program reads. Raises ValueError for other types.

        prompt      text or chat messages; a last message of the assistant becomes the completion
        completion  text, or the messages of a conversation or with more than content; None if blank
        answer      text, a list or a dict; 72 becomes "72", and an array a list
    """
    prompt, completion = messages_in_text(row["prompt"]), messages_in_text(row.get("completion"))
    if isinstance(prompt, list):
        prompt = list(map(read_message, prompt))
        if prompt and prompt[-1]["role"] == "assistant":
            last_turn = [prompt.pop()]
            if completion is not None and read_completion(completion) != read_completion(last_turn):
                raise ValueError("there is a completion, and the prompt ends with another one; remove one")
            completion = last_turn
    elif not isinstance(prompt, str):
        raise ValueError(f"the prompt must be text or chat messages, not {type(prompt).__name__}: {prompt!r}")
    texts = [prompt] if isinstance(prompt, str) else [message["content"] or "" for message in prompt]
    if not "".join(texts).strip():
        raise ValueError("the prompt is empty")
    example = row | {"prompt": prompt}
    if completion is not None:
        example["completion"] = read_completion(completion)
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str | dict):
        example["answer"] = list(answer) if hasattr(answer, "__iter__") else str(answer)
    return example


def read_completion(completion) -> str | list[dict] | None:
    """Return a completion: the messages of a conversation; or text, also for a single assistant's message.

    A message with one of the keys OUTPUT stays a message. For blank text the result is None.
    """
    if isinstance(completion, str):
        return completion if completion.strip() else None
    messages = [completion] if isinstance(completion, dict) else completion
    messages = messages if isinstance(messages, list) else []
    if messages and isinstance(messages[0], dict) and "text" in messages[0]:     # parts without a message
        messages = [{"content": messages}]
    messages = [read_message(message, role="assistant") for message in messages]
    own = [message["role"] == "assistant" for message in messages]
    if own == [True] and not any(messages[0].get(name) for name in OUTPUT):
        return read_completion(messages[0]["content"] or "")
    blank = [message for message in messages if not any(map(message.get, ("content", *OUTPUT)))]
    if blank or own != [True, False] * (len(own) // 2) + [True]:
        raise ValueError(
            "the completion must be text, an assistant's message, or several with one other message between "
            f"each two, not {completion!r}")
    return messages


# ---- messages ----------------------------------------------------------------------------------------------


def read_message(message, role: str | None = None) -> dict:
    """Return a chat message whose content is text (or None, if it has tool calls), without null entries.

    Raises ValueError for parts without text, such as images. role: used if the message has none
    """
    if isinstance(message, dict) and role:
        message = {"role": role} | message
    if not (isinstance(message, dict) and "role" in message and message.keys() & {"content", "tool_calls"}):
        raise ValueError('chat messages must look like {"role": "user", "content": "..."}')
    return without_nulls(message) | {"content": text_of_parts(message.get("content"))}


def text_of_parts(content: str | list | None) -> str | None:
    """Return the text of a message's content, which may be in parts. Raises ValueError for non-text parts."""
    if content is None or isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text")
        texts.append(part.get("text") if is_text else part)
        if not isinstance(texts[-1], str):
            raise ValueError(
                f"the content of a message must be text or parts such as {{'type': 'text', 'text': '...'}}, "
                f"not {part!r:.60}; change it, or remove the row")
    return "".join(texts)


def without_nulls(value, name: str = ""):
    """Return a JSON value without null entries, which Parquet adds, and with textual `arguments` and
    `parameters` parsed.
    """
    if name in ("arguments", "parameters"):
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value or {}
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if entry is not None or key == "arguments"}
        return {key: without_nulls(entry, key) for key, entry in kept.items()}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def read_tools(tokenizer, tools) -> list[dict] | None:
    """Return a row's tools, a list or JSON text, as chat templates expect them; None for anything else."""
    with suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        return None
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return without_special_tokens(tokenizer, without_nulls(wrapped))


def messages_in_text(text):
    """Return the chat messages if a text is JSON or Python of messages, such as a CSV cell; else the text."""
    if isinstance(text, str) and re.match(r"\s*\[\s*\{", text):
        for parse in json.loads, ast.literal_eval:        # pandas writes the second
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                messages = parse(text)
                if all(isinstance(each, dict) and each.keys() & {"role", "from"} for each in messages):
                    return messages
    return text


def apply_template(tokenizer, messages: list[dict], tools: list | None, **options) -> str:
    """Render messages with the chat template, in the first of three forms that the template handles.

    The forms: unchanged; with `arguments` as JSON text, for templates that append them to text (DeepSeek);
    with content in parts, for some vision models. Raises ValueError with the problem of the first form.
    """
    tools, problems = tools or getattr(tokenizer, "tools", None), []
    options |= tokenizer.init_kwargs.get("chat_template_kwargs", {})
    for make_form in list, with_arguments_as_text, with_content_in_parts:
        form = make_form(messages)
        try:
            text = tokenizer.apply_chat_template(
                form, tools, chat_template=dated_template(tokenizer, tools), tokenize=False, **options)
            text.encode()                                 # an unpaired surrogate cannot be tokenised
            literals = [str(m["content"]) for m in form if isinstance(m.get("content"), list)]
            if any(literal in text for literal in literals):
                raise ValueError("it writes lists of parts as Python literals")
            problem = lost_text(messages, text)
        except Exception as error:                        # a template may raise anything
            problem = f"the chat template rejects the prompt {messages!r:.80}...: {error}"
        if not problem:
            return text
        problems.append(problem)
    raise ValueError(problems[0])


def dated_template(tokenizer, tools: list | None) -> str:
    """Return the chat template with the fixed day tokenizer.today, when a run began, instead of the clock."""
    template = tokenizer.get_chat_template(tools=tools)
    today = getattr(tokenizer, "today", None)
    return CLOCK.sub(lambda call: repr(today.strftime(call[2])), template) if today else template


def with_arguments_as_text(messages: list[dict]) -> list[dict]:
    """Return messages with the `arguments` of tool calls as text of JSON."""
    return json.loads(json.dumps(messages, default=str), object_hook=arguments_as_text)


def with_content_in_parts(messages: list[dict]) -> list[dict]:
    """Return messages with each content as a list of one part."""
    return [m | {"content": [{"type": "text", "text": m.get("content") or ""}]} for m in messages]


def arguments_as_text(entries: dict) -> dict:
    """Return a JSON object with its `arguments`, if it has any, as JSON text."""
    if isinstance(arguments := entries.get("arguments"), dict):
        return entries | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return entries


def lost_text(messages: list[dict], rendered: str) -> str:
    """Return an error message if a rendered text lacks a message (templates skip unknown roles), else "".

    Not checked: assistants' messages, which may lose their thoughts (Qwen 3), and tools', written as JSON.
    """
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        if text.strip() not in rendered and role not in ("assistant", "tool"):
            return (
                f"the prompt lacks the {role}'s message {text!r:.60}: the chat template omits it; "
                "change its role, or pass --chat_template none")
    return ""


def without_special_tokens(tokenizer, messages: list[dict]) -> list[dict]:
    """Return messages, or tools, with the text of special tokens removed from all but assistants' messages.

    A question that contains "<|im_end|>" must not end its turn.
    """
    pattern = special_token_pattern(tokenizer, (len(tokenizer), *tokenizer.all_special_tokens))

    def clean(value):
        if isinstance(value, list):
            return list(map(clean, value))
        if isinstance(value, dict):
            return value if value.get("role") == "assistant" else {key: clean(x) for key, x in value.items()}
        while isinstance(value, str) and pattern.search(value):
            value = pattern.sub("", value)                # <|im_<|im_end|>end|> leaves another
        return value

    return clean(messages)


@lru_cache(maxsize=8)
def special_token_pattern(tokenizer, version: tuple) -> re.Pattern:
    """Return a pattern for the texts of all special tokens. version: a cache key, changed by added tokens."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = {*texts, *tokenizer.all_special_tokens} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
