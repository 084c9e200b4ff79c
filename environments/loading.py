"""
Finding an environment by name or in a file, and the columns of the data that it needs.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial

from environments.games import guess_letter
from environments.tools import calculate, python, with_tools
from reward_functions.loading import as_name, columns_of, function_from_file, named_parameters
from reward_functions.sandbox import run_python

BUILT_IN = {"calculator": with_tools(calculate), "python": with_tools(python), "guess_letter": guess_letter}


def load_environment(name: str | Callable) -> Callable | None:
    """Return a built-in environment by name, or the one of `path/to/file.py:function`; None for "".

    A function is returned as it is, if it can be called as an environment.
    """
    environment = name if callable(name) else environment_by_name(name)
    if environment is not None and not inspect.signature(environment).parameters:
        raise ValueError(
            f"--environment={as_name(name)}: must take the conversation, a list of chat messages, as first "
            "argument"
        )
    return environment


@cache
def environment_by_name(name: str) -> Callable | None:
    """Import an environment, once. Raises ValueError if the sandbox that it needs is missing."""
    if not name:
        return None
    if name == "python":
        try:
            run_python("")
        except RuntimeError as error:
            raise ValueError(f"--environment=python: {error}; or use calculator") from None
    return BUILT_IN.get(name) or function_from_file("environment", name, tuple(BUILT_IN))


def columns_for(environment: Callable, examples: list[dict]) -> tuple[set[str], set[str]]:
    """Return the columns that an environment gets, and those of them that it requires and no example has."""
    columns = columns_of(examples)
    parameters = named_parameters(environment, skip=1)    # after the conversation
    missing = {p.name for p in parameters if p.default is p.empty} - columns
    all_columns = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(environment).parameters.values())
    return (columns if all_columns else columns & {p.name for p in parameters}) | missing, missing


def refuse_missing_columns(name: str, environment: Callable | None, examples: list[dict]) -> None:
    """Raise ValueError if the environment requires a column that the examples do not have."""
    _, missing = columns_for(environment, examples) if environment is not None else ((), ())
    if missing:
        raise ValueError(f"--environment={name}: needs the column {min(missing)}, which no example has")


def responders(environment: Callable | None, examples: list[dict]) -> list[Callable] | None:
    """Bind each example's columns to the environment: returns functions of the conversation alone."""
    if environment is None:
        return None
    columns, _ = columns_for(environment, examples)
    return [partial(environment, **{name: example.get(name) for name in columns}) for example in examples]
