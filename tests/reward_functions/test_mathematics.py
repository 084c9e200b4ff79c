"""Mathematical equality by example, and expressions that hang."""

import ast
import math
import re
import time

import pytest
from test_rewards import needs_math_verify

import reward_functions
from reward_functions import mathematics
from reward_functions.sandbox import SandboxResult


@needs_math_verify
@pytest.mark.parametrize(
    "given,truth,points",
    [
        ("<answer>1/2</answer>", "\\frac{1}{2}", 1.0), ("so \\boxed{0.5}", "1/2", 1.0),
        ("<answer>2(x+1)</answer>", "$2x+2$", 1.0), ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("<answer>\\frac{1}{3}</answer>", "\\frac{1}{2}", 0.0), ("<answer>1,234</answer>", "1234", 1.0),
        ("\\boxed{1}\\boxed{2}", "2", 0.0), ("2", "2", 0.0), ("", "2", 0.0), ("\\boxed{", "2", 0.0),
        ("<answer>Paris</answer>", "paris", 1.0), ("<answer>dog</answer>", "god", 0.0), ("<answer>x y</answer>", "yx", 1.0),
        ("<answer>18 or 19</answer>", "19", 0.0), ("<answer>18 dollars</answer>", "$18.00", 1.0),
        ("<answer>x</answer>", None, None), ("<answer>5</answer>", math.nan, None), ("<answer>9^{9^{9^9}}</answer>", "3", 0.0),
        ("<answer>" + "(" * 3000 + "</answer>", "3", 0.0), ("<answer>" + "\\frac{" * 300 + "</answer>", "3", 0.0),
        ("<answer>__import__('os')._exit(0)</answer>", "3", 0.0),
    ],
)
def test_math_equality(given, truth, points):
    assert reward_functions.math_equality([given], answer=[truth]) == [points]


def verdicts(pairs):
    return reward_functions.math_equality([f"<answer>{given}</answer>" for given, _ in pairs], answer=[truth for _, truth in pairs])


@needs_math_verify
def test_words_after_a_number_are_left_out_only_if_they_are_units_and_other_signs_say_something_else():
    words = ["million", "thousand", "dozen", "factorial", "minus seven", "not", "less", "squared", "square", "east", "apples", "per", "c", "t"]
    assert verdicts([(f"18 {word}", "18") for word in words] + [(f"18 \\text{{ {word}}}", "18") for word in words]) == [0.0] * 28
    units = ["dollars", "Euros", "cents", "hours", "people", "years", "books", "miles per hour", "km/h", "m/s^2", "cm", "cm^2", "m²", "square units",
             "sq. ft", "ft^2", "\\text{ cm}^{2}", "\\mathrm{~m}", "\\text{ inches}.", "degrees", "kilograms", "\\degree", "^\\circ C", "^{\\circ}\\text{F}", "°C", "€", "percent"]
    assert verdicts([(f"18 {unit}", "18") for unit in units]) == [1.0] * len(units)
    assert verdicts([("18cm", "18"), ("$18$ dollars", "18"), ("36\\pi \\text{ cm}^2", "36\\pi"), ("18", "18 \\text{ ways}")]) == [1.0] * 4

    others = ["18 \\text{19}", "18_{8}", "18 _8", "\\neq 18", "\\not= 18", "\\approx 18", "> 18", "18/", "18^", "18²", "18₈", "10 8", "10\\,8", "17\n18", "$17$ $18$", "\\(17\\) \\(18\\)"]
    assert verdicts([(given, "18") for given in others]) == [0.0] * len(others)


def pairs_of(text):
    """Pairs of an answer and a truth, separated by | and ;."""
    return [tuple(map(str.strip, pair.split(" | "))) for pair in text.replace(";\n", "; ").split("; ")]


@needs_math_verify
def test_numbers_are_equal_exactly_or_as_a_decimal_of_a_number_that_has_no_finite_one():
    wrong = pairs_of(r"""
        0.0000003 | 0.0000001 ; 1.6 \times 10^{-19} | 6.626 \times 10^{-34} ; 0.0 | 1.2 \times 10^{-7} ; 1/2^{63} | 1/2^{64} ; 1/21! | 1/20! ;
        e^{-50} | e^{-100} ; 0.000499 | 1/2004 ; 1/(3 \cdot 2^{101}) | (2^{100}+1)/(3 \cdot 2^{101}) ; 1/3 | \frac{4^{50}-1}{3 \cdot 4^{50}} ;
        1.6e-19 | 1.6 \times 10^{-34} ; 1234567.51 | 1234567.50 ; 1.0000001 | 1 ; 0.1250001 | 1/8 ; 0.33333 | 1/3 ; 333333 | 1000000/3 ; 0 | 10^{-20} ; 2 \cdot 10^{-20} x | 10^{-20} x ;
        x<10^{-20} | x<10^{-21} ; \{10^{-20}, 1\} | \{10^{-21},1\} ; \sin(10^{-20}) | 10^{-20} ; 0.0000001\% | 0.0000002\% ; x = 10^{-30} | x = 10^{-31} ;
        \begin{pmatrix}10^{-20}\\1\end{pmatrix} | \begin{pmatrix}10^{-21}\\1\end{pmatrix} ; 10^{-20}i | 2 \cdot 10^{-20}i ; \sqrt{10^{16}+1} | 10^8""")
    right = pairs_of(r"""
        0.333333 | 1/3 ; 0.142857 | 1/7 ; 3.333333 \times 10^{-11} | \frac{1}{3} \times 10^{-10} ; 0.70710678 | \frac{\sqrt2}{2} ; 0.1x+0.2x | 0.3x ;
        \sqrt{3+2\sqrt{2}} | 1+\sqrt{2} ; \cos(\pi/7)-\cos(2\pi/7)+\cos(3\pi/7) | 1/2 ; 6.626\times10^{-34} | 6.6260 \times 10^{-34} ; 12.5\% | 12.5 ;
        6.626e-34 | 6.626 \times 10^{-34} ; 12.5\% | 0.125 ; (0.5, 0.333333) | (\frac12,\frac13) ; e^{-100} | \frac{1}{e^{100}} ; \begin{pmatrix}0.5\\1\end{pmatrix} | \begin{pmatrix}1/2\\1\end{pmatrix}""")
    assert [pair for pair, points in zip(wrong + right, verdicts(wrong + right)) if points != (pair in right)] == []
    fractions = [(p, q) for q in (7, 9, 11, 13) for p in range(1, 6)]
    near = [(f"{p / q * (1 + error):.12f}", f"{p}/{q}") for p, q in fractions for error in (9e-7, -9e-7, 1.1e-6, -1.1e-6, 1e-5)]
    assert verdicts(near) == [1.0, 1.0, 0.0, 0.0, 0.0] * 20


FORMS = r"""
    -1 1/2 | -\frac{3}{2} ; 204_5 | 204_{5} ; \frac 1 2 | 0.5 ; \log_2 8 | 3 ; $x=1$ or $x=2$ | x=2, x=1 ; x+\frac{1}{2}. | \frac{1}{2}+x ;
    2 and 3 | 3, 2 ; 1, 2, and 3 | 1,2,3 ; x=1 and x=2 | x=1, x=2 ; (1,2) and (3,4) | (1,2),(3,4) ; 2,3 | $2$ and $3$ ; A and B | B and A ;
    \approx 3.14 | 3.14 ; ≈ 3.14 | 3.14 ; 3.14 | $\approx 3.14$ ; x \approx 3.14 | 3.14 ; = 73 | 73 ; 73 | $= 73$ ; = \frac{1}{2} | 1/2 ;
    **73** | 73 ; `73` | 73 ; **73 dollars**. | 73 ; **$\frac12$** | 1/2 ; \fbox{73} | 73 ; \boxed 73 | 73 ;
    C | \text{(C)} ; \text{C} | \text{(C)} ; \mathrm{C} | \text{(C)} ; \text{(C)} | C ; \textbf{(C)} | \mathbf{C} ; (C) | \text{C} ;
    2pi | 2\pi ; 2*pi | 2\pi ; 3pi/4 | \frac{3\pi}{4} ; sin(pi/3) | \frac{\sqrt{3}}{2} ; ln(2) | \ln 2 ; arctan(x) | \arctan x ; exp(x) | e^x ; 2alpha | 2\alpha ;
    x² | x^2 ; x**10 | x^{10} ; x**(n+1) | x^{n+1} ; 10⁻¹² | 10^{-12} ; x**-1 | \frac{1}{x} ; ½ | \frac{1}{2} ; 2½ | 5/2 ; x₁ | x_1 ; log₂8 | 3 ;
    ∞ | \infty ; -inf | -\infty ; (-inf, 3) | (-\infty, 3) ; 2√3 | 2\sqrt{3} ; √12 | 2\sqrt{3} ; √(x+1) | \sqrt{x+1} ; \sqrt(2) | \sqrt2 ; 3·2 | 6 ; \varnothing | \emptyset ;
    ∅ | \varnothing ; x<3 | (-\infty,3) ; 0 \le x < 1 | [0,1) ; x ≥ 2 | [2,\infty) ; [0,1) | 0 \le x < 1"""


@needs_math_verify
def test_one_answer_is_read_in_all_its_forms_and_as_no_other_answer():
    right = [*pairs_of(FORMS), ("\uff17\uff13", "73")]                # digits as wide as Chinese characters
    assert [pair for pair, points in zip(right, verdicts(right)) if not points] == []
    values = pairs_of(r"""204_5 | 204_6 ; x² | x^3 ; 18² | 182 ; 18₈ | 188 ; 2½ | 21/2 ; 2½ | 1 ; √12 | 2 ; 10⁻² | 8 ; 2**3 | 6 ; x**10 | 0 ; pi | ip ; cos | soc ; sinx | sin x ; pie | \pi e ;
        x<1 and x>3 | x<1 or x>3 ; 2 and 3 | 2 ; 2 and 3 | 5 ; 2 and 3 | 6 ; sand | s, d ; **1** **8** | 18 ; `1`8` | 18 ; \boxed1\fbox3 | 3 ; \approx 3.1 | 3.14 ; \approx 3 | 3.14 ;
        \approx 3.14 | \pi ; \approx 3 | 3 ; A or B | \text{(A)} ; AB | \text{(A)} ; \emptyset | 0 ; \emptyset | \{0\} ; -inf | inf ; x \le 3 | (-\infty, 3) ; [0,1] | 0 \le x < 1""")
    assert [pair for pair, points in zip(values, verdicts(values)) if points] == []
    names = pairs_of(r"""pi | \pi ; sin(x) | \sin x ; cos(x) | \cos x ; ln(2) | \ln 2 ; exp(x) | e^x ; inf | \infty ; √2 | \sqrt2 ; x² | x^2 ; ½ | 1/2 ; x₁ | x_1 ; x<3 | (-\infty,3)""")
    crossed = [(given, truth) for given, one in names for _, truth in names if truth != one]
    assert len(crossed) == 110 and not any(verdicts(crossed))


@needs_math_verify
def test_what_is_no_arithmetic_is_compared_as_text():
    wrong = pairs_of(r"""2020 | 2024-03-01 ; 2024-3-1 | 2024-03-01 ; 7 | 12-05 ; 3/2024 | 3/1/2024 ; 9/5 | 9:05 ; 5/12 | 05/12 ; 7:15 | 14:30 ; 1/3 | 10:30 ; -679 | 555-1234 ; -1553 | 1-800-555-0199 ;
        -3889 | (555) 123-4567 ; -147451 | 978-3-16-148410-0 ; v1.1 | v1.10 ; 1.12 | 1.4.8 ; -10 | 10-20 ; OH2 | H2O ; H4C | CH4 ; OH_2 | H_2O ; 12B | B12 ; 7:15 am | 7:15 pm ;
        6,5 | A=5,B=6 ; 5,6 | A=5,B=6 ; x=6,y=5 | x=5,y=6 ; a=5,b=6 | x=5,y=6 ; f(1)=2, f(2)=3 | 3, 2 ; 2 and 1 | x=1 and y=2 ; 6,5 | x=5,\quad y=6 ; -1 | ii""")
    right = pairs_of(r"""3 | 10-7 ; 10-7 | 3 ; 3 - 10 | -7 ; 3.5 | 10-6.5 ; 7-5+1 | 3 ; 3:4 | 6:8 ; 16:9 | 16/9 ; 3:15 | 1:5 ; v0*t | t*v0 ; 2x1+3x2 | 3x2+2x1 ; 10-5-2 | 3 ; 8/4/2 | 1 ; 1e-05 | 1/100000 ; 10-20 minutes | 10-20 ; H₂O | H2O ; C_6H_{12}O_6 | C6H12O6 ;
        (555)123-4567 | (555) 123-4567 ; x1 | x_1 ; B=6, A=5 | A=5,B=6 ; x=1/2, y=3 | y=3, x=0.5 ; A=(1,2), B=(3,4) | B=(3,4), A=(1,2) ; x=1, x=2 | 2, 1""")
    assert [pair for pair, points in zip(wrong + right, verdicts(wrong + right)) if points != (pair in right)] == []


@needs_math_verify
def test_degrees_repeating_decimals_and_the_imaginary_unit_are_what_they_are():
    wrong = pairs_of(r"""\sin 30 | \sin 30^\circ ; \sin 30 | 1/2 ; \sin x^\circ | \sin x ; 0.3 | 0.\overline{3} ; 3\overline{6} | 36 ; i | 1 ; i^2 | 1 ; 3+4i | 3-4i ; 3i | 3""")
    right = pairs_of(r"""\sin 30^\circ | 1/2 ; 0.5 | sin(30°) ; \cos^2 45^{\circ} | 1/2 ; \frac{\sin 30^\circ}{2} | 1/4 ; \sin(15+15)^\circ | 1/2 ; \sin{30}^\circ | 1/2 ; \tan 45 degrees | 1 ;
        30 degrees | 30^\circ ; \frac{90^\circ}{2} | 45 ; \tan^{-1}(3/4) \approx 36.87^\circ | 36.87 ; 1/3 | 0.\overline{3} ; -0.1\overline6 | -1/6 ; 12.3\overline{45} | 679/55 ; 0.\dot{3} | 1/3 ;
        0 | e^{i\pi}+1 ; -1 | i^2 ; 2i | i+i ; |3+4i| | 5 ; (x+i)(x-i) | x^2+1 ; e^{i\theta} | \cos\theta+i\sin\theta ; z=3+4i | 4i+3 ; i=5 | 5 ; \sum_{i=1}^{3} i | 6 ; a+bi | bi+a ; \begin{pmatrix}i^2\\1\end{pmatrix} | \begin{pmatrix}-1\\1\end{pmatrix} ; i | \sqrt{-1} ; x=i, x=-i | -i, i""")
    assert [pair for pair, points in zip(wrong + right, verdicts(wrong + right)) if points != (pair in right)] == []


def test_a_long_answer_is_not_read():
    started = time.process_time()
    assert mathematics.as_latex("\\text{a}" * 15000) is mathematics.as_latex("1+" * 500 + "1") is None and mathematics.as_latex("1+" * 499 + "1")
    assert time.process_time() - started < 1


@needs_math_verify
def test_an_answer_that_never_ends_costs_neither_the_others_nor_the_order(monkeypatch):
    monkeypatch.setattr("reward_functions.mathematics.SECONDS_PER_ANSWER", 1)
    answers = ["2/2", "10**10**10", "2**(2**(2**100))", "4/2", "100000!^{100000!}", "1/3"]
    points = reward_functions.math_equality([f"<answer>{a}</answer>" for a in answers], answer=["1", "7", "7", "2", "7", "1/4"])
    assert points == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_math_verify_that_does_not_work_in_the_sandbox_is_an_error(monkeypatch):
    monkeypatch.setitem(mathematics.SANDBOX, "modules", ("not_installed",))
    mathematics.check_sandbox.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"math-verify does not work in the sandbox \(.+\); pip install it"):
        reward_functions.math_equality(["<answer>1</answer>"], answer=["2"])


def test_an_answer_that_was_compared_in_what_another_one_left_is_compared_again(monkeypatch):
    def compare(code, **options):                                  # time is over at the second of several, or at a lone "8"
        given = [pair[0] for pair in ast.literal_eval(re.search(r"in (\[.*\]):", code)[1])] if "in [" in code else []
        runs.append(given)
        return SandboxResult(True, "" if given[:1] == ["$8$"] else "1\n", "", "")

    runs = []
    monkeypatch.setattr("reward_functions.mathematics.run_python", compare)
    points = reward_functions.math_equality([f"<answer>{n}</answer>" for n in (7, 8, 9)], answer=["1+6", "2+6", "3+6"])
    assert points == [1.0, 0.0, 1.0] and [given for given in runs if given] == [["$7$", "$8$", "$9$"], ["$8$", "$9$"], ["$9$"]]
