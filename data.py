"""
Where prompts come from: built-in problems (sources/tasks.py), files and hubs; and the order they are used in.

An example is a dict with "prompt" (a string, or a list of chat messages) and, where known, "answer" (for rewards) and
"completion" (a demonstration, for supervised training; text, or the messages of a conversation). Other columns are passed on
to the reward functions.

Data may be larger than memory: rows are read when they are asked for, of a .jsonl file through the places where its lines
begin, of most others through files that `datasets` maps into memory. A .json file and built-in problems are held whole.
"""

import hashlib
import math
import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from engine.chat_template import as_messages, as_text, encode_reply, is_ids, render
from sources.readers import View, read_rows
from sources.tasks import PROBLEMS, demonstration

COLUMNS = {                     # the names that columns are found under, the first one first
    "prompt": ("prompt", "question", "problem", "instruction", "messages"),
    "answer": ("answer", "solution", "target"),
    "completion": ("completion", "response", "output"),
}


def load_examples(
    source: str, split: str = "train", *, limit: int | None = None, seed: int = 0, bad_lines: str = "error",
    columns: dict[str, str] | None = None,
) -> Sequence[dict]:
    """Examples of a built-in task, a .jsonl, .json, .csv or .parquet file, the Hugging Face hub, TFDS or Kaggle.

    source     "arithmetic", "countdown" or "guess_letter"; a path; a hub id such as "openai/gsm8k:main" (configuration after
               the colon); "tfds:gsm8k"; "kaggle:owner/name/file.csv"
    split      "train" or "test"; a file is one split, whatever this says
    limit      at most so many examples, from the start
    seed       the order of the built-in problems; which of them are test problems never changes
    bad_lines  a line of a .jsonl file that is not JSON: "error", or "skip" with a line on stderr that counts them
    columns    {"prompt": "question", "answer": ..., "completion": ...}; what is left out or empty is found as COLUMNS says
    returns    a sequence that holds no rows but reads them, slices of it are lists; every row was looked at once
    raises     ValueError, one line that names the source and, where there is one, the line
    """
    if source in PROBLEMS:
        if split not in ("train", "test"):
            raise ValueError(f"{source}: there is no split {split}; it has train and test")
        return PROBLEMS[source](split, seed)[:limit]
    rows = read_rows(source, split, bad_lines)
    count = min(limit or len(rows), len(rows))
    if count == 0:
        raise ValueError(f"{source}: no examples in it")
    for number, row in enumerate(islice(rows, count), start=1):
        as_example(row, f"{source}: example {number}", columns or {})
    return View(rows, range(count), partial(as_example, where=source, columns=columns or {}))


def as_example(row: dict, where: str, columns: dict[str, str]) -> dict:
    """Give a row the names prompt, answer and completion; the other columns stay as they are."""
    found = {}
    for name, usual in COLUMNS.items():
        asked = columns.get(name)
        if asked and asked not in row:
            raise ValueError(f"--{name}_column={asked}: {where} has columns {', '.join(row) or 'none'}")
        free = (column for column in usual if column not in columns.values() and row.get(column) is not None)
        found[name] = asked or next(free, None)
    if found["prompt"] is None:
        needed = f"one of {', '.join(COLUMNS['prompt'])}, or --prompt_column"
        raise ValueError(f"{where} has columns {', '.join(row) or 'none'}; it needs {needed}")
    example = {name: value for name, value in row.items() if name not in found.values()}
    example |= {name: row[column] for name, column in found.items() if column}
    prompt = example["prompt"]
    if isinstance(prompt, list):
        if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt):
            raise ValueError(f'{where}: chat messages must look like {{"role": "user", "content": "..."}}')
        if prompt and prompt[-1]["role"] == "assistant":                         # a whole conversation: the end is the lesson
            example["completion"] = prompt[-1]["content"]
            example["prompt"] = prompt = prompt[:-1]
    elif not isinstance(prompt, str):
        raise ValueError(f"{where}: the prompt must be text or chat messages, not {type(prompt).__name__}: {prompt!r}")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ValueError(f"{where}: the prompt is empty")
    completion = example.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        example["completion"] = completion[0].get("content")                     # an assistant's message
    elif completion is not None and not isinstance(completion, str) and not takes_turns(completion):
        raise ValueError(
            f"{where}: the completion must be text, an assistant's message, or such messages with others between them, "
            f"not {completion!r}"
        )
    answer = example.get("answer")
    if isinstance(answer, str) and "####" in answer:                             # GSM8K: the solution, then the answer
        solution, _, final = answer.rpartition("####")
        example["answer"] = final.strip().replace(",", "")
        reasoning = re.sub(r"<<.*?>>", "", solution).strip()                     # calculator annotations
        example["completion"] = example.get("completion") or demonstration(reasoning, example["answer"])
    elif answer is not None:
        example["answer"] = str(answer)
    return example


def takes_turns(messages) -> bool:
    """Whether these are chat messages, every second one the assistant's, the first and the last among them."""
    try:
        return len(messages) % 2 == 1 and all(
            isinstance(message["content"], str) and (message["role"] == "assistant") == (number % 2 == 0)
            for number, message in enumerate(messages)
        )
    except (TypeError, KeyError):
        return False


def with_instruction(example: dict, instruction: str) -> dict:
    """The example with text put before its prompt, or before the first message of its conversation."""
    if not instruction:
        return example
    prompt = example["prompt"]
    if isinstance(prompt, str):
        return example | {"prompt": f"{instruction}\n{prompt}"}
    first = prompt[0] | {"content": f"{instruction}\n{prompt[0]['content']}"}
    return example | {"prompt": [first, *prompt[1:]]}


# ---- order ---------------------------------------------------------------------------------------------------------


def prompt_key(prompt) -> str:
    """The same for prompts that differ in white space or case alone, or in being text or a user's message."""
    if is_ids(prompt):
        return str(prompt)
    return " ".join(" ".join(f"{m['role']} {m['content']}" for m in as_messages(prompt)).casefold().split())


@dataclass
class PromptMemory:
    """What the completions of each prompt have earned in a run, and how much there still is to be learned from it.

    Where siblings earn the same, nothing is learned; so a prompt is worth asking by the spread of its rewards so far. With
    two more, the lowest and the highest that any completion of the run has earned, it comes out between 0 and 1:

        chance = 4 * variance(rewards of the prompt + [lowest, highest]) / (highest - lowest) ** 2

    For rewards of 0 and 1 that is 4 * p * (1 - p) with p = (successes + 1) / (completions + 2), Laplace's rule of succession:
    1 for a prompt that is new or half solved, 0.56 after four failures, ever nearer to 0 and never there for one that is
    always or never solved. variance is the mean squared deviation from the mean.

    All fields are plain numbers, for a checkpoint.
    """

    lowest: float = math.inf                              # points
    highest: float = -math.inf
    earned: dict = field(default_factory=dict)            # digest of a prompt: (completions, points, squared points), sums

    def record(self, prompts: list, rewards: list[list[float]]) -> None:
        """Take in the rewards (P, G) of prompts, in points; NaN is left out."""
        for prompt, group in zip(prompts, rewards, strict=True):
            scored = [points for points in group if not math.isnan(points)]
            count, total, squares = self.earned.get(digest(prompt), (0, 0.0, 0.0))
            squares += sum(points**2 for points in scored)
            self.earned[digest(prompt)] = count + len(scored), total + sum(scored), squares
            self.lowest, self.highest = min([self.lowest, *scored]), max([self.highest, *scored])

    def chance(self, prompt) -> float:
        """How worth asking a prompt is, from 0 to 1."""
        count, total, squares = self.earned.get(digest(prompt), (0, 0.0, 0.0))
        if count == 0 or self.lowest == self.highest:
            return 1.0
        mean = (total + self.lowest + self.highest) / (count + 2)
        mean_square = (squares + self.lowest**2 + self.highest**2) / (count + 2)
        return 4 * (mean_square - mean**2) / (self.highest - self.lowest) ** 2


def digest(prompt) -> str:
    """A short name for a prompt."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()


class ShuffledBatches:
    """Endless batches over examples, shuffled anew every epoch. Its whole state is `position`, an int: save it, set it.

    memory  None: every epoch hands out all examples. A PromptMemory: each is handed out with the chance of its prompt at
            that moment, else passed over, so that prompts with mixed results come more often. The draw depends on seed and
            position alone: the same seed and the same rewards give the same order.
    """

    def __init__(self, examples: Sequence, batch_size: int, seed: int, memory: PromptMemory | None = None):
        self.examples, self.batch_size, self.seed, self.memory = examples, batch_size, seed, memory
        self.position = 0                                 # examples handed out or passed over so far
        self.epoch, self.order = -1, array("q")

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """The next so many examples."""
        batch = []
        while len(batch) < count:
            epoch, index = divmod(self.position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, array("q", range(len(self.examples)))
                random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            example = self.examples[self.order[index]]
            draw = random.Random(f"{self.seed} at {self.position}")
            if self.memory is None or draw.random() < self.memory.chance(example["prompt"]):
                batch.append(example)
            self.position += 1
        return batch


def encode_prompt(tokenizer, prompt) -> list[int]:
    """Token ids of a prompt, ready to be continued: with the chat template where the tokenizer has one.

    prompt  a string, chat messages, or token ids (returned as they are). BOS comes once: from the template if there
            is one, from the tokenizer otherwise.
    """
    if is_ids(prompt):
        return prompt
    messages = as_messages(prompt)
    if tokenizer.chat_template:
        return tokenizer(render(tokenizer, messages, add_generation_prompt=True), add_special_tokens=False).input_ids
    if isinstance(prompt, str):
        return tokenizer(prompt).input_ids
    return tokenizer(f"{as_text(messages)}\nassistant: ").input_ids


def encode_completion(tokenizer, prompt, completion: str, stop_ids: list[int]) -> list[int]:
    """Token ids of a demonstration, ending with one stop token: the one that the chat template puts there, else EOS."""
    text = completion
    if tokenizer.chat_template:
        messages = as_messages(prompt)                    # of ids nothing: how a turn ends does not depend on it
        before = render(tokenizer, messages, add_generation_prompt=True)
        whole = render(tokenizer, [*messages, {"role": "assistant", "content": completion}], add_generation_prompt=False)
        if whole.startswith(before + completion):
            text = whole[len(before) :]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    return [*ids, tokenizer.eos_token_id] if stop is None else ids[: stop + 1]


def encode_demonstration(tokenizer, prompt, completion: str | list[dict], stop_ids: list[int]) -> tuple[list[int], list[bool]]:
    """Token ids of a demonstration, and which of them the assistant says; completion: text, or messages in turn."""
    ids, spoken = [], []
    for message in completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]:
        own = message["role"] == "assistant"
        part = (
            encode_completion(tokenizer, prompt, message["content"], stop_ids) if own
            else encode_reply(tokenizer, prompt, message, stop_ids)
        )
        ids += part
        spoken += [own] * len(part)
    return ids, spoken
