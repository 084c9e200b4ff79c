"""
Pack the rows of a rollout into forward passes: which rows share a pass, and where their tokens are in it.

A pass is a single row of L tokens, first prompts, then completions. Its layout defines which token attends to
which (prefix_attention.py).
Shapes: B rows of T completion tokens, P prompts of up to Tp tokens, L tokens in a pass.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.prefix_attention import Block, TokenLayout
from engine.xla import bucket
from logprobs import completion_lengths

CPU = torch.device("cpu")
SHORTEST_IN_BLOCK = 0.75        # share of a block's longest row: padding costs less than another block
SHORTEST_ON_XLA = 16            # columns of a block on XLA, which compiles each size
Range = tuple[int, int]         # first token and number of tokens


class PackedBatch(NamedTuple):
    """The input of a pass over some rows, (1, L), on the CPU."""

    ids: Tensor
    positions: Tensor           # 0, 1, ... over a prompt, continued in each of its completions
    layout: TokenLayout         # on the device
    predictor: Tensor  # (rows, T): index of the token, among all flattened ones, that predicts this token


def pack_groups(rollout, rows: Tensor, device: torch.device = CPU) -> PackedBatch:
    """Pack some rows of a rollout into one pass: one copy of each prompt, then the completions.

    Sizes are rounded up for devices that compile every shape.
    """
    lengths = completion_lengths(rollout.completion_mask)[rows].tolist()
    prompt_of = (rows // (len(rollout.completion_ids) // len(rollout.prompt_ids))).tolist()
    prompts = {p: rollout.prompt_ids[p][rollout.prompt_mask[p]] for p in prompt_of}
    completions = [rollout.completion_ids[row, :n] for row, n in zip(rows, lengths, strict=True)]
    pieces = [*prompts.values(), *completions]
    ranges = ranges_of([len(piece) for piece in pieces])
    range_of = dict(zip(prompts, ranges, strict=False))
    pairs = list(zip((range_of[p] for p in prompt_of), ranges[len(prompts) :], strict=True))
    positions = [torch.arange(n) for _, n in range_of.values()]
    predictor = torch.zeros(len(rows), rollout.completion_ids.shape[1], dtype=torch.long)
    for index, ((first, m), (start, n)) in enumerate(pairs):
        positions.append(m + torch.arange(n))
        # A token is predicted by the one before it, the first one by the last token of the prompt.
        predictor[index, :n] = torch.arange(start - 1, start - 1 + n)
        predictor[index, 0] = first + m - 1
    end = sum(map(len, pieces))
    padding = (0, bucket(end, device) - end)
    ids, positions = (pad(torch.cat(x), padding)[None] for x in (pieces, positions))
    return PackedBatch(ids, positions, make_layout(list(range_of.values()), pairs, device), predictor)


def ranges_of(sizes: list[int]) -> list[Range]:
    """Return the ranges of consecutive pieces."""
    return [(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]


def make_layout(prompts: list[Range], completions: list[tuple[Range, Range]], device=CPU) -> TokenLayout:
    """Build the layout of a pass: prompts attend to themselves, completions (prompt, own) to both ranges.

    Rows of similar length share a block. On XLA there is one block of prompts and one of completions.
    """
    blocks: list[list[tuple[Range, Range]]] = []
    for rows in [((0, 0), prompt) for prompt in prompts], completions:
        longest = 0                                       # length in this block
        for row in sorted(rows, key=lambda row: -row[1][1]):
            length = row[1][1]
            if not longest or (length < SHORTEST_IN_BLOCK * longest and device.type != "xla"):
                blocks.append([])
                longest = length
            blocks[-1].append(row)
    size = max(start + length for block in blocks for _, (start, length) in block)
    tensors, slots, held = [], torch.zeros(bucket(size, device), dtype=torch.long), 0
    for block in blocks:
        block += block[-1:] * (bucket(len(block), device) - len(block))
        before, own = zip(*block, strict=True)
        tokens, valid = padded_indices(own, device)
        prefix, in_prompt = padded_indices(before, device, left=True)
        slots[tokens[valid]] = held + valid.flatten().nonzero()[:, 0]
        held += tokens.numel()
        padding = (~in_prompt).sum(dim=1)[:, None, None, None]
        tensors += [tokens, prefix, padding if padding.any() else padding[:1]]
    *tensors, slots = copy_together([*tensors, slots], device)
    return TokenLayout([Block(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)], slots)


def padded_indices(
    ranges: Sequence[Range], device: torch.device, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ranges as rows of indices (b, n), padded by repeating a token, and a mask, False on padding."""
    starts, lengths = torch.tensor(ranges).T[:, :, None]
    width = int(lengths.max())
    width = max(width, SHORTEST_ON_XLA) if width and device.type == "xla" else width
    offset = torch.arange(bucket(width, device) if width else 0)
    offset = offset - (len(offset) - lengths if left else 0)
    valid = (offset >= 0) & (offset < lengths)
    return starts + torch.minimum(offset.clamp(min=0), (lengths - 1).clamp(min=0)), valid


def copy_together(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one type to a device in a single copy, since the host waits for each copy to a GPU."""
    if device.type == "cpu":
        return tensors
    parts = torch.cat([x.flatten() for x in tensors]).to(device).split([x.numel() for x in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def micro_batches_of_groups(rollout, rows: Tensor, max_tokens: int, min_batches: int = 1) -> list[Tensor]:
    """Split rows into batches of at most max_tokens tokens, as logprobs.micro_batches.

    Siblings, which are adjacent in rows, share a batch and a copy of their prompt if they fit. Groups are
    sorted by their number of tokens.
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
