"""
Packing the rows of a rollout into forward passes: which rows share a pass, and where their tokens are in it.

A pass is one row of L tokens: a prompt, its completions, the next prompt, and so on; its layout defines which
token attends to which (prefix_attention.py).
Shapes: B rows of T completion tokens, P prompts of up to Tp tokens, L tokens of a pass.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.devices import bucket
from engine.prefix_attention import PADDED_KEY, PADDED_QUERY, Block, TokenLayout
from logprobs import completion_lengths

CPU = torch.device("cpu")
SHORTEST_IN_BLOCK = 0.75        # of the longest row of a block: padding costs less than another block
SHORTEST_ON_XLA = 16            # columns of a block, where each size is compiled
Range = tuple[int, int]         # first token and number of tokens


class PackedBatch(NamedTuple):
    """Hold the input of a pass over some rows, (1, L), on the CPU."""

    ids: Tensor
    positions: Tensor           # 0, 1, ... over a prompt, continued in each of its completions
    layout: TokenLayout
    predictor: Tensor  # (rows, T): index of the token, among all flattened ones, that predicts this token


def pack_groups(rollout, rows: Tensor, device: torch.device = CPU) -> PackedBatch:
    """Arrange some rows of a rollout in one pass: siblings after one copy of their prompt.

    Sizes are rounded up for devices that compile every shape.
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    groups: dict[int, list[int]] = defaultdict(list)      # prompt -> indices of its completions in `rows`
    for index, row in enumerate(rows.tolist()):
        groups[row // group_size].append(index)
    predictor = torch.zeros(len(rows), rollout.completion_ids.shape[1], dtype=torch.long)
    prompts: list[Range] = []                             # with the completion if there is only one
    completions: list[Range] = []                         # of prompts with several
    prefix_of: dict[Range, Range] = {}                    # all completions of a prompt -> the prompt
    pieces, end = [], 0                                   # (ids, positions) of prompts and completions
    for prompt, members in groups.items():
        ids = rollout.prompt_ids[prompt][rollout.prompt_mask[prompt]]
        start, prompt_length, prompt_end = end, len(ids), end + len(ids)
        pieces.append((ids, torch.arange(prompt_length)))
        end = prompt_end
        for index in members:
            row, length = int(rows[index]), lengths[int(rows[index])]
            # A token is predicted by the one before it, the first one by the last token of the prompt.
            predictor[index, :length] = torch.arange(end - 1, end - 1 + length)
            predictor[index, 0] = prompt_end - 1
            pieces.append((rollout.completion_ids[row, :length], prompt_length + torch.arange(length)))
            completions.append((end, length))
            end += length
        if len(members) > 1:
            prompts.append((start, prompt_length))
            prefix_of[prompt_end, end - prompt_end] = prompts[-1]
        else:
            completions.pop()
            prompts.append((start, end - start))
    padding = (0, bucket(end, device) - end)
    ids, positions = (pad(torch.cat(x), padding) for x in zip(*pieces, strict=True))
    layout = make_layout(positions.numpy(), prompts, completions, prefix_of, device)
    return PackedBatch(ids[None], positions[None], layout, predictor)


def make_layout(
    positions: np.ndarray, prompts: list[Range], completions: list[Range], prefix_of: dict[Range, Range],
    device: torch.device = CPU,
) -> TokenLayout:
    """Build the layout of a pass: prompts and completions attend to themselves, completions also to a prompt.

    Rows of similar length share a block. On XLA there is one of prompts and one of completions.
    """
    own_rows: list[list[Range]] = []                      # of each block
    prefix_rows: list[list[tuple[Range, Range]]] = []     # of each block: queries, keys
    width = 0
    if device.type == "xla":
        own_rows = [ranges for ranges in (prompts, completions) if ranges]
        prefix_rows = [list(prefix_of.items())] if prefix_of else []
        # As wide as its widest possible group, so that few shapes of this block serve all passes.
        sizes = [sum(start <= first < start + n for first, _ in completions) for start, n in prefix_of]
        longest = max((SHORTEST_ON_XLA, *(n for _, n in completions)))
        width = bucket(max(sizes, default=1), device) * bucket(longest, device)
    else:
        by_shape = defaultdict(list)
        for row in sorted(prompts + completions, key=lambda row: -row[1]):
            if not own_rows or row[1] < SHORTEST_IN_BLOCK * own_rows[-1][0][1]:
                own_rows.append([])
            own_rows[-1].append(row)
        for queries, keys in prefix_of.items():
            by_shape[queries[1], keys[1]].append((queries, keys))
        prefix_rows = list(by_shape.values())
    own = [make_block(queries, None, positions, device) for queries in own_rows]
    prefix = [make_block(*zip(*pairs, strict=True), positions, device, width) for pairs in prefix_rows]
    return TokenLayout(own, prefix, len(positions))


def make_block(
    queries: list[Range], keys: list[Range] | None, positions: np.ndarray, device: torch.device,
    min_width: int = 0,
) -> Block:
    """Build a block in which row i of queries attends to row i of keys; causally to itself if keys is None.

    Queries are right-padded to at least min_width, keys left-padded.
    """
    causal = keys is None
    query_index, query_valid = padded_indices(queries, device, min_width)
    key_index, key_valid = (query_index, query_valid) if causal else padded_indices(keys, device, left=True)
    query_positions = np.where(query_valid, positions[query_index], PADDED_QUERY)
    key_positions = np.where(key_valid, positions[key_index], PADDED_KEY)
    distance = query_index.shape[1] - 1 if causal else query_positions.max() - key_positions.min()
    return Block(
        *map(torch.from_numpy, (query_index, key_index, query_positions, key_positions)), causal=causal,
        longest_distance=int(distance), padded_keys=not causal and not bool(key_valid.all()))


def padded_indices(ranges: list[Range], device: torch.device, min_width: int = 0, left: bool = False):
    """Return ranges as rows of indices (b, n), padded by repeating a token, and a mask, False on padding."""
    padding = [(0, 0)] * (bucket(len(ranges), device) - len(ranges))
    starts, lengths = np.array([*ranges, *padding]).T[:, :, None]
    width = max(bucket(int(lengths.max()), device), min_width, SHORTEST_ON_XLA if device.type == "xla" else 0)
    offset = np.arange(width) - (width - lengths if left else 0)
    valid = (offset >= 0) & (offset < lengths)
    return starts + np.clip(offset, 0, np.maximum(lengths - 1, 0)), valid


def micro_batches_of_groups(rollout, rows: Tensor, max_tokens: int, min_batches: int = 1) -> list[Tensor]:
    """Split rows into batches of at most max_tokens tokens, as logprobs.micro_batches.

    Siblings, which follow each other in rows, share a batch and a copy of their prompt if they fit. Groups
    are sorted by their tokens.
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    prompt_lengths = rollout.prompt_mask.sum(dim=1).tolist()
    groups: list[list] = []                               # [tokens, rows]
    for row in rows.tolist():
        prompt = row // group_size
        is_new = not groups or groups[-1][1][0] // group_size != prompt
        if is_new or groups[-1][0] + lengths[row] > max_tokens:
            groups.append([prompt_lengths[prompt], []])
        groups[-1][0] += lengths[row]
        groups[-1][1].append(row)
    groups.sort(key=lambda group: -group[0])
    batches: list[list[int]] = []
    total = 0
    for tokens, members in groups:
        if not batches or total + tokens > max_tokens:
            batches.append([])
            total = 0
        batches[-1] += members
        total += tokens
    if len(batches) < min(min_batches, len(rows)):
        smaller = min(max_tokens, groups[0][0] * len(groups)) // 2
        return micro_batches_of_groups(rollout, rows, smaller, min_batches)
    return [torch.tensor(batch) for batch in batches]
