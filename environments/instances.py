"""
Load environments by name or from a file, and check the columns that they need. An environment with a state is
a class, and every conversation gets its own instance.

The interface is that of TRL's environment_factory, see docs/conversations.md. Instances are called one after
the other in the main thread, because sqlite3 and browsers must stay in the thread that opened them. Not
supported: concurrent calls, reuse of instances, images, a dict of several classes.
"""

import inspect
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MethodType

from transformers.utils import get_json_schema

from engine.errors import RunError
from environments.tools import (
    answer_calls, await_result, calculate, guess_letter, python, unread_calls, with_tools)
from reward_functions.calling import accepted, call_with_timeout, columns_of, missing_columns
from reward_functions.loading import as_name, function_from_file
from reward_functions.sandbox import run_python

BUILT_IN = {"calculator": with_tools(calculate), "python": with_tools(python), "guess_letter": guess_letter}
NO_TOOLS = {"reset", "get_reward", "close"}               # public methods that the model cannot call
SECONDS_PER_CALL = 60.0         # without --reward_timeout


class Instance:
    """An instance of a class, with its reward so far. An error in begin is raised at the first turn."""

    def __init__(self, example: dict, seconds: float):
        self.example, self.seconds = example, seconds or SECONDS_PER_CALL
        self.environment = self.error = None
        self.total = 0.0                                  # reward so far

    def begin(self, environment_class: type, seed: str) -> str:
        """Create and reset the instance. Return the text to append to the prompt."""
        self.environment = environment_class()
        random.seed(seed)
        text = self.environment.reset(**accepted(self.environment.reset, self.example))
        if not isinstance(text, str | None):
            raise TypeError(f"reset returned {text!r:.60}, neither text nor None")
        return text or ""

    def __call__(self, conversation: list[dict]) -> tuple[dict | None, float]:
        """Execute the tool calls of the last message. Return a message with results, and the new reward."""
        if self.error:
            raise self.error
        methods = public_methods(type(self.environment), self.environment)
        return answer_calls(conversation, methods), self.new_reward()

    def new_reward(self, at_end: bool = False) -> float:
        """Return the reward since the last call."""
        if hasattr(self.environment, "get_reward"):
            return float(await_result(self.environment.get_reward())) if at_end else 0.0
        before, reward = self.total, getattr(self.environment, "reward", None)
        self.total = 0.0 if reward is None or callable(reward) else float(reward)
        return self.total - before


def start_group(environment_class: type, group: list[Instance], seed: str, name: str) -> str | list[dict]:
    """Begin the instances of a prompt. Return the prompt, followed by the text that reset returns.

    Raises RunError if the texts differ, because a group shares one prompt.
    """
    texts, state = [], random.getstate()
    for instance in group:
        try:
            begin = partial(instance.begin, environment_class, seed)
            texts.append(call_with_timeout(instance.seconds, begin))
        except Exception as error:
            instance.error = error
    random.setstate(state)
    if different := [text for text in texts if text != texts[0]]:
        raise RunError(
            f"environment {name}: reset returned {texts[0]!r:.60} and {different[0]!r:.60} for one prompt; "
            "let them depend on columns, and on `random`, which is seeded")
    prompt = group[0].example["prompt"]
    if not any(texts):
        return prompt
    if isinstance(prompt, str):
        return prompt + texts[0]
    return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + texts[0]}]


def close_all(environments: list, reward_timeout: float) -> None:
    """Close instances of a class, within the time limit of a call. Their errors are ignored."""
    for environment in environments:
        with suppress(Exception):
            if hasattr(environment, "close"):             # None: of a function, or of a class that raised
                call_with_timeout(reward_timeout or SECONDS_PER_CALL, environment.close)


# ---- tools -------------------------------------------------------------------------------------------------


def public_methods(environment_class: type, owner) -> dict[str, Callable]:
    """Return the methods that are tools by name, bound to an owner."""
    functions = dict(inspect.getmembers_static(environment_class, inspect.isfunction))
    names = [name for name in functions if not name.startswith("_") and name not in NO_TOOLS]
    return {name: MethodType(functions[name], owner) for name in names}


def tools_of(environment: Callable | None) -> list[Callable] | None:
    """Return the tools of a function or class."""
    if inspect.isclass(environment):
        return list(public_methods(environment, environment).values())
    return getattr(environment, "tools", None)


def offer_tools(tokenizer, environment: Callable | None, notify: Callable) -> None:
    """Let the chat template list an environment's tools. Print a note if calls in its form are not read."""
    tokenizer.tools = tools_of(environment)
    if tokenizer.tools and tokenizer.chat_template and (text := unread_calls(tokenizer, tokenizer.tools)):
        notify("  note   tool calls in the form of the chat template are not read and end a conversation: "
               f"{text!r:.120}")


# ---- choosing an environment -------------------------------------------------------------------------------


def load_environment(name: str | Callable) -> Callable | None:
    """Return a built-in environment by name, that of `path/to/file.py:name`, or a given one; None for "".

    Raises ValueError if it cannot be an environment, or if the sandbox that `python` needs is missing.
    """
    environment = name if callable(name) else BUILT_IN.get(name)
    if name and environment is None:
        environment = function_from_file("environment", name, tuple(BUILT_IN))
    try:
        if name == "python":
            run_python("")
        if inspect.isclass(environment):
            inspect.signature(environment).bind()         # without arguments
            schemas = [get_json_schema(tool) for tool in tools_of(environment)]
            if not schemas or not callable(getattr(environment, "reset", None)):
                raise ValueError("the class needs a method reset, and one that is a tool")
        elif environment is not None and not inspect.signature(environment).parameters:
            raise ValueError("must take the conversation, a list of chat messages, as first argument")
    except Exception as error:
        raise ValueError(f"--environment={as_name(name)}: {error}".replace("\n", " ")) from None
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
