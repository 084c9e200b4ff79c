"""
Lines of the files in a run folder, and how figures are shown.
"""

import json
import math
from pathlib import Path

from config import Config
from engine.packing import completion_lengths


def completion_records(experience, after=None) -> list[dict]:
    """Return a line of rollouts.jsonl for each completion: what people look at first, then what --replay needs.

    experience  an Experience; after: LogProbs of its rollout after the updates
    """
    examples, rollout, groups, advantages = experience.examples, experience.rollout, experience.groups, experience.advantages
    group_size = len(rollout.completions) // len(examples)
    records = []
    for row, text in enumerate(rollout.completions):
        p, g, mask = row // group_size, row % group_size, rollout.completion_mask[row]
        length = int(completion_lengths(mask[None]))      # with tokens of an environment

        def sampled_only(numbers, mask=mask, length=length):                     # None: the policy did not choose this token
            numbers = zip(numbers[:length].tolist(), mask[:length].tolist(), strict=True)
            return [number if own else None for number, own in numbers]

        record = {"prompt": examples[p]["prompt"], "completion": text}
        if groups is not None:
            by_token = advantages.shape[1] > 1
            record |= {
                "rewards": {name: or_none(points[p, g]) for name, points in groups.per_function.items()},
                "reward": or_none(groups.scores[p, g]),
                "advantage": or_none((advantages[row][mask] if by_token else advantages[row]).mean()),
            }
            if by_token:
                record["token_advantages"] = sampled_only(advantages[row])
            if after is not None:
                for name, numbers in ("logp_after", after.logp), ("entropies", after.entropy):
                    finite = (None if number is None else or_none(number) for number in sampled_only(numbers[row]))
                    record[name] = [None if number is None else round(number, 5) for number in finite]
        record |= {
            "finished": bool(rollout.finished[row]),
            "tokens": int(mask.sum()),
            "group": p,
            "prompt_ids": rollout.prompt_ids[p][rollout.prompt_mask[p]].tolist(),
            "completion_ids": rollout.completion_ids[row, :length].tolist(),
            "sampling_logp": sampled_only(rollout.sampling_logp[row]),
        }
        if rollout.turn_points is not None:
            record["turn_points"] = [or_none(points) for points in rollout.turn_points[row, :length]]
        records.append(record)
    return records


def held_out_text(result: dict, config: Config) -> str:
    """'accuracy 0.910 [0.870, 0.940] of 256', or the points of what is trained on instead of correctness, for people."""
    if "eval_accuracy" in result and (not config.training.use_grpo or "correctness" in config.grpo.reward_functions):
        low, high = result["eval_accuracy_low"], result["eval_accuracy_high"]
        return f"accuracy {result['eval_accuracy']:.3f} [{low:.3f}, {high:.3f}] of {result['eval_problems']}"
    points = {n.removeprefix("eval_reward/"): p for n, p in result.items() if n.startswith("eval_reward/")}
    scored = [f"{n} {p:.3f} points" for n, p in points.items() if p is not None and math.isfinite(p) and n != "correctness"]
    return ", ".join(scored) or "nothing could be scored"


def points_text(reward: float | None) -> str:
    """'+1.30', or '?' where no function could score."""
    return "?" if reward is None else f"{reward:+.2f}"


def or_none(value) -> float | None:
    """A number that JSON can hold: NaN and infinities become null, and what is None stays it."""
    return float(value) if value is not None and math.isfinite(value) else None


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a .jsonl file; none if there is no file. A last line cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def replace_text(path: Path, text: str) -> None:
    """Write a file anew, all of it or nothing: a run that is killed meanwhile keeps the old one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)
