"""
The language of grpo.py's docstrings: their indented lines are Python expressions, evaluated here with numbers that carry
their derivative along.

    formulas(kl_penalty)                       [("k1", "-x"), ("k2", "x**2 / 2"), ("k3", "exp(x) - x - 1")]
    evaluate("x**2 / 2", x=Dual(3.0, 1.0))     value 4.5, slope 3.0
"""

import ast
import functools
import inspect
import math
import re
import statistics


class Dual:
    """A number and its derivative with respect to one token's logp, by the rules of differentiation: no autograd."""

    def __init__(self, value, slope=0.0):
        self.value, self.slope = value, slope

    def __add__(self, other):
        other = dual(other)
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other):
        other = dual(other)
        return Dual(self.value * other.value, self.slope * other.value + self.value * other.slope)

    def __truediv__(self, other):
        return self * other**-1

    def __pow__(self, n):
        return Dual(self.value**n, n * self.value ** (n - 1) * self.slope)

    __radd__, __rmul__ = __add__, __mul__
    __neg__ = lambda self: self * -1.0  # noqa: E731
    __sub__ = lambda self, other: self + -dual(other)  # noqa: E731
    __rsub__ = lambda self, other: -self + other  # noqa: E731
    __lt__ = lambda self, other: self.value < dual(other).value  # noqa: E731
    __gt__ = lambda self, other: self.value > dual(other).value  # noqa: E731
    __le__ = lambda self, other: self.value <= dual(other).value  # noqa: E731
    __ge__ = lambda self, other: self.value >= dual(other).value  # noqa: E731
    __rtruediv__ = lambda self, other: dual(other) / self  # noqa: E731


def dual(x):
    return x if isinstance(x, Dual) else Dual(float(x))


def exp(x):
    return Dual(math.exp(dual(x).value), math.exp(dual(x).value) * dual(x).slope)


LANGUAGE = dict(
    exp=exp, sigmoid=lambda x: 1 / (1 + exp(-x)), sign=lambda x: (x > 0) - (x < 0), min=min, max=max, inf=math.inf,
    sg=lambda x: Dual(dual(x).value), clip=lambda x, low, high: max(min(x, high), low),
    abs=abs, mean=statistics.fmean, median=statistics.median, std=statistics.stdev,
)


@functools.cache
def formulas(function):
    """Return the indented lines of a docstring as (name or "", expression): what a reader sees is evaluated here."""
    docstring = ast.get_docstring(ast.parse(inspect.getsource(function)).body[0], clean=False)
    lines = re.findall(r"^ {8}(\S.*)$", docstring, flags=re.MULTILINE)
    parts = [[part.strip() for part in line.split("  ") if part.strip()] for line in lines]
    parts = [["", *part] if len(part) == 1 else part for part in parts]          # name, expression, name, expression, comment
    return [pair for part in parts for pair in zip(part[::2], part[1::2])]


def evaluate_first(function, **names):
    """Evaluate the first formula of a docstring; the named lines after it say what its other names are."""
    (_, first), *others = formulas(function)
    return evaluate(first, **names | {name: evaluate(expression, **names) for name, expression in others if name})


code = functools.cache(functools.partial(compile, filename="formula", mode="eval"))


def evaluate(expression, **names):
    return eval(code(expression), {"__builtins__": {}} | LANGUAGE | names)       # globals: a comprehension sees no locals
