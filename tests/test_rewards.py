"""Reward functions by example, and how they are chosen, called and added up."""

import math
from types import SimpleNamespace

import pytest
import torch

import rewards
from rewards import compute_rewards_for_completions, load_reward_function

GOLD = "<reasoning>7+5=12 4+8+1=13</reasoning><answer>132</answer>"


@pytest.mark.parametrize(
    "text,truth,points",
    [
        (GOLD, "132", 1.0),
        ("<answer>132</answer>", "132", 1.0),
        ("<answer> 132.0 </answer>", "132", 1.0),
        ("<answer>1,320</answer>", "1320", 1.0),
        ("<answer>$132.</answer>", "132", 1.0),
        ("<answer>-4</answer>", "-4", 1.0),
        ("<answer>Paris</answer>", "paris", 1.0),
        ("<answer>131</answer>", "132", 0.0),
        ("<answer>1,32</answer>", "132", 0.0),
        ("132", "132", 0.0),
        ("", "132", 0.0),
        ("<answer></answer>", "", 0.0),
        ("<answer>nan</answer>", "nan", 1.0),             # as text; as a number it would not even equal itself
        ("<answer>1e400</answer>", "inf", 0.0),
        ("<answer>131</answer><answer>132</answer>", "132", 0.0),
        ("<answer>132", "132", 0.0),
        ("<answer>9**9**9</answer>", "132", 0.0),
        ([{"role": "assistant", "content": GOLD}], "132", 1.0),
    ],
)
def test_correctness(text, truth, points):
    assert rewards.correctness([text], answer=[truth]) == [points]


def test_correctness_cannot_score_without_an_answer():
    assert rewards.correctness([GOLD, GOLD], answer=[None, "132"]) == [None, 1.0]


@pytest.mark.parametrize(
    "text,points",
    [
        (GOLD, 1.0),
        (GOLD + " and so on", 0.8),
        ("<reasoning></reasoning><answer>1</answer>", 0.8),
        ("<answer>1</answer><reasoning>x</reasoning>", 0.4),
        ("<answer>1</answer>", 0.2),
        ("<reasoning>" * 3, 0.0),
        ("", 0.0),
    ],
)
def test_reasoning_coherence(text, points):
    assert rewards.reasoning_coherence([text]) == pytest.approx([points])


@pytest.mark.parametrize(
    "reasoning,points",
    [("2 and 2 make 4", 1.0), ("w " * 100, 1.0), ("w " * 200, 0.5), ("w " * 400, 0.0), ("  ", 0.0), ("a\na\na\nb", 0.5)],
)
def test_explanation_quality(reasoning, points):
    assert rewards.explanation_quality([f"<reasoning>{reasoning}</reasoning>"]) == pytest.approx([points])
    assert rewards.explanation_quality([reasoning]) == [0.0], "without tags"


@pytest.mark.parametrize(
    "text,truth,exact,approximate,answer,numbers",
    [
        (GOLD, "132", 3.0, 2.0, 3.0, 1.5),
        ("so: <reasoning>x</reasoning> well <answer>132\n", "132", 3.0, 1.0, 3.0, 1.5),
        ("<reasoning>x</reasoning><answer>1,000</answer>", "1000", 3.0, 2.0, 3.0, 0.0),
        ("<reasoning>x</reasoning><answer>125</answer>", "132", 3.0, 2.0, 0.5, 0.0),
        ("<reasoning>x</reasoning><answer>110</answer>", "132", 3.0, 2.0, 0.25, 0.0),
        ("<reasoning>x</reasoning><answer>7</answer>", "132", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>7</answer>", "0", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>many</answer>", "132", 3.0, 2.0, -0.5, 0.0),
        ("<reasoning>x</reasoning><answer>-5</answer>", "-5", 3.0, 2.0, 3.0, 0.0),
        ("132", "132", 0.0, -2.0, 0.0, 0.0),
        ("<answer>about 132 or so", "132", 0.0, -1.0, 0.0, 1.5),
        ("<answer>1.2.3", "132", 0.0, -1.0, 0.0, 0.0),
    ],
)
def test_the_four_rewards_of_tunix(text, truth, exact, approximate, answer, numbers):
    assert rewards.match_format_exactly([text]) == [exact]
    assert rewards.match_format_approximately([text]) == [approximate]
    assert rewards.check_answer([text], answer=[truth]) == [answer]
    assert rewards.check_numbers([text], answer=[truth]) == [numbers]


@pytest.mark.parametrize("answer,points", [
    ("(3*4)+7", 1.0),
    (" 7 + 4*3 ", 1.0),
    ("4*3+7", 1.0),
    ("((7))+(3*4)", 1.0),
    ("3*4", 0.0),                                         # one is missing
    ("3*4+7+0", 0.0),                                     # one too many
    ("3*4+7+7-7", 0.0),                                   # one used again
    ("34-15", 0.0),                                       # the target, from other numbers
    ("(3+4)*7", 0.0),
    ("19", 0.0),
    ("3*4+7=19", 0.0),
    ("-(3-7)*4", 0.0),                                    # a sign is no operation between two numbers
    ("3*4+7.0", 0.0),
    ("3*4+int(7)", 0.0),
    ("[3*4+7][0]", 0.0),
    ("3*4+7 if 1 else 0", 0.0),
    ("(3*4+7", 0.0),
    ("3*4+7//1", 0.0),
    ("7(3)+4", 0.0),
    ("()", 0.0),
    ("3*4+07", 0.0),
    ("3/(4-4)", 0.0),
    ("3**4**7", 0.0),
    ("9**9**9**9", 0.0),
    ("(" * 100 + "3*4+7" + ")" * 90, 0.0),
    ("(" * 97 + "3*4+7" + ")" * 97, 1.0),
    ("(" * 5000 + "3*4+7" + ")" * 5000, 0.0),
    ("1+" * 5000 + "1", 0.0),
    ("__import__('os').abort()", 0.0),
    ("\u0663*4+7", 0.0),                                  # a three, in Arabic
])
@pytest.mark.filterwarnings("error")
def test_countdown(answer, points):
    text = f"<reasoning>x</reasoning><answer>{answer}</answer>"
    assert rewards.countdown([text], numbers=[[7, 3, 4]], target=[19]) == [points]
    assert rewards.countdown([text], numbers=[["4", "7", "3"]], target=["19"]) == [points]


def test_countdown_counts_in_fractions_and_wants_one_tagged_answer():
    texts = ["<answer>8/(3-8/3)</answer>", "8/(3-8/3)", "<answer>8/(3-8/3)</answer>" * 2, ""]
    assert rewards.countdown(texts, numbers=[[3, 8, 3, 8]] * 4, target=[24] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert rewards.countdown(texts[:2], numbers=[None, [3]], target=[24, None]) == [None, None]
    third = "<answer>1/3*3</answer>"
    assert rewards.countdown([third], numbers=[[1, 3, 3]], target=[1]) == [1.0]
    assert rewards.evaluate_expression("10/4") == (5 / 2, [10, 4]) and rewards.evaluate_expression("1/0") == (None, [1, 0])


@pytest.mark.parametrize("name", rewards.BUILT_IN)
@pytest.mark.parametrize("text", ["", "<answer>", "</answer><answer>", "\x00é" * 9, f"<answer>{'9' * 5000}</answer>", "." * 99])
def test_nothing_that_a_model_prints_makes_a_reward_function_raise(name, text):
    (points,) = rewards.BUILT_IN[name]([text], answer=["132"], numbers=[[1, 2]], target=[3])
    assert isinstance(points, float) and math.isfinite(points)


# ---- adding up -----------------------------------------------------------------------------------------------------


def rollout_of(*texts):
    mask = torch.tensor([[True, True, False]] * len(texts))
    ids = torch.arange(3 * len(texts)).view(-1, 3)
    return SimpleNamespace(completions=list(texts), completion_ids=ids, completion_mask=mask)


EXAMPLES = [{"prompt": "p", "answer": "1", "completion": "gold"}, {"prompt": "q", "answer": "2", "level": 3}]


def test_completions_of_conversations_are_messages_as_in_trl_and_reserved_columns_stay_out():
    def as_in_trl(completions, **columns):
        assert set(columns) == {"prompts", "completion_ids"}
        return [float(len(completion[0]["content"])) for completion in completions]

    example = {"prompt": [{"role": "user", "content": "hi"}], "completion": "gold", "completions": ["x"], "prompts": 1}
    total, _ = compute_rewards_for_completions([as_in_trl], [1.0], rollout_of("a", "bb"), [example])
    assert total.tolist() == [[1.0, 2.0]]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def test_a_reward_function_gets_every_column_repeated_for_siblings_and_never_the_demonstration():
    seen = {}

    def spy(completions, prompts, completion_ids, **columns):
        seen.update(columns, completions=completions, prompts=prompts, completion_ids=completion_ids)
        return [0.0] * 4

    compute_rewards_for_completions([spy], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES)
    assert seen == {
        "completions": ["a", "b", "c", "d"], "prompts": ["p", "p", "q", "q"],
        "completion_ids": [[0, 1], [3, 4], [6, 7], [9, 10]],
        "answer": ["1", "1", "2", "2"], "level": [None, None, 3, 3],
    }


def test_the_total_is_the_weighted_sum_and_siblings_stay_in_rows():
    def one(completions, **columns):
        return [1.0] * len(completions)

    rollout = rollout_of("", "a", "bb", "ccc")
    total, per_function = compute_rewards_for_completions([length, one], [2.0, -0.5], rollout, EXAMPLES)
    assert total.tolist() == [[-0.5, 1.5], [3.5, 5.5]]
    assert per_function["length"].tolist() == [[0.0, 1.0], [2.0, 3.0]] and set(per_function) == {"length", "one"}


def test_none_makes_a_completion_unscored_unless_the_function_is_not_meant_for_the_group():
    def partly(completions, **columns):
        return [None, 1.0, None, None]

    total, _ = compute_rewards_for_completions([length, partly], [1.0, 1.0], rollout_of("a", "b", "cc", "d"), EXAMPLES)
    assert total[0, 0].isnan() and total[0, 1] == 2.0
    assert total[1].tolist() == [2.0, 1.0], "scored by the other function alone"
    total, _ = compute_rewards_for_completions([partly], [1.0], rollout_of("a", "b", "cc", "d"), EXAMPLES)
    assert total[1].isnan().all()


def test_a_function_that_raises_names_itself_the_completion_and_the_exception():
    def fussy(completions, **columns):
        return [1.0 / len(text) for text in completions]

    rollout = rollout_of("a", "b", "", "d")
    with pytest.raises(RuntimeError, match=r"fussy raised ZeroDivisionError.*on completion ''"):
        compute_rewards_for_completions([fussy], [1.0], rollout, EXAMPLES)
    total, _ = compute_rewards_for_completions([fussy, length], [1.0, 1.0], rollout, EXAMPLES, on_error="none")
    assert total.isfinite().all(), "the other function still counts"
    with pytest.raises(RuntimeError, match="returned 1 values for 4"):
        compute_rewards_for_completions([lambda completions, **columns: [1.0]], [1.0], rollout, EXAMPLES)


def test_reward_functions_come_from_the_library_or_a_file(tmp_path):
    assert load_reward_function("correctness") is rewards.correctness
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns):\n    return [-len(c) for c in completions]\n\nnumber = 3\n")
    assert load_reward_function(f"{file}:short")(["abc"]) == [-3]
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    for name, message in {
        "corectness": "unknown.*correctness",
        f"{file}:long": "has no function long",
        f"{file}:number": "has no function number",
        f"{tmp_path}/none.py:f": "no file",
        f"{tmp_path}/broken.py:f": "no_such_module",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            load_reward_function(name)
        assert "\n" not in str(error.value)
