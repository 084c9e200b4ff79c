"""
Examples: from built-in tasks, files and hubs (sources/), in batches, and encoded as token ids.

An example is a dict with "prompt" (a string, or a list of chat messages) and, where known, "answer" (for
rewards) and "completion" (a demonstration, for supervised training: text, or the messages of a conversation).
Other columns are passed to the reward functions.

Data may be larger than memory: rows are read on access (sources/readers.py).
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from engine.chat_template import (
    after_turn, as_messages, as_text, encode, encode_reply, is_ids, mark_special_tokens, render,
)
from sources.published_forms import complete_prompt, split_answer
from sources.readers import View, read_rows
from sources.tasks import PROBLEMS, demonstration

COLUMNS = {                     # the column names that are recognised, in order of precedence
    "prompt": ("prompt", "question", "problem", "instruction", "messages", "conversations"),
    "answer": ("answer", "final_answer", "solution", "target"),
    "completion": ("completion", "response", "output", "canonical_solution"),
}


def load_examples(
    source: str | Sequence, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None,
) -> Sequence[dict]:
    """Return examples of a built-in task, a file (.jsonl, .json, .csv, .parquet) or a hub.

    source   "arithmetic", "countdown" or "guess_letter"; a path; an id on the Hugging Face hub such as
             "openai/gsm8k:main" (name:configuration); "tfds:gsm8k"; "kaggle:owner/name/file.csv"; or a
             sequence of dicts or prompts, such as a list or a datasets.Dataset
    split    "train", "test" or another one of a hub, or a part of it such as "train[:90%]"; ignored for a
             file or sequence, which has no splits
    limit    the maximum number of examples, from the start
    seed     of the order of the built-in problems; it does not change which of them are test problems
    columns  {"prompt": "question", "answer": ..., "completion": ...}; default: the first match in COLUMNS.
             The prompt may also be a text with columns in braces: "Make {target} from {nums}."
    returns  a sequence that reads rows on access, of which slices are lists; every row has been validated
    raises   ValueError, one line that names the source and, for a file, the line
    """
    rows, source = (None, source) if isinstance(source, str) else (source, "dataset")
    if rows is not None and (isinstance(rows, Mapping) or not hasattr(rows, "__getitem__")):
        kind = f"a {type(rows).__name__}: choose a split, or pass list(...)"
        raise ValueError(f"dataset: must be a list of examples or a datasets.Dataset, not {kind}")
    if rows is None and source in PROBLEMS:
        if split not in ("train", "test"):
            raise ValueError(f"{source}: there is no split {split}; it has train and test")
        return PROBLEMS[source](split, seed)[:limit]
    rows = read_rows(source, split) if rows is None else rows
    count = min(limit or len(rows), len(rows))
    if count == 0:
        raise ValueError(f"{source}: no examples in it")
    for number, row in enumerate(islice(rows, count), start=1):
        as_example(row, f"{source}: example {number}", columns or {})
    return View(rows, range(count), partial(as_example, where=source, columns=columns or {}))


def as_example(row: dict, where: str, columns: dict[str, str]) -> dict:
    """Validate a row and add prompt, answer and completion to its columns, under these names."""
    row = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    found, existing = {}, f"{where} has columns {', '.join(row) or 'none'}"
    is_template = (named := set(re.findall(r"\{(\w+)\}", columns.get("prompt", "")))) and named <= row.keys()
    if is_template:
        row["prompt"] = re.sub(r"\{(\w+)\}", lambda name: str(row[name[1]]), columns["prompt"])
        columns = columns | {"prompt": "prompt"}
    for name, candidates in COLUMNS.items():
        chosen = columns.get(name)
        if chosen and chosen not in row:
            raise ValueError(f"--{name}_column={chosen}: {existing}")
        free = (c for c in candidates if c not in columns.values() and row.get(c) is not None)
        found[name] = chosen or next(free, None)
    if found["prompt"] is None:
        names = f"{', '.join(COLUMNS['prompt'])}, or --prompt_column, a name or a text such as"
        raise ValueError(f"{existing}; it needs one of {names} '... {{{'} ... {'.join(row)}}}'")
    example = row | {name: row[column] for name, column in found.items() if column}
    if not is_template:
        example["prompt"] = complete_prompt(found["prompt"], row)
    prompt = example["prompt"]
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            raise ValueError(f'{where}: chat messages must look like {{"role": "user", "content": "..."}}')
        if prompt and prompt[-1]["role"] == "assistant":                # the last turn is the demonstration
            example["completion"] = prompt[-1]["content"]
            example["prompt"] = prompt = prompt[:-1]
    elif not isinstance(prompt, str):
        kind = type(prompt).__name__
        raise ValueError(f"{where}: the prompt must be text or chat messages, not {kind}: {prompt!r}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{where}: the prompt is empty")
    completion = example.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        example["completion"] = completion[0].get("content")                     # an assistant's message
    elif completion is not None and not isinstance(completion, str) and not is_alternating(completion):
        expected = "text, an assistant's message, or such messages with others between them"
        raise ValueError(f"{where}: the completion must be {expected}, not {completion!r}")
    if "nums" in row:
        example.setdefault("numbers", row["nums"])        # Countdown, for the reward function of that name
    if "answer" in example:
        example["answer"], reasoning = split_answer(example["answer"], row)
        if reasoning and not example.get("completion"):
            example["completion"] = demonstration(reasoning, example["answer"])
    return example


def is_alternating(messages) -> bool:
    """Check that messages are chat messages and alternate, from the assistant's to the assistant's."""
    try:
        return len(messages) % 2 == 1 and all(
            isinstance(message["content"], str) and (message["role"] == "assistant") == (number % 2 == 0)
            for number, message in enumerate(messages)
        )
    except (TypeError, KeyError):
        return False


def with_instruction(example: dict, instruction: str) -> dict:
    """Put an instruction before an example's prompt, or into the first message of its conversation."""
    if not instruction:
        return example
    prompt = example["prompt"]
    if isinstance(prompt, str):
        return example | {"prompt": f"{instruction}\n{prompt}"}
    first = prompt[0] | {"content": f"{instruction}\n{prompt[0]['content']}"}
    return example | {"prompt": [first, *prompt[1:]]}


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Encode a prompt up to the start of the completion, with the chat template if the tokenizer has one.

    prompt  a string, chat messages, or token ids (returned unchanged). There is one BOS token: the template's
            if there is a template, else the tokenizer's. Without a template text stays as it is, with its
            special tokens.
    """
    if is_ids(prompt):
        return prompt
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True))
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    text = as_text(mark_special_tokens(tokenizer, messages))
    return encode(tokenizer, f"{text}\nassistant: ", add_special_tokens=True)


def encode_completion(tokenizer, completion: str, stop_ids: list[int]) -> list[int]:
    """Encode a demonstration, ending with one stop token: the one that the chat template adds, else EOS."""
    if tokenizer.chat_template:
        completion += after_turn(tokenizer)               # not rendered itself: a template may trim it
    ids = encode(tokenizer, completion)
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


def encode_demonstration(
    tokenizer, prompt, completion: str | list[dict], stop_ids: list[int]
) -> tuple[list[int], list[bool]]:
    """Encode a demonstration, text or messages: token ids, and True where they are the assistant's."""
    ids, is_assistant = [], []
    turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    for message in turns:
        own = message["role"] == "assistant"
        part = (
            encode_completion(tokenizer, message["content"], stop_ids) if own
            else encode_reply(tokenizer, prompt, message, stop_ids)
        )
        ids += part
        is_assistant += [own] * len(part)
    return ids, is_assistant
