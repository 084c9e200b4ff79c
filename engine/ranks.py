"""
Ranks: how the work of a run is divided among the processes of torchrun. Without it there is one, with all of
the work.

All ranks call every method, in the same order. Ranks of one tensor-parallel group do the same work.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine import devices
from engine.devices import all_gather_object, num_processes, process_rank, sum_in_place


class Ranks:
    """The processes of a run, seen from one of them."""

    @property
    def size(self) -> int:
        """Return the number of slices that the work is divided into."""
        return num_processes() // devices.tensor_parallel

    @property
    def rank(self) -> int:
        """Return the number of this rank's slice, from 0."""
        return process_rank() // devices.tensor_parallel

    def slice(self, items: list) -> list:
        """Return the slice of this rank. Slices cover all items; their sizes differ by at most one."""
        n = len(items)
        return items[n * self.rank // self.size : n * (self.rank + 1) // self.size]

    def gather(self, work: Callable, *columns: list) -> list:
        """Call work with this rank's slice of each column, and return the results of all ranks in order.

        Ranks without items have no result. The first rank's exception is raised on every rank.
        """
        failure = result = None
        mine = [self.slice(column) for column in columns]
        has_work = not mine or len(mine[0]) > 0
        try:
            result = work(*mine) if has_work else None
        except Exception as error:
            failure = error
        outcomes = all_gather_object((failure, has_work, result))
        first = next((rank for rank, (error, *_) in enumerate(outcomes) if error), None)
        if first is not None:
            raise failure if first == process_rank() else outcomes[first][0]
        return [result for _, had_work, result in outcomes[:: devices.tensor_parallel] if had_work]

    def sum(self, count):
        """Sum a number, or a tensor on the CPU, over all ranks."""
        if num_processes() == 1:
            return count
        total = count.clone() if isinstance(count, Tensor) else torch.tensor(count, dtype=torch.float64)
        sum_in_place(total)
        return total if isinstance(count, Tensor) else total.item()
