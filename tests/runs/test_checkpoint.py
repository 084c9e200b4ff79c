"""Nothing is lost: a run continues after kills, full disks and damaged files."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_same

from engine.errors import RunError
from engine.models import load_any_policy
from runs import checkpoint
import train

STATE = {"progress": {"step": 1}, "settings": {}, "versions": {}}


@pytest.mark.parametrize("owner,operation,name", [
    (checkpoint, "flush", "model.safetensors"), (checkpoint, "flush", "writing"), (Path, "rename", "writing"),
])
def test_a_final_model_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch, owner, operation, name):
    (model, tokenizer), final, real = load_any_policy(train.ModelConfig()), tmp_path / "final", getattr(owner, operation)
    final.mkdir()
    (final / "before").touch()

    def no_room(path, *rest):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(RunError, match=f"^could not save {final}: .*No space left"):
        patch.setattr(owner, operation, no_room)
        checkpoint.write_policy(model, tokenizer, final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"] and [path.name for path in final.iterdir()] == ["before"]
    checkpoint.write_policy(model, tokenizer, final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"] and not (final / "before").exists()


def test_a_run_that_lacks_only_its_final_model_writes_it_when_it_is_resumed(tmp_path, finished, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(folder / "final")
    (folder / "writing").mkdir()                        # a kill left it
    functions = json.loads((folder / "config.json").read_text())["grpo"]["reward_functions"]
    train.main(["--output_dir", str(folder), "--resume", "--reward_functions", *functions])     # one is in a file
    assert_same(finished, folder)
    assert "final model:" in capsys.readouterr().out and not (folder / "writing").exists()


def test_the_lines_of_a_step_are_on_the_disk_before_its_checkpoint_is(tmp_path, monkeypatch):
    """Otherwise a power cut would take them, and a resumed run would not repeat the step."""
    (tmp_path / "rollouts.jsonl").touch()
    flushed, flush = [], checkpoint.flush
    monkeypatch.setattr(checkpoint, "flush", lambda path: (flushed.append((path.name, list(target.parent.glob("step*")))), flush(path)))
    monkeypatch.setattr(checkpoint, "save_any_policy", lambda model, tokenizer, folder, weights: folder.mkdir(parents=True))
    target = tmp_path / "checkpoints/step-00000001"
    assert checkpoint.write_checkpoint(target.parent, 1, torch.nn.Linear(1, 1), None, None, STATE, keep=1) == target
    assert ("rollouts.jsonl", []) in flushed


def test_a_reference_is_saved_beside_the_model_and_old_checkpoints_go(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoint, "save_any_policy", lambda model, tokenizer, folder, weights: (
        saved.append((model, folder.name, sorted(weights))), folder.mkdir(parents=True)))
    model, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False)
    for step, other in enumerate([None, None, reference, reference], start=1):
        checkpoint.write_checkpoint(tmp_path / "checkpoints", min(step, 3), model, None, other, STATE, keep=2)
    assert saved == [(model, "writing", ["bias", "weight"])] * 3 + [
        (reference, "reference", ["weight"]), (model, "writing", ["bias", "weight"]), (reference, "reference", ["weight"])]
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000002", "step-00000003"], "the newest ones, of each step the last"
    assert (kept[1] / "reference").is_dir() and not (kept[0] / "reference").exists()


def test_copies_that_a_user_makes_of_checkpoints_are_neither_deleted_nor_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save_any_policy", lambda model, tokenizer, folder, weights: folder.mkdir(parents=True))
    copies = {"step-best", "step-00000001-good", "step-00000002.bak"}
    for name in copies:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for step in 1, 2:
        newest = checkpoint.write_checkpoint(tmp_path / "checkpoints", step, torch.nn.Linear(1, 1), None, None, STATE, keep=1)
    assert {path.name for path in newest.parent.iterdir()} == {*copies, newest.name} and checkpoint.latest_checkpoint(tmp_path) == newest


def test_a_kill_between_the_two_renames_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def write(text):
        checkpoint.write_folder(target, lambda partial: partial.mkdir(parents=True) or (
            torch.save({"text": text}, partial / "state.pt")))

    def killed(path, to, real=Path.rename):
        if path.name == "writing":
            raise KeyboardInterrupt
        return real(path, to)

    folder = tmp_path / "checkpoints"
    target = folder / "step-00000001"
    write("first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        write("second")
    assert checkpoint.read_state(checkpoint.latest_checkpoint(tmp_path))["text"] == "first"
    write("third")
    assert checkpoint.read_state(target)["text"] == "third"
    target.with_name("step-00000001-old").mkdir()         # a kill while that was deleted
    assert checkpoint.latest_checkpoint(tmp_path) == target
