"""The reward function for countdown problems."""

import ast
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction

from reward_functions.answers import as_texts
from rewards import extract_answer, score_each

OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """Return 1 if the answer is an expression of the column `numbers`, each used exactly once, with
    + - * / and parentheses, and equals the column `target`, else 0; None where a column is empty. The value
    is computed exactly, in fractions.

    countdown(["<answer>(3*4)+7</answer>"], numbers=[[7, 3, 4]], target=[19]) == [1.0]
    {"prompt": "Make 19 from 7, 3, 4.", "numbers": [7, 3, 4], "target": 19}
    """

    def reward(text: str, given, goal) -> float:
        value, used = exact_value(extract_answer(text) or "")
        return float(value == Fraction(str(goal)) and sorted(used) == sorted(map(Fraction, as_texts(given))))

    return score_each(reward, completions, numbers, target)


def exact_value(text: str) -> tuple[Fraction | None, list[int]]:
    """Return the value of an expression like (3*4)+7, or None for anything else, and the numbers in it.

    Only whole numbers, + - * / between two of them, and parentheses are allowed. Values cannot be large.
    """
    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):   # no names, no decimals, no warnings from the parser
        return None, []
    with suppress(SyntaxError, ValueError, ZeroDivisionError):
        value = value_of(ast.parse(text.strip(), mode="eval").body, OPERATORS, Fraction)
        return value, list(map(int, re.findall("[0-9]+", text)))
    return None, []


def value_of(node: ast.expr, operators: dict, number: Callable):
    """Evaluate an expression from its syntax tree. No code is run. Raise ValueError for other operations."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return number(value)
        case ast.UnaryOp(op, operand) if type(op) in operators:
            return operators[type(op)](value_of(operand, operators, number))
        case ast.BinOp(left, op, right) if type(op) in operators:
            values = (value_of(side, operators, number) for side in (left, right))
            return operators[type(op)](*values)
    raise ValueError("only numbers, operators and parentheses")
