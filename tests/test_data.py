"""Reading examples from everywhere, turning them into tokens, and the order they come in."""

import json
import random
import re
import signal
import statistics
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_train import comparable, run_folder, weights_of
from tokenizers import processors

import train
from runs.run import Run
from runs.command_line import parse_config
from conftest import start_run
from data import PromptMemory, ShuffledBatches, load_examples, prompt_key, with_instruction
from sources.readers import View
from data import encode_completion, encode_prompt
from runs.setup import load_data
from sources.tasks import PROBLEMS
from rewards import correctness, countdown, reasoning_coherence
from runs.records import read_jsonl

GSM8K = Path(__file__).parents[1] / "../shared/data/gsm8k"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- built-in problems ---------------------------------------------------------------------------------------------


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
    for example in train:                                 # the last digit of the first sum, behind the result of the last one
        sums = re.findall(r"=(\d+)", example["completion"])
        assert int(sums[-1]) * 10 + int(sums[0]) % 10 == int(example["answer"])
    assert train == load_examples("arithmetic", "train", seed=1) != load_examples("arithmetic", "train", seed=2)
    assert load_examples("arithmetic", limit=5, seed=1) == train[:5]


def test_every_countdown_problem_is_solved_by_its_demonstration_and_never_both_trained_and_tested_on():
    train, test = load_examples("countdown", "train", seed=1), load_examples("countdown", "test", seed=2)
    assert len(train) == 9000 and len(test) == 1000
    problems = [(*sorted(e["numbers"]), e["target"]) for e in [*train, *test]]
    assert len(set(problems)) == 10_000, "the same numbers in another order are the same problem"
    for example in [*train, *test]:
        assert re.findall(r"\d+", example["prompt"]) == [str(example["target"]), *map(str, example["numbers"])]
        assert len(example["numbers"]) == 3 and all(1 <= n <= 25 for n in example["numbers"]) and 10 <= example["target"] <= 99
        reasoning, _, answer = example["completion"].removesuffix("</answer>").partition("</reasoning><answer>")
        assert abs(eval(answer) - example["target"]) < 1e-9
        assert sorted(map(int, re.findall(r"\d+", answer))) == sorted(example["numbers"])
        for step in reasoning.removeprefix("<reasoning>").split():
            left, right = step.split("=")
            assert abs(eval(left) - int(right)) < 1e-9 and int(right) > 0
    columns = {name: [e[name] for e in train] for name in ("numbers", "target")}
    texts = [e["completion"] for e in train]
    assert set(countdown(texts, **columns)) == set(reasoning_coherence(texts)) == {1.0}
    assert all(any(part in text for text in texts) for part in ("+", "-", "*", "/", "<answer>(", ")</answer>"))
    assert train == load_examples("countdown", "train", seed=1) != load_examples("countdown", "train", seed=2)


@pytest.mark.slow
def test_a_run_on_countdown_needs_its_reward_and_says_what_it_earned(tmp_path, capsys):
    flags = ["--use_grpo", "--dataset", "countdown", "--max_steps", "1", "--cold_start_steps", "0"]
    folder = run_folder(tmp_path / "run", *flags, "--reward_functions", "countdown", "reasoning_coherence")
    assert "reward/countdown" in read_jsonl(folder / "metrics.jsonl")[1]
    assert "held out at step 1: countdown 0.000 points, reasoning_coherence 0." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_folder(tmp_path / "other", *flags)
    assert "correctness: needs the column answer, which countdown does not have" in capsys.readouterr().err


# ---- files ---------------------------------------------------------------------------------------------------------


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
    path.write_text('{"prompts": ["a", "é漢"]}', encoding="utf-8")
    assert load_examples(str(path)) == [{"prompt": "a"}, {"prompt": "é漢"}]


def test_other_column_names_and_whole_conversations(tmp_path):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "q", "solution": 5, "response": "r"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": "q", "answer": "5", "completion": "r"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4"}]
    path.write_text(json.dumps({"prompt": chat[:1], "completion": chat[1:], "answer": "2020-01-01"}) + "\n")
    assert load_examples(str(path)) == [{"prompt": chat[:1], "completion": "4", "answer": "2020-01-01"}]


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
    batches = ShuffledBatches(examples, 10, seed=0)
    for _ in range(len(examples) // 10):
        next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.1 * Path(path).stat().st_size


def test_columns_can_be_named(tmp_path):
    row = {"frage": "q", "prompt": "not this", "solution": "because", "gold": 7}
    path = write_lines(tmp_path / "data.jsonl", [row])
    named = load_examples(path, columns={"prompt": "frage", "answer": "gold", "completion": "solution"})
    assert named == [{"prompt": "q", "answer": "7", "completion": "because"}]
    demonstrated = load_examples(path, columns={"prompt": "frage", "answer": "", "completion": "solution"})
    assert demonstrated == [{"prompt": "q", "completion": "because", "gold": 7}], "not the answer, which it would be otherwise"
    assert load_examples(path, columns={"answer": "gold"}) == [{"frage": "q", "prompt": "not this", "solution": "because",
                                                                "answer": "7"}]
    both = load_examples(path, columns={"prompt": "frage", "answer": "solution", "completion": "solution"})
    assert both == [{"prompt": "q", "answer": "because", "completion": "because", "gold": 7}]
    config = parse_config(["--dataset", path, "--eval_limit", "0", "--prompt_column", "frage", "--answer_column", "gold"])
    assert [e["prompt"] for e in load_data(config)[0]] == ["q"]


@pytest.mark.parametrize("name", ["prompt", "answer", "completion"])
def test_a_column_that_is_not_there_lists_those_that_are(tmp_path, name):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "1"}])
    with pytest.raises(ValueError, match=rf"--{name}_column=gold: .*data.jsonl: example 1 has columns prompt, answer$"):
        load_examples(path, columns={name: "gold"})


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", "", "the file is empty"),
        ("bad.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("list.jsonl", '{"prompt": "a"}\n[1]\n', "line 2 is not an object"),
        ("columns.jsonl", '{"text": "a", "label": 1}\n', "columns text, label; it needs one of prompt"),
        ("number.jsonl", '{"prompt": 5}\n', "must be text or chat messages"),
        ("blank.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', "example 2: the prompt is empty"),
        ("no_chat.jsonl", '{"prompt": []}\n', "the prompt is empty"),
        ("chat.jsonl", '{"prompt": [{"text": "a"}]}\n', "chat messages must look like"),
        ("mute.jsonl", '{"prompt": [{"role": "user"}]}\n', "chat messages must look like"),
        ("strings.jsonl", '{"prompt": ["a"]}\n', "chat messages must look like"),
        ("null.jsonl", '{"prompt": null}\n', "columns prompt; it needs one of prompt, question"),
        ("two.jsonl", '{"prompt": "a", "completion": [{"content": "b"}, {"content": "c"}]}\n', "must be text, an assistant"),
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


@pytest.mark.parametrize("source", PROBLEMS)
def test_a_built_in_problem_has_no_other_split(source):
    with pytest.raises(ValueError, match=f"{source}: there is no split validation; it has train and test"):
        load_examples(source, "validation")


def test_lines_that_are_not_json_can_be_left_out_and_are_counted(tmp_path, capsys):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n\n{"prompt": "b"}\n{"prompt": "c')
    assert load_examples(str(path), bad_lines="skip") == [{"prompt": "a"}, {"prompt": "b"}]
    assert capsys.readouterr().err == f"{path}: left out 2 of 4 lines that are not JSON objects: [2, 5]\n"
    path.write_text('{"prompt": "a"}\n' + "nonsense\n" * 9)
    load_examples(str(path), bad_lines="skip")
    assert "left out 9 of 10 lines that are not JSON objects: [2, 3, 4, 5, 6]" in capsys.readouterr().err
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')          # Latin-1
    assert load_examples(str(path)) == [{"prompt": "caf\ufffd"}]


@pytest.mark.parametrize("answer,number,demonstration", [
    ("2+2=<<2+2=4>>4, 4+1=<<4+1=5>>5\n####  5 ", "5", "<reasoning>2+2=4, 4+1=5</reasoning><answer>5</answer>"),
    ("a #### b\n#### 1,234,000", "1234000", "<reasoning>a #### b</reasoning><answer>1234000</answer>"),
])
def test_an_answer_in_gsm8ks_form_is_taken_apart(tmp_path, answer, number, demonstration):
    rows = [{"question": "q", "answer": answer}, {"question": "q", "answer": answer, "completion": "mine"}]
    examples = load_examples(write_lines(tmp_path / "data.jsonl", rows))
    assert examples[0] == {"prompt": "q", "answer": number, "completion": demonstration}
    assert examples[1] == {"prompt": "q", "answer": number, "completion": "mine"}


def test_a_column_without_a_value_is_as_good_as_not_there(tmp_path):
    rows = [{"prompt": None, "question": "q", "answer": None, "target": 3}, {"prompt": "p", "answer": None}]
    examples = load_examples(write_lines(tmp_path / "data.jsonl", rows))
    assert examples == [{"prompt": "q", "answer": "3"}, {"prompt": "p", "answer": None}]


# ---- hubs ----------------------------------------------------------------------------------------------------------


def test_an_unknown_source_lists_what_there_is(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"not built in .*countdown.* and not a file ending in .*, and the hub answers"):
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


def test_a_folder_that_datasets_understands_is_read_by_split(tmp_path, monkeypatch):
    for split, prompt in ("train", "a"), ("test", "b"):
        (tmp_path / f"{split}.csv").write_text(f"question,answer\n{prompt},1\n")
    assert load_examples(str(tmp_path), "train") == [{"prompt": "a", "answer": "1"}]
    assert load_examples(str(tmp_path), "test") == [{"prompt": "b", "answer": "1"}]
    (tmp_path / "test.csv").unlink()
    with pytest.raises(ValueError, match=r'Unknown split "test".*; should it have no test split: --eval_dataset') as error:
        load_examples(str(tmp_path), "test")
    assert "\n" not in str(error.value)


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
    with pytest.raises(ValueError, match=r"^tfds:gsm8k: TensorFlow Datasets answers: Unknown split 'dev'$"):
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


@pytest.mark.parametrize("source,package,words", [
    ("tfds:gsm8k", "tensorflow_datasets", ["pip install tensorflow_datasets array_record importlib_resources"]),
    ("kaggle:a/b/c.csv", "kagglehub", ["pip install kagglehub"]),
])
def test_a_client_that_is_not_installed_is_one_line_with_what_to_install(source, package, words, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)       # what makes an import fail
    with pytest.raises(ValueError) as error:
        load_examples(source)
    assert str(error.value).startswith(source) and all(word in str(error.value) for word in [*words, package])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source,package,function,words", [
    ("tfds:gsm9k", "tensorflow_datasets", "data_source", ["TensorFlow Datasets answers: no such"]),
    ("kaggle:a/b/c.csv", "kagglehub", "dataset_download", ["Kaggle answers: no such", "kaggle.json", "KAGGLE_USERNAME"]),
])
@pytest.mark.parametrize("error", [RuntimeError("no such thing\nand a stack of lines"), ConnectionError()])
def test_what_a_client_cannot_reach_is_one_line(source, package, function, words, error, monkeypatch):
    def fail(*names, **how):
        raise error

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{function: fail}))
    monkeypatch.setitem(sys.modules, f"{package}.text", SimpleNamespace())
    with pytest.raises(ValueError) as raised:
        load_examples(source)
    said = str(raised.value)
    assert said.startswith(f"{source}: ") and "\n" not in said
    assert all(word.replace("no such", "no such" if str(error) else "ConnectionError") in said for word in words)


# ---- training and held-out examples --------------------------------------------------------------------------------


def data_of(*flags):
    return load_data(parse_config([*flags]))


def test_what_is_held_out_is_never_trained_on(tmp_path):
    train = ["a b", "c", "A  B\n", "d", "e ", "f"]
    rows = [{"prompt": p} for p in train] + [{"prompt": [{"role": "user", "content": " D"}]}]
    train_file = write_lines(tmp_path / "train.jsonl", rows)
    test_file = write_lines(tmp_path / "test.jsonl", [{"prompt": p} for p in (" a b", "d", "E")])
    train_set, held_out = data_of("--dataset", train_file, "--eval_dataset", test_file)
    assert [e["prompt"] for e in train_set] == ["c", "f"] and len(held_out) == 3
    assert len(data_of("--dataset", train_file, "--eval_limit", "0")[0]) == 7
    with pytest.raises(ValueError, match="all its prompts are held out"):
        data_of("--dataset", test_file, "--eval_dataset", test_file)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_of_one_file_some_is_set_aside_as_it_always_was(tmp_path, seed):
    rows = [{"prompt": f"{i % 40}", "number": i} for i in range(100)]
    train_set, held_out = data_of("--dataset", write_lines(tmp_path / "data.jsonl", rows), "--eval_limit", "12", "--seed", seed)
    order = random.Random(int(seed)).sample(rows, 100)
    assert held_out == order[:12]
    taken = {row["prompt"] for row in held_out}
    assert train_set == [row for row in order[12:] if row["prompt"] not in taken] and len(train_set) < 88
    assert len(data_of("--dataset", str(tmp_path / "data.jsonl"))[1]) == 20, "a fifth at most"


@pytest.mark.parametrize("task", PROBLEMS)
def test_no_built_in_problem_is_both_trained_and_tested_on(task):
    train_set, held_out = data_of("--dataset", task, "--eval_limit", "1000", "--seed", "3")
    assert (len(train_set), len(held_out)) == ((1246, 314) if task == "guess_letter" else (9000, 1000))
    assert not {e["prompt"] for e in train_set} & {e["prompt"] for e in held_out}


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside this checkout")
def test_gsm8k_is_never_both_trained_and_tested_on():
    flags = ["--dataset", str(GSM8K / "train.jsonl"), "--bad_lines", "skip", "--instruction", "Think."]
    train_set, held_out = data_of(*flags, "--eval_dataset", str(GSM8K / "test.jsonl"), "--eval_limit", "2000")
    assert len(held_out) == 1319 and len(train_set) >= 7400 and train_set[0]["prompt"].startswith("Think.\n")
    assert not {prompt_key(e["prompt"]) for e in train_set} & {prompt_key(e["prompt"]) for e in held_out}
    aside, held_out = data_of(*flags)
    assert len(held_out) == 256 and len(aside) >= 7200
    assert not {prompt_key(e["prompt"]) for e in aside} & {prompt_key(e["prompt"]) for e in held_out}


def test_prompts_that_say_the_same_have_one_key_and_others_have_not():
    same = ["What is  2+2?", "what is\n2+2? ", [{"role": "user", "content": "What is 2+2?"}]]
    assert len({prompt_key(prompt) for prompt in same}) == 1
    others = ["What is 2+3?", [{"role": "system", "content": "What is 2+2?"}], [5, 6], [5, 7],
              [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]]
    assert len({prompt_key(prompt) for prompt in [same[0], *others]}) == 6


@pytest.mark.parametrize("limit", [20, 1])
def test_a_truncated_prompt_keeps_its_bos_and_its_end(tmp_path, limit):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "x" * 30 + "1+1=?", "answer": "2"}])
    flags = ["--dataset", path, "--max_prompt_length", str(limit), "--long_prompts", "truncate"]
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", *flags)
    assert run.tokenizer.decode(run.train_set[0]["prompt"]) == "<bos>" + ("x" * 30 + "1+1=?")[36 - limit :]
    assert run.longest_prompt == limit and run.train_set[0]["answer"] == "2"


def test_demonstrations_and_lengths_are_those_of_the_prompts_that_are_left(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "x" * n, "answer": str(n)} for n in (3, 90, 7, 80, 5)])
    flags = ["--dataset", path, "--max_prompt_length", "20", "--long_prompts", "drop"]
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", *flags)
    assert [e["answer"] for e in run.train_set] == ["3", "7", "5"] and run.longest_prompt == 8, "with BOS"


# ---- TRL's formats -------------------------------------------------------------------------------------------------

USER, ASSISTANT = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "<answer>2</answer>"}
SYSTEM = {"role": "system", "content": "Add."}
FORMATS = {                     # row, and the example that it is
    "prompt only": ({"prompt": "1+1=?"}, {"prompt": "1+1=?"}),
    "prompt and other columns": (
        {"prompt": "1+1=?", "level": 3, "rejected": "3"}, {"prompt": "1+1=?", "level": 3, "rejected": "3"}),
    "prompt and completion": (
        {"prompt": "1+1=?", "completion": "2"}, {"prompt": "1+1=?", "completion": "2"}),
    "conversational prompt": ({"prompt": [SYSTEM, USER]}, {"prompt": [SYSTEM, USER]}),
    "conversational prompt and completion": (
        {"prompt": [USER], "completion": [ASSISTANT]}, {"prompt": [USER], "completion": ASSISTANT["content"]}),
    "messages": ({"messages": [SYSTEM, USER, ASSISTANT]}, {"prompt": [SYSTEM, USER], "completion": ASSISTANT["content"]}),
    "messages of several turns": (
        {"messages": [USER, ASSISTANT, USER, ASSISTANT]},
        {"prompt": [USER, ASSISTANT, USER], "completion": ASSISTANT["content"]}),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_trls_formats_are_read(name, suffix, tmp_path):
    import datasets

    row, example = FORMATS[name]
    table, path = datasets.Dataset.from_list([row | {"solution": "2"}] * 3), tmp_path / f"data.{suffix}"
    (table.to_json if suffix == "jsonl" else table.to_parquet)(path)
    assert load_examples(str(path)) == [example | {"answer": "2"}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt and completion", "conversational prompt", "messages"])
def test_trls_formats_and_reward_functions_run_unchanged(name, tmp_path):
    row, example = FORMATS[name]
    path = write_lines(tmp_path / "data.jsonl", [row | {"solution": str(i)} for i in range(8)])
    chat = isinstance(example["prompt"], list)
    (tmp_path / "trl.py").write_text(
        "def points(prompts, completions, completion_ids, answer, **kwargs):\n"
        f"    texts = [c[0]['content'] if {chat} else c for c in completions]\n"
        f"    assert all(p == {example['prompt']!r} for p in prompts) and len(answer) == len(texts)\n"
        "    return [float(len(ids) % 5 + len(text) % 3) for ids, text in zip(completion_ids, texts)]\n"
    )
    cold = "1" if "completion" in example else "0"
    folder = run_folder(
        tmp_path / "run", "--use_grpo", "--dataset", path, "--eval_limit", "0", "--cold_start_steps", cold, "--max_steps", "1",
        "--reward_functions", f"{tmp_path}/trl.py:points",
    )
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [m["phase"] for m in lines] == ["cold_start"] * int(cold) + ["grpo"] and lines[-1]["grad_norm"] > 0


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

    from runs.startup_check import check_setup

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


def test_without_a_memory_the_order_depends_on_seed_and_position_alone():
    def as_it_always_was(seed):
        for epoch in range(3):
            order = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(order)
            yield from order

    for seed in 0, 1, 12:
        batches = ShuffledBatches(list(range(7)), batch_size=3, seed=seed)
        assert [e for _ in range(7) for e in next(batches)] == list(as_it_always_was(seed))
        assert batches.position == 21 and batches.take(0) == []


# ---- a memory of prompts -------------------------------------------------------------------------------------------


def examples_of(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


def test_a_memory_of_nothing_leaves_the_order_as_it_is():
    examples = examples_of(*map(str, range(10)))
    plain, preferring = (ShuffledBatches(examples, 4, 0, memory) for memory in (None, PromptMemory()))
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]
    preferring.memory.record(["3"], [[0.7, 0.7]])         # one reward everywhere says nothing about any prompt
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]


def test_the_chance_of_a_prompt_is_the_formula_of_the_docstring():
    generator = random.Random(0)
    prompts = [f"prompt {i}" for i in range(5)]
    rounds = [[[generator.choice([0.3, 1.3, 0.5]) for _ in range(4)] for _ in prompts] for _ in range(3)]
    memory, all_of = PromptMemory(), {prompt: [] for prompt in prompts}
    for groups in rounds:
        memory.record(prompts, groups)
        for prompt, group in zip(prompts, groups):
            all_of[prompt] += group
    lowest, highest = 0.3, 1.3
    for prompt, rewards in all_of.items():
        expected = 4 * statistics.pvariance([*rewards, lowest, highest]) / (highest - lowest) ** 2
        assert memory.chance(prompt) == pytest.approx(expected, rel=1e-12) and 0 < expected <= 1
    assert memory.chance("never asked") == 1.0


@pytest.mark.parametrize("offset,scale", [(0.0, 1.0), (-2.0, 5.0)])
def test_with_two_rewards_the_chance_is_that_of_laplaces_success_rate(offset, scale):
    memory, count = PromptMemory(), 8
    for right in range(count + 1):
        memory.record([f"{right} right"], [[offset + scale * (i < right) for i in range(count)]])
    for right in range(count + 1):
        p = (right + 1) / (count + 2)
        assert memory.chance(f"{right} right") == pytest.approx(4 * p * (1 - p))
    assert memory.chance("4 right") == pytest.approx(1.0) and memory.chance("new") == 1.0
    four_failures = PromptMemory()
    four_failures.record(["a", "b"], [[0.0] * 4, [1.0]])
    assert four_failures.chance("a") == pytest.approx(0.5556, abs=1e-4), "what the docstring says"


def test_a_memory_leaves_out_what_could_not_be_scored_and_knows_prompts_by_what_they_say():
    memory, other = PromptMemory(), PromptMemory()
    memory.record(["a b", "c"], [[0.0, float("nan"), 1.0], [float("nan")] * 3])
    other.record(["A\nb"], [[0.0, 1.0]])
    assert memory.chance("a b") == other.chance("a  b") and (memory.lowest, memory.highest) == (0.0, 1.0)
    assert memory.chance("c") == 1.0
    memory.record([[5, 6]], [[1.0, 1.0]])                 # a truncated prompt is token ids
    assert memory.chance([5, 6]) == 0.75 and memory.chance([5, 7]) == 1.0


def test_prompts_are_handed_out_by_their_chance_and_none_is_ever_forgotten():
    memory, examples = PromptMemory(), examples_of("never", "mixed", "always", "new")
    memory.record(["never", "mixed", "always"], [[0.0] * 8, [0.0, 1.0] * 4, [1.0] * 18])
    batches = ShuffledBatches(examples, 5, seed=0, memory=memory)
    counts = Counter(example["prompt"] for _ in range(1000) for example in next(batches))
    epochs = batches.position / 4
    assert abs(counts["mixed"] - epochs) <= 1 and abs(counts["new"] - epochs) <= 1
    for prompt in "never", "always":
        p = 1 / 10 if prompt == "never" else 19 / 20
        expected = 4 * p * (1 - p) * epochs
        assert abs(counts[prompt] - expected) < 4 * expected**0.5


def test_position_and_memory_are_the_whole_state():
    def outcome(prompt, at):
        return [float((hash_of(prompt) + i + at) % 3 == 0) if prompt > "5" else 0.0 for i in range(4)]

    def hash_of(prompt):
        return sum(map(ord, prompt))

    def go_on(batches, steps):
        taken = []
        for _ in range(steps):
            batch = next(batches)
            batches.memory.record([e["prompt"] for e in batch], [outcome(e["prompt"], batches.position) for e in batch])
            taken += [e["prompt"] for e in batch]
        return taken

    examples = examples_of(*map(str, range(10)))
    whole = ShuffledBatches(examples, 3, 7, PromptMemory())
    first, rest = go_on(whole, 9), None
    state = json.loads(json.dumps(vars(whole.memory)))    # plain numbers and nothing else
    resumed = ShuffledBatches(examples, 3, 7, PromptMemory(**state))
    resumed.position = whole.position
    rest = go_on(whole, 12)
    assert go_on(resumed, 12) == rest and whole.position == resumed.position > (9 + 12) * 3, "some were passed over"
    assert go_on(ShuffledBatches(examples, 3, 7, PromptMemory()), 21) == first + rest


@pytest.mark.slow
def test_a_run_that_prefers_mixed_prompts_remembers_them_when_it_is_resumed(tmp_path, monkeypatch):
    (tmp_path / "some.py").write_text(                    # half of the prompts earn nothing, whatever is answered
        "def some(completions, prompts, **columns):\n"
        "    return [float(len(c) % 2 * int(p[0]) % 2) for c, p in zip(completions, prompts)]\n"
    )
    flags = (
        f"--use_grpo --cold_start_steps 0 --limit 8 --eval_limit 0 --num_epochs 9 --max_steps 9 --learning_rate 1e-3 "
        f"--save_steps 0 --prefer_mixed --reward_functions {tmp_path}/some.py:some"
    ).split()
    positions, real = {}, Run.log_step

    def note(run, *rest):
        real(run, *rest)
        positions[run.folder.path.name, run.progress.step] = run.batches.position, dict(run.progress.prompt_memory.earned)

    monkeypatch.setattr(Run, "log_step", note)
    whole = run_folder(tmp_path / "whole", *flags)

    def stop(run, *rest):
        note(run, *rest)
        if run.progress.step == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log_step", stop)
    stopped = run_folder(tmp_path / "stopped", *flags)
    monkeypatch.setattr(Run, "log_step", note)
    train.main(["--output_dir", str(stopped), "--resume"])
    assert comparable(stopped) == comparable(whole)
    assert all(positions["whole", step] == positions["stopped", step] for step in range(1, 10))
    position, earned = positions["whole", 9]
    assert position > 9 * 4 and sum(count for count, *_ in earned.values()) == 9 * 4 * 4 and len(earned) == 8
    for (name, left), (_, right) in zip(weights_of(whole).items(), weights_of(stopped).items(), strict=True):
        assert left.equal(right), name


def test_what_dynamic_sampling_replaces_is_remembered_too(tmp_path):
    (tmp_path / "none.py").write_text("def none(completions, **columns):\n    return [0.5] * len(completions)\n")
    flags = f"--use_grpo --cold_start_steps 0 --dynamic_sampling 2 --reward_functions {tmp_path}/none.py:none"
    run = start_run(tmp_path, *flags.split())
    train.grpo_training_step(run, next(run.batches))
    assert len(run.progress.prompt_memory.earned) == 3 * 4 and set(run.progress.prompt_memory.earned.values()) == {(4, 2.0, 1.0)}
