"""Columns and formats of data, tokens of prompts and demonstrations, and the order of examples."""

import json
import re

import datasets
import numpy as np
import pytest
import torch

import data
from data import encode_prompt
from model import byte_tokenizer
from runs.command_line import parse_config
from runs.setup import load_data
from sources.training_data import instructed
from sources import load_examples

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_other_column_names_and_whole_conversations(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert load_examples([{"prompt": str(chat)}]) == load_examples([{"prompt": chat[:1], "completion": chat[1]}])
    path = tmp_path / "data.jsonl"
    row = {"question": "q", "solution": 5, "response": "r"}
    path.write_text(json.dumps(row) + "\n")
    assert load_examples(str(path)) == [row | {"prompt": "q", "answer": "5", "completion": "r"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    assert load_examples(str(path)) == [{"messages": chat, "prompt": chat[:1], "completion": "4"}]
    path.write_text(json.dumps({"prompt": chat[:1], "completion": chat[1:], "answer": "2020-01-01"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4", "answer": "2020-01-01"}]


def test_columns_can_be_named(tmp_path):
    row = {"frage": "q", "prompt": "not this", "solution": "because", "gold": 7}
    path = write_lines(tmp_path / "data.jsonl", [row])
    named = load_examples(path, columns={"prompt": "frage", "answer": "gold", "completion": "solution"})
    own = {"frage": "q", "gold": 7, "solution": "because"}         # stay, under their own names
    assert named == [own | {"prompt": "q", "answer": "7", "completion": "because"}]
    demonstrated = load_examples(path, columns={"prompt": "frage", "answer": "", "completion": "solution"})
    assert demonstrated == [own | {"prompt": "q", "completion": "because"}], "not the answer, which it would be otherwise"
    assert load_examples(path, columns={"answer": "gold"}) == [own | {"prompt": "not this", "answer": "7"}]
    both = load_examples(path, columns={"prompt": "frage", "answer": "solution", "completion": "solution"})
    assert both == [own | {"prompt": "q", "answer": "because", "completion": "because"}]
    train_set, _ = data_of("--dataset", path, "--eval_limit", "0", "--prompt_column", "frage", "--answer_column", "gold")
    assert [e["prompt"] for e in train_set] == ["q"]


def test_a_column_without_a_value_is_as_good_as_not_there(tmp_path):
    rows = [{"prompt": None, "question": "q", "answer": None, "target": 3}, {"prompt": "p", "answer": None}]
    examples = load_examples(write_lines(tmp_path / "data.jsonl", rows))
    assert examples == [rows[0] | {"prompt": "q", "answer": "3"}, {"prompt": "p", "answer": None}]


def data_of(*flags):
    return load_data(parse_config([*flags]))


def message(role, content):
    return {"role": role, "content": content}


USER, ASSISTANT, SYSTEM = message("user", "1+1=?"), message("assistant", "<answer>2</answer>"), message("system", "Add.")


@pytest.mark.parametrize("row,example", [
    ({"prompt": "1+1=?", "level": 3, "rejected": "3"}, {"prompt": "1+1=?"}),
    ({"prompt": [USER], "completion": [ASSISTANT]}, {"prompt": [USER], "completion": ASSISTANT["content"]}),
    ({"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt": [SYSTEM, USER], "completion": ASSISTANT["content"]}),
    ({"messages": [USER, ASSISTANT, USER, ASSISTANT]}, {"prompt": [USER, ASSISTANT, USER], "completion": ASSISTANT["content"]}),
])
def test_trls_formats_are_read_from_parquet(row, example, tmp_path):
    import datasets

    datasets.Dataset.from_list([row | {"solution": "2"}] * 3).to_parquet(tmp_path / "data.parquet")
    assert load_examples(str(tmp_path / "data.parquet")) == [row | example | {"solution": "2", "answer": "2"}] * 3


@pytest.fixture
def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["<end>"])
    return tokenizer


def test_bos_comes_once_with_and_without_a_chat_template(tokenizer, chat_tokenizer):
    plain = encode_prompt(tokenizer, "1+1=?")
    assert plain.count(2) == 1 and tokenizer.decode(plain[1:]) == "1+1=?"
    chat = encode_prompt(chat_tokenizer, "1+1=?")
    assert chat.count(2) == 1 and chat_tokenizer.decode(chat[1:]) == "<user>1+1=?<end>\n<assistant>"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, messages)[1:]) == "<system>s<end>\n<user>u<end>\n<assistant>"
    assert tokenizer.decode(encode_prompt(tokenizer, messages)[1:]) == "system: s\nuser: u\nassistant: "
    assert encode_prompt(tokenizer, [5, 6, 7]) == [5, 6, 7]


def test_a_template_that_refuses_a_prompt_says_so_in_one_line(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"rejects the prompt.*System role not supported"):
        encode_prompt(chat_tokenizer, [{"role": "system", "content": "s"}])


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }}\n{% elif m.role == 'user' %}U {{ m.content | trim }}\n"
    "{% elif m.role == 'assistant' %}A {{ (m.content or '').split('</think>')[-1] | trim }}\n{% elif m.role == 'tool' %}T {{ m.content | tojson }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A {% endif %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role }} {{ m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("template,messages,lost", [
    (KNOWN_ROLES, [message("developer", "Be brief."), USER], "developer's message 'Be brief.'"),
    (FIRST_PART.replace("text }}", "html }}"), [USER], "user's message '1+1=?'"),
    (KNOWN_ROLES, [message("user", [{"type": "text", "text": "1+1=?"}])], None), (FIRST_PART, [USER, SYSTEM], None),
    (FIRST_PART, [message("user", [{"type": "text", "text": "Add:"}, "1+1"])], None), (KNOWN_ROLES, [SYSTEM, message("user", " 1+1=? \n\n")], None),
    (KNOWN_ROLES, [USER, message("assistant", "<think>\n1+1\n</think>\n\n2"), message("tool", 'two\n"lines"'), message("user", "é <bos>")], None),
    (KNOWN_ROLES, [USER, message("assistant", None), USER], None), (None, [message("developer", "Be brief."), USER], None),
])
def test_a_message_that_the_rendered_prompt_leaves_out_is_one_line(chat_tokenizer, template, messages, lost):
    chat_tokenizer.chat_template = template
    if lost is None:
        encode_prompt(chat_tokenizer, messages)
    else:
        with pytest.raises(ValueError, match=f"^the prompt lacks the {re.escape(lost)}: the chat template omits it; .* --chat_template none$"):
            encode_prompt(chat_tokenizer, messages)


def test_an_assistants_message_may_have_parts():
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "2"}]
    rows = {"prompt": [USER, message("assistant", parts)]}, {"prompt": [USER], "completion": [message("assistant", parts)]}
    assert load_examples(list(rows)) == [{"prompt": [USER], "completion": "It is 2"}] * 2
    for completion in [message("assistant", 5)], [], ["my content"], [5], [{"text": None}], [ASSISTANT, USER, message("assistant", "")]:
        with pytest.raises(ValueError, match=r"dataset: example 1: the (completion|content of a message) must be text|chat messages must"):
            load_examples([{"prompt": "p", "completion": completion}])
    for blank in " \n", [message("assistant", [])], [message("assistant", "")], [message("assistant", None) | {"tool_calls": []}]:
        assert load_examples([{"prompt": "p", "completion": blank}]) == [{"prompt": "p", "completion": None}]


@pytest.mark.parametrize("content,refused", [
    ([{"type": "text", "value": "q"}], "not {'type': 'text', 'value': 'q'}"), ([{"type": "text", "content": "q"}], "not {'type': 'text', 'cont"),
    (["q", {"type": "image", "text": None}], "not {'type': 'image'"), ([{"type": "image_url", "image_url": {"url": "q"}}], "not {'type': 'image_url'"),
    ({"q": 1}, "not {'q': 1}"), (5, "not 5"), ([], "the prompt is empty"), (" ", "the prompt is empty"), (None, "the prompt is empty"),
])
def test_parts_without_text_and_blank_prompts_are_refused(content, refused):
    for load in data.load_examples, load_examples:
        with pytest.raises(ValueError, match=f"^dataset: example 1: .*{refused}"):
            load([{"prompt": [message("user", content)], "completion": "c"}])


@pytest.mark.parametrize("value,expected", [
    (b"72", "72"), ([b"7"], ["7"]), (np.bytes_(b"7"), "7"), (np.float32(0.1), "0.1"), (np.array([0.1, 3], "float32"), [0.1, 3.0]), (torch.tensor(0.1), "0.1"),
    (np.float64(1 / 3), str(1 / 3)), (np.float32(2**-10), "0.0009765625"), (0.1, "0.1"), (np.bool_(True), "True"),
])
def test_a_cell_becomes_the_value_that_it_shows(value, expected):
    assert data.load_examples([{"prompt": "p", "answer": value}])[0]["answer"] == expected


def test_typed_columns_give_the_names_of_labels_and_short_numbers(tmp_path):
    label = datasets.ClassLabel(names=["no", "yes"])
    features = {"prompt": datasets.Value("string"), "answer": label, "rate": datasets.Value("float32"), "tags": datasets.Sequence(label)}
    rows = [{"prompt": "p", "answer": 1, "rate": 0.1, "tags": [0, 1]}, {"prompt": "p", "answer": -1, "rate": None, "tags": None}]
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.to_parquet(tmp_path / "data.parquet")
    for source in table, str(tmp_path / "data.parquet"):
        assert load_examples(source) == [
            {"prompt": "p", "answer": "yes", "rate": 0.1, "tags": ["no", "yes"]}, {"prompt": "p", "answer": None, "rate": None, "tags": None}]


@pytest.mark.parametrize("text", [json.dumps([USER]), json.dumps([USER, ASSISTANT], indent=1)])
def test_the_text_of_messages_is_messages(text):
    (example,) = load_examples([{"prompt": text}])
    assert example["prompt"] == [USER] and example.get("completion") in (None, ASSISTANT["content"])
    for other in '[{"a": 1}]', "[{'role': ", "[[1]]", '[{"role": "user"}, 5]':
        assert load_examples([{"prompt": other}])[0]["prompt"] == other


def test_a_prompt_that_ends_with_the_assistant_has_no_other_completion():
    prompt = [USER, message("assistant", "It is")]
    assert load_examples([{"prompt": prompt}, {"prompt": prompt, "completion": "It is"}]) == [
        {"prompt": [USER], "completion": "It is"}] * 2
    for given in prompt, [USER, message("assistant", None)]:
        with pytest.raises(ValueError, match=r"dataset: example 1: there is a completion, and the prompt ends with another one; remove one$"):
            load_examples([{"prompt": given, "completion": " 2"}])
    assert load_examples([{"prompt": prompt, "answer": "so\n#### 2"}]) == [{"prompt": [USER], "completion": "It is", "answer": "2"}]


@pytest.mark.parametrize("prompt,instruction,expected", [
    ("q", "do it", "do it\nq"), ("q", "", "q"), ([USER, ASSISTANT], "do it", [message("user", "do it\n1+1=?"), ASSISTANT]),
])
def test_an_instruction_goes_before_the_prompt_or_into_the_first_message(prompt, instruction, expected):
    assert instructed({"prompt": prompt, "level": 1}, instruction) == {"prompt": expected, "level": 1}


# ---- data.py alone: sources/ reads what it refuses ------------------------------------------------------------------

ROW = {"question": "2+2?", "answer": 4}


@pytest.mark.parametrize("line,message", [
    ('{"prompt": ', "line 3 is not JSON: .*; correct it"), ("5", "example 2: the prompt must be text or chat messages, not int: 5"),
    ('{"text": "a", "prompt": null}', "example 2: the row has columns text, prompt; it needs a value in one of prompt, question, .*"),
    ('{"prompt": "\\ud800"}', "line 3 is not JSON: .*surrogates.*"), ("[" * 200_000, "line 3 is not JSON: it is nested too deeply; correct it"),
])
def test_a_line_that_is_no_example_is_named(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(ROW), "", line, json.dumps(ROW)]))
    with pytest.raises(ValueError, match=rf"data.jsonl: {message}$"):
        data.load_examples(str(tmp_path / "data.jsonl"))


@pytest.mark.parametrize("source,message", [
    *((name, rf"{name}: neither .* from sources import load_examples") for name in ("openai/gsm8k:main", "data.csv", "countdown")),
    ("none.jsonl", "none.jsonl: no such file"), (["a", 5], "dataset: example 2: the prompt must be text or chat messages, not int: 5"),
    ([], "dataset: no examples in it"), ({"train": []}, "dataset: must be a list of examples .*, not a dict: choose a split.*"),
    (iter("a"), "dataset: must be a list .*, not a str_.*iterator: .*"),
    (type("DataFrame", (list,), {"keys": None})("a"), "dataset: must be a list .*, not a DataFrame: choose a split, or pass a list of dicts"),
])
def test_a_source_that_the_core_does_not_read_is_refused(source, message):
    for load in [data.load_examples] if isinstance(source, str) else [data.load_examples, load_examples]:
        with pytest.raises(ValueError, match=rf"^{message}$"):
            load(source)


def test_addition_problems_lists_and_json_lines_are_examples(tmp_path):
    problems = data.load_examples("arithmetic", "test", limit=2)
    assert [eval(row["prompt"].removesuffix("=?")) for row in problems] == [int(row["answer"]) for row in problems] and len(problems) == 2
    with pytest.raises(ValueError, match="split=dev: built-in problems have the splits train and test"):
        data.load_examples("arithmetic", "dev")
    assert data.load_examples(["a", {"prompt": "b", "nums": [1]}]) == [{"prompt": "a"}, {"prompt": "b", "nums": [1]}]
    path = write_lines(tmp_path / "data.jsonl", [ROW, ROW])
    assert data.load_examples(path, limit=1) == [ROW | {"prompt": "2+2?", "answer": "4"}]
