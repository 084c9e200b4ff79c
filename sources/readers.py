"""
Readers of files, the Hugging Face hub, TensorFlow Datasets and Kaggle.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data import number_rows, parse_json, read_json_lines, require_sequence
from engine.errors import first_line
from sources import GYM
from sources.published_forms import as_published
from sources.tasks import PROBLEMS

SUFFIXES = ".jsonl", ".json", ".csv", ".parquet"
OTHER_SPLITS = "other splits: --train_split, --eval_dataset and --eval_split, or --eval_limit 0"
CSV_AS_TEXT = dict(encoding="utf-8-sig", na_filter=False, converters=dict.fromkeys(range(10_000), str))


def read_rows(
    source: str | Sequence, split: str, seed: int, columns: dict[str, str]
) -> Iterator[tuple[str, dict]]:
    """Return rows as data.read_source does, from more sources and in the forms of published data sets.

    source   also a .json, .csv or .parquet file; an id on the Hugging Face hub such as "openai/gsm8k:main"
             (name:configuration); "tfds:gsm8k"; "kaggle:owner/name/file.csv"; "countdown"; "guess_letter";
             "reasoning_gym:chain_sum,countdown"
    split    also another one of a hub, or a part of it such as "train[:90%]"
    """
    if not isinstance(source, str):
        rows = number_rows("dataset", require_sequence(source))
    elif source in PROBLEMS:
        if split not in ("train", "test"):
            raise ValueError(f"{source}: there is no split {split}; it has train and test")
        return number_rows(source, PROBLEMS[source](split, seed))
    elif source.startswith(GYM):
        from sources.gym_tasks import gym_examples        # here: for these tasks alone

        return number_rows(source, gym_examples(source, split, seed))
    elif source.startswith("tfds:"):
        rows = number_rows(source, read_tfds(source.removeprefix("tfds:"), split))
    elif source.startswith("kaggle:"):
        rows = read_file(download_from_kaggle(source.removeprefix("kaggle:")))
    elif Path(source).suffix in SUFFIXES:
        rows = read_file(Path(source))
    else:
        rows = number_rows(source, read_hub(source, split))
    return ((where, as_published(row, where, columns)) for where, row in rows)


def read_file(path: Path) -> Iterator[tuple[str, dict]]:
    """Return the rows of a data file, each in a pair with where it is."""
    if path.suffix == ".jsonl":
        return read_json_lines(str(path))
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return number_rows(str(path), read_json(path) if path.suffix == ".json" else read_table(path))


def read_json(path: Path) -> list:
    """Return the rows of a .json file: a list, or that in {"prompts": [...]}."""
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    rows = content.get("prompts") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise ValueError(f'{path}: must hold a list of examples, or {{"prompts": [...]}}')
    return rows


def read_table(path: Path) -> Iterable[dict]:
    """Return the rows of a .csv or .parquet file; cells of .csv are text as it stands: not 7 for 007."""
    import datasets  # slow to import

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)     # errors are reported below, in one line
    kind = path.suffix[1:]
    options = CSV_AS_TEXT if kind == "csv" else {}
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", **options)
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{path}: cannot be read as {kind}: {reason}") from None
    if any(name.startswith("__index_level_") for name in rows.column_names):
        raise ValueError(f"{path}: rows have more cells than the header; put cells with a comma in quotes")
    if kind == "csv":
        return ({name: text or None for name, text in row.items()} for row in rows)
    return rows


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


def read_tfds(name: str, split: str) -> Iterable[dict]:
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
    return (json.loads(json.dumps(row, default=as_json_value)) for row in rows)


def download_from_kaggle(name: str) -> Path:
    """Return the path of a file of a Kaggle data set in kagglehub's cache; name is owner/name/file.csv."""
    owner, dataset, file = [*name.split("/", 2), "", ""][:3]
    if Path(file).suffix not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        raise ValueError(f"kaggle:{name}: write kaggle:owner/name/file, with a file ending in {endings}")
    try:
        import kagglehub

        return Path(kagglehub.dataset_download(f"{owner}/{dataset}", path=file))
    except Exception as error:
        raise ValueError(
            f"kaggle:{name}: Kaggle answers: {first_line(error)}; it needs pip install kagglehub, and for "
            "private data sets ~/.kaggle/kaggle.json or KAGGLE_USERNAME and KAGGLE_KEY"
        ) from None
