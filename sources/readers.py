"""
Readers of files, the Hugging Face hub, TensorFlow Datasets and Kaggle: sequences that read a row on access.

Data may be larger than memory: of a .jsonl file only the offsets of its lines are kept, most other formats
are memory-mapped by `datasets`. A .json file is held in memory.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from data import parse_json, parse_line
from engine.errors import first_line
from sources.tasks import PROBLEMS

READERS = {".jsonl": "", ".json": "", ".csv": "csv", ".parquet": "parquet"}  # builder in `datasets`; "": here
OTHER_SPLITS = "other splits: --train_split, --eval_dataset and --eval_split, or --eval_limit 0"
CSV_AS_TEXT = dict(encoding="utf-8-sig", na_filter=False, converters=dict.fromkeys(range(10_000), str))


def read_rows(source: str, split: str) -> Sequence[dict]:
    """Return the rows of a file or a hub, with their original columns."""
    if source.startswith("tfds:"):
        return read_tfds(source.removeprefix("tfds:"), split)
    if source.startswith("kaggle:"):
        return read_file(download_from_kaggle(source.removeprefix("kaggle:")))
    return read_file(Path(source)) if Path(source).suffix in READERS else read_hub(source, split)


def read_file(path: Path) -> Sequence[dict]:
    """Return the rows of a data file: a list, a View or a datasets.Dataset."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".jsonl":
        return index_json_lines(path)
    if path.suffix == ".json":
        try:
            content = parse_json(path.read_text(encoding="utf-8-sig"))           # without a byte-order mark
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if isinstance(content, dict):                                            # {"prompts": [...]}
            content = content.get("prompts")
        if not isinstance(content, list):
            raise ValueError(f'{path}: must hold a list of examples, or {{"prompts": [...]}}')
        return content
    import datasets  # slow to import

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)     # errors are reported below, in one line
    builder, options = READERS[path.suffix], CSV_AS_TEXT if path.suffix == ".csv" else {}
    try:
        rows = datasets.load_dataset(builder, data_files=str(path), split="train", **options)
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {reason}") from None
    if any(name.startswith("__index_level_") for name in rows.column_names):
        raise ValueError(f"{path}: rows have more cells than the header; put cells with a comma in quotes")
    if path.suffix == ".csv":                             # text as it stands: not 7 for 007, nor NaN for NA
        return View(rows, range(len(rows)), lambda row: {name: cell or None for name, cell in row.items()})
    return rows


def index_json_lines(path: Path) -> Sequence[dict]:
    """Return the objects of a .jsonl file, parsed on access: memory holds the offsets of lines, 8 bytes each.

    (The reader of `datasets` does not report the number of a bad line, and converts "2020-01-01" to a date.)
    """
    file, offsets, offset = path.open("rb"), array("q"), 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            parse_line(line, f"{path}: line {number}")
            offsets.append(offset)
        offset += len(line)

    def parse_at(offset: int) -> dict:
        file.seek(offset)
        return parse_line(file.readline(), f"{path}: the line at byte {offset}")

    return View(offsets, range(len(offsets)), parse_at)


class View(Sequence):
    """Read rows of a sequence at given indices, transformed by a function on access. Holds no rows."""

    def __init__(self, rows: Sequence, indices: Sequence[int], transform: Callable):
        self.rows, self.indices, self.transform = rows, indices, transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index):
        chosen = self.indices[index]
        if isinstance(index, slice):
            return [self.transform(self.rows[i]) for i in chosen]
        return self.transform(self.rows[chosen])

    def __iter__(self):
        return (self.transform(self.rows[i]) for i in self.indices)

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def read_hub(source: str, split: str) -> Sequence[dict]:
    """Return a split of a data set on the Hugging Face hub, or of a folder in a format of `datasets`."""
    name, _, configuration = source.partition(":")
    kinds = f"not built in ({', '.join(PROBLEMS)}) and not a file ending in {', '.join(READERS)}"
    if "/" not in name:
        raise ValueError(f"{source}: {kinds}; ids on the hub look like openai/gsm8k")
    import datasets  # slow to import

    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:
        reason = f"and the hub answers: {first_line(error)}; {OTHER_SPLITS}"
        raise ValueError(f"{source}: {kinds}, {reason}") from None


def read_tfds(name: str, split: str) -> Sequence[dict]:
    """Return a split of a data set of TensorFlow Datasets, prepared in its folder on first use."""
    def as_json_value(value):                             # of numpy, or bytes
        return value.tolist() if hasattr(value, "tolist") else value.decode("utf-8", errors="replace")

    try:
        import tensorflow_datasets as tfds
        # The package registers its data sets in groups and stops silently at a group whose requirements are
        # not installed, so the group of text data sets is imported explicitly.
        import tensorflow_datasets.text

        rows = tfds.data_source(name, split=split)
    except Exception as error:
        raise ValueError(
            f"tfds:{name}: TensorFlow Datasets answers: {first_line(error)}; it needs pip install "
            f"tensorflow_datasets array_record importlib_resources; {OTHER_SPLITS}"
        ) from None
    return View(rows, range(len(rows)), lambda row: json.loads(json.dumps(row, default=as_json_value)))


def download_from_kaggle(name: str) -> Path:
    """Return the path of a file of a Kaggle data set in kagglehub's cache; name is owner/name/file.csv."""
    owner, dataset, file = [*name.split("/", 2), "", ""][:3]
    if Path(file).suffix not in READERS:
        endings = ", ".join(READERS)
        raise ValueError(f"kaggle:{name}: write kaggle:owner/name/file, with a file ending in {endings}")
    try:
        import kagglehub

        return Path(kagglehub.dataset_download(f"{owner}/{dataset}", path=file))
    except Exception as error:
        raise ValueError(
            f"kaggle:{name}: Kaggle answers: {first_line(error)}; it needs pip install kagglehub, and for "
            "private data sets ~/.kaggle/kaggle.json or KAGGLE_USERNAME and KAGGLE_KEY"
        ) from None
