"""One process writes to a run folder."""

import json
import signal
import subprocess
import sys

import pytest

from config import Config
from engine.errors import RunError
from engine.ranks import Ranks
from runs.command_line import parse_config
from runs.folder import RunFolder

HOLD = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('locked', flush=True); time.sleep(60)"


def test_a_folder_has_one_writer_and_is_free_when_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RunError, match=f"^{tmp_path}: another process writes to it; wait for its end"):
        run_folder("--output_dir", tmp_path).open(0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="another process writes to it"):
        RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), Ranks())    # before it reads a checkpoint
    RunFolder(Config.of(resume=True, output_dir=str(tmp_path), check=True), Ranks())  # which writes nothing
    process.send_signal(signal.SIGKILL)
    process.communicate()
    failed = RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), Ranks())      # a notebook's run that failed, and the next one
    assert failed.lock.is_locked and RunFolder(Config.of(resume=True, output_dir=str(tmp_path)), Ranks()).lock.is_locked


def test_a_run_locks_its_folder_until_it_ends(tmp_path):
    with run_folder("--output_dir", tmp_path / "run") as folder:
        folder.open(0)
        code = f"import filelock; filelock.FileLock({str(folder.path / 'lock')!r}, blocking=False).acquire()"
        assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1
    subprocess.run([sys.executable, "-c", code], check=True)


def run_folder(*flags):
    return RunFolder(parse_config([*map(str, flags), "--report_to", "none"]), Ranks())


def test_of_two_runs_that_begin_together_the_second_ends(tmp_path):
    first, second = (run_folder("--output_dir", tmp_path / "same", "--seed", seed) for seed in (1, 2))
    first.open(0)
    with pytest.raises(RunError, match=r"--output_dir=.*same: holds another run"):
        second.open(0)
    assert json.loads((tmp_path / "same/config.json").read_text())["training"]["seed"] == 1
    first.open(0)                                         # a notebook that goes on after Ctrl-C
