"""
Measuring a model: ask it and score what it answers, and what these samples say: accuracy, pass@k, majority@n and the
difference between two models, each with a 95 % interval.

What varies from one measurement to the next is the problems, and the n completions of a problem stand and fall together: so
every interval is over problems, however many completions there are.

From summarise on nothing knows of a model: a problem is {"right": n bools, which of its completions are correct; "majority":
its majority_vote}, P of them.
"""

import math
from itertools import chain

import numpy as np
import torch

from engine.devices import gather_from_ranks, rank_slice
from engine.sampling_state import occurrences
from engine.sharding import gathered_weights
from environments.loading import responders
from reward_functions.answers import extract_answer, same_answer, text_of
from rewards import compute_rewards_for_completions, correctness
from sample import sample_completions_for_prompts

Z = 1.96                        # standard deviations to either side that hold 95 % of a normal distribution


def evaluate(model, tokenizer, examples: list[dict], config, *, seed: int, **options) -> dict:
    """One sampled completion for each problem, scored; each process takes its share. options: as for ask_and_score.

    returns  eval_accuracy (share correct) with eval_accuracy_low, eval_accuracy_high (95 %, Wilson), eval_problems,
             eval_reward/<function> (mean points) and eval_truncated (share). No accuracy where no answer is known.
    """
    _, points, truncated = ask_and_score(model, tokenizer, examples, config, seed=seed, num_completions=1, **options)
    columns = {name: of_function[:, 0] for name, of_function in points.items()}
    correct = columns["correctness"][~columns["correctness"].isnan()]
    result = {f"eval_reward/{name}": float(values.nanmean()) for name, values in columns.items()}
    result |= {"eval_problems": len(correct) or len(examples), "eval_truncated": truncated / len(examples)}
    if len(correct):
        low, high = wilson_interval(float(correct.sum()), len(correct))
        result |= {"eval_accuracy": float(correct.mean()), "eval_accuracy_low": low, "eval_accuracy_high": high}
    return result


def ask_and_score(
    model, tokenizer, examples: list[dict], config, *, seed: int, num_completions: int, reward_functions=(correctness,),
    on_error: str = "raise", reward_timeout: float = 0.0, batch_size: int = 64, shared_prompt: bool = True, environment=None,
) -> tuple[list, dict[str, torch.Tensor], int]:
    """Sample num_completions of each problem, and score them.

    config   and shared_prompt as for sample_completions_for_prompts; on_error and reward_timeout as for
             compute_rewards_for_completions; batch_size: completions sampled at once, the others wait until half of these
             are done; environment: who answers the policy, if anybody does
    returns  completions (P * n, those of a problem adjacent: texts, or conversations), points of each function (P, n), and
             how many were cut at the limit
    """
    functions = list(dict.fromkeys([correctness, *reward_functions]))
    asked = rank_slice([{"answer": None} | example for example in examples])
    earlier = rank_slice(occurrences([example["prompt"] for example in examples]))

    def ask():
        if not asked:
            return None
        rollout = sample_completions_for_prompts(
            model, tokenizer, [example["prompt"] for example in asked], config, seed=seed, num_completions=num_completions,
            shared_prompt=shared_prompt, batch_size=batch_size, prompt_occurrences=earlier, responders=responders(environment, asked),
        )
        _, points = compute_rewards_for_completions(
            functions, [1.0] * len(functions), rollout, asked, on_error=on_error, timeout=reward_timeout,
            turn_points=rollout.turn_points,
        )
        return rollout.completions, points, int((~rollout.finished).sum())

    with gathered_weights(model):
        texts, points, cut = zip(*filter(None, gather_from_ranks(ask)), strict=True)
    return list(chain(*texts)), {name: torch.cat([part[name] for part in points]) for name in points[0]}, sum(cut)


# ---- what the samples say --------------------------------------------------------------------------------------------


def summarise(problems: list[dict]) -> dict[str, dict]:
    """What to say about a model: an estimate_mean for each of values_by_problem."""
    return {name: estimate_mean(values) for name, values in values_by_problem(problems).items()}


def compare(ours: list[dict], theirs: list[dict]) -> dict[str, dict]:
    """Ours minus theirs on the same problems: an estimate_difference for each of values_by_problem."""
    left, right = values_by_problem(ours), values_by_problem(theirs)
    return {name: estimate_difference(left[name], right[name]) for name in left}


def values_by_problem(problems: list[dict]) -> dict[str, np.ndarray]:
    """(P,) values from 0 to 1 by name: accuracy, pass@1, pass@2, pass@4, ... pass@n and majority@n.

    With one completion the accuracy alone, for then all of them are the same.
    """
    correct, n = [sum(problem["right"]) for problem in problems], len(problems[0]["right"])
    values = {"accuracy": np.array(correct) / n}
    if n > 1:
        values |= {f"pass@{k}": np.array([pass_at_k(n, c, k) for c in correct]) for k in tries(n)}
        values[f"majority@{n}"] = np.array([problem["majority"] for problem in problems], dtype=float)
    return values


def tries(n: int) -> list[int]:
    """1, 2, 4, ... and n."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that one of k completions is right, when `correct` of n were: without bias for any n >= k.

        1 - comb(n - correct, k) / comb(n, k)

    arXiv:2107.03374 eq. 1. Not 1 - (1 - correct / n)**k, which is too low on average.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_vote(completions: list, truth: str) -> float:
    """1 if the answer given most often is right, else 0; where several lead, the share of them that is (a draw by lot).

    Completions without a readable answer do not vote; nobody is right where none votes. arXiv:2203.11171.
    """
    votes: list[tuple[str, int]] = []
    for answer in filter(None, (extract_answer(text_of(completion)) for completion in completions)):
        known = next((i for i, (other, _) in enumerate(votes) if same_answer(other, answer)), None)
        if known is None:
            votes.append((answer, 1))
        else:
            votes[known] = votes[known][0], votes[known][1] + 1
    most = max((count for _, count in votes), default=0)
    leading = [same_answer(answer, truth) for answer, count in votes if count == most]
    return sum(leading) / max(1, len(leading))


# ---- intervals -------------------------------------------------------------------------------------------------------


def estimate_mean(values: np.ndarray) -> dict:
    """Mean of P values from 0 to 1 with its 95 % interval: {"mean", "low", "high", "interval": its name}.

    Wilson's, where every problem counts 0 or 1. Where values lie between, they vary less than that, as if there were more
    problems: Wilson's for the number of them whose zeros and ones would vary as much (C. Franco et al., J. Survey Stat.
    Methodol. 7, 2019). By simulation it held the truth as often as the bootstrap over problems or more often, down to 90 %
    where hardly any problem is ever solved.
    """
    mean, variance = float(values.mean()), float(values.var())
    binary = np.isin(values, (0, 1)).all()
    problems = len(values) if binary or variance == 0 else len(values) * mean * (1 - mean) / variance
    low, high = wilson_interval(mean * problems, problems)
    return {"mean": mean, "low": low, "high": high, "interval": "Wilson" if binary else "Wilson, effective number of problems"}


def wilson_interval(successes: float, n: float, z: float = Z) -> tuple[float, float]:
    """95 % interval of a share. E. B. Wilson, JASA 22 (1927): unlike the textbook's, it is right near 0 and 1."""
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def estimate_difference(left: np.ndarray, right: np.ndarray) -> dict:
    """Mean of left - right over the same P problems, values from 0 to 1, with its 95 % interval, in the form of estimate_mean.

    Paired: what makes a problem hard for both cancels. The interval is the normal one after two more problems, one that only
    the left model solves and one that only the right one does (D. G. Bonett and R. M. Price, J. Educ. Behav. Stat. 37, 2012),
    without which it would be too short where few problems differ, and of length 0 where none does. Those two count as whole
    problems: over few problems with many completions each, whose shares differ by little, it is longer than it need be.
    """
    difference = left - right                                                    # (P,), -1 to 1
    more = np.append(difference, [1.0, -1.0])
    half = Z * float(more.std()) / math.sqrt(len(more))
    low, high = max(-1.0, float(more.mean()) - half), min(1.0, float(more.mean()) + half)
    return {"mean": float(difference.mean()), "low": low, "high": high, "interval": "paired, Bonett and Price"}
