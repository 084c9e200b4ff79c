"""The schema of rows, columns of other names, the order of examples, tokens of prompts and demonstrations."""

import json
import random
import re
from datetime import date

import numpy as np
import pytest

import data
from data import Batches, encode_prompt
from model import byte_tokenizer
from runs.command_line import parse_config
from sources.training_data import example_key, instructed, load_data
from sources import load_examples


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(*flags):
    return load_data(parse_config([*flags]))


def message(role, content, **more):
    return {"role": role, "content": content} | more


USER, ASSISTANT, SYSTEM = message("user", "1+1=?"), message("assistant", "<answer>2</answer>"), message("system", "Add.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
PART = {"type": "text", "text": "1+1"}


@pytest.mark.parametrize("row,changed", [
    ({"prompt": "1+1=?", "answer": "2", "level": 3, "rejected": "3"}, {}), ({"prompt": [SYSTEM, USER], "answer": ["2", 2.0]}, {}),
    ({"prompt": "p", "answer": 2}, {"answer": "2"}), ({"prompt": "p", "answer": 0.1}, {"answer": "0.1"}),
    ({"prompt": "p", "answer": np.float32(0.1)}, {"answer": "0.1"}),
    ({"prompt": [USER], "completion": [ASSISTANT]}, {"completion": ASSISTANT["content"]}),
    ({"prompt": "p", "completion": " \n"}, {"completion": None}),
    ({"prompt": [SYSTEM, USER, ASSISTANT]}, {"prompt": [SYSTEM, USER], "completion": ASSISTANT["content"]}),
    ({"prompt": "p", "completion": [ASSISTANT, USER, ASSISTANT]}, {}),
    ({"prompt": [USER], "completion": [message("assistant", "2", reasoning="hm")]}, {}),
    ({"prompt": [message("user", [PART, {"type": "text", "text": "=?"}], name=None)]}, {"prompt": [USER]}),
    ({"prompt": [USER, message("assistant", None, tool_calls=[CALL]), USER]}, {}),
    ({"prompt": [USER, message("assistant", None,
     tool_calls=[{"function": {"name": "add", "arguments": '{"a": 1}'}, "id": None}])]},
     {"prompt": [USER], "completion": [message("assistant", None, tool_calls=[{"function": CALL["function"]}])]}),
])
def test_a_usual_row_is_taken_as_it_is(row, changed):
    for load in data.load_examples, load_examples:
        assert load([row]) == [row | changed]


# What is odd in a row, and the words of the one line that says so.
ODD = [
    (5, "the prompt must be text or chat messages, not 5"),
    ({"text": "a", "gold": "b"}, "columns text, gold: name one with --prompt_column, or a text such as '... {text} ... {gold}'"),
    ({"prompt": None}, "not None; the row has the columns prompt"), ({"prompt": " \n"}, "the prompt is empty: data.filter"),
    ({"prompt": b"1+1"}, "must be text or chat messages, not b'1[+]1'"),
    ({"prompt": json.dumps([USER])}, "the text of chat messages: data.map.lambda row: {'prompt': json.loads"),
    ({"prompt": "half a pair \ud800"}, "surrogates not allowed"),
    ({"prompt": ["1+1"]}, "chat messages must look like .*, not '1[+]1': data.map"),
    ({"prompt": [message("user", 5)]}, "content of a message must be text or parts .* not 5: data.map.*data.filter"),
    ({"prompt": [message("user", [PART, {"type": "image", "text": "x"}])]}, "must be text or parts .*'type': 'image'"),
    ({"prompt": [message("user", None), USER]}, "must be text or parts .* not None"),
    ({"prompt": [USER, message("assistant", None, tool_calls=[{"function": {"arguments": "a=1"}}])]},
     "arguments of a call must be an object, not 'a=1': data.map"),
    ({"prompt": [USER, ASSISTANT], "completion": "2"}, "completion and prompt end with a reply; data.map"),
    ({"prompt": "p", "completion": ASSISTANT}, "completion must be text, or the assistant's messages .*data.map"),
    ({"prompt": "p", "completion": [ASSISTANT, ASSISTANT]}, "with one other message between each two"),
    ({"prompt": "p", "completion": [USER]}, "completion must be text"),
    ({"prompt": "p", "completion": []}, "completion must be text"),
    ({"prompt": "p", "answer": {"a": 1}}, "answer must be .* not the dict {'a': 1}: .* --answer_column a.b"),
    ({"prompt": "p", "answer": date(2024, 3, 1)}, "not the date datetime.date.2024, 3, 1.: data.map"),
]
ODD_COLUMNS = [                 # which sources.load_examples reads
    ({"question": "q", "options": "A. 1\nB. 2"}, "choices or options must be a list of at most 26 texts, not 'A. 1"),
    ({"question": "q", "choices": [3, 4]}, "list of at most 26 texts, not .3, 4."),
    ({"question": "q", "choices": ["a"] * 27}, "list of at most 26 texts"),
    ({"question": "q", "choices": np.array(["a", "b"])}, "list of at most 26 texts"),
    ({"question": "q", "options": {"top_p": 0.7}}, "data.rename_column"),
    ({"question": "q", "choices": ["a", "b"], "answer": 2}, "the answer 2 is no index, label or text of its 2 choices"),
    ({"question": "q", "choices": ["a", "b"], "answer": "c"}, "the answer 'c' is no index"),
    ({"prompt": "p", "tools": "hammer"}, "tools must be a list of schemas .* not 'hammer': data.map.*data.rename_column"),
    ({"prompt": "p", "tools": ["hammer"]}, "tools must be a list of schemas"),
    ({"prompt": "p", "answer": "5*4 is 20. The answer is: 20"}, "answer is a whole solution, .*The answer is: 20'.*split"),
    ({"prompt": "p", "answer": "So it is 3.\n**Final Answer:** 3"}, "answer is a whole solution"),
    ({"conversations": [{"from": "human"}]}, "chat messages must look like"),
]


@pytest.mark.parametrize("row,words,loads",
    [*((*odd, [data.load_examples, load_examples]) for odd in ODD), *((*odd, [load_examples]) for odd in ODD_COLUMNS)])
def test_an_odd_row_is_refused_in_one_line_with_its_number(row, words, loads):
    for load in loads:
        with pytest.raises(ValueError, match=f"^dataset: example 2: [^\n]*{words}[^\n]*$"):
            load([{"prompt": "p"}, row])


@pytest.mark.parametrize("source,message", [
    *((name, rf"{name}: neither .* from sources import load_examples") for name in ("openai/gsm8k:main", "data.csv")),
    ("none.jsonl", "none.jsonl: no such file"), ([], "dataset: no examples in it"),
    ({"train": []}, "dataset: must be a list of examples .*, not a dict: choose a split.*"),
    (iter("a"), "dataset: must be a list .*, not a str_.*iterator: .*"),
    (type("DataFrame", (list,), {"keys": None})("a"), "dataset: must be a list .*, not a DataFrame: .*"),
])
def test_a_source_that_the_core_does_not_read_is_refused(source, message):
    for load in [data.load_examples] if isinstance(source, str) else [data.load_examples, load_examples]:
        with pytest.raises(ValueError, match=rf"^{message}$"):
            load(source)


@pytest.mark.parametrize("line", ['{"prompt": ', "[" * 200_000])
def test_a_line_that_is_not_json_is_named(tmp_path, line):
    (tmp_path / "data.jsonl").write_text(f'\ufeff{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=r"data.jsonl: line 3 is not JSON: .*; correct it$"):
        data.load_examples(str(tmp_path / "data.jsonl"))


def test_addition_problems_lists_and_json_lines_are_examples(tmp_path):
    problems = data.load_examples("arithmetic", "test", limit=2)
    assert [str(eval(row["prompt"].removesuffix("=?"))) for row in problems] == [row["answer"] for row in problems]
    assert len(problems) == 2
    with pytest.raises(ValueError, match="split=dev: built-in problems have the splits train and test"):
        data.load_examples("arithmetic", "dev")
    assert data.load_examples(["a", [USER], {"prompt": "b"}]) == [{"prompt": "a"}, {"prompt": [USER]}, {"prompt": "b"}]
    assert data.load_examples(write_lines(tmp_path / "data.jsonl", [{"prompt": "p"}] * 2), limit=1) == [{"prompt": "p"}]


def test_columns_have_usual_names_or_are_named():
    row = {"frage": "q", "prompt": "not this", "solution": "because", "gold": 7, "a.b": 1, "a": {"b": {"c": [7]}}}

    def read(**columns):
        (example,) = load_examples([row], columns=columns)
        assert {name: row[name] for name in ("frage", "gold", "a.b", "a")}.items() <= example.items()
        return [example.get(name) for name in ("prompt", "answer", "completion")]

    assert read() == ["not this", "because", None] and read(answer="gold", completion="solution") == ["not this", "7", "because"]
    assert read(prompt="frage", answer="", completion="solution") == ["q", None,
        "because"], "not the answer, which it would be otherwise"
    assert read(answer="solution", completion="solution") == ["not this", "because", "because"]
    assert read(answer="a.b")[1] == "1" and read(answer="a.b.c")[1] == [7]
    assert read(prompt='{frage} {a.b} \\frac{1}{2} {"x": 1} {no column}')[0] == 'q 1 \\frac{1}{2} {"x": 1} {no column}'
    for column in "gone", "a.x", "frage.x", "{frage} {gone}", "{gone}":
        with pytest.raises(ValueError, match=f"^dataset: example 1: --prompt_column={re.escape(column)}: the row has"):
            read(prompt=column)
    assert load_examples([{"prompt": None, "question": "q", "target": 3}])[0].items() >= {"prompt": "q", "answer": "3"}.items()
    train_set, _ = load_data(parse_config(["--prompt_column", "frage", "--eval_limit", "0"]), [row])
    assert [e["prompt"] for e in train_set] == ["q"]


@pytest.mark.parametrize("value,column,words", [
    (2.5, "{price:.2f} Euros", "{price:.2f}: formats are not supported; write {price}"),
    (2.5, "{price!r}", "{price!r}: formats are not supported"),
    (date(2024, 3, 1), "On {price}?", "{price} is the date datetime.date(2024, 3, 1), not text: data.map"),
])
def test_what_braces_cannot_write_is_refused(value, column, words):
    with pytest.raises(ValueError, match=f"example 1: .*{re.escape(words)}"):
        load_examples([{"price": value}], columns={"prompt": column})
    assert load_examples([{"a": None, "b": [1]}], columns={"prompt": "{a}{b}?"})[0]["prompt"] == "[1]?"


@pytest.mark.parametrize("prompt,instruction,expected", [
    ("q", "do it", "do it\nq"), ("q", "", "q"), ([USER, ASSISTANT], "do it", [message("user", "do it\n1+1=?"), ASSISTANT]),
])
def test_an_instruction_goes_before_the_prompt_or_into_the_first_message(prompt, instruction, expected):
    assert instructed({"prompt": prompt, "level": 1}, instruction) == {"prompt": expected, "level": 1}


def test_prompts_that_say_the_same_have_one_key_and_others_have_not():
    same = ["What is  2+2?", "what is\n2+2? ", [{"role": "user", "content": "What is 2+2?"}]]
    assert len({example_key({"prompt": prompt}) for prompt in same}) == 1
    others = ["What is 2+3?", [{"role": "system", "content": "What is 2+2?"}],
              [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]]
    assert len({example_key({"prompt": prompt}) for prompt in [same[0], *others]}) == 4


def test_the_order_depends_on_seed_and_position_alone():
    def as_it_always_was(seed):
        for epoch in range(3):
            order = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(order)
            yield from order

    for seed in 0, 1, 12:
        batches = Batches(list(range(7)), batch_size=3, seed=seed)
        assert [e for _ in range(7) for e in next(batches)] == list(as_it_always_was(seed))
        assert batches.position == 21 and batches.take(0) == []
        batches = Batches(list(range(7)), batch_size=3, seed=seed)
        batches.position = 12                             # the whole state
        assert [e for _ in range(3) for e in next(batches)] == list(as_it_always_was(seed))[12:]


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }}\n{% elif m.role == 'user' %}U {{ m.content | trim }}\n"
    "{% elif m.role == 'assistant' %}A {{ (m.content or '').split('</think>')[-1] | trim }}\n"
    "{% elif m.role == 'tool' %}T {{ m.content | tojson }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A {% endif %}"
)


@pytest.mark.parametrize("template,messages,problem", [
    (KNOWN_ROLES, [message("developer", "Be brief."), USER], "lacks the developer's message 'Be brief.': .*--chat_template none"),
    ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", [USER], "the prompt lacks the user's message '1[+]1=[?]'"),
    ("{{ raise_exception('System role not supported') }}", [SYSTEM], "rejects the prompt.*System role not supported"),
    (KNOWN_ROLES, [USER, message("assistant", "<think>\n1+1\n</think>\n\n2"), message("tool", 'two\n"lines"'),
     message("user", " é \n")], None),
    (KNOWN_ROLES, [USER, message("assistant", None), USER], None), (None, [message("developer", "Be brief."), USER], None),
])
def test_a_message_that_the_template_omits_or_rejects_is_one_line(template, messages, problem):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if problem is None:
        encode_prompt(tokenizer, messages)
    else:
        with pytest.raises(ValueError, match=problem):
            encode_prompt(tokenizer, messages)
