"""The reward function for countdown problems, and a parser of arithmetic expressions that runs no code."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from reward_functions.answers import as_texts
from rewards import extract_answer, score_each

MAX_CHARACTERS = 200            # of an expression; this also bounds how deep the parser recurses
FOUR_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}


def countdown(completions, numbers, target, **columns) -> list[float | None]:
    """Return 1 if the tagged answer is an expression of the column `numbers`, each used exactly once, with
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
    used = [int(digits) for digits in re.findall(r"[0-9]+", text)]
    try:
        return evaluate_expression(text, FOUR_OPERATORS, Fraction), used
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None, used


def evaluate_expression(text: str, operators: Mapping[type, Callable], convert: Callable):
    """Evaluate an arithmetic expression from its syntax tree. No code is run.

    operators  {ast.Add: operator.add, ...}; others are rejected
    convert    applied to each number in the text, such as Fraction
    raises     ValueError, SyntaxError, or the error of an operator
    """
    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return convert(number)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in operators:
                return operators[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
        raise ValueError("only numbers with + - * / // % ** and parentheses")    # for calculator users

    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    return value(ast.parse(text.strip(), mode="eval").body)
