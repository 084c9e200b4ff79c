"""Readers of files and hubs, and built-in tasks. Settings by name, which are read before torch is loaded."""

GYM = "reasoning_gym:"          # begins the names of tasks of that package, see gym_tasks.py


def load_examples(
    source, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None,
) -> list[dict]:
    """Return validated examples as data.load_examples does, from all the sources of readers.read_rows."""
    from guards import validate_examples
    from sources.readers import read_rows

    rows = read_rows(source, split, seed, columns or {})
    return validate_examples(source, rows, limit)
