"""
The order of examples: endless batches.
"""

import random
from collections.abc import Sequence

from data import as_messages


class Batches:
    """Iterate over batches without end, every epoch shuffled or in order. `position` is the whole state."""

    def __init__(self, examples: Sequence, batch_size: int, seed: int, shuffle: bool = True):
        self.examples, self.batch_size, self.seed, self.shuffle = examples, batch_size, seed, shuffle
        self.position = 0                                 # examples so far
        self.epoch, self.order = -1, []

    def __next__(self) -> list:
        return self.take(self.batch_size)

    def take(self, count: int) -> list:
        """Return the next `count` examples."""
        batch = []
        while len(batch) < count:
            epoch, index = divmod(self.position, len(self.examples))
            if epoch != self.epoch:
                self.epoch, self.order = epoch, list(range(len(self.examples)))
                if self.shuffle:
                    random.Random(f"{self.seed} {epoch}").shuffle(self.order)
            batch.append(self.examples[self.order[index]])
            self.position += 1
        return batch


def prompt_key(prompt) -> str:
    """Return a key that ignores white space, case, and whether a prompt is text or a user message."""
    return " ".join(" ".join(f"{m['role']} {m['content']}" for m in as_messages(prompt)).casefold().split())
