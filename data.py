"""
Where prompts come from: built-in problems (problems.py), files and hubs; and the order they are used in.

An example is a dict with "prompt" (a string, or a list of chat messages) and, where known, "answer" (for rewards) and
"completion" (a demonstration, for supervised training; text, or the messages of a conversation). Other columns are passed on
to the reward functions.

Data may be larger than memory: rows are read when they are asked for, of a .jsonl file through the places where its lines
begin, of most others through files that `datasets` maps into memory. A .json file and built-in problems are held whole.
"""

import hashlib
import importlib
import json
import math
import random
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from encode import as_messages, is_ids
from problems import PROBLEMS, demonstration

READERS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet"}        # who of `datasets` reads it, if not we
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


class View(Sequence):
    """Some rows of a sequence in some order, each changed by a function whenever it is asked for. Holds their indices alone."""

    def __init__(self, rows: Sequence, indices: Sequence[int], change: Callable):
        self.rows, self.indices, self.change = rows, indices, change

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):
        chosen = self.indices[index]
        return [self.change(self.rows[i]) for i in chosen] if isinstance(index, slice) else self.change(self.rows[chosen])

    def __iter__(self):
        return (self.change(self.rows[i]) for i in self.indices)

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


# ---- files and hubs ------------------------------------------------------------------------------------------------


def read_rows(source: str, split: str, bad_lines: str) -> Sequence[dict]:
    """The rows of whatever is not built in, with the columns that they come with."""
    if source.startswith("tfds:"):
        return read_tfds(source.removeprefix("tfds:"), split)
    if source.startswith("kaggle:"):
        return read_file(download_from_kaggle(source.removeprefix("kaggle:")), bad_lines)
    return read_file(Path(source), bad_lines) if Path(source).suffix in READERS else read_hub(source, split)


def read_file(path: Path, bad_lines: str) -> Sequence[dict]:
    """Rows of a data file, as a list, JsonLines or a datasets.Dataset."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    if path.suffix == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if isinstance(content, dict):                                            # {"prompts": [...]}
            content = content.get("prompts")
        if not isinstance(content, list):
            raise ValueError(f'{path}: must hold a list of examples, or {{"prompts": [...]}}')
        return [row if isinstance(row, dict) else {"prompt": row} for row in content]

    if path.suffix == ".jsonl":
        return JsonLines(path, bad_lines)
    import datasets  # slow to import, and not needed for the built-in problems

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)                    # what goes wrong is said here, in one line
    try:
        return datasets.load_dataset(READERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {in_one_line(error.__cause__ or error)}") from None


class JsonLines(Sequence):
    """The objects of a .jsonl file, read when they are asked for; in memory is where their lines begin, 8 bytes each.

    `datasets` would not say which line is to blame, and turns "2020-01-01" into a date.
    """

    def __init__(self, path: Path, bad_lines: str):
        self.file, self.starts, bad, end = path.open("rb"), array("q"), [], 0
        for number, line in enumerate(self.file, start=1):
            start, end = end, end + len(line)
            if not line.strip():
                continue
            try:
                row, problem = parse(line), 'not an object such as {"prompt": "...", "answer": "..."}'
            except ValueError as error:
                row, problem = None, f"not JSON: {error}"
            if isinstance(row, dict):
                self.starts.append(start)
                continue
            if bad_lines == "error":
                raise ValueError(f"{path}: line {number} is {problem}; mend it, or pass --bad_lines skip")
            bad.append(number)
        if bad:
            total = len(self.starts) + len(bad)
            print(f"{path}: left out {len(bad)} of {total} lines that are not JSON objects: {bad[:5]}", file=sys.stderr)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict:
        self.file.seek(self.starts[index])
        return parse(self.file.readline())


def parse(line: bytes):
    """What a line of a .jsonl file says. Bytes that are not UTF-8 become U+FFFD, so that one of them costs no line."""
    return json.loads(line.decode("utf-8", errors="replace"))


def read_hub(source: str, split: str) -> Sequence[dict]:
    """One split of a data set on the Hugging Face hub, or of a folder that `datasets` understands."""
    name, _, configuration = source.partition(":")
    kinds = f"not built in ({', '.join(PROBLEMS)}) and not a file ending in {', '.join(READERS)}"
    if "/" not in name:
        raise ValueError(f"{source}: {kinds}; ids on the hub look like openai/gsm8k")
    import datasets  # slow to import

    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:
        raise ValueError(f"{source}: {kinds}, and the hub answers: {in_one_line(error)}{without(split)}") from None


def read_tfds(name: str, split: str) -> Sequence[dict]:
    """One split of a data set of TensorFlow Datasets, prepared in its folder on first use. Needs no credentials."""
    tfds = optional("tensorflow_datasets", f"tfds:{name}", "tensorflow_datasets array_record importlib_resources")
    try:
        # It registers its data sets group by group and stops, silently, at a group that lacks a package; so text by name.
        importlib.import_module("tensorflow_datasets.text")
        rows = tfds.data_source(name, split=split)
    except Exception as error:
        raise ValueError(f"tfds:{name}: TensorFlow Datasets answers: {in_one_line(error)}{without(split)}") from None
    return View(rows, range(len(rows)), plain)


def plain(value):
    """A value of TensorFlow Datasets as JSON would have it: text for bytes, numbers and lists for those of numpy."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def download_from_kaggle(name: str) -> Path:
    """Where kagglehub keeps a file of a data set on Kaggle, fetched on first use. name: owner/name/file.csv"""
    owner, _, rest = name.partition("/")
    dataset, _, file = rest.partition("/")
    if not file or Path(file).suffix not in READERS:
        raise ValueError(f"kaggle:{name}: write kaggle:owner/name/file, with a file ending in {', '.join(READERS)}")
    kagglehub = optional("kagglehub", f"kaggle:{name}", "kagglehub")
    try:
        return Path(kagglehub.dataset_download(f"{owner}/{dataset}", path=file))
    except Exception as error:
        raise ValueError(
            f"kaggle:{name}: Kaggle answers: {in_one_line(error)}; what is not public needs credentials, in "
            "~/.kaggle/kaggle.json or as KAGGLE_USERNAME and KAGGLE_KEY"
        ) from None


def optional(package: str, source: str, to_install: str):
    """A package that only some data needs."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{source}: {error}; pip install {to_install}") from None


def in_one_line(error: BaseException) -> str:
    """What a library said, without the lines below it."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def without(split: str) -> str:
    """What to do about a test split that is not there."""
    return "; should it have no test split: --eval_dataset, or --eval_limit 0" if split == "test" else ""


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
