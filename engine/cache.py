"""
The key-value cache of sampling. A prompt's keys and values are kept once for all of its completions, each completion's own
in a row of its own. A decoding step attends to [prompt | own] in one softmax, with one product over the prompt's keys for
all siblings.

Column t of a row holds token t of its completion, so positions tell what is visible, and a row that forwards its last token
again changes nothing. All shapes stay as they are between two calls of compact.
Shapes: P prompts of up to Tp tokens, R rows of C columns, one row for each completion that is sampled; K key heads, H query
heads, D head size; S slots, the most rows that a prompt has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from engine.attention_kernels import Options, lowest_of
from engine.devices import bucket
from engine.packing import make_layout
from engine.prefix_attention import Siblings, decode_in_halves, decode_in_one_softmax, forward_packed

COLUMNS_AT_ONCE = 32            # on a CPU or GPU a step looks at a multiple of so many columns, not at all that there are


@dataclass
class LayerCache:
    """Keys and values of one layer; layers that share them have one between them."""

    prompt_keys: Tensor         # (P, K, Tp, D), right-aligned; under a window no more than its columns
    prompt_values: Tensor
    keys: Tensor | None = None                  # (R, K, C, D)
    values: Tensor | None = None

    def joined(self, other: "LayerCache") -> "LayerCache":
        """With the prompts of another one behind its own."""
        width = max(self.prompt_keys.shape[2], other.prompt_keys.shape[2])
        pairs = (self.prompt_keys, other.prompt_keys), (self.prompt_values, other.prompt_values)
        aligned = ([pad(part, (0, 0, width - part.shape[2], 0)) for part in pair] for pair in pairs)
        return LayerCache(*map(torch.cat, aligned), self.keys, self.values)

    def compact(self, prompts: Tensor | None, width: int, rows: Tensor, capacity: int) -> None:
        """Keep some prompts (None: all), no wider than width, and some rows, with room for `capacity` tokens."""
        surplus = max(0, self.prompt_keys.shape[2] - width)
        if prompts is not None or surplus:
            prompts = slice(None) if prompts is None else prompts
            self.prompt_keys, self.prompt_values = (
                part[:, :, surplus:][prompts].contiguous() for part in (self.prompt_keys, self.prompt_values)
            )
        old, shape = (self.keys, self.values), (len(rows), self.prompt_keys.shape[1], capacity)
        self.keys, self.values = (p.new_zeros(*shape, p.shape[-1]) for p in (self.prompt_keys, self.prompt_values))
        for part, new in zip(old, (self.keys, self.values), strict=True):
            if part is not None:
                columns = min(part.shape[2], capacity)
                new[:, :, :columns] = part[:, :, :columns].index_select(0, rows)


class PrefixCache:
    """The cache of some prompts and their completions: add_prompts, then compact, then forward, and so on.

    To be used where use_prefix_attention(model) holds.
    """

    def __init__(self, model):
        self.model, self.device = model, next(model.parameters()).device
        self.layers: list[LayerCache] = []
        self.prompts: list[int] = []                      # numbers of the prompts that are held
        self.lengths: list[int] = []                      # of these prompts
        self.row_ids: list[int] = []                      # which completion each row holds
        self.seen: list[tuple[Tensor, LayerCache]] = []   # keys of the layers so far in this pass, and where they are kept

    def add_prompts(self, numbers: list[int], prompts: list[list[int]]) -> Tensor:
        """Forward prompts, end to end in one row, and keep their keys and values. Returns the last hidden states (n, width).

        The next call has to be compact. n is rounded up where every shape is compiled.
        """
        lengths, device = [len(prompt) for prompt in prompts], self.device
        starts, size = [sum(lengths[:i]) for i in range(len(lengths))], sum(lengths)
        missing, unused = bucket(size, device) - size, bucket(len(prompts), device) - len(prompts)
        width = bucket(max(lengths), device)
        tokens = torch.tensor([token for prompt in prompts for token in prompt] + [0] * missing)
        positions = torch.cat([*map(torch.arange, lengths), torch.zeros(missing, dtype=torch.long)])
        layout = make_layout(positions.numpy(), list(zip(starts, lengths, strict=True)), [], {}, device).to(device)
        starts, lengths = torch.tensor([starts + [0] * unused, lengths + [1] * unused])
        column = torch.arange(width) - width + lengths[:, None]
        index = (starts[:, None] + column.clamp(min=0)).to(device)               # (n, Tp), right-aligned
        new: list[LayerCache] = []
        self.seen = []

        def store(source, keys, values, window):          # (1, K, L, D)
            if not any(source is known for known, _ in self.seen):               # of a layer that shares them
                columns = index[:, max(0, width - max(1, window - 1)) :] if window else index
                new.append(LayerCache(*(part[0][:, columns].transpose(0, 1).contiguous() for part in (keys, values))))
                self.seen.append((source, new[-1]))

        layout.store = store
        hidden = forward_packed(self.model, tokens[None].to(device), positions[None].to(device), layout)[0]
        self.layers = [old.joined(layer) for old, layer in zip(self.layers, new, strict=True)] if self.layers else new
        # Prompts of padding, where there are any, have no number.
        self.prompts, self.lengths = self.prompts + numbers + [-1] * unused, self.lengths + lengths.tolist()
        return hidden[index[:, -1]]

    def compact(self, row_ids: list[int], prompt_of: list[int], dummy: int, capacity: int) -> Tensor:
        """Keep the completions `row_ids` of the prompts `prompt_of`, with room for `capacity` tokens each.

        dummy    number of a completion that does not exist, for rows of padding
        returns  (R,) which completion each row holds
        """
        held, device = list(dict.fromkeys(prompt_of)), self.device
        unused, missing = bucket(len(held), device) - len(held), bucket(len(row_ids), device) - len(row_ids)
        members = [[row for row, number in enumerate(prompt_of) if number == p] for p in held] + [[]] * unused
        slots = bucket(max(map(len, members)), device)
        table = torch.tensor([rows + [0] * (slots - len(rows)) for rows in members])             # (P, S)
        slot = torch.zeros(len(row_ids) + missing, dtype=torch.long)
        for at, rows in enumerate(members):
            slot[rows] = at * slots + torch.arange(len(rows))
        # Where every shape is compiled, one program for all tables and all selections of prompts.
        compiled, in_order = device.type == "xla", torch.equal(table.flatten(), torch.arange(len(slot)))
        self.siblings = Siblings(table.to(device), slot.to(device), in_order and not compiled)

        source = [self.prompts.index(number) for number in held] + [0] * unused
        unchanged = source == list(range(len(self.prompts))) and not compiled
        self.prompts, self.lengths = held + [-1] * unused, [self.lengths[i] for i in source]
        before = {row_id: row for row, row_id in enumerate(self.row_ids)}
        rows = torch.tensor([before.get(row_id, 0) for row_id in row_ids] + [0] * missing).to(device)
        self.row_ids, self.capacity = row_ids, bucket(capacity, device)
        self.shortest, self.longest = min(self.lengths), max(self.lengths)
        source, width = torch.tensor(source).to(device), bucket(self.longest, device)
        for layer in self.layers:
            layer.compact(None if unchanged else source, width, rows, self.capacity)

        self.prompt_length = torch.tensor(self.lengths).repeat_interleave(slots)[slot].to(device)               # (R,)
        self.column = torch.arange(max(width, self.capacity)).to(device)
        heads = max(layer.keys.shape[1] for layer in self.layers)
        self.row_start = (torch.arange(len(slot) * heads) * self.capacity).to(device)            # in keys, flattened
        return torch.tensor(row_ids + [dummy] * missing).to(device)

    def forward(self, ids: Tensor, count: Tensor, longest: int) -> Tensor:
        """Forward the last token of each row: ids (R,), tokens so far count (R,), at most `longest`. Returns (R, width)."""
        rounded = -(-longest // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE
        self.columns = self.capacity if ids.device.type == "xla" else min(self.capacity, rounded)
        self.count, self.known_masks, self.seen = count, {}, []
        positions = self.prompt_length + count - 1
        return self.model.base_model(
            input_ids=ids[:, None], position_ids=positions[:, None], token_layout=self, use_cache=False
        ).last_hidden_state[:, 0]

    def masks(self, heads: int, width: int, window: int | None, dtype) -> tuple[Tensor | None, Tensor]:
        """What to add to the scores of a prompt's last `width` columns (R * K, 1, width), None if nothing, and of a row's own
        columns (R * K, 1, columns): 0 where the last token sees a column, the lowest score elsewhere. For all layers of a kind.
        """
        window = window if window is not None and window < self.longest + self.capacity else None
        if (heads, width, window) not in self.known_masks:
            zero = torch.zeros((), dtype=dtype, device=self.count.device)
            last, columns = self.count[:, None] - 1, self.column[: self.columns]                 # its own column is the last
            visible = columns <= last if window is None else (columns <= last) & (columns > last - window)
            own, prompt = torch.where(visible, zero, lowest_of(dtype))[:, None].repeat_interleave(heads, dim=0), None
            if window or width > self.shortest:
                behind = self.column[:width] - width                             # column -1: the end of the prompt
                visible = behind >= -self.prompt_length[:, None]
                visible = visible if window is None else visible & (behind > last - window)
                prompt = torch.where(visible, zero, lowest_of(dtype))[:, None].repeat_interleave(heads, dim=0)
            self.known_masks[heads, width, window] = prompt, own
        return self.known_masks[heads, width, window]

    def attend(self, module, query, key, value, *, source, window, softcap, scaling, sinks) -> Tensor:
        """query (R, H, 1, D), key and value (R, K, 1, D) of the new tokens -> (R, 1, H, D)."""
        layer = next((layer for known, layer in self.seen if known is source), None)
        heads = key.shape[1]
        if layer is None:
            layer = self.layers[len(self.seen)]
            self.seen.append((source, layer))
            at = (self.row_start[: len(query) * heads].view(-1, heads) + self.count[:, None] - 1).flatten()
            layer.keys.view(-1, key.shape[-1]).index_copy_(0, at, key.reshape(-1, key.shape[-1]))
            layer.values.view(-1, value.shape[-1]).index_copy_(0, at, value.reshape(-1, value.shape[-1]))
        own = (part[:, :, : self.columns].flatten(0, 1) for part in (layer.keys, layer.values))
        prompts = (part.flatten(0, 1) for part in (layer.prompt_keys, layer.prompt_values))
        masks = self.masks(heads, layer.prompt_keys.shape[2], window, query.dtype)
        query = query.unflatten(1, (heads, -1))[:, :, :, 0].flatten(0, 1)        # (R * K, H / K, D)
        decode = decode_in_halves if query.dtype in (torch.bfloat16, torch.float16) else decode_in_one_softmax
        output = decode(query, *own, *prompts, *masks, sinks, self.siblings, Options(None, softcap, scaling))
        return output.unflatten(0, (-1, heads)).flatten(1, 2)[:, None]


class PlainCache:
    """transformers' own cache, for models whose layers keep more than keys and values of tokens.

    Prompts are forwarded once, and what their layers keep is repeated for the siblings.
    """

    def __init__(self, model):
        self.model, self.layers, self.row_ids = model, DynamicCache(config=model.config.get_text_config()), []

    def add_prompts(self, numbers: list[int], prompts: list[list[int]]) -> Tensor:
        """Forward prompts, padded on the left. Returns the hidden states (P, width) of their last tokens. Once only."""
        device = next(self.model.parameters()).device
        if device.type == "xla":
            raise ValueError("XLA: this model keeps more than keys and values of tokens, and its cache grows with every token")
        self.numbers = numbers
        self.prompt_length = torch.tensor([len(prompt) for prompt in prompts]).to(device)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]).to(device)
        positions = torch.arange(longest, device=device) - longest + self.prompt_length[:, None]
        self.mask = positions >= 0
        return self.forward_hidden(ids, positions.clamp(min=0))

    def forward_hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Forward tokens (rows, n). Returns the hidden states (rows, width) of the last ones."""
        return self.model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=self.mask, past_key_values=self.layers, use_cache=True
        ).last_hidden_state[:, -1]

    def compact(self, row_ids: list[int], prompt_of: list[int], dummy: int, capacity: int) -> Tensor:
        """Keep these completions; at first, repeat what the prompts left for each of them."""
        before, wanted = (self.row_ids, row_ids) if self.row_ids else (self.numbers, prompt_of)
        source = torch.tensor([before.index(number) for number in wanted]).to(self.mask.device)
        self.layers.reorder_cache(source)
        self.mask, self.prompt_length, self.row_ids = self.mask[source], self.prompt_length[source], list(row_ids)
        return torch.tensor(row_ids).to(self.mask.device)

    def forward(self, ids: Tensor, count: Tensor, longest: int) -> Tensor:
        """As PrefixCache.forward."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self.forward_hidden(ids[:, None], (self.prompt_length + count - 1)[:, None])
