"""
The key-value cache of sampling. A prompt's keys and values are stored once for all of its completions. Each
completion has a row for its own keys and values. A decoding step attends to the prompt, with one product over
its keys for all siblings, and to the row's own columns, and merges both.

Column t of a row holds token t of its completion, so positions alone define the mask, and forwarding a row's
last token again changes nothing. All shapes and addresses stay the same between two calls of compact.
Shapes: P prompts of up to Tp tokens, R rows of C columns, one row for each active completion; K key heads, H
query heads, D head size; S slots, the largest number of rows of a prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.attention_kernels import Options, additive_mask
from engine.devices import bucket
from engine.packing import make_layout, padded_indices
from engine.prefix_attention import Siblings, attend_to_prompt_and_own, forward_packed

COLUMNS_AT_ONCE = 32  # on a CPU a step attends to a multiple of this many columns, elsewhere to all of them


@dataclass
class StaticCacheLayer:
    """Hold keys and values, two tensors, of one layer; layers that share keys have one between them."""

    prompts: list[Tensor]       # (P, K, Tp, D), right-aligned; only the columns of a window
    own: list[Tensor]           # (R, K, C, D)

    def extend(self, other: "StaticCacheLayer") -> "StaticCacheLayer":
        """Return a layer with the prompts of another one after its own."""
        width = max(layer.prompts[0].shape[2] for layer in (self, other))
        aligned = ([pad(x, (0, 0, width - x.shape[2], 0)) for x in layer.prompts] for layer in (self, other))
        return StaticCacheLayer(list(map(torch.cat, zip(*aligned, strict=True))), self.own)


class PrefixCache:
    """Cache prompts and their completions: add_prompts, then compact, then forward repeatedly, and so on.

    Use within use_prefix_attention(model).
    """

    def __init__(self, model):
        self.model, self.device = model, next(model.parameters()).device
        self.layers: list[StaticCacheLayer] = []
        self.prompts: list[int] = []                      # numbers of the cached prompts; -1: padding
        self.lengths: list[int] = []                      # of these prompts
        self.row_ids: list[int] = []                      # completion of each row
        self.layer_of: dict[Tensor, StaticCacheLayer] = {}  # keys in this pass -> where they are cached

    def add_prompts(self, numbers: list[int], prompts: list[list[int]]) -> Tensor:
        """Forward prompts, concatenated in one row, and cache them. Return the last hidden states (n, width).

        The next call has to be compact. n is rounded up where every shape is compiled.
        """
        lengths, device = [len(prompt) for prompt in prompts], self.device
        ranges, size = [(sum(lengths[:i]), length) for i, length in enumerate(lengths)], sum(lengths)
        padding, padding_prompts = bucket(size, device) - size, bucket(len(prompts), device) - len(prompts)
        tokens = torch.tensor([token for prompt in prompts for token in prompt] + [0] * padding)
        positions = torch.cat([*map(torch.arange, lengths), torch.zeros(padding, dtype=torch.long)])
        layout = make_layout(positions.numpy(), ranges, [], {}, device)
        index, _ = padded_indices(ranges, device, left=True)
        index = torch.from_numpy(index).to(device)                               # (n, Tp), right-aligned
        self.layer_of = {}

        def store(source, keys, values, window):          # (1, K, L, D)
            if source not in self.layer_of:               # layers may share keys
                columns = index[:, max(0, index.shape[1] - max(1, window - 1)) :] if window else index
                pair = [x[0][:, columns].transpose(0, 1).contiguous() for x in (keys, values)]
                # A row for compact to copy; its only column is the first to be overwritten.
                self.layer_of[source] = StaticCacheLayer(pair, [x[:1, :, :1] for x in pair])

        layout.store = store
        hidden = forward_packed(self.model, tokens[None].to(device), positions[None].to(device), layout)[0]
        new = list(self.layer_of.values())
        if self.layers:
            new = [layer.extend(other) for layer, other in zip(self.layers, new, strict=True)]
        self.layers = new
        self.prompts += numbers + [-1] * padding_prompts
        self.lengths += lengths + [1] * padding_prompts
        return hidden[index[:, -1]]

    def compact(self, row_ids: list[int], prompt_of: list[int], dummy_row: int, capacity: int) -> Tensor:
        """Keep the completions `row_ids` of the prompts `prompt_of`, with room for `capacity` tokens each.

        dummy_row  row id of padding
        returns    (R,) row ids, padded
        """
        numbers, device = list(dict.fromkeys(prompt_of)), self.device
        padding_prompts = bucket(len(numbers), device) - len(numbers)
        padding = bucket(len(row_ids), device) - len(row_ids)
        members = [[row for row, p in enumerate(prompt_of) if p == number] for number in numbers]
        num_slots = bucket(max(map(len, members)), device)
        table = members + [[]] * padding_prompts
        table = torch.tensor([rows + [0] * (num_slots - len(rows)) for rows in table])           # (P, S)
        slots = torch.zeros(len(row_ids) + padding, dtype=torch.long)
        for i, rows in enumerate(members):
            slots[rows] = i * num_slots + torch.arange(len(rows))
        self.siblings = Siblings(table.to(device), slots.to(device))

        source = [self.prompts.index(number) for number in numbers] + [0] * padding_prompts
        # Where every shape is compiled, one program serves all selections of prompts.
        unchanged = source == list(range(len(self.prompts))) and device.type != "xla"
        self.prompts, self.lengths = numbers + [-1] * padding_prompts, [self.lengths[i] for i in source]
        old_row = {row_id: row for row, row_id in enumerate(self.row_ids)}
        rows = torch.tensor([old_row.get(row_id, 0) for row_id in row_ids] + [0] * padding).to(device)
        self.row_ids, self.capacity = row_ids, bucket(capacity, device)
        self.shortest, self.longest = min(self.lengths), max(self.lengths)
        source, width = torch.tensor(source).to(device), bucket(self.longest, device)
        for layer in self.layers:
            if not unchanged:                             # at most `width` columns, the last ones
                columns = (x[:, :, max(0, x.shape[2] - width) :] for x in layer.prompts)
                layer.prompts = [x[source].contiguous() for x in columns]
            kept = (x[:, :, : self.capacity].index_select(0, rows) for x in layer.own)
            layer.own = [pad(x, (0, 0, 0, self.capacity - x.shape[2])) for x in kept]

        self.prompt_length = torch.tensor(self.lengths).repeat_interleave(num_slots)[slots].to(device)  # (R,)
        self.column = torch.arange(max(width, self.capacity)).to(device)
        self.rows = torch.arange(len(slots)).to(device)
        return torch.tensor(row_ids + [dummy_row] * padding).to(device)

    def forward(self, ids: Tensor, count: Tensor, longest: int) -> Tensor:
        """Forward the last token of each row and return hidden states (R, width).

        ids (R,); count (R,) tokens of each completion so far, at most `longest`
        """
        rounded = -(-longest // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        self.columns = min(self.capacity, rounded) if ids.device.type == "cpu" else self.capacity
        self.count, self.of_step, self.layer_of = count, {}, {}
        positions = self.prompt_length + count - 1
        return self.model.base_model(
            input_ids=ids[:, None], position_ids=positions[:, None], token_layout=self, use_cache=False
        ).last_hidden_state[:, 0]

    def once_a_step(self, function, *args):
        """Return function(*args), computed once for all layers that need it."""
        key = function.__name__, *args
        if key not in self.of_step:
            self.of_step[key] = function(*args)
        return self.of_step[key]

    def write_positions(self, heads: int) -> Tensor:
        """Return (R * K,): where the new keys belong among all of a layer, flattened."""
        first = (self.rows[:, None] * heads + self.column[:heads]) * self.capacity               # (R, K)
        return (first + self.count[:, None] - 1).flatten()

    def own_mask(self, heads: int, window: int | None, dtype) -> Tensor:
        """Return the additive mask of each row's own columns, (R * K, 1, columns)."""
        last, columns = self.count[:, None] - 1, self.column[: self.columns]     # last: of the new token
        visible = columns <= last if window is None else (columns <= last) & (columns > last - window)
        return additive_mask(visible.repeat_interleave(heads, dim=0)[:, None], dtype)

    def prompt_mask(self, heads: int, queries: int, width: int, window: int | None, dtype) -> Tensor | None:
        """Return the additive mask of the last `width` columns of prompts; None if no key is masked.

        returns  (P * K, S * queries, width): a row for each query of the siblings, as Siblings groups them
        """
        if not window and width <= self.shortest:
            return None
        columns = self.column[:width] - width             # column -1: the end of the prompt
        visible = columns >= -self.prompt_length[:, None]
        if window:
            visible = visible & (columns > self.count[:, None] - 1 - window)
        visible = visible.repeat_interleave(heads, dim=0)[:, None].expand(-1, queries, -1)
        return additive_mask(self.siblings.group(visible, heads), dtype)

    def attend(self, module, query, key, value, *, source, window, softcap, scaling, sinks) -> Tensor:
        """Cache new keys and values; attend: query (R, H, 1, D), key, value (R, K, 1, D) -> (R, 1, H, D)."""
        heads = key.shape[1]
        if source not in self.layer_of:                   # layers may share keys
            layer = self.layer_of[source] = self.layers[len(self.layer_of)]
            positions = self.once_a_step(self.write_positions, heads)
            for cached, new in zip(layer.own, (key, value), strict=True):
                size = new.shape[-1]
                cached.view(-1, size).index_copy_(0, positions, new.reshape(-1, size))
        layer = self.layer_of[source]
        own = (x[:, :, : self.columns].flatten(0, 1) for x in layer.own)
        prompts = (x.flatten(0, 1) for x in layer.prompts)
        query = query.unflatten(1, (heads, -1))[:, :, :, 0].flatten(0, 1)        # (R * K, H / K, D)
        window = window if window is not None and window < self.longest + self.capacity else None
        width, dtype = layer.prompts[0].shape[2], query.dtype
        masks = (
            self.once_a_step(self.prompt_mask, heads, query.shape[1], width, window, dtype),
            self.once_a_step(self.own_mask, heads, window, dtype))
        options = Options(None, softcap, scaling)
        output = attend_to_prompt_and_own(query, *own, *prompts, *masks, sinks, self.siblings, options)
        return output.unflatten(0, (-1, heads)).flatten(1, 2)[:, None]
