"""
Finding a reward function by name or file, and which columns of the data it needs.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids", "turn_points")      # no data gets these names
ANSWER_NAMES = ("solution", "target")             # by which a function may ask for the answer too, as TRL's do


def function_from_file(flag: str, name: str, built_in) -> Callable:
    """The function that `path/to/file.py:function` names, for a flag which might have named one of the built-in ones."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        near = "".join(f"did you mean {known}? Else " for known in difflib.get_close_matches(name, built_in, n=1))
        raise ValueError(f"--{flag} {name}: unknown; {near}use path/to/file.py:function or one of {', '.join(built_in)}")
    if not Path(path).is_file():
        raise ValueError(f"--{flag} {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"file {path}", path)
    try:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--{flag} {name}: importing {path} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"--{flag} {name}: {path} has no function {attribute}")
    return function


def missing_columns(function: Callable, columns: set[str]) -> list[str]:
    """The columns that a function cannot do without, and that the data does not have."""
    given = columns - set(RESERVED) | {"completions", "prompts", "completion_ids"}
    given |= set(ANSWER_NAMES) if "answer" in columns else set()
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in needed if name not in given]


def name_of(function: Callable) -> str:
    """What a reward function is called in logs."""
    return getattr(function, "__name__", type(function).__name__)
