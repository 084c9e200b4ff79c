"""
Rows of files, the Hugging Face hub, TensorFlow Datasets and Kaggle, as sequences that read a row when it is asked for.

Data may be larger than memory: of a .jsonl file only the offsets of its lines are kept, most others are mapped into memory by
`datasets`. A .json file is held whole. data.py turns rows into examples.
"""

import importlib
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from sources.tasks import PROBLEMS

READERS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet"}        # who of `datasets` reads it, if not we


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
