"""
Reward function of the countdown problems, and arithmetic expressions evaluated without running code.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from reward_functions.answers import extract_answer, text_of

MAX_CHARACTERS = 200            # of an expression; this also bounds how deep the parser recurses
NOT_ARITHMETIC = "only numbers with + - * / // % ** and parentheses"  # the calculator's message to the model
FOUR_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """Give 1 point if the one tagged answer combines the numbers, each used exactly once, with + - * / and
    parentheses, and equals the target, else 0; None where the data has no numbers or no target. Computed
    exactly, in fractions.

    countdown(["<answer>(3*4)+7</answer>"], numbers=[[7, 3, 4]], target=[19]) == [1.0]
    """

    def points(text: str, allowed: list[int], goal: int) -> float:
        value, used = evaluate_expression(extract_answer(text) or "")
        return float(value == int(goal) and sorted(used) == sorted(map(int, allowed)))

    return [
        None if allowed is None or goal is None else points(text_of(completion), allowed, goal)
        for completion, allowed, goal in zip(completions, numbers, target, strict=True)
    ]


def evaluate_expression(text: str) -> tuple[Fraction | None, list[int]]:
    """Return the value of an expression like (3*4)+7, or None for anything else, and the numbers in it.

    Only whole numbers, + - * / between two of them, and parentheses are allowed. Without powers no value is
    large.
    """
    used: list[int] = []

    def read_number(number: int) -> Fraction:
        used.append(number)
        return Fraction(number)

    if not re.fullmatch(r"[0-9+\-*/() ]+", text):         # no names, no decimals, no warnings from the parser
        return None, used
    try:
        return evaluate(text, FOUR_OPERATORS, read_number), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None, used


def evaluate(text: str, operators: Mapping[type, Callable], read_number: Callable):
    """Parse an arithmetic expression and evaluate its syntax tree. No code is run.

    operators    {ast.Add: operator.add, ...}; others are rejected
    read_number  called with each constant in the text; returns the number to compute with, or raises
                 ValueError
    raises       ValueError, SyntaxError, or what an operator raises
    """
    def value(node):
        match node:
            case ast.Constant():
                return read_number(node.value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in operators:
                return operators[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
        raise ValueError(NOT_ARITHMETIC)

    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    return value(ast.parse(text.strip(), mode="eval").body)
