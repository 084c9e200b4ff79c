"""
How prompts and completions lie side by side, in sampling and in training: each prompt once, its completions behind it,
under a mask that keeps siblings apart.

Every token has a place: which prompt it belongs to, which sibling, at which position. One rule, may_look, says from two
places whether one token sees the other, wherever they stand in memory; masks for any kind of attention are made of it.
Shapes: B rows of T completion tokens, K packs of L tokens, n queries looking at m keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from devices import bucket
from model import precision_of

CPU = torch.device("cpu")


@dataclass
class Places:
    """Where tokens belong; three tensors of one shape, such as (K, L)."""

    prompt: Tensor              # number of the prompt; -1: padding
    sibling: Tensor             # 0: a token of the prompt itself; n + 1: of completion n
    position: Tensor            # 0, 1, ... over the prompt, and going on from there afresh in every completion

    def __getitem__(self, index) -> "Places":
        return Places(*(tensor[index] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.prompt, self.sibling, self.position

    def to(self, device) -> "Places":
        return Places(*(tensor.to(device) for tensor in self.tensors))


def may_look(query: Places, key: Places, window: int | None = None) -> Tensor:
    """Whether a token sees another: its own prompt and its own completion, up to the present. Bool, broadcast.

    A window is counted in positions, so that it makes no difference how many siblings stand in between. Padding sees
    padding: a softmax over nothing would be NaN, and NaN spreads through the backward pass.
    """
    distance = query.position - key.position
    visible = (query.prompt == key.prompt) & ((key.sibling == query.sibling) | (key.sibling == 0)) & (distance >= 0)
    return visible & (distance < window) if window else visible


def attention_masks(model, queries: Places, keys: Places):
    """What transformers takes as attention_mask: for queries (K, n) and keys (K, m), on the model's device.

    (K, 1, n, m), 0 where a token is seen and -inf elsewhere, or a BlockMask for flex_attention; a dict of them where
    the model has several kinds of layers. In numbers of the layers' precision, though sdpa takes bool as well: it would make
    numbers of it in every layer, and keep them for the backward pass.
    """
    config = model.config.get_text_config()
    dtype = model.dtype if precision_of(model) == "float32" else getattr(torch, precision_of(model))
    layer_types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)

    def mask(window):
        if config._attn_implementation == "flex_attention":
            return create_block_mask(
                lambda k, head, i, j: may_look(queries[k, i], keys[k, j], window),
                len(queries.prompt), None, queries.prompt.shape[1], keys.prompt.shape[1], device=queries.prompt.device,
            )
        visible = may_look(queries[:, None, :, None], keys[:, None, None, :], window)
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)

    if layer_types is None:
        return mask(window)                               # Mistral: a window in every layer
    windows = {"full_attention": None, "sliding_attention": window}
    return {name: mask(windows[name]) for name in set(layer_types)}


@dataclass
class Packs:
    """K sequences of L tokens, right-padded, each of one or more groups: a prompt, then its completions."""

    ids: Tensor                 # (K, L)
    places: Places              # (K, L)
    predictor: Tensor           # (rows, T): index into the K * L hidden states of the one that predicts this token


def pack_rows(rollout, rows: Tensor, shared_prompt: bool, device: torch.device = CPU) -> Packs:
    """Lay out some rows of a rollout, siblings behind one copy of their prompt if shared_prompt, else one row a pack.

    Packs are as long as the longest group; where two or more shorter groups fit into that, they share a pack. For some
    devices K and L are rounded up, with packs and places of padding. The result is on the CPU.
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    prompts = [ids[mask] for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    groups: dict[int, list[int]] = {}                     # prompt (or row) -> where its completions stand in `rows`
    for index, row in enumerate(rows.tolist()):
        groups.setdefault(row // group_size if shared_prompt else row, []).append(index)
    rows = rows.tolist()
    sizes = {
        name: len(prompts[rows[members[0]] // group_size]) + sum(lengths[rows[i]] for i in members)
        for name, members in groups.items()
    }
    longest = bucket(max(sizes.values()), device)
    packs = first_fit(sizes, longest) if shared_prompt else [[name] for name in groups]

    predictor = torch.zeros(len(rows), rollout.completion_ids.shape[1], dtype=torch.long)
    columns: list[list[Tensor]] = [[], [], [], []]        # ids, prompt, sibling, position of every pack
    for k, pack in enumerate(packs):
        pieces: list[tuple[Tensor, int, int, int]] = []   # ids, prompt, sibling, first position
        end = k * longest
        for name in pack:
            number = rows[groups[name][0]] // group_size
            prompt = prompts[number]
            pieces.append((prompt, number, 0, 0))
            end += len(prompt)
            last_of_prompt = end - 1
            for index in groups[name]:
                row, length = rows[index], lengths[rows[index]]
                pieces.append((rollout.completion_ids[row, :length], number, row + 1, len(prompt)))
                # Token t is predicted one token earlier; the first one by the end of the prompt, wherever it stands.
                predictor[index, :length] = torch.arange(end - 1, end - 1 + length)
                predictor[index, 0] = last_of_prompt
                end += length
        columns[0].append(torch.cat([ids for ids, _, _, _ in pieces]))
        columns[1].append(torch.cat([torch.full((len(ids),), number) for ids, number, _, _ in pieces]))
        columns[2].append(torch.cat([torch.full((len(ids),), sibling) for ids, _, sibling, _ in pieces]))
        columns[3].append(torch.cat([torch.arange(start, start + len(ids)) for ids, _, _, start in pieces]))
    num_packs = bucket(len(packs), device)
    ids, prompt, sibling, position = (
        padded(pad_sequence(column, batch_first=True, padding_value=fill), (num_packs, longest), fill)
        for column, fill in zip(columns, (0, -1, 0, 0), strict=True)
    )
    return Packs(ids, Places(prompt, sibling, position), predictor)


def padded(tensor: Tensor, shape: tuple[int, int], fill: int) -> Tensor:
    """(n, m) -> shape, filled up below and on the right."""
    return pad(tensor, (0, shape[1] - tensor.shape[1], 0, shape[0] - tensor.shape[0]), value=fill)


def first_fit(sizes: dict[int, int], capacity: int) -> list[list[int]]:
    """Names of things in bins of one capacity, largest first, each in the first bin with room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        at = next((i for i, left in enumerate(room) if left >= sizes[name]), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(capacity)
        bins[at].append(name)
        room[at] -= sizes[name]
    return bins


def completion_lengths(completion_mask: Tensor) -> Tensor:
    """(B,) tokens up to and including the last one that the policy chose; what follows it predicts nothing."""
    steps = torch.arange(1, completion_mask.shape[1] + 1, device=completion_mask.device)
    return (completion_mask * steps).amax(dim=1)


def micro_batches(
    rollout, rows: Tensor, max_tokens: int, shared_prompt: bool = True, at_least: int = 1, device: torch.device = CPU
) -> list[Tensor]:
    """Split rows into batches of at most max_tokens padded tokens, siblings together where they fit.

    Longest first, so that packs of like length share a batch. A single completion longer than max_tokens gets a batch
    of its own. Any split gives the same gradient, since losses take their denominators from the whole step.

    at_least  so many batches, if there are as many rows: smaller ones, where several processes want some
    """
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    lengths = completion_lengths(rollout.completion_mask).tolist()
    prompt_lengths = rollout.prompt_mask.sum(dim=1).tolist()
    packs: list[tuple[int, list[int]]] = []                                      # (tokens, rows)
    open_pack: dict[int, int] = {}                                               # prompt -> its pack still being filled
    for row in rows.tolist():
        prompt = row // group_size
        at = open_pack.get(prompt)
        if not shared_prompt or at is None or packs[at][0] + lengths[row] > max_tokens:
            open_pack[prompt] = len(packs)
            packs.append((prompt_lengths[prompt] + lengths[row], [row]))
        else:
            packs[at] = (packs[at][0] + lengths[row], [*packs[at][1], row])
    packs.sort(key=lambda pack: -pack[0])
    batches: list[list[int]] = []
    longest = count = 0
    for tokens, members in packs:
        if not batches or bucket(count + 1, device) * longest > max_tokens:
            batches.append([])
            longest, count = bucket(tokens, device), 0
        batches[-1] += members
        count += 1
    if len(batches) < min(at_least, len(rows)):
        return micro_batches(rollout, rows, min(max_tokens, packs[0][0] * len(packs)) // 2, shared_prompt, at_least, device)
    return [torch.tensor(batch) for batch in batches]
