"""
Where metrics go besides metrics.jsonl: TensorBoard, wandb or trackio, under the same names, phase/metric, and now and then a
rollout. Everything works without a network: TensorBoard writes into the run folder, trackio into its own, and wandb there as
well with WANDB_MODE=offline.

Left out on purpose: several trackers at once. metrics.jsonl has it all, for whatever comes later.
"""

import importlib.util
import uuid
from pathlib import Path

from engine.chat_template import as_text

COLUMNS = "prompt", "completion", "reward", "advantage", "finished"    # of rollouts.jsonl, that a table shows
NOT_IN_A_CELL = str.maketrans({"|": "/", "\n": " ", "`": "'"})


def open_tracker(report_to: str, folder: Path, settings: dict, last_step: int):
    """The tracker of a run that goes on after last_step (optimiser steps; 0: a new run); None for "none"."""
    if report_to == "none":
        return None
    return TensorBoard(folder, last_step) if report_to == "tensorboard" else Service(report_to, folder, settings, last_step)


def rows_of(completions: list[dict]) -> list[list]:
    """Cells of a table; conversations as one text."""
    return [[as_text(r[name]) if name in ("prompt", "completion") else r.get(name) for name in COLUMNS] for r in completions]


def refuse_missing(report_to: str) -> None:
    """Raise ValueError, one line, if a tracker is not installed."""
    if report_to in ("wandb", "trackio") and not importlib.util.find_spec(report_to):
        raise ValueError(f"--report_to={report_to}: is not installed; pip install {report_to}, or take tensorboard")


class TensorBoard:
    """Event files in the run folder. Steps after last_step that a run had before it was stopped are dropped."""

    def __init__(self, folder: Path, last_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=last_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, completions: list[dict]) -> None:
        """Completions as a table of Markdown; what a model wrote is code in it."""
        rows = [[f"`{str(cell).translate(NOT_IN_A_CELL)}`" for cell in row] for row in rows_of(completions)]
        lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        self.writer.add_text("completions", "\n".join(" | ".join(line) for line in lines), step)

    def close(self) -> None:
        self.writer.close()


class Service:
    """wandb, and trackio, which has the same interface. A run that is resumed goes on in the same place."""

    def __init__(self, report_to: str, folder: Path, settings: dict, last_step: int):
        self.service, name = importlib.import_module(report_to), folder / "tracker_name"
        if last_step == 0 or not name.exists():
            name.write_text(f"{folder.name}-{uuid.uuid4().hex[:8]}")
        options = {"name": name.read_text(), "resume": "allow", "config": settings}
        if report_to == "wandb":
            options |= {"id": name.read_text(), "dir": str(folder)}
        self.service.init(project="plain-grpo", **options)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.service.log(values, step=step)

    def show(self, step: int, completions: list[dict]) -> None:
        """Completions as a table."""
        from pandas import DataFrame  # comes with datasets

        table = DataFrame(rows_of(completions), columns=list(COLUMNS))
        self.service.log({"completions": self.service.Table(dataframe=table)}, step=step)

    def close(self) -> None:
        self.service.finish()
