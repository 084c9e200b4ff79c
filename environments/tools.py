"""The built-in environments: a calculator and a Python interpreter, which execute tool calls, and a game."""

import ast
import inspect
import json
import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from environments.messages import text_of_turn
from reward_functions.answers import fenced_blocks
from reward_functions.arithmetic import OPERATORS, value_of
from reward_functions.calling import start_coroutine, wait_for
from reward_functions.sandbox import run_python
from rewards import after_thoughts, extract_answer

MAX_CHARACTERS = 200            # of an expression; this also bounds how deep the parser recurses
MAX_POWER_BITS = 4096           # limit of the result of ** with whole numbers


def with_tools(*functions: Callable) -> Callable:
    """Return an environment that executes calls of functions, which need type hints and a docstring with
    "Args:". A message without a call ends the conversation.
    """
    respond = partial(answer_calls, functions={function.__name__: function for function in functions})
    respond.tools = list(functions)
    return respond


def answer_calls(conversation: list[dict], functions: dict[str, Callable]) -> dict | None:
    """Return a message with the results of the tool calls in the last message; None if there are none."""
    results = run_calls(conversation[-1]["content"], functions)
    return {"role": "tool", "content": "\n".join(results)} if results else None


def run_calls(text: str, functions: dict[str, Callable]) -> list[str]:
    """Return the results, or error messages, of all tool calls in a message, but not in its thoughts.

    <tool_call>{"name": "calculate", "arguments": {"expression": "47+85"}}</tool_call>       Hermes and Qwen
    {"name": "calculate", "parameters": ...}    as a whole message (Llama 3), or in fenced blocks
    calculate(47+85)              at the end of a message, for models that were not trained on these formats
    """
    text = after_thoughts(text).rstrip()
    if calls := json_calls(text, functions):
        return [run_json_call(call, functions) for call in calls]
    starts = [found.start() for found in re.finditer(rf"\b({'|'.join(functions)})\(", text)]
    return [run_text_call(text[starts[-1] :], functions)] if starts and text.endswith(")") else []


def json_calls(text: str, functions: dict[str, Callable]) -> list[str]:
    """Return the texts of the calls in a message that are written as JSON."""
    if tagged := re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        return tagged

    def names_tool(block: str) -> bool:
        with suppress(Exception):
            return json.loads(block)["name"] in functions
        return False

    return list(filter(names_tool, fenced_blocks(text, "json") or [text]))


def unread_calls(tokenizer, tools: list[Callable]) -> str:
    """Return a call of a tool as the chat template writes it, if run_calls does not read it, else ""."""
    name, arguments = tools[0].__name__, {"made": "up"}
    call = {"type": "function", "id": "madeup000", "function": {"name": name, "arguments": arguments}}
    question = [{"role": "user", "content": "question"}]
    try:
        text = text_of_turn(tokenizer, question, {"role": "assistant", "content": "", "tool_calls": [call]})
    except ValueError:                                    # the template writes no calls
        return ""
    return "" if run_calls(text, {name: lambda **given: given}) == [str(arguments)] else text


def run_text_call(text: str, functions: dict[str, Callable]) -> str:
    """Return the result of name(arguments), or an error message. Arguments are Python literals; if the only
    parameter is a text, the argument needs no quotes: find(Oslo, Norway).
    """
    name, _, whole = text[:-1].partition("(")
    parameters = inspect.signature(functions[name]).parameters
    args, named = None, {}
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError, AttributeError):
        call = ast.parse(text, mode="eval").body
        named = {key.arg or "**": ast.literal_eval(key.value) for key in call.keywords}
        args = [ast.literal_eval(node) for node in call.args]
    if [parameter.annotation for parameter in parameters.values()] in ([str], ["str"]) and not named:
        text_of_one = re.sub(rf"^\s*{next(iter(parameters))}\s*=(?!=)", "", whole).strip()
        if text_of_one and not (args and isinstance(args[0], str)):
            args = [text_of_one]
    if args is None:
        return f"error: not {name}({', '.join(f'{parameter}=...' for parameter in parameters)})"
    return run_call(functions[name], *args, **named)


def run_json_call(text: str, functions: dict[str, Callable]) -> str:
    """Return the result of {"name": ..., "arguments": {...}, their text or nothing}, or an error message."""
    try:
        call = json.loads(text)
        arguments = call.get("arguments", call.get("parameters"))
        arguments = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        function, arguments = functions[call["name"]], {**(arguments or {})}
    except Exception:
        return f'error: not {{"name": "{"|".join(functions)}", "arguments": {{...}}}}'
    return run_call(function, **arguments)


def run_call(function: Callable, /, *args, **kwargs) -> str:
    """Return the result of a tool as text. An exception becomes an error message to the model."""
    try:
        return str(await_result(function(*args, **kwargs))).strip() or "(nothing)"
    except Exception as error:
        return f"error: {str(error) or type(error).__name__}"


def await_result(result):
    """Return a result; run a coroutine in the event loop of all async functions, and return its result."""
    return wait_for(start_coroutine(result)) if inspect.iscoroutine(result) else result


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3+4)*12.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    result = value_of(ast.parse(expression.strip(), mode="eval").body, CALCULATOR_OPERATORS, lambda x: x)
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return str(result) if isinstance(result, int) else f"{result:.12g}"


def limited_power(base, exponent):
    """Return base**exponent, or raise ValueError before computing a power that is too large."""
    if base and abs(exponent) * max(1, math.log2(abs(base))) > MAX_POWER_BITS:
        raise ValueError("the power is too large")
    return base**exponent


CALCULATOR_OPERATORS = OPERATORS | {
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: limited_power,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The whole program; only what it prints can be seen.
    """
    result = run_python(code)
    problem = "" if result.ok else f"error: {result.reason} {result.stderr}"
    return f"{result.stdout}{problem}".strip()


def guess_letter(conversation: list[dict], answer: str) -> tuple[str | None, float]:
    """Reply "up" or "down": the direction from the tagged guess to the letter in the column `answer`.

    The reward is 1 for the letter, -0.1 for every other guess, and -0.2 for a turn without a guess.
    """
    guess = extract_answer(conversation[-1]["content"]) or ""
    if guess not in list("abcdefghijklmnopqrstuvwxyz"):
        return "a letter", -0.2
    if guess == answer:
        return None, 1.0
    return "up" if answer > guess else "down", -0.1
