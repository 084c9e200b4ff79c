"""
Sampling: prompts in, groups of completions out, with the log-probability of each sampled token.

A prompt is forwarded once, and what it leaves in the cache serves its G completions (engine/cache.py). Each
completion has a random stream of its own (engine/sampling_state.py), so it does not depend on the others: it
is the same alone, in a batch, and from a queue.

Shapes: P prompts of up to Tp tokens, G completions of each, B = P*G rows with the completions of a prompt
adjacent, T completion tokens, R active rows, H hidden size.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from data import encode_demonstration, encode_prompt
from engine.cache import PlainCache
from engine.devices import cut_graph
from engine.logits import compute_logits
from engine.packing import left_pad, pad_rows
from engine.sampling_state import SamplingState, occurrences, uniform_streams

INITIAL_CAPACITY = 32           # tokens of a completion that the cache has room for at first
COMPACT_BELOW = defaultdict(lambda: 0.75, xla=0.5)       # share of active rows; XLA pads to powers of two
STEPS_BETWEEN_CHECKS = defaultdict(lambda: 8, cpu=1)     # checking for ended rows waits for the device


@dataclass
class Rollout:
    """P prompts with G completions each, on the CPU. Training uses the ids, reward functions the texts."""

    prompt_ids: Tensor          # (P, Tp) left-padded
    prompt_mask: Tensor         # (P, Tp) bool
    completion_ids: Tensor      # (B, T) right-padded
    completion_mask: Tensor     # (B, T) bool, True on sampled tokens, False on those of an environment
    sampling_logp: Tensor       # (B, T) nats, under the distribution that was sampled from; 0 elsewhere
    finished: Tensor            # (B,) bool, False if the length limit came before a stop token or answer
    completions: list           # B texts without stop token, or lists of the messages after the prompt
    turn_points: Tensor | None = None   # (B, T) of an environment, at the last token of a turn; NaN: error


def sample_completions_for_prompts(
    model, tokenizer, prompts: list, config, *, seed: int, num_completions: int | None = None,
    earlier: list[int] | None = None, reply: Callable | None = None, on_tokens: Callable | None = None,
    cache_type: type = PlainCache,
) -> Rollout:
    """Sample a group of completions for each prompt.

    prompts     strings, lists of chat messages, or lists of token ids
    config      has num_completions_per_prompt, generation_max_length (new tokens), generation_temperature
                (0: the most likely token), generation_top_k (0: all), generation_top_p (1: all),
                generation_batch_size (completions at once, the others wait in a queue; 0: all)
    seed        the same seed, prompt and number in the group give the same completion in every batch
    num_completions  G, if not the config's
    earlier     result of occurrences() for these prompts, if they are part of a larger batch
    reply       called with a row and its ids after the prompt when a turn has ended; returns the ids that an
                environment adds, [] at the end. None: a completion is one turn
    on_tokens   called with the new tokens (n,) of the first completion while they are sampled
    cache_type  PlainCache, or PrefixCache within use_prefix_attention(model)
    """
    group_size, device = num_completions or config.num_completions_per_prompt, next(model.parameters()).device
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    earlier = occurrences(prompts) if earlier is None else earlier
    uniforms = uniform_streams(encoded, earlier, group_size, config.generation_max_length, seed)
    stop_ids, pad_id = stop_token_ids(model, tokenizer), tokenizer.pad_token_id
    state = SamplingState(uniforms, stop_ids, pad_id, sampling_policy(config), device, reply, on_tokens)
    cut_graph(device)
    groups_at_once = max(1, (config.generation_batch_size or len(uniforms)) // group_size)
    with sampling_mode(model):
        sample_from_queue(model, encoded, state, group_size, groups_at_once, cache_type)
    return as_rollout(state, encoded, tokenizer)


def sampling_policy(config) -> dict:
    """Return temperature, top_k and top_p of sampling. Temperature 0 is the most likely token alone."""
    greedy = config.generation_temperature == 0
    return dict(
        temperature=1.0 if greedy else config.generation_temperature,
        top_k=1 if greedy else config.generation_top_k, top_p=config.generation_top_p,
    )


def sample_from_queue(
    model, prompts: list[list[int]], state: SamplingState, group_size: int, groups_at_once: int,
    cache_type: type,
) -> None:
    """Fill a SamplingState: prefill the prompts that fit, decode until there is room for more, repeat."""
    queue, cache, active = deque(range(len(prompts))), None, []
    while queue or active:
        room = groups_at_once - -(-len(active) // group_size)
        if queue and (not active or (room > 0 and cache_type.takes_more)):
            if not active:
                cache = cache_type(model)
            new_prompts = [queue.popleft() for _ in range(min(len(queue), room))]
            new_rows = prefill(model, prompts, new_prompts, state, cache, group_size)
            active = state.active_rows(active + new_rows)                 # a completion may be a single token
        else:
            active = decode(model, active, state, cache, group_size)


def prefill(
    model, prompts: list[list[int]], new_prompts: list[int], state: SamplingState, cache, group_size: int
) -> list[int]:
    """Forward the new prompts and sample the first token of their completions. Return the rows of these."""
    hidden = cache.add_prompts(new_prompts, [prompts[p] for p in new_prompts])   # (new prompts or more, H)
    row_ids = [p * group_size + g for p in new_prompts for g in range(group_size)]
    padding = [state.dummy_row] * (len(hidden) * group_size - len(row_ids))
    logits = compute_logits(model, hidden).repeat_interleave(group_size, dim=0)
    state.step(torch.tensor(row_ids + padding).to(logits.device), logits)
    cut_graph(logits.device)
    return row_ids


def decode(model, active: list[int], state: SamplingState, cache, group_size: int) -> list[int]:
    """Sample tokens until enough rows have ended or the cache is full. Return the rows still active."""
    device, max_length = state.ids.device, state.ids.shape[1]
    longest = int(state.count.cpu()[active].max())        # tokens so far; the last one is forwarded next
    capacity = min(longest + max(INITIAL_CAPACITY, longest), max_length) - 1
    row_ids = cache.compact(active, [row // group_size for row in active], state.dummy_row, capacity)   # (R,)
    cut_graph(device)                                     # so that every step is the same program
    must_check = state.reply and not cache.takes_more     # an environment replies at once
    steps_between_checks = 1 if must_check else STEPS_BETWEEN_CHECKS[device.type]
    enough = int(len(active) * COMPACT_BELOW[device.type])
    while longest <= capacity and len(active) > enough:
        for _ in range(min(capacity - longest + 1, steps_between_checks)):
            count = state.count[row_ids]
            hidden = cache.forward(state.ids[row_ids, count - 1], count, longest)                    # (R, H)
            state.step(row_ids, compute_logits(model, hidden))
            longest += 1
            cut_graph(device)
        active = state.active_rows(active)
    return active


def as_rollout(state: SamplingState, prompts: list[list[int]], tokenizer) -> Rollout:
    """Return the sampled completions as a Rollout. The mask is False on an environment's tokens."""
    ids, mask, logp, stopped = state.results()
    ends = (mask.sum(dim=1) - stopped.long()).tolist()    # without the stop token
    texts = [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), ids,
        mask & (state.forced_on_host[: len(ids), : ids.shape[1]] < 0), logp, stopped,
        tokenizer.batch_decode(texts, skip_special_tokens=True),
    )


def select_groups(rollout: Rollout, keep: Tensor) -> Rollout:
    """Return the groups of the prompts where keep (P,) is True."""
    rows = keep.repeat_interleave(len(rollout.completions) // len(rollout.prompt_ids))           # (B,)
    by_row = rollout.completion_ids, rollout.completion_mask, rollout.sampling_logp, rollout.finished
    texts = [text for text, kept in zip(rollout.completions, rows.tolist(), strict=True) if kept]
    points = None if rollout.turn_points is None else rollout.turn_points[rows]
    prompts = rollout.prompt_ids[keep], rollout.prompt_mask[keep]
    return Rollout(*prompts, *(tensor[rows] for tensor in by_row), texts, points)


def join_rollouts(rollouts: list[Rollout]) -> Rollout:
    """Join rollouts of one group size into one, padded to the longest."""
    def join(name, left=False):
        return pad_rows([row for rollout in rollouts for row in getattr(rollout, name)], left=left)

    return Rollout(
        join("prompt_ids", left=True), join("prompt_mask", left=True), join("completion_ids"),
        join("completion_mask"), join("sampling_logp"), torch.cat([rollout.finished for rollout in rollouts]),
        [text for rollout in rollouts for text in rollout.completions],
        None if rollouts[0].turn_points is None else join("turn_points"),
    )


def demonstrations_as_rollout(model, tokenizer, examples: list[dict]) -> Rollout:
    """Return the demonstrations of examples as a rollout with one completion for each prompt."""
    stops = stop_token_ids(model, tokenizer)
    texts = [example["completion"] for example in examples]
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    rows = [encode_demonstration(tokenizer, e["prompt"], e["completion"], stops) for e in examples]
    completion_ids, mask = map(pad_rows, zip(*rows, strict=True))
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), completion_ids, mask, torch.zeros(mask.shape),
        finished=torch.ones(len(texts), dtype=torch.bool), completions=texts,
    )


def stop_token_ids(model, tokenizer) -> list[int]:
    """Return the ids that end a completion: the generation config's and the tokenizer's. Gemma 3 has two."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = configured if isinstance(configured, list) else [configured]
    ids = [i for i in [*configured, tokenizer.eos_token_id] if i is not None]
    vocabulary = range(model.get_input_embeddings().num_embeddings)
    if wrong := [i for i in ids if i not in vocabulary]:
        raise ValueError(
            f"--model_path: the stop id {wrong[0]!r} is none of the model's {len(vocabulary)} tokens; "
            "correct eos_token_id in generation_config.json, or eos_token in tokenizer_config.json"
        )
    return sorted(set(ids))


@contextmanager
def sampling_mode(model):
    """Turn gradients, recomputation and dropout off; restore the model afterwards."""
    training = model.training
    try:
        model.eval()
        # Autocast frees its copies of the weights when the outermost context ends: here, after all tokens.
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(training)
