"""
The state of a sampling loop, and inverse transform sampling: a token is drawn with one uniform number. Every
completion has its own stream of such numbers, derived from seed, prompt and its number in the group.

Shapes: B completions of up to T tokens, V vocabulary. Row B, dummy_row, is no completion: tokens drawn for
padding, and for completions that have ended, are written there.
"""

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.devices import bucket, cut_graph
from engine.logits import restrict_logits


class SamplingState:
    """Hold the tokens drawn so far, and draw more. Tensors have rows for all completions and dummy_row."""

    def __init__(
        self, uniforms: np.ndarray, stop_ids: list[int], pad_id: int, policy: dict, device,
        reply: Callable | None = None, on_tokens: Callable | None = None,
    ):
        self.dummy_row, limit = uniforms.shape
        size = bucket(self.dummy_row + 1, device)                                # B + 1 or more
        uniforms = np.pad(uniforms, ((0, size - self.dummy_row), (0, 0)))
        self.uniforms = torch.from_numpy(uniforms).to(device)                    # (B + 1, T)
        self.ids = torch.full((size, limit), pad_id, device=device)
        self.forced_on_host = torch.full((size, limit), -1)  # tokens of environments; -1: drawn
        self.forced_tokens = self.forced_on_host.to(device, copy=True)
        self.logp = torch.zeros(size, limit, device=device)
        self.count = torch.zeros(size, dtype=torch.long, device=device)          # tokens so far
        self.count[self.dummy_row :] = 1                  # padding always forwards the same token
        self.stopped = torch.zeros(size, dtype=torch.bool, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.policy, self.pad_id = policy, pad_id         # policy: temperature, top_k, top_p
        self.reply = reply                                # (row, ids) -> ids of an environment, [] at the end
        self.on_tokens, self.reported = on_tokens, 0      # callback for tokens of the first completion

    def step(self, row_ids: Tensor, logits: Tensor) -> None:
        """Append a token, drawn or forced, to each row that has not ended: row_ids (n,), logits (n, V)."""
        ended = self.stopped[row_ids] | (self.count[row_ids] >= self.ids.shape[1])
        row_ids = row_ids.masked_fill(ended, self.dummy_row)
        position = self.count[row_ids].masked_fill(row_ids == self.dummy_row, 0)
        logits = restrict_logits(logits, **self.policy)
        tokens, logp = sample_inverse_cdf(logits, self.uniforms[row_ids, position])
        forced = self.forced_tokens[row_ids, position]
        drawn = forced < 0
        self.ids[row_ids, position] = torch.where(drawn, tokens, forced)
        self.logp[row_ids, position] = torch.where(drawn, logp, 0.0)
        self.count[row_ids] = position + 1
        self.stopped[row_ids] = drawn & (tokens[:, None] == self.stop_ids).any(dim=1)

    def append(self, row: int, ids: list[int], logp: list[float], stopped: bool) -> None:
        """Append tokens that an engine drew to a row, or with logp 0 those that an environment forces."""
        start = int(self.count[row])
        self.ids[row, start : start + len(ids)] = torch.tensor(ids)
        self.logp[row, start : start + len(ids)] = torch.tensor(logp)
        self.count[row], self.stopped[row] = start + len(ids), stopped

    def padded(self, row_ids: list[int]) -> Tensor:
        """Return row_ids on the device, padded with dummy_row to a size that XLA has compiled before."""
        padding = bucket(len(row_ids), self.ids.device) - len(row_ids)
        return torch.tensor(row_ids + [self.dummy_row] * padding).to(self.ids.device)

    def active_rows(self, row_ids: list[int]) -> list[int]:
        """Return the rows that continue once environments have replied. The host waits for the device."""
        count, stopped = torch.stack([self.count, self.stopped.long()]).tolist()
        if self.on_tokens and count[0] > self.reported:
            self.on_tokens(self.ids[0, self.reported : count[0]].cpu())
            self.reported = count[0]
        ended = [row for row in row_ids if self.reply and stopped[row]]
        answered = []
        for row, ids in zip(ended, self.ids[self.padded(ended)].tolist() if ended else [], strict=False):
            end = count[row]
            if reply := self.reply(row, ids[:end]):
                self.forced_on_host[row, end : end + len(reply)] = torch.tensor(reply)
                stopped[row] = False
                answered.append(row)
        if answered:
            rows = self.padded(answered)
            self.forced_tokens[rows] = self.forced_on_host[rows.cpu()].to(rows.device)
            self.stopped[rows] = False
            cut_graph(rows.device)
        return [row for row in row_ids if not stopped[row] and count[row] < self.ids.shape[1]]

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, mask of all tokens, logp, (B, T) each, and stopped (B,), on the CPU."""
        count, stopped = self.count.cpu()[: self.dummy_row], self.stopped.cpu()[: self.dummy_row]
        mask = torch.arange(int(count.max())) < count[:, None]                   # by position, not by id
        ids, logp = (x.cpu()[: self.dummy_row, : mask.shape[1]] for x in (self.ids, self.logp))
        assert logp.isfinite().all(), "the model's logits are not finite; is the learning rate too high?"
        return ids.masked_fill(~mask, self.pad_id), mask, logp, stopped


def sample_inverse_cdf(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse transform sampling: logits (n, V), uniforms (n,) in [0, 1) -> tokens, logp (n,).

    First a block of tokens is drawn, then a token of that block, so no cumulative sum runs over the whole
    vocabulary.
    """
    width = 2 ** (logits.shape[-1].bit_length() // 2)
    # This makes a contiguous copy: on a CPU reductions along other rows take many times as long.
    logits = pad(logits, (0, -logits.shape[-1] % width), value=-torch.inf)
    top = logits.amax(dim=-1, keepdim=True)                                      # (n, 1)
    blocks = (logits - top).exp_().unflatten(-1, (-1, width))                    # (n, V / width, width)
    sums = blocks.sum(dim=-1)                                                    # (n, V / width)
    ends = sums.cumsum(dim=-1)
    total = ends[:, -1:]
    block, rest = find_interval(sums, ends, uniforms[:, None] * total)             # (n, 1) each
    inside = blocks.gather(1, block[..., None].expand(-1, 1, width))[:, 0]       # (n, width)
    token, _ = find_interval(inside, inside.cumsum(dim=-1), rest)
    tokens = block * width + token
    return tokens[:, 0], (logits.gather(-1, tokens) - top - total.log())[:, 0]


def find_interval(lengths: Tensor, ends: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Find the interval of a point, and the point's distance from its start, (n, 1) each.

    lengths, ends (n, m) of intervals, goal (n, 1).
    The interval is never empty. Rounding may put the goal at or beyond the last end; then it is the last
    interval that is not empty. searchsorted is not used: XLA does not have it, and it requires ascending
    ends, which rounding breaks.
    """
    indices = torch.arange(lengths.shape[-1], device=lengths.device).expand_as(lengths)
    last = torch.where(lengths > 0, indices, 0).amax(dim=-1, keepdim=True)
    index = torch.where((lengths > 0) & (ends > goal), indices, last).amin(dim=-1, keepdim=True)
    starts = ends.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
    return index, goal - starts


def occurrences(prompts: list) -> list[int]:
    """Count for each prompt how often it occurred before in the batch."""
    seen: Counter[str] = Counter()
    earlier = []
    for prompt in map(str, prompts):
        earlier.append(seen[prompt])
        seen[prompt] += 1
    return earlier


def uniform_streams(
    prompts: list[list[int]], earlier: list[int], group_size: int, length: int, seed: int
) -> np.ndarray:
    """Draw (B, length) float32 in [0, 1): a stream for each completion from seed, prompt and sibling number.

    earlier  result of occurrences(): a repeated prompt has different streams each time
    """
    generators = random_generators(prompts, earlier, group_size, seed)
    return np.stack([generator.random(length, dtype=np.float32) for generator in generators])


def random_generators(
    prompts: list[list[int]], earlier: list[int], group_size: int, seed: int
) -> list[np.random.Generator]:
    """Return a random generator for each of the B completions; arguments as for uniform_streams."""
    generators = []
    for prompt, occurrence in zip(prompts, earlier, strict=True):
        key = hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        for sibling in range(group_size):
            generators.append(np.random.default_rng([seed, int.from_bytes(key), occurrence, sibling]))
    return generators
