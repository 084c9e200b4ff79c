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
from transformers import DynamicCache

from devices import bucket
from engine.packing import make_layout
from engine.prefix_attention import Options, check_layers, choose_kernel, joined, lowest_of, with_sinks

COLUMNS_AT_ONCE = 32            # on a CPU or GPU a step looks at a multiple of so many columns, not at all that there are


@dataclass
class LayerCache:
    """Keys and values of one layer; layers that share them have one between them."""

    prompt_keys: Tensor         # (P, K, Tp, D), right-aligned; under a window no more than its columns
    prompt_values: Tensor
    keys: Tensor | None = None                  # (R, K, C, D)
    values: Tensor | None = None


class PrefixCache:
    """The cache of some prompts and their completions: add_prompts, then compact, then forward, and so on.

    To be used where use_prefix_attention(model) holds.
    """

    def __init__(self, model):
        self.model, self.layers = model, []
        self.prompts: list[int] = []                      # numbers of the prompts that are held
        self.lengths: list[int] = []                      # of these prompts
        self.row_ids: list[int] = []                      # which completion each row holds
        self.shared: list[tuple[Tensor, LayerCache]] = []                        # this step's keys, and where they are kept

    def forward_hidden(self, ids: Tensor, positions: Tensor, layout) -> Tensor:
        """Forward tokens (rows, n) at their positions. Returns hidden states (rows, n, width)."""
        self.shared = []
        return self.model.base_model(
            input_ids=ids, position_ids=positions, token_layout=layout, use_cache=False
        ).last_hidden_state

    def add_prompts(self, numbers: list[int], prompts: list[list[int]]) -> Tensor:
        """Forward prompts, end to end in one row, and keep their keys and values. Returns the last hidden states (n, width).

        The next call has to be compact. n is rounded up where every shape is compiled.
        """
        device = next(self.model.parameters()).device
        count = bucket(len(prompts), device)
        width = bucket(max(map(len, prompts)), device)
        flat, positions, ranges = [], [], []
        for prompt in prompts:
            ranges.append((len(flat), len(prompt)))
            flat += prompt
            positions += range(len(prompt))
        missing = bucket(len(flat), device) - len(flat)
        padding = [(at, min(width, len(flat) + missing - at)) for at in range(len(flat), len(flat) + missing, width)]
        layout = make_layout(
            torch.tensor(positions + [0] * missing).numpy(), ranges + padding, [], [], {}, device
        ).to(device)
        column = torch.arange(width) - width + torch.tensor([n for _, n in ranges] + [1] * (count - len(ranges)))[:, None]
        start = torch.tensor([at for at, _ in ranges] + [0] * (count - len(ranges)))[:, None]
        index = (start + column.clamp(min=0)).to(device)  # (n, Tp), right-aligned
        new: list[LayerCache] = []

        def store(keys, values, window):                  # (1, K, L, D)
            if any(keys is known for known, _ in self.shared):
                return
            at = index[:, max(0, index.shape[1] - max(1, window - 1)) :] if window else index
            kept = (part[0][:, at].transpose(0, 1).contiguous() for part in (keys, values))
            new.append(LayerCache(*kept))
            self.shared.append((keys, new[-1]))

        layout.store = store
        tokens = torch.tensor([flat + [0] * missing]).to(device)
        hidden = self.forward_hidden(tokens, torch.tensor([positions + [0] * missing]).to(device), layout)[0]
        for mine, more in zip(self.layers or [None] * len(new), new, strict=True):
            if mine is not None:
                width = max(mine.prompt_keys.shape[2], more.prompt_keys.shape[2])
                more.prompt_keys, more.prompt_values = (
                    torch.cat([padded(part, width, left=True) for part in parts])
                    for parts in ((mine.prompt_keys, more.prompt_keys), (mine.prompt_values, more.prompt_values))
                )
                more.keys, more.values = mine.keys, mine.values
        self.layers = new
        check_layers(self.model, layout)
        # Rows of padding, where there are any, count as prompts of no number.
        self.prompts += numbers + [-1] * (count - len(numbers))
        self.lengths += [len(prompt) for prompt in prompts] + [1] * (count - len(prompts))
        return hidden[index[:, -1]]

    def compact(self, row_ids: list[int], prompt_of: list[int], dummy: int, capacity: int) -> Tensor:
        """Keep the completions `row_ids` of the prompts `prompt_of`, with room for `capacity` tokens each.

        dummy    number of a completion that does not exist, for rows of padding
        returns  (R,) which completion each row holds
        """
        device = next(self.model.parameters()).device
        held = sorted(set(prompt_of), key=prompt_of.index)
        count, size = bucket(len(held), device), bucket(len(row_ids), device)
        capacity = bucket(capacity, device)
        groups: dict[int, list[int]] = {number: [] for number in held}
        for row, number in enumerate(prompt_of):
            groups[number].append(row)
        most = bucket(max(map(len, groups.values())), device)
        grid = torch.zeros(count, most, dtype=torch.long)                        # (P, S) rows; what is not used is row 0
        slot = torch.zeros(size, dtype=torch.long)                               # (R,) where a row lies in the grid
        for at, rows in enumerate(groups.values()):
            grid[at, : len(rows)] = torch.tensor(rows)
            slot[rows] = at * most + torch.arange(len(rows))
        # A grid without gaps, in order, is a view of the rows.
        self.grid = None if torch.equal(grid.flatten(), torch.arange(size)) else grid.flatten().to(device)
        self.slot, self.grid_shape = slot.to(device), (count, most)

        at = [self.prompts.index(number) for number in held]
        width = max(self.lengths[i] for i in at)
        width = bucket(width, device)
        before = {row_id: row for row, row_id in enumerate(self.row_ids)}
        source = [before.get(row_id, 0) for row_id in row_ids] + [0] * (size - len(row_ids))
        keep_prompts = at == list(range(len(self.prompts))) and count == len(at)
        at, source = torch.tensor(at + [0] * (count - len(at))).to(device), torch.tensor(source).to(device)
        for layer in self.layers:
            if not keep_prompts or layer.prompt_keys.shape[2] > width:
                layer.prompt_keys, layer.prompt_values = (
                    part[:, :, max(0, part.shape[2] - width) :].index_select(0, at)
                    for part in (layer.prompt_keys, layer.prompt_values)
                )
            shape = (size, layer.prompt_keys.shape[1], capacity)
            layer.keys, layer.values = (
                moved(old, source, like.new_zeros(*shape, like.shape[-1]))
                for old, like in ((layer.keys, layer.prompt_keys), (layer.values, layer.prompt_values))
            )
        self.lengths = [self.lengths[i] for i in at.tolist()]
        self.prompts = held + [-1] * (count - len(held))
        self.row_ids = list(row_ids)
        lengths = torch.tensor(self.lengths)
        self.prompt_length = lengths.repeat_interleave(most)[slot].to(device)    # (R,)
        self.shortest_prompt, self.longest_prompt = min(self.lengths), max(self.lengths)
        self.column = torch.arange(max(width, capacity)).to(device)
        most_heads = max(layer.keys.shape[1] for layer in self.layers)
        self.before_row = (torch.arange(size * most_heads) * capacity - 1).to(device)            # of keys, flattened
        most_heads = max(layer.keys.shape[1] for layer in self.layers)
        self.before_row = (torch.arange(size * most_heads) * capacity - 1).to(device)            # of keys, flattened
        return torch.tensor(row_ids + [dummy] * (size - len(row_ids))).to(device)

    def forward(self, ids: Tensor, count: Tensor, longest: int) -> Tensor:
        """Forward the last token of each row: ids (R,), tokens so far count (R,), at most `longest`. Returns (R, width)."""
        static = ids.device.type == "xla"
        capacity = self.layers[0].keys.shape[2]
        self.columns = capacity if static else min(capacity, -(-longest // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE)
        self.count, self.known_masks, self.positions = count, {}, {}
        self.longest = self.longest_prompt + longest      # tokens of a row
        positions = self.prompt_length + count - 1
        return self.forward_hidden(ids[:, None], positions[:, None], self)[:, 0]

    def masks(self, heads: int, width: int, window: int | None, dtype) -> tuple[Tensor | None, Tensor]:
        """What to add to the scores of a prompt's last `width` columns (R * K, 1, width), None if nothing, and of a row's own
        columns (R * K, 1, columns): 0 where the last token sees a column, the lowest score elsewhere. For all layers of a kind.
        """
        window = window if window is not None and window < self.longest else None
        if (heads, width, window) not in self.known_masks:
            zero = torch.zeros((), dtype=dtype, device=self.count.device)
            last, columns = self.count[:, None] - 1, self.column[: self.columns]                 # its own column is the last
            visible = columns <= last if window is None else (columns <= last) & (columns > last - window)
            own, prompt = torch.where(visible, zero, lowest_of(dtype))[:, None].repeat_interleave(heads, dim=0), None
            if window or width > self.shortest_prompt:
                behind = self.column[:width] - width                             # column -1: the end of the prompt
                visible = behind >= -self.prompt_length[:, None]
                visible = visible if window is None else visible & (behind > last - window)
                prompt = torch.where(visible, zero, lowest_of(dtype))[:, None].repeat_interleave(heads, dim=0)
            self.known_masks[heads, width, window] = prompt, own
        return self.known_masks[heads, width, window]

    def write_positions(self, heads: int) -> Tensor:
        """(R * K,) where the last tokens' keys go, in keys (R, K, C, D) flattened to (R * K * C, D)."""
        if heads not in self.positions:
            first = self.before_row[: len(self.count) * heads].view(-1, heads)
            self.positions[heads] = (first + self.count[:, None]).flatten()
        return self.positions[heads]

    def attend(self, module, query, key, value, *, window, softcap, scaling, sinks) -> Tensor:
        """query (R, H, 1, D), key and value (R, K, 1, D) of the new tokens -> (R, 1, H, D)."""
        layer = next((layer for known, layer in self.shared if known is key), None)
        heads = key.shape[1]
        if layer is None:
            layer = self.layers[len(self.shared)]
            self.shared.append((key, layer))
            at = self.write_positions(heads)
            layer.keys.view(-1, key.shape[-1]).index_copy_(0, at, key.reshape(-1, key.shape[-1]))
            layer.values.view(-1, value.shape[-1]).index_copy_(0, at, value.reshape(-1, value.shape[-1]))
        query = query.unflatten(1, (heads, -1))[:, :, :, 0]                      # (R, K, H / K, D)
        keys, values = (part[:, :, : self.columns] for part in (layer.keys, layer.values))
        masks = self.masks(heads, layer.prompt_keys.shape[2], window, query.dtype)
        options = Options(None, softcap, scaling)
        if query.dtype in (torch.bfloat16, torch.float16):
            output = self.in_halves(query, layer, keys, values, masks, sinks, options)
        else:
            output = self.in_one_softmax(query, layer, keys, values, masks, sinks, options)
        return output.flatten(1, 2)[:, None]

    def in_one_softmax(self, query, layer: LayerCache, keys, values, masks, sinks, options: Options) -> Tensor:
        """query (R, K, r, D), keys and values (R, K, columns, D), masks as from self.masks -> (R, K, r, D)."""
        shape, (prompt_mask, own_mask) = query.shape, masks
        query, keys, values, prompt_keys, prompt_values = (
            part.flatten(0, 1) for part in (query * options.scaling, keys, values, layer.prompt_keys, layer.prompt_values)
        )
        prompt = self.from_grid(self.to_grid(query, shape[1]).bmm(prompt_keys.mT), shape[1])     # (R * K, r, Tp)
        if options.softcap:
            own = torch.tanh(query.bmm(keys.mT) / options.softcap) * options.softcap + own_mask  # (R * K, r, columns)
            prompt = torch.tanh(prompt / options.softcap) * options.softcap
        else:
            own = torch.baddbmm(own_mask, query, keys.mT)
        parts = [prompt if prompt_mask is None else prompt + prompt_mask, own]
        if sinks is not None:
            parts.append(sinks.view(1, shape[1], -1, 1).expand(shape[0], -1, -1, -1).flatten(0, 1))
        probs, width = torch.cat(parts, dim=-1).softmax(dim=-1), prompt.shape[-1]
        output = self.from_grid(self.to_grid(probs[..., :width], shape[1]).bmm(prompt_values), shape[1])
        return torch.baddbmm(output, probs[..., width : width + self.columns], values).unflatten(0, shape[:2])

    def in_halves(self, query, layer: LayerCache, keys, values, masks, sinks, options: Options) -> Tensor:
        """The same in 16 bits: with the trainer's kernels, one half at a time, so that both round alike."""
        heads, sizes = query.shape[1], (keys.shape[-1], values.shape[-1])

        def half(q, k, v, mask):                          # q (n * K, r, D), k and v (n, K, m, D), mask (n * K, r, m) or None
            kernel = choose_kernel(q.device.type, q.dtype, sizes, mask is not None, options.softcap is not None)
            k, v = k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None]
            mask = mask if mask is None else mask[:, None]
            return (part[:, 0] for part in kernel.forward(q[:, None], k, v, mask, False, options))

        prompt_mask, own_mask = (part if part is None else part.expand(-1, query.shape[2], -1) for part in masks)
        if prompt_mask is not None:
            prompt_mask = self.to_grid(prompt_mask, heads)
        prompt, prompt_lse = half(self.to_grid(query.flatten(0, 1), heads), layer.prompt_keys, layer.prompt_values, prompt_mask)
        own, own_lse = half(query.flatten(0, 1), keys, values, own_mask)
        prompt, prompt_lse = self.from_grid(prompt, heads), self.from_grid(prompt_lse[..., None], heads)[..., 0]
        output, lse = (part.unflatten(0, (-1, heads)) for part in joined(own, own_lse, prompt, prompt_lse))
        return output if sinks is None else with_sinks(output, lse, sinks.view(heads, -1))[0]

    def to_grid(self, x: Tensor, heads: int) -> Tensor:
        """(R * K, r, n) -> (P * K, S * r, n): the rows of a prompt as one matrix."""
        x = x.unflatten(0, (-1, heads))
        x = (x if self.grid is None else x[self.grid]).unflatten(0, self.grid_shape)
        return x.transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def from_grid(self, x: Tensor, heads: int) -> Tensor:
        """(P * K, S * r, n) -> (R * K, r, n): the way back."""
        x = x.unflatten(1, (self.grid_shape[1], -1)).unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)
        return (x if self.grid is None else x[self.slot]).flatten(0, 1)


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


def moved(old: Tensor | None, source: Tensor, new: Tensor) -> Tensor:
    """The rows `source` of old (R, K, C, D) at the beginning of the columns of new."""
    if old is not None:
        columns = min(old.shape[2], new.shape[2])
        new[:, :, :columns] = old[:, :, :columns].index_select(0, source)
    return new


def padded(x: Tensor, width: int, left: bool) -> Tensor:
    """(P, K, n, D) with zeros up to n = width."""
    missing = width - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0, missing, 0) if left else (0, 0, 0, missing))
