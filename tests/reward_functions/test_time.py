"""The time of reward functions on texts made to be slow to read, and that reading them in linear time changes no points."""

import itertools
import re
import signal
import time

import pytest
from conftest import exhaustive
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rewards import COLUMNS

import reward_functions
from environments.games import guess_letter
from environments.tools import calculate, run_calls
from reward_functions import answers, mathematics
from reward_functions.models import parse_rating
from reward_functions.tunix import find_answer, read_float
from reward_functions.loading import BUILT_IN

IN_A_SANDBOX = {"math_equality", "passes_tests"}          # their time is that of processes
SMALL, LARGE, MOST = 10_000, 100_000, 30                  # characters; time of the large text / that of the small one: linear 10, square 100
SHORTEST = 5e-4                 # seconds; a small text that takes less counts as this, since str.find changes its method

TAGS = [
    "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<answer>1", "<answer>x</answer>", "</reasoning> <answer>",
    "<reasoning>x</reasoning>", "<reasoning>x</reasoning><answer>", "<reasoning>x</reasoning><answer>1</answer>", "</reasoning>" + " " * 99,
]
BRACKETS = ["(", ")", "[", "{", "}", '{"a":', "[{},", "[1,", "(1+", "((1)+", "A).:", "\\frac{", "```\n", "```json\n", "```json\n{}\n```"]
DIGITS = ["9", "0", "1,", "1,000", "1.", "0.1", ".", "-", "$1", "5 %", "1e9", "1/", "2**", "\u0663", "1 abc"]
WORDS = ["a ", "a b c d ", " ", "\n", "\\", '"', "rm ", "rm  -r", "\x00", "\u0130", "please ", "\\boxed{"]
FRAMES = ["{}", "<answer>{}</answer>", "<reasoning>{}</reasoning><answer>1", "<answer>{}!", "```json\n{}", "\\boxed{{{}}}", "1{}x"]


def fill(frame, unit, size):
    return frame.format(unit * (size // len(unit)))


def points(name, *texts):
    columns = {column: [value] * len(texts) for column, value in COLUMNS.items()}
    columns["answer"] = ["B" if name == "multiple_choice" else "132"] * len(texts)
    return BUILT_IN[name](list(texts), prompts=["p"] * len(texts), **columns)


def rating(text):
    try:
        return parse_rating(text)
    except ValueError:
        return None


READERS = {
    **{name: lambda text, name=name: points(name, text, text) for name in BUILT_IN if name not in IN_A_SANDBOX},
    "judge": rating,
    "math_equality's reading": lambda text: (mathematics.final_answer(text), mathematics.as_latex(text)),
    "passes_tests's reading": lambda text: answers.extract_block(text, "python|py"),
    "calculator": lambda text: run_calls(text, {"calculate": calculate}),
    "guess_letter": lambda text: guess_letter([{"role": "assistant", "content": text}], "e"),
}
THEIR_OWN = {                   # what else a function looks for
    "judge": ["<think>", "</think>", "<think>1</think>", "/ ", "out of ", "/10 ", "-1"],
    "calculator": ["calculate(", "calculate(1) ", "calculate()) ", "<tool_call>", "<tool_call>{", '<tool_call>{"name": 1}</tool_call>'],
}


def processor_time(function, text, calls):
    started = time.process_time()
    for _ in range(calls):
        function(text)
    return (time.process_time() - started) / calls


def growth(function, make, attempts=9):
    """Time of a large text / that of a small one, each the least of several measurements, until it is within the bound."""
    small, large = make(SMALL), make(LARGE)
    of_small = of_large = float("inf")
    for _ in range(attempts):
        of_small, of_large = min(of_small, processor_time(function, small, 5)), min(of_large, processor_time(function, large, 1))
        if of_large <= MOST * max(of_small, SHORTEST):
            break
    return of_large / max(of_small, SHORTEST)


@pytest.fixture
def no_longer_than_a_minute():
    def stop(*_):
        raise TimeoutError("the time grows too fast to measure")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)


COUNTERS = "repetition_penalty", "diversity"              # their tables outgrow the processor's caches; quadratic would be 100


@pytest.mark.slow
@pytest.mark.usefixtures("no_longer_than_a_minute")
@pytest.mark.parametrize("every", [5, exhaustive(1)])
@pytest.mark.parametrize("name", READERS)
def test_the_time_of_a_reward_function_is_linear_in_the_completion(name, every):
    units = [*TAGS, *BRACKETS, *DIGITS, *WORDS, *THEIR_OWN.get(name, [])]
    for frame, unit in list(itertools.product(FRAMES, units))[list(READERS).index(name) % every :: every]:
        ratio = growth(READERS[name], lambda size, frame=frame, unit=unit: fill(frame, unit, size))
        assert ratio <= (50 if name in COUNTERS else MOST), (frame, unit)


# ---- the expressions that the functions are equal to ---------------------------------------------------------------

PIECES = ["<reasoning>", "</reasoning>", "<answer>", "</answer>", "x", "1", ".", ",", "-", " ", "\n", "<", ">", "\u0663", "\u00a0", "\u2028"]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
many = settings(max_examples=400, deadline=None)
TUNIX = re.compile(r"<reasoning>.+?</reasoning>.*?<answer>(.+?)(?:</answer>|$)", re.MULTILINE | re.DOTALL)


@many
@given(texts | texts.map("<reasoning>x</reasoning>{}".format))
@example("<reasoning></reasoning><answer>1</answer>")
@example("<reasoning></reasoning></reasoning><answer>")
def test_the_functions_of_tunix_find_what_their_expressions_find(text):
    match = TUNIX.search(text)
    assert find_answer(text) == (match[1] if match else None)
    match = re.search(r"<answer>.*?([\d.]+)", text, re.DOTALL)
    assert reward_functions.check_numbers([text], answer=["1"]) == [1.5 if match and read_float(match[1]) == 1 else 0.0]
