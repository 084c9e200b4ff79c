"""
Sampling: prompts in, groups of completions out, with the log-probability of each sampled token.

Prompts are padded on the left, so that all end in one column, and forwarded together, once. Their keys and
values in transformers' cache are copied for each completion. Then a loop samples a token for each completion,
until it ends with a stop token or at the length limit. engine/sampler.py draws the same without copies: what
train.py runs on a GPU, and where prompts are long (--engine).

Each completion has its own RNG stream, from the seed of its prompt and its number in the group, so results do
not depend on batching, up to the rounding of the model.
With an environment the policy takes turns, each up to a stop token, and `reply` adds an environment's tokens
behind them. They are forwarded one by one, like the others:

    ids        p p p | c c s e e e c c s      c sampled, s a sampled stop token, e the environment's
    sampled            1 1 1 0 0 0 1 1 1      completion_mask
    replied            0 0 0 1 1 1 0 0 0      filled = sampled | replied

Shapes: P prompts of up to Tp tokens, G completions of each, B = P*G rows with the completions of a prompt
adjacent, T completion tokens, b rows that are forwarded, H hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import signature
from itertools import compress
from numbers import Integral

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from data import after_turn, encode_demonstration, encode_prompt, prompt_of
from logprobs import compute_logits, distribution_of, restrict_logits

DROP_BELOW = 0.75               # finished rows leave the batch, by a copy, once at most this share goes on
CHECK_EVERY = 8                 # tokens between checks for finished rows on a GPU: each waits for the device


@dataclass
class Rollout:
    """P prompts with G completions each, on the CPU. Training uses the ids, reward functions the texts."""

    prompt_ids: Tensor          # (P, Tp) left-padded
    prompt_mask: Tensor         # (P, Tp) bool
    completion_ids: Tensor      # (B, T) right-padded; an environment's tokens are among them
    completion_mask: Tensor     # (B, T) bool, True on the tokens that the policy sampled
    sampling_logp: Tensor       # (B, T) nats, under the distribution; 0 elsewhere
    finished: Tensor            # (B,) bool, False if the length limit came first
    completions: list           # B texts without stop token; with an environment, lists of messages
    distribution: dict = field(default_factory=dict)    # arguments of restrict_logits; {}: the model's own
    turn_points: Tensor | None = None   # (B, T) rewards of turns, at their ends; NaN: the environment raised
    environments: list | None = None    # B instances of a class, one for each conversation


def sample_completions_for_prompts(
    model, tokenizer, prompts: list, config, *, seed: int | Sequence, num_completions: int | None = None,
    reply: Callable | None = None,
) -> Rollout:
    """Sample a group of completions for each prompt.

    prompts    strings, lists of chat messages, or lists of token ids
    config     has num_completions_per_prompt, generation_max_length (new tokens), generation_temperature
               (0: the most likely token), generation_top_k (0: all), generation_top_p (1: all), and may have
               generation_min_p (0: all), generation_batch_size (completions at once, or a group; 0: all)
    seed       an integer; or a sequence with an integer or a tuple of integers for each prompt
    num_completions  G, if not the config's
    reply      reply(row, ids after the prompt) -> ids: what an environment adds when a turn has ended, [] at
               the end. None: a completion is one turn
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
            batch_reply = reply and (lambda row, ids, first_row=first_row: reply(first_row + row, ids))
            parts.append(sample_batch(model, tokenizer, batch, batch_uniforms, distribution, batch_reply))
    columns = map(torch.cat, zip(*parts, strict=True))    # ids, sampled, filled, logp, finished of all
    return make_rollout(tokenizer, prompt_ids, distribution, *columns)


def sample_batch(
    model, tokenizer, prompts: list[list[int]], uniforms: Tensor, distribution: dict,
    reply: Callable | None,
) -> tuple[Tensor, ...]:
    """Sample the completions of some prompts together. Here B and T are those of uniforms.

    uniforms  (B, T) a random number for each token
    returns   for make_rollout, on the CPU: ids, sampled, filled, logp (B, T), and finished (B,)
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
        is_sampled = ~finished[rows] & ~replied[rows, t]  # (b,), elsewhere the token is not used
        ids[rows, t] = torch.where(is_sampled, token, ids[rows, t])
        logp[rows, t] = torch.where(is_sampled, token_logp.float(), 0.0)
        sampled[rows, t] = is_sampled
        ends_turn = is_sampled & torch.isin(token, stops)                        # (b,)
        finished[rows] |= ends_turn                       # unless the environment replies
        if reply:
            add_replies(reply, rows[ends_turn].tolist(), ids, replied, finished, t + 1)
        if t + 1 == limit:
            break
        if device.type == "cpu" or t % CHECK_EVERY == 0:
            rows = drop_finished(finished, rows, cache)
            if not len(rows):
                break
        mask = torch.cat([prompt_mask[rows], prompt_mask.new_ones(len(rows), t + 1)], dim=1)
        last = ids[rows, t, None].masked_fill(finished[rows, None], 0)           # pad may have no embedding
        logits = next_logits(model, last, mask, cache)
    return tuple(x.cpu() for x in (ids, sampled, sampled | replied, logp, finished))


def forward_prompts(
    model, prompts: list[list[int]], rows: Tensor, cache: DynamicCache
) -> tuple[Tensor, Tensor]:
    """Forward prompts once, and copy what that gives for each completion: rows (B,), G of each prompt.

    Returns the logits (B, V) of the first token, and the mask (B, Tp) of the prompts.
    """
    ids, mask = (x.to(rows.device) for x in left_pad(prompts, 0))                # (P, Tp)
    logits = next_logits(model, ids, mask, cache)                                # (P, V)
    prompt_of = rows // (len(rows) // len(prompts))
    cache.reorder_cache(prompt_of)
    return logits[prompt_of], mask[prompt_of]


def drop_finished(finished: Tensor, rows: Tensor, cache: DynamicCache) -> Tensor:
    """Select the rows that go on, in rows (b,) and in the cache, once there are few enough."""
    going_on = (~finished[rows]).nonzero()[:, 0]          # indices into rows
    if len(going_on) > DROP_BELOW * len(rows):
        return rows
    cache.reorder_cache(going_on)                         # selects rows
    return rows[going_on]


def add_replies(
    reply: Callable, ended: list[int], ids: Tensor, replied: Tensor, finished: Tensor, start: int
) -> None:
    """Write an environment's tokens behind the turns of rows that have ended, from column start on."""
    for row in ended:
        added = reply(row, ids[row, :start].tolist())[: ids.shape[1] - start]
        ids[row, start : start + len(added)] = torch.tensor(added, dtype=torch.long, device=ids.device)
        replied[row, start : start + len(added)] = True
        finished[row] = not added                         # else there is another turn


def next_logits(model, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Forward tokens (b, n) behind those in the cache, and return the logits (b, V) of the next one.

    mask  (b, m) False on padding, of all tokens so far. Positions count the others: padding does not move a
          prompt.
    """
    hidden = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)[:, -ids.shape[1] :],
        use_cache=True, **{name_of_cache(type(model.base_model)): cache},
    ).last_hidden_state[:, -1]                                                   # (b, H)
    return compute_logits(model, hidden)


@functools.cache
def name_of_cache(architecture: type) -> str:
    """Return the name of a model's argument for the cache, which transformers 5.24 has changed for some."""
    return "cache" if "cache" in signature(architecture.forward).parameters else "past_key_values"


def sample_inverse_cdf(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw by inverse transform sampling: logits (b, V), uniforms (b,) in [0, 1) -> tokens, logp (b,).

    The token is the first one for which the probabilities up to it add up to more than the random number.
    (torch.multinomial takes its numbers from one stream, so that a row's token depends on its batch.)
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
    """Turn gradients and dropout off; restore the model afterwards."""
    training = model.training
    try:
        model.eval()
        # Copies of a 16-bit model's weights live as long as the outermost autocast: this one, for all tokens.
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(training)


# ---- random numbers ----------------------------------------------------------------------------------------


def uniform_streams(seed: int | Sequence, num_prompts: int, group_size: int, length: int) -> Tensor:
    """Draw (B, length) float32 in [0, 1): a stream for each completion, see random_generators."""
    generators = random_generators(seed, num_prompts, group_size)
    return torch.from_numpy(np.stack([each.random(length, dtype=np.float32) for each in generators]))


def random_generators(seed: int | Sequence, num_prompts: int, group_size: int) -> list[np.random.Generator]:
    """Return a generator for each of the B completions, from its prompt's seed and its number in the group.

    seed  an integer, from which prompt p gets (seed, p); or an integer or a tuple for each prompt
    """
    seeds = [(seed, p) for p in range(num_prompts)] if isinstance(seed, Integral) else seed
    if len(seeds) != num_prompts:
        raise ValueError(f"seed: {len(seeds)} for {num_prompts} prompts; pass an integer, or one for each")
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
    """Return sampled completions as a Rollout, without the columns after the longest one.

    sampled   (B, T) bool, the tokens of the policy;  filled: these and an environment's
    finished  (B,) bool, the last token is a stop token
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
    stay: reward functions see what the policy wrote.
    """
    silent = tokenizer.pad_token_id, tokenizer.bos_token_id
    return tokenizer.decode([i for i in ids if i not in silent])


def demonstrations_as_rollout(model, tokenizer, examples: list[dict], encode=encode_demonstration) -> Rollout:
    """Return the demonstrations of examples as a rollout with one completion for each prompt.

    encode  (tokenizer, prompt, completion, stop_ids) -> token ids, and True where they are the policy's
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
    """Return the ids that end a completion: the generation config's, of which Gemma 3 has two, the
    tokenizer's, and end_of_turn of the template.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    configured = configured if isinstance(configured, list) else [configured]
    of_template = end_of_turn(tokenizer) if with_template else None
    return sorted({*configured, tokenizer.eos_token_id, of_template} - {None})


def end_of_turn(tokenizer) -> int | None:
    """Return the id of the special token with which the chat template ends a turn, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    with suppress(ValueError):                            # a template may refuse the made-up turn
        first, *_ = [*tokenizer(after_turn(tokenizer).lstrip(), add_special_tokens=False).input_ids, None]
        token = tokenizer.added_tokens_decoder.get(first)
        return first if token and token.special else None


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


# ---- joining and selecting groups --------------------------------------------------------------------------
# Field by field, so that a field that is added to Rollout, or to Groups in experience.py, takes part.

OF_THE_WHOLE = bool | int | float | str | None            # types of fields that say the same of all groups


def concatenate(parts: list, name: str = ""):
    """Concatenate the groups of several rollouts, or of their fields.

    Tensors are padded with 0 to the longest row, on the left if the name of their field begins with prompt_.
    Lists are joined; dicts and dataclasses entry by entry; numbers and strings have to be equal in all parts.
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
