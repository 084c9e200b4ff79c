"""One process writes to a run folder, and code that a foreign folder names is run only if the user names it."""

import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from config import Config
from engine.errors import RunError
from runs.command_line import parse_config
from runs.folder import RunFolder
from sources import run_owner
from sources.run_owner import OWNER, lock_folder, read_owner, take_over

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time; from pathlib import Path; from sources.run_owner import lock_folder; " \
    "file = lock_folder(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"


def test_a_folder_has_one_writer_and_is_free_when_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match=rf"process {process.pid} on \S+ writes to it; wait for its end"):
        lock_folder(tmp_path)
    with pytest.raises(RunError, match=f"process {process.pid}"):
        run_folder("--output_dir", tmp_path).open(0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match=f"process {process.pid}"):
        RunFolder(Config.of(resume=True, output_dir=str(tmp_path)))              # before it reads a checkpoint
    RunFolder(Config.of(resume=True, output_dir=str(tmp_path), check=True))      # which writes nothing
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with lock_folder(tmp_path) as first, lock_folder(tmp_path):    # twice in one process: a notebook's run that failed
        assert read_owner(tmp_path)["process"] == os.getpid() and first.closed


def test_workers_that_outlive_a_killed_run_do_not_keep_its_lock(tmp_path):
    fork = HOLD.replace("print('locked'", "import os; os.fork() or print(os.getpid()")
    process = subprocess.Popen([sys.executable, "-c", fork, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline().split()[0])
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        lock_folder(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


@pytest.mark.parametrize("number,refused", [(errno.ENOTSUP, False), (errno.ENOLCK, False), (errno.EACCES, True)])
def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch, number, refused):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_owner.fcntl, "flock", fail)
    with pytest.raises(RunError) if refused else nullcontext():                  # some systems answer EACCES for a held lock
        lock_folder(tmp_path).close()


def test_an_owner_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / OWNER).mkdir()
    with pytest.raises(RunError, match=f"{OWNER}: Is a directory$"):
        lock_folder(tmp_path)


def run_folder(*flags):
    return RunFolder(parse_config([*map(str, flags), "--report_to", "none"]))


def test_two_runs_that_begin_together_get_a_folder_each_or_the_second_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: form)
    first, second = run_folder(), run_folder()
    assert first.path == second.path
    first.open(0)
    second.open(0)
    assert second.path == Path(f"{first.path}-{os.getpid()}") and (second.path / "config.json").exists()
    first, second = run_folder("--output_dir", "same", "--seed", 1), run_folder("--output_dir", "same", "--seed", 2)
    first.open(0)
    with pytest.raises(RunError, match="--output_dir=same: holds another run"):
        second.open(0)
    assert json.loads(Path("same/config.json").read_text())["training"]["seed"] == 1
    first.open(0)                                         # a notebook that goes on after Ctrl-C
    assert first.path == Path("same")


def saved(folder, **settings):
    """A run folder of this user."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"use_grpo": True, **settings}))
    with lock_folder(folder) as file:
        take_over(file, folder)
    return folder


CODE = dict(reward_functions=["correctness", "r.py:r"], reward_weights=[1.0, 1.0], environment="e.py:e", trust_remote_code=True)
AGAIN = dict(reward_functions=["s.py:s"], reward_weights=[1.0], environment="", trust_remote_code=False)


def test_code_of_a_foreign_run_is_named_again(tmp_path):
    run = saved(tmp_path / "run", **CODE)
    assert Config.of(resume=True, output_dir=str(run)).model.trust_remote_code
    copy = run.rename(tmp_path / "copy")
    for given, missing in ({}, "--reward_functions r.py:r --environment e.py:e --trust_remote_code true"), (
            {name: value for name, value in AGAIN.items() if name != "environment"}, "--environment e.py:e"):
        with pytest.raises(ValueError, match=f" runs code, .*; if you trust it, give again {missing}$"):
            Config.of(resume=True, output_dir=str(copy), **given)
    with pytest.raises(ValueError, match="give again"):
        Config.of(replay=str(copy / "rollouts.jsonl"))
    assert Config.of(resume=True, output_dir=str(copy), **AGAIN).grpo.reward_functions == ["s.py:s"]
    copy.rename(run)
    Config.of(resume=True, output_dir=str(run))
    (run / "rollouts.jsonl").symlink_to(tmp_path / "a file of the user")
    Config.of(resume=True, output_dir=str(run))           # the user's own link
    for text in "", "[]", "{", json.dumps(read_owner(run) | {"user": os.getuid() + 1}):
        (run / OWNER).write_text(text)
        with pytest.raises(ValueError, match="jsonl: is a link"):
            Config.of(resume=True, output_dir=str(run), **AGAIN)
    (run / "rollouts.jsonl").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints/writing").symlink_to(tmp_path)    # a checkpoint would replace what is there
    with pytest.raises(ValueError, match="checkpoints/writing: is a link"):
        Config.of(resume=True, output_dir=str(run), **AGAIN)
    Config.of(replay=str(run / "rollouts.jsonl"), **AGAIN)                       # which writes nothing
    (run / "checkpoints/writing").unlink()
    with pytest.raises(ValueError, match=r"runs code.*give again --reward_functions r.py:r"):
        parse_config([str(run / "config.json"), "--seed", "1"])                  # the file is not that of this user's run
    assert parse_config([str(run / "config.json"), "--reward_functions", "s.py:s", "--reward_weights", "1", "--environment", "",
                         "--trust_remote_code", "false", "--max_turns", "1"]).grpo.reward_functions == ["s.py:s"]
    (run / "config.json").rename(run / "settings.json")
    parse_config([str(run / "settings.json"), "--max_turns", "2"])               # a file of settings that the user names
    (run / "settings.json").rename(run / "config.json")
    with pytest.raises(ValueError, match="give again"):
        Config.of(resume=True, output_dir=str(run))


def test_a_foreign_run_without_code_is_resumed_and_becomes_that_of_its_user(tmp_path):
    run = saved(tmp_path / "run", reward_functions=["correctness", "python:f"], reward_weights=[1.0, 1.0])
    copy = run.rename(tmp_path / "copy")
    folder = RunFolder(Config.of(resume=True, output_dir=str(copy)))
    assert read_owner(copy)["path"] == str(tmp_path / "run"), "until its settings are written anew"
    folder.open(0)
    assert read_owner(copy)["path"] == str(copy)
    folder.lock.close()
