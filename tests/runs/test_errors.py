"""Early ends of a run: signals, exit codes, and the line that each prints."""

import json
import os
import pty
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, length_reward, run_folder
from forked import Program

import train
from engine.ranks import OneRank
from runs.checkpoint import find_damage, latest_checkpoint
from runs.exit import StopOnSignal, exit_on_run_errors
from runs.records import read_jsonl

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import kills

FLAGS = "--use_grpo --max_steps 4 --save_steps 1 --learning_rate 1e-3 --keep_checkpoints 3".split()


@pytest.mark.slow
def test_a_closed_terminal_ends_the_step_and_saves(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        flags = [*QUICK, "--output_dir", str(tmp_path / "run"), *FLAGS, "--max_steps", "1000", "--num_epochs", "99"]
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
            os.execv(sys.executable, [sys.executable, str(kills.ROOT / "train.py"), *flags])
        finally:
            os._exit(1)
    reader = threading.Thread(target=read_until_closed, args=[terminal], daemon=True)
    reader.start()
    while kills.num_steps(tmp_path / "run") < 3:
        assert reader.is_alive()
        time.sleep(0.05)
    os.close(terminal)                                    # SIGHUP, and EIO for what is printed from then on
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    last = read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["step"]
    state = torch.load(latest_checkpoint(tmp_path / "run") / "state.pt", weights_only=True)
    assert last < 1000 and state["progress"]["step"] == last


def read_until_closed(terminal):
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


def test_an_ignored_signal_stays_ignored():
    """As under nohup, whose runs a closed terminal does not end."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopOnSignal(OneRank()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested()
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_with_one_line(tmp_path):
    slow = tmp_path / "slow.py"                           # the start-up check scores too: quick until the folder is there
    slow.write_text(
        "import os, time\ndef wait(completions, **columns):\n"
        f"    time.sleep(60 * os.path.exists({str(tmp_path / 'run')!r}))\n    return [0.0] * len(completions)\n"
    )
    flags = [*QUICK, "--output_dir", str(tmp_path / "run"), "--use_grpo", "--reward_functions", f"{slow}:wait",
             "--cold_start_steps", "2", "--eval_limit", "0", "--save_steps", "1"]
    process = Program("train.py", *flags)
    while kills.num_steps(tmp_path / "run") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(2)                                         # now it waits in the reward function
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None                         # the step has not ended
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert error.strip().splitlines()[-1].startswith("train.py: stopped at once; continue from the last checkpoint")
    assert find_damage(latest_checkpoint(tmp_path / "run")) == ""


def test_a_run_that_is_stopped_before_its_first_checkpoint_says_that_it_begins_again(tmp_path, capsys):
    for made, said in (False, "there is no checkpoint yet; begin again with"), (True, "continue from the last checkpoint with"):
        if made:
            (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
        with pytest.raises(SystemExit) as stop, exit_on_run_errors(SimpleNamespace(path=tmp_path)):
            raise KeyboardInterrupt
        assert stop.value.code == 130 and f"stopped at once; {said} --output_dir {tmp_path} --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_whose_gradients_are_not_finite_skips_saves_and_stops(tmp_path, monkeypatch, capsys):
    real, calls = train.accumulate_gradients, []

    def broken(*args):
        run, losses = args[0], real(*args)
        calls.append(1)
        if len(calls) in (2, 4, 5, 6):
            run.model.get_output_embeddings().weight.grad.fill_(float("nan"))
        return losses

    monkeypatch.setattr(train, "accumulate_gradients", broken)
    flags = (
        "--use_grpo --cold_start_steps 0 --max_steps 9 --eval_limit 0 --learning_rate 1e-3 "
        f"--reward_functions {length_reward(tmp_path)}"
    )
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "out", *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 1 and len(error.strip().splitlines()) == 1
    assert "3 steps in a row had a loss or gradient that is not finite" in error and "step-00000006" in error
    lines = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert [m["skipped"] for m in lines] == [0, 1, 0, 1, 1, 1] and lines[1]["grad_norm"] is None
    skipped = read_jsonl(tmp_path / "out/skipped.jsonl")
    assert {record["step"] for record in skipped} == {2, 4, 5, 6} and len(skipped) == 4 * 16
    monkeypatch.setattr(train, "accumulate_gradients", real)
    train.main(["--replay", str(tmp_path / "out/skipped.jsonl")])
    replayed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in replayed] == [2, 4, 5, 6] and all(line["grad_norm"] > 0 for line in replayed)
