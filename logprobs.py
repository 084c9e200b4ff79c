"""
Log-probabilities of completions under a model: the policy that sampled them, a later one, or the reference.

Temperature, top-k, top-p and min-p are part of the policy: sampler and trainer both apply restrict_logits, so
they assign the same probability to a token, up to rounding.

    prompt      completion          a row of a forward pass: all padding is at its end
    p p p p     c c c c . .
          ^     ^ ^ ^               the last token of the prompt predicts the first c, each c the next one

lay_out builds these rows, and head_log_probs has the formulas. Each completion is forwarded with its prompt;
engine/shared.py forwards a prompt once for all its completions. Shapes: B = P*G rows of T completion tokens,
b rows of L tokens in a pass, N tokens of the policy in them, n in a chunk, H hidden size, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**26}  # limit of n * V: 32 MB in float32; 256 MB on a GPU, where
                                # for few tokens the time goes into reading the head's weights
MIN_TOKENS_AT_ONCE = 64         # lower limit of n, which takes precedence


@dataclass
class LogProbs:
    """Results of completion_log_probs, with a row for each completion."""

    logp: Tensor                        # (rows, T) nats, with gradient; 0 where completion_mask is False
    entropy: Tensor                     # (rows, T) nats, at each token; 0 where the mask is False
    kl: Tensor | None = None            # (rows, T) nats, KL(policy || reference), if there is one
    values: Tensor | None = None        # (rows, T) expected reward before each token, by a value head

    def computed(self) -> dict[str, Tensor]:
        """Return the results that are not None, by name."""
        return {name: x for name, x in vars(self).items() if x is not None}

    @classmethod
    def of_no_rows(cls, length: int) -> "LogProbs":
        """Return the results of no rows, (0, length) each."""
        return cls(*(torch.zeros(0, length) for _ in fields(cls)))


def completion_log_probs(
    model, rollout, rows: Tensor | None = None, *, reference=None, value_head=None,
    run_forward: Callable = lambda model, forward: forward(),
) -> LogProbs:
    """Compute log p(token | all tokens before it) under a model, with the sampling parameters of a rollout.

    rollout     has prompt_ids, prompt_mask (P, Tp), completion_ids, completion_mask (B, T), with B = P * G;
                and distribution, the arguments of restrict_logits that the sampler used
    rows        indices of some of the B rows, in any order; None: all of them
    reference   another model with the same vocabulary, for the exact KL at every position: a sum over the
                tokens that the policy may sample, with both distributions normalised over these tokens. The
                reference gets no gradient;  value_head  a module, hidden states (N, H) -> values (N,)
    run_forward  run_forward(model, forward) returns forward(). If weights are sharded over processes,
                engine/sharding.py passes a function that gathers them around this call
    """
    rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows.cpu()
    device = next(model.parameters()).device
    inputs, predicting_position, target_ids = lay_out(rollout, rows, device)
    reference_hidden = None
    if reference is not None:
        with torch.no_grad():
            reference_hidden = run_forward(
                reference, partial(hidden_states, reference, inputs, predicting_position))

    def forward() -> list[Tensor | None]:                 # everything that reads the model's weights
        hidden = hidden_states(model, inputs, predicting_position)
        chunk_of_head = partial(head_log_probs, model, rollout.distribution, reference)
        size = tokens_in_chunk(len(model.get_output_embeddings().weight), device)
        results = in_chunks(chunk_of_head, size, hidden, target_ids, reference_hidden)
        # Cloned because FSDP warns about views.
        values = None if value_head is None else value_head(hidden).to(results[0].dtype).clone()
        return [*results, values]

    results = run_forward(model, forward)                 # logp, entropy, kl, values: (N,) each
    mask = rollout.completion_mask[rows].to(device)                                            # (b, T)
    zeros = torch.zeros(mask.shape, dtype=results[0].dtype, device=device)
    return LogProbs(*(None if x is None else zeros.masked_scatter(mask, x) for x in results))


def hidden_states(model, inputs: dict, predicting_position: tuple[Tensor, Tensor]) -> Tensor:
    """Forward prompts and completions, and return the hidden states (N, H) that predict tokens."""
    return model.base_model(**inputs).last_hidden_state[predicting_position]


def lay_out(rollout, rows: Tensor, device) -> tuple[dict, tuple[Tensor, Tensor], Tensor]:
    """Concatenate prompts and completions of some rows for a forward pass, as in the figure at the top.

    returns  inputs of the model (b, L); row and column of the position that predicts each token of the
             policy, (N,) each; and the ids of these tokens (N,)
    """
    completion_ids, mask = rollout.completion_ids[rows], rollout.completion_mask[rows]         # (b, T)
    prompts, lengths = prompts_and_lengths(rollout, rows)
    sequences = [
        torch.cat([prompt, completion[: length - len(prompt)]])
        for prompt, completion, length in zip(prompts, completion_ids, lengths, strict=True)
    ]
    ids = pad_sequence(sequences, batch_first=True).to(device)                                 # (b, L)
    attention_mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).to(device)
    positions = torch.arange(ids.shape[1], device=device) * attention_mask
    row, t = mask.nonzero(as_tuple=True)                  # (N,) each: the tokens of the policy
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    predicting_position = row.to(device), (prompt_lengths[row] + t - 1).to(device)
    inputs = dict(input_ids=ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
    return inputs, predicting_position, completion_ids[mask].to(device)


def head_log_probs(
    model, distribution: dict, reference, hidden: Tensor, target_ids: Tensor,
    reference_hidden: Tensor | None,
) -> list[Tensor]:
    """Compute the logp of target_ids (n,), and at their positions the entropy of the policy and, if there is
    a reference, the exact KL: (n,) nats each.

        entropy = -sum_i p(i) log p(i)         KL = sum_i p(i) (log p(i) - log q(i))

    hidden, reference_hidden  (n, H), final hidden states of the model and the reference
    """
    logits = restrict_logits(compute_logits(model, hidden), **distribution, chosen=target_ids)  # (n, V)
    log_p = logits.log_softmax(dim=-1)
    p = log_p.exp()
    finite_log_p = log_p.masked_fill(p == 0, 0.0)         # 0 * -inf would be NaN, in the gradient as well
    logp, entropy = log_p.gather(-1, target_ids[:, None])[:, 0], -(p * finite_log_p).sum(dim=-1)
    if reference_hidden is None:
        return [logp, entropy]
    with torch.no_grad():
        log_q = compute_logits(reference, reference_hidden).to(logits.dtype)
        log_q = log_q / distribution.get("temperature", 1.0)
        log_q = log_q.masked_fill(logits == -torch.inf, -torch.inf).log_softmax(dim=-1)
    return [logp, entropy, (p * (finite_log_p - log_q.masked_fill(p == 0, 0.0))).sum(dim=-1)]


def compute_logits(model, hidden: Tensor) -> Tensor:
    """Compute the model's logits (n, V), before restrict_logits, from final hidden states (n, H)."""
    head = model.get_output_embeddings()
    return scale_and_softcap(model, lm_head(hidden, head.weight, head.bias))


def lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply hidden states (n, H) by a head (V, H) and add its bias: (n, V).

    On a CPU the product is computed as (V, n) and transposed, which takes half the time for few tokens.
    """
    if hidden.device.type != "cpu":
        return torch.nn.functional.linear(hidden, weight, bias)
    raw = (weight @ hidden.T).T
    return raw if bias is None else raw + bias


def scale_and_softcap(model, raw: Tensor) -> Tensor:
    """Apply the model's scaling and soft cap, if it has any, to the output of the head (n, V).

    transformers has no public function for them; the start-up check compares with the model's forward pass.
    """
    text_config = model.config.get_text_config()
    # Cohere has logit_scale, Granite logits_scaling.
    scale = getattr(text_config, "logit_scale", 1.0) / getattr(text_config, "logits_scaling", 1.0)
    raw = raw * scale if scale != 1 else raw
    cap = getattr(text_config, "final_logit_softcapping", None)                  # Gemma 2
    return raw if cap is None else torch.tanh(raw / cap) * cap


def restrict_logits(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    chosen: Tensor | None = None,
) -> Tensor:
    """Return the logits of the distribution to sample from: their softmax is the policy.

    In this order, which is vLLM's: divide by the temperature; keep tokens at least min_p times as likely as
    the likeliest one (arXiv:2407.01082); of these, keep the top_k most likely; of these, keep the smallest
    set with at least top_p of their probability (arXiv:1904.09751 sec. 3.1). All other logits are -inf.

    logits       (N, V);  min_p=0, top_k=0 and top_p=1 keep everything
    chosen       (N,) token ids that are always kept: they were sampled, so a difference in rounding between
                 two forward passes must not set their probability to 0
    returns      (N, V) float32 (float64 for float64 logits)
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature if temperature != 1 else logits  # a division is slow at V = 262144
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return logits
    with torch.no_grad():
        k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
        ranked = logits.topk(k, dim=-1).values                                   # (N, k), descending
        if min_p > 0:
            ranked = ranked.masked_fill(ranked < ranked[:, :1] + math.log(min_p), -torch.inf)
        probs = ranked.softmax(dim=-1)
        likelier = probs.cumsum(dim=-1) - probs           # probability of all likelier tokens
        held = (likelier < top_p) & (ranked > -torch.inf)
        kept = held.sum(dim=-1, keepdim=True).clamp(min=1)                       # (N, 1)
        outside = logits < ranked.gather(-1, kept - 1)    # (N, V); equal logits stay together
        if chosen is not None:
            outside.scatter_(-1, chosen[:, None], False)
    return logits.masked_fill(outside, -torch.inf)


def distribution_of(config) -> dict:
    """Return the arguments of restrict_logits that a configuration implies.

    Temperature 0 selects the most likely token, or one of several that are equally likely.
    """
    greedy = config.generation_temperature == 0
    return dict(
        temperature=1.0 if greedy else config.generation_temperature,
        top_k=1 if greedy else config.generation_top_k, top_p=config.generation_top_p,
        min_p=getattr(config, "generation_min_p", 0.0),    # other configs than ours may lack it
    )


def in_chunks(
    chunk_of_head: Callable, size: int, hidden: Tensor, target_ids: Tensor, reference_hidden: Tensor | None
) -> list[Tensor | None]:
    """Return logp, entropy and KL (None without a reference) of head_log_probs, computed in chunks of `size`.

    The backward pass recomputes each chunk, so that no tensor (N, V) is ever stored.
    """
    if torch.is_grad_enabled():
        chunk_of_head = partial(checkpoint, chunk_of_head, use_reentrant=False, preserve_rng_state=False)
    # Allocated before the chunks: a small tensor between what they free would fragment the memory.
    num_results, dtype = 2 + (reference_hidden is not None), torch.promote_types(hidden.dtype, torch.float32)
    results = hidden.new_empty(len(hidden), num_results, dtype=dtype)
    for number, hidden_chunk in enumerate(hidden.split(size)):
        chunk = slice(number * size, (number + 1) * size)
        reference_chunk = None if reference_hidden is None else reference_hidden[chunk]
        results[chunk] = torch.stack(chunk_of_head(hidden_chunk, target_ids[chunk], reference_chunk), dim=1)
    columns = [column.clone() for column in results.unbind(dim=1)]               # FSDP warns of views
    return columns if reference_hidden is not None else [*columns, None]


def tokens_in_chunk(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk of the head: a multiple of 32, which CPUs multiply faster."""
    return max(MIN_TOKENS_AT_ONCE, LOGITS_AT_ONCE.get(device.type, 2**22) // vocab_size // 32 * 32)


def micro_batches(rollout, rows: Tensor, max_tokens: int, min_batches: int = 1) -> list[Tensor]:
    """Split rows into batches of at most max_tokens tokens, padding included. A longer row is a batch alone.

    Rows are sorted by length, the longest first, so that rows of similar length share a batch. Any split
    gives the same gradient up to rounding, because weights of tokens are computed over the whole update.

    min_batches  the least number of batches, if there are as many rows
    """
    _, lengths = prompts_and_lengths(rollout, rows)
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    if len(batches) < min(min_batches, len(rows)):        # retry with half of the tokens
        return micro_batches(rollout, rows, min(max_tokens, max(lengths) * len(rows)) // 2, min_batches)
    return [rows[batch] for batch in batches]


def prompts_and_lengths(rollout, rows: Tensor) -> tuple[list[Tensor], list[int]]:
    """Return each row's prompt without padding, and its number of tokens, prompt and completion."""
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    prompts = [rollout.prompt_ids[p][rollout.prompt_mask[p]] for p in (rows // group_size).tolist()]
    ends = completion_lengths(rollout.completion_mask[rows]).tolist()
    return prompts, [len(prompt) + end for prompt, end in zip(prompts, ends, strict=True)]


def completion_lengths(completion_mask: Tensor) -> Tensor:
    """Return (B,) the number of tokens up to the policy's last one, including an environment's before it."""
    steps = torch.arange(1, completion_mask.shape[1] + 1, device=completion_mask.device)
    return (completion_mask * steps).amax(dim=1)
