"""
Examples, and the token ids of their prompts and demonstrations.

An example is a dict. It always has "prompt"; other keys are optional. A reward function can have a parameter
for every column but completion; it gets prompt under the name prompts.

    prompt      "47+85=?", or chat messages such as [{"role": "user", "content": "47+85=?"}]
    answer      "132", which reward functions compare completions with
    completion  "<reasoning>...</reasoning><answer>132</answer>", a demonstration for supervised training, or
                the messages of a conversation
    tools       schemas of functions, for the chat template

Code that only validates or corrects wrong input is in guards.py.

Not supported: hubs, other files and tasks, and formats of published data sets, such as an answer after ####;
sources.load_examples reads these. Conversations are encoded in environments/messages.py.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from guards import (
    Row, apply_template, as_value, parse_json, read_message, read_tools, require_sequence, validate_examples,
    without_special_tokens,
)


def load_examples(
    source: str | Sequence, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None,
) -> list[dict]:
    """Return validated examples. Raises ValueError with one line: the source, and the line or number in it.

    source   "arithmetic" (addition problems), a .jsonl file, a list or datasets.Dataset of dicts or prompts
    split    "train" or "test" of the addition problems; a file or list has no splits
    limit    the maximum number of examples, from the start; None or 0: all
    seed     determines the order of the addition problems, but not which of them are held out
    columns  {"prompt": "question", "answer": ..., "completion": ...}; default: the first match in
             COLUMNS. The prompt may also be text with columns in braces: "Make {target} from {nums}."
    """
    rows = read_source(source, split, seed, columns or {})
    return validate_examples(source, rows, limit)


def arithmetic(split: str, seed: int) -> list[dict]:
    """Return problems of adding two numbers below 100: 9000 for training, or 1000 others for testing."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random("which problems are held out").shuffle(problems)
    return [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": demonstration(add_columns(a, b), a + b)}
        for a, b in choose_split(problems, 1000, split, seed)
    ]


def encode_prompt(tokenizer, prompt: str | list | dict) -> list[int]:
    """Encode a prompt up to the start of the completion, with the chat template if the tokenizer has one.

    prompt   text, chat messages, token ids (returned unchanged), or an example. The `prompt` of an example is
             one of these, and its `tools`, if it has any, replace tokenizer.tools
    returns  token ids with one BOS token: the template's if there is a template, else the tokenizer's

    The text of special tokens is removed from all messages but the assistant's; it is kept in a text prompt
    without a template. Raises ValueError for messages that the template rejects or omits.
    """
    tools = None
    if isinstance(prompt, dict):
        prompt, tools = prompt["prompt"], prompt.get("tools")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    if isinstance(prompt, str) and not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    messages = without_special_tokens(tokenizer, as_messages(prompt))
    if tokenizer.chat_template:
        text = render(tokenizer, messages, add_generation_prompt=True, tools=read_tools(tokenizer, tools))
    else:
        text = f"{as_text(messages)}\nassistant: "
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids


def encode_demonstration(
    tokenizer, prompt, completion: str, stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration. Returns T token ids and a mask of T times True: all tokens are trained on.

    Raises ValueError for a conversation, which environments.messages.encode_turns encodes.
    """
    if not isinstance(completion, str):
        raise ValueError(f"{completion!r:.50} is not text: pass encode_turns of environments.messages")
    ids = encode_completion(tokenizer, completion, stop_ids)
    return ids, [True] * len(ids)


def encode_completion(tokenizer, completion: str, stop_ids: list[int]) -> list[int]:
    """Encode a completion that ends with one stop token: the one that the chat template adds, else EOS."""
    if tokenizer.chat_template:
        completion += after_turn(tokenizer)               # a template might trim a rendered one
    ids = tokenizer(completion, add_special_tokens=False).input_ids
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


class Batches:
    """Endless batches: next(batches). Epochs are shuffled or in order; `position` is the complete state."""

    def __init__(self, examples: Sequence, batch_size: int, seed: int, shuffle: bool = True):
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle
        self.position = 0                                 # examples returned so far
        self.epoch, self.order = -1, []

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Return the next `count` examples."""
        batch = []
        while len(batch) < count:
            epoch, index = divmod(self.position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(len(self.examples)))
                if self.shuffle:
                    random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            batch.append(self.examples[self.order[index]])
            self.position += 1
        return batch


# ---- messages as text --------------------------------------------------------------------------------------


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """Return a prompt as chat messages. Text becomes a message of the user."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(map(read_message, messages))


def as_text(messages: str | list[dict]) -> str:
    """Return a prompt as text, with one line for each message."""
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


def render(tokenizer, messages: list[dict], add_generation_prompt: bool, tools: list | None = None) -> str:
    """Render a conversation as text, with tools (None: tokenizer.tools) and --chat_template_kwargs.

    Raises ValueError for messages that the template omits or rejects.
    """
    return apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)


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


# ---- rows, and columns under other names -------------------------------------------------------------------

COLUMNS = {                     # the column names that are recognised, in order of precedence
    "prompt": ("prompt", "question", "problem", "instruction", "messages", "conversations"),
    "answer": ("answer", "final_answer", "solution", "target", "answerKey"),
    "completion": ("completion", "response", "output", "canonical_solution"),
}
BRACES = re.compile(r"\{([^{}]+)\}")                     # a column in the text of a prompt


def read_source(source: str | Sequence, split: str, seed: int, columns: dict[str, str]) -> Iterable[dict]:
    """Return rows that have prompt, answer and completion."""
    if not isinstance(source, str):
        rows = require_sequence(source)
    elif source == "arithmetic":
        return arithmetic(split, seed)
    elif source.endswith(".jsonl"):
        rows = read_json_lines(source)
    else:
        raise ValueError(
            f"{source}: neither a .jsonl file nor arithmetic; for other files, hubs and tasks: from sources "
            "import load_examples")
    return (choose_columns(row, columns) for row in rows)


def read_json_lines(path: str) -> list:
    """Return the values in a .jsonl file. Raises ValueError that names the line."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                rows += [parse_json(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}; correct it") from None
    return rows


def choose_columns(row, columns: dict[str, str]) -> Row:
    """Return a row with prompt, answer and completion under these names, each from the column in `columns`,
    else from the first of COLUMNS with a value. A path (reward_model.ground_truth) names a nested field.
    """
    row = Row(row if isinstance(row, Mapping) else {"prompt": row})
    names = f"the row has columns {', '.join(row) or 'none'}"
    found = {}
    for name, candidates in COLUMNS.items():
        chosen = columns.get(name)
        if chosen and chosen not in row and cell(row, chosen) is None:
            raise ValueError(f"--{name}_column={chosen}: {names}")
        free = (c for c in candidates if c not in columns.values() and row.get(c) is not None)
        if column := chosen or next(free, None):
            found[name] = cell(row, column)
    if "prompt" not in found:
        raise ValueError(
            f"{names}; it needs a value in one of {', '.join(COLUMNS['prompt'])}, or --prompt_column, a name "
            f"or a text such as '... {{{'} ... {'.join(row)}}}'")
    return row | found


def cell(row: dict, column: str):
    """Return the value of a column; of a nested field, "a.b" of {"a": {"b": 1}}; or of a text with columns in
    braces, which are filled in. None if there is no such column.

    Braces around anything but a column, such as {"x": 1}, are kept, unless they hold a single word.
    """
    names = {} if column in row else dict.fromkeys(BRACES.findall(column))
    known = [name for name in names if name in row or cell(row, name) is not None]
    if known and not any(name.isidentifier() for name in names.keys() - known):
        texts = {name: "" if (value := cell(row, name)) is None else str(value) for name in known}
        return BRACES.sub(lambda match: texts.get(match[1], match[0]), column)
    head, _, field = column.partition(".")
    inside = row.get(head) if field and column not in row else None
    return cell(inside, field) if isinstance(inside, Mapping) else as_value(row.get(column))
