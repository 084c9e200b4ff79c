"""Data sets in the form in which they are published: columns, types and notation of their cards, with sentences of our own."""

import math

import numpy as np
import pytest
import torch
import data
from test_data import data_of, write_lines

from reward_functions.arithmetic import countdown
from reward_functions.formats import multiple_choice
from rewards import correctness
from sources import load_examples
from sources.training_data import validate_demonstrations
from runs.command_line import parse_config


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def tagged(reasoning, answer):
    return f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"


ULTRACHAT = [{  # HuggingFaceH4/ultrachat_200k
    "prompt": "Tell me things.",
    "messages": [user("Tell me things."), assistant("First, ..."), user("And?"), assistant("No more.")]}]
COUNTDOWN = [{"target": n * 3 + 4, "nums": [n, 3, 4]} for n in (2, 6)]           # Jiayi-Pan/Countdown-Tasks-3to4
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Count."}, {"from": "gpt", "value": "One."}]


@pytest.mark.parametrize("row,prompt,answer,completion", [
    ({"question": "2*2,000?", "answer": "2*2,000=<<2*2000=4000>>4,000.\n#### 4,000"},                          # GSM8K
     "2*2,000?", "4000", tagged("2*2,000=4,000.", "4000")),
    ({"problem": "$2x=1$", "solution": "By \\boxed{2}: \\boxed{\\frac{1}{2}}."},                               # MATH
     "$2x=1$", "\\frac{1}{2}", tagged("By \\boxed{2}: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}")),
    ({"question": "$x^2$?", "final_answer": "2x", "r1_solution_1": "Rule."}, "$x^2$?", "2x", None),             # DeepMath
    ({"instruction": "In French.", "input": "Hi,\nthere", "output": "Oui."}, "In French.\n\nHi,\nthere", None, "Oui."),     # Alpaca
    ({"instruction": "In French.", "input": "", "output": "Oui.", "system": " "}, "In French.", None, "Oui."),
    ({"instruction": "Hi", "output": "Oui.", "system": "In French."}, [{"role": "system", "content": "In French."}, user("Hi")], None, "Oui."),
    ({"system": "Be kind.", "conversations": SHAREGPT[1:]}, [{"role": "system", "content": "Be kind."}, user("Count.")], None, "One."),
    ({"system": "Be kind.", "conversations": SHAREGPT}, [{"role": "system", "content": "Be brief."}, user("Count.")], None, "One."),
    ({"question": "21?", "options": ["A)21", "B) 2"], "answer": "A"}, "21?\nA. 21\nB. 2", "A", None),           # AQuA
    ({"question": "Who?", "options": ["A) Abe", "Bob"], "answer": "A"}, "Who?\nA. A) Abe\nB. Bob", "A", None),
    ({"id": "Q2_0", "conversations": SHAREGPT}, [{"role": "system", "content": "Be brief."}, user("Count.")], None, "One."),
    ({"question": "2*2?", "choices": ["2", "3", "4"], "answer": 2}, "2*2?\nA. 2\nB. 3\nC. 4", "C", None),       # MMLU
])
def test_a_data_set_is_read_as_it_is_published(row, prompt, answer, completion, tmp_path):
    import datasets

    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "data.parquet")
    (example,) = load_examples(str(tmp_path / "data.parquet"))
    assert (example["prompt"], example.get("answer"), example.get("completion")) == (prompt, answer, completion)


def test_countdown_needs_the_flag_that_the_message_names(tmp_path):
    path = write_lines(tmp_path / "countdown.jsonl", COUNTDOWN)
    with pytest.raises(ValueError, match=r"columns target, nums; .* or --prompt_column, a name or a text such as '... \{target\} ... \{nums\}'$"):
        load_examples(path)
    examples, _ = data_of("--dataset", path, "--eval_limit", "0", "--prompt_column", "Make {target} from {nums}. \\boxed{}")
    assert [e["prompt"] for e in examples] == ["Make 10 from [2, 3, 4]. \\boxed{}", "Make 22 from [6, 3, 4]. \\boxed{}"]
    columns = dict(target=[example["target"] for example in COUNTDOWN], numbers=[example["numbers"] for example in examples])
    assert countdown([f"<answer>{n} * 3 + 4</answer>" for n in (2, 6)], **columns) == [1.0] * 2
    with pytest.raises(ValueError, match=r"--prompt_column=Make \{goal\}: .*columns target, nums$"):
        load_examples(path, columns={"prompt": "Make {goal}"})


def test_supervised_training_on_ultrachat_needs_the_flag_that_the_message_names(tmp_path):
    path = write_lines(tmp_path / "ultrachat.jsonl", ULTRACHAT)
    flags = ["--dataset", path, "--eval_limit", "0"]
    with pytest.raises(ValueError, match="--prompt_column messages"):
        validate_demonstrations(parse_config(flags), data_of(*flags)[0])
    examples, _ = data_of(*flags, "--prompt_column", "messages")
    validate_demonstrations(parse_config(flags), examples)
    assert examples[0]["prompt"] == ULTRACHAT[0]["messages"][:3] and examples[0]["completion"] == "No more."


@pytest.mark.parametrize("prompt", ["2+2? A) 3 B) 4", "2+2?\nA. 3\nB. 4", "2+2? (A) 3, (B) 4"])
def test_choices_that_the_prompt_has_are_not_repeated(prompt):
    assert load_examples([{"prompt": prompt, "choices": ["3", "4"], "answer": "B"}])[0]["prompt"] == prompt


@pytest.mark.parametrize("row", [
    {"prompt": "2+2?", "choices": [3, 4], "answer": 1}, {"prompt": "2+2?", "choices": "3 or 4", "answer": 1},
    {"prompt": "2+2?", "choices": [str(n) for n in range(27)], "answer": 1},
    {"prompt": "2+2?", "choices": {"text": ["3"]}, "answer": 1}, {"prompt": "2+2?", "choices": None, "answer": 1},
    {"prompt": "2+2?", "options": {"temperature": "0.7"}, "answer": 0}, {"prompt": "2+2?", "choices": {"text": ["3"], "label": "AB"}, "answer": 0},
])
def test_choices_in_another_form_change_nothing(row):
    assert load_examples([row]) == [row | {"answer": str(row["answer"])}]


@pytest.mark.parametrize("columns", [
    {"options": ["3", "4"], "answer": "B", "answer_index": 1},                                                  # MMLU-Pro
    {"choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": "2"},                                   # ARC
    {"options": {"A": "3", "B": "4"}, "answer": "B"},                                                           # MedQA
    {"choices": np.array(["3", "4"]), "answer": 1}, {"choices": "['3'\n '4']", "answer": 1},                    # of pandas, also in CSV
    {"choices": "{'text': ['3', '4'], 'label': ['1', '2']}", "answerKey": "2"},
])
def test_choices_are_read_under_two_names_and_in_three_forms(columns):
    (example,) = load_examples([{"question": "2+2?"} | columns])
    assert example["prompt"] == "2+2?\nA. 3\nB. 4" and example["answer"] == "B" and example["choices"] == ["3", "4"]
    rewards = multiple_choice(["<answer>B</answer>", "<answer>4</answer>", "<answer>A</answer>"], ["B"] * 3, [example["choices"]] * 3)
    assert rewards == [1, 1, 0]


def test_the_tests_of_mbpp_are_those_of_the_reward_function():
    row = {"text": "Double x.", "code": "def f(x): return 2 * x", "test_list": ["assert f(1) == 2"], "test_setup_code": ""}
    (example,) = load_examples([row], columns={"prompt": "text"})
    assert example["tests"] == row["test_list"] and example["prompt"] == row["text"]
    assert load_examples([row | {"prompt": "p", "tests": ["assert f(2) == 4"]}])[0]["tests"] == ["assert f(2) == 4"]


def test_a_column_of_the_prompt_without_a_value_is_no_text():
    rows = [{"context": None, "question": "2+2?"}, {"context": "Cats.", "question": "How many?"}]
    found = load_examples(rows, columns={"prompt": "{context}\n{question}"})
    assert [example["prompt"] for example in found] == ["\n2+2?", "Cats.\nHow many?"]


def test_names_in_braces_may_have_spaces_and_fields_and_other_braces_stay():
    row = {"Correct Answer": "x{n}", "a": {"q": 0.5}, "n": None}
    (example,) = load_examples([row], columns={"prompt": '{Correct Answer} {a.q} {n}\\frac{1}{2} {"x": 1} {no column}'})
    assert example["prompt"] == 'x{n} 0.5 \\frac{1}{2} {"x": 1} {no column}'
    with pytest.raises(ValueError, match="the row has columns"):
        load_examples([row], columns={"prompt": "{Correct Answer} {missing}"})


def test_messages_and_many_choices_are_lettered():
    system, question = {"role": "system", "content": "Choose."}, {"role": "user", "content": "2+2?"}
    (example,) = load_examples([{"prompt": [system, question], "choices": ["3", "4"], "answer": 1}])
    assert example["prompt"] == [system, question | {"content": "2+2?\nA. 3\nB. 4"}] and example["answer"] == "B"
    cities = [f"city {number}" for number in range(12)]
    (example,) = load_examples([{"prompt": "Which?", "choices": cities, "answer": 11}])
    assert example["prompt"].endswith("\nL. city 11") and example["answer"] == "L"
    assert multiple_choice(["<answer>L</answer>"] * 2, answer=["L", "city 11"], choices=[cities] * 2) == [1, 1]


@pytest.mark.parametrize("answer,expected", [
    ((7, "seven"), [7, "seven"]), (np.array(["7", "seven"]), ["7", "seven"]), ({"7"}, ["7"]), (torch.tensor([7, 8]), [7, 8]),
    (np.array(7), "7"), (np.int64(7), "7"), (torch.tensor(7), "7"),
])
def test_several_answers_are_a_list_and_an_array_of_one_number_is_that_number(answer, expected):
    assert load_examples([{"prompt": "3+4?", "answer": answer}]) == [{"prompt": "3+4?", "answer": expected}]
    assert correctness(["<answer>7</answer>"], answer=[expected]) == [1]


@pytest.mark.parametrize("answer", [
    "# Plan\n#### Step one\nCount them.", "Two headings\n#### first\n#### 2. second\nend", "a #### 5\nb", "a\n##### 5", "text\n#### 7 of 9", "#### ",
    "#hash", "No box: \\boxed", "\\boxed{open", "The answer is that he went home early", "Answer the question", "The answer is",
    "Is the answer: yes? Ask him\nagain", "My answer, 5",
])
def test_a_text_without_a_stated_answer_is_kept(answer):
    assert load_examples([{"prompt": "p", "answer": answer}]) == [{"prompt": "p", "answer": answer}]


def test_dollys_context_belongs_to_its_instruction_and_to_no_other_prompt():
    row = {"context": "Ann is 5.", "response": "5", "input": " "}
    assert load_examples([row | {"instruction": "How old is Ann?"}])[0]["prompt"] == "How old is Ann?\n\nAnn is 5."
    assert load_examples([row | {"question": "How old is Ann?"}])[0]["prompt"] == "How old is Ann?"


@pytest.mark.parametrize("solution,answer", [
    ("Two and two, so $\\boxed 4$.", "4"), ("We get \\boxed6", "6"), ("It is \\fbox{2}", "2"), ("It is \\framebox{14}.", "14"),
    ("8 * 2 is 16.\nAnswer: 16", "16"), ("4 * 5 = 20. The answer is: 20.", "20"), ("So the answer is $\\frac12$.", "$\\frac12$"),
    ("Sum them.\n**Answer:** 3.5 cm", "3.5 cm"), ("2+2=4\n#### 4 items\nThe answer is: 4", "4"), ("Hence the final answer is New York City.", "New York City"),
])
def test_the_answer_of_a_solution_is_found(solution, answer):
    (example,) = load_examples([{"prompt": "p", "answer": solution}])
    assert (example["answer"], example["completion"]) == (answer, tagged(solution, answer))


@pytest.mark.parametrize("line,answer", [
    ("B", "B"), ("3/4", "3/4"), ("yes.", "yes"), ("7:45", "7:45"), ("New York", "New York"), ("72 apples.", "72"), ("1,234 km/h", "1234"), ("$72", "$72"), ("72 €", "72"), ("72.", "72"), ("0 m", "0"),
    ("**72**", "72"), ("$\\frac12$", "\\frac12"), ("\\boxed{72}", "72"), ("The answer is: 72", "72"), ("-5", "-5"), ("72%", "72%"), ("1e5", "1e5"),
    ("72 million", "72 million"), ("5 pm", "5 pm"), ("3 and a half", "3 and a half"), ("2 or 3", "2 or 3"), ("2 pi", "2 pi"), ("5 lakh", "5 lakh"), ("1,2,3", "1,2,3"), ("5 x + y", "5 x + y"), ("12 #### 13", "13"),
])
def test_what_follows_the_last_hashes_of_the_last_line_is_the_answer(line, answer):
    for before in "Count.\n", "Count. ":
        (example,) = load_examples([{"prompt": "p", "answer": f"{before}#### {line}\n"}])
        assert example["answer"] == answer and example["completion"].startswith("<reasoning>Count.")
        assert correctness([example["completion"], "<answer>71</answer>"], answer=[answer] * 2) == [1, 0]


@pytest.mark.parametrize("answer,expected", [
    ('["12"]', ["12"]), ("['12', 'x']", ["12", "x"]), ('["\\\\pi"]', ["\\pi"]), ("[0, 1]", "[0, 1]"), ("[0, 1)", "[0, 1)"), ("[]", "[]"), ('["a", 1]', '["a", 1]'), ("[{[]: 1}]", "[{[]: 1}]"), ('p #### ["12"]', ["12"]), ('{"a": 1}', '{"a": 1}'),
])
def test_a_text_that_is_a_list_of_texts_is_a_list(answer, expected):
    assert load_examples([{"prompt": "p", "answer": answer}]) == [{"prompt": "p", "answer": expected}]


@pytest.mark.parametrize("choices,answer,letter", [
    (["3", "4"], "1", "B"), (["3", "4"], 1.0, "B"), (["3", "4"], "1.0", "B"), (["3", "4"], " 0 ", "A"), (["3", "4"], "4", "4"), (["3", "4"], -1, "-1"), (["3", "4"], math.nan, "nan"), (["3", "4"], 0.5, "0.5"),
    (["2", "3", "4"], "2", "2"), (["2", "3", "4"], 2.0, "C"), ("['2', '3', '4']", "2", "C"),                    # as a text it is a choice, but where all columns are text
    ({"text": ["3", "4"], "label": ["1", "2"]}, 1, "A"), ({"text": ["3", "4"], "label": ["1", "2"]}, 1.0, "A"),
])
def test_an_index_or_a_label_may_be_text_or_a_whole_float(choices, answer, letter):
    assert load_examples([{"question": "2+2?", "choices": choices, "answer": answer}])[0]["answer"] == letter


def test_a_stated_answer_alone_is_an_answer_and_no_demonstration():
    assert load_examples([{"prompt": "p", "answer": answer} for answer in ("Answer: 16", "The answer is 16.", "$\\boxed{16}$")]) == [{"prompt": "p", "answer": "16"}] * 3


def test_a_field_of_an_object_is_a_column():
    row = {"prompt": "p", "reward_model": {"ground_truth": "72", "style": "rule"}, "a.b": 1, "a": {"b": 2}, "extra": {"a": {"b": [7, "x"]}}, "q": {"text": "or this?"}}
    for load in load_examples, data.load_examples:
        assert [load([row], columns={"answer": path})[0]["answer"] for path in ("reward_model.ground_truth", "a.b", "extra.a.b")] == ["72", "1", [7, "x"]]
        assert load([row], columns={"prompt": "q.text"})[0]["prompt"] == "or this?" and load([row], columns={"answer": "reward_model"})[0]["answer"] == row["reward_model"]
        for path in "reward_model.truth", "prompt.x", "extra.a.b.c", "nothing.x":
            with pytest.raises(ValueError, match=f"--answer_column={path}: .* has columns prompt, reward_model"):
                load([row], columns={"answer": path})
