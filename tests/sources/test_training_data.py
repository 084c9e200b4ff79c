"""Examples of a run: nothing held out is trained on, and prompts that are too long are dropped."""

import random

import pytest
from conftest import start_run
from test_data import data_of, write_lines

from config import Config, ModelConfig
from engine.models import load_any_policy, save_any_policy
from sources import load_examples
from sources.training_data import fit_prompts, leave_out_rejected, note_unused
from test_chat_template import published

USER = {"role": "user", "content": "1+1=?"}


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
    assert fit_prompts(rows, tokenizer, config, said.append) == (rows[::2], 6)     # the longest that is left, with BOS
    assert said == ["4 of 8 prompts have more than 20 tokens and are dropped"]
    with pytest.raises(ValueError, match="no prompt is left"):
        fit_prompts(rows[1::2], tokenizer, config, said.append)


@pytest.mark.parametrize("rows,said", [
    ([{"question": "q", "answer": "so\n#### 2", "level": 3}, {"question": "q", "answer": "2", "hint": "", "rating": None}], ""),
    ([{"prompt": "p", "answer": "1", "score": 0.5, "is_correct": True}, {"prompt": "p", "score": 1, "label": 0}], "score (2), is_correct (1), label (1)"),
    ([{"question": "q", "context": "c", "passage": "d"}], "context (1), passage (1)"), ([{"question": "q", "choices": [1, 2]}], "choices (1)"),
    ([{"question": "q", "options": ["1", "2"], "target": 1, "nums": [1]}], ""), ([{"prompt": "p", "messages": [USER]}], "messages (1)"),
    ([{"prompt": [USER | {"name": "Bob", "id": None}], "tools": [{"name": "f"}]}], "tools (1), key name of user messages (1)"),
    ([{"prompt": [{"role": "system", "content": "a"}, USER], "system": "b"}], "system (1)"), ([{"instruction": "i", "input": {"a": 1}}], "input (1)"),
    ([{"prompt": "p", "tools": "hammer"}, {"prompt": "p"}], "tools (1)"),
    ([{"prompt": "p", "reward_model": {"ground_truth": "1"}, "ability": "m"}], "reward_model (1), ability (1)"),
])
def test_columns_that_nothing_reads_and_keys_that_are_not_written_are_named(rows, said):
    notes = []
    note_unused(load_examples(rows), {"completions", "level"}, published("ChatML"), notes.append)
    assert notes == [f"  note   no prompt, completion or reward function uses these columns and keys: {said}"] * bool(said)


@pytest.mark.parametrize("label,values,kept", [
    ("label", [True, False, True], [0, 2]), ("label", ["True", "false", None], [0, 2]), ("label", [0, 1, 0], [0, 1, 2]),
    ("is_correct", [False, True, True], [0, 1, 2]), ("level", [False, True, True], [0, 1, 2]), ("label", [False] * 3, None),
])
def test_completions_with_a_false_label_are_left_out(label, values, kept):
    rows, notes = [{"prompt": [USER, {"role": "assistant", "content": f"{i}"}], label: value} for i, value in enumerate(values)], []
    if kept is None:
        with pytest.raises(ValueError, match="--dataset: the label of all completions is false"):
            leave_out_rejected(load_examples(rows), set(), notes.append)
        return
    named, tokenizer = {"level"}, published("ChatML")
    left = leave_out_rejected(load_examples(rows), named, notes.append)
    assert [int(example["completion"]) for example in left] == kept
    note_unused(left, named, tokenizer, notes.append)
    assert notes[: len(kept) < 3] == ["  note   1 of 3 completions have a false label and are not used"] * (len(kept) < 3)
    assert len(notes) == 1 - (label == "level"), "the label is used, or named once"
    assert leave_out_rejected([{"prompt": "p", "label": False}], set(), notes.append), "no completion is rejected"


def test_a_run_says_what_it_does_not_use(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=?", "answer": f"{i + 1}", "completion": "2", "level": 3, "label": i > 3, "scorer": "x"} for i in range(9)]
    (tmp_path / "r.py").write_text("def f(completions, level, **columns): return [0.0] * len(completions)")
    path = write_lines(tmp_path / "data.jsonl", rows)
    run = start_run(tmp_path / "run", "--use_grpo", "--dataset", path, "--eval_limit", "0", "--reward_functions", f"{tmp_path}/r.py:f")
    assert len(run.train_set) == 5 and [line for line in capsys.readouterr().out.splitlines() if "note" in line] == [
        "  note   4 of 9 completions have a false label and are not used",
        "  note   no prompt, completion or reward function uses these columns and keys: scorer (5)"]


def test_prompts_with_special_tokens_are_counted(tokenizer):
    rows, said = [{"prompt": prompt} for prompt in ("1+1=?", "<|im_end|>?", [{"role": "user", "content": "<bos>"}])], []
    assert fit_prompts(rows, published("ChatML"), Config(), said.append)[0] == rows
    assert said == ["2 of 3 prompts have the text of special tokens, which is removed"]
    fit_prompts([{"prompt": "<eos>"}], tokenizer, Config(), said.append)
    assert len(said) == 1, "without a template a text stays as it is"


@pytest.mark.parametrize("held_out", [False, True])
def test_a_message_that_the_template_leaves_out_stops_a_run_at_its_start(tmp_path, held_out):
    model, tokenizer = load_any_policy(ModelConfig())
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    save_any_policy(model, tokenizer, tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "1+1=?"}], "completion": "2"} for _ in range(3)]
    good = write_lines(tmp_path / "good.jsonl", [{"prompt": "1?", "completion": "1"}])
    rows[0]["prompt"].insert(0, {"role": "developer", "content": "Add."})
    paths = [write_lines(tmp_path / "whole.jsonl", rows), good]
    with pytest.raises(ValueError, match=r"^the prompt lacks the developer's message 'Add[.]'"):
        start_run(tmp_path / "run", "--dataset", paths[held_out], "--eval_dataset", paths[not held_out], "--eval_limit", "8", "--model_path", str(tmp_path / "model"))


def test_a_demonstration_longer_than_the_models_positions_is_one_line_before_training(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", [{"prompt": "p", "completion": "x" * n} for n in (9, 9, 99)])
    model, tokenizer = load_any_policy(ModelConfig())
    model.config.max_position_embeddings = 64
    save_any_policy(model, tokenizer, tmp_path / "model")
    with pytest.raises(ValueError, match=r"data.jsonl: example 3 and its completion have 10\d tokens, but the model has 64 positions; remove or shorten it"):
        start_run(tmp_path / "run", "--dataset", path, "--eval_limit", "0", "--model_path", str(tmp_path / "model"), "--generation_max_length", "8")
