"""
The sampler of the shared engine: a prompt is forwarded once, and its completions share its keys and values
(cache.py). Waiting prompts start as soon as enough completions have ended.

Random numbers are the same as in sample.py. On XLA shapes are rounded up, and every iteration is one program.
Shapes: B completions of up to T tokens, R active rows, H hidden size, V vocabulary. Row B, dummy_row, is no
completion: tokens drawn for padding, and for completions that have ended, are written there.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from data import encode_prompt
from engine.cache import PrefixCache
from engine.errors import is_out_of_memory
from engine.xla import bucket, cut_graph
from logprobs import compute_logits, distribution_of, restrict_logits
from sample import Rollout, make_rollout, sampling_mode, stop_token_ids, uniform_streams

# How many tokens of a completion the cache holds at first, and the share of active rows at which ended rows
# are dropped. Both changes of shape make XLA compile another program and CUDA record another graph.
INITIAL_CAPACITY = defaultdict(lambda: 32, cuda=256)
COMPACT_BELOW = defaultdict(lambda: 0.75, xla=0.5, cuda=0.5)
TOKENS_BETWEEN_CHECKS = defaultdict(lambda: 8, cpu=1)    # each check for ended rows waits for the device
# Up to this many rows x tokens all rows are kept: on CUDA reading them is faster than recording a graph.
KEPT_TOKENS = defaultdict(int, cuda=2**14)


def sample_sharing_prompts(
    model, tokenizer, prompts: list, config, *, seed: int | Sequence, num_completions: int | None = None,
    reply: Callable | None = None, on_tokens: Callable | None = None,
) -> Rollout:
    """Sample as sample_completions_for_prompts, within use_prefix_attention(model).

    As many prompts as fit are prefilled, and decoded until more of them fit.
    """
    group_size, device = num_completions or config.num_completions_per_prompt, next(model.parameters()).device
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    uniforms = uniform_streams(seed, len(prompts), group_size, config.generation_max_length)
    stop_ids, pad_id = stop_token_ids(model, tokenizer), tokenizer.pad_token_id
    distribution = distribution_of(config)
    state = SamplingState(uniforms, stop_ids, pad_id, distribution, device, reply)
    cut_graph(device)
    groups_at_once = max(1, (getattr(config, "generation_batch_size", 0) or len(uniforms)) // group_size)
    queue, cache, active = deque(enumerate(encoded)), None, []
    with sampling_mode(model):
        while queue or active:
            free = groups_at_once - math.ceil(len(active) / group_size)
            if queue and free > 0:
                cache = cache if active else PrefixCache(model)
                new_prompts = dict(queue.popleft() for _ in range(min(len(queue), free)))
                new_rows = prefill(new_prompts, state, cache, group_size)
                active = state.active_rows(active + new_rows)             # a completion may be a single token
            else:
                active = decode(active, state, cache, group_size, waiting=bool(queue))
            if on_tokens:
                on_tokens(int(state.count.max()), len(active))
    return make_rollout(tokenizer, encoded, distribution, *state.results())


def prefill(prompts: dict[int, list[int]], state: "SamplingState", cache, group_size: int) -> list[int]:
    """Forward new prompts, by number, and sample a first token of their completions. Return their rows."""
    hidden = cache.add_prompts(list(prompts), list(prompts.values()))            # (prompts or more, H)
    row_ids = [p * group_size + g for p in prompts for g in range(group_size)]
    padding = [state.dummy_row] * (len(hidden) * group_size - len(row_ids))
    logits = compute_logits(cache.model, hidden).repeat_interleave(group_size, dim=0)
    state.step(torch.tensor(row_ids + padding).to(logits.device), logits)
    cut_graph(logits.device)
    return row_ids


def decode(active: list[int], state: "SamplingState", cache, group_size: int, waiting: bool) -> list[int]:
    """Sample tokens until enough rows have ended or the cache is full. Return the rows still active.

    waiting  there are prompts for which others have to end first
    """
    device, max_length = state.ids.device, state.ids.shape[1]
    longest = int(state.count.cpu()[active].max())        # tokens so far; the last one is forwarded next
    capacity = min(longest + max(INITIAL_CAPACITY[device.type], longest), max_length) - 1
    row_ids = cache.compact(active, [row // group_size for row in active], state.dummy_row, capacity)   # (R,)
    cut_graph(device)                                     # so that every step is the same program

    def sample_token() -> None:
        count = state.count[row_ids]
        hidden = cache.forward(state.ids[row_ids, count - 1], count, longest)                    # (R, H)
        state.step(row_ids, compute_logits(cache.model, hidden))

    step, enough = sample_token, int(len(active) * COMPACT_BELOW[device.type])
    if not waiting and len(active) * capacity <= KEPT_TOKENS[device.type]:
        enough = 0
    if device.type == "cuda":
        sample_token()                                    # before it is recorded
        step, longest = recorded(sample_token, device), longest + 1
    while True:
        for _ in range(min(capacity - longest + 1, TOKENS_BETWEEN_CHECKS[device.type])):
            step()
            longest += 1
            cut_graph(device)
        active = state.active_rows(active)
        if longest > capacity or len(active) <= enough:
            return active


def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a CUDA graph of all kernels that a function launches; the function itself if that is impossible.

    Launching a token's thousands of kernels from Python takes longer than running them. The function must
    have run once, read and write the same tensors each time, and not wait for the device, as experts that are
    called one by one do.
    """
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return function
    return graph.replay


class SamplingState:
    """The tokens drawn so far, and methods to draw more. Tensors have rows for completions and dummy_row."""

    def __init__(
        self, uniforms: Tensor, stop_ids: list[int], pad_id: int, distribution: dict, device,
        reply: Callable | None = None,
    ):
        self.dummy_row, limit = uniforms.shape
        size = bucket(self.dummy_row + 1, device)                                # B + 1 or more
        self.uniforms = pad(uniforms, (0, 0, 0, size - self.dummy_row)).to(device)       # (B + 1, T)
        self.ids = torch.full((size, limit), pad_id, device=device)
        self.forced_tokens = torch.full((size, limit), -1, device=device)        # an environment's; -1: drawn
        self.logp = torch.zeros(size, limit, device=device)
        self.count = torch.zeros(size, dtype=torch.long, device=device)          # tokens so far
        self.count[self.dummy_row :] = 1                  # padding always forwards the same token
        self.stopped = torch.zeros(size, dtype=torch.bool, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self.distribution = distribution                  # see distribution_of
        self.reply = reply                                # see sample_completions_for_prompts

    def step(self, row_ids: Tensor, logits: Tensor) -> None:
        """Append a token, drawn or forced, to each row that has not ended: row_ids (n,), logits (n, V)."""
        ended = self.stopped[row_ids] | (self.count[row_ids] >= self.ids.shape[1])
        row_ids = row_ids.masked_fill(ended, self.dummy_row)
        position = self.count[row_ids].masked_fill(row_ids == self.dummy_row, 0)
        logits = restrict_logits(logits, **self.distribution)
        tokens, logp = sample_in_blocks(logits, self.uniforms[row_ids, position])
        forced = self.forced_tokens[row_ids, position]
        drawn = forced < 0
        self.ids[row_ids, position] = torch.where(drawn, tokens, forced)
        self.logp[row_ids, position] = logp.masked_fill(~drawn, 0.0)
        self.count[row_ids] = position + 1
        self.stopped[row_ids] = drawn & (tokens[:, None] == self.stop_ids).any(dim=1)

    def append(self, row: int, ids: list[int], logp: list[float], stopped: bool) -> None:
        """Append tokens that an engine drew to a row, or with logp 0 those that an environment forces."""
        start = int(self.count[row])
        self.ids[row, start : start + len(ids)] = torch.tensor(ids)
        self.logp[row, start : start + len(ids)] = torch.tensor(logp)
        self.count[row], self.stopped[row] = start + len(ids), stopped

    def active_rows(self, row_ids: list[int]) -> list[int]:
        """Return the rows that continue once environments have replied. The host waits for the device."""
        count, stopped = torch.stack([self.count, self.stopped.long()]).tolist()
        if ended := [row for row in row_ids if self.reply and stopped[row]]:
            # Whole tensors are copied: their shapes stay the same, for XLA.
            ids, forced, device = self.ids.cpu(), self.forced_tokens.cpu().clone(), self.ids.device
            for row in ended:
                end = count[row]
                reply = self.reply(row, ids[row, :end].tolist())
                stopped[row] = not reply                  # a reply beyond the limit ends it too, unfinished
                tokens = torch.tensor(reply[: ids.shape[1] - end], dtype=torch.long)
                forced[row, end : end + len(tokens)] = tokens
            self.forced_tokens.copy_(forced)              # in place: recorded steps read these tensors
            self.stopped.copy_(torch.tensor(stopped))
            cut_graph(device)
        return [row for row in row_ids if not stopped[row] and count[row] < self.ids.shape[1]]

    def results(self) -> tuple[Tensor, ...]:
        """Return arguments of make_rollout, on the CPU: ids, sampled, filled, logp (B, T), finished (B,)."""
        tensors = self.ids, self.forced_tokens, self.logp, self.count, self.stopped
        ids, forced, logp, count, stopped = (x.cpu()[: self.dummy_row] for x in tensors)
        mask = torch.arange(ids.shape[1]) < count[:, None]                       # by position, not by id
        return ids, mask & (forced < 0), mask, logp, stopped


def sample_in_blocks(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample as sample_inverse_cdf, but in float32: logits (n, V), uniforms (n,) -> tokens, logp (n,).

    First draw a block of tokens, then a token of that block, so that no cumulative sum runs over the whole
    vocabulary. XLA has neither searchsorted nor, on a TPU, float64.
    """
    width = 2 ** (logits.shape[-1].bit_length() // 2)
    # On a CPU, reductions along rows that are not contiguous are many times slower.
    logits = pad(logits, (0, -logits.shape[-1] % width), value=-torch.inf).contiguous()
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
    interval that is not empty. searchsorted is not used: it requires ascending ends, which rounding breaks.
    """
    indices = torch.arange(lengths.shape[-1], device=lengths.device).expand_as(lengths)
    last = torch.where(lengths > 0, indices, 0).amax(dim=-1, keepdim=True)
    index = torch.where((lengths > 0) & (ends > goal), indices, last).amin(dim=-1, keepdim=True)
    starts = ends.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
    return index, goal - starts
