"""
Records of a run folder, and numbers as text.
"""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path

from config import Config
from engine.packing import completion_lengths


def completion_records(experience, after=None) -> list[dict]:
    """Return the lines of rollouts.jsonl, one for each completion: texts, rewards, and tokens for --replay.

    experience  an Experience;  after  LogProbs of its rollout after the updates
    """
    examples, rollout = experience.examples, experience.rollout
    groups, advantages = experience.groups, experience.advantages
    tied = [] if groups is None else groups.tied.tolist()
    group_size = len(rollout.completions) // len(examples)
    records = []
    for row, text in enumerate(rollout.completions):
        p, g, mask = row // group_size, row % group_size, rollout.completion_mask[row]
        length = int(completion_lengths(mask[None]))      # with the tokens of an environment

        def sampled_only(numbers, mask=mask, length=length):                  # None for environments' tokens
            pairs = zip(numbers[:length].tolist(), mask[:length].tolist(), strict=True)
            return [number if sampled else None for number, sampled in pairs]

        record = {"prompt": examples[p]["prompt"], "completion": text}
        if groups is not None:
            by_token = advantages.shape[1] > 1
            record |= {
                "rewards": {name: or_none(points[p, g]) for name, points in groups.per_function.items()},
                "reward": or_none(groups.scores[p, g]), "tied": tied[p],
                "advantage": or_none((advantages[row][mask] if by_token else advantages[row]).mean()),
            }
            if any(extra := groups.reports.extra[row : row + 1]):
                record["extra"] = extra[0]
            if by_token:
                record["token_advantages"] = sampled_only(advantages[row])
            if after is not None:
                for name, numbers in ("logp_after", after.logp), ("entropies", after.entropy):
                    finite = map(or_none, sampled_only(numbers[row]))
                    record[name] = [None if number is None else round(number, 5) for number in finite]
        record |= {
            "finished": bool(rollout.finished[row]),
            "tokens": int(mask.sum()),
            "group": p,
            "completions_of_step": len(rollout.completions),
            "prompt_ids": rollout.prompt_ids[p][rollout.prompt_mask[p]].tolist(),
            "completion_ids": rollout.completion_ids[row, :length].tolist(),
            "sampling_logp": sampled_only(rollout.sampling_logp[row]),
        }
        if rollout.turn_points is not None:
            record["turn_points"] = [or_none(points) for points in rollout.turn_points[row, :length]]
        records.append(record)
    return records


def held_out_text(result: dict, config: Config) -> str:
    """Return "accuracy 0.910 [0.870, 0.940] of 256", or points if correctness is not a reward function."""
    by_accuracy = not config.training.use_grpo or "correctness" in config.grpo.reward_functions
    if by_accuracy and "eval_accuracy" in result:
        low, high = result["eval_accuracy_low"], result["eval_accuracy_high"]
        return f"accuracy {result['eval_accuracy']:.3f} [{low:.3f}, {high:.3f}] of {result['eval_problems']}"
    scored = []
    for name in [name.removeprefix("eval_reward/") for name in result if name.startswith("eval_reward/")]:
        mean, low, high = (result.get(f"eval_reward{end}/{name}") for end in ("", "_low", "_high"))
        if name != "correctness" and or_none(mean) is not None:
            interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
            scored.append(f"{name} {mean:.3f}{interval} points")
    return ", ".join(scored) or "nothing could be scored"


def points_text(reward: float | None) -> str:
    """Return a reward as "+1.30", or "?" if no function could score."""
    return "?" if reward is None else f"{reward:+.2f}"


def or_none(value) -> float | None:
    """Return a number for JSON: None for NaN, infinities and None."""
    with suppress(OverflowError):                         # an integer beyond all floats
        return float(value) if value is not None and math.isfinite(value) else None


# How a line of rollouts.jsonl begins. Steps are found by it, because parsing gigabytes takes minutes.
HEAD = re.compile(rb'\s*{\s*"step":\s*(\d{1,15}),\s*"phase":\s*"(\w+)"')


def parse_record(line: bytes) -> dict | None:
    """Return the record in a line, with an integer step and a phase; None if the line is damaged."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and type(record.get("step")) is int
    return record if known and isinstance(record.get("phase"), str) else None


def read_jsonl(path: Path) -> list[dict]:
    """Read metrics.jsonl or a short file of records, [] if there is none. Damaged lines are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        records = [parse_record(line) for line in file]
    print_left_out(path, records.count(None))
    # An integer beyond all floats is infinite, as a float beyond them is.
    return [{name: math.inf if type(value) is int and abs(value) > 2**1000 else value
             for name, value in record.items()} for record in records if record is not None]


def read_steps(path: Path, every: int = 1) -> Iterator[list[dict]]:
    """Yield the records of every n-th step of rollouts.jsonl, one step at a time; the others are not parsed.

    A step that is not whole, as a kill leaves it, is left out: a line of it is damaged or missing.
    """
    step, left_out = None, 0

    def step_of(line: bytes):
        nonlocal step
        if head := HEAD.match(line):
            step = head.groups()
        return step if head or line.endswith(b"\n") else None                    # None: a last line, cut off

    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, (_, lines) in enumerate(groupby(file, key=step_of)):
            if number % every:
                continue
            records = [parse_record(line) for line in lines]
            while records and records[-1] is None:        # or they belong to the step after it
                left_out += records.pop() is None
            whole = records and None not in records
            if whole and len(records) == records[0].get("completions_of_step", len(records)):
                yield records
            else:
                left_out += len(records)
    print_left_out(path, left_out)


def print_left_out(path: Path, count: int) -> None:
    """Print how many lines of a file were left out, if any."""
    if count:
        warn_once(f"{path}: left out {count} lines that are damaged or belong to a step that is not whole")


@cache
def warn_once(line: str) -> None:
    """Print a line on stderr, the first time in this process."""
    print(line, file=sys.stderr)


def cut_after(path: Path, last_step: int) -> None:
    """Remove what follows the last line of steps up to last_step, or everything for 0, in place.

    Damaged lines before it are kept. Reads a line at a time: rollouts.jsonl grows to gigabytes.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = position = 0
        for line in file:
            position += len(line)
            head = HEAD.match(line)
            if head and line.endswith(b"\n") and int(head[1]) <= last_step > 0:
                end = position
        file.truncate(end)


def replace_text(path: Path, text: str) -> None:
    """Replace a file, completely or not at all: a run that is killed meanwhile keeps the old one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())                       # before the old one goes
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)                       # after an error, such as a full disk
