"""
Finding an environment by name or file, and which columns of the data it needs.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial

from environments.games import guess_letter
from environments.tools import calculate, python, with_tools
from reward_functions.loading import RESERVED, function_from_file
from reward_functions.sandbox import run_python

BUILT_IN = {"calculator": with_tools(calculate), "python": with_tools(python), "guess_letter": guess_letter}


# ---- choosing one ----------------------------------------------------------------------------------------------------


@cache
def load_environment(name: str) -> Callable | None:
    """A built-in environment by name, or `path/to/file.py:function`; None for "". Raises ValueError in one line."""
    if not name:
        return None
    if name == "python":
        try:
            run_python("")
        except RuntimeError as error:
            raise ValueError(f"--environment=python: {error}; or take calculator") from None
    environment = BUILT_IN.get(name) or function_from_file("environment", name, BUILT_IN)
    if not inspect.signature(environment).parameters:
        raise ValueError(f"--environment={name}: must take the conversation, a list of chat messages, as its first argument")
    return environment


def columns_for(environment: Callable, examples: list[dict]) -> tuple[set[str], set[str]]:
    """Names of the columns that an environment accepts, and of those among them that it needs and no example has."""
    columns = {name for example in examples for name in example} - set(RESERVED)
    _, *parameters = inspect.signature(environment).parameters.values()
    needed = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = {name for name in needed if needed[name]} - columns
    accepted = columns if any(p.kind == p.VAR_KEYWORD for p in parameters) else columns & set(needed)
    return accepted | missing, missing


def refuse_missing_columns(name: str, environment: Callable | None, examples: list[dict]) -> None:
    """One line, if the environment of that name needs a column that the examples do not have."""
    _, missing = columns_for(environment, examples) if environment else ((), ())
    if missing:
        raise ValueError(f"--environment={name}: needs the column {min(missing)}, which no example has")


def responders(environment: Callable | None, examples: list[dict]) -> list[Callable] | None:
    """For each example a function of the conversation alone: the environment with the example's columns."""
    if environment is None:
        return None
    accepted, _ = columns_for(environment, examples)
    return [partial(environment, **{name: example.get(name) for name in accepted}) for example in examples]
