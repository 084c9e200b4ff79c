"""Readers of files, the Hugging Face hub, TensorFlow Datasets and Kaggle."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data import read_json_lines
from engine.errors import first_line
from guards import as_value, parse_json, require_sequence
from sources import GYM
from sources.tasks import PROBLEMS

SUFFIXES = ".jsonl", ".json", ".csv", ".parquet"
OTHER_SPLITS = "other splits: --train_split, --eval_dataset and --eval_split, or --eval_limit 0"


def read_rows(source: str | Sequence, split: str, seed: int, columns: dict[str, str]) -> Iterable[dict]:
    """Return rows like data.read_source, but from more sources and in more formats.

    source   also a .json, .csv or .parquet file; an id on the Hugging Face hub such as "openai/gsm8k:main"
             (name:configuration); "tfds:gsm8k"; "kaggle:owner/name/file.csv"; "countdown"; "guess_letter";
             "reasoning_gym:chain_sum,countdown"
    split    also another split on a hub, or a part of it such as "train[:90%]"
    """
    if not isinstance(source, str):
        rows = require_sequence(source)
    elif source in PROBLEMS:
        return PROBLEMS[source](split, seed)
    elif source.startswith(GYM):
        from sources.gym_tasks import gym_examples        # only for these tasks

        return gym_examples(source, split, seed)
    elif source.startswith("tfds:"):
        rows = read_tfds(source, split)
    elif source.startswith("kaggle:"):
        rows = read_file(download_from_kaggle(source))
    elif Path(source).suffix in SUFFIXES:
        rows = read_file(source)
    else:
        rows = read_hub(source, split)
    from sources.published_forms import as_published      # built-in problems do not need it

    features = getattr(rows, "features", None) or {}  # of datasets
    return (as_published(with_types(row, features), columns) for row in rows)


def with_types(row, features: dict):
    """Return a row of `datasets` with names in place of label numbers, and 0.1 for a float32 of 0.1."""
    typed = {}
    for name in [name for name in features if row[name] is not None]:
        inner = getattr(features[name], "feature", features[name])               # of a list
        if hasattr(inner, "int2str"):
            typed[name] = np.array([*inner.names, None])[row[name]]              # -1, the last: no label
        elif getattr(inner, "dtype", "") == "float32":
            typed[name] = np.array(row[name], "float32")
    return row | as_value(typed) if typed else row


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
    content = parse_json(Path(path).read_bytes())
    rows = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError('it must hold a list of examples, or {"prompts": [...]}')
    return rows


def read_csv(path: str) -> list[dict]:
    """Return the rows of a .csv file. A cell is unchanged text, 007 and not 7, or None if it is empty."""
    csv.field_size_limit(2**31 - 1)                       # characters per cell, not 131072
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
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

    try:
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:
        reason = f"and the hub answers: {first_line(error)}; {OTHER_SPLITS}"
        raise ValueError(f"{source}: {kinds}, {reason}") from None


def read_tfds(source: str, split: str) -> Iterable[dict]:
    """Return a split of a data set of TensorFlow Datasets, prepared in its folder on first use."""
    try:
        import tensorflow_datasets as tfds
        # The package registers its data sets in groups and stops silently at a group whose requirements are
        # not installed, so the group of text data sets is imported explicitly.
        import tensorflow_datasets.text

        rows = tfds.data_source(source.removeprefix("tfds:"), split=split)
    except Exception as error:
        raise ValueError(
            f"{source}: TensorFlow Datasets answers: {first_line(error)}; it needs pip install "
            f"tensorflow_datasets array_record importlib_resources; {OTHER_SPLITS}"
        ) from None
    return map(as_value, rows)


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
            "data sets ~/.kaggle/kaggle.json or KAGGLE_USERNAME and KAGGLE_KEY"
        ) from None
