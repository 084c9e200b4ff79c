"""Readers of files and hubs, and built-in tasks. Settings by name, which are read before torch is loaded."""

GYM = "reasoning_gym:"          # begins the names of tasks of that package, see gym_tasks.py


def load_examples(source, split: str = "train", **options) -> list[dict]:
    """Return examples as data.load_examples does, from all the sources of readers.read_rows."""
    import data
    from sources.readers import read_rows

    return data.load_examples(source, split, read=read_rows, **options)
