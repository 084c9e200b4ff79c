"""Readers of files and hubs, and built-in tasks. Settings by name, which are read before torch is loaded."""

GYM = "reasoning_gym:"          # begins the names of tasks of that package, see gym_tasks.py


def __getattr__(name: str):
    """Return load_examples of sources/examples.py, which is imported when it is asked for."""
    if name != "load_examples":
        raise AttributeError(f"module 'sources' has no attribute {name!r}")
    from sources.examples import load_examples

    return load_examples
