"""
Sampling: prompts in, groups of completions out, each token with the log-probability it was drawn with.

A prompt is forwarded once and its keys and values shared by the G siblings (engine/cache.py). A token is drawn by inverting the
cumulative distribution at one uniform number, and every completion has a stream of such numbers of its own, derived from
the seed and its prompt: it comes out the same alone, in a batch, after others have finished, or from a queue.

Shapes: P prompts of up to Tp tokens, G completions of each, B = P*G rows with siblings adjacent, T completion tokens.
Completion number B does not exist: what is drawn for rows of padding, and for completions that have ended, goes there.
"""

import hashlib
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from conversations import Conversation
from devices import bucket, cut_graph
from encode import encode_demonstration, encode_prompt
from engine.cache import PlainCache, PrefixCache
from engine.prefix_attention import use_prefix_attention
from logprobs import restrict_logits
from model import logits_of, merged_adapter

FIRST_STEPS = 32                # the cache begins with room for so many
COMPACT_BELOW = defaultdict(lambda: 0.75, xla=0.5)       # of the rows are still sampled; XLA has powers of two alone
STEPS_BETWEEN_LOOKS = defaultdict(lambda: 8, cpu=1)      # by device: to look which completions have ended means to wait


@dataclass
class Rollout:
    """P prompts with G completions each, as ids from here on: text is for reward functions and people. On the CPU."""

    prompt_ids: Tensor          # (P, Tp) left-padded
    prompt_mask: Tensor         # (P, Tp) bool
    completion_ids: Tensor      # (B, T) right-padded
    completion_mask: Tensor     # (B, T) bool, True on tokens the policy chose, stop tokens included; not on an environment's
    sampling_logp: Tensor       # (B, T) nats under the distribution that was drawn from; 0 where completion_mask is False
    finished: Tensor            # (B,) bool, False where the length limit came before a stop token, or before an answer
    completions: list           # B texts, without the stop token; of conversations, lists of the messages after the prompt
    turn_points: Tensor | None = None       # (B, T) an environment's points at the last token of each turn; NaN: it raised


def sample_completions_for_prompts(
    model, tokenizer, prompts: list, config, *, seed: int, num_completions: int | None = None, shared_prompt: bool = True,
    at_once: int | None = None, occurrence: list[int] | None = None, respond: list | None = None, watch=None,
) -> Rollout:
    """Draw a group of completions for each prompt.

    prompts  strings, lists of chat messages, or lists of token ids
    config   has num_completions_per_prompt, generation_max_length (new tokens), generation_temperature (0 takes the
             likeliest token), generation_top_k (0: all), generation_top_p (1: all), generation_batch_size (completions
             at once, the others wait until half of these are done; 0: all)
    seed     the same seed, prompt and sibling number give the same completion, whatever else is in the batch
    num_completions  G, if not the config's
    shared_prompt    False for models whose layers carry state, as in completion_log_probs
    at_once          completions at once, if not the config's
    occurrence       what occurrences() says of the prompts, if these are part of a larger batch
    respond          for each prompt a function of its conversation, which says what comes next (conversations.py)
    watch            a function of the new tokens (n,) of the first completion, called while they come in
    """
    group_size = num_completions or config.num_completions_per_prompt
    greedy = config.generation_temperature == 0
    policy = dict(
        temperature=1.0 if greedy else config.generation_temperature,
        top_k=1 if greedy else config.generation_top_k,
        top_p=config.generation_top_p,
    )
    device = next(model.parameters()).device
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    prompt_ids, prompt_mask = left_pad(encoded, tokenizer.pad_token_id)
    earlier = occurrences(prompts) if occurrence is None else occurrence
    uniforms = uniform_streams(encoded, earlier, group_size, config.generation_max_length, seed)
    stops = stop_token_ids(model, tokenizer)
    talks = respond and [
        Conversation(tokenizer, prompt, answer, config, stops)
        for prompt, answer in zip(prompts, respond, strict=True) for _ in range(group_size)
    ]
    state = SamplingState(uniforms, stops, tokenizer.pad_token_id, policy, device, talks, watch)
    # What has gone through a recurrent layer cannot be taken back, so there a turn has to be answered at once.
    steps_between_looks = 1 if talks and not shared_prompt else STEPS_BETWEEN_LOOKS[device.type]
    groups_at_once = max(1, (at_once or config.generation_batch_size or len(uniforms)) // group_size)
    cut_graph(device)

    with sampling_mode(model, shared_prompt):
        queue, cache, active = deque(range(len(prompts))), None, []
        while queue or active:
            room = groups_at_once - -(-len(active) // group_size)
            if queue and (not active or (room > 0 and shared_prompt)):           # a plain cache takes no prompts later
                new_prompts = [queue.popleft() for _ in range(min(len(queue), room))]
                if not active:                            # what the cache holds is done
                    cache = PrefixCache(model) if shared_prompt else PlainCache(model)
                hidden = cache.add_prompts(new_prompts, [encoded[p] for p in new_prompts])
                new_rows = [p * group_size + g for p in new_prompts for g in range(group_size)]
                missing = len(hidden) * group_size - len(new_rows)
                row_ids = torch.tensor(new_rows + [state.dummy_row] * missing).to(device)
                state.take(row_ids, logits_of(model, hidden).repeat_interleave(group_size, dim=0))
                cut_graph(device)
                active = state.unfinished(active + new_rows)
                continue                                  # a completion may be a single token
            longest = int(state.count.cpu()[active].max())                       # tokens so far; the last one is forwarded next
            capacity = min(longest + max(FIRST_STEPS, longest), config.generation_max_length) - 1
            row_ids = cache.compact(active, [row // group_size for row in active], state.dummy_row, capacity)  # (R,)
            cut_graph(device)                             # so that every step is the same program
            # With so few left it pays to leave the finished ones out, or to begin prompts.
            enough = int(len(active) * COMPACT_BELOW[device.type])
            while longest <= capacity and len(active) > enough:
                for _ in range(min(capacity - longest + 1, steps_between_looks)):
                    count = state.count[row_ids]
                    hidden = cache.forward(state.ids[row_ids, count - 1], count, longest)                     # (R, width)
                    state.take(row_ids, logits_of(model, hidden))
                    longest += 1
                    cut_graph(device)
                active = state.unfinished(active)
    return state.as_rollout(prompt_ids, prompt_mask, tokenizer)


class SamplingState:
    """What has been drawn so far, and how to draw more. Tensors have more entries than there are completions: dummy_row."""

    def __init__(self, uniforms: np.ndarray, stops: list[int], pad_id: int, policy: dict, device, talks=None, watch=None):
        self.dummy_row, limit = uniforms.shape
        size = bucket(self.dummy_row + 1, device)
        self.uniforms = torch.from_numpy(np.pad(uniforms, ((0, size - self.dummy_row), (0, 0)))).to(device)         # (B + 1, T)
        self.ids = torch.full((size, limit), pad_id, device=device)
        self.said = torch.full((size, limit), -1)         # on the host: tokens that are not drawn, what environments said
        self.given = self.said.to(device, copy=True)      # the same on the device
        self.logp = torch.zeros(size, limit, device=device)
        self.count = torch.zeros(size, dtype=torch.long, device=device)          # tokens so far
        self.count[self.dummy_row :] = 1                  # rows of padding always forward the same one
        self.stopped = torch.zeros(size, dtype=torch.bool, device=device)
        self.stops, self.policy, self.pad_id = torch.tensor(stops, dtype=torch.long, device=device), policy, pad_id
        self.talks = talks                                # B conversations with environments, or None
        self.watch, self.watched = watch, 0               # who looks at the first completion, and how much of it was seen

    def take(self, owners: Tensor, logits: Tensor) -> None:
        """Draw a token for each owner, or take the given one: owners (n,), logits (n, V). What is done gets no more."""
        done = self.stopped[owners] | (self.count[owners] >= self.ids.shape[1])
        owners = owners.masked_fill(done, self.dummy_row)
        at = self.count[owners].masked_fill(owners == self.dummy_row, 0)
        tokens, logp = draw(restrict_logits(logits, **self.policy), self.uniforms[owners, at])
        given = self.given[owners, at]
        own = given < 0
        self.ids[owners, at], self.logp[owners, at] = torch.where(own, tokens, given), torch.where(own, logp, 0.0)
        self.count[owners] = at + 1
        self.stopped[owners] = own & (tokens[:, None] == self.stops).any(dim=1)

    def rows(self, owners: list[int]) -> Tensor:
        """The index of some completions, on the device, filled up with dummy_row to a size that XLA has compiled before."""
        missing = bucket(len(owners), self.ids.device) - len(owners)
        return torch.tensor(owners + [self.dummy_row] * missing).to(self.ids.device)

    def unfinished(self, owners: list[int]) -> list[int]:
        """Which of them go on, after an answer if their turn has ended. The one place where the host waits for the device."""
        count, stopped = torch.stack([self.count, self.stopped.long()]).tolist()
        if self.watch and count[0] > self.watched:
            self.watch(self.ids[0, self.watched : count[0]].cpu())
            self.watched = count[0]
        ended = [owner for owner in owners if self.talks and stopped[owner]]
        answered = []
        for owner, ids in zip(ended, self.ids[self.rows(ended)].tolist() if ended else [], strict=False):
            end = count[owner]
            if reply := self.talks[owner].answer(ids[:end]):
                self.said[owner, end : end + len(reply)] = torch.tensor(reply)
                stopped[owner] = False
                answered.append(owner)
        if answered:
            rows = self.rows(answered)
            self.given[rows], self.stopped[rows] = self.said[rows.cpu()].to(rows.device), False
            cut_graph(rows.device)
        return [owner for owner in owners if not stopped[owner] and count[owner] < self.ids.shape[1]]

    def as_conversations(self, rollout: Rollout) -> Rollout:
        """With messages, points, and without what environments said in the mask."""
        rows = list(zip(self.talks, rollout.completion_mask.sum(dim=1).tolist(), strict=True))
        points = torch.zeros(rollout.completion_mask.shape)
        for row, (talk, _) in enumerate(rows):
            points[row, list(talk.points)] = torch.tensor(list(talk.points.values()))
        return replace(
            rollout, turn_points=points,
            completion_mask=rollout.completion_mask & (self.said[: self.dummy_row, : points.shape[1]] < 0),
            finished=rollout.finished & ~torch.tensor([talk.outgrown for talk in self.talks]),
            completions=[talk.completion(rollout.completion_ids[row, :n].tolist()) for row, (talk, n) in enumerate(rows)],
        )

    def as_rollout(self, prompt_ids: Tensor, prompt_mask: Tensor, tokenizer) -> Rollout:
        lengths, stopped = self.count.cpu()[: self.dummy_row], self.stopped.cpu()[: self.dummy_row]
        mask = torch.arange(int(lengths.max())) < lengths[:, None]               # (B, T) by position, never by id
        width = mask.shape[1]
        ids, logp = (part.cpu()[: self.dummy_row, :width] for part in (self.ids, self.logp))
        ids = ids.masked_fill(~mask, self.pad_id)
        assert logp.isfinite().all(), "the model's logits are not finite; is the learning rate too high?"
        if self.talks:
            return self.as_conversations(Rollout(prompt_ids, prompt_mask, ids, mask, logp, stopped, []))
        texts = [row[: n - done] for row, n, done in zip(ids.tolist(), lengths.tolist(), stopped.tolist(), strict=True)]
        return Rollout(
            prompt_ids, prompt_mask, ids, mask, logp, stopped, tokenizer.batch_decode(texts, skip_special_tokens=True)
        )


def select_groups(rollout: Rollout, keep: Tensor) -> Rollout:
    """The groups of the prompts where keep (P,) is True."""
    rows = keep.repeat_interleave(len(rollout.completions) // len(rollout.prompt_ids))           # (B,)
    by_row = rollout.completion_ids, rollout.completion_mask, rollout.sampling_logp, rollout.finished
    texts = [text for text, kept in zip(rollout.completions, rows.tolist(), strict=True) if kept]
    points = None if rollout.turn_points is None else rollout.turn_points[rows]
    return Rollout(rollout.prompt_ids[keep], rollout.prompt_mask[keep], *(tensor[rows] for tensor in by_row), texts, points)


def join_rollouts(rollouts: list[Rollout]) -> Rollout:
    """Rollouts of one group size as one, padded to the longest."""
    def join(name, left=False):
        tensors = [getattr(rollout, name) for rollout in rollouts]
        width = max(tensor.shape[1] for tensor in tensors)
        missing = [width - tensor.shape[1] for tensor in tensors]
        return torch.cat([pad(tensor, (n, 0) if left else (0, n)) for tensor, n in zip(tensors, missing, strict=True)])

    return Rollout(
        join("prompt_ids", left=True), join("prompt_mask", left=True), join("completion_ids"), join("completion_mask"),
        join("sampling_logp"), torch.cat([rollout.finished for rollout in rollouts]),
        [text for rollout in rollouts for text in rollout.completions],
        None if rollouts[0].turn_points is None else join("turn_points"),
    )


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverse transform sampling: logits (n, V), uniforms (n,) in [0, 1) -> tokens, logp, (n,) each.

    In two steps, so that no sum runs over the whole vocabulary: first a block of tokens, then a token of that block.
    """
    width = 2 ** (logits.shape[-1].bit_length() // 2)
    # A copy, even of nothing more: reductions along rows that are not contiguous take many times as long on a CPU.
    logits = pad(logits, (0, -logits.shape[-1] % width), value=-torch.inf)
    top = logits.amax(dim=-1, keepdim=True)                                      # (n, 1)
    blocks = (logits - top).exp_().unflatten(-1, (-1, width))                    # (n, V / width, width)
    sums = blocks.sum(dim=-1)                                                    # (n, V / width)
    ends = sums.cumsum(dim=-1)
    total = ends[:, -1:]
    block, rest = position_in(sums, ends, uniforms[:, None] * total)             # (n, 1) each
    inside = blocks.gather(1, block[..., None].expand(-1, 1, width))[:, 0]       # (n, width)
    token, _ = position_in(inside, inside.cumsum(dim=-1), rest)
    tokens = block * width + token
    return tokens[:, 0], (logits.gather(-1, tokens) - top - total.log())[:, 0]


def position_in(lengths: Tensor, ends: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Which interval a point lies in, and how far inside: lengths and ends of intervals (n, m), goal (n, 1) -> (n, 1), (n, 1).

    Never an empty one. Rounding may put the goal at or beyond the last end; then it is the last that is not empty. Written
    without searchsorted, which XLA does not have, and which takes it for granted that the ends of rounded sums never fall.
    """
    number = torch.arange(lengths.shape[-1], device=lengths.device).expand_as(lengths)
    last = torch.where(lengths > 0, number, 0).amax(dim=-1, keepdim=True)
    index = torch.where((lengths > 0) & (ends > goal), number, last).amin(dim=-1, keepdim=True)
    begins = ends.gather(-1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
    return index, goal - begins


def occurrences(prompts: list) -> list[int]:
    """How often each prompt was there before, in a batch."""
    seen: Counter[str] = Counter()
    earlier = []
    for prompt in map(str, prompts):
        earlier.append(seen[prompt])
        seen[prompt] += 1
    return earlier


def uniform_streams(prompts: list[list[int]], earlier: list[int], group_size: int, length: int, seed: int) -> np.ndarray:
    """(B, length) float32 in [0, 1): a stream for each completion, made of seed, prompt and sibling number.

    A prompt that occurs again in the batch has a stream of its own each time: `earlier` counts.
    """
    rows = []
    for prompt, occurrence in zip(prompts, earlier, strict=True):
        key = hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        for sibling in range(group_size):
            generator = np.random.default_rng([seed, int.from_bytes(key), occurrence, sibling])
            rows.append(generator.random(length, dtype=np.float32))
    return np.stack(rows)


def demonstrations_as_rollout(model, tokenizer, examples: list[dict]) -> Rollout:
    """What somebody else wrote ("completion"), as if it had been sampled: one completion for each prompt."""
    stops = stop_token_ids(model, tokenizer)
    texts = [example["completion"] for example in examples]
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    rows = [encode_demonstration(tokenizer, example["prompt"], example["completion"], stops) for example in examples]
    completion_ids, mask = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor(part) for part in parts], batch_first=True)
        for parts in zip(*rows, strict=True)
    )
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), completion_ids, mask, sampling_logp=torch.zeros(mask.shape),
        finished=torch.ones(len(texts), dtype=torch.bool), completions=texts,
    )


def stop_token_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the generation config's and the tokenizer's (Gemma 3 has two)."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({i for i in [*configured, tokenizer.eos_token_id] if i is not None})


def left_pad(sequences: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids -> ids (P, Tp) and mask (P, Tp) bool, padded on the left so that all prompts end together."""
    width = max(len(ids) for ids in sequences)
    ids = torch.tensor([[pad_id] * (width - len(seq)) + seq for seq in sequences])
    mask = torch.tensor([[False] * (width - len(seq)) + [True] * len(seq) for seq in sequences])
    return ids, mask


def positions_of(mask: Tensor) -> Tensor:
    """0, 1, 2, ... over the True entries of each row; padding gets 0, and nothing attends to it."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def sampling_mode(model, shared_prompt: bool):
    """No gradients, so nothing to recompute, no dropout, adapters merged; restored afterwards."""
    training = model.training
    try:
        model.eval()
        # Autocast forgets its copies of the weights when the outermost context ends: with this one, after all the tokens.
        with (
            torch.no_grad(), merged_adapter(model), torch.autocast(model.device.type, enabled=False),
            use_prefix_attention(model) if shared_prompt else nullcontext(),
        ):
            yield
    finally:
        model.train(training)
