"""
Examples: from a list, a JSON Lines file or the built-in sums, validated, and encoded as token ids.

An example is a dict with "prompt" (a string, or a list of chat messages) and, where known, "answer" (for
rewards) and "completion" (a demonstration, for supervised training: text, or the messages of a conversation).
Other columns are passed to the reward functions.

Left out on purpose: hubs, other files and tasks, and forms of published data sets, such as an answer after
####; sources.load_examples reads them. Conversations: environments/messages.py.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path

COLUMNS = {                     # the column names that are recognised, in order of precedence
    "prompt": ("prompt", "question", "problem", "instruction", "messages", "conversations"),
    "answer": ("answer", "final_answer", "solution", "target", "answerKey"),
    "completion": ("completion", "response", "output", "canonical_solution"),
}
BRACES = re.compile(r"\{(\w+)\}")                        # a column in a text that makes prompts


def load_examples(
    source: str | Sequence, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None, read: Callable | None = None,
) -> list[dict]:
    """Return validated examples. Raises ValueError, one line that names the source and the line or number.

    source   a sequence of dicts or prompts, such as a list or a datasets.Dataset; a .jsonl file; "arithmetic"
    split    "train" or "test" of the sums; a file or sequence has no splits
    limit    the maximum number of examples, from the start; None or 0: all
    seed     of the order of the sums; it does not change which of them are test problems
    columns  {"prompt": "question", "answer": ..., "completion": ...}; default: the first match in
             COLUMNS. The prompt may also be a text with columns in braces: "Make {target} from {nums}."
    read     reads more sources; default: read_source, which has the same arguments
    """
    name = source if isinstance(source, str) else "dataset"
    if hasattr(source, "keys") or not hasattr(source, "__getitem__"):            # a DataFrame has keys too
        raise ValueError(
            "dataset: must be a list of examples or a datasets.Dataset, not a "
            f"{type(source).__name__}: choose a split, or pass a list of dicts")
    rows = (read or read_source)(source, split, seed, columns or {})
    examples = []
    try:
        for row in islice(rows, limit or None):
            examples.append(normalize_example(row))
    except ValueError as error:
        raise ValueError(f"{name}: example {len(examples) + 1}: {error}") from None
    if not examples:
        raise ValueError(f"{name}: no examples in it")
    return examples


# ---- the built-in sums -------------------------------------------------------------------------------------


def arithmetic(split: str, seed: int) -> list[dict]:
    """Return sums of two numbers below 100: 9000 problems for training, 1000 others for testing."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random("which problems are held out").shuffle(problems)
    return [
        {"prompt": f"{a}+{b}=?", "answer": str(a + b), "completion": demonstration(column_sums(a, b), a + b)}
        for a, b in choose_split(problems, 1000, split, seed)
    ]


def choose_split(problems: list, held_out: int, split: str, seed: int) -> list:
    """Return the first problems, which are held out, for "test", or the others, in an order of the seed."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split}: built-in problems have the splits train and test")
    chosen = problems[held_out:] if split == "train" else problems[:held_out]
    random.Random(seed).shuffle(chosen)
    return chosen


def column_sums(a: int, b: int) -> str:
    """Return column addition: 47+85 is "7+5=12 4+8=12 12+1=13", which contains the digits of 132."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = f" {tens}+1={tens + 1}" if ones > 9 else ""
    return f"{a % 10}+{b % 10}={ones} {a // 10}+{b // 10}={tens}{carry}"


def demonstration(reasoning: str, answer: str | int) -> str:
    """Return a completion in the format that the format rewards expect."""
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


# ---- token ids ---------------------------------------------------------------------------------------------


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Encode a prompt up to the start of the completion, with the chat template if the tokenizer has one.

    prompt  a string, chat messages, or token ids (returned unchanged). There is one BOS token: the template's
            if there is a template, else the tokenizer's. Without a template text stays as it is, with its
            special tokens.
    """
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    if isinstance(prompt, str) and not tokenizer.chat_template:
        return tokenizer(prompt).input_ids
    messages = without_special_tokens(tokenizer, as_messages(prompt))
    if tokenizer.chat_template:
        text = render(tokenizer, messages, add_generation_prompt=True)
    else:
        text = f"{as_text(messages)}\nassistant: "
    refuse_lost_text(messages, text)
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids


def encode_completion(tokenizer, completion: str, stop_ids: list[int]) -> list[int]:
    """Encode a demonstration, ending with one stop token: the one that the chat template adds, else EOS."""
    if tokenizer.chat_template:
        completion += after_turn(tokenizer)               # not rendered itself: a template may trim it
    ids = tokenizer(completion, add_special_tokens=False).input_ids
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


def encode_demonstration(
    tokenizer, prompt, completion: str, stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration that is text: token ids, and True for each of them."""
    if not isinstance(completion, str):
        raise ValueError(f"{completion!r:.50} is no text: pass encode_turns of environments.messages")
    ids = encode_completion(tokenizer, completion, stop_ids)
    return ids, [True] * len(ids)


def after_turn(tokenizer, reply: dict | None = None) -> str:
    """Render the end of a turn of the assistant; with a reply also this and the start of the next turn.

    Templates have no call for that: a made-up turn is rendered, and what follows its text is taken.
    """
    made_up = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "madeupturn"}]
    text = render(tokenizer, [*made_up, reply] if reply else made_up, add_generation_prompt=bool(reply))
    return text.partition("madeupturn")[2]


def render(tokenizer, messages: list[dict], add_generation_prompt: bool) -> str:
    """Render a conversation as text, with the tools in tokenizer.tools and --chat_template_kwargs, if any.

    Raises ValueError for messages that the template rejects, such as a system message in Gemma 2's.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=getattr(tokenizer, "tools", None), add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **tokenizer.init_kwargs.get("chat_template_kwargs", {}),
        )
        text.encode()                                     # half of a surrogate pair cannot be tokenised
        return text
    except Exception as error:                            # a template may do anything
        raise ValueError(f"the chat template refuses the prompt {messages!r:.80}...: {error}") from None


def as_messages(prompt: str | list[dict]) -> list[dict]:
    """Convert a prompt to chat messages: text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_text(messages: str | list[dict]) -> str:
    """Return a prompt as text: a line for each message."""
    if isinstance(messages, str):
        return messages
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


# ---- what a chat template may lose, or take for its own ----------------------------------------------------


def refuse_lost_text(messages: list[dict], rendered: str) -> None:
    """Raise ValueError if a prompt lacks the text of a message, as where the template does not know its role.

    The assistant's may lose its thoughts (Qwen 3), and a tool's may be written as JSON.
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


def texts_of(content: str | list | None) -> list[str]:
    """Return the texts in a message: itself, or those of its parts."""
    parts = content if isinstance(content, list) else [content]
    return [str((part.get("text") if isinstance(part, dict) else part) or "") for part in parts]


def without_special_tokens(tokenizer, messages: list[dict]) -> list[dict]:
    """Take the text of special tokens out of messages that are not the assistant's.

    A question that contains "<|im_end|>" must not end its turn.
    """
    pattern = special_token_pattern(tokenizer, (len(tokenizer), *tokenizer.all_special_tokens))

    def clean(content):
        if isinstance(content, list):
            return [clean(part) for part in content]
        if isinstance(content, dict) and "text" in content:
            return content | {"text": clean(content["text"])}
        while isinstance(content, str) and pattern.search(content):
            content = pattern.sub("", content)            # it may join the halves of another one
        return content

    return [
        message if message["role"] == "assistant" else message | {"content": clean(message["content"])}
        for message in messages]


@lru_cache(maxsize=8)
def special_token_pattern(tokenizer, version: tuple) -> re.Pattern:
    """Return a pattern of the texts of all special tokens. version: so that tokens added later are found."""
    texts = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = {*texts, *tokenizer.all_special_tokens} - {""}
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


# ---- reading and validation --------------------------------------------------------------------------------


def read_source(source: str | Sequence, split: str, seed: int, columns: dict[str, str]) -> Iterable[dict]:
    """Return rows that have prompt, answer and completion."""
    if not isinstance(source, str):
        rows = source
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
    """Return the values in a .jsonl file. Raises ValueError, which names the line."""
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


def parse_json(content: bytes):
    """Parse JSON in UTF-8, with or without a byte-order mark. Raises ValueError, also for half of a surrogate
    pair, which cannot be encoded as tokens.
    """
    text = content.decode("utf-8-sig")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def choose_columns(row, columns: dict[str, str]) -> dict:
    """Return a row with prompt, answer and completion under these names: the named column, else the first of
    COLUMNS with a value. A field of an object can be named as a path: reward_model.ground_truth.
    """
    row, found = dict(row) if isinstance(row, Mapping) else {"prompt": row}, {}
    names = f"the row has columns {', '.join(row) or 'none'}"
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
    """Return the value in a column; else that in a field of an object, "a.b" of {"a": {"b": 1}}; else a text
    whose columns in braces are filled in; else None. Arrays and tensors become lists and numbers.
    """
    used = BRACES.findall(column)
    if used and column not in row and row.keys() >= set(used):
        return BRACES.sub(lambda match: "" if row[match[1]] is None else str(row[match[1]]), column)
    head, _, field = column.partition(".")
    inside = row.get(head) if field and column not in row else None
    value = cell(inside, field) if isinstance(inside, Mapping) else row.get(column)
    return value.tolist() if hasattr(value, "tolist") else value


def normalize_example(example: dict) -> dict:
    """Validate an example, and give its columns the types that the program reads.

        prompt      text or chat messages; the assistant's last message becomes the completion
        completion  text, or the messages of a conversation
        answer      text, a list or a dict: 72 becomes "72", an array its elements
    """
    prompt, last_turn = split_prompt(example["prompt"])
    completion, answer = example.get("completion"), example.get("answer")
    example = example | {"prompt": prompt}
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
    last_turn = None
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            raise ValueError('chat messages must look like {"role": "user", "content": "..."}')
        if prompt and prompt[-1]["role"] == "assistant":
            *prompt, last_turn = prompt
    elif not isinstance(prompt, str):
        kind = type(prompt).__name__
        raise ValueError(f"the prompt must be text or chat messages, not {kind}: {prompt!r}")
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
    if is_alternating(completion):
        return completion
    raise ValueError(
        "the completion must be text, an assistant's message, or such messages with others between them, "
        f"not {completion!r}")


def is_alternating(messages) -> bool:
    """Check for chat messages that alternate, from the assistant's to the assistant's."""
    return isinstance(messages, list) and len(messages) % 2 == 1 and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) and "role" in message
        and (message["role"] == "assistant") == (number % 2 == 0) for number, message in enumerate(messages)
    )


# ---- batches -----------------------------------------------------------------------------------------------


class Batches:
    """Iterate over batches without end, every epoch shuffled or in order. `position` is the whole state."""

    def __init__(self, examples: Sequence, batch_size: int, seed: int, shuffle: bool = True):
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle
        self.position = 0                                 # examples so far
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
