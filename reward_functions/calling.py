"""
Calling a reward function: its arguments, the time limit, what it returns and reports, and errors that name
the function and the completion.
"""

import asyncio
import inspect
import math
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.errors import RunError, exits_as_errors
from reward_functions.answers import text_of
from reward_functions.loading import accepted, columns_of, name_of


MOST_POINTS = 1e15              # of which the square is a number of float32 as well


class RewardError(RunError):
    """Report that a reward function failed. The message has the function, the error and the completion."""


class CallFailed(ValueError):
    """Report that a call returned no points, or took too long. No single completion is the cause."""


@dataclass
class Reports:
    """Reports of reward functions about B completions, besides their points."""

    extra: list[dict] = field(default_factory=list)       # B, name -> value, from log_extra
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # from log_metric
    failures: list[dict] = field(default_factory=list)    # calls that failed: function, error, completion

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


def build_arguments(
    rollout, examples: list[dict], turn_points: Tensor | None, trainer_state, functions: list[Callable]
) -> dict:
    """Return the arguments of the reward functions, lists of B entries: columns are repeated for siblings.

    functions  sampling_logp and prompt_ids are left out unless one of these has a parameter of the name
    """
    group_size, mask = len(rollout.completions) // len(examples), rollout.completion_mask
    rows = [example for example in examples for _ in range(group_size)]
    prompts = [row.get("original_prompt", row["prompt"]) for row in rows]
    names = {name for function in functions for name in inspect.signature(function).parameters}

    def select(values: Tensor, mask: Tensor) -> list[list]:
        return [row[chosen].tolist() for row, chosen in zip(values, mask, strict=True)]

    arguments = dict(
        completions=list(map(match_prompt_format, rollout.completions, prompts)), prompts=prompts,
        completion_ids=select(rollout.completion_ids, mask),
        trainer_state=trainer_state or SimpleNamespace(global_step=0, max_steps=1, epoch=0.0),
        **{name: [row.get(name) for row in rows] for name in sorted(columns_of(examples))},
    )
    if "sampling_logp" in names:
        arguments["sampling_logp"] = select(rollout.sampling_logp, mask)
    if "prompt_ids" in names:
        ids = select(rollout.prompt_ids, rollout.prompt_mask)
        arguments["prompt_ids"] = [row for row in ids for _ in range(group_size)]
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
          alone, so that the groups on which it does not raise are scored; all of that within the time limit
    """
    name, count = name_of(function), len(arguments["completions"])
    points, failed = torch.full((count,), math.nan, dtype=torch.float64), torch.ones(count, dtype=torch.bool)
    try:
        return parse_points(call_with_timeout(timeout, call), name, reports), ~failed
    except Exception as raised:
        error, completion, known = raised, f"all of {count}", len(reports.failures)
    with suppress(CallFailed):                            # no time is left
        if on_error == "none" and not isinstance(error, CallFailed):
            again = partial(call_groups, function, arguments, reports, group_size, points, failed)
            call_with_timeout(timeout, again)
        elif not isinstance(error, CallFailed):
            completion = call_with_timeout(timeout, partial(find_failing_completion, function, arguments))
    if on_error == "none":
        if len(reports.failures) == known:
            reports.failures.append({"function": name, "error": describe(error), "completion": completion})
        return points, failed
    if isinstance(error, CallFailed):
        raise RewardError(f"reward function {name}: {error}") from None
    fix = "Let it return None for what it cannot score, or pass --reward_errors none."
    if isinstance(arguments["completions"][0], str) and isinstance(error, IndexError | KeyError | TypeError):
        fix += (
            ' Prompts are text, so completions are text: if it reads completion[0]["content"], make each '
            'prompt a list of messages, [{"role": "user", "content": ...}].'
        )
    raise RewardError(
        f"reward function {name} raised {describe(error)} ({locate_error(error, function)}); "
        f"on completion {completion!r}. {fix}"
    ) from error


def describe(error: Exception) -> str:
    """Return an error in one line, with its type unless the message is ours."""
    kind = "" if isinstance(error, CallFailed) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())


def call_groups(function: Callable, arguments: dict, reports: Reports, size: int, points, failed) -> None:
    """Call a function for each group alone, fill in points and failed (B,), and report the failures."""
    for rows, part, outcome in call_in_parts(function, arguments, reports, size):
        if isinstance(outcome, Tensor):
            points[rows], failed[rows] = outcome, False
        else:
            cause = {"error": describe(outcome), "completion": find_failing_completion(function, part)}
            reports.failures.append({"function": name_of(function)} | cause)


def find_failing_completion(function: Callable, arguments: dict) -> str:
    """Return the first completion on which the function raises if called with this completion alone."""
    completions = arguments["completions"]
    for rows, _, outcome in call_in_parts(function, arguments, Reports([{} for _ in completions]), 1):
        if not isinstance(outcome, Tensor):
            return text_of(completions[rows.start])
    return f"none alone; all {len(completions)} together"


def call_in_parts(function: Callable, arguments: dict, reports: Reports, size: int) -> Iterator[tuple]:
    """Call a function for `size` completions at a time. Yield their rows, arguments, and points or error."""
    for start in range(0, len(arguments["completions"]), size):
        rows = slice(start, start + size)
        part = {name: value[rows] if isinstance(value, list) else value for name, value in arguments.items()}
        of_part = Reports(reports.extra[rows], reports.metrics)
        try:
            yield rows, part, parse_points(start_call(function, part, of_part)(), name_of(function), of_part)
        except Exception as error:
            yield rows, part, error


def start_call(function: Callable, arguments: dict, reports: Reports, timeout: float = 0.0) -> Callable:
    """Return a function that returns the result of a call. An async function begins here, beside others.

    Each call has lists of its own: what one changes in them, the others do not see.
    """
    logs = {"log_extra": reports.log_extra, "log_metric": reports.log_metric}
    own = {name: own_copy(value) for name, value in accepted(function, arguments | logs).items()}

    def call():
        with exits_as_errors():
            return function(**own)

    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return call

    async def awaited():
        with exits_as_errors():                           # SystemExit would end the event loop
            return await function(**own)

    async def limited():                                  # ends after the call below has given up
        return await asyncio.wait_for(awaited(), timeout + 1 if timeout else None)

    return asyncio.run_coroutine_threadsafe(limited(), event_loop()).result


def own_copy(value):
    """Return lists and dicts copied, at any depth, and anything else as it is."""
    if isinstance(value, list):
        return [own_copy(part) for part in value]
    return {name: own_copy(part) for name, part in value.items()} if type(value) is dict else value


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all async functions, in a thread: a client they keep belongs to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def call_with_timeout(seconds: float, call: Callable):
    """Return call(), or raise CallFailed after that many seconds; 0: no limit.

    In the main thread a timer interrupts Python code, waiting and regular expressions, but no other C code
    that holds the interpreter lock. The function may set an alarm of its own; that replaces the timer, of
    which a process has one, so a thread sends another signal. In other threads, and on Windows, the call goes
    on in a thread. Run programs that a model wrote in reward_functions/sandbox.py.
    """
    if not seconds:
        return call()
    out_of_time = CallFailed(f"no result within {seconds:g} s (--reward_timeout)")
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        future = ThreadPoolExecutor(1).submit(call)
        if not wait([future], seconds).done:
            raise out_of_time
        return future.result()
    late = ended = False

    def interrupt(*_) -> None:
        nonlocal late
        if not ended:
            late = True
            raise KeyboardInterrupt                       # functions often catch Exception

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGVTALRM)}
    started, outer = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    thread = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGVTALRM))
    thread.start()
    try:
        return call()
    finally:
        ended = True
        thread.cancel()
        thread.join()                                     # it sends nothing once the handlers are gone
        left = outer[0] and max(1e-3, outer[0] + started - time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, left, outer[1])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if late:
            raise out_of_time


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
        raise CallFailed(f"it returned {returned!r:.60}; {expected}") from None
    for length in {len(points), *map(len, outputs.values())} - {count}:
        raise CallFailed(f"it returned {length} values for {count} completions; {expected}")
    if (points.abs() > MOST_POINTS).any():
        most = f"an infinite number of points, or more than {MOST_POINTS:g}"
        raise CallFailed(f"it returned {most}; return None if it cannot score")
    for output, values in outputs.items():
        reports.log_extra(f"{name}/{output}", values)
        reports.metrics[f"reward/{name}/{output}"] += [float(v) for v in values if isinstance(v, int | float)]
    return points


def locate_error(error: Exception, function: Callable) -> str:
    """Return the file and line of an error, in the function's own file if the traceback has it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    return f"{Path((own or frames)[-1].filename).name}, line {(own or frames)[-1].lineno}"
