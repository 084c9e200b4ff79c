"""Setting up a run: settings that are filled in, and changed settings of a resumed run."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import quick_config, start_run

import train
from config import Config
from engine.fingerprints import fingerprint_of_examples
from runs.checkpoint import latest_checkpoint
from runs.plan import config_on_device
from runs.resume import compare_settings
from runs.setup import set_up


def test_float16_is_refused_on_xla_where_its_loss_would_not_be_scaled():
    config = Config.from_profile("demo", use_grpo=True, precision="float16")
    with pytest.raises(ValueError, match=r"^--precision=float16: on XLA the loss would not be scaled; use bfloat16$"):
        config_on_device(config, torch.device("xla"))
    assert config_on_device(config, torch.device("cpu")).model.precision == "float16"


KL = {"use_grpo": True, "use_kl_penalty": True}
NEW, OWN = {"dataset": "mine.jsonl"}, {"dataset": "mine.jsonl", "eval_dataset": "held_out.jsonl"}


@pytest.mark.parametrize("begun,found,flags,refused", [
    (NEW, {}, {"dataset": "/other/path/mine.jsonl"}, ""), (NEW, {"dataset": "b"}, {}, "dataset=mine.jsonl: its examples have changed since this run began (a, now b);"),
    (NEW, {"dataset": "b"}, {"instruction": "Add."}, "dataset=mine.jsonl: its examples have changed"),
    (NEW, {"dataset": "b"}, {"dataset": "more.jsonl"}, "dataset=more.jsonl: this run began with 'mine.jsonl'"),
    (OWN, {"dataset": "b"}, {"dataset": "more.jsonl"}, ""), (OWN, {"dataset": "b"}, {"learning_rate": 0.1}, "dataset=mine.jsonl: its examples have changed since this run began (a, now b);"),
    (OWN, {"eval_dataset": "d"}, {}, "eval_dataset=held_out.jsonl: its examples have changed since this run began (c, now d);"), (OWN, {"eval_dataset": "d"}, {"eval_limit": 3}, ""),
    (NEW, {"dataset": "b"}, {"seed": 1}, "seed=1: this run began with 0;"), (NEW, {"dataset": "b"}, {"eval_limit": 5}, "eval_limit=5: this"),
    (KL, {}, {"reference_path": "t"}, "reference_path=t: this run began with '';"), (KL | {"reference_path": "t"}, {}, {"reference_path": ""}, "reference_path=: this run"),
    (KL | {"reference_path": "t"}, {}, {"reference_path": "moved"}, ""), ({"dataset": "python:list"}, {"dataset": "b"}, {"seed": 1}, "seed=1: this run"), ({}, {}, {"eval_limit": 5}, ""),
    (KL, {}, {"use_grpo": False}, "use_grpo=False: this"), (KL, {}, {"cold_start_steps": 3}, "cold_start_steps=3: this"),
    (KL, {}, {"lora_alpha": 8.0}, "lora_alpha=8.0: this"), (KL, {}, {"lora_rank": 8}, "lora_rank=8: this"),
    (KL, {}, {"model_path": "other"}, "model_path=other: this"), (KL, {}, {"profile": "balanced"}, "profile=balanced: this"),
    (KL, {}, {"kl_penalty_coef": 0.0}, "use_kl_penalty=False: this"), (KL, {}, {"use_value_head": True}, "use_value_head=True: this"),
    ({}, {"dataset": "b"}, {}, "dataset=arithmetic: its examples have changed since this run began (a, now b);"), ({}, {"dataset": "b"}, {"seed": 1}, ""),
])
def test_other_data_and_settings_of_another_state_are_refused_in_a_resumed_run(tmp_path, monkeypatch, begun, found, flags, refused):
    begun, fingerprints = Config.of(**begun), {"dataset": "a", "eval_dataset": "c"}
    now, state = Config.of(**begun.flags | flags), {"settings": begun.as_dict(), "fingerprints": fingerprints, "own_functions": []}
    monkeypatch.setattr("runs.resume.read_state", lambda *_, **__: state)
    with pytest.raises(ValueError, match=f"^--{re.escape(refused)}[^\n]* with a checkpoint as --model_path$") if refused else nullcontext():
        compare_settings(now, [], tmp_path / "step-1", print, fingerprints | found)
    del state["own_functions"]
    with pytest.raises(ValueError, match=r"step-1: of an earlier version; start a new run"):
        compare_settings(now, [], tmp_path / "step-1", print, fingerprints)


def test_a_resumed_run_has_the_rows_of_its_file_and_no_more(tmp_path):
    rows = [json.dumps({"prompt": f"{n}+1=?", "answer": str(n + 1)}) for n in range(21)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows[:20]))
    config = quick_config(tmp_path / "run", dataset=str(tmp_path / "mine.jsonl"), max_steps=1)
    train.train(config)
    again = replace(config, training=replace(config.training, resume=True))
    checked = replace(again, training=replace(again.training, check=True))
    assert set_up(checked).trainer_state.epoch == 0       # reward functions get it, before the data has an order
    train.train(again)
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"^--dataset=\S+: its examples have changed since this run began .16 examples, \w+, now 17 examples, \w+.; restore them"):
        train.train(again)


def test_files_of_rewards_and_teacher_that_have_changed_are_noted(tmp_path, capsys, folder):
    file, teacher = tmp_path / "mine.py", Path(shutil.copytree(folder, tmp_path / "teacher"))
    file.write_text("def length(completions, **columns):\n    return list(map(len, completions))\n")
    config = quick_config(
        tmp_path / "run", max_steps=1, reward_functions=[f"{file}:length"], reference_path=str(teacher), use_kl_penalty=True)
    train.train(config)
    again = replace(config, training=replace(config.training, resume=True))
    capsys.readouterr()
    for edit, noted in (lambda: None, []), (lambda: file.write_text(file.read_text() + "\n"), ["reward functions"]), (
            lambda: (teacher / "config.json").open("a").write(" "), ["reward functions", "teacher"]):
        edit()
        train.train(again)
        assert re.findall(r"note   (.*): files have changed since this run began", capsys.readouterr().out) == noted


def test_examples_have_the_same_fingerprint_in_every_process_and_other_ones_another():
    def rows(order, text="a"):
        return [{"prompt": text, "f": lambda: 0, "set": set(order), "object": object(), 1: "a key", (2, 3): None}] * 2

    first = fingerprint_of_examples(rows([0, 8]))
    assert [*{0, 8}] != [*{8, 0}] and first == fingerprint_of_examples(rows([8, 0])) and first.startswith("2 examples, ")
    others = rows([0, 8], "b"), rows([0, 1]), rows([0, 8])[:1], [*rows([0, 8]), {}]
    assert len({first, *map(fingerprint_of_examples, others)}) == 5


def test_resuming_says_what_changed_and_refuses_what_does_not_fit(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "out"))
    begun = latest_checkpoint(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = ["--output_dir", str(folder), "--resume"]
    with pytest.raises(SystemExit) as stop:
        train.main([*again, "--max_steps", "9"])          # its schedule has ended
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "--max_steps=9: this run began with" in error and len(error.strip().splitlines()) == 1
    train.main([*again, "--learning_rate", "0.05"])
    said = capsys.readouterr().out
    assert f"from {begun}" in said and "changed: learning_rate 0.0001 -> 0.05" in said and "this run is complete" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(SystemExit):
        train.main(again)
    assert "is complete and its checkpoints are gone" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before[folder / "metrics.jsonl"]


def test_the_tokens_of_a_forward_pass_are_chosen_by_device_printed_and_saved(tmp_path, capsys):
    assert start_run(tmp_path).config.training.max_tokens_per_forward == 2048
    assert "passes of up to 2048 tokens" in capsys.readouterr().out
    assert start_run(tmp_path / "more", "--max_tokens_per_forward", "300").config.training.max_tokens_per_forward == 300
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "x" * n, "completion": "y"}) + "\n" for n in (3, 1500)))
    long = start_run(tmp_path / "long", "--dataset", str(tmp_path / "long.jsonl"), "--max_prompt_length", "1600")
    assert long.config.training.max_tokens_per_forward == 2 * 1501
