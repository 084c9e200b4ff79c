"""Load reward functions by name or from files, and check that the data has the columns that they need."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import reward_functions
from engine.errors import exits_as_errors, in_one_line
from reward_functions import MAKERS, MODULE_OF
from reward_functions.calling import PROVIDED, accepted, missing_columns
from rewards import name_of, text_of
from sources import GYM

folders: list[str] = []         # of users' files, the latest first
BUILT_IN = tuple(name for name in MODULE_OF if name not in MAKERS)      # imported on first use


def load_reward_function(name: str | Callable) -> Callable:
    """Return a built-in reward function by name, the function of `path/to/file.py:function`, or a given
    function. Raise ValueError if it cannot be called as a reward function.
    """
    if str(name).startswith(GYM):
        from sources.gym_tasks import scorer              # only for these tasks

        return scorer(name)
    if name in BUILT_IN:
        return getattr(reward_functions, name)
    function = name if callable(name) else function_from_file("reward_functions", name, BUILT_IN)
    return function if as_name(function) in BUILT_IN else check_signature(function, as_name(name))


def function_from_file(flag: str, name: str, built_in: Iterable[str]) -> Callable:
    """Return the function of `path/to/file.py:function`, for a flag that also accepts built-in names."""
    path, colon, attribute = name.rpartition(":")
    if not colon:
        known = ", ".join(built_in)
        raise ValueError(f"--{flag} {name}: unknown; use path/to/file.py:function or one of {known}")
    function = attribute_of_file(flag, path, attribute)
    if not callable(function):
        raise ValueError(f"--{flag} {name}: {path} has no function {attribute}")
    return function


def attribute_of_file(flag: str, path: str, attribute: str, default=None):
    """Return an attribute of a Python file for a flag. Raise ValueError if the file cannot be imported."""
    try:
        file = Path(path).resolve(strict=True)
        beside = tuple((each, each.stat().st_mtime_ns) for each in file.parent.glob("*.py"))
        with exits_as_errors():
            module = load_file(file, beside)
    except Exception as error:
        raise ValueError(f"--{flag}: importing {path} failed: {in_one_line(error)}") from error
    return getattr(module, attribute, default)


@cache
def load_file(file: Path, beside: tuple) -> ModuleType:
    """Import a file, which can import the files beside it; again if one of these has changed.

    The module has the name of the file, by which other processes import it, unless another module has it.
    """
    folder, project = str(file.parent), Path(__file__).parent.parent
    if folder in folders or folder not in sys.path:       # ours come first in the path
        folders[:] = [folder, *(each for each in folders if each != folder)]
        sys.path[:] = [each for each in sys.path if each not in folders] + folders
    for name, module in [*sys.modules.items()]:           # forget helpers of other folders, and edited ones
        origin = Path(getattr(module, "__file__", None) or "")
        is_helper = name == origin.stem and str(origin.parent) in folders and origin.parent != project
        if is_helper and (file.parent / origin.name).exists():
            del sys.modules[name]
    is_free = file.stem.isidentifier() and file.stem not in sys.modules
    spec = importlib.util.find_spec(file.stem) if is_free else None
    if spec is None or spec.origin != str(file):
        spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", str(file)), file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_signature(function: Callable, name: str) -> Callable:
    """Return a reward function: of a class an instance, for verl's compute_score a function of all
    completions. Raise ValueError with the reason if that is impossible.
    """
    flag = f"--reward_functions {name}"
    if name_of(function) in BUILT_IN:
        raise ValueError(f"{flag}: there is a built-in reward function {name_of(function)}; rename yours")
    try:
        function = function() if inspect.isclass(function) else function
        parameters = inspect.signature(function).parameters
    except TypeError as error:                            # __init__ has parameters, or there is no __call__
        raise ValueError(f"{flag}: {error}; name a function, or an object with __call__") from None
    if "solution_str" in parameters:
        each = partial(call_for_each, function)
        each.__name__, each.__doc__ = name_of(function), function.__doc__
        return each
    if not accepted(function, dict.fromkeys(PROVIDED)):
        raise ValueError(f"{flag}: add completions, a list of them, to its parameters")
    return function


def call_for_each(function: Callable, completions, ground_truth, **columns) -> list:
    """Call verl's compute_score(data_source, solution_str, ground_truth, extra_info) for each completion."""
    rows = {"data_source": [None] * len(completions), "extra_info": [None] * len(completions)} | columns
    rows |= {"solution_str": list(map(text_of, completions)), "ground_truth": ground_truth}
    rows = accepted(function, {name: values for name, values in rows.items() if isinstance(values, list)})
    return [function(**dict(zip(rows, row, strict=True))) for row in zip(*rows.values(), strict=True)]


def require_columns(functions: Iterable[Callable], examples: Sequence[dict], source: str) -> None:
    """Raise ValueError if a function needs a column without values."""
    cells = (cell for example in examples for cell in example.items())
    columns = {name for name, value in cells if str(value) not in ("", "None", "nan")}
    for function in functions:
        if missing := missing_columns(function, columns):
            raise ValueError(
                f"--reward_functions {name_of(function)}: needs the column {missing[0]}, which {source} does "
                f"not have (columns with values: {', '.join(sorted(columns))})")


def load_reward_functions(names: Sequence[str | Callable]) -> list[Callable]:
    """Load reward functions. Raise ValueError if two have the same name, which identifies their rewards."""
    functions = list(map(load_reward_function, names))
    names = list(map(name_of, functions))
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ValueError(f"--reward_functions: two have the name {repeated}; rename one by its __name__")
    return functions


def as_name(given) -> str:
    """Return the entry of config.json for a name or an object: the name of a built-in one, or python:NAME."""
    if isinstance(given, str):
        return given
    name = name_of(given)
    is_built_in = name in BUILT_IN and getattr(reward_functions, name) is given
    return name if is_built_in else f"python:{name}"
