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
from itertools import compress, groupby, pairwise, takewhile
from pathlib import Path

from config import Config
from logprobs import completion_lengths


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
    by_accuracy = not config.training.use_grpo or {"correctness", "none"} & {*config.grpo.reward_functions}
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


def points_of_turns(chosen: list[bool], points: list) -> list:
    """Return the points at the last token of each turn. chosen: True on tokens of the policy."""
    ends = [own and not following for own, following in pairwise([*chosen, False])]
    return list(compress(points, ends))


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
    """Return the record in a line, with an integer step and a phase; None if the line is cut or damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    known = isinstance(record, dict) and type(record.get("step")) is int
    return record if known and isinstance(record.get("phase"), str) else None


def step_of(line: bytes) -> tuple | None:
    """Return step and phase of a line, None if it is damaged at its beginning."""
    head = HEAD.match(line)
    return head and head.groups()


def read_jsonl(path: Path) -> list[dict]:
    """Read metrics.jsonl or a short file of records up to its first damaged line, [] if there is none."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        records = [parse_record(line) for line in file]
    whole = list(takewhile(lambda record: record is not None, records))
    if len(whole) < len(records):
        warn_once(f"{path}: line {len(whole) + 1} is damaged, as a kill leaves it; left out from there on")
    return whole


def read_steps(path: Path, every: int = 1) -> Iterator[list[dict]]:
    """Yield the records of every n-th step of rollouts.jsonl, one step at a time; the others are not parsed.

    Ends before a step of which lines are damaged or missing, as a kill leaves it.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, (_, lines) in enumerate(groupby(file, key=step_of)):
            if number % every:
                continue
            records = [parse_record(line) for line in lines]
            if None in records or records[0].get("completions_of_step") != len(records):
                warn_once(f"{path}: saved step {number + 1} is not whole; left out from there on")
                return
            yield records


@cache
def warn_once(line: str) -> None:
    """Print a line on stderr, the first time in this process."""
    print(line, file=sys.stderr)


def cut_after(path: Path, last_step: int) -> None:
    """Keep the lines up to last_step, or to the first one that is damaged, in place; none for 0.

    Reads a line at a time: rollouts.jsonl grows to gigabytes.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = 0
        for line in file:
            head = HEAD.match(line)
            if not head or not line.endswith(b"\n") or not int(head[1]) <= last_step > 0:
                break
            end += len(line)
        file.truncate(end)


def replace_text(path: Path, text: str) -> None:
    """Replace a file, completely or not at all: a run that is killed meanwhile keeps the old one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    flush(new)
    new.replace(path)


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
