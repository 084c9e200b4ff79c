"""
The key-value cache of sampling: static rows [prompt | tokens of siblings]. The new tokens of a row's siblings
attend to this row together, each to the prompt and its own tokens, by the model's own attention function.

A long prompt has one row for many siblings. A short one has a row for each, because the row of a sibling also
holds the columns of the others, to which it does not attend. Prompts are right-aligned. Column W + t*S + s
of a row holds token t of its sibling s, so positions alone define the mask, and forwarding a last token again
changes nothing. All shapes and addresses stay the same between two calls of compact.
Shapes: P rows of W columns for a prompt, and for S siblings with C tokens each; B = P * S completions; K key
heads, H query heads, D head size.
"""

from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.packing import make_layout, padded_indices, ranges_of
from engine.prefix_attention import (
    additive_mask, attend_folded, attends_to, first_column, forward_packed,
)
from engine.xla import bucket

COLUMNS_AT_ONCE = 32  # on a CPU a step attends to a multiple of this many tokens, elsewhere to all C


class PrefixCache:
    """A cache of prompts and their completions. Call add_prompts, then compact, then forward repeatedly.

    Use within use_prefix_attention(model).
    """

    # Of all passes until the next compact, see prepare_passes.
    allowed: Tensor             # (B, W + C * S) bool, True on columns of a completion's prompt and its own
    position: Tensor            # (W + C * S,) of the column's token, counted from the prompt's end
    first_place: Tensor         # (B,) of a completion's first token in a layer whose rows are concatenated
    prompt_length: Tensor       # (B,)
    # Of one pass, see forward.
    end: int                    # columns behind this one are not attended to
    last: Tensor                # (B,) index of the token that is forwarded
    place: Tensor               # (B,) of this token, as first_place
    layer_of: dict              # keys as a layer computed them -> its cached keys and values
    masks: dict                 # see mask

    def __init__(self, model):
        self.model, self.device = model, next(model.parameters()).device
        self.layers: list[list[Tensor]] = []              # [keys, values] of each layer, (P, W + C * S, K, D)
        self.prompts: list[int] = []                      # number of each row's prompt; -1: padding
        self.lengths: list[int] = []                      # lengths of these prompts
        self.row_ids: list[int] = []                      # completions, B
        self.width, self.siblings, self.capacity = 0, 1, 0                       # W, S and C

    def add_prompts(self, numbers: list[int], prompts: list[list[int]]) -> Tensor:
        """Forward prompts, concatenated in one row, and cache them. Return the last hidden states (n, width).

        Call compact before the next forward. n is rounded up on devices that compile every shape.
        """
        ranges, device = ranges_of([len(prompt) for prompt in prompts]), self.device
        positions = chain.from_iterable(range(length) for _, length in ranges)
        tokens = torch.tensor([list(chain.from_iterable(prompts)), list(positions)])             # (2, L)
        size = tokens.shape[1]
        inputs = pad(tokens, (0, bucket(size, device) - size))[:, None].to(device)               # (2, 1, L)
        layout, new = make_layout(ranges, [], device), {}
        padding = bucket(len(ranges), device) - len(ranges)
        ranges += ranges[-1:] * padding
        index = padded_indices(ranges, device, left=True)[0].to(device)          # (n, W), right-aligned

        def store(source, keys, values):                  # (1, K, L, D)
            if source not in new:                         # layers may share keys
                new[source] = [x[0].transpose(0, 1)[index] for x in (keys, values)]

        layout.store = store
        hidden = forward_packed(self.model, *inputs, layout)[0]
        before, self.width = self.width, max(self.width, index.shape[1])
        layers, columns = list(new.values()), self.capacity * self.siblings
        for number, pair in enumerate(layers):
            pair[:] = [pad_columns(x, self.width - index.shape[1], columns) for x in pair]
            if self.layers:
                old = [pad_columns(x, self.width - before) for x in self.layers[number]]
                pair[:] = map(torch.cat, zip(old, pair, strict=True))
        self.layers, self.prompts = layers, self.prompts + numbers + [-1] * padding
        self.lengths += [length for _, length in ranges]
        return hidden[index[:, -1]]

    def compact(self, row_ids: list[int], prompt_of: list[int], dummy_row: int, capacity: int) -> Tensor:
        """Keep the completions `row_ids` of the prompts `prompt_of`, with space for `capacity` tokens each.

        dummy_row  row id of padding
        returns    (B,) row ids, siblings adjacent, padded
        """
        device = self.device
        length_of = dict(zip(self.prompts, self.lengths, strict=True))
        width, capacity = bucket(max(map(length_of.get, prompt_of)), device), bucket(capacity, device)
        numbers, members = split_siblings(row_ids, prompt_of, at_most=max(1, width // capacity))
        padding = bucket(len(numbers), device) - len(numbers)
        siblings = bucket(max(map(len, members)), device)
        sources = [self.prompts.index(number) for number in numbers] + [0] * padding
        old_index = {row: i for i, row in enumerate(self.row_ids)}
        self.prompts, self.lengths = numbers + [-1] * padding, [self.lengths[i] for i in sources]
        self.row_ids = [
            row for each in members + [[]] * padding for row in each + [dummy_row] * (siblings - len(each))]
        old_rows = torch.tensor([old_index.get(row, 0) for row in self.row_ids]).to(device)
        old_prompts = torch.tensor(sources).to(device)
        for pair in self.layers:
            for i, x in enumerate(pair):
                prompt = pad_columns(x[:, : self.width].index_select(0, old_prompts), width - self.width)
                own = x[:, self.width :].unflatten(1, (-1, self.siblings)).transpose(1, 2).flatten(0, 1)
                own = pad_columns(own.index_select(0, old_rows), 0, capacity - self.capacity)
                own = own.unflatten(0, (-1, siblings)).transpose(1, 2).flatten(1, 2)
                pair[i] = torch.cat([prompt, own], dim=1)
        self.width, self.siblings, self.capacity = width, siblings, capacity
        self.prepare_passes()
        return torch.tensor(self.row_ids).to(device)

    def prepare_passes(self) -> None:
        """Compute the masks and positions that forward passes need, as tensors on the device."""
        siblings, number = self.siblings, torch.arange(len(self.row_ids))
        column = torch.arange(-self.width, self.capacity * siblings)             # 0: the first own one
        position = torch.where(column < 0, column, column // siblings)           # from the prompt's end on
        lengths = torch.tensor(self.lengths).repeat_interleave(siblings)
        in_prompt = (column < 0) & (column >= -lengths[:, None])
        is_own = (column >= 0) & (column % siblings == number[:, None] % siblings)
        place = number // siblings * len(column) + self.width + number % siblings
        self.allowed, self.position = (in_prompt | is_own).to(self.device), position.to(self.device)
        self.first_place, self.prompt_length = place.to(self.device), lengths.to(self.device)

    def forward(self, ids: Tensor, count: Tensor, longest: int) -> Tensor:
        """Forward the last token of each completion and return hidden states (B, width).

        ids (B,); count (B,) tokens of each completion so far, at most `longest`
        """
        rounded = -(-longest // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        attended = min(self.capacity, rounded) if ids.device.type == "cpu" else self.capacity
        self.end = self.width + attended * self.siblings
        self.last, self.layer_of, self.masks = count - 1, {}, {}
        self.place = self.first_place + self.last * self.siblings
        return self.model.base_model(
            input_ids=ids[:, None], position_ids=(self.prompt_length + self.last)[:, None],
            token_layout=self, use_cache=False,
        ).last_hidden_state[:, 0]

    def attend(self, function, query, key, value, *, module, source, window, folds, is_sdpa) -> Tensor:
        """Cache new keys and values; attend: query (B, H, 1, D), key, value (B, K, 1, D) -> (B, 1, H, D)."""
        if source not in self.layer_of:                   # layers may share keys
            pair = self.layer_of[source] = self.layers[len(self.layer_of)]
            for cached, new in zip(pair, (key, value), strict=True):
                cached.flatten(0, 1).index_copy_(0, self.place, new[:, :, 0])
        first = first_column(self.width, window)
        keys, values = (x[:, first : self.end].transpose(1, 2) for x in self.layer_of[source])
        query = query[:, :, 0].unflatten(0, (-1, self.siblings)).transpose(1, 2)          # (P, H, S, D)
        mask = self.mask(first, window, query.dtype, folds)
        output = attend_folded(function, module, query, keys, values, mask, folds)        # (P, S, H, D)
        return output.flatten(0, 1)[:, None]

    def mask(self, first: int, window: int | None, dtype, folds: int) -> Tensor:
        """Return the additive mask of the columns from `first` on, (P, 1, folds * S, columns)."""
        key = window, dtype, folds
        if key not in self.masks:                         # once a step for all layers
            columns = slice(first, self.end)
            visible = attends_to(self.last[:, None], self.position[columns], window)
            visible = visible & self.allowed[:, columns]                         # (B, columns)
            visible = visible.unflatten(0, (-1, self.siblings))[:, None]         # (P, 1, S, columns)
            self.masks[key] = additive_mask(visible.repeat(1, 1, folds, 1), dtype)
        return self.masks[key]


def split_siblings(
    row_ids: list[int], prompt_of: list[int], at_most: int
) -> tuple[list[int], list[list[int]]]:
    """Divide completions among rows of the cache, at_most siblings each.

    Returns for each row the number of its prompt, and the row ids of its siblings.
    """
    numbers, members = [], []
    for number in dict.fromkeys(prompt_of):
        siblings = [row for row, p in zip(row_ids, prompt_of, strict=True) if p == number]
        for first in range(0, len(siblings), at_most):
            numbers.append(number)
            members.append(siblings[first : first + at_most])
    return numbers, members


def pad_columns(x: Tensor, before: int, after: int = 0) -> Tensor:
    """Add columns to a layer's keys or values (P, columns, K, D), or remove columns if negative."""
    return pad(x, (0, 0, 0, 0, before, after))
