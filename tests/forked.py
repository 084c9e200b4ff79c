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


class Program:
    """A running program, as a subprocess.Popen."""

    def __init__(self, *words: str, env: dict[str, str] | None = None):
        self.folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.files = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
        start_server()
        self.process = CONTEXT.Process(target=run_words, args=([*map(str, words)], environment, self.files))
        self.process.start()
        self.pid = self.process.pid

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

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 300) -> "Program":
        """Wait for the end. Raises TimeoutError."""
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            raise TimeoutError(self.stdout[-3000:] + self.stderr[-3000:])
        return self


class Ranks:
    """Processes of one run with torchrun's variables. When one fails, the others are ended."""

    def __init__(self, processes: int, *words: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = dict(WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        self.programs = [
            Program(*words, env={name: str(value) for name, value in (shared | dict(RANK=rank, LOCAL_RANK=rank)).items()})
            for rank in range(processes)
        ]

    @property
    def returncode(self) -> int | None:
        codes = [program.returncode for program in self.programs]
        return None if None in codes else next(filter(None, codes), 0)

    @property
    def stdout(self) -> str:
        return "".join(program.stdout for program in self.programs)

    @property
    def stderr(self) -> str:
        return "".join(program.stderr for program in self.programs)

    def wait(self, timeout: float = 300) -> "Ranks":
        """Wait for the end of all. Raises TimeoutError, and ChildProcessError if one has crashed."""
        end, failed = time.monotonic() + timeout, None
        while self.returncode is None:
            if failed is None and any(program.returncode for program in self.programs):
                failed = time.monotonic()
            if time.monotonic() > (failed + 10 if failed else end):
                for program in self.programs if not failed else ():              # where do they wait? see run_words
                    if program.returncode is None:
                        program.send_signal(signal.SIGUSR1)
                        time.sleep(1)
                self.kill()
                if not failed:
                    raise TimeoutError(self.ends())
            time.sleep(0.02)
        if {program.returncode for program in self.programs} & CRASHES:
            raise ChildProcessError(self.ends())
        return self

    def ends(self) -> str:
        """Return what each program printed at its end, and its exit code."""
        return "".join(
            f"\n---- rank {rank}, exit code {program.returncode}\n{program.stdout[-3000:]}{program.stderr[-6000:]}"
            for rank, program in enumerate(self.programs))

    def kill(self) -> None:
        for program in self.programs:
            program.process.kill()
        for program in self.programs:
            program.process.join()


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
