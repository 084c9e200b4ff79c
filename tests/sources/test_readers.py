"""Files and hubs: the same rows from every format, and errors in one line."""

import json
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_data import GSM8K, write_lines

from sources import load_examples
from sources.batches import Batches
from rewards import correctness, reasoning_coherence
from runs.command_line import parse_config
from runs.setup import load_data
from sources.readers import View

ROWS = [{"prompt": "a", "answer": "1", "level": "02"}, {"prompt": "b", "answer": "2", "level": "NA"}]


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
    path.write_text('{"prompts": ["a", "é漢"]}', encoding="utf-8")
    assert load_examples(str(path)) == [{"prompt": "a"}, {"prompt": "é漢"}]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_byte_order_mark_is_left_out(suffix, tmp_path):
    path, row = tmp_path / f"data.{suffix}", {"prompt": "é?", "answer": "ja"}
    text = {"jsonl": json.dumps(row), "json": json.dumps([row]), "csv": "prompt,answer\né?,ja\n"}[suffix]
    path.write_text(text, encoding="utf-8-sig")
    assert load_examples(str(path)) == [row]


def test_cells_of_a_csv_file_are_their_text_and_empty_ones_are_none(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text('prompt,answer,code,level,empty\n1,NA,007,3,\ntwo,None,12,-4,\n"three\n, 3",nan,2.50,,\n', encoding="utf-8")
    examples = load_examples(str(path))
    assert {name: [example[name] for example in examples] for name in examples[0]} == {
        "prompt": ["1", "two", "three\n, 3"], "answer": ["NA", "None", "nan"], "code": ["007", "12", "2.50"],
        "level": ["3", "-4", None], "empty": [None] * 3,
    }


def test_rows_of_a_jsonl_file_can_be_asked_for_in_any_order(tmp_path):
    path, prompts = tmp_path / "data.jsonl", [f"{'é漢🙂' * (i % 3)} {i}" for i in range(50)]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=i % 2 == 0) for i, prompt in enumerate(prompts)]
    path.write_bytes("\r\n\n".join(lines).encode())                              # empty lines, and no end to the last
    examples = load_examples(str(path))
    assert [examples[i]["prompt"] for i in reversed(range(50))] == prompts[::-1] and examples[-1]["prompt"] == prompts[-1]
    assert [e["prompt"] for e in examples[10:12]] == prompts[10:12] and [e["prompt"] for e in examples] == prompts
    assert len(examples) == 50 and list(examples) == list(examples), "it can be gone through again"
    with pytest.raises(IndexError):
        examples[50]


def test_a_view_is_as_long_as_its_indices_and_stops_for_no_error_but_its_end():
    view = View("abc", [2, 0], str.upper)
    assert len(view) == 2 and list(view) == ["C", "A"] and view[:1] == ["C"] and view == ["C", "A"] != view[:1]
    with pytest.raises(IndexError):
        list(View("abc", [2, 7, 0], str.upper))


def test_a_jsonl_file_is_not_held_in_memory(tmp_path):
    path = write_lines(tmp_path / "large.jsonl", ({"prompt": f"{i}", "answer": "x" * 4000} for i in range(2000)))
    config = parse_config(["--dataset", path, "--eval_limit", "10"])
    json.loads("{}"), load_data(config)                                          # whatever is set up once
    tracemalloc.start()
    examples, _ = load_data(config)
    batches = Batches(examples, 10, seed=0)
    for _ in range(len(examples) // 10):
        next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.1 * Path(path).stat().st_size


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", "", "no examples in it"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("columns.jsonl", '{"text": "a", "label": 1}\n', "columns text, label; it needs a value in one of prompt"),
        ("blank.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "example 2: the prompt is empty"),
        ("chat.jsonl", '{"prompt": [{"text": "a"}]}\n', "chat messages must look like"),
        ("null.jsonl", '{"prompt": null}\n', "columns prompt; it needs a value in one of prompt, question"),
        ("two.jsonl", '{"prompt": "a", "completion": [{"content": "b"}, {"content": "c"}]}\n', "must be text, an assistant"),
        ("completion.jsonl", '{"prompt": "a", "completion": 5}\n', "completion must be text"),
        ("bad.json", "{", "not JSON"),
        ("dict.json", '{"a": 1}', "must hold a list"),
        ("list.json", "[]", "no examples"),
        ("bad.parquet", "not parquet", "cannot be read as parquet"),
        ("columns.csv", "a,b\n1,2\n", "columns a, b"),
        ("cells.csv", "prompt,answer\na,1,2\nb,3,4\n", "rows have more cells than the header; put cells with a comma in quotes"),
        ("header.csv", "prompt,answer\n", "cannot be read as csv: .*no data"),
        ("latin.csv", "prompt,answer\nh\udce9,1\n", "cannot be read as csv: 'utf-8' codec"),
    ],
)
def test_an_unusable_file_is_refused_in_one_line_that_names_it(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        load_examples(str(path))
    assert name in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_source_lists_what_there_is(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not built in .*countdown.* and not a file ending in .*, and the hub answers"):
        load_examples("no/such-thing")
    with pytest.raises(ValueError, match=r"arithmetik: not built in .arithmetic.*look like openai/gsm8k"):
        load_examples("arithmetik")


@pytest.mark.skipif(not GSM8K.exists(), reason="no ../shared/data/gsm8k")
def test_gsm8k_files_work_as_they_are():
    examples = load_examples(str(GSM8K / "train.jsonl"))
    assert len(examples) >= 7472
    assert len(load_examples(str(GSM8K / "test.jsonl"))) == 1319
    assert examples[0]["answer"] == "72" and "<<" not in examples[0]["completion"] and "####" not in examples[0]["completion"]
    texts, answers = [e["completion"] for e in examples], [e["answer"] for e in examples]
    assert all(p == 1.0 for p in correctness(texts, answer=answers))
    assert all(p == 1.0 for p in reasoning_coherence(texts))


def test_the_part_after_the_colon_is_the_configuration(monkeypatch):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **how: asked.append((names, how)) or [{"prompt": "a"}])
    load_examples("openai/gsm8k:main", "test"), load_examples("openai/gsm8k")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("openai/gsm8k", None), {"split": "train"})]


def gsm8k_rows():
    return [
        {"question": "What is 2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4", "level": 1, "steps": [1, 2], "notes": {"by": ["é"]}},
        {"question": "What is 2,000-1?", "answer": "It is\n#### 1,999", "level": 2, "steps": [3], "notes": {"by": []}},
    ]


def as_tfds(rows):
    """Rows as TensorFlow Datasets has them: bytes for text, and numbers and arrays of numpy."""
    def changed(value):
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, dict):
            return {name: changed(part) for name, part in value.items()}
        return np.array([changed(part) for part in value]) if isinstance(value, list) else np.int64(value)

    return [{name: changed(value) for name, value in row.items()} for row in rows]


def test_tensorflow_datasets_gives_the_same_examples_as_a_file(tmp_path, monkeypatch):
    def data_source(name, split):
        assert name == "gsm8k"
        if split not in ("train", "test"):
            raise ValueError(f"Unknown split {split!r}\nmany more lines")
        return as_tfds(gsm8k_rows() if split == "train" else gsm8k_rows()[:1])

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", SimpleNamespace(data_source=data_source))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets.text", SimpleNamespace())
    examples = load_examples("tfds:gsm8k")
    assert examples == load_examples(write_lines(tmp_path / "rows.jsonl", gsm8k_rows()))
    assert type(examples[0]["level"]) is int and examples[1]["answer"] == "1999" and examples[0]["notes"] == {"by": ["é"]}
    assert len(load_examples("tfds:gsm8k", "test")) == 1 and load_examples("tfds:gsm8k", limit=1) == examples[:1]
    with pytest.raises(ValueError, match=r"^tfds:gsm8k: TensorFlow Datasets answers: Unknown split 'dev'; "):
        load_examples("tfds:gsm8k", "dev")


def test_kaggle_gives_the_file_that_its_client_fetched(tmp_path, monkeypatch):
    (tmp_path / "main.csv").write_text("question,answer\nWhat is 2+2?,#### 4\n")
    asked = []
    fetch = lambda handle, path: asked.append((handle, path)) or str(tmp_path / "main.csv")   # noqa: E731
    monkeypatch.setitem(sys.modules, "kagglehub", SimpleNamespace(dataset_download=fetch))
    examples = load_examples("kaggle:somebody/grade-school/part/main.csv")
    assert asked == [("somebody/grade-school", "part/main.csv")] and examples[0]["answer"] == "4"
    for bad in "kaggle:somebody/grade-school", "kaggle:somebody/grade-school/main.txt", "kaggle:":
        with pytest.raises(ValueError, match=r"write kaggle:owner/name/file, with a file ending in .jsonl"):
            load_examples(bad)
