"""
Sampling: prompts in, groups of completions out, with the log-probability of each sampled token.

Prompts are padded on the left, so that all end in the same column, and forwarded once, as a batch. The cached
keys and values of each prompt are copied for each of its completions. Then a loop samples one token of every
completion, until all have ended with a stop token or reached the length limit. engine/sampler.py samples the
same completions without copying the cache; train.py uses it on a GPU and for long prompts (--engine).

Each completion has its own RNG stream, seeded by its prompt's seed and its index in the group, so results do
not depend on batching, up to rounding in the model.
With an environment, a completion has several turns. Each turn of the policy ends with a stop token; then
`reply` returns the environment's tokens. They are appended, and forwarded one by one like sampled tokens:

    ids        p p p | c c s e e e c c s      p prompt, c sampled, s sampled stop token, e environment
    sampled            1 1 1 0 0 0 1 1 1      becomes completion_mask
    replied            0 0 0 1 1 1 0 0 0      filled = sampled | replied

Shapes: P prompts of up to Tp tokens, G completions of each, B = P*G rows with the completions of a prompt
adjacent, T completion tokens, b rows that are forwarded, H hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import signature
from itertools import compress
from numbers import Integral

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from data import encode_demonstration, encode_prompt, end_of_turn, prompt_of
from logprobs import compute_logits, distribution_of, restrict_logits

DROP_BELOW = 0.75               # the batch is compacted if at most this share of its rows is unfinished
CHECK_EVERY = 8                 # tokens between checks for finished rows on a GPU: each waits for the GPU


@dataclass
class Rollout:
    """P prompts with G completions each, on the CPU. Training reads the ids, reward functions the texts."""

    prompt_ids: Tensor          # (P, Tp) left-padded
    prompt_mask: Tensor         # (P, Tp) bool
    completion_ids: Tensor      # (B, T) right-padded, including an environment's tokens
    completion_mask: Tensor     # (B, T) bool, True on the tokens that the policy sampled
    sampling_logp: Tensor       # (B, T) nats, under the distribution; 0 on other tokens
    finished: Tensor            # (B,) bool, False if the length limit came first
    completions: list           # B texts without stop tokens; lists of messages if there is an environment
    distribution: dict = field(default_factory=dict)    # arguments of restrict_logits
    turn_points: Tensor | None = None   # (B, T) rewards at the ends of turns; NaN: the environment raised
    environments: list | None = None    # B instances, if the environment is a class


def sample_completions_for_prompts(
    model, tokenizer, prompts: list, config, *, seed: int | Sequence, num_completions: int | None = None,
    reply: Callable | None = None,
) -> Rollout:
    """Sample a group of completions for each prompt.

    prompts    strings, lists of chat messages, or lists of token ids
    config     has num_completions_per_prompt, generation_max_length (new tokens), generation_temperature
               (0: the most likely token), generation_top_k (0: all), generation_top_p (1: all), and may have
               generation_min_p (0: all), generation_batch_size (at once, at least one group; 0: all)
    seed       an integer; or a sequence with an integer or a tuple of integers for each prompt
    num_completions  G; None: config.num_completions_per_prompt
    reply      reply(row, ids after the prompt) -> token ids of the environment after a turn, [] to end the
               conversation. None: each completion is a single turn
    """
    group_size = num_completions or config.num_completions_per_prompt
    prompt_ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    uniforms = uniform_streams(seed, len(prompts), group_size, config.generation_max_length)
    prompts_at_once = max(1, (getattr(config, "generation_batch_size", 0) or len(uniforms)) // group_size)
    distribution = distribution_of(config)
    parts = []
    with sampling_mode(model):
        for first in range(0, len(prompts), prompts_at_once):
            batch, first_row = prompt_ids[first : first + prompts_at_once], first * group_size
            batch_uniforms = uniforms[first_row : first_row + len(batch) * group_size]
            parts.append(
                sample_batch(model, tokenizer, batch, batch_uniforms, distribution, reply, first_row))
    return concatenate(parts)


def sample_batch(
    model, tokenizer, prompts: list[list[int]], uniforms: Tensor, distribution: dict,
    reply: Callable | None, first_row: int,
) -> Rollout:
    """Sample the completions of some prompts as one batch. Here B and T are the shape of uniforms.

    uniforms   (B, T) a random number for each token
    first_row  the index of the first completion of the batch, for reply
    """
    device = next(model.parameters()).device
    num_rows, limit = uniforms.shape
    uniforms = uniforms.to(device)
    stops = torch.tensor(stop_token_ids(model, tokenizer), device=device)
    ids = torch.full((num_rows, limit), tokenizer.pad_token_id, device=device)
    logp = torch.zeros(num_rows, limit, device=device)
    sampled = torch.zeros(num_rows, limit, dtype=torch.bool, device=device)      # tokens of the policy
    replied = torch.zeros_like(sampled)                   # tokens of an environment
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)
    rows = torch.arange(num_rows, device=device)          # completions that are forwarded, (b,)
    cache = DynamicCache(config=model.config.get_text_config())
    logits, prompt_mask = forward_prompts(model, prompts, rows, cache)
    for t in range(limit):
        token, token_logp = sample_inverse_cdf(restrict_logits(logits, **distribution), uniforms[rows, t])
        is_sampled = ~finished[rows] & ~replied[rows, t]  # (b,), other tokens are discarded
        ids[rows, t] = torch.where(is_sampled, token, ids[rows, t])
        logp[rows, t] = torch.where(is_sampled, token_logp.float(), 0.0)
        sampled[rows, t] = is_sampled
        ends = is_sampled & torch.isin(token, stops)      # (b,)
        if reply:
            ends = add_replies(reply, rows, ends, ids, replied, t + 1, first_row)
        finished[rows] |= ends
        if t + 1 == limit:
            break
        if device.type == "cpu" or t % CHECK_EVERY == 0:
            rows = drop_finished(finished, rows, cache)
            if not len(rows):
                break
        mask = torch.cat([prompt_mask[rows], prompt_mask.new_ones(len(rows), t + 1)], dim=1)
        # Finished rows forward token 0, whose output is discarded; the pad token may have no embedding.
        last = ids[rows, t, None].masked_fill(finished[rows, None], 0)
        logits = next_logits(model, last, mask, cache)
    columns = (x.cpu() for x in (ids, sampled, sampled | replied, logp, finished))
    return make_rollout(tokenizer, prompts, distribution, *columns)


def forward_prompts(
    model, prompts: list[list[int]], rows: Tensor, cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Forward each prompt once, then copy its cache and logits for each of its completions, rows (B,).

    Returns the logits (B, V) of the first token, and the mask (B, Tp) of the prompts.
    """
    ids, mask = (x.to(rows.device) for x in left_pad(prompts, 0))                # (P, Tp)
    logits = next_logits(model, ids, mask, cache)                                # (P, V)
    prompt_index = rows // (len(rows) // len(prompts))    # (B,)
    cache.reorder_cache(prompt_index)
    return logits[prompt_index], mask[prompt_index]


def drop_finished(finished: Tensor, rows: Tensor, cache: DynamicCache) -> Tensor:
    """Remove finished rows from rows (b,) and from the cache, if few are unfinished: see DROP_BELOW."""
    unfinished = (~finished[rows]).nonzero()[:, 0]        # indices into rows
    if len(unfinished) > DROP_BELOW * len(rows):
        return rows
    cache.reorder_cache(unfinished)                       # selects rows
    return rows[unfinished]


def add_replies(
    reply: Callable, rows: Tensor, ends: Tensor, ids: Tensor, replied: Tensor, start: int, first_row: int
) -> Tensor:
    """Append the environment's tokens, from column start on, to the rows (b,) where ends (b,) is True.

    Returns ends, False where there was a reply: the completion has another turn.
    """
    ends = ends.clone()
    for index in ends.nonzero()[:, 0].tolist():
        row = int(rows[index])
        tokens = reply(first_row + row, ids[row, :start].tolist())
        end = min(start + len(tokens), ids.shape[1])
        ids[row, start:end] = torch.tensor(tokens[: end - start], dtype=torch.long, device=ids.device)
        replied[row, start:end] = True
        ends[index] = not tokens
    return ends


def next_logits(model, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Forward tokens (b, n) that follow those in the cache, and return the logits (b, V) of the next token.

    mask  (b, m) of all tokens so far, False on padding. Positions count only the True entries, so they do not
          depend on padding.
    """
    hidden = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)[:, -ids.shape[1] :],
        use_cache=True, **{name_of_cache(type(model.base_model)): cache},
    ).last_hidden_state[:, -1]                                                   # (b, H)
    return compute_logits(model, hidden)


@functools.cache
def name_of_cache(architecture: type) -> str:
    """Return the name of a model's cache argument, which transformers 5.24 has changed in some models."""
    return "cache" if "cache" in signature(architecture.forward).parameters else "past_key_values"


def sample_inverse_cdf(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse transform sampling: logits (b, V), uniforms (b,) in [0, 1) -> tokens, logp (b,).

    This selects the first token whose cumulative probability exceeds the random number. (torch.multinomial
    draws from one stream for the whole batch, so a row's token would depend on the other rows.)
    """
    log_p = logits.log_softmax(dim=-1)
    # A sum over a large vocabulary needs float64, which mps does not have.
    p = log_p.exp().to("cpu" if logits.device.type == "mps" else logits.device)
    cdf = p.cumsum(dim=-1, dtype=torch.float64)
    goal = uniforms[:, None].to(p.device) * cdf[:, -1:]
    token = torch.searchsorted(cdf, goal, right=True).clamp(max=p.shape[1] - 1).to(logits.device)
    return token[:, 0], log_p.gather(-1, token)[:, 0]


@contextmanager
def sampling_mode(model):
    """Turn off gradients and dropout; restore the model's mode afterwards."""
    training = model.training
    try:
        model.eval()
        # An autocast within this one keeps its 16-bit copies of weights until this outermost one ends.
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(training)


# ---- random numbers ----------------------------------------------------------------------------------------


def uniform_streams(seed: int | Sequence, num_prompts: int, group_size: int, length: int) -> Tensor:
    """Draw random numbers (B, length) float32 in [0, 1), from a separate RNG stream for each completion."""
    generators = random_generators(seed, num_prompts, group_size)
    return torch.from_numpy(np.stack([each.random(length, dtype=np.float32) for each in generators]))


def random_generators(seed: int | Sequence, num_prompts: int, group_size: int) -> list[np.random.Generator]:
    """Return a generator for each of the B completions, seeded by its prompt's seed and index in the group.

    seed  an integer, so that prompt p gets the seed (seed, p); or an integer or a tuple for each prompt
    """
    seeds = [(seed, p) for p in range(num_prompts)] if isinstance(seed, Integral) else seed
    if len(seeds) != num_prompts:
        raise ValueError(f"seed: {len(seeds)} for {num_prompts} prompts; pass one integer, or one for each")
    of_prompts = [(each,) if isinstance(each, Integral) else each for each in seeds]
    return [
        np.random.default_rng([*of_prompt, sibling])
        for of_prompt in of_prompts for sibling in range(group_size)
    ]


# ---- rollouts ----------------------------------------------------------------------------------------------


def make_rollout(
    tokenizer, prompts: list[list[int]], distribution: dict, ids: Tensor, sampled: Tensor,
    filled: Tensor, logp: Tensor, finished: Tensor,
) -> Rollout:
    """Return sampled completions as a Rollout, cut to the length of the longest one.

    sampled   (B, T) bool, tokens of the policy;  filled: tokens of the policy or an environment
    finished  (B,) bool, True if the last token is a stop token
    """
    longest = int(filled.any(dim=0).sum())
    ids, sampled, filled, logp = (x[:, :longest] for x in (ids, sampled, filled, logp))
    assert logp.isfinite().all(), "the model's logits are not finite; is the learning rate too high?"
    ends = (filled.sum(dim=1) - finished.long()).tolist()  # without the stop token
    completions = [
        decode_completion(tokenizer, row[:end]) for row, end in zip(ids.tolist(), ends, strict=True)]
    ids = ids.masked_fill(~filled, tokenizer.pad_token_id)
    prompts = left_pad(prompts, tokenizer.pad_token_id)
    return Rollout(*prompts, ids, sampled, logp, finished, completions, distribution)


def decode_completion(tokenizer, ids: list[int]) -> str:
    """Return the text of sampled tokens, without pad and BOS tokens. Other special tokens, such as <think>,
    are kept, so that reward functions see what the policy wrote.
    """
    silent = tokenizer.pad_token_id, tokenizer.bos_token_id
    return tokenizer.decode([i for i in ids if i not in silent])


def demonstrations_as_rollout(model, tokenizer, examples: list[dict], encode=encode_demonstration) -> Rollout:
    """Return the demonstrations of examples as a rollout with one completion for each prompt.

    encode  (tokenizer, prompt, completion, stop_ids) -> token ids; and a mask, True on tokens to train on
    """
    stops = stop_token_ids(model, tokenizer)
    prompts = [encode_prompt(tokenizer, prompt_of(tokenizer, example)) for example in examples]
    rows = [encode(tokenizer, e["prompt"], e["completion"], stops) for e in examples]
    completion_ids, mask = map(pad_rows, zip(*rows, strict=True))
    return Rollout(
        *left_pad(prompts, tokenizer.pad_token_id), completion_ids, mask,
        sampling_logp=torch.zeros(mask.shape), finished=torch.ones(len(rows), dtype=torch.bool),
        completions=[e["completion"] for e in examples], distribution={},
    )


def stop_token_ids(model, tokenizer, with_template: bool = True) -> list[int]:
    """Return the ids that end a completion: the EOS tokens of the generation config (Gemma 3 has two) and of
    the tokenizer, and with_template the end of a turn in the chat template.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = configured if isinstance(configured, list) else [configured]
    of_template = end_of_turn(tokenizer) if with_template else None
    return sorted({*configured, tokenizer.eos_token_id, of_template} - {None})


def pad_rows(rows: list, value=0, *, left: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Stack sequences of numbers to (rows, longest), padded with `value` on the right or the left."""
    side, tensors = "left" if left else "right", [torch.as_tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def left_pad(sequences: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad token ids on the left, so that all prompts end together: ids (P, Tp) and mask (P, Tp) bool."""
    ids = pad_rows(sequences, pad_id, left=True, dtype=torch.long)
    return ids, pad_rows([[True] * len(sequence) for sequence in sequences], left=True, dtype=torch.bool)


def positions_of(mask: Tensor) -> Tensor:
    """Number the True entries of each row 0, 1, 2, ...; padding before them gets 0."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


# ---- concatenating and selecting groups --------------------------------------------------------------------
# Both functions handle all fields, so new fields of Rollout, or of Groups in experience.py, need no code.

OF_THE_WHOLE = bool | int | float | str | None            # types of fields with one value for all groups


def concatenate(parts: list, name: str = ""):
    """Concatenate the groups of several rollouts, or of their fields.

    Tensors are padded with 0 to the longest row, on the left if the name of their field begins with prompt_.
    Dicts and dataclasses are concatenated entry by entry. Numbers and strings must be equal in all parts.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise TypeError(f"{name}: parts are of different types: {sorted({type(x).__name__ for x in parts})}")
    if isinstance(first, Tensor) and first.ndim < 2:
        return torch.cat(parts)
    if isinstance(first, Tensor):
        return pad_rows([row for part in parts for row in part], left=name.startswith("prompt_"))
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise ValueError(f"{name}: parts have different entries: {[list(part) for part in parts]}")
        return {key: concatenate([part[key] for part in parts], key) for key in first}
    if is_dataclass(first):
        return replace(first, **concatenate([vars(part) for part in parts]))
    if not isinstance(first, OF_THE_WHOLE):
        raise TypeError(f"{name}: not a tensor, list or dict: {first!r:.100}")
    if any(part != first for part in parts):
        raise ValueError(f"{name}: differs between parts: {parts!r:.200}")
    return first


def select(item, kept: Tensor, name: str = ""):
    """Return the groups of a rollout, or of one of its fields, where kept (P,) is True.

    Tensors and lists have P or P * G entries. Dicts and dataclasses are selected entry by entry.
    """
    if isinstance(item, OF_THE_WHOLE):
        return item
    if isinstance(item, dict):
        return {key: select(x, kept, key) for key, x in item.items()}
    if is_dataclass(item):
        return replace(item, **select(vars(item), kept))
    if not isinstance(item, Tensor | list) or len(item) % len(kept):
        raise TypeError(f"{name}: not a tensor or list with entries for each prompt: {item!r:.100}")
    rows = kept.repeat_interleave(len(item) // len(kept))
    return item[rows] if isinstance(item, Tensor) else list(compress(item, rows.tolist()))
