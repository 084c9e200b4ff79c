"""The time of reward functions on texts made to be slow to read."""

import itertools
import time

import pytest
from test_rewards import COLUMNS

from environments.tools import guess_letter
from environments.tools import calculate, run_calls
from reward_functions import mathematics, programs
from reward_functions.models import parse_rating
from reward_functions.loading import BUILT_IN, load_reward_function

IN_A_SANDBOX = {"math_equality", "passes_tests"}          # their time is that of processes
UNITS = [
    "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<answer>1", "</reasoning> <answer>", "<reasoning>x</reasoning>",
    "<reasoning>x</reasoning><answer>1</answer>", "(", "[", '{"a":', "[1,", "(1+", "\\frac{", "```\n", "```json\n{}\n```",
    "9", "1,", "1.", "-",
    "1/", "\u0663", "a ", "a b c d ", " ", "\n", "\\", "rm  -r", "\\boxed{", "<think>", "/10 ", "calculate(", "calculate()) ",
    "<tool_call>",
]
FRAMES = ["{}", "<answer>{}</answer>", "<answer>{}!", "```json\n{}", "\\boxed{{{}}}"]


def points(name, *texts):
    columns = {column: [value] * len(texts) for column, value in COLUMNS.items()}
    columns["answer"] = ["B" if name == "multiple_choice" else "132"] * len(texts)
    return load_reward_function(name)(list(texts), prompts=["p"] * len(texts), **columns)


def rating(text):
    try:
        return parse_rating(text)
    except ValueError:
        return None


READERS = {
    **{name: lambda text, name=name: points(name, text, text) for name in BUILT_IN if name not in IN_A_SANDBOX},
    "judge": rating,
    "math_equality's reading": lambda text: mathematics.in_box(text[:mathematics.LONGEST_TEXT]),
    "passes_tests's reading": lambda text: programs.program_of(text, {"f(1)"}),
    "calculator": lambda text: run_calls(text, {"calculate": calculate}),
    "guess_letter": lambda text: guess_letter([{"role": "assistant", "content": text}], "e"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_no_completion_of_100_000_characters_takes_a_second(name):
    for frame, unit in itertools.product(FRAMES, UNITS):
        text = frame.format(unit * (100_000 // len(unit)))
        started = time.process_time()
        READERS[name](text)
        assert time.process_time() - started < 1, (frame, unit)
