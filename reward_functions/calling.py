"""
Call the reward functions of users: with arguments as in TRL, a time limit, async functions, reports beside
the rewards, and errors that name the function. The entry point is wrap_reward_functions.
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
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from numbers import Real
from pathlib import Path
from types import SimpleNamespace

import torch

from engine.errors import RunError, exits_as_errors, in_one_line
from rewards import COLUMNS_NOT_PASSED, name_of, read_rewards, select_tokens, text_of

# Arguments that are not columns, and columns that are not passed to functions.
PROVIDED = ("prompts", "completions", "completion_ids", "prompt_ids", "sampling_logp", "trainer_state",
            "environments", "log_extra", "log_metric")
RESERVED = (*PROVIDED, *COLUMNS_NOT_PASSED)
TOKEN_IDS = re.compile(r"(typing\.)?list\[(typing\.)?list\[int\]\]", re.IGNORECASE)      # an annotation
ONLY_BY_NAME = ("sampling_logp", "prompt_ids")            # not passed as part of **columns
ANSWER_NAMES = ("solution", "target", "ground_truth")     # further parameter names for the answer


class NoResult(ValueError):
    """A call returned something other than rewards, or took too long."""


class OutOfTime(KeyboardInterrupt):
    """Interrupts a call: functions often catch Exception, but not KeyboardInterrupt."""


@dataclass
class Reports:
    """Reports of the calls of reward functions for B completions, besides rewards."""

    extra: list[dict] = field(default_factory=list)       # B, name -> value, from log_extra
    metrics: list[tuple[str, float]] = field(default_factory=list)               # from log_metric
    failures: list[dict] = field(default_factory=list)    # unscored calls: function and error
    running: list[Future] = field(default_factory=list)   # calls of async functions

    def log_extra(self, name: str, values) -> None:
        """Record a value for each completion, for rollouts.jsonl."""
        values = values.tolist() if hasattr(values, "tolist") else values
        for row, value in zip(self.extra, values, strict=True):
            row[name] = value

    def log_metric(self, name: str, value: float) -> None:
        """Record a number; metrics.jsonl has its mean over the calls of a step."""
        self.metrics.append((name, float(value)))

    def means(self) -> dict[str, float]:
        """Return the mean of each metric; NaN is ignored."""
        values = defaultdict(list)
        for name, value in self.metrics:
            values[name].append(value)
        return {name: float(torch.tensor(numbers).nanmean()) for name, numbers in values.items()}


def wrap_reward_functions(
    functions: list[Callable], rollout, grpo_config, trainer_state=None
) -> tuple[list[Callable], Reports]:
    """Return functions for compute_rewards_for_completions that call the given ones, and their reports,
    which are filled during the calls.

    rollout        a conversation with NaN among the rewards of its turns is unscored: its environment raised
    grpo_config    has reward_errors and reward_timeout
    trainer_state  global_step, max_steps and epoch, as in TRL; None: step 0 of 1
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
            result = start_scoring(function, arguments | provided, reports, grpo_config)
            return lambda: [math.nan if failed else r for r, failed in zip(result(), unscored, strict=True)]

        start.__name__ = name_of(function)
        return start

    return list(map(wrap, functions)), reports


def start_scoring(function: Callable, arguments: dict, reports: Reports, grpo_config) -> Callable:
    """Return a function that waits for the rewards of a call: None: could not score; NaN: failed.

    An async function starts here and runs beside others. Each call gets its own lists, with the same cells.
    """
    completions = arguments["completions"]
    # Only other examples have these columns.
    absent = dict.fromkeys(missing_columns(function, {*arguments}), [None] * len(completions))
    own = absent | accepted(function, arguments)
    own = {name: list(value) if isinstance(value, list) else value for name, value in own.items()}
    call = partial(function, **own)

    async def call_async():
        with exits_as_errors():                           # SystemExit would end the event loop
            return await function(**own)

    if any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        reports.running.append(start_coroutine(call_async()))
        call = partial(wait_for, reports.running[-1])

    def result() -> list[float | None]:
        try:
            returned = call_with_timeout(grpo_config.reward_timeout, call)
            return parse_rewards(returned, name_of(function), reports)
        except Exception as error:
            if grpo_config.reward_errors == "raise":
                for future in reports.running:            # of functions that have not been waited for
                    future.cancel()
                raise RunError(error_message(function, error, completions)) from error
            words = str(error) if isinstance(error, NoResult) else in_one_line(error)
            reports.failures.append({"function": name_of(function), "error": words})
            return [math.nan] * len(completions)

    return result


# ---- arguments and columns ---------------------------------------------------------------------------------


def accepted(function: Callable, arguments: dict) -> dict:
    """Return the arguments that a function has parameters for; if it accepts any, all but ONLY_BY_NAME.

    The answer is also passed under ANSWER_NAMES. A parameter `completions: list[list[int]]` gets token ids.
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
    """Return the names of the columns that functions may get: all but the reserved ones."""
    return {name for example in examples for name in example} - set(RESERVED)


def parameters_of(functions: list[Callable | None]) -> set[str]:
    """Return the parameter names of functions, and of functions that they call for each completion."""
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


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all async functions, in a thread: clients that they keep need one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def start_coroutine(coroutine: Coroutine) -> Future:
    """Start a coroutine, to run beside others. Return its future result."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop())


def wait_for(future: Future):
    """Return the result of a coroutine; cancel it if waiting is interrupted."""
    try:
        return future.result()
    finally:
        future.cancel()


@exits_as_errors()
def call_with_timeout(seconds: float, call: Callable):
    """Return call(), or raise NoResult after that many seconds; 0: no limit. SystemExit is a RuntimeError.

    A timer signal interrupts Python code, waiting and regular expressions, but no other C code. There is no
    limit in other threads than the main one, and after a function's own signal.alarm. Threads are no
    alternative: they cannot be stopped, and functions that set an alarm (math-verify) fail in them.
    """
    if not seconds or threading.current_thread() is not threading.main_thread():
        return call()

    def interrupt(*_) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)    # repeated: a thread pool waits for its threads
    try:
        result = call()
        signal.setitimer(signal.ITIMER_REAL, 0)           # inside the try, which catches a late signal
        return result
    except OutOfTime:
        raise NoResult(f"no result within {seconds:g} s (--reward_timeout)") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def parse_rewards(returned, name: str, reports: Reports) -> list[float | None]:
    """Convert the result of a function to rewards, with None for NaN. Of dicts, as verl's functions return,
    `score` is the reward; all values are logged as name/key, and the means of numbers as reward/name/key.
    """
    outputs: dict[str, list] = {}
    if isinstance(returned, list) and any(isinstance(row, dict) for row in returned):
        rows = [row if isinstance(row, dict) else {"score": row} for row in returned]
        outputs = {key: [row.get(key) for row in rows] for key in chain(*rows)}
        returned = outputs.get("score")
    try:
        rewards = read_rewards(returned, len(reports.extra), "it")
    except ValueError as error:
        raise NoResult(error) from None
    for key, values in outputs.items():
        reports.log_extra(f"{name}/{key}", values)
        reports.metrics += [(f"reward/{name}/{key}", float(v)) for v in values if isinstance(v, Real)]
    return [None if r is None or math.isnan(r) else r for r in rewards]


def error_message(function: Callable, error: Exception, completions: list) -> str:
    """Return a line with the function, its error with file and line, a completion, and how to fix it."""
    name, first = name_of(function), completions[0]
    if isinstance(error, NoResult):
        return f"reward function {name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == getattr(getattr(function, "__code__", None), "co_filename", "")]
    frame = (own or frames)[-1]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    fix = "Return None for completions that it cannot score, or pass --reward_errors none."
    if isinstance(first, str) and "string indices must be integers" in str(error):
        fix = "Completions are texts because the prompts are; pass prompts as messages."
    example = f"on {len(completions)} completions, the first is {text_of(first)!r:.80}"
    return f"reward function {name} raised {in_one_line(error)} ({where}); {example}. {fix}"
