"""
How the rows of a rollout become passes of a model: which rows go together, and where their tokens lie.

A packed pass is one row of L tokens: a prompt, the completions of it, the next prompt, and so on; its layout says which
token attends to which (prefix_attention.py). A plain pass has one row of prompt and completion for each completion.
Shapes: B rows of T completion tokens, L tokens of a pass.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine.devices import bucket
from engine.prefix_attention import Block, TokenLayout

CPU = torch.device("cpu")
SHORTEST_IN_BLOCK = 0.75        # of the longest row of a block of attention: what is padded there is less than the rest
SHORTEST_ON_XLA = 16            # columns of a block, where each size is compiled
Range = tuple[int, int]         # first token and number of tokens


@dataclass
class PackedBatch:
    """The input of a pass over some rows: (1, L) packed, (rows, L) plain and right-padded."""

    ids: Tensor
    positions: Tensor           # 0, 1, ... over a prompt, and on from there in each of its completions
    mask: Tensor                # bool, False on padding
    layout: TokenLayout | None  # None: plain
    predictor: Tensor           # (rows, T): index into the flattened tokens of the one that predicts this token


def pack_rows(rollout, rows: Tensor, shared_prompt: bool, device: torch.device = CPU) -> PackedBatch:
    """Lay out some rows of a rollout: siblings behind one copy of their prompt if shared_prompt, else one row each.

    Sizes are rounded up for devices that compile every shape. The result is on the CPU.
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    groups: dict[int, list[int]] = defaultdict(list)      # prompt (or row) -> where its completions stand in `rows`
    for index, row in enumerate(rows.tolist()):
        groups[row // group_size if shared_prompt else row].append(index)
    predictor = torch.zeros(len(rows), rollout.completion_ids.shape[1], dtype=torch.long)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    prompts: list[Range] = []
    completions: list[Range] = []                         # of groups of several
    behind: dict[Range, Range] = {}                       # all completions of a prompt -> the prompt
    end = 0
    for members in groups.values():
        number = int(rows[members[0]]) // group_size
        prompt, start = rollout.prompt_ids[number][rollout.prompt_mask[number]], end
        ids.append(prompt)
        positions.append(torch.arange(len(prompt)))
        end += len(prompt)
        for index in members:
            row, length = int(rows[index]), lengths[int(rows[index])]
            # Token t is predicted one token earlier; the first one by the end of the prompt, wherever it stands.
            predictor[index, :length] = torch.arange(end - 1, end - 1 + length)
            predictor[index, 0] = start + len(prompt) - 1
            ids.append(rollout.completion_ids[row, :length])
            positions.append(torch.arange(len(prompt), len(prompt) + length))
            completions += [(end, length)] if len(members) > 1 else []
            end += length
        prompts.append((start, len(prompt) if len(members) > 1 else end - start))
        if len(members) > 1:
            behind[start + len(prompt), end - start - len(prompt)] = prompts[-1]
    if not shared_prompt:
        return plain_rows(ids, positions, [length for _, length in prompts], predictor, device)
    missing = bucket(end, device) - end
    ids, positions = (torch.cat([*parts, torch.zeros(missing, dtype=torch.long)]) for parts in (ids, positions))
    layout = make_layout(positions.numpy(), prompts, completions, behind, device)
    mask = torch.arange(end + missing) < end
    return PackedBatch(ids[None], positions[None], mask[None], layout, predictor)


def plain_rows(ids, positions, lengths: list[int], predictor: Tensor, device) -> PackedBatch:
    """One row for each completion, from the pieces (prompt, completion, prompt, ...) that pack_rows has collected."""
    width, count = bucket(max(lengths), device), bucket(len(lengths), device)
    ids, positions = (
        pad_sequence([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)], batch_first=True)
        for parts in (ids, positions)
    )
    shape = (0, width - ids.shape[1], 0, count - len(ids))
    ids, positions = (torch.nn.functional.pad(part, shape) for part in (ids, positions))
    starts = torch.tensor(np.cumsum([0, *lengths[:-1]]))[:, None]                # of the rows, end to end
    predictor = predictor - starts + torch.arange(len(lengths))[:, None] * width
    mask = torch.arange(width) < torch.tensor(lengths + [0] * (count - len(lengths)))[:, None]
    return PackedBatch(ids, positions, mask, None, predictor.clamp(min=0))


def make_layout(
    positions: np.ndarray, prompts: list[Range], completions: list[Range], behind: dict[Range, Range],
    device: torch.device = CPU,
) -> TokenLayout:
    """The layout of a pass: prompts and completions attend to themselves, completions also to what they are behind.

    Rows of like length share a block. Where every shape is compiled there is a block of prompts and one of completions.
    """
    if device.type == "xla":
        kinds = [part for part in (prompts, completions) if part]
        several = [list(behind.items())] if behind else []
        # As wide as its widest possible group, so that few shapes of this block serve all passes.
        most = max((sum(start <= at < start + size for at, _ in completions) for start, size in behind), default=0)
        width = bucket(max(most, 1), device) * bucket(max((SHORTEST_ON_XLA, *(size for _, size in completions))), device)
    else:
        kinds, by_sizes, width = [], defaultdict(list), 0
        for segment in sorted(prompts + completions, key=lambda segment: -segment[1]):
            if not kinds or segment[1] < SHORTEST_IN_BLOCK * kinds[-1][0][1]:
                kinds.append([])
            kinds[-1].append(segment)
        for queries, keys in behind.items():
            by_sizes[queries[1], keys[1]].append((queries, keys))
        several = list(by_sizes.values())
    own = [make_block(part, part, positions, device) for part in kinds]
    prefix = [make_block(*zip(*part, strict=True), positions, device, width) for part in several]
    size = len(positions)
    return TokenLayout(
        own, prefix, slots(own, "queries", "query_positions", size), slots(prefix, "queries", "query_positions", size),
        slots(prefix, "keys", "key_positions", size),
    )


def make_block(
    queries: list[Range], keys: list[Range], positions: np.ndarray, device: torch.device, least_width: int = 0
) -> Block:
    """Row i of queries attends to row i of keys; causal if they are the same. Queries are right-padded, keys left-padded."""
    causal, count = queries is keys, bucket(len(queries), device) - len(queries)

    def indices(ranges, right_aligned, least_width=least_width):
        starts, lengths = np.array([*ranges, *[(0, 0)] * count]).T
        width = max(bucket(int(lengths.max()), device), least_width, SHORTEST_ON_XLA if device.type == "xla" else 0)
        offset = np.arange(width) - (width - lengths[:, None] if right_aligned else 0)
        there = (offset >= 0) & (offset < lengths[:, None])
        return starts[:, None] + np.clip(offset, 0, np.maximum(lengths[:, None] - 1, 0)), there

    query_index, query_there = indices(queries, False)
    key_index, key_there = (query_index, query_there) if causal else indices(keys, True, 0)
    query_positions = np.where(query_there, positions[query_index], -1)
    key_positions = np.where(key_there, positions[key_index], 2**30)
    first = key_positions.min() if not causal else query_positions.max() - query_index.shape[1] + 1
    return Block(
        *map(torch.from_numpy, (query_index, key_index, query_positions, key_positions)), causal=causal,
        longest_distance=int(query_positions.max() - first), padded_keys=not causal and not bool(key_there.all()),
    )


def slots(blocks: list[Block], index: str, positions: str, size: int) -> Tensor:
    """(L,) where each token lies among the indices of blocks, flattened one after the other; their number: nowhere."""
    total = sum(getattr(block, index).numel() for block in blocks)
    result, start = torch.full((size,), total), 0
    for block in blocks:
        tokens, at = getattr(block, index).flatten(), getattr(block, positions).flatten()
        there = ((at >= 0) & (at < 2**30)).nonzero()[:, 0]
        result[tokens[there]] = start + there
        start += len(tokens)
    return result


def completion_lengths(completion_mask: Tensor) -> Tensor:
    """(B,) tokens up to and including the last one that the policy chose; what follows it predicts nothing."""
    steps = torch.arange(1, completion_mask.shape[1] + 1, device=completion_mask.device)
    return (completion_mask * steps).amax(dim=1)


def micro_batches(
    rollout, rows: Tensor, max_tokens: int, shared_prompt: bool = True, at_least: int = 1, device: torch.device = CPU
) -> list[Tensor]:
    """Split rows into batches of at most max_tokens tokens (of plain rows: padded ones), siblings together where they fit.

    Longest first, so that rows of like length share a batch. A single completion longer than max_tokens gets a batch
    of its own. Any split gives the same gradient, since losses take their denominators from the whole step.

    at_least  number of batches, if there are as many rows: smaller ones, where several processes want some
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    prompt_lengths = rollout.prompt_mask.sum(dim=1).tolist()
    groups: list[tuple[int, list[int]]] = []                                     # (tokens, rows)
    open_group: dict[int, int] = {}                                              # prompt -> its group still being filled
    for row in rows.tolist():
        prompt = row // group_size
        at = open_group.get(prompt)
        if not shared_prompt or at is None or groups[at][0] + lengths[row] > max_tokens:
            open_group[prompt] = len(groups)
            groups.append((prompt_lengths[prompt] + lengths[row], [row]))
        else:
            groups[at] = (groups[at][0] + lengths[row], [*groups[at][1], row])
    groups.sort(key=lambda group: -group[0])
    batches: list[list[int]] = []
    total = longest = count = 0
    for tokens, members in groups:
        size = bucket(total + tokens, device) if shared_prompt else bucket(count + 1, device) * longest
        if not batches or size > max_tokens:
            batches.append([])
            total, longest, count = 0, bucket(tokens, device), 0
        batches[-1] += members
        total, count = total + tokens, count + 1
    if len(batches) < min(at_least, len(rows)):
        smaller = min(max_tokens, groups[0][0] * len(groups)) // 2
        return micro_batches(rollout, rows, smaller, shared_prompt, at_least, device)
    return [torch.tensor(batch) for batch in batches]


def left_pad(sequences: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids -> ids (P, Tp) and mask (P, Tp) bool, padded on the left so that all prompts end together."""
    width = max(len(ids) for ids in sequences)
    ids = torch.tensor([[pad_id] * (width - len(seq)) + seq for seq in sequences])
    mask = torch.tensor([[False] * (width - len(seq)) + [True] * len(seq) for seq in sequences])
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """0, 1, 2, ... over the True entries of each row; padding gets 0, and nothing attends to it."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
