"""
Lines of the files in a run folder, and how figures are shown.
"""

import json
import math
from pathlib import Path

from config import Config
from engine.packing import completion_lengths


def completion_records(
    examples: list[dict], rollout, rewards=None, per_function=None, advantages=None, after=None
) -> list[dict]:
    """A line of rollouts.jsonl for each completion: what people want to see, and after it what --replay needs.

    rewards and each of per_function are (P, G); advantages (B, 1), or (B, T), of which the mean is shown; after: LogProbs of
    the policy as the updates on this rollout left it
    """
    group_size = len(rollout.completions) // len(examples)
    records = []
    for row, text in enumerate(rollout.completions):
        p, g, mask = row // group_size, row % group_size, rollout.completion_mask[row]
        length = int(completion_lengths(mask[None]))      # with what an environment said in between

        def of_own_tokens(numbers, mask=mask, length=length):                    # None: the policy did not choose this token
            numbers = zip(numbers[:length].tolist(), mask[:length].tolist(), strict=True)
            return [number if own else None for number, own in numbers]

        record = {"prompt": examples[p]["prompt"], "completion": text}
        if rewards is not None:
            shown = advantages[row][mask] if advantages.shape[1] > 1 else advantages[row]
            record |= {
                "rewards": {name: or_none(points[p, g]) for name, points in per_function.items()},
                "reward": or_none(rewards[p, g]),
                "advantage": or_none(shown.mean()),
            }
            if advantages.shape[1] > 1:
                record["token_advantages"] = of_own_tokens(advantages[row])
            if after is not None:
                for name, numbers in ("logp_after", after.logp), ("entropies", after.entropy):
                    known = (None if number is None else or_none(number) for number in of_own_tokens(numbers[row]))
                    record[name] = [None if number is None else round(number, 5) for number in known]
        records.append(record | {
            "finished": bool(rollout.finished[row]),
            "tokens": int(mask.sum()),
            "group": p,
            "prompt_ids": rollout.prompt_ids[p][rollout.prompt_mask[p]].tolist(),
            "completion_ids": rollout.completion_ids[row, :length].tolist(),
            "sampling_logp": of_own_tokens(rollout.sampling_logp[row]),
        } | ({} if rollout.turn_points is None else {"turn_points": [or_none(p) for p in rollout.turn_points[row, :length]]}))
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
