"""The default reward functions by example, and how points are added up."""

import contextlib
import importlib.util
import itertools
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import rewards
from config import GRPOConfig
from environments.tools import calculate, guess_letter, run_calls
from sources import load_examples
from experience import combine_and_clip
from grpo import compute_group_advantages
from reward_functions import check_answer, math_equality, mathematics, programs
from reward_functions.calling import Reports, wrap_reward_functions
from reward_functions.loading import BUILT_IN, load_reward_function
from reward_functions.models import parse_rating
from rewards import compute_rewards_for_completions

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None or sys.platform != "linux", reason="needs math-verify and a sandbox"
)
GSM8K = ROOT / "../shared/data/gsm8k"
NAN = math.nan
GOLD = "<reasoning>7+5=12 4+8+1=13</reasoning><answer>132</answer>"


@pytest.mark.parametrize("text,truth,points", [
    (GOLD, "132", 1.0),
    ("a <answer> 132 </answer> b", "132", 1.0),
    ("</answer>132<answer>", "132", 0.0),
    ("<answer><answer>132</answer></answer>", "132", 0.0),
    ("<answer>$132.</answer>", "132", 1.0), ("<answer>$ 132</answer>", "132", 1.0), ("<answer>132 €</answer>", "132", 1.0),
    (GOLD, None, None),
    ("<answer></answer>", "", None),
    ("<answer>nan</answer>", "NaN", 1.0),             # as text; as a number it would not even equal itself
    ("<answer>nan</answer>", math.nan, None),
    ("<answer>nan</answer>", "nan", None),            # what data.py makes of the number
    ("<answer>nan</answer>", [math.nan, "132"], 0.0),
    ("<answer>1e400</answer>", "inf", 0.0),
    ([{"role": "assistant", "content": GOLD}], "132", 1.0),
])
def test_correctness(text, truth, points):
    assert rewards.correctness([text], answer=[truth]) == [points]


@pytest.mark.parametrize("text,points", [
    (GOLD, 1.0),
    (GOLD + " and so on", 0.8),
    ("<reasoning></reasoning><answer>1</answer>", 0.8),
    ("<reasoning>x</reasoning><answer> </answer>", 0.8),
    ("<answer>1</answer><reasoning>x</reasoning>", 0.4),
    ("<answer>1</answer>", 0.2),
    ("<reasoning>" * 3, 0.0),
    ("</reasoning>x<reasoning></answer>1<answer>", 0.0),
    ("<reasoning>x</reasoning><answer>" * 2000, 0.0),          # in no time
])
def test_reasoning_coherence(text, points):
    assert rewards.reasoning_coherence([text]) == pytest.approx([points])


@pytest.mark.parametrize("reasoning,points", [
    ("2 and 2 make 4", 1.0), ("w " * 100, 1.0), ("w " * 200, 0.5), ("w " * 400, 0.0), ("  ", 0.0), ("a\na\na\nb", 0.5),
    ("字" * 100, 1.0), ("字" * 1500, 0.0), ("!" * 200, 0.5), ("a" * 4000, 0.5),
])
def test_explanation_quality(reasoning, points):
    assert rewards.explanation_quality([f"<reasoning>{reasoning}</reasoning>"]) == pytest.approx([points])
    assert rewards.explanation_quality([reasoning]) == [0.0], "without tags"
    assert rewards.explanation_quality([f"</reasoning><reasoning>{reasoning}"]) == [0.0], "in the wrong order"


@pytest.mark.skipif(not GSM8K.exists(), reason="no ../shared/data/gsm8k")
@pytest.mark.filterwarnings("ignore:.*left out 1 of")
def test_every_gold_answer_of_gsm8k_is_right_and_its_successor_wrong():
    examples = load_examples(str(GSM8K / "train.jsonl"))
    answers, texts = ([example[name] for example in examples] for name in ("answer", "completion"))
    assert len(answers) >= 7472 and not any("<<" in text or "####" in text for text in texts)
    assert set(rewards.correctness(texts, answer=answers)) == set(rewards.reasoning_coherence(texts)) == {1.0}
    for spell in (str, lambda a: f"${a}.00", lambda a: f"{int(a):,}"):
        assert set(rewards.correctness([f"<answer>{spell(a)}</answer>" for a in answers], answer=answers)) == {1.0}
    gold = [f"<reasoning>x</reasoning><answer>{a}</answer>" for a in answers]
    assert set(check_answer(gold, answer=answers)) == {3.0}
    after = [f"<reasoning>x</reasoning><answer>{int(a) + 1}</answer>" for a in answers]
    assert set(rewards.correctness(after, answer=answers)) == {0.0} and 3.0 not in check_answer(after, answer=answers)
    if sys.platform == "linux":
        assert set(math_equality(gold, answer=answers)) == {1.0}
        assert set(math_equality(after[:200], answer=answers[:200])) == {0.0}


COLUMNS = dict(
    answer="132", tests=["assert f(1) == 1"], pattern="x", forbidden=["x"], schema=None, tags=None, choices=None,
    numbers=[1, 2], target=3,
)


def points(name, *texts):
    columns = {column: [value] * len(texts) for column, value in COLUMNS.items()}
    columns["answer"] = ["B" if name == "multiple_choice" else "132"] * len(texts)
    return load_reward_function(name)(list(texts), prompts=["p"] * len(texts), **columns)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("text", [
    "", "<answer>", "</answer><answer>", "\x00é" * 9, f"<answer>{'9' * 5000}</answer>", "." * 99, "\ud800"])
def test_nothing_that_a_model_prints_makes_a_reward_function_raise(name, text):
    for reward in points(name, text, text):
        assert isinstance(reward, float) and math.isfinite(reward)


IN_A_SANDBOX = {"math_equality", "passes_tests"}          # their time is that of processes
UNITS = [
    "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<answer>1", "</reasoning> <answer>", "<reasoning>x</reasoning>",
    "<reasoning>x</reasoning><answer>1</answer>", "(", "[", '{"a":', "[1,", "(1+", "\\frac{", "```\n", "```json\n{}\n```",
    "9", "1,", "1.", "-",
    "1/", "\u0663", "a ", "a b c d ", " ", "\n", "\\", "rm  -r", "\\boxed{", "<think>", "/10 ", "calculate(", "calculate()) ",
    "<tool_call>",
]
FRAMES = ["{}", "<answer>{}</answer>", "<answer>{}!", "```json\n{}", "\\boxed{{{}}}"]


READERS = {
    **{name: lambda text, name=name: points(name, text, text) for name in BUILT_IN if name not in IN_A_SANDBOX},
    "judge": parse_rating,
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
        with contextlib.suppress(ValueError):             # the judge's, which answers None
            READERS[name](text)
        assert time.process_time() - started < 1, (frame, unit)


def rollout_of(*texts):
    mask = torch.tensor([[True, True, False]] * len(texts))
    ids = torch.arange(3 * len(texts)).view(-1, 3)
    prompts = len(texts) // 2
    return SimpleNamespace(
        completions=list(texts), completion_ids=ids, completion_mask=mask, sampling_logp=-ids.float(),
        prompt_ids=torch.tensor([[0, 7], [8, 9]])[:prompts], prompt_mask=torch.tensor([[False, True], [True, True]])[:prompts],
        turn_points=None,
    )


def call_and_score(functions, weights, rollout, examples, *, reports=None, on_error="raise", timeout=0.0):
    """The points of functions called as in training, added up; fills reports."""
    config = GRPOConfig(reward_errors=on_error, reward_timeout=timeout)
    wrapped, made = wrap_reward_functions(functions, rollout, config)
    scored = compute_rewards_for_completions(wrapped, weights, rollout, examples)
    vars(reports or Reports()).update(vars(made))
    return scored


EXAMPLES = [{"prompt": "p", "answer": "1", "completion": "gold"}, {"prompt": "q", "answer": "2", "level": 3}]


@pytest.mark.parametrize("functions,weights,expected", [
    ([[1, 2, 3, 4]], [0.5], [[0.5, 1], [1.5, 2]]),
    ([[1, 0, None, None], [2, 1, 2, 1]], [1.0, 0.5],
     [[2, 0.5], [1, 0.5]]),     # None for all siblings: it does not apply to the group
    ([[None, 1, 2, None], [2, 1, 2, 1]], [1.0, 1.0], [[NAN, 2], [4, NAN]]),     # None for some: these have no score
    ([[NAN] * 4, [2, 1, 2, 1]], [1.0, 1.0], [[NAN] * 2] * 2),                   # NaN: it failed, for all siblings too
    ([[NAN] * 4, [2, 1, 2, 1]], [0.0, 1.0], [[2, 1], [2, 1]]),                  # of weight 0: watched alone
    ([[1, 2, None, None]], [1.0], [[1, 2], [NAN, NAN]]),                        # a group that no function applies to
])
def test_rewards_are_weighted_sums_of_what_applies(functions, weights, expected):
    called = [rename(lambda values=values, **columns: values, f"f{i}") for i, values in enumerate(functions)]
    total, per_function = compute_rewards_for_completions(called, weights, rollout_of("a", "b", "c", "d"), EXAMPLES)
    torch.testing.assert_close(total, torch.tensor(expected).double(), equal_nan=True)
    assert [per_function[f"f{i}"].flatten().tolist() for i in range(len(functions))] == [
        pytest.approx([NAN if x is None else x for x in values], nan_ok=True) for values in functions]


def rename(function, name):
    function.__name__ = name
    return function


@pytest.mark.parametrize("functions,message", [
    ([lambda **columns: [1.0]], "reward function <lambda> returned 1 values for 4 completions; return a list with one number"),
    ([lambda **columns: [1.0] * 4] * 2, "have the name <lambda>"),
])
def test_what_is_no_list_of_a_number_for_each_and_two_functions_of_one_name_are_refused(functions, message):
    with pytest.raises(ValueError, match=message):
        compute_rewards_for_completions(functions, [1.0] * len(functions), rollout_of("a", "b", "c", "d"), EXAMPLES)


def test_gdpo_adds_up_the_advantages_of_each_function_by_hand():
    right, short = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).double(), torch.tensor([[0.01, 0.02, 0.03, 0.04]]).double()
    nobody = torch.full((1, 4), torch.nan).double()
    settings = dict(reward_functions=["a", "b", "c"], reward_weights=[1.0, 0.5, 2.0], reward_combination="gdpo")
    points = combine_and_clip(GRPOConfig(**settings), right, {"a": right, "b": short, "c": nobody})
    half, third = 0.5 / math.sqrt(1 / 3), 0.01 / math.sqrt(5e-4 / 3)             # deviation / standard deviation (n - 1)
    expected = [-half - 0.75 * third, half - 0.25 * third, half + 0.25 * third, -half + 0.75 * third]
    assert points.tolist()[0] == pytest.approx(expected, rel=1e-5)
    partly = torch.where(right == 1, torch.nan, short)
    unscored, without = (
        combine_and_clip(GRPOConfig(**settings), right + partly, {"a": points_of_a, "b": partly, "c": nobody})
        for points_of_a in (right, right + 0 * partly))   # those of an unscored one do not count for its siblings
    torch.testing.assert_close(unscored, without, equal_nan=True)
    assert torch.equal(unscored.isnan(), partly.isnan())
    summed = combine_and_clip(GRPOConfig(), right, {"a": right, "b": short})
    assert torch.equal(summed, right), "the default changes nothing"
    assert (compute_group_advantages(points).argsort() == points.argsort()).all()
