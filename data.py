"""
Examples, and the token ids of their prompts and demonstrations.

An example is a dict. It always has "prompt"; other keys are optional. A reward function can have a parameter
for every column but completion; it gets prompt under the name prompts.

    prompt      "47+85=?", or chat messages such as [{"role": "user", "content": "47+85=?"}]
    answer      "132", which reward functions compare completions with; numbers become text; or a list
    completion  "<reasoning>...</reasoning><answer>132</answer>", a demonstration for supervised training, or
                the messages of a conversation
    tools       schemas of functions, for the chat template

A row that does not look like this is refused, with its number and the `map` or `filter` of `datasets` that
corrects it.

Not supported: hubs, other files and tasks, other columns, and formats of published data sets, such as an
answer after ####; sources.load_examples reads these. Conversations are encoded in environments/messages.py.
"""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path

DAY = datetime(2024, 7, 26)     # for chat templates that write the date: prompts are the same on every day
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")               # in a chat template


def load_examples(
    source: str | Sequence, split: str = "train", *, limit: int | None = None, seed: int = 0
) -> list[dict]:
    """Return validated examples. Raises ValueError with one line: the source, and the line or number in it.

    source   "arithmetic" (addition problems), a .jsonl file, a list or datasets.Dataset of dicts or prompts
    split    "train" or "test" of the addition problems; a file or list has no splits
    limit    the maximum number of examples, from the start; None or 0: all
    seed     determines the order of the addition problems, but not which of them are held out
    """
    rows = source
    if source == "arithmetic":
        rows = arithmetic(split, seed)
    elif isinstance(source, str):
        if not source.endswith(".jsonl"):
            raise ValueError(
                f"{source}: neither a .jsonl file nor arithmetic; for other files, hubs and tasks: from "
                "sources import load_examples")
        rows = read_json_lines(source)
    return validate_examples(source, rows, limit)


def read_json_lines(path: str) -> list:
    """Return the values in a .jsonl file. Raises ValueError that names the line."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}; correct it") from None
    return rows


class Batches:
    """Endless batches: next(batches). Epochs are shuffled or in order; `position` is the complete state."""

    def __init__(self, examples: Sequence, batch_size: int, seed: int, shuffle: bool = True):
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle
        self.position = 0                                 # examples returned so far
        self.epoch = -1
        self.order: list[int] = []                        # indices of the examples in this epoch

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Return the next `count` examples."""
        batch: list = []
        while len(batch) < count:
            epoch, index = divmod(self.position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(len(self.examples)))
                if self.shuffle:
                    random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            batch.append(self.examples[self.order[index]])
            self.position += 1
        return batch


# ---- token ids ---------------------------------------------------------------------------------------------


def encode_prompt(tokenizer, prompt: str | list | dict) -> list[int]:
    """Encode a prompt up to the start of the completion, with the chat template if the tokenizer has one.

    prompt   text, chat messages, token ids (returned unchanged), or an example. The `prompt` of an example is
             one of these, and its `tools`, if it has any, replace tokenizer.tools
    returns  token ids with one BOS token: the template's if there is a template, else the tokenizer's

    Raises ValueError for messages that the template rejects or omits. Not checked: the text of special tokens
    in messages, see sources/token_check.py.
    """
    example: dict = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    content = example["prompt"]
    if isinstance(content, list) and content and isinstance(content[0], int):
        return content
    text = render(tokenizer, content, tools=example.get("tools"))
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids


def encode_demonstration(
    tokenizer, prompt, completion: str, stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration. Returns T token ids and a mask of T times True: all tokens are trained on.

    Raises ValueError for a conversation, which environments.messages.encode_turns encodes.
    """
    if not isinstance(completion, str):
        raise ValueError(f"{completion!r:.50} is not text: pass encode_turns of environments.messages")
    ids = encode_completion(tokenizer, prompt, completion, stop_ids)
    return ids, [True] * len(ids)


def encode_completion(tokenizer, prompt, completion: str, stop_ids: list[int]) -> list[int]:
    """Encode a completion that ends with one stop token: the one that the chat template adds, else EOS.

    The text is encoded behind the text before it, because a SentencePiece tokenizer would put a space before
    a text alone; but alone if its first characters would merge with the last token of the prompt.
    """
    before, end = prompt, ""
    if tokenizer.chat_template:
        before, end = "question", after_turn(tokenizer)   # a template might trim a rendered completion
    before, encode = render(tokenizer, before), partial(tokenizer.encode, add_special_tokens=False)
    first, ids = encode(before), encode(before + completion + end)
    ids = ids[len(first) :] if ids[: len(first)] == first else encode(completion + end)
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


# ---- messages as text --------------------------------------------------------------------------------------


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as chat messages. Text becomes a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_text(messages: str | list[dict]) -> str:
    """Return a prompt as text, with one line for each message."""
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


def render(
    tokenizer, prompt: str | list[dict], add_generation_prompt: bool = True, tools: list | None = None
) -> str:
    """Return a prompt or a conversation as text: of the chat template, with tools (None: tokenizer.tools) and
    --chat_template_kwargs; without a template the text itself, or lines that begin with a role.

    Raises ValueError for messages that the template rejects or omits, as many omit the role developer. Not
    checked: assistants' messages, which may lose their thoughts (Qwen 3), and tools', written as JSON.
    """
    if not tokenizer.chat_template:
        return prompt if isinstance(prompt, str) else f"{as_text(prompt)}\nassistant: "
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tools = tools or getattr(tokenizer, "tools", None)
    template = CLOCK.sub(lambda call: repr(DAY.strftime(call[2])), tokenizer.get_chat_template(tools=tools))
    variables = tokenizer.init_kwargs.get("chat_template_kwargs", {})
    try:
        text = tokenizer.apply_chat_template(
            messages, tools, chat_template=template, add_generation_prompt=add_generation_prompt,
            tokenize=False, **variables)
    except Exception as error:                            # a template may raise anything
        raise ValueError(f"the chat template rejects the prompt {messages!r:.80}...: {error}") from None
    for message in messages:
        if message["role"] not in ("assistant", "tool") and message["content"].strip() not in text:
            raise ValueError(
                f"the prompt lacks the {message['role']}'s message {message['content']!r:.60}: the chat "
                "template omits it; change its role, or pass --chat_template none")
    return text


def after_turn(tokenizer, reply: dict | None = None) -> str:
    """Render the end of an assistant's turn; with a reply, also the reply and the start of the next turn.

    Templates have no function for this, so a made-up turn is rendered, and the text after it is returned.
    """
    made_up = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "madeupturn"}]
    text = render(tokenizer, [*made_up, reply] if reply else made_up, add_generation_prompt=bool(reply))
    return text.partition("madeupturn")[2]


def end_of_turn(tokenizer) -> int | None:
    """Return the id of the special token with which the chat template ends a turn, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    with suppress(ValueError):                            # a template may refuse the made-up turn
        ids = tokenizer(after_turn(tokenizer).lstrip(), add_special_tokens=False).input_ids
        token = tokenizer.added_tokens_decoder.get(ids[0]) if ids else None
        return ids[0] if token and token.special else None


# ---- built-in problems -------------------------------------------------------------------------------------


def arithmetic(split: str, seed: int) -> list[dict]:
    """Return problems of adding two numbers below 100: 9000 for training, or 1000 others for testing."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random("which problems are held out").shuffle(problems)
    return [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": demonstration(add_columns(a, b), a + b)}
        for a, b in choose_split(problems, 1000, split, seed)
    ]


def choose_split(problems: list, held_out: int, split: str, seed: int) -> list:
    """Return the first problems, which are held out, for "test", else the others, shuffled by the seed."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split}: built-in problems have the splits train and test")
    chosen = problems[held_out:] if split == "train" else problems[:held_out]
    random.Random(seed).shuffle(chosen)
    return chosen


def add_columns(a: int, b: int) -> str:
    """Return an addition by columns: for 47+85 "7+5=12 4+8=12 12+1=13", which has the digits of 132."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = f" {tens}+1={tens + 1}" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}={tens}{carry}"


def demonstration(reasoning: str, answer: str | int) -> str:
    """Return a completion in the format that the format rewards expect."""
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


# ---- the schema of an example: rows that do not fit are refused --------------------------------------------


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
