"""
Programs of this project as processes of their own, forked from a server that has imported them.

Importing torch and transformers takes a process some seconds, which the server spends once for all tests of a worker. Everything
else is as in a process that was started anew: its own environment, signals, exit code, and files for what it prints.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forked_imports"])
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}


def start_server() -> None:
    """Start the server, unless it runs. It finds modules by PYTHONPATH alone, and goes on without those that it does not find."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


class Rank:
    """A running process."""

    def __init__(self, *words: str, **variables: object):
        self.folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.files = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()}
        start_server()
        self.process = CONTEXT.Process(target=run_words, args=([*map(str, words)], environment, self.files))
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        return self.read(0)

    @property
    def stderr(self) -> str:
        return self.read(1)

    def read(self, number: int) -> str:
        file = self.files[number]
        return file.read_text(errors="replace") if file.exists() else ""


class Ranks:
    """A running program, in one process or more, with torchrun's variables. When one fails, the others are ended."""

    def __init__(self, processes: int, *words: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = dict(WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        self.ranks = [Rank(*words, **shared, RANK=rank, LOCAL_RANK=rank) for rank in range(processes)]

    @property
    def returncode(self) -> int | None:
        codes = [rank.returncode for rank in self.ranks]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def stdout(self) -> str:
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        return "".join(rank.stderr for rank in self.ranks)

    def send_signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.returncode is None:
                os.kill(rank.process.pid, number)

    def wait(self, timeout: float = 300) -> "Ranks":
        """Wait for the end of all. Raises TimeoutError, and ChildProcessError if one has crashed."""
        end, failed = time.monotonic() + timeout, None
        while self.returncode is None:
            if failed is None and any(rank.returncode for rank in self.ranks):
                failed = time.monotonic()
            if time.monotonic() > (failed + 10 if failed else end):
                if not failed:
                    self.send_signal(signal.SIGUSR1)      # where do they wait? see run_words
                    time.sleep(1)
                self.kill()
                if not failed:
                    raise TimeoutError(self.ends())
            time.sleep(0.02)
        if {rank.returncode for rank in self.ranks} & CRASHES:
            raise ChildProcessError(self.ends())
        return self

    def ends(self) -> str:
        """Return what each process printed at its end, and its exit code."""
        return "".join(
            f"\n---- rank {number}, exit code {rank.returncode}\n{rank.stdout[-3000:]}{rank.stderr[-6000:]}"
            for number, rank in enumerate(self.ranks))

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()


def run_words(words: list[str], environment: dict[str, str], files: list[Path]) -> None:
    """Run a Python file as a program, in the process that was forked."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
        stream = os.fdopen(descriptor, "w", buffering=1, closefd=False)
        setattr(sys, file.name, stream)
        setattr(sys, f"__{file.name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=sys.stderr)                                         # prints the stacks of all threads: when it is aborted
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)                       # and when it is asked to
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
