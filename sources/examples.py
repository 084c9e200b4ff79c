"""
Examples from everything that sources/ reads, in the forms in which data sets are published.
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice

from data import require_sequence
from sources import GYM
from sources.published_forms import as_published_example
from sources.readers import View, read_rows
from sources.tasks import PROBLEMS


def load_examples(
    source: str | Sequence, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None,
) -> Sequence[dict]:
    """Return examples as data.load_examples does, from more sources and in the forms of published data sets.

    source   also a .json, .csv or .parquet file; an id on the Hugging Face hub such as "openai/gsm8k:main"
             (name:configuration); "tfds:gsm8k"; "kaggle:owner/name/file.csv"; "countdown"; "guess_letter";
             "reasoning_gym:chain_sum,countdown"
    split    also another one of a hub, or a part of it such as "train[:90%]"
    columns  the prompt may also be a text with columns in braces: "Make {target} from {nums}."
    returns  a sequence that reads rows on access, of which slices are lists; every row has been validated
    """
    is_name = isinstance(source, str)
    if is_name and source in PROBLEMS:
        if split not in ("train", "test"):
            raise ValueError(f"{source}: there is no split {split}; it has train and test")
        return PROBLEMS[source](split, seed)[: limit or None]
    if is_name and source.startswith(GYM):
        from sources.gym_tasks import gym_examples        # here: for these tasks alone

        return gym_examples(source, split, seed)[: limit or None]
    rows = read_rows(source, split) if is_name else require_sequence(source)
    where, count = source if is_name else "dataset", min(limit or len(rows), len(rows))
    if count == 0:
        raise ValueError(f"{where}: no examples in it")
    for number, row in enumerate(islice(rows, count), start=1):
        as_published_example(row, f"{where}: example {number}", columns or {})
    return View(rows, range(count), partial(as_published_example, where=where, columns=columns or {}))
