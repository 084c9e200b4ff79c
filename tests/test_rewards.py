"""Reward functions by example, and how they are chosen, called and added up."""

import importlib.util
import json
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reward_functions import answers, formats
from reward_functions.arithmetic import evaluate_expression
from reward_functions.loading import missing_columns
import rewards
from config import GRPOConfig
from runs.command_line import parse_config
from conftest import start_run
from data import load_examples
from experience import shape_rewards
from grpo import compute_group_advantages
from rewards import RewardError, compute_rewards_for_completions, load_reward_function
from train import grpo_training_step

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None or sys.platform != "linux", reason="needs math-verify and a sandbox"
)
GSM8K = Path(__file__).parents[1] / "../shared/data/gsm8k"

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
        ("<answer>132</answer> or <answer>", "132", 0.0),
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
        ("<reasoning>x</reasoning><answer> </answer>", 0.8),
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
        ("<reasoning>x</reasoning><answer>145</answer>", "132", 3.0, 2.0, 0.5, 0.0),
        ("<reasoning>x</reasoning><answer>158</answer>", "132", 3.0, 2.0, 0.25, 0.0),
        ("<reasoning>x</reasoning><answer>159</answer>", "132", 3.0, 2.0, -1.0, 0.0),
        ("<reasoning>x</reasoning><answer>inf</answer>", "132", 3.0, 2.0, -0.5, 0.0),
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
    assert evaluate_expression("10/4") == (5 / 2, [10, 4]) and rewards.evaluate_expression("1/0") == (None, [1, 0])


@pytest.mark.parametrize(
    "given,truth,choices,points",
    [
        ("B", "B", None, 1.0), ("(b)", "B", None, 1.0), ("B.", "b", None, 1.0), ("B) four", "B", None, 1.0),
        ("b: x", "B", None, 1.0), ("y", "y", ["x", "y"], 1.0), ("B", "y", ["x", "y"], 1.0),
        ("A", "B", None, 0.0), ("Bees", "B", None, 0.0), ("A or B", "B", None, 0.0), ("", "B", None, 0.0),
        ("C", "2", ["x", "y", "z"], 1.0), ("Z", "2", ["x", "y", "zoo"], 0.0), ("zoo", "2", ["x", "y", "zoo"], 1.0),
        ("x", "2", ["x", "y", "zoo"], 0.0), ("two", "B", ["one", "two"], 1.0), ("one", "B", ["one", "two"], 0.0),
        ("132", "132", None, None), ("A", None, None, None),
    ],
)
def test_multiple_choice(given, truth, choices, points):
    assert rewards.multiple_choice([f"<answer>{given}</answer>"], answer=[truth], choices=[choices]) == [points]
    if choices is None:
        assert rewards.multiple_choice([f"<answer>{given}</answer>"], answer=[truth]) == [points]


@pytest.mark.parametrize(
    "text,schema,points",
    [
        ('<answer>{"x": 1}</answer>', None, 1.0), ('{"x": 1}', None, 1.0), ('Here:\n```json\n[1, 2]\n```\nso.', None, 1.0),
        ("{x: 1}", None, 0.0), ("", None, 0.0), ("NaN", None, 0.0), ("[" * 99999, None, 0.0), ('{"x": 1} and more', None, 0.0),
        ('{"x": 1}', {"required": ["x"]}, 1.0), ('{"x": 1}', '{"required": ["y"]}', 0.0), ("[]", {"required": ["x"]}, 0.0),
    ],
)
def test_json_format(text, schema, points):
    assert rewards.json_format([text], schema=[schema]) == [points]


def test_json_schemas_are_followed_whole_where_jsonschema_is_there(monkeypatch):
    asked = []
    validator = SimpleNamespace(is_valid=lambda value: asked.append(value) or False)
    fake = SimpleNamespace(validators=SimpleNamespace(validator_for=lambda schema: lambda schema: validator))
    monkeypatch.setitem(sys.modules, "jsonschema", fake)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: fake)
    assert rewards.json_format(['{"x": 1}'], schema=[{"required": ["x"]}]) == [0.0] and asked == [{"x": 1}]


@pytest.mark.parametrize(
    "text,tags,points",
    [
        (GOLD, None, 1.0),
        ("<plan>x</plan><code>y</code>", ["plan", "code"], 1.0),
        ("<code>y</code><plan>x</plan>", ["plan", "code"], 0.5),
        ("<plan>x</plan><code> </code>", ["plan", "code"], 0.5),
        ("<plan>x</plan>" * 2, ["plan"], 0.0), ("</plan>x<plan>", ["plan"], 0.0),
        ("<plan>x", ["plan"], 0.0), ("", ["plan"], 0.0),
    ],
)
def test_xml_tags(text, tags, points):
    assert rewards.xml_tags([text], tags=[tags]) == [points]


def test_answer_pattern():
    date = r"\d{4}-\d\d-\d\d"
    texts = ["<answer>2024-01-31</answer>", "<answer>on 2024-01-31</answer>", "<answer>2024-01-31?</answer>", "2024-01-31", ""]
    assert rewards.answer_pattern([*texts, texts[0]], pattern=[date] * 5 + [None]) == [1.0, 0.0, 0.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    "text,points", [("a b c d e", 0.0), ("a b a b a b", -1 / 3), ("la " * 100, -96 / 97), ("", 0.0), ("a b c", 0.0)]
)
def test_repetition_penalty(text, points):
    assert rewards.repetition_penalty([text]) == pytest.approx([points])


def test_diversity_looks_at_siblings_only():
    assert rewards.diversity(["a b", "a b", "c d"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    assert rewards.diversity(["a b", "a b", "c d"], prompts=["p", "q", "p"]) == [1.0, None, 1.0]
    assert rewards.diversity(["", "", "x"], prompts=["p"] * 3) == [0.5, 0.5, 1.0]
    assert rewards.diversity(["a b c", "a b d"], prompts=[[{"role": "user", "content": "p"}]] * 2) == pytest.approx([2 / 3] * 2)


def test_safety_and_lists_of_rules():
    assert rewards.safety(["rm -rf /", "RM  -RF", "ls", "ls"], forbidden=[[r"rm\s+-rf"]] * 3 + [None]) == [0.0, 0.0, 1.0, None]
    polite = rewards.rule_list("polite", {r"\bplease\b": 0.5, r"\bstupid\b": -1.0})
    assert polite(["Stupid, please", "please please", "", "pleased"]) == [-0.5, 0.5, 0.0, 0.0] and polite.__name__ == "polite"


def test_what_is_handed_in_is_the_last_block_of_the_answer_or_of_the_text():
    block = "```python\n{}\n```"
    assert answers.payload("x = 1", "python") == "x = 1"
    assert answers.payload(f"a {block.format('x = 1')} b {block.format('x = 2')} c", "python") == "x = 2\n"
    assert answers.payload(f"{block.format('x = 1')}<answer>{block.format('x = 2')}</answer>", "python") == "x = 2\n"
    assert answers.payload("```java\nint x;\n```", "python") == "```java\nint x;\n```"


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
        ("<answer>x</answer>", None, None), ("<answer>9^{9^{9^9}}</answer>", "3", 0.0),
        ("<answer>" + "(" * 3000 + "</answer>", "3", 0.0), ("<answer>" + "\\frac{" * 300 + "</answer>", "3", 0.0),
        ("<answer>__import__('os')._exit(0)</answer>", "3", 0.0),
    ],
)
def test_math_equality(given, truth, points):
    assert rewards.math_equality([given], answer=[truth]) == [points]


@needs_math_verify
def test_an_answer_that_never_ends_costs_neither_the_others_nor_the_order(monkeypatch):
    monkeypatch.setattr("reward_functions.mathematics.SECONDS_PER_ANSWER", 1)
    answers = ["2/2", "10**10**10", "2**(2**(2**100))", "4/2", "100000!^{100000!}", "1/3"]
    points = rewards.math_equality([f"<answer>{a}</answer>" for a in answers], answer=["1", "7", "7", "2", "7", "1/4"])
    assert points == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_math_equality_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install math-verify"):
        rewards.math_equality(["<answer>1</answer>"], answer=["2"])


@pytest.mark.skipif(not GSM8K.exists(), reason="no ../shared/data/gsm8k")
@pytest.mark.filterwarnings("ignore:.*left out 1 of")
def test_every_gold_answer_of_gsm8k_is_right_and_its_successor_wrong():
    answers = [example["answer"] for example in load_examples(str(GSM8K / "train.jsonl"), bad_lines="skip")]
    assert len(answers) >= 7472
    for spell in (str, lambda a: f"${a}.00", lambda a: f"{int(a):,}"):
        assert set(rewards.correctness([f"<answer>{spell(a)}</answer>" for a in answers], answer=answers)) == {1.0}
    gold = [f"<reasoning>x</reasoning><answer>{a}</answer>" for a in answers]
    assert set(rewards.check_answer(gold, answer=answers)) == {3.0}
    after = [f"<reasoning>x</reasoning><answer>{int(a) + 1}</answer>" for a in answers]
    assert set(rewards.correctness(after, answer=answers)) == {0.0} and 3.0 not in rewards.check_answer(after, answer=answers)
    if importlib.util.find_spec("math_verify") and sys.platform == "linux":
        assert set(rewards.math_equality(gold, answer=answers)) == {1.0}
        assert set(rewards.math_equality(after[:200], answer=answers[:200])) == {0.0}


COLUMNS = dict(
    answer="132", tests=["assert f(1) == 1"], pattern="x", forbidden=["x"], schema=None, tags=None, choices=None,
    numbers=[1, 2], target=3,
)


@pytest.mark.parametrize("name", rewards.BUILT_IN)
@pytest.mark.parametrize(
    "text", ["", "<answer>", "</answer><answer>", "\x00é" * 9, f"<answer>{'9' * 5000}</answer>", "." * 99, "\ud800"]
)
def test_nothing_that_a_model_prints_makes_a_reward_function_raise(name, text):
    if name == "math_equality" and not importlib.util.find_spec("math_verify"):
        pytest.skip("needs math-verify")
    columns = {column: [value] * 2 for column, value in COLUMNS.items()}
    columns["answer"] = ["B" if name == "multiple_choice" else "132"] * 2
    for points in rewards.BUILT_IN[name]([text, text], prompts=["p", "p"], **columns):
        assert isinstance(points, float) and math.isfinite(points)


OF_TRL = """
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

cosine = get_cosine_scaled_reward(max_len=4)
repetition = get_repetition_penalty_reward(ngram_size=1)
too_long = get_soft_overlong_punishment(max_completion_len=3, soft_punish_cache=2)
"""
TRLS_POINTS = {                 # for a right and a wrong completion of two tokens, as its documentation has them
    "accuracy_reward": [1.0, 0.0],
    "reasoning_accuracy_reward": [1.0, 0.0],
    "cosine": [0.75, -0.75],
    "think_format_reward": [1.0, 0.0],
    "repetition": [0.0, 0.0],
    "too_long": [-0.5, -0.5],
}


@pytest.mark.parametrize("timeout", [0.0, 60.0], ids=["", "in a thread"])
@pytest.mark.parametrize("name", TRLS_POINTS)
def test_reward_functions_of_trl_run_unchanged(name, timeout, tmp_path):
    pytest.importorskip("trl", reason="needs trl")
    if name in ("accuracy_reward", "reasoning_accuracy_reward", "cosine") and not importlib.util.find_spec("math_verify"):
        pytest.skip("needs math-verify")
    (tmp_path / "of_trl.py").write_text(OF_TRL)
    row = {"prompt": [{"role": "user", "content": "What is half of 1?"}], "solution": "$\\frac{1}{2}$"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    function = load_reward_function(f"{tmp_path}/of_trl.py:{name}")
    texts = ["<think>\nhalf\n</think>\nSo \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}"]
    total, _ = compute_rewards_for_completions(
        [function], [1.0], rollout_of(*texts), load_examples(str(tmp_path / "data.jsonl")), timeout=timeout
    )
    torch.testing.assert_close(total[0].tolist(), TRLS_POINTS[name])


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


async def later(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("function,returned", [
    (lambda completions, **columns: None, "None; return a list with one number (or None) for each of the 4 completions"),
    (lambda completions, **columns: 0.5, "0.5; return a list"),
    (lambda completions, **columns: (1.0 for _ in completions), "<generator object"),
    (later, "<coroutine object"),
    (lambda completions, **columns: "1111", "'1111'; return a list"),
    (lambda completions, **columns: torch.tensor(1.0), "tensor(1.); return a list"),
    (lambda completions, **columns: [1.0], "1 values for 4 completions; return a list"),
    (lambda completions, **columns: ["good"] * 4, "['good', 'good', 'good', 'good']; return a list"),
    (lambda completions, **columns: [math.inf] * 4, "an infinite number of points"),
    (lambda completions, **columns: [1.0, -math.inf, 1.0, 1.0], "an infinite number of points"),
])
def test_what_is_no_list_of_points_is_shown_and_no_completion_is_blamed(function, returned):
    rollout, failures = rollout_of("a", "b", "", "d"), []
    with pytest.raises(RewardError) as error:
        compute_rewards_for_completions([function], [1.0], rollout, EXAMPLES)
    said = str(error.value)
    assert f"it returned {returned}" in said and "raised" not in said and "on completion" not in said, said
    compute_rewards_for_completions([function], [1.0], rollout, EXAMPLES, on_error="none", failures=failures)
    assert f"it returned {returned}" in failures[0]["error"] and failures[0]["completion"] == "all of 4"


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda points: torch.tensor(points).numpy()])
def test_points_may_be_a_list_a_tuple_a_tensor_or_an_array(kind):
    total, _ = compute_rewards_for_completions(
        [lambda completions, **columns: kind([1.0, 2.0, 3.0, math.nan])], [1.0], rollout_of("a", "b", "c", "d"), EXAMPLES
    )
    assert total[0].tolist() == [1.0, 2.0] and total[1, 0] == 3.0 and total[1, 1].isnan()


def test_reward_functions_come_from_the_library_or_a_file(tmp_path):
    assert load_reward_function("correctness") is rewards.correctness
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns):\n    return [-len(c) for c in completions]\n\nnumber = 3\n")
    assert load_reward_function(f"{file}:short")(["abc"]) == [-3]
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "same.py").write_text(
        "def correctness(completions, **columns): ...\ndef narrow(completions): ...\n"
        "async def later(completions, **columns): ...\ndef one(text): ...\n"
        "class Short:\n    def __call__(self, completions, **columns): ...\n"
    )
    for name, message in {
        "corectness": "unknown; did you mean correctness\\? Else use path/to/file.py:function or one of correctness",
        "xyz": "unknown; use path",
        f"{file}:long": "has no function long",
        f"{file}:number": "has no function number",
        f"{tmp_path}/none.py:f": "no file",
        f"{tmp_path}/broken.py:f": "no_such_module",
        f"{tmp_path}/same.py:correctness": "there is a built-in reward function correctness; rename yours",
        f"{tmp_path}/same.py:narrow": r"it must accept columns it does not use: add \*\*columns",
        f"{tmp_path}/same.py:one": r"does not use: add completions \(a list of them\) and \*\*columns to its parameters",
        f"{tmp_path}/same.py:later": "it is async; name a plain function",
        f"{tmp_path}/same.py:Short": r"it is a class; name a plain function f\(completions, \*\*columns\)",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            load_reward_function(name)
        assert "\n" not in str(error.value)


def test_a_function_may_ask_for_the_answer_under_trls_names_and_never_for_the_demonstration():
    def curious(completions, solution, completion, level=0, **columns): ...

    assert missing_columns(curious, {"prompt", "completion", "answer"}) == ["completion"]
    assert missing_columns(curious, {"prompt", "completion"}) == ["solution", "completion"]


def test_a_column_that_is_called_solution_is_not_replaced_by_the_answer():
    def asked(completions, solution, **columns):
        return [float(text == solution[0]) for text in completions]

    for columns, points in ({"answer": "a"}, [1.0, 0.0]), ({"answer": "a", "solution": "b"}, [0.0, 1.0]):
        total, _ = compute_rewards_for_completions([asked], [1.0], rollout_of("a", "b"), [{"prompt": "p"} | columns])
        assert total.tolist() == [points]


# ---- functions that fail, and ways to add up ---------------------------------------------------------------------------


def test_a_function_that_hangs_is_given_up_on():
    released = threading.Event()

    def hangs(completions, **columns):
        released.wait(20)
        return [1.0] * len(completions)

    failures, started, threads = [], time.monotonic(), set(threading.enumerate())
    total, points = compute_rewards_for_completions(
        [hangs, length], [1.0, 1.0], rollout_of("a", "bb", "c", "d"), EXAMPLES, on_error="none", timeout=0.2, failures=failures
    )
    assert points["hangs"].isnan().all() and total.tolist() == [[1.0, 2.0], [1.0, 1.0]]
    assert [thread.daemon for thread in set(threading.enumerate()) - threads] == [True], "it does not keep a run from ending"
    assert [f["function"] for f in failures] == ["hangs"] and "0.2 s (--reward_timeout)" in failures[0]["error"]
    with pytest.raises(RuntimeError, match=r"hangs raised TimeoutError: no answer within 0\.2 s"):
        compute_rewards_for_completions([hangs], [1.0], rollout_of("a", "b"), EXAMPLES[:1], timeout=0.2)
    assert time.monotonic() - started < 5
    released.set()


def test_with_a_time_limit_points_and_exceptions_are_the_same():
    def fussy(completions, **columns):
        return [1.0 / len(text) for text in completions]

    for timeout in 0.0, 10.0:
        total, _ = compute_rewards_for_completions([fussy], [1.0], rollout_of("a", "bb"), EXAMPLES[:1], timeout=timeout)
        assert total.tolist() == [[1.0, 0.5]]
        with pytest.raises(RuntimeError, match=r"fussy raised ZeroDivisionError.*on completion ''"):
            compute_rewards_for_completions([fussy], [1.0], rollout_of("a", ""), EXAMPLES[:1], timeout=timeout)


def test_failures_are_kept_with_the_completion_that_caused_them():
    def fussy(completions, **columns):
        return [1.0 / len(text) for text in completions]

    failures = []
    compute_rewards_for_completions(
        [fussy, length], [1.0, 1.0], rollout_of("a", "", "c", "d"), EXAMPLES, on_error="none", failures=failures
    )
    assert failures == [{"function": "fussy", "error": "ZeroDivisionError: float division by zero", "completion": ""}]


def test_points_are_clipped_function_by_function_before_they_are_weighted():
    def minus(completions, **columns):
        return [-10.0 * len(text) for text in completions]

    rollout = rollout_of("a", "bb", "ccc", "dddd")
    total, points = compute_rewards_for_completions([length, minus], [1.0, 0.1], rollout, EXAMPLES, clips=[2.0, 15.0])
    assert total.tolist() == [[0.0, 0.5], [0.5, 0.5]]
    assert points["minus"].tolist() == [[-10.0, -20.0], [-30.0, -40.0]], "the log keeps what the function said"
    total, _ = compute_rewards_for_completions([length, minus], [1.0, 0.1], rollout, EXAMPLES, clips=[0.0, 0.0])
    assert total.tolist() == [[0.0, 0.0], [0.0, 0.0]], "0 does not clip"


def test_gdpo_adds_up_the_advantages_of_each_function_by_hand():
    right, short = torch.tensor([[0.0, 1.0, 1.0, 0.0]]).double(), torch.tensor([[0.01, 0.02, 0.03, 0.04]]).double()
    nobody = torch.full((1, 4), torch.nan).double()
    settings = dict(reward_functions=["a", "b", "c"], reward_weights=[1.0, 0.5, 2.0], reward_combination="gdpo")
    points = shape_rewards(GRPOConfig(**settings), None, right, {"a": right, "b": short, "c": nobody})
    half, third = 0.5 / math.sqrt(1 / 3), 0.01 / math.sqrt(5e-4 / 3)             # deviation / standard deviation (n - 1)
    expected = [-half - 0.75 * third, half - 0.25 * third, half + 0.25 * third, -half + 0.75 * third]
    assert points.tolist()[0] == pytest.approx(expected, rel=1e-5)
    settings["reward_clips"] = [0.0, 0.02, 0.0]
    clipped = shape_rewards(GRPOConfig(**settings), None, right, {"a": right, "b": short, "c": nobody})
    assert clipped[0, 2] - clipped[0, 1] == pytest.approx(0, abs=1e-6), "0.02 and 0.03, cut to 0.02"
    partly = torch.where(right == 1, torch.nan, short)
    unscored = shape_rewards(GRPOConfig(**settings), None, right, {"a": right, "b": partly, "c": nobody})
    assert torch.equal(unscored.isnan(), partly.isnan())
    summed = shape_rewards(GRPOConfig(), None, right, {"a": right, "b": short})
    assert torch.equal(summed, right), "the default changes nothing"
    assert (compute_group_advantages(points).argsort() == points.argsort()).all()


def test_calls_that_fail_are_counted_and_kept_in_the_run_folder(tmp_path):
    (tmp_path / "mine.py").write_text("def fussy(completions, **columns):\n    raise KeyError('x')\n")
    run = start_run(
        tmp_path, "--use_grpo", "--cold_start_steps", "0", "--reward_errors", "none", "--reward_functions", "correctness",
        f"{tmp_path}/mine.py:fussy", "--reward_timeout", "30",
    )
    run.folder.open(0)
    metrics, _ = grpo_training_step(run, next(run.batches))
    assert metrics["reward_errors"] == 1
    (line,) = (run.folder.path / "reward_errors.jsonl").read_text().splitlines()
    assert '"function": "fussy", "error": "KeyError: ' in line and '"step": 1' in line


def test_reward_settings_that_make_no_sense_are_refused():
    for flags, message in {
        "--reward_clips 1": "one number from 0 up for each of the 3",
        "--reward_clips 1 1 -1": "one number from 0 up",
        "--reward_timeout -1": "cannot be negative",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_config(["--use_grpo", *flags.split()])
    remarks = parse_config(["--use_grpo", "--reward_combination", "gdpo"]).remarks()
    assert any("advantage_scale batch" in line for line in remarks)
