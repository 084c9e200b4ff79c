"""Packing: layouts written out, blocks of similar rows, micro-batches within a budget."""

from collections import Counter

import torch
from conftest import made_up_rollout

from engine import prefix_attention
from engine.packing import micro_batches_of_groups, pack_groups


def test_who_sees_whom():
    """Written out for two prompts of two tokens, with completions of one token, behind each other in one pass."""
    rollout = made_up_rollout([2, 2], [1, 1, 1, 1])
    batch = pack_groups(rollout, torch.arange(4))
    assert batch.positions.tolist() == [[0, 1, 2, 2, 0, 1, 2, 2]]
    sees = visible_tokens(batch.layout, 8, None)
    assert sees.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],                         # the first completion: its prompt and itself
        [1, 1, 0, 1, 0, 0, 0, 0],                         # its sibling
        [0, 0, 0, 0, 1, 0, 0, 0],                         # another prompt
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0, 1],
    ]
    assert visible_tokens(batch.layout, 8, 2).int()[3].tolist() == [0, 1, 0, 1, 0, 0, 0, 0], (
        "counted in positions: the sibling in between does not matter"
    )


def test_a_pass_of_siblings_and_a_lone_completion_written_out():
    rollout = made_up_rollout([2, 3], [4, 3, 1, 4])
    batch = pack_groups(rollout, torch.tensor([1, 3, 0]))
    prompts = [ids[mask].tolist() for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]
    rows = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    assert batch.ids[0].tolist() == prompts[0] + rows[1] + rows[0] + prompts[1] + rows[3]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]
    # The first token is predicted by the end of the prompt, at 1 or 11, every other one by the token before it.
    assert [row[mask].tolist() for row, mask in zip(batch.predictor, rollout.completion_mask[[1, 3, 0]])] == [
        [1, 2, 3], [11, 12, 13, 14], [1, 5, 6, 7]]
    (own, prefix), siblings = batch.layout.parts(1, torch.device("cpu")), range(2, 9)
    for blocks, names, slots, tokens in (
        (own.blocks, ("queries", "query_positions"), own.query_rows, range(16)),
        (own.blocks, ("keys", "key_positions"), own.key_rows, range(16)),
        (prefix.blocks, ("queries", "query_positions"), prefix.query_rows, siblings),
        (prefix.blocks, ("keys", "key_positions"), prefix.key_rows, range(2)),
    ):
        held, positions = (torch.cat([getattr(block, name).flatten() for block in blocks]) for name in names)
        for token in range(16):
            if token in tokens:
                assert held[slots[token]] == token and positions[slots[token]] == batch.positions[0, token], "not on padding"
            else:
                assert slots[token] == len(held)


def visible_tokens(layout, size: int, window):
    """(L, L) bool, from the blocks of a layout."""
    sees = torch.zeros(size, size, dtype=torch.bool)
    for block in layout.own + layout.prefix:
        visible = prefix_attention.attends_to(block.query_positions, block.key_positions, window)
        for row, column, key in visible.nonzero().tolist():
            sees[block.queries[row, column], block.keys[row, key]] = True
    return sees


def test_rows_of_like_length_share_a_block_and_a_group_of_one_is_a_plain_row():
    rollout = made_up_rollout([4, 4], [10, 10, 9, 2])
    layout = pack_groups(rollout, torch.arange(4)).layout
    assert sorted(tuple(block.queries.shape) for block in layout.own) == [(1, 2), (2, 4), (3, 10)]
    assert Counter(block.keys.shape[1] for block in layout.prefix) == {4: 2}
    lone = pack_groups(rollout, torch.tensor([0, 2])).layout
    assert not lone.prefix and [tuple(block.queries.shape) for block in lone.own] == [(2, 14)]


def test_a_batch_is_closed_when_one_more_row_would_exceed_the_budget():
    """Rows of 10 + 5 tokens: siblings share a prompt, and one token less than needed splits them."""
    rollout = made_up_rollout([10, 10], [5, 5, 5, 5])
    rows = torch.arange(4)
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 40)] == [4]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 39)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 20)] == [2, 2]
    assert [len(b) for b in micro_batches_of_groups(rollout, rows, 19)] == [1, 1, 1, 1]
    assert len(micro_batches_of_groups(rollout, rows, 1000, min_batches=3)) >= 3
