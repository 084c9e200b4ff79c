"""
Reward function of the countdown problems: arithmetic expressions, evaluated exactly and without running code.
"""

import ast
import operator
import re
from fractions import Fraction

from reward_functions.answers import extract_answer, text_of


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """1 point if the one tagged answer is made of the numbers, each used exactly once, with + - * / and parentheses, and
    equals the target, else 0; None where the data set has no numbers or no target. Computed exactly, in fractions.

    countdown(["<answer>(3*4)+7</answer>"], numbers=[[7, 3, 4]], target=[19]) == [1.0]
    """

    def points(text: str, allowed: list[int], wanted: int) -> float:
        value, used = evaluate_expression(extract_answer(text) or "")
        return float(value == int(wanted) and sorted(used) == sorted(map(int, allowed)))

    return [
        None if allowed is None or wanted is None else points(text_of(completion), allowed, wanted)
        for completion, allowed, wanted in zip(completions, numbers, target, strict=True)
    ]


def evaluate_expression(text: str) -> tuple[Fraction | None, list[int]]:
    """The value of an expression like (3*4)+7 and the numbers in it; None for the value if it is anything else.

    Nothing is run: the text is parsed, and only whole numbers, + - * / between two of them, and parentheses count. There are
    no powers, so no value is large; 200 characters are enough for any problem, and cannot nest too deep for the parser.
    """
    used: list[int] = []

    def value(node) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant):
            raise ValueError("not an expression of numbers")
        used.append(node.value)
        return Fraction(node.value)

    if not re.fullmatch(r"[0-9+\-*/() ]{1,200}", text):   # so no names, no fractions of a number, no warnings from the parser
        return None, used
    try:
        return value(ast.parse(text.strip(), mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None, used


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
