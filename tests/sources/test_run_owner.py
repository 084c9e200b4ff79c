"""One process writes to a run folder, and code that a foreign folder names is run only if the user names it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config


from engine.errors import RunError
from engine.ranks import OneRank
from runs.command_line import parse_config
from runs.folder import RunFolder
from sources.run_owner import OWNER, is_own, owner_of

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('locked', flush=True); time.sleep(60)"


def test_a_folder_has_one_writer_and_is_free_when_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match=f"^{tmp_path}: another process writes to it; wait for its end"):
        run_folder("--output_dir", tmp_path).open(0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="another process writes to it"):
        RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), OneRank())    # before it reads a checkpoint
    RunFolder(Config.of(resume=True, output_dir=str(tmp_path), check=True), OneRank())  # which writes nothing
    process.send_signal(signal.SIGKILL)
    process.communicate()
    failed = RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), OneRank())      # a notebook's run that failed, and the next one
    assert failed.lock.is_locked and RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), OneRank()).lock.is_locked


def test_a_run_locks_its_folder_until_it_ends(tmp_path):
    with run_folder("--output_dir", tmp_path / "run") as folder:
        folder.open(0)
        code = f"import filelock; filelock.FileLock({str(folder.path / 'lock')!r}, blocking=False).acquire()"
        assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1
    subprocess.run([sys.executable, "-c", code], check=True)


def run_folder(*flags):
    return RunFolder(parse_config([*map(str, flags), "--report_to", "none"]), OneRank())


def test_of_two_runs_that_begin_together_the_second_ends(tmp_path):
    first, second = (run_folder("--output_dir", tmp_path / "same", "--seed", seed) for seed in (1, 2))
    first.open(0)
    with pytest.raises(RunError, match=r"--output_dir=.*same: holds another run"):
        second.open(0)
    assert json.loads((tmp_path / "same/config.json").read_text())["training"]["seed"] == 1
    first.open(0)                                         # a notebook that goes on after Ctrl-C


def saved(folder, **settings):
    """A run folder of this user."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"use_grpo": True, **settings}))
    (folder / OWNER).write_text(json.dumps(owner_of(folder)))
    return folder


CODE = dict(reward_functions=["correctness", "r.py:r"], reward_weights=[1.0, 1.0], environment="e.py:e", trust_remote_code=True)
AGAIN = dict(reward_functions=["s.py:s"], reward_weights=[1.0], environment="", trust_remote_code=False)


def test_code_of_a_foreign_run_is_named_again(tmp_path):
    run = saved(tmp_path / "run", **CODE)
    assert Config.of(resume=True, output_dir=str(run)).model.trust_remote_code
    copy = run.rename(tmp_path / "copy")
    for given, missing in ({}, "--reward_functions correctness r.py:r --environment e.py:e --trust_remote_code True"), (
            {name: value for name, value in AGAIN.items() if name != "environment"}, "--environment e.py:e"):
        with pytest.raises(ValueError, match=f" runs code, .*; if you trust it, give again {missing}$"):
            Config.of(resume=True, output_dir=str(copy), **given)
    with pytest.raises(ValueError, match="give again"):
        Config.of(replay=str(copy / "rollouts.jsonl"))
    assert Config.of(resume=True, output_dir=str(copy), **AGAIN).grpo.reward_functions == ["s.py:s"]
    copy.rename(run)
    Config.of(resume=True, output_dir=str(run))
    for text in "", "[]", "{", json.dumps(owner_of(run) | {"user": os.getuid() + 1}):
        (run / OWNER).write_text(text)
        with pytest.raises(ValueError, match="give again"):
            Config.of(resume=True, output_dir=str(run))
    with pytest.raises(ValueError, match=r"runs code.*give again --reward_functions correctness r.py:r"):
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
    folder = RunFolder(Config.of(resume=True, output_dir=str(copy)), OneRank())
    assert not is_own(copy), "until its settings are written anew"
    folder.open(0)
    assert is_own(copy)
