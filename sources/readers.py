"""Readers of files, the Hugging Face hub, TensorFlow Datasets and Kaggle."""

import csv
import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data import read_json_lines
from engine.errors import first_line
from sources import GYM
from sources.tasks import PROBLEMS

SUFFIXES = ".jsonl", ".json", ".csv", ".parquet"
OTHER_SPLITS = "other splits: --train_split, --eval_dataset and --eval_split, or --eval_limit 0"


def read_rows(source: str | Sequence, split: str, seed: int) -> Iterable:
    """Return rows like data.load_examples, but from more sources.

    source   also a .json, .csv or .parquet file; an id on the Hugging Face hub such as "openai/gsm8k:main"
             (name:configuration); "tfds:gsm8k"; "kaggle:owner/name/file.csv"; "countdown"; "guess_letter";
             "reasoning_gym:chain_sum,countdown"; a Python file with a function examples(split)
    split    also another split on a hub, or a part of it such as "train[:90%]"
    """
    rows = source
    if isinstance(source, str):
        if source in PROBLEMS:
            return PROBLEMS[source](split, seed)
        if source.startswith(GYM):
            from sources.gym_tasks import gym_examples    # only for these tasks

            return gym_examples(source, split, seed)
        if source.endswith(".py"):
            from reward_functions.loading import function_from_file              # only for tasks

            return function_from_file("dataset", f"{source}:examples", ())(split)
        if source.startswith("tfds:"):
            return read_tfds(source, split)
        path = download_from_kaggle(source) if source.startswith("kaggle:") else source
        rows = read_file(path) if Path(path).suffix in SUFFIXES else read_hub(source, split)
    return with_types(rows, rows.features) if getattr(rows, "features", None) else rows


def has_splits(source: str | Sequence) -> bool:
    """Return True if a source has splits: built-in problems and hubs, but no files or lists."""
    return isinstance(source, str) and Path(source).suffix not in SUFFIXES


def refuse_split(name: str, split: str, default: str, source: str | Sequence) -> None:
    """Raise ValueError if a split is chosen for a source without splits."""
    if split != default and not has_splits(source):
        raise ValueError(
            f"--{name}={split}: all rows of a file or list are used; write others to another file")


def with_types(rows: Sequence, features: dict) -> Iterable[dict]:
    """Return rows of `datasets` with names in place of label numbers, and 0.1 for a float32 of 0.1."""
    labels = {name: feature for name, feature in features.items() if hasattr(feature, "int2str")}
    short = [name for name, feature in features.items() if getattr(feature, "dtype", "") == "float32"]
    for row in rows:
        named = {name: labels[name].int2str(row[name]) for name in labels if row[name] not in (None, -1)}
        exact = {name: float(str(np.float32(row[name]))) for name in short if row[name] is not None}
        yield row | named | exact


def read_file(path: str) -> Sequence:
    """Return the rows of a data file."""
    suffix = Path(path).suffix
    if suffix == ".jsonl":
        return read_json_lines(path)
    try:
        return {".json": read_json, ".csv": read_csv, ".parquet": read_parquet}[suffix](path)
    except Exception as error:
        raise ValueError(f"{path}: cannot be read as {suffix}: {first_line(error)}") from None


def read_json(path: str) -> list:
    """Return the rows of a .json file: a list, or the list in {"prompts": [...]}."""
    content = json.loads(Path(path).read_bytes())
    rows = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError('it must hold a list of examples, or {"prompts": [...]}')
    return rows


def read_csv(path: str) -> list[dict]:
    """Return the rows of a .csv file. A cell is unchanged text, 007 and not 7, or None if it is empty."""
    csv.field_size_limit(2**31 - 1)                       # characters per cell, not 131072
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows, names = list(reader), reader.fieldnames or []
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the header has two columns {twice[0]!r}; rename one of them")
    if any(None in row for row in rows):
        raise ValueError("a row has more cells than the header; put cells with a comma in quotes")
    return [{name: text or None for name, text in row.items()} for row in rows]


def read_parquet(path: str) -> Sequence[dict]:
    """Return the rows of a .parquet file."""
    import datasets  # slow to import; it requires pyarrow
    import pyarrow.parquet

    return datasets.Dataset(pyarrow.parquet.read_table(path))


def read_hub(source: str, split: str) -> Sequence[dict]:
    """Return a split of a data set on the Hugging Face hub, or of a folder in a format of `datasets`."""
    name, _, configuration = source.partition(":")
    kinds = f"not built in ({', '.join(PROBLEMS)}) and not a file ending in {', '.join(SUFFIXES)}"
    if "/" not in name:
        raise ValueError(f"{source}: {kinds}; ids on the hub look like openai/gsm8k")
    import datasets  # slow to import

    load = partial(datasets.load_dataset, name, configuration or None, split=split)
    try:
        rows = load()
        is_csv = getattr(rows, "builder_name", "") == "csv"
        return load(keep_default_na=False) if is_csv else rows                   # NA is text
    except Exception as error:
        reason = f"and the hub answers: {first_line(error)}; {OTHER_SPLITS}"
        raise ValueError(f"{source}: {kinds}, {reason}") from None


def read_tfds(source: str, split: str) -> Iterable[dict]:
    """Return a split of a data set of TensorFlow Datasets, prepared in its folder on first use."""
    try:
        import tensorflow_datasets as tfds
        # Without this import, the package stops silently at a group of data sets whose requirements it lacks.
        import tensorflow_datasets.text

        return map(as_value, tfds.data_source(source.removeprefix("tfds:"), split=split))
    except Exception as error:
        raise ValueError(
            f"{source}: TensorFlow Datasets answers: {first_line(error)}; it needs pip install "
            f"tensorflow_datasets array_record importlib_resources; {OTHER_SPLITS}") from None


def as_value(value):
    """Return a value of TensorFlow Datasets as Python types: bytes as text, arrays as lists or numbers."""
    if isinstance(value, dict):
        return {name: as_value(entry) for name, entry in value.items()}
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return list(map(as_value, value))
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def download_from_kaggle(source: str) -> str:
    """Return the path of a file of kaggle:owner/name/file in kagglehub's cache."""
    owner, dataset, file = [*source.removeprefix("kaggle:").split("/", 2), "", ""][:3]
    if Path(file).suffix not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        raise ValueError(f"{source}: write kaggle:owner/name/file, with a file ending in {endings}")
    try:
        import kagglehub

        return kagglehub.dataset_download(f"{owner}/{dataset}", path=file)
    except Exception as error:
        raise ValueError(
            f"{source}: Kaggle answers: {first_line(error)}; it needs pip install kagglehub, and for private "
            "data sets ~/.kaggle/kaggle.json or KAGGLE_USERNAME and KAGGLE_KEY") from None
