"""
Calling a reward function: its arguments, the time limit, what it returns and reports, and errors that name
the function.
"""

import asyncio
import copy
import inspect
import math
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.errors import RunError, exits_as_errors, in_one_line
from reward_functions.answers import text_of
from reward_functions.loading import accepted, columns_of, name_of


MOST_POINTS = 1e15              # of which the square is a number of float32 as well


class RewardError(RunError):
    """Report that a reward function failed. The message has the function, the error and a completion."""


class NoPoints(ValueError):
    """Report that a call returned something else than points, or took too long."""


class OutOfTime(KeyboardInterrupt):
    """Interrupt a call: functions often catch Exception, but not this."""


@dataclass
class Reports:
    """Reports of reward functions about B completions, besides their points."""

    extra: list[dict] = field(default_factory=list)       # B, name -> value, from log_extra
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # from log_metric
    failures: list[dict] = field(default_factory=list)    # unscored calls: function, error, first completion

    def log_extra(self, name: str, values) -> None:
        """Keep a value for each completion, for rollouts.jsonl."""
        values = values.tolist() if hasattr(values, "tolist") else values
        for row, value in zip(self.extra, values, strict=True):
            row[name] = value

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number for metrics.jsonl, which has the mean of a step's calls."""
        self.metrics[name].append(float(value))

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, without NaN."""
        return {name: float(torch.tensor(values).nanmean()) for name, values in self.metrics.items()}

    def add(self, *others: "Reports") -> "Reports":
        """Append the reports about other completions; returns self."""
        for other in others:
            self.extra += other.extra
            self.failures += other.failures
            for name, values in other.metrics.items():
                self.metrics[name] += values
        return self


def build_arguments(rollout, examples: list[dict], turn_points: Tensor | None, trainer_state) -> dict:
    """Return the arguments of reward functions, lists of B entries: columns are repeated for siblings."""
    group_size, mask = len(rollout.completions) // len(examples), rollout.completion_mask
    rows = [example for example in examples for _ in range(group_size)]
    prompts = [row.get("original_prompt", row["prompt"]) for row in rows]

    def select(values: Tensor, mask: Tensor) -> list[list]:
        return [row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)]

    prompt_ids = select(rollout.prompt_ids, rollout.prompt_mask)
    arguments = dict(
        completions=list(map(match_prompt_format, rollout.completions, prompts)), prompts=prompts,
        completion_ids=select(rollout.completion_ids, mask),
        sampling_logp=select(rollout.sampling_logp, mask),
        prompt_ids=[row for row in prompt_ids for _ in range(group_size)],
        trainer_state=trainer_state or SimpleNamespace(global_step=0, max_steps=1, epoch=0.0),
        **{name: [row.get(name) for row in rows] for name in sorted(columns_of(examples))},
    )
    if turn_points is not None:
        ends = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)       # (B, T), of turns
        arguments["turn_points"] = select(turn_points, ends)
    return arguments


def match_prompt_format(completion: str | list[dict], prompt) -> str | list[dict]:
    """Return a completion in the format of its prompt, as in TRL: text, or chat messages."""
    if isinstance(completion, str) and isinstance(prompt, list) and isinstance(prompt[0], dict):
        return [{"role": "assistant", "content": completion}]
    return completion


def call_reward_function(
    function: Callable, call: Callable, arguments: dict, reports: Reports, group_size: int, on_error: str,
    timeout: float,
) -> tuple[Tensor, Tensor]:
    """Return the points (B,) float64, NaN for None, and (B,) bool: where the function failed.

    call  result of start_call. With on_error "none" a function that raises is called again for each group
          alone, so that the groups on which it does not raise are scored
    """
    completions = arguments["completions"]
    try:
        points = parse_points(call_with_timeout(timeout, call), name_of(function), reports)
        return points, torch.zeros(len(points), dtype=torch.bool)
    except Exception as error:
        if on_error == "raise":
            raise RewardError(error_message(function, error, completions)) from error
        if isinstance(error, NoPoints) or len(completions) == group_size:
            words = str(error) if isinstance(error, NoPoints) else in_one_line(error)
            report = {"error": words, "completion": text_of(completions[0])}
            reports.failures.append({"function": name_of(function)} | report)
            unscored = torch.full((len(completions),), math.nan, dtype=torch.float64)
            return unscored, torch.ones(len(completions), dtype=torch.bool)
    parts = []
    for start in range(0, len(completions), group_size):
        rows = slice(start, start + group_size)
        part = {name: value[rows] if isinstance(value, list) else value for name, value in arguments.items()}
        of_part = Reports(reports.extra[rows], reports.metrics, reports.failures)
        call = start_call(function, part, of_part)
        parts.append(call_reward_function(function, call, part, of_part, group_size, on_error, timeout))
    points, failed = zip(*parts, strict=True)
    return torch.cat(points), torch.cat(failed)


def start_call(function: Callable, arguments: dict, reports: Reports) -> Callable:
    """Return a function that returns the result of a call. An async function begins here, beside others.

    Each call has lists of its own: what one changes in them, the others do not see. So have siblings.
    """
    logs = {"log_extra": reports.log_extra, "log_metric": reports.log_metric}
    own = accepted(function, arguments | logs)
    own |= {name: list(map(copy.deepcopy, value)) for name, value in own.items() if isinstance(value, list)}

    async def call_async():
        with exits_as_errors():                           # SystemExit would end the event loop
            return await function(**own)

    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return exits_as_errors()(partial(function, **own))
    future = asyncio.run_coroutine_threadsafe(call_async(), event_loop())

    def result():
        try:
            return future.result()
        finally:
            future.cancel()                               # without effect, unless the wait was interrupted

    return result


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all async functions, in a thread: a client they keep belongs to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def call_with_timeout(seconds: float, call: Callable):
    """Return call(), or raise NoPoints after that many seconds; 0: no limit.

    A timer's signal interrupts Python code, waiting and regular expressions, but no other C code, and only in
    the main thread: elsewhere, on Windows, and after a function's own signal.alarm there is no limit. A
    thread that is given up on would go on, and functions that set an alarm, as math-verify does, fail in one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not seconds or not is_main or not hasattr(signal, "setitimer"):
        return call()

    def interrupt(*_) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)    # again: a thread pool waits for its threads then
    try:
        result = call()
        signal.setitimer(signal.ITIMER_REAL, 0)           # here, where a late signal is still caught
        return result
    except OutOfTime:
        raise NoPoints(f"no result within {seconds:g} s (--reward_timeout)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse_points(returned, name: str, reports: Reports) -> Tensor:
    """Convert a list, tuple, array or tensor to (B,) float64 points, NaN for None.

    Several outputs are a dict of lists or a list of dicts: each is logged as name/output, with its mean as
    reward/name/output, and the points are the output `score`, or without one the sum.
    """
    count, points, outputs = len(reports.extra), returned, {}
    expected = f"return a list with one number (or None) for each of the {count} completions"
    try:
        if isinstance(points, list | tuple) and any(isinstance(row, dict) for row in points):
            rows = [row or {} for row in points]
            points = {output: [row.get(output) for row in rows] for output in chain(*rows)}
        if isinstance(points, dict):
            outputs = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in points.items()}
            sums = (None if None in row else sum(row) for row in zip(*outputs.values(), strict=True))
            points = outputs["score"] if "score" in outputs else list(sums)
        if not isinstance(points, list | tuple) and not getattr(points, "ndim", 0):
            raise TypeError
        points = torch.tensor([math.nan if p is None else float(p) for p in points], dtype=torch.float64)
    except (TypeError, ValueError):
        raise NoPoints(f"it returned {returned!r:.60}; {expected}") from None
    for length in {len(points), *map(len, outputs.values())} - {count}:
        raise NoPoints(f"it returned {length} values for {count} completions; {expected}")
    if (points.abs() > MOST_POINTS).any():
        most = f"an infinite number of points, or more than {MOST_POINTS:g}"
        raise NoPoints(f"it returned {most}; return None if it cannot score")
    for output, values in outputs.items():
        reports.log_extra(f"{name}/{output}", values)
        reports.metrics[f"reward/{name}/{output}"] += [float(v) for v in values if isinstance(v, int | float)]
    return points


def error_message(function: Callable, error: Exception, completions: list) -> str:
    """Return a line with the function, its error with file and line, a completion, and what to do."""
    name = name_of(function)
    if isinstance(error, NoPoints):
        return f"reward function {name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    frame = (own or frames)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    fix = "Let it return None for what it cannot score, or pass --reward_errors none."
    if isinstance(completions[0], str) and isinstance(error, IndexError | KeyError | TypeError):
        fix += (
            ' Prompts are text, so completions are text: if it reads completion[0]["content"], make each '
            'prompt a list of messages, [{"role": "user", "content": ...}].'
        )
    first = f"on {len(completions)} completions, the first is {text_of(completions[0])!r:.80}"
    return f"reward function {name} raised {in_one_line(error)} ({where}); {first}. {fix}"
