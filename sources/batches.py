"""
The order of examples: endless shuffled batches, and rewards by prompt, which can change the order.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.chat_template import as_messages, is_ids


class ShuffledBatches:
    """Iterate over batches of examples without end, shuffled every epoch. `position` is the whole state.

    memory  None: every epoch contains all examples. A PromptMemory: an example is accepted with the current
            probability of its prompt, else skipped, so that prompts with mixed rewards occur more often. The
            random numbers depend on seed and position alone.
    """

    def __init__(self, examples: Sequence, batch_size: int, seed: int, memory: "PromptMemory | None" = None):
        self.examples, self.batch_size, self.seed, self.memory = examples, batch_size, seed, memory
        self.position = 0                                 # examples accepted or skipped so far
        self.epoch, self.order = -1, array("q")

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Return the next `count` examples."""
        batch = []
        while len(batch) < count:
            epoch, index = divmod(self.position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, array("q", range(len(self.examples)))
                random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            example = self.examples[self.order[index]]
            uniform = random.Random(f"{self.seed} at {self.position}").random()
            if self.memory is None or uniform < self.memory.probability(example["prompt"]):
                batch.append(example)
            self.position += 1
        return batch


@dataclass
class PromptMemory:
    """Keep the rewards of each prompt in a run, and compute the probability of sampling it again.

    A group of equal rewards has no gradient, so the probability grows with the variance of the prompt's
    rewards so far. The lowest and the highest reward of the run are added to them, which keeps it between 0
    and 1:

        probability = 4 * variance(rewards of the prompt + [lowest, highest]) / (highest - lowest) ** 2

    For rewards of 0 and 1 that is 4 * p * (1 - p) with p = (successes + 1) / (completions + 2), Laplace's
    rule of succession: 1 for a prompt that is new or half solved, 0.56 after four failures, and approaching 0
    for one that is always or never solved. variance is the mean squared deviation from the mean.

    All fields are plain numbers, for a checkpoint.
    """

    lowest: float = math.inf                              # points
    highest: float = -math.inf
    earned: dict = field(default_factory=dict)            # digest -> count, sum of points, sum of squares

    def record(self, prompts: list, rewards: list[list[float]]) -> None:
        """Add the rewards (P, G) of prompts, in points; NaN is left out."""
        for prompt, group in zip(prompts, rewards, strict=True):
            scored = [points for points in group if not math.isnan(points)]
            count, total, squares = self.earned.get(digest(prompt), (0, 0.0, 0.0))
            squares += sum(points**2 for points in scored)
            self.earned[digest(prompt)] = count + len(scored), total + sum(scored), squares
            self.lowest, self.highest = min([self.lowest, *scored]), max([self.highest, *scored])

    def probability(self, prompt) -> float:
        """Return the probability of a prompt, 0 to 1, by the formula above."""
        count, total, squares = self.earned.get(digest(prompt), (0, 0.0, 0.0))
        if count == 0 or self.lowest == self.highest:
            return 1.0
        mean = (total + self.lowest + self.highest) / (count + 2)
        mean_square = (squares + self.lowest**2 + self.highest**2) / (count + 2)
        return 4 * (mean_square - mean**2) / (self.highest - self.lowest) ** 2


def digest(prompt) -> str:
    """Return a hash of the prompt's key."""
    return hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).hexdigest()


def prompt_key(prompt) -> str:
    """Return a key that ignores white space, case, and whether a prompt is text or a user message."""
    if is_ids(prompt):
        return str(prompt)
    return " ".join(" ".join(f"{m['role']} {m['content']}" for m in as_messages(prompt)).casefold().split())
