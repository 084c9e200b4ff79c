"""
The run folder: the files that a run writes, under a lock.

    config.json          every setting
    lock                 a file that is locked while a process writes
    metrics.jsonl        one object per optimiser step or evaluation; docs/metrics.md defines each number
    rollouts.jsonl       every few steps: prompts, completions, rewards by function, advantages, token ids
    skipped.jsonl        the same of steps that were not finite, if any
    reward_errors.jsonl  calls of reward functions that raised or timed out, if any
    curves.png           the learning curve
    report.html          everything above, for a browser
    tensorboard/         the same metrics; with --report_to wandb its local files
    checkpoints/, final/
"""

import json
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout

from analysis.report import write_report
from config import Config
from engine.devices import all_gather_object, is_main
from engine.errors import RunError, first_line
from runs.console import RunConsole
from runs.curves import draw_curves
from runs.records import cut_after, or_none, read_jsonl, replace_text
from runs.trackers import open_tracker, refuse_missing


class RunFolder:
    """The folder of one run, with its console. A context manager around the training loop."""

    def __init__(self, config: Config, ranks):
        training, self.ranks = config.training, ranks
        default = time.strftime("outputs/%Y-%m-%d_%H-%M-%S")
        self.path = Path(all_gather_object(training.output_dir or default)[0])   # the same on all ranks
        self.config = config
        whole = Path(os.path.abspath(self.path))
        if max(map(len, map(os.fsencode, whole.parts))) > 255:     # Python 3.14's exists() would be silent
            raise ValueError(f"--output_dir={self.path}: File name too long; name a shorter one")
        if not training.resume:
            self.refuse_other_run(ValueError)
        existing = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
        read_only = training.check
        if not read_only and not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise ValueError(f"--output_dir={self.path}: {existing} is not a writable folder; name a new one")
        refuse_missing(training.report_to)
        self.writes, self.lock, self.begun = is_main(), None, training.resume
        if training.resume and not read_only:             # before a checkpoint is chosen
            ranks.gather(self.acquire_lock)
        self.console = RunConsole(config, quiet=not self.writes)
        self.tracker = None
        self.history: list[dict] = []                     # metrics of the GRPO steps

    def refuse_other_run(self, error: type[Exception]) -> None:
        """Raise the error if the folder of a new run holds a run already."""
        if (self.path / "config.json").exists():
            raise error(f"--output_dir={self.path}: holds another run; continue it with --resume (from "
                        "Python resume=True), or name a new one")

    def acquire_lock(self) -> None:
        """Create the folder and keep other processes from writing to it. A kill ends the lock too.

        raises  RunError if another process writes to the folder, or if another run has begun in it
        """
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        # Of one lock in this process: a notebook can start again after a run that failed.
        self.lock = FileLock(self.path / "lock", blocking=False, is_singleton=True)
        try:
            self.lock.acquire()
        except Timeout:
            raise RunError(
                f"{self.path}: another process writes to it; wait for its end, or name another --output_dir"
            ) from None
        if not self.begun:
            self.refuse_other_run(RunError)
        self.begun = True                                 # a notebook may go on after Ctrl-C

    def open(self, last_step: int) -> None:
        """Create the folder, or remove the lines of steps after last_step: a resumed run repeats these.

        raises  RunError, on all ranks, if another run writes to it
        """
        self.ranks.gather(self.acquire_lock)
        if not self.writes:
            return
        replace_text(self.path / "config.json", json.dumps(self.config.as_dict(), indent=2) + "\n")
        for name in "metrics.jsonl", "rollouts.jsonl", "skipped.jsonl", "reward_errors.jsonl":
            if name in ("metrics.jsonl", "rollouts.jsonl"):
                (self.path / name).touch()
            cut_after(self.path / name, last_step)
        self.history = [line for line in read_jsonl(self.path / "metrics.jsonl") if line["phase"] == "grpo"]
        config = self.config
        self.tracker = open_tracker(config.training.report_to, self.path, config.as_dict(), last_step)

    def log(self, step: int, phase: str, metrics: dict) -> None:
        """Append a line to metrics.jsonl and pass it to the tracker. NaN becomes null: JSON has no NaN."""
        if not self.writes:
            return
        line = {"step": step, "phase": phase}
        for name, value in metrics.items():
            line.setdefault(name, or_none(value) if isinstance(value, float) else value)
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if phase == "grpo":
            self.history.append(line)
        if self.tracker:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            numbers.pop("step")
            self.tracker.log(step, {f"{phase}/{name}": value for name, value in numbers.items()})

    def show(self, step: int, completions: list[dict]) -> None:
        """Pass completions to the tracker."""
        if self.tracker:
            self.tracker.show(step, completions)

    def append(self, name: str, step: int, phase: str, records: list[dict]) -> None:
        """Append records to a file of the folder."""
        if not self.writes:
            return
        with (self.path / name).open("a") as file:
            lines = ({"step": step, "phase": phase} | record for record in records)
            file.writelines(json.dumps(line, default=str) + "\n" for line in lines)

    def __enter__(self):
        self.console.progress.start()
        return self

    def __exit__(self, *exception):
        self.console.progress.stop()
        try:
            if self.writes:
                draw_curves(self.path)
                write_report(self.path)
        except Exception as error:                        # pages of results do not decide how a run ends
            self.console.print(f"  note   curves.png or report.html is not written: {first_line(error)}")
        finally:
            if self.tracker:
                self.tracker.close()
            if self.lock:
                self.lock.release(force=True)
