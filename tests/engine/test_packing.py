"""Packing: blocks of similar rows, micro-batches within a budget. See also test_prefix_attention.py."""

import torch
from conftest import made_up_rollout

from engine.packing import micro_batches_of_groups, pack_groups


def test_rows_of_like_length_share_a_block():
    rollout = made_up_rollout([4, 4], [10, 10, 9, 2])
    layout = pack_groups(rollout, torch.arange(4)).layout
    assert [(*block.tokens.shape, block.prompts.shape[1]) for block in layout.blocks] == [(2, 4, 0), (3, 10, 4), (1, 2, 4)]


def test_a_batch_is_closed_when_one_more_row_would_exceed_the_budget():
    """Rows of 10 + 5 tokens: siblings share a prompt, and one token less than needed splits them."""
    rollout = made_up_rollout([10, 10], [5, 5, 5, 5])
    rows = torch.arange(4)
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 40)] == [4]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 39)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 20)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 19)] == [1, 1, 1, 1]
    assert len(micro_batches_of_groups(rollout, rows, 1000, min_batches=3)) >= 3
