"""
Finding a function by name or in a file, checking its signature, and the columns of the data that it needs.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

# Columns of these names are not passed to functions.
RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids", "turn_points")
ANSWER_NAMES = ("solution", "target")             # further parameter names for the answer, as in TRL


def function_from_file(flag: str, name: str, built_in: Iterable[str]) -> Callable:
    """Return the function of `path/to/file.py:function`, for a flag that also accepts built-in names."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        matches = difflib.get_close_matches(name, built_in, n=1)
        hint = f"did you mean {matches[0]}? Else " if matches else ""
        known = ", ".join(built_in)
        raise ValueError(f"--{flag} {name}: unknown; {hint}use path/to/file.py:function or one of {known}")
    if not Path(path).is_file():
        raise ValueError(f"--{flag} {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"file {path}", path)
    try:
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--{flag} {name}: importing {path} failed: {reason}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"--{flag} {name}: {path} has no function {attribute}")
    return function


def check_signature(function: Callable, name: str, built_in: Iterable[str]) -> Callable:
    """Return a reward function if it can be called as one. Raise ValueError with the reason otherwise."""
    flag = f"--reward_functions {name}"
    if name_of(function) in built_in:
        raise ValueError(f"{flag}: there is a built-in reward function {name_of(function)}; rename yours")
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        kind = "a class" if inspect.isclass(function) else "async"
        raise ValueError(f"{flag}: it is {kind}; name a plain function f(completions, **columns)")
    parameters = inspect.signature(function).parameters
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        missing = "**columns" if "completions" in parameters else "completions (a list of them) and **columns"
        raise ValueError(f"{flag}: it must accept columns it does not use: add {missing} to its parameters")
    return function


def columns_of(examples: list[dict]) -> set[str]:
    """Return the names of the columns that functions may get: all of any example but the reserved ones."""
    return {name for example in examples for name in example} - set(RESERVED)


def named_parameters(function: Callable, skip: int = 0) -> list[inspect.Parameter]:
    """Return the parameters of a function, after the first `skip` ones, that can be passed by name."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def missing_columns(function: Callable, columns: set[str]) -> list[str]:
    """Return the required parameters of a reward function that no column of the data provides."""
    provided = columns - set(RESERVED) | {"completions", "prompts", "completion_ids"}
    provided |= set(ANSWER_NAMES) if "answer" in columns else set()
    return [p.name for p in named_parameters(function) if p.default is p.empty and p.name not in provided]


def name_of(function: Callable) -> str:
    """Return the name of a function as used in logs."""
    return getattr(function, "__name__", type(function).__name__)
