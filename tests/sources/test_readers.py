"""Files and hubs: the same rows from every format, and errors in one line."""

import json
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from sources import load_examples

ROWS = [{"prompt": "a", "answer": "1", "level": "02"}, {"prompt": "b", "answer": "2", "level": "NA"}]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_format_gives_the_same_examples_with_or_without_a_byte_order_mark(tmp_path, suffix):
    path = tmp_path / f"data.{suffix}"
    table = datasets.Dataset.from_list(ROWS)
    if suffix == "json":
        path.write_text('{"prompts": ["a", "é漢"]}', encoding="utf-8")
        assert load_examples(str(path)) == [{"prompt": "a"}, {"prompt": "é漢"}]
        path.write_text(json.dumps(ROWS))
    else:
        {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix](path)
    assert load_examples(str(path)) == ROWS
    assert load_examples(str(path), limit=1) == ROWS[:1]
    if suffix != "parquet":
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert load_examples(str(path)) == ROWS


def test_cells_of_a_csv_file_are_their_text_and_empty_ones_are_none(tmp_path):
    path = tmp_path / "data.csv"
    long = "x" * 200_000                                  # longer than a cell of Python's reader by default
    path.write_text(f'prompt,answer,code,level,empty\n1,NA,007,3,\n{long},None,12,-4,\n"three\n, 3",nan,2.50\n', encoding="utf-8")
    examples = load_examples(str(path))
    assert {name: [example[name] for example in examples] for name in examples[0]} == {
        "prompt": ["1", long, "three\n, 3"], "answer": ["NA", "None", "nan"], "code": ["007", "12", "2.50"],
        "level": ["3", "-4", None], "empty": [None] * 3,
    }


@pytest.mark.parametrize("name,content,message", [
    ("none.csv", None, "cannot be read as .csv: .*No such file"),
    ("blank.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "example 2: the prompt is empty"),
    ("bad.json", "{", "cannot be read as .json: Expecting property name"), ("dict.json", '{"a": 1}', "must hold a list"),
    ("list.json", "[]", "no examples"), ("pair.json", '[{"prompt": "\\uD800"}]', "'utf-8' codec can't encode"),
    ("bad.parquet", "not parquet", "cannot be read as .parquet"),
    ("columns.csv", "a,b\n1,2\n", "the row has the columns a, b"),
    ("twice.csv", "prompt,answer,answer\na,1,2\n", "the header has two columns 'answer'; rename"),
    ("cells.csv", "prompt,answer\na,1,2\nb,3,4\n", "more cells than the header; put cells with a comma in quotes"),
    ("quote.csv", 'prompt\n"a\n', "cannot be read as .csv: unexpected end"),
    ("header.csv", "prompt,answer\n", "no examples in it"),
    ("latin.csv", "prompt,answer\nh\udce9,1\n", "cannot be read as .csv: 'utf-8' codec"),
])
def test_an_unusable_file_is_refused_in_one_line_that_names_it(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"^.*{name}: .*{message}.*$"):
        load_examples(str(path))


def test_an_unknown_source_lists_what_there_is(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not built in .*countdown.* and not a file ending in .*, and the hub answers"):
        load_examples("no/such-thing")
    with pytest.raises(ValueError, match=r"arithmetik: not built in .arithmetic.*look like openai/gsm8k"):
        load_examples("arithmetik")


def test_the_part_after_the_colon_is_the_configuration(monkeypatch):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda *names, **how: asked.append((names, how)) or [{"prompt": "a"}])
    load_examples("openai/gsm8k:main", "test"), load_examples("openai/gsm8k")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"}), (("openai/gsm8k", None), {"split": "train"})]


def test_tensorflow_datasets_gives_values_of_json(monkeypatch):
    def data_source(name, split):
        assert name == "gsm8k"
        if split not in ("train", "test"):
            raise ValueError(f"Unknown split {split!r}\nmany more lines")
        rows = [{"question": b"What is 2+2?", "answer": "é\n#### 1,999".encode(), "level": np.int64(1),
            "notes": {"by": np.array([b"me"])}}]
        return rows * (2 if split == "train" else 1)

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", SimpleNamespace(data_source=data_source))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets.text", SimpleNamespace())
    examples = load_examples("tfds:gsm8k")
    demonstration = "<reasoning>é</reasoning><answer>1999</answer>"
    assert examples == 2 * [dict(
        question="What is 2+2?", prompt="What is 2+2?", answer="1999", completion=demonstration, level=1, notes={"by": ["me"]})]
    assert load_examples("tfds:gsm8k", "test") == load_examples("tfds:gsm8k", limit=1) == examples[:1]
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
