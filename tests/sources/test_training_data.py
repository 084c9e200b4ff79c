"""Examples of a run: nothing held out is trained on, and prompts that are too long are dropped."""

import random
import re

import pytest
from conftest import start_run
from test_data import USER, data_of, write_lines

from config import Config
from sources import load_examples
from sources.training_data import fit_prompts, load_data, note_unused


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


def test_a_run_reads_published_forms_but_for_columns_of_another_name_that_flags_choose(tmp_path):
    row = {"question": "How many?", "answer": "The answer is <<8=8>>8.\n#### 8", "level": "9"}
    path = write_lines(tmp_path / "data.jsonl", [row | {"question": f"How many {i}?"} for i in range(5)])
    flags = "--dataset", path, "--eval_limit", "0"
    assert [example["answer"] for example in data_of(*flags)[0]] == ["8"] * 5
    assert [example["answer"] for example in data_of(*flags, "--answer_column", "answer")[0]] == ["8"] * 5
    assert [example["answer"] for example in data_of(*flags, "--answer_column", "level")[0]] == ["9"] * 5


def test_without_shuffling_the_steps_take_the_rows_of_a_file_in_its_order_but_for_the_held_out_ones(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": f"{i}+1=?", "answer": f"{i + 1}"} for i in range(20)])
    flags = "--dataset", path, "--eval_limit", "4", "--shuffle", "false"
    train_set, held_out = data_of(*flags)
    assert held_out == data_of(*flags[:4])[1], "the same are held out"
    rest = [f"{i}+1=?" for i in range(20) if f"{i}+1=?" not in [e["prompt"] for e in held_out]]
    assert [e["prompt"] for e in train_set] == rest and len(rest) == 16
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", *flags)
    assert [e["prompt"] for _ in range(6) for e in next(run.batches)] == rest + rest[:8]     # in batches of 4


def test_splits_of_a_hub_are_chosen_by_name_or_by_share(tmp_path, capsys):
    write_lines(tmp_path / "train.jsonl", [{"prompt": f"{i}"} for i in range(10)])
    write_lines(tmp_path / "validation.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match=r'Unknown split "test".*--eval_split'):
        data_of("--dataset", str(tmp_path))
    with pytest.raises(ValueError, match=r'Unknown split "train2".*validation'):
        data_of("--dataset", str(tmp_path), "--train_split", "train2", "--eval_split", "validation")
    train_set, held_out = data_of("--dataset", str(tmp_path), "--eval_split", "validation")
    assert len(train_set) == 10 and [e["prompt"] for e in held_out] == ["a", "b"]
    train_set, held_out = data_of("--dataset", str(tmp_path), "--train_split", "train[:80%]", "--eval_split", "train[80%:]")
    assert [e["prompt"] for e in train_set] == list("01234567") and [e["prompt"] for e in held_out] == ["8", "9"]
    path = write_lines(tmp_path / "questions.jsonl", [{"prompt": "q"}])
    train_set, held_out = data_of("--dataset", path, "--eval_dataset", str(tmp_path), "--eval_split", "validation")
    assert len(train_set) == 1 and [e["prompt"] for e in held_out] == ["a", "b"]


def test_long_prompts_are_dropped_and_counted(tokenizer):
    rows = [{"prompt": f"{'x' * (50 * (i % 2))}{i}+1=?"} for i in range(8)]
    said = []
    config = Config.of(max_prompt_length=20, long_prompts="drop")
    examples, prompts = fit_prompts(rows, tokenizer, config, said.append)
    assert examples == rows[::2] and [tokenizer.decode(ids) for ids in prompts] == [f"<bos>{row['prompt']}" for row in rows[::2]]
    assert said == ["4 of 8 prompts have more than 20 tokens and are dropped"]
    with pytest.raises(ValueError, match="no prompt is left"):
        fit_prompts(rows[1::2], tokenizer, config, said.append)


@pytest.mark.parametrize("rows,said", [
    ([{"question": "q", "answer": "so\n#### 2", "level": 3}, {"question": "q", "answer": "2", "hint": "", "rating": None}], ""),
    ([{"prompt": "p", "answer": "1", "score": 0.5, "is_correct": True}, {"prompt": "p", "score": 1, "label": 0}],
     "score (2), is_correct (1), label (1)"),
    ([{"question": "q", "context": "c", "passage": "d"}], "context (1), passage (1)"),
    ([{"prompt": "q", "choices": [1, 2]}], "choices (1)"),
    ([{"question": "q", "options": ["1", "2"], "target": 1, "nums": [1]}], ""),
    ([{"prompt": "p", "messages": [USER]}], "messages (1)"),
    ([{"prompt": "p", "reward_model": {"ground_truth": "1"}, "ability": "m"}], "ability (1)"),
    ([{"problem": "p", "solution": "\\boxed{1}", "answer": "1"}], ""),
])
def test_columns_that_nothing_reads_are_named(rows, said):
    notes = []
    note_unused(load_examples(rows), {"completions", "level"}, notes.append)
    assert notes == [f"  note   no prompt, completion or reward function uses these columns: {said}"] * bool(said)


@pytest.mark.parametrize("label,values,refused", [
    ("label", [True, False, True], 1), ("label", ["True", "false", None], 1), ("label", [0, 1, 0], 0),
    ("is_correct", [False, True, True], 0), ("label", [False] * 3, 3),
])
def test_completions_with_a_false_label_are_refused(label, values, refused):
    rows, notes = [{"prompt": [USER, {"role": "assistant", "content": f"{i}"}], label: value}
        for i, value in enumerate(values)], []
    if refused:
        with pytest.raises(ValueError, match=f"--dataset: {refused} of 3 completions have a false label"):
            note_unused(load_examples(rows), {"level"}, notes.append)
    note_unused(load_examples(rows), {label}, notes.append)
    note_unused([{"prompt": "p", "label": False}], set(), notes.append)
    assert notes == []


def test_scenarios_of_an_environment_may_share_a_prompt(tmp_path):
    rows = [{"prompt": "Guess.", "answer": f"{i}"} for i in range(60)]
    path = write_lines(tmp_path / "data.jsonl", [*rows, rows[0]])
    config = Config.of(use_grpo=True, dataset=path, eval_limit=10, environment="guess_letter", max_turns=2)
    train_set, held_out = load_data(config)
    assert len(held_out) == 10 and 50 <= len(train_set) <= 51
    assert {e["answer"] for e in train_set + held_out} == {row["answer"] for row in rows}
    with pytest.raises(ValueError, match="all its prompts are held out"):
        load_data(Config.of(use_grpo=True, dataset=path, eval_limit=10))


@pytest.mark.parametrize("name,value", [("train_split", "train[:5]"), ("eval_split", "dev")])
def test_a_split_of_a_list_or_file_is_refused(tmp_path, name, value):
    rows = [{"prompt": f"{i}"} for i in range(20)]
    file = write_lines(tmp_path / "data.jsonl", rows)
    for dataset, given in (file, None), ("", rows):
        with pytest.raises(ValueError, match=rf"^--{name}={re.escape(value)}: all rows of a file or list are used"):
            load_data(Config.of(dataset=dataset, eval_limit=5, **{name: value}), given)


def test_examples_that_are_also_held_out_are_counted(tmp_path):
    lines, rows = [], [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "A "}]
    assert load_data(Config.of(eval_limit=1), rows, rows[:1], lines.append)[0] == rows[1:2]
    assert lines == ["  note   2 of 3 examples are also held out, and not trained on"]
