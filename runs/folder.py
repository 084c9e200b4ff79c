"""
The run folder: the files that a run writes, under a lock.

    config.json          every setting
    lock                 a file that is locked while a process writes
    metrics.jsonl        one object per optimiser step or evaluation; docs/metrics.md defines each number
    rollouts.jsonl       every few steps: prompts, completions, rewards by function, advantages, token ids
    skipped.jsonl        the same for steps with a loss or gradient that is not finite, if any
    reward_errors.jsonl  calls of reward functions that raised or timed out, if any
    base/                the built-in model, if an adapter of it is trained
    curves.png           the learning curves, which analysis/report.py draws
    report.html          curves, advice, settings and completions for a browser, by analysis/report.py
    tensorboard/         the same metrics; with --report_to wandb its local files, and tracker_name
    checkpoints/, final/, with --keep_best best/
"""

import importlib.util
import json
import math
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count, groupby
from pathlib import Path

from filelock import FileLock, Timeout

from config import Config
from engine.devices import all_gather_object, is_main, on_main
from engine.errors import RunError
from logprobs import completion_lengths
from runs.console import RunConsole

RECORDS = "metrics.jsonl", "rollouts.jsonl", "skipped.jsonl", "reward_errors.jsonl"


class RunFolder:
    """The folder of one run, with its console.

    take() creates and locks the folder. It is called when this object is created (--resume), before base/ is
    written, or when the loop begins; nothing is written earlier.
    """

    def __init__(self, config: Config):
        training = config.training
        default = time.strftime("outputs/%Y-%m-%d_%H-%M-%S")
        self.path = Path(all_gather_object(training.output_dir or default)[0])   # the same on all ranks
        whole = Path(os.path.abspath(self.path))
        if not training.resume:
            self.refuse_other_run(ValueError)
        existing = next(folder for folder in (whole, *whole.parents) if os.path.lexists(folder))
        if not training.check and not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise ValueError(f"--output_dir={self.path}: {existing} is not a writable folder; name a new one")
        if training.report_to == "wandb" and not importlib.util.find_spec("wandb"):
            raise ValueError("--report_to=wandb: is not installed; pip install it")
        self.has_name, self.is_ours = bool(training.output_dir), training.resume
        self.lock = None
        if training.resume and not training.check:        # before a checkpoint is chosen
            self.take()
        self.console = RunConsole(quiet=not is_main())
        self.send = self.close_tracker = None             # see open_tracker

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the folder if an error ends the set-up, so that other processes can take it."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def refuse_other_run(self, error: type[Exception]) -> None:
        """Raise the error if the folder of a new run holds a run already."""
        if (self.path / "config.json").exists():
            raise error(f"--output_dir={self.path}: holds another run; continue it with --resume (from "
                        "Python resume=True), or name a new one")

    def take(self) -> None:
        """Create the folder and lock it against other processes. Killing this process releases the lock.

        raises  RunError, on all ranks, if another process writes to it, or if another run has begun in it
        """
        self.path = on_main(self.acquire_lock)

    def acquire_lock(self) -> Path:
        """Create and lock the folder, on one rank. Return its path, which may have changed."""
        if self.lock and self.lock.is_locked:
            return self.path
        if not (self.has_name or self.is_ours):
            self.path = create_numbered(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        # A single lock per process, so that a notebook can start again after a run that failed.
        self.lock = FileLock(self.path / "lock", blocking=False, is_singleton=True)
        try:
            self.lock.acquire()
        except Timeout:
            raise RunError(
                f"{self.path}: another process writes to it; wait until it ends, or name another --output_dir"
            ) from None
        if not self.is_ours:
            self.refuse_other_run(RunError)
        self.is_ours = True
        return self.path

    def open(self, config: Config, last_step: int, sizes: dict[str, int]) -> None:
        """Create the folder, or remove records written after a checkpoint: a resumed run repeats those steps.

        last_step, sizes  the step and the file_sizes of the checkpoint; 0 and {} without one
        """
        self.take()
        on_main(partial(self.begin_records, config, last_step, sizes))

    def begin_records(self, config: Config, last_step: int, sizes: dict[str, int]) -> None:
        """Write config.json, cut the records to their sizes, and open the tracker: on one rank."""
        self.write_config(config)
        if not self.send:                                 # else: a notebook continues after Ctrl-C
            for name, size in self.file_sizes().items():
                os.truncate(self.path / name, min(size, sizes.get(name, 0)))
        for name in "metrics.jsonl", "rollouts.jsonl":
            (self.path / name).touch()
        self.send, self.close_tracker = open_tracker(
            config.training.report_to, self.path, config.as_dict(), last_step)

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file of records."""
        paths = [self.path / name for name in RECORDS]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def write_config(self, config: Config) -> None:
        replace_text(self.path / "config.json", json.dumps(config.as_dict(), indent=2) + "\n")

    def log(self, step: int, phase: str, metrics: dict) -> None:
        """Append a line to metrics.jsonl and pass it to the tracker. NaN becomes null: JSON has no NaN."""
        self.append("metrics.jsonl", step, phase, [metrics])
        if is_main():
            numbers = {name: x for name, x in metrics.items() if isinstance(x, int | float)}
            self.send(step, {f"{phase}/{name}": x for name, x in numbers.items() if math.isfinite(x)})

    def append(self, name: str, step: int, phase: str, records: list[dict]) -> None:
        if not is_main():
            return
        first = {"step": step, "phase": phase}            # a record cannot replace these
        lines = [json.dumps(without_nan(first | record | first)) for record in records]
        with (self.path / name).open("a") as file:        # all lines, or none if one is not JSON
            file.writelines(line + "\n" for line in lines)

    def close(self) -> None:
        if self.close_tracker:
            self.close_tracker()
        if self.lock:
            self.lock.release(force=True)


def create_numbered(path: Path) -> Path:
    """Create a folder, with a number behind its name if another run has just taken it. Return its path."""
    for end in chain([""], map("-{}".format, count(2))):
        with suppress(FileExistsError):
            numbered = path.with_name(path.name + end)
            numbered.mkdir(parents=True)
            return numbered


def open_tracker(
    report_to: str, folder: Path, settings: dict, last_step: int
) -> tuple[Callable[[int, dict], None], Callable[[], None]]:
    """Return two functions: one sends the numbers of a step, named phase/metric, to a tracker, one closes it.

    No network is needed: TensorBoard writes to the run folder, and so does wandb with WANDB_MODE=offline.

    last_step  the step after which a run continues, 0 for a new run: wandb continues its entry, TensorBoard
               drops later events
    """
    if report_to == "none":
        return lambda step, values: None, lambda: None
    if report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        board = SummaryWriter(folder / "tensorboard", purge_step=last_step + 1)

        def log(step: int, values: dict) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        return log, board.close
    import wandb

    file = folder / "tracker_name"
    if last_step == 0 or not file.exists():
        file.write_text(f"{folder.name}-{uuid.uuid4().hex[:8]}")
    project, name = os.environ.get("WANDB_PROJECT") or "plain-grpo", file.read_text()
    wandb.init(project=project, id=name, name=name, dir=str(folder), resume="allow", config=settings)
    return lambda step, values: wandb.log(values, step=step), wandb.finish


# ---- records -----------------------------------------------------------------------------------------------


def completion_records(experience) -> list[dict]:
    """Return the lines of rollouts.jsonl for an Experience, one for each completion."""
    examples, rollout = experience.examples, experience.table.rollout
    groups, advantages = experience.groups, experience.table.advantages
    zero_variance = [] if groups is None else groups.zero_variance.tolist()
    group_size, by_token = len(rollout.completions) // len(examples), experience.table.by_token
    records = []
    for row, text in enumerate(rollout.completions):
        p, g, mask = row // group_size, row % group_size, rollout.completion_mask[row]
        length = int(completion_lengths(mask[None]))      # including an environment's tokens

        def sampled_only(numbers, mask=mask, length=length):                  # None for environments' tokens
            pairs = zip(numbers[:length].tolist(), mask[:length].tolist(), strict=True)
            return [number if sampled else None for number, sampled in pairs]

        record = {"prompt": examples[p]["prompt"], "completion": text}
        if groups is not None:
            record |= {
                "rewards": {name: or_none(values[p, g]) for name, values in groups.per_function.items()},
                "reward": or_none(groups.scores[p, g]), "zero_variance": zero_variance[p],
                "advantage": or_none((advantages[row][mask] if by_token else advantages[row]).mean()),
            }
            if any(extra := groups.extra[row : row + 1]):
                record["extra"] = extra[0]
            if by_token:
                record["token_advantages"] = sampled_only(advantages[row])
        record |= {
            "finished": bool(rollout.finished[row]),
            "tokens": int(mask.sum()),
            "group": p,
            "prompt_ids": rollout.prompt_ids[p][rollout.prompt_mask[p]].tolist(),
            "completion_ids": rollout.completion_ids[row, :length].tolist(),
            "sampling_logp": sampled_only(rollout.sampling_logp[row]),
        }
        if rollout.turn_points is not None:
            record["turn_points"] = [or_none(reward) for reward in rollout.turn_points[row, :length]]
        records.append(record)
    return records


def or_none(value) -> float | None:
    """Return a number for JSON, None for NaN, infinities and None."""
    return float(value) if value is not None and math.isfinite(value) else None


def without_nan(value):
    """Return a value as JSON has it, with None for NaN and infinities."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


def read_records(path: Path, last_steps: int | None = None) -> Iterator[dict]:
    """Yield the records of a file, none if there is no file. Stop at a damaged line, left by a killed run.

    last_steps  yield only the records of this many last steps; earlier lines are not parsed
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines: Iterable[bytes] = file
        if last_steps is not None:
            by_step = groupby(file, key=lambda line: line.partition(b",")[0])    # {"step": 12
            lines = chain(*deque((list(of_step) for _, of_step in by_step), maxlen=last_steps))
        for line in lines:
            try:
                record = dict(json.loads(line))
            except (ValueError, TypeError):               # TypeError: JSON, but not an object
                print(f"{path}: reading stops at a damaged line: {line[:60]!r}", file=sys.stderr)
                return
            yield record


def read_jsonl(path: Path) -> list[dict]:
    """Return all records of a file that fits into memory, such as metrics.jsonl."""
    return list(read_records(path))


def replace_text(path: Path, text: str) -> None:
    """Replace a file completely or not at all: if the run is killed meanwhile, the old file remains."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    flush(new)
    new.replace(path)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
