"""
Send metrics and saved completions to TensorBoard, wandb or trackio, under the names phase/metric.

No network is needed: TensorBoard writes into the run folder, and so does wandb with WANDB_MODE=offline;
trackio writes into a folder of its own. Left out on purpose: several trackers at once. metrics.jsonl holds
all metrics.
"""

import importlib.util
import os
import uuid
from pathlib import Path

from data import as_text

COLUMNS = "prompt", "completion", "reward", "advantage", "finished"    # fields of rollouts.jsonl in a table


def open_tracker(report_to: str, folder: Path, settings: dict, last_step: int):
    """Return a tracker or None. last_step: the optimiser step that a run continues after; 0: a new run."""
    if report_to == "none":
        return None
    if report_to == "tensorboard":
        return TensorBoard(folder, last_step)
    return Service(report_to, folder, settings, last_step)


def refuse_missing(report_to: str) -> None:
    """Raise ValueError, one line, if a tracker is not installed."""
    if report_to in ("wandb", "trackio") and not importlib.util.find_spec(report_to):
        raise ValueError(f"--report_to={report_to}: is not installed; pip install {report_to}")


class TensorBoard:
    """Write event files into the run folder. Of a resumed run, earlier events after last_step are dropped."""

    def __init__(self, folder: Path, last_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.writer = SummaryWriter(folder / "tensorboard", purge_step=last_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def show(self, step: int, completions: list[dict]) -> None:
        """Write nothing: report.html shows completions."""

    def close(self) -> None:
        self.writer.close()


class Service:
    """Log to wandb, or to trackio, which has the same interface. A resumed run continues its entry there."""

    def __init__(self, report_to: str, folder: Path, settings: dict, last_step: int):
        self.service, name = importlib.import_module(report_to), folder / "tracker_name"
        if last_step == 0 or not name.exists():
            name.write_text(f"{folder.name}-{uuid.uuid4().hex[:8]}")
        options = {"project": "plain-grpo", "name": name.read_text(), "resume": "allow", "config": settings}
        if report_to == "wandb":
            options |= {"id": name.read_text(), "dir": str(folder)}
            options["project"] = os.environ.get("WANDB_PROJECT") or options["project"]
        self.service.init(**options)

    def log(self, step: int, values: dict[str, float]) -> None:
        self.service.log(values, step=step)

    def show(self, step: int, completions: list[dict]) -> None:
        """Log completions as a table, with each conversation as one text."""
        from pandas import DataFrame  # comes with datasets

        table = DataFrame(completions, columns=list(COLUMNS))
        table = table.assign(prompt=table.prompt.map(as_text), completion=table.completion.map(as_text))
        self.service.log({"completions": self.service.Table(dataframe=table)}, step=step)

    def close(self) -> None:
        self.service.finish()
