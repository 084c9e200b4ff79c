"""
The reward function for mathematical equality. It runs the package math-verify in the sandbox, because an
answer may make it hang.
"""

import re
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from reward_functions.answers import LONGEST_ANSWER, extract_boxed, final_answer, unwrap
from reward_functions.sandbox import run_python, usable_cores
from rewards import is_missing, same_answer, text_of

SECONDS_PER_ANSWER = 3          # for parsing two expressions, and for comparing them
ANSWERS_PER_PROCESS = 16
SANDBOX = dict(memory_mb=1024, modules=("math_verify",))
WORDS = re.compile(r"[A-Za-z $]*[A-Za-z]{2}[A-Za-z $.]*")
UNIT = r"""(?xi: dollar|cent|euro|second|sec|minute|min|hour|hr|day|week|month|year|yr|inch|in|foot|feet|ft
    |yard|mile|mi|(kilo|centi|milli)?(gram|(met|lit)(er|re))|[kcm]m|[km]g|ml|acre|gallon|quart|pint|cup
    |ounce|oz|pound|lb|ton|mph|degree|radian|celsius|fahrenheit|percent|calorie|people|person|student
    |children|piece|item|page|book|point|time|way|integer|digit|unit)(e?s)?|[mghslLCF]"""
POWER = r"(\^\{?[23]\}?)?"
UNITS = rf"( |(?![A-Za-z]\b))((square|sq|cubic|per|{UNIT}){POWER}[ ./]+)*({UNIT}){POWER}$"    # after a number
NAMES = r"((arc)?(sin|cos|tan)h?|cot|csc|ln|log|exp|pi|alpha|beta|gamma|theta|lambda|phi|omega|infty)"
DEGREE = r"(?:°|\\degree|\^ ?\\circ|\^ ?\{ ?\\circ ?\})"
ANGLE = rf"([\d.]+|[\d.]*\\?[A-Za-z]+|\([^()]*\)|(?<!\}})\{{[^{{}}]*\}}) *(?:{DEGREE}|degrees?\b)"
ANGLES = r"(?<![A-Za-z])\\?(?:sin|cos|tan|cot|\\sec|\\csc)(?:(?!\\approx)[^=≈,])*"   # up to the result
NOTATION = {                    # of keyboards and programs -> LaTeX
    r"∞|\b(inf|infinity|oo)\b": " infty ", "√": "sqrt", "[·⋅]": r"\\cdot ", "≈": r"\\approx ", r"\*\*": "^",
    r"\\sqrt ?\(": "sqrt(", r"(?<!\\)sqrt ?([\d.]+|[A-Za-z]\b)": r"\\sqrt{\1}", "varnothing": "emptyset",
    rf"(?<![\\A-Za-z]){NAMES}(?![A-Za-z])": r"\\\1", r"\^(-[\d.]+)": r"^{\1}",
    r"(\d+)\u2044(\d+)": r"\\frac{\1}{\2}", r"\b(\d+) (\d+)/(\d+)\b": r"\1\\frac{\2}{\3}",
    r"(?<=\d)[eE]([-+]?\d+)$": r"\\cdot 10^{\1}",
    r"(?<=\d) ?_": "b_",        # math-verify would ignore the base of 18_{8}
    r"(\d*)\.(\d*)\\(?:overline|bar|dot) ?\{?(\d+)\}?": lambda of:          # 0.1\overline{6}: 0.10 + 6/90
        rf"({of[1]}.{of[2]}0+\frac{{{of[3]}}}{{{'9' * len(of[3])}{'0' * len(of[2])}}})",
    r"\\(approx|simeq) *(?=[-+]?\d*\.\d)": "=", "^ ?= ?": "",         # "\approx 18" is not 18
}
CLOCK, RATIO = re.compile(r"\$\d{1,2}:[0-5]\d\$"), re.compile(r"\$[\d.]+:[\d.]+\$")     # 3:15 may be both
CODE = re.compile(                        # B12; H_2O; 2024-03-01, 555-123-4567, 12:30:00, 1.2.3; 05/07
    r"^[\w.]*[A-Za-z]\d[\w.]*$|^(?=.*_)(?=.*[A-Z].*[A-Z])\d*([A-Z][a-z]?(_\{?\d+\}?)?|[()])+$"
    r"|^(?=.*(\d{4}|\b0\d|\d{3}[-/]\d{3}\b))\d+(?P<mark>[-/])\d+((?P=mark)\d+)+$|^\d+([:.]\d+){2,}$"
    r"|^\(\d+\) ?\d+-\d+$|^(0\d+[-/:][\d.]+|[\d.]+[-/:]0\d+)$")
ASSIGNMENT = re.compile(r" *(\\?[A-Za-z]\w*(?:\{\w+\})?(?:\([^()]*\))?) *=([^=]+)")


def math_equality(completions, answer, **columns) -> list[float | None]:
    """Return 1 if the answer is mathematically equal to the column `answer`, by same_answer or else by the
    package math-verify, else 0; None where the data has no answer. Answers whose comparison takes longer than
    a few seconds count as unequal.

    The answer is the tagged one or, in a text without tags, the only \\\\boxed{...}. The column `answer` may
    be a list of right answers; of a text there, the last \\\\boxed{...} counts.

    math_equality(["<answer>1/2</answer>", "so \\\\boxed{0.5}"], answer=["\\\\frac{1}{2}"] * 2) == [1.0, 1.0]
    {"prompt": "What is 3/4 - 1/4?", "answer": "1/2"}
    """
    given = [final_answer(text_of(completion)) for completion in completions]
    rows = [truth if isinstance(truth, list) else [truth] for truth in answer]
    truths = [[extract_boxed(str(one)) or str(one) for one in row if one is not None] for row in rows]
    pairs = {(g, truth) for g, row in zip(given, truths, strict=True) for truth in row if g}
    equal = {pair: same_answer(*map(unwrap, pair)) for pair in pairs}
    latex = {pair: tuple(map(as_latex, pair)) for pair in sorted(pairs) if not equal[pair]}
    read = {pair: both for pair, both in latex.items() if all(both) and not all(map(WORDS.fullmatch, both))}
    texts = {pair: [re.sub("[{}_ ]", "", one) for one in both] for pair, both in read.items()
             if is_time(both) or not all(map(is_arithmetic, both))}
    equal |= {pair: same_answer(*both) for pair, both in texts.items()}
    equal |= compare_in_sandbox({pair: both for pair, both in read.items() if pair not in texts})
    found = [{equal.get((g, one), False) for one in row} for g, row in zip(given, truths, strict=True)]
    unscored = [is_missing(truth) or isinstance(truth, dict) for truth in answer]
    return [None if skip else float(True in row) for row, skip in zip(found, unscored, strict=True)]


def as_latex(text: str) -> str | None:
    """Return an answer as LaTeX, without UNITS after a number; None for other words and for long texts.

    as_latex("18 dollars") == as_latex("18 \\\\text{ dollars}") == as_latex("$18") == "$18$"
    as_latex("dog") is as_latex("18 million") is None
    """
    if len(text) > LONGEST_ANSWER:
        return None
    text = re.sub("[⁰¹²³⁴-ⁿ]+", r"^{\g<0>}", re.sub("[₀-₎]+", r"_{\g<0>}", unwrap(text)))
    text = unicodedata.normalize("NFKC", re.sub("[¼-¾⅐-⅞]", r" \g<0> ", text))
    radians = r"(\\frac{\1\\pi}{180})"
    text = re.sub(ANGLES, lambda angles: re.sub(ANGLE, radians, angles[0]), text)
    text = re.sub(rf"\\?\$|(?<!\\)\\[()\[\] ,;:]|\\q?quad|~|{DEGREE}", " ", text).strip(" €£")
    text = re.sub(rf"((?<=[\d)}}])|(?<=\\pi)){UNITS}", "", " ".join(text.removesuffix(".").split()))
    for pattern, latex in NOTATION.items():
        text = re.sub(pattern, latex, text)
    joined = "or" if re.search(r"[<>]|\\[lg]e", text) else "and|or"     # "x < 1 and x > 3" is no list
    text = re.sub(rf",? ?\b({joined})\b", ",", text)
    named = [ASSIGNMENT.fullmatch(part) for part in re.split(r"[,;](?=[^,;=<>]+=)", text)]
    if all(named) and len({name[1] for name in named}) > 1:             # A=5, B=6: as the tuple (A, 5, B, 6)
        text = f"({','.join(','.join(name.groups()) for name in sorted(named, key=lambda name: name[1]))})"
    if not re.search(r"(?<![A-Za-z])i ?([=<>]|\\([lg]e|in)\b)", text):     # an index or a variable
        # Not ii or iv. math-verify reads I^2 as I.
        symbols = r"(\\(?:begin|end)\{\w+\}|\\[A-Za-z]+)|(?<![A-Za-z])i(?![A-Za-z])( ?\^)?"
        text = re.sub(symbols, lambda one: one[1] or ("{I}^" if one[2] else "I"), text)
    unreadable = r"(?<!begin\{)(?<!end\{)(?<![\\A-Za-z])(?!sqrt\()[A-Za-z]{3,}|(?<!frac )(?<!_)\d \d|\\\w*box"
    return None if re.search(unreadable, text) else f"${text}$"         # "dog" would equal "god", "1 8" 9


def is_time(both: tuple[str, str]) -> bool:
    """Return True if an answer is a time and the other one is no ratio that only looks like a time."""
    times = [CLOCK.fullmatch(one) is not None for one in both]
    ratios = [RATIO.fullmatch(one) is not None for one in both]
    return any(times) and times == ratios


def is_arithmetic(latex: str) -> bool:
    """Return False for dates, times, codes, chemical formulas and ranges, which are compared as text.

    is_arithmetic("10-7") and not is_arithmetic("7-10")         # a negative difference would be a range
    """
    text = re.sub(r"\\[A-Za-z]+", " ", latex.strip("$"))
    difference = re.fullmatch(r"(\d+\.?\d*)-(\d+\.?\d*)", text)
    is_range = difference and float(difference[1]) < float(difference[2])
    return not is_range and not CODE.search(text)


# Prints a line for each pair. By default math-verify reads "\neq 18" as 18, and "less" and "c" as units.
COMPARE_TEMPLATE = '''
import logging
from math_verify import grader, parser, verify
from sympy import Float, Rational
logging.disable()
tex = parser.LatexExtractionConfig(normalization_config=parser.NormalizationConfig(malformed_operators=True))
share, equal_matrices = grader.get_pct_val, grader.sympy_numeric_eq

def exact(a):
    a = grader.safe_sympy_doit(a.xreplace({{f: Rational(str(f)) for f in a.atoms(Float)}}))
    return a, a.is_Rational and pow(10, a.q.bit_length(), a.q) == 0        # has it a finite decimal?

def equal_numbers(a, b, *digits):
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return equal_matrices(a, b, *digits)
    if (share(a) is None) != (share(b) is None) and equal_numbers(share(a, a), share(b, b)):
        return True
    (x, x_is_finite), (y, y_is_finite) = exact(a), exact(b)
    rounded = x_is_finite != y_is_finite and (a if x_is_finite else b).has(Float)
    if rounded and x.is_real and y.is_real and abs(x - y) <= max(abs(x), abs(y)) / 10**6:
        return True
    parts = (x - y).evalf(20).as_real_imag() if (x - y).is_number and x - y != 0 else (x - y,)
    return all(part == 0 or part.is_Float and part._prec == 1 for part in parts)      # no digit in 100 places

grader.sympy_numeric_eq = equal_numbers
for given, truth in {pairs!r}:
    try:
        truth, given = (parser.parse(text, [tex], parsing_timeout={seconds}) for text in (truth, given))
        equal = verify(truth, given, timeout_seconds={seconds}, allow_set_relation_comp=True)
    except Exception:
        equal = False
    print(int(equal), flush=True)
'''


def compare_in_sandbox(latex: dict[tuple[str, str], tuple]) -> dict[tuple[str, str], bool]:
    """Compare pairs of expressions in sandboxed processes. A pair that ends its process is unequal, and the
    other pairs go on in a new one. latex: pair -> both expressions. Returns pair -> True if they are equal.
    """
    check_sandbox()

    def compare(left: list[tuple[str, str]]) -> None:
        while left:
            code = COMPARE_TEMPLATE.format(pairs=list(map(latex.get, left)), seconds=SECONDS_PER_ANSWER)
            lines = run_python(code, timeout_s=3 * SECONDS_PER_ANSWER + 1, **SANDBOX).stdout.split() or "0"
            equal.update((pair, line == "1") for pair, line in zip(left, lines, strict=False))
            left = left[len(lines) :]            # the rest, in a new process

    equal: dict[tuple[str, str], bool] = {}
    chunks = [[*latex][i : i + ANSWERS_PER_PROCESS] for i in range(0, len(latex), ANSWERS_PER_PROCESS)]
    with ThreadPoolExecutor(usable_cores()) as threads:
        list(threads.map(compare, chunks))
    return equal


@cache
def check_sandbox() -> None:
    """Raise ModuleNotFoundError if math-verify does not work in the sandbox."""
    code = "from math_verify import parse, verify\nassert verify(parse('$x+x$'), parse('$2x$'))"
    result = run_python(code, timeout_s=60.0, **SANDBOX)
    if not result.ok:
        reason = result.stderr.strip().rpartition("\n")[2] or result.reason
        raise ModuleNotFoundError(f"math-verify does not work in the sandbox ({reason}); pip install it")
