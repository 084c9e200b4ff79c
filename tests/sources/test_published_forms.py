"""Data sets in the form in which they are published: columns, types and notation of their cards, with sentences of our own."""

import json
from functools import partial

import datasets
import pytest
from test_data import data_of, message, write_lines

from reward_functions.arithmetic import countdown
from rewards import correctness
from sources import load_examples


user, assistant = partial(message, "user"), partial(message, "assistant")


def tagged(reasoning, answer):
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Count."}, {"from": "gpt", "value": "One."}]
SYSTEM = {"role": "system", "content": "Be brief."}
ADD = {"name": "add", "parameters": {"a": {"type": "number", "enum": None}}}
CALLS = [user("1+1?"), assistant(None, tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1}'}}]),
    {"role": "tool", "content": "2"}, assistant("Two.")]
PUBLISHED = [                   # row, forms, prompt, answer, completion, other columns
    ({"question": "2*2,000?", "answer": "2*2,000=<<2*2000=4000>>4,000.\n#### 4,000"}, "gsm8k", "2*2,000?", "4000",
     tagged("2*2,000=4,000.", "4000"), {}),
    ({"problem": "$2x=1$", "solution": "By \\boxed{2}: \\boxed{\\frac{1}{2}}."}, "math", "$2x=1$", "\\frac{1}{2}",
     tagged("By \\boxed{2}: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"), {}),
    ({"problem": "$2x=1$", "solution": "So \\boxed{.5}", "answer": "1/2"}, "math", "$2x=1$", "1/2",
     tagged("So \\boxed{.5}", "1/2"), {}),      # MATH-500
    ({"question": "$x^2$?", "final_answer": "2x", "r1_solution_1": "Rule."}, "", "$x^2$?", "2x", None,
     {}),      # DeepMath
    ({"question": "2*2?", "choices": ["2", "3", "4"], "answer": 2}, "choices", "2*2?\nA. 2\nB. 3\nC. 4", "C", None,
     {}),      # MMLU
    ({"question": "2+2?", "choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": "2"}, "choices",
     "2+2?\nA. 3\nB. 4", "B", None, {"choices": ["3", "4"]}),      # ARC
    ({"question": "2+2?", "options": {"A": "3", "B": "4"}, "answer": "4", "answer_idx": "B"}, "choices", "2+2?\nA. 3\nB. 4",
     "4", None, {"choices": ["3", "4"]}),      # MedQA
    ({"question": "2+2?", "options": ["3", "4"], "answer": "B", "answer_index": 1}, "choices", "2+2?\nA. 3\nB. 4", "B", None,
     {}),      # MMLU-Pro
    ({"instruction": "In French.", "input": "Hi,\nthere", "output": "Oui."}, "alpaca", "In French.\n\nHi,\nthere", None,
     "Oui.", {}),
    ({"instruction": "In French.", "input": "", "output": "Oui."}, "", "In French.", None, "Oui.", {}),
    ({"id": "Q2_0", "conversations": SHAREGPT}, "sharegpt", [SYSTEM, user("Count.")], None, "One.", {}),
    ({"system": "Be brief.", "conversations": SHAREGPT[1:]}, "sharegpt", [SYSTEM, user("Count.")], None, "One.", {}),
    ({"text": "Double x.", "code": "def f(x): return 2 * x", "test_list": ["assert f(1) == 2"], "test_setup_code": ""}, "mbpp",
     "Double x.\nYour code must pass these tests:\nassert f(1) == 2", None, "def f(x): return 2 * x",
     {"tests": ["assert f(1) == 2"]}),
    ({"prompt": "def f(x):\n", "test": "def check(candidate):\n    assert candidate(1) == 2, 'one'\n    assert True\n",
      "entry_point": "f", "canonical_solution": "    return 2 * x"}, "humaneval",
     "Complete this program, and write it in whole:\n\ndef f(x):\n", None, "def f(x):\n    return 2 * x",
     {"tests": ["assert f(1) == 2"]}),
    ({"prompt": [user("1+1?")], "reward_model": {"ground_truth": "2", "style": "rule"}, "ability": "m"}, "verl",
     [user("1+1?")], "2", None, {}),
    ({"prompt": [user("1+1?")], "reward_model": {"ground_truth": '["2", "two"]'}}, "verl", [user("1+1?")], ["2", "two"], None,
     {}),
    ({"prompt": [user("Make 9.")], "reward_model": {"ground_truth": {"target": 9, "numbers": [4, 5]}}}, "verl",
     [user("Make 9.")], None, None, {"numbers": [4, 5]}),      # TinyZero
    ({"messages": CALLS, "tools": json.dumps([ADD])}, "tools",
     [CALLS[0], assistant(None, tool_calls=[{"function": {"name": "add", "arguments": {"a": 1}}}]), CALLS[2]], None, "Two.",
     {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}]}),
]


@pytest.mark.parametrize("row,forms,prompt,answer,completion,others", PUBLISHED)
def test_a_data_set_is_read_as_it_is_published_and_its_form_is_named(row, forms, prompt, answer, completion, others, tmp_path):
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "data.parquet")
    for source in [row], str(tmp_path / "data.parquet"):
        lines = []
        (example,) = load_examples(source, notify=lines.append)
        assert (example["prompt"], example.get("answer"), example.get("completion")) == (prompt, answer, completion)
        assert {name: example[name] for name in others} == others and lines == [f"read as: {forms}"] * bool(forms)


def test_of_a_form_that_only_some_rows_have_the_number_is_named():
    lines = []
    load_examples([{"question": "q", "answer": "so\n#### 2"}, {"question": "q", "answer": "2"}], notify=lines.append)
    assert lines == ["read as: gsm8k (1 of 2 rows)"]


def test_countdown_needs_the_flag_that_the_message_names(tmp_path):
    path = write_lines(tmp_path / "countdown.jsonl",
        [{"target": n * 3 + 4, "nums": [n, 3, 4]} for n in (2, 6)])     # Jiayi-Pan/Countdown-Tasks-3to4
    with pytest.raises(ValueError, match=r"columns target, nums, .*or a text such as '... \{target\} ... \{nums\}"):
        load_examples(path)
    examples, _ = data_of("--dataset", path, "--eval_limit", "0", "--prompt_column", "Make {target} from {nums}. \\boxed{}")
    assert [e["prompt"] for e in examples] == ["Make 10 from [2, 3, 4]. \\boxed{}", "Make 22 from [6, 3, 4]. \\boxed{}"]
    columns = dict(target=[e["target"] for e in examples], numbers=[e["numbers"] for e in examples])
    assert countdown([f"<answer>{n} * 3 + 4</answer>" for n in (2, 6)], **columns) == [1.0] * 2


@pytest.mark.parametrize("row", [
    {"prompt": "2+2? A) 3 B) 4", "choices": ["3", "4"], "answer": "B"}, {"prompt": "2+2?", "choices": "3 or 4", "answer": "B"},
    {"prompt": "How old?", "context": "Ann is 5.", "input": "x"}, {"prompt": "q", "answer": "# Plan\n#### Step one\nCount them."},
    {"prompt": "q", "answer": "No box: \\boxed"}, {"prompt": "q", "answer": "\\boxed{open"},
    {"prompt": "q", "answer": "Answer: 5"}, {"prompt": "q", "answer": "[0, 1]"},
])
def test_what_is_in_no_form_is_taken_as_it_is(row):
    assert load_examples([row]) == [row]


@pytest.mark.parametrize("answer,expected,completion", [
    ("$\\boxed{16}$", "16", None), ("#### 16", "16", None), ("We get \\boxed6", "6", tagged("We get \\boxed6", "6")),
    ("It is \\fbox{2}", "2", tagged("It is \\fbox{2}", "2")),
    ("Count.\n#### 72 apples ", "72 apples", tagged("Count.", "72 apples")),
    ("Count. #### -1,234,567", "-1234567", tagged("Count.", "-1234567")), ("#### 1,2", "1,2", None),
])
def test_the_answer_of_a_solution_is_what_its_form_says_and_no_more(answer, expected, completion):
    (example,) = load_examples([{"prompt": "p", "answer": answer}])
    assert (example["answer"], example.get("completion")) == (expected, completion)
    assert correctness([f"<answer>{expected}</answer>", "<answer>71</answer>"], answer=[expected] * 2) == [1, 0]
    for row in {"prompt": [user("p"), assistant("mine")]}, {"prompt": "p", "completion": "mine"}:
        assert load_examples([row | {"answer": answer}])[0]["completion"] == "mine"
