"""Reading examples, turning them into tokens, and the order they come in."""

import json
from pathlib import Path

import pytest
from tokenizers import processors

from data import ShuffledBatches, encode_completion, encode_prompt, load_examples, with_instruction
from rewards import correctness, reasoning_coherence

GSM8K = Path(__file__).parents[1] / "../shared/data/gsm8k"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_arithmetic_is_right_reproducible_and_split_without_overlap():
    train, test = load_examples("arithmetic", "train", seed=1), load_examples("arithmetic", "test", seed=2)
    assert len(train) == 9000 and len(test) == 1000
    assert not {e["prompt"] for e in train} & {e["prompt"] for e in test}
    texts, answers = [e["completion"] for e in train], [e["answer"] for e in train]
    assert all(p == 1.0 for p in correctness(texts, answer=answers))
    assert all(p == 1.0 for p in reasoning_coherence(texts))
    for example in train[:50]:
        a, b = example["prompt"].removesuffix("=?").split("+")
        assert int(a) + int(b) == int(example["answer"])
        for step in example["completion"].partition("</reasoning>")[0].removeprefix("<reasoning>").split():
            left, right = step.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
    assert train == load_examples("arithmetic", "train", seed=1) != load_examples("arithmetic", "train", seed=2)
    assert load_examples("arithmetic", limit=5, seed=1) == train[:5]


ROWS = [{"prompt": "a", "answer": "1", "level": 2}, {"prompt": "b", "answer": "2", "level": 3}]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_format_gives_the_same_examples(tmp_path, suffix):
    import datasets

    path = tmp_path / f"data.{suffix}"
    table = datasets.Dataset.from_list(ROWS)
    if suffix == "json":
        path.write_text(json.dumps(ROWS))
    else:
        {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix](path)
    assert load_examples(str(path)) == ROWS
    assert load_examples(str(path), limit=1) == ROWS[:1]


def test_a_json_file_of_prompts_alone(tmp_path):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps({"prompts": ["a", "b"]}))
    assert load_examples(str(path)) == [{"prompt": "a"}, {"prompt": "b"}]


def test_other_column_names_and_whole_conversations(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "q", "solution": 5, "response": "r"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": "q", "answer": "5", "completion": "r"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4"}]
    path.write_text(json.dumps({"prompt": chat[:1], "completion": chat[1:], "answer": "2020-01-01"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4", "answer": "2020-01-01"}]


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", "", "empty"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("list.jsonl", '{"prompt": "a"}\n[1]\n', "line 2 is not an object"),
        ("columns.jsonl", '{"text": "a", "label": 1}\n', "columns text, label; it needs one of prompt"),
        ("number.jsonl", '{"prompt": 5}\n', "must be text or chat messages"),
        ("blank.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "example 2: the prompt is empty"),
        ("chat.jsonl", '{"prompt": [{"text": "a"}]}\n', "chat messages must look like"),
        ("completion.jsonl", '{"prompt": "a", "completion": 5}\n', "completion must be text"),
        ("bad.json", "{", "not JSON"),
        ("dict.json", '{"a": 1}', "must hold a list"),
        ("list.json", "[]", "no examples"),
        ("bad.parquet", "not parquet", "cannot be read as parquet"),
        ("columns.csv", "a,b\n1,2\n", "columns a, b"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line_that_names_it(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_examples(str(path))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_lines_that_are_not_json_can_be_left_out_and_are_counted(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n\n{"prompt": "b"}\n{"prompt": "c')
    with pytest.warns(UserWarning, match=r"left out 2 of 4 lines.*\[2, 5\]"):
        assert load_examples(str(path), bad_lines="skip") == [{"prompt": "a"}, {"prompt": "b"}]


def test_an_unknown_source_lists_what_there_is(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not built in .* and not a file ending in .jsonl.*, and the hub answers"):
        load_examples("no/such-thing")
    with pytest.raises(ValueError, match=r"arithmetik: not built in .arithmetic.*look like openai/gsm8k"):
        load_examples("arithmetik")


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside this checkout")
def test_gsm8k_files_work_as_they_are():
    examples = load_examples(str(GSM8K / "train.jsonl"), bad_lines="skip")
    assert len(examples) >= 7472
    assert len(load_examples(str(GSM8K / "test.jsonl"))) == 1319
    assert examples[0]["answer"] == "72" and "<<" not in examples[0]["completion"] and "####" not in examples[0]["completion"]
    texts, answers = [e["completion"] for e in examples], [e["answer"] for e in examples]
    assert all(p == 1.0 for p in correctness(texts, answer=answers))
    assert all(p == 1.0 for p in reasoning_coherence(texts))


# ---- tokens --------------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_tokenizer():
    from model import byte_tokenizer

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


def test_a_demonstration_ends_with_one_stop_token(tokenizer, chat_tokenizer):
    assert encode_completion(tokenizer, "p", "ab", [1]) == [*tokenizer("ab", add_special_tokens=False).input_ids, 1]
    end = chat_tokenizer.convert_tokens_to_ids("<end>")
    expected = [*chat_tokenizer("ab", add_special_tokens=False).input_ids, end]
    assert encode_completion(chat_tokenizer, [5, 6, 7], "ab", [1, end]) == expected, "a truncated prompt"
    assert encode_completion(chat_tokenizer, "p", "ab", [1, end]) == expected, "the template's own end of turn"


def test_the_byte_tokenizer_writes_and_reads_any_text(tokenizer):
    for text in "47+85=?", "<reasoning>é 漢字 \n\t</reasoning><answer>🙂</answer>", " leading", "a  b":
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("<answer>é</answer>", add_special_tokens=False).input_ids) == 4


def test_a_template_that_refuses_a_prompt_says_so_in_one_line(chat_tokenizer):
    chat_tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"refuses the prompt.*System role not supported"):
        encode_prompt(chat_tokenizer, [{"role": "system", "content": "s"}])


def test_a_tokenizer_that_appends_eos_to_prompts_is_seen_by_the_check(model, tokenizer, settings):
    import copy

    from check import check_setup

    appending = copy.deepcopy(tokenizer)
    appending.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    findings = {f.name: f for f in check_setup(model, appending, [{"prompt": "1+1=?"}] * 2, settings, [])}
    assert findings["open prompt"].ok is False and findings["sampler"].ok


def test_an_instruction_goes_before_the_prompt_or_into_the_first_message():
    assert with_instruction({"prompt": "q"}, "do it") == {"prompt": "do it\nq"}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    changed = with_instruction({"prompt": chat}, "do it")["prompt"]
    assert changed[0]["content"] == "do it\nq" and changed[1:] == chat[1:] and chat[0]["content"] == "q"


# ---- order ---------------------------------------------------------------------------------------------------------


def test_every_epoch_hands_out_each_example_once_in_a_new_order():
    batches = ShuffledBatches(list(range(10)), batch_size=4, seed=0)
    stream = [example for _ in range(10) for example in next(batches)]
    epochs = [stream[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_position_is_the_whole_state():
    examples = list(range(7))
    first = ShuffledBatches(examples, batch_size=3, seed=5)
    for _ in range(4):
        next(first)
    second = ShuffledBatches(examples, batch_size=3, seed=5)
    second.position = first.position
    assert [next(first) for _ in range(5)] == [next(second) for _ in range(5)]
