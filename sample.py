"""
Sampling: prompts in, groups of completions out, each token with the log-probability it was drawn with.

The prompt of a group is forwarded once and its key-value cache repeated for the G siblings. A token is drawn by
inverting the cumulative distribution at one uniform number, and every completion has a stream of such numbers of its
own, derived from the seed and its prompt: it comes out the same alone, in a batch, or after others have finished.

Left out on purpose: static caches and compiled decoding. The cache grows by one token a step, and rows that are done
are dropped once they are half of the batch.
Shapes: P prompts of up to Tp tokens, G completions of each, B = P*G rows with siblings adjacent, T completion tokens.
"""

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from data import encode_completion, encode_prompt
from logprobs import restrict_logits


@dataclass
class Rollout:
    """P prompts with G completions each, as ids from here on: text is for reward functions and people. On the CPU."""

    prompt_ids: Tensor          # (P, Tp) left-padded
    prompt_mask: Tensor         # (P, Tp) bool
    completion_ids: Tensor      # (B, T) right-padded
    completion_mask: Tensor     # (B, T) bool, True on tokens the policy chose, up to and including the stop token
    sampling_logp: Tensor       # (B, T) nats under the distribution that was drawn from; 0 where completion_mask is False
    finished: Tensor            # (B,) bool, False where the length limit came before a stop token
    completions: list[str]      # B texts, without the stop token


def sample_completions_for_prompts(
    model, tokenizer, prompts: list, config, *, seed: int, num_completions: int | None = None
) -> Rollout:
    """Draw a group of completions for each prompt.

    prompts  strings, lists of chat messages, or lists of token ids
    config   has num_completions_per_prompt, generation_max_length (new tokens), generation_temperature (0 takes the
             likeliest token), generation_top_k (0: all), generation_top_p (1: all)
    seed     the same seed, prompt and sibling number give the same completion, whatever else is in the batch
    num_completions  G, if not the config's
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
    stops = torch.tensor(stop_token_ids(model, tokenizer), device=device)
    uniforms = torch.from_numpy(uniform_streams(encoded, group_size, config.generation_max_length, seed)).to(device)

    num_rows, limit = len(prompts) * group_size, config.generation_max_length
    completion_ids = torch.full((num_rows, limit), tokenizer.pad_token_id, device=device)
    sampling_logp = torch.zeros(num_rows, limit, device=device)
    lengths = torch.full((num_rows,), limit, device=device)
    finished = torch.zeros(num_rows, dtype=torch.bool, device=device)

    with sampling_mode(model):
        attention = prompt_mask.to(device)
        cache = DynamicCache(config=model.config)
        logits = model(
            input_ids=prompt_ids.to(device), attention_mask=attention, position_ids=positions_of(attention),
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        ).logits[:, -1]                                                          # (P, V)
        cache.batch_repeat_interleave(group_size)
        logits = logits.repeat_interleave(group_size, dim=0)                     # (B, V)
        attention = attention.repeat_interleave(group_size, dim=0)
        prompt_lengths = attention.sum(dim=1)                                    # (B,)
        active = torch.arange(num_rows, device=device)                           # which row each cache entry belongs to

        for t in range(limit):
            tokens, logp = draw(restrict_logits(logits, **policy), uniforms[active, t])
            completion_ids[active, t], sampling_logp[active, t] = tokens, logp   # past its stop a row's are ignored
            stopped = torch.isin(tokens, stops) & ~finished[active]
            lengths[active[stopped]] = t + 1
            finished[active[stopped]] = True
            alive = (~finished[active]).nonzero()[:, 0]
            if len(alive) == 0 or t + 1 == limit:
                break
            if 2 * len(alive) <= len(active):
                cache.batch_select_indices(alive)
                active, tokens, attention = active[alive], tokens[alive], attention[alive]
            attention = torch.cat([attention, attention.new_ones(len(active), 1)], dim=1)
            logits = model(
                input_ids=tokens[:, None], attention_mask=attention, position_ids=(prompt_lengths[active] + t)[:, None],
                past_key_values=cache, use_cache=True,
            ).logits[:, -1]

    completion_mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]     # by position, never by id
    width = completion_mask.shape[1]
    completion_ids = completion_ids[:, :width].masked_fill(~completion_mask, tokenizer.pad_token_id).cpu()
    sampling_logp = sampling_logp[:, :width].masked_fill(~completion_mask, 0.0).cpu()
    assert sampling_logp.isfinite().all(), "the model's logits are not finite; is the learning rate too high?"
    texts = [ids[: n - done] for ids, n, done in zip(completion_ids.tolist(), lengths.tolist(), finished.tolist(), strict=True)]
    return Rollout(
        prompt_ids, prompt_mask, completion_ids, completion_mask.cpu(), sampling_logp, finished.cpu(),
        completions=tokenizer.batch_decode(texts, skip_special_tokens=True),
    )


def select_groups(rollout: Rollout, keep: Tensor) -> Rollout:
    """The groups of the prompts where keep (P,) is True."""
    rows = keep.repeat_interleave(len(rollout.completions) // len(rollout.prompt_ids))           # (B,)
    by_row = rollout.completion_ids, rollout.completion_mask, rollout.sampling_logp, rollout.finished
    texts = [text for text, kept in zip(rollout.completions, rows.tolist(), strict=True) if kept]
    return Rollout(rollout.prompt_ids[keep], rollout.prompt_mask[keep], *(tensor[rows] for tensor in by_row), texts)


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
    )


def draw(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverse transform sampling: logits (B, V), uniforms (B,) in [0, 1) -> tokens, logp, (B,) each."""
    log_probs = logits.log_softmax(dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)                                  # (B, V)
    total = cumulative[:, -1:].contiguous()                                      # 1 to rounding
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # u * total may round up to total; the token at which the sum is complete is the last one that can be drawn.
    tokens = torch.minimum(tokens, torch.searchsorted(cumulative, total))
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def uniform_streams(prompts: list[list[int]], group_size: int, length: int, seed: int) -> np.ndarray:
    """(B, length) float32 in [0, 1): a stream for each completion, made of seed, prompt and sibling number.

    A prompt that occurs again in the batch has a stream of its own each time.
    """
    seen: dict[bytes, int] = {}
    rows = []
    for prompt in prompts:
        key = hashlib.blake2b(np.array(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
        seen[key] = seen.get(key, -1) + 1
        for sibling in range(group_size):
            generator = np.random.default_rng([seed, int.from_bytes(key), seen[key], sibling])
            rows.append(generator.random(length, dtype=np.float32))
    return np.stack(rows)


def demonstrations_as_rollout(model, tokenizer, examples: list[dict]) -> Rollout:
    """What somebody else wrote ("completion"), as if it had been sampled: one completion for each prompt."""
    stops = stop_token_ids(model, tokenizer)
    texts = [example["completion"] for example in examples]
    prompts = [encode_prompt(tokenizer, example["prompt"]) for example in examples]
    ids = [encode_completion(tokenizer, example["prompt"], example["completion"], stops) for example in examples]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in ids], batch_first=True)
    completion_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
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
    """0, 1, 2, ... over the True entries of each row; padding gets 0, and nobody looks at it."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


@contextmanager
def sampling_mode(model):
    """No gradients and no dropout; restored whatever happens. Activation checkpointing rests too: it needs train()."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
