"""Read examples from files, hubs and built-in tasks, and settings, which are read before torch is loaded."""

from collections import Counter
from collections.abc import Callable

GYM = "reasoning_gym:"          # prefix of that package's tasks, see gym_tasks.py


def load_examples(
    source, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None, notify: Callable | None = None,
) -> list[dict]:
    """Return validated examples, like data.load_examples, but from all sources of readers.read_rows.

    columns  {"prompt": "question", "answer": ..., "completion": ...}; default: the first match in
             columns.COLUMNS. The prompt may also be text with columns in braces: "Make {target} from {nums}."
    notify   is called with one line, "read as: gsm8k", if rows have published forms
    """
    from data import validate_examples
    from sources.columns import as_published
    from sources.readers import read_rows
    from sources.tasks import PROBLEMS

    counts, columns = Counter(), columns or {}
    rows = read_rows(source, split, seed)
    if not (isinstance(source, str) and (source in PROBLEMS or source.startswith(GYM))):      # built in
        rows = (as_published(row, number, columns, counts) for number, row in enumerate(rows, start=1))
    examples = validate_examples(source, rows, limit)
    if counts and notify:
        total = len(examples)
        parts = [name + f" ({count} of {total} rows)" * (count < total) for name, count in counts.items()]
        notify(f"read as: {', '.join(parts)}")
    return examples
