"""
Calling the reward functions of users: arguments as in TRL, the time limit, async functions, reports beside
the points, and errors that name the function. wrap_reward_functions is what others call.
"""

import asyncio
import inspect
import math
import re
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from numbers import Real
from pathlib import Path
from types import SimpleNamespace

import torch

from engine.errors import RunError, exits_as_errors, in_one_line
from rewards import COLUMNS_NOT_PASSED, name_of, read_rewards, select_tokens, text_of

# Arguments that are no columns, and columns that are not passed to functions.
PROVIDED = ("prompts", "completions", "completion_ids", "prompt_ids", "sampling_logp", "trainer_state",
            "environments", "log_extra", "log_metric")
RESERVED = (*PROVIDED, *COLUMNS_NOT_PASSED)
TOKEN_IDS = re.compile(r"(typing\.)?list\[(typing\.)?list\[int\]\]", re.IGNORECASE)      # an annotation
ONLY_BY_NAME = ("sampling_logp", "prompt_ids")            # not passed as part of **columns
ANSWER_NAMES = ("solution", "target", "ground_truth")     # further parameter names for the answer


class NoResult(ValueError):
    """Report that a call returned something else than points, or took too long."""


class OutOfTime(KeyboardInterrupt):
    """Interrupt a call: functions often catch Exception, but not this."""


@dataclass
class Reports:
    """Reports of calls of reward functions about B completions, besides their rewards."""

    extra: list[dict] = field(default_factory=list)       # B, name -> value, from log_extra
    metrics: list[tuple[str, float]] = field(default_factory=list)               # from log_metric
    failures: list[dict] = field(default_factory=list)    # unscored calls: function and error

    def log_extra(self, name: str, values) -> None:
        """Keep a value for each completion, for rollouts.jsonl."""
        values = values.tolist() if hasattr(values, "tolist") else values
        for row, value in zip(self.extra, values, strict=True):
            row[name] = value

    def log_metric(self, name: str, value: float) -> None:
        """Keep a number for metrics.jsonl, which has the mean of a step's calls."""
        self.metrics.append((name, float(value)))

    def means(self) -> dict[str, float]:
        """Return the mean of each metric, without NaN."""
        values = defaultdict(list)
        for name, value in self.metrics:
            values[name].append(value)
        return {name: float(torch.tensor(numbers).nanmean()) for name, numbers in values.items()}


def wrap_reward_functions(
    functions: list[Callable], rollout, config, trainer_state=None
) -> tuple[list[Callable], Reports]:
    """Return functions for compute_rewards_for_completions that call the given ones, and their reports.

    rollout   if it has turn_points (B, T), functions get the points of a conversation's turns, and one with
              NaN among them is unscored: its environment raised. environments are passed on
    config    a GRPOConfig. reward_errors "raise": stop, naming the function and its error; "none": leave all
              B completions unscored. reward_timeout: seconds for one call; 0: no limit. Taking longer is an
              error
    trainer_state  global_step, max_steps and epoch, as in TRL; None: step 0 of 1
    returns   functions of the same names; reports, filled while these are called
    """
    mask, turn_points = rollout.completion_mask, rollout.turn_points
    reports = Reports([{} for _ in mask])
    group_size, unscored = len(mask) // len(rollout.prompt_ids), [False] * len(mask)
    prompt_ids = select_tokens(rollout.prompt_ids, rollout.prompt_mask)
    provided = dict(
        sampling_logp=select_tokens(rollout.sampling_logp, mask),
        prompt_ids=[row for row in prompt_ids for _ in range(group_size)],
        trainer_state=trainer_state or SimpleNamespace(global_step=0, max_steps=1, epoch=0.0),
        log_extra=reports.log_extra, log_metric=reports.log_metric)
    if turn_points is not None:
        ends = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)       # (B, T), of turns
        provided["turn_points"] = select_tokens(turn_points, ends)
        unscored = turn_points.isnan().any(dim=1).tolist()
    if environments := getattr(rollout, "environments", None):
        provided["environments"] = environments

    def wrap(function: Callable) -> Callable:
        def start(**arguments) -> Callable:
            points = start_scoring(function, arguments | provided, reports, config)
            return lambda: [math.nan if failed else p for p, failed in zip(points(), unscored, strict=True)]

        start.__name__ = name_of(function)
        return start

    return list(map(wrap, functions)), reports


def start_scoring(function: Callable, arguments: dict, reports: Reports, config) -> Callable:
    """Return a function that returns the points of a call: None: could not score; NaN: failed.

    An async function begins here, beside others. Each call has lists of its own, of the same cells.
    """
    completions = arguments["completions"]
    # Other examples have these columns.
    absent = dict.fromkeys(missing_columns(function, {*arguments}), [None] * len(completions))
    own = absent | accepted(function, arguments)
    own = {name: list(value) if isinstance(value, list) else value for name, value in own.items()}

    async def call_async():
        with exits_as_errors():                           # SystemExit would end the event loop
            return await function(**own)

    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    call = start_coroutine(call_async()) if is_async else exits_as_errors()(partial(function, **own))

    def points() -> list[float | None]:
        try:
            return parse_points(call_with_timeout(config.reward_timeout, call), name_of(function), reports)
        except Exception as error:
            if config.reward_errors == "raise":
                raise RunError(error_message(function, error, completions)) from error
            words = str(error) if isinstance(error, NoResult) else in_one_line(error)
            reports.failures.append({"function": name_of(function), "error": words})
            return [math.nan] * len(completions)

    return points


# ---- arguments and columns ---------------------------------------------------------------------------------


def accepted(function: Callable, arguments: dict) -> dict:
    """Return the arguments that a function has parameters for: if it accepts any, all but ONLY_BY_NAME.

    The answer has the names of others too. A parameter `completions: list[list[int]]` gets token ids.
    """
    parameters = inspect.signature(function).parameters
    accepts_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    if "completions" in parameters and TOKEN_IDS.fullmatch(str(parameters["completions"].annotation)):
        arguments = arguments | {"completions": arguments.get("completion_ids")}
    if "answer" in arguments:
        aliases = [name for name in ANSWER_NAMES if name in parameters]
        arguments = dict.fromkeys(aliases, arguments["answer"]) | arguments
    passed = set(parameters) | (arguments.keys() - set(ONLY_BY_NAME) if accepts_any else set())
    return {name: value for name, value in arguments.items() if name in passed}


def columns_of(examples: list[dict]) -> set[str]:
    """Return the names of the columns that functions may get: all of any example but the reserved ones."""
    return {name for example in examples for name in example} - set(RESERVED)


def parameters_of(functions: list[Callable | None]) -> set[str]:
    """Return the names of the parameters of functions, also of those that they call for each completion."""
    called = [each for function in functions for each in (function, *getattr(function, "args", ()))]
    return {name for each in called if callable(each) for name in inspect.signature(each).parameters}


def missing_columns(function: Callable, columns: set[str]) -> list[str]:
    """Return the required parameters of a function that no column of the data provides."""
    provided = columns - set(RESERVED) | set(PROVIDED)
    provided |= set(ANSWER_NAMES) if "answer" in columns else set()
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    by_name = [p.name for p in required if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in by_name if name not in provided]


# ---- calls -------------------------------------------------------------------------------------------------


def start_coroutine(coroutine: Coroutine) -> Callable:
    """Begin a coroutine, beside others. Return a function that waits for its result."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())

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
    """Return call(), or raise NoResult after that many seconds; 0: no limit.

    A timer's signal interrupts Python code, waiting and regular expressions, but no other C code, and only in
    the main thread: elsewhere, and after a function's own signal.alarm, there is no limit. A thread that is
    given up on would go on, and functions that set an alarm, as math-verify does, fail in one.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
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
        raise NoResult(f"no result within {seconds:g} s (--reward_timeout)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse_points(returned, name: str, reports: Reports) -> list[float | None]:
    """Convert what a function returned to its points, None for NaN.

    A dict for each completion, as verl's functions return it, has the points as `score`. All its values are
    logged as name/key, and the mean of numbers as reward/name/key.
    """
    outputs: dict[str, list] = {}
    if isinstance(returned, list) and any(isinstance(row, dict) for row in returned):
        rows = [row if isinstance(row, dict) else {"score": row} for row in returned]
        outputs = {key: [row.get(key) for row in rows] for key in chain(*rows)}
        returned = outputs.get("score")
    try:
        points = read_rewards(returned, len(reports.extra), "it")
    except ValueError as error:
        raise NoResult(error) from None
    for key, values in outputs.items():
        reports.log_extra(f"{name}/{key}", values)
        reports.metrics += [(f"reward/{name}/{key}", float(v)) for v in values if isinstance(v, Real)]
    return [None if p is None or math.isnan(p) else p for p in points]


def error_message(function: Callable, error: Exception, completions: list) -> str:
    """Return a line with the function, its error with file and line, a completion, and what to do."""
    name = name_of(function)
    if isinstance(error, NoResult):
        return f"reward function {name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    frame = (own or frames)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    fix = "Let it return None for what it cannot score, or pass --reward_errors none."
    first = f"on {len(completions)} completions, the first is {text_of(completions[0])!r:.80}"
    return f"reward function {name} raised {in_one_line(error)} ({where}); {first}. {fix}"
