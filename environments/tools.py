"""
Environments that execute tool calls: a calculator and a Python interpreter.
"""

import ast
import inspect
import json
import math
import operator
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, repeat

from reward_functions.arithmetic import FOUR_OPERATORS, evaluate_expression
from reward_functions.calling import start_coroutine
from reward_functions.sandbox import run_python

MAX_POWER_BITS = 4096           # of the result of ** with whole numbers
SECONDS_PER_MESSAGE = 10.0      # for all tool calls of a message; later ones are not run


def with_tools(*functions: Callable) -> Callable:
    """Return an environment that executes tool calls. A message without one ends the conversation.

    functions  with type hints and a docstring with "Args:", which chat templates show to the model
    """
    respond = partial(answer_calls, functions={function.__name__: function for function in functions})
    respond.tools = list(functions)
    return respond


def answer_calls(conversation: list[dict], functions: dict[str, Callable]) -> dict | None:
    """Return a message with the results of the tool calls in the last message; None if there are none."""
    results = run_calls(conversation[-1]["content"], functions)
    return {"role": "tool", "content": "\n".join(results)} if results else None


def run_calls(text: str, functions: dict[str, Callable]) -> list[str]:
    """Return the results, or error messages, of all tool calls in a message; [] if there are none.

    <tool_call>{"name": "calculate", "arguments": {"expression": "47+85"}}</tool_call>       Hermes and Qwen
    calculate(47+85)              at the end of a message, for models that were not trained on that format
    """
    if calls := re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        deadline, late = time.monotonic() + SECONDS_PER_MESSAGE, "error: too much time in one message"
        return [run_json_call(call, functions) if time.monotonic() < deadline else late for call in calls]
    text = text.rstrip()
    calls = [text[found.start() :] for found in re.finditer(rf"\b({'|'.join(functions)})\(", text)]
    if not calls or not text.endswith(")"):
        return []
    return [run_text_call(next(filter(parse_call, calls[-9:]), calls[-1]), functions)]    # 9: parsing is slow


def parse_call(text: str) -> ast.Call | None:
    """Return a call by name, such as f(1, b=2); None for all other text."""
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        call = ast.parse(text, mode="eval").body
        return call if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None


def run_text_call(text: str, functions: dict[str, Callable]) -> str:
    """Return the result of name(arguments), or an error message.

    What is no Python is one text, as are several words for a function of one parameter: find(Oslo, Norway).
    """
    name, _, whole = text[:-1].partition("(")
    function, call = functions[name], parse_call(text)
    kinds = {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
    is_list = len(kinds) > 1 and "," in whole
    if call and (is_list or all(isinstance(node, ast.Constant) for node in call.args)):
        def read(node: ast.AST, kind: object) -> object:
            return value_of(ast.get_source_segment(text, node), kind)

        named = {key.arg or "**": read(key.value, kinds.get(key.arg, object)) for key in call.keywords}
        return run_call(function, *map(read, call.args, chain(kinds.values(), repeat(object))), **named)
    if is_list or whole.partition("=")[0].strip() in kinds:
        return f"error: not {name}({', '.join(f'{parameter}=...' for parameter in kinds)})"
    return run_call(function, value_of(whole.strip(), next(iter(kinds.values()), str)))


def value_of(text: str, kind: object) -> object:
    """Return an argument: a literal of Python or JSON, unless it is for a parameter that takes text; else its
    text. A string in quotes is a literal too, so buy("rice") and buy(rice) are the same.
    """
    takes_text = {*re.findall(r"\w+", inspect.formatannotation(kind))} <= {"str", "None", "Optional"}
    for read in ast.literal_eval, json.loads:
        with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
            value = read(text)
            return value if isinstance(value, str) or not takes_text else text
    return text


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
    """Return a result; for a coroutine, what it returns in the event loop of all async functions."""
    return start_coroutine(result)() if inspect.iscoroutine(result) else result


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3+4)*12.
    """
    result = evaluate_expression(expression, CALCULATOR_OPERATORS, convert=lambda number: number)
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return str(result) if isinstance(result, int) else f"{result:.12g}"


def limited_power(base, exponent):
    """Return base**exponent, or raise ValueError before computing a power that is too large."""
    if base and abs(exponent) * max(1, math.log2(abs(base))) > MAX_POWER_BITS:
        raise ValueError("the power is too large")
    return base**exponent


CALCULATOR_OPERATORS = FOUR_OPERATORS | {
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
