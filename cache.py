"""
The key-value cache of sampling. Siblings lie side by side in one row behind one copy of their prompt, so a decoding step
asks the prompt's keys once for all of them.

A cache has R rows of C columns in every layer. A step forwards Q slots a row, one new token of a completion each, and writes
into the next Q columns; who sees what is read from the places of the columns (packing.py). All shapes stay as they are
until the columns are used up or half of the completions are done. Then the cache is arranged anew: what is still needed
moves to the left, with room for the next steps.
Shapes: R rows, Q slots, C columns, V vocabulary; B is the number of completions, and as an owner stands for nobody.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from devices import bucket
from model import logits_of
from packing import Places, attention_masks

COLUMNS_PER_TOKEN = 1000        # a token costs about as much as looking at so many more columns of a cache
UNUSED = (-1, 0, 0)             # prompt, sibling and position of a column that holds nothing


@dataclass
class Cursor:
    """Where the next tokens go: (n,) columns. One for all layers."""

    columns: Tensor


class Columns(CacheLayerMixin):
    """Keys and values of one layer, (R, heads, C, width), written in place at the columns of the cursor."""

    def __init__(self, cursor: Cursor):
        super().__init__()
        self.cursor = cursor

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = torch.zeros_like(keys), torch.zeros_like(values)        # the prompts fill it exactly
        self.is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys.index_copy_(2, self.cursor.columns, keys)
        self.values.index_copy_(2, self.cursor.columns, values)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0                                          # positions are always given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0                      # masks as well

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class PackedCache:
    """The cache of some prompts, each forwarded once. After that: arrange, then forward until `steps_left` is 0, and so on."""

    def __init__(self, model, ids: Tensor, places: Places):
        """ids (R, Tp) and places (R, Tp), one prompt a row, padded on the left. Leaves `logits` (R, V) of what comes next."""
        self.model, self.places, self.steps_left = model, places, 0
        self.cursor = Cursor(torch.arange(ids.shape[1], device=ids.device))
        self.layers = Cache(layer_class_to_replicate=partial(Columns, self.cursor))
        self.logits = logits_of(model, self.ask(ids, places)[:, -1])

    def ask(self, ids: Tensor, places: Places) -> Tensor:
        """Forward new tokens (R, n), whose places (R, n) are in the table already. Returns hidden states (R, n, H)."""
        return self.model.base_model(
            input_ids=ids, position_ids=places.position, attention_mask=attention_masks(self.model, places, self.places),
            past_key_values=self.layers, use_cache=True,
        ).last_hidden_state

    def forward(self, ids: Tensor, places: Places) -> Tensor:
        """One token for each slot: ids and places (R, Q) -> logits (R * Q, V)."""
        for table, new in zip(self.places.tensors, places.tensors, strict=True):
            table.index_copy_(1, self.cursor.columns, new)
        logits = logits_of(self.model, self.ask(ids, places).flatten(0, 1))
        self.cursor.columns += ids.shape[1]
        self.steps_left -= 1
        return logits

    def join(self, other: "PackedCache") -> None:
        """Add the rows of another cache. It has to be arranged before the next forward."""
        width = max(self.places.prompt.shape[1], other.places.prompt.shape[1])
        both = zip(self.places.tensors, other.places.tensors, UNUSED, strict=True)
        self.places = Places(*(torch.cat([grown(part, width, 1, fill) for part in (mine, new)]) for mine, new, fill in both))
        for mine, new in zip(self.layers.layers, other.layers.layers, strict=True):
            mine.keys = torch.cat([grown(part, width, 2, 0) for part in (mine.keys, new.keys)])
            mine.values = torch.cat([grown(part, width, 2, 0) for part in (mine.values, new.values)])

    def arrange(self, owners: list[int], prompts: list[int], nobody: int, steps: int) -> Tensor:
        """Keep what the completions `owners` of the prompts `prompts` need, with columns for so many steps.

        returns  (R, Q) whose slot is whose; `nobody` where a row has fewer completions than slots
        """
        where, capacity, device = self.find(), self.places.prompt.shape[1], self.cursor.columns.device
        families: dict[int, list[int]] = {}
        for owner, prompt in zip(owners, prompts, strict=True):
            families.setdefault(prompt, []).append(owner)
        slots = bucket(best_number_of_slots(
            [len(family) for family in families.values()], [len(where[-1 - prompt]) for prompt in families]
        ), device)
        rows = [(p, family[i : i + slots]) for p, family in families.items() for i in range(0, len(family), slots)]
        needed = [
            np.concatenate([where[-1 - prompt], *(where.get(owner + 1, where[-1 - prompt][:0]) for owner in members)])
            for prompt, members in rows
        ]
        width = max(len(tokens) for tokens in needed)
        total = bucket(-(-(width + slots * steps) // 64) * 64, device)
        num_rows = bucket(len(rows), device)
        source = np.zeros((num_rows, total), dtype=np.int64)                     # what is not used is a copy of something
        used = np.zeros((num_rows, total), dtype=bool)
        result = np.full((num_rows, slots), nobody)
        for row, tokens in enumerate(needed):
            source[row, : len(tokens)], used[row, : len(tokens)] = tokens, True
            result[row, : len(rows[row][1])] = rows[row][1]
        row, column, used = (torch.from_numpy(part).to(device) for part in (*np.divmod(source, capacity), used))

        for layer in self.layers.layers:
            layer.keys, layer.values = (
                part[row, :, column].transpose(1, 2).contiguous() for part in (layer.keys, layer.values)
            )
        self.places = Places(*(
            table[row, column].masked_fill(~used, fill) for table, fill in zip(self.places.tensors, UNUSED, strict=True)
        ))
        self.cursor.columns = torch.arange(width, width + slots).to(device)      # as data: XLA compiles ranges by their ends
        self.steps_left = steps
        return torch.from_numpy(result).to(device)

    def find(self) -> dict[int, np.ndarray]:
        """Where tokens are, counted over rows and columns: of completion n under n + 1, of prompt p under -1 - p."""
        prompt, sibling = self.places.prompt.cpu().numpy(), self.places.sibling.cpu().numpy()
        label = np.where(sibling > 0, sibling, -1 - prompt).ravel()
        order = np.argsort(label, kind="stable")
        names, starts = np.unique(label[order], return_index=True)
        where = dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True))
        capacity = prompt.shape[1]
        for name in names[names < 0].tolist():            # a prompt may lie in several rows: one is enough
            where[name] = where[name][where[name] // capacity == where[name][0] // capacity]
        return where


class PlainCache:
    """transformers' own cache, one row a completion, for models whose layers keep more than keys and values of tokens."""

    steps_left = 2**31

    def __init__(self, model, ids: Tensor, places: Places, owners: Tensor):
        """owners (R * G,): the completions of the prompts, siblings adjacent."""
        if ids.device.type == "xla":
            raise ValueError("XLA: this model keeps more than keys and values of tokens, and its cache grows with every token")
        group_size = len(owners) // len(ids)
        ids, self.mask = (part.repeat_interleave(group_size, dim=0) for part in (ids, places.prompt >= 0))
        position = places.position.repeat_interleave(group_size, dim=0)
        self.model, self.owners, self.layers = model, owners, DynamicCache(config=model.config)
        self.logits = self.ask(ids, position)                                    # (B, V)

    def ask(self, ids: Tensor, position: Tensor) -> Tensor:
        hidden = self.model.base_model(
            input_ids=ids, position_ids=position, attention_mask=self.mask, past_key_values=self.layers, use_cache=True
        ).last_hidden_state
        return logits_of(self.model, hidden[:, -1])

    def forward(self, ids: Tensor, places: Places) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(ids), 1)], dim=1)
        return self.ask(ids, places.position)

    def arrange(self, owners: list[int], prompts: list[int], nobody: int, steps: int) -> Tensor:
        """Every completion keeps its row, also when it is done."""
        return self.owners[:, None]


def best_number_of_slots(family_sizes: list[int], prompt_lengths: list[int]) -> int:
    """How many siblings to put into a row. More share the prompt's columns; fewer leave fewer slots empty."""
    def cost(slots):
        rows = [-(-size // slots) for size in family_sizes]
        columns = sum(count * length for count, length in zip(rows, prompt_lengths, strict=True))
        return sum(rows) * slots * COLUMNS_PER_TOKEN + columns

    return min(range(1, max(family_sizes) + 1), key=cost)


def grown(tensor: Tensor, size: int, dim: int, fill: int) -> Tensor:
    """Padded at the end of a dimension."""
    shape = list(tensor.shape)
    shape[dim] = size
    result = tensor.new_full(shape, fill)
    result.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return result
