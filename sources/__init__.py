"""Read examples from files, hubs and built-in tasks, and settings, which are read before torch is loaded."""

GYM = "reasoning_gym:"          # prefix of that package's tasks, see gym_tasks.py


def load_examples(
    source, split: str = "train", *, limit: int | None = None, seed: int = 0,
    columns: dict[str, str] | None = None,
) -> list[dict]:
    """Return validated examples, like data.load_examples, but from all sources of readers.read_rows."""
    from guards import validate_examples
    from sources.readers import read_rows

    rows = read_rows(source, split, seed, columns or {})
    return validate_examples(source, rows, limit)
