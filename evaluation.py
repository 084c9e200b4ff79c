"""
What samples say about a model: accuracy, pass@k, majority@n and the difference between two models, each with a 95 % interval.
Texts and numbers in, numbers out; no model.

What varies from one measurement to the next is the problems, and the n completions of a problem stand and fall together: so
every interval is over problems, however many completions there are.

A problem here is {"right": n bools, which of its completions are correct; "majority": its majority_vote}, P of them.
"""

import math

import numpy as np

from reward_library import extract_answer, same_answer, text_of

Z = 1.96                        # standard deviations to either side that hold 95 % of a normal distribution


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
