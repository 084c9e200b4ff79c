"""
Environments that answer tool calls: a calculator and a Python interpreter.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable

from reward_functions.sandbox import run_python

LONGEST_EXPRESSION = 200        # characters that the calculator reads
LARGEST_POWER = 4096            # bits of a power of whole numbers


# ---- tools -----------------------------------------------------------------------------------------------------------


def with_tools(*tools: Callable) -> Callable:
    """An environment that answers tool calls, and ends the conversation at the first message without one.

    tools  functions with type hints and a docstring with "Args:", from which chat templates tell the model about them
    """
    def respond(conversation: list[dict]) -> dict | None:
        results = answer_calls(conversation[-1]["content"], {tool.__name__: tool for tool in tools})
        return {"role": "tool", "content": "\n".join(results)} if results else None

    respond.tools = list(tools)
    return respond


def answer_calls(text: str, tools: dict[str, Callable]) -> list[str]:
    """The results of all tool calls in a message, or what was wrong with them; none if there are no calls.

    <tool_call>{"name": "calculate", "arguments": {"expression": "47+85"}}</tool_call>       Hermes and Qwen
    calculate(47+85)                                 at the end of a message, for models that know no such format
    """
    if calls := re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        return [answer_json_call(call, tools) for call in calls]
    call = re.search(rf"\b({'|'.join(tools)})\((.*)\)\s*\Z", text, re.DOTALL)
    return [run_tool(tools[call[1]], call[2])] if call else []


def answer_json_call(text: str, tools: dict[str, Callable]) -> str:
    """The result of {"name": ..., "arguments": {...}}, or what is wrong with it."""
    try:
        call = json.loads(text)
        name, arguments = str(call["name"]), dict(call["arguments"])
    except Exception as error:
        return f'error: not {{"name": "...", "arguments": {{...}}}} ({type(error).__name__})'
    return run_tool(tools[name], **arguments) if name in tools else f"error: no tool {name:.40}; there is {', '.join(tools)}"


def run_tool(tool: Callable, /, *args, **kwargs) -> str:
    """What a tool answers; the model is told when it raises, and may do better in its next turn."""
    try:
        return str(tool(*args, **kwargs)).strip() or "(nothing)"
    except Exception as error:
        return f"error: {str(error) or type(error).__name__}"


OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3+4)*12.
    """
    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                left, right = value(left), value(right)
                if isinstance(op, ast.Pow) and left and abs(right) * max(1, math.log2(abs(left))) > LARGEST_POWER:
                    raise ValueError("the power is too large")
                return OPERATIONS[type(op)](left, right)
        raise ValueError("only numbers with + - * / // % ** and parentheses")

    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"more than {LONGEST_EXPRESSION} characters")
    result = value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return str(result) if isinstance(result, int) else f"{result:.12g}"


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The whole program; only what it prints can be seen.
    """
    result = run_python(code)
    problem = "" if result.ok else f"error: {result.reason} {result.stderr}"
    return f"{result.stdout}{problem}".strip()
