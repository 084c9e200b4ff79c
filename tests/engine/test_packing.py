"""Packing: layouts written out, blocks of similar rows, micro-batches within a budget."""

from collections import Counter

import torch
from conftest import PROMPTS, made_up_rollout

from engine import prefix_attention
from engine.packing import micro_batches, pack_rows
from sample import sample_completions_for_prompts


def test_who_sees_whom():
    """Written out for two prompts of two tokens, with completions of one token, behind each other in one pass."""
    rollout = made_up_rollout([2, 2], [1, 1, 1, 1])
    batch = pack_rows(rollout, torch.arange(4), True)
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
    layout = pack_rows(rollout, torch.arange(4), True).layout
    assert sorted(tuple(block.queries.shape) for block in layout.own) == [(1, 2), (2, 4), (3, 10)]
    assert Counter(block.keys.shape[1] for block in layout.prefix) == {4: 2}
    lone = pack_rows(rollout, torch.tensor([0, 2]), True).layout
    assert not lone.prefix and [tuple(block.queries.shape) for block in lone.own] == [(2, 14)]


def test_micro_batches_cover_every_row_once_within_the_budget(model, tokenizer, settings):
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    rows = torch.tensor([0, 1, 2, 5, 6, 9, 13, 15])
    for shared_prompt in True, False:
        for budget in 1, 60, 150, 10**6:
            batches = micro_batches(rollout, rows, budget, shared_prompt)
            assert sorted(torch.cat(batches).tolist()) == rows.tolist()
            for batch in batches:
                pack = pack_rows(rollout, batch, shared_prompt)
                assert pack.ids.numel() <= budget or len(batch) == 1, f"{budget=} {pack.ids.shape=}"
            assert budget < 10**6 or len(batches) == 1
