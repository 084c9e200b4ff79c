"""Slices and batches of several processes, and exceptions that are sent between them."""

from engine import devices
from engine.devices import lockstep_batches, picklable, rank_slice
from rewards import RewardError


def test_shares_and_rounds_cover_everything_once(monkeypatch):
    for size in 1, 2, 3, 5:
        monkeypatch.setattr(devices, "num_processes", lambda size=size: size)
        for n in range(12):
            things, shares, counted = list(range(n)), [], []
            lengths = set()
            for rank in range(size):
                monkeypatch.setattr(devices, "process_rank", lambda rank=rank: rank)
                shares += rank_slice(things)
                mine = list(lockstep_batches(things))
                lengths.add(len(mine))
                counted += [thing for thing, counts in mine if counts]
            assert shares == things and sorted(counted) == things and len(lengths) == 1


def test_what_one_process_raises_can_be_told_to_the_others():
    class Local(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    told = picklable(RewardError("no good"))
    assert type(told) is RewardError and str(told) == "no good"
    for odd in Local("no good", 2), Local(lambda: 0, 2):
        assert type(picklable(odd)) is RuntimeError and str(picklable(odd)).startswith("Local: ")
