"""
Finding an environment by name or in a file, and the columns of the data that it needs.
"""

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType

from environments.instances import refuse_class
from environments.tools import calculate, guess_letter, python, with_tools
from reward_functions.calling import accepted, columns_of, missing_columns
from reward_functions.loading import as_name, function_from_file
from reward_functions.sandbox import run_python

BUILT_IN = {"calculator": with_tools(calculate), "python": with_tools(python), "guess_letter": guess_letter}


def load_environment(name: str | Callable) -> Callable | None:
    """Return a built-in environment by name, or the function or class of `path/to/file.py:name`; None for "".

    A function or class is returned as it is. Raises ValueError if it cannot be an environment, or if the
    sandbox that `python` needs is missing.
    """
    if name == "python":
        try:
            run_python("")
        except RuntimeError as error:
            raise ValueError(f"--environment=python: {error}; or use calculator") from None
    environment = name if callable(name) else BUILT_IN.get(name)
    if name and environment is None:
        environment = function_from_file("environment", name, tuple(BUILT_IN))
    if inspect.isclass(environment):
        refuse_class(as_name(name), environment)
    elif environment is not None and not inspect.signature(environment).parameters:
        raise ValueError(
            f"--environment={as_name(name)}: must take the conversation, a list of chat messages, as first "
            "argument")
    return environment


def refuse_missing_columns(name: str, environment: Callable | None, examples: list[dict]) -> None:
    """Raise ValueError if the environment requires a column that the examples do not have."""
    if environment is None:
        return
    is_class = inspect.isclass(environment)
    takes_columns = MethodType(environment.reset, environment) if is_class else partial(environment, [])
    missing = [name for name in missing_columns(takes_columns, columns_of(examples)) if name != "prompt"]
    if missing:
        raise ValueError(f"--environment={name}: needs the column {missing[0]}, which no example has")


def responders(environment: Callable, examples: list[dict]) -> list[Callable]:
    """Bind each example's columns to the environment: returns functions of the conversation alone."""
    columns, rest = columns_of(examples), partial(environment, [])        # after the conversation
    missing = dict.fromkeys(missing_columns(rest, columns))               # that examples of other steps have
    rows = [{name: example.get(name) for name in columns} for example in examples]
    return [partial(environment, **missing, **accepted(rest, row)) for row in rows]
