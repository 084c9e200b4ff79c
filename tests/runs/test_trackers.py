"""Trackers get the numbers of metrics.jsonl under the same names, and completions as tables. Services are replaced by fakes."""

import shutil
import sys
from types import SimpleNamespace

import pytest
from conftest import QUICK, exhaustive
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from engine.ranks import OneRank
from runs.command_line import parse_config
from runs.folder import RunFolder
from runs.folder import read_jsonl
from runs.trackers import TensorBoard, open_tracker

RUN = [*QUICK, "--use_grpo", "--cold_start_steps", "1", "--max_steps", "2", "--log_rollouts_every", "1", "--report_to"]


def fake_service(monkeypatch, name):
    """A module of that name that records its calls."""
    calls = SimpleNamespace(inits=[], logs=[], finished=0)

    def finish():
        calls.finished += 1

    module = SimpleNamespace(
        init=lambda **options: calls.inits.append(options), log=lambda values, step: calls.logs.append((step, values)),
        finish=finish, Table=lambda dataframe: dataframe, __spec__=SimpleNamespace(name=name),
    )
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("service", ["wandb", exhaustive("trackio")])
def test_a_service_gets_every_number_once_and_completions_and_continues_after_a_resume(tmp_path, monkeypatch, service):
    calls = fake_service(monkeypatch, service)
    folder = tmp_path / "run"
    train.main([*RUN, service, "--output_dir", str(folder)])
    written = {
        (line["step"], f"{line['phase']}/{name}"): value for line in read_jsonl(folder / "metrics.jsonl")
        for name, value in line.items() if isinstance(value, int | float) and name != "step"
    }
    numbers = [(step, name, value) for step, values in calls.logs for name, value in values.items() if name != "completions"]
    assert {(step, name): value for step, name, value in numbers} == written and len(numbers) == len(written)
    tables = [(step, values["completions"]) for step, values in calls.logs if "completions" in values]
    saved = read_jsonl(folder / "rollouts.jsonl")
    assert [step for step, _ in tables] == [2, 3]
    assert [text for _, table in tables for text in table["completion"]] == [record["completion"] for record in saved]
    assert calls.finished == 1 and calls.inits[0]["config"]["grpo"]["num_completions_per_prompt"] == 4
    shutil.rmtree(folder / "final")                       # as if it had been killed before it wrote that
    train.main(["--output_dir", str(folder), "--resume"])
    first, again = calls.inits
    assert again["name"] == first["name"] and again.get("id") == first.get("id") and again["resume"] == "allow"
    assert (first.get("id") == first["name"]) == (service == "wandb")
    train.main([*RUN, service, "--output_dir", str(tmp_path / "other" / "run")])
    assert calls.inits[2]["name"] != first["name"], "another run of the same folder name is another run"


def test_a_run_that_begins_again_from_nothing_is_a_new_one(tmp_path, monkeypatch):
    calls = fake_service(monkeypatch, "wandb")
    for last_step in 0, 3, 0:
        open_tracker("wandb", tmp_path, {}, last_step)
    first, resumed, again = [options["id"] for options in calls.inits]
    assert resumed == first != again and calls.inits[0]["project"] == "plain-grpo"
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_tracker("wandb", tmp_path, {}, 0)
    assert calls.inits[-1]["project"] == "mine"


def test_a_tracker_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="--report_to=wandb: is not installed; pip install wandb"):
        RunFolder(parse_config(["--report_to", "wandb", "--output_dir", str(tmp_path)]), OneRank())


def test_tensorboard_events_after_the_checkpoint_are_replaced_when_a_run_resumes(tmp_path):
    for last_step, value in (0, 1.0), (2, 2.0):
        board = TensorBoard(tmp_path, last_step)
        for step in range(last_step + 1, 5):
            board.log(step, {"grpo/loss": value})
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("grpo/loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
