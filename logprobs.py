"""
Log-probabilities of completions under a model: what the policy, the reference and any later version of them say about
tokens that were sampled before.

Two ideas live here. A group shares one prompt, so the prompt is forwarded once with its G completions packed behind it
(engine/packing.py). And the vocabulary is large, so the head runs on a few tokens at a time, again in the backward pass: no
(tokens, V) tensor outlives a chunk.

Left out on purpose: models whose layers carry state from token to token cannot be packed; the start-up check finds that,
and shared_prompt=False forwards ordinary rows.
Shapes: B rows of T completion tokens, N completion tokens in all, H hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from engine.chunked_head import HeadLogProbs
from engine.devices import bucket, cut_graph, eager_device
from engine.logits import compute_logits, policy_logits
from engine.packing import pack_rows
from engine.prefix_attention import forward_packed
from engine.sharding import forward_pass


@dataclass
class LogProbs:
    """What a policy says about completion tokens, with rows in the order they were asked for; from XLA, on the CPU."""

    logp: Tensor                # (rows, T) nats, with gradient where the model has one; 0 where completion_mask is False
    entropy: Tensor             # (rows, T) nats, entropy of the same distribution; 0 where completion_mask is False
    kl: Tensor | None = None    # (rows, T) nats, KL(policy || reference) over the whole vocabulary, if there is a reference
    values: Tensor | None = None        # (rows, T) points expected before each token, if there is a value head


def completion_log_probs(
    model, rollout, rows: Tensor | None = None, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    shared_prompt: bool = True, reference=None, value_head=None,
) -> LogProbs:
    """log p(completion token | everything before it) under the policy: model, temperature and kept support together.

    rollout        prompt_ids, prompt_mask (P, Tp), completion_ids, completion_mask (B, T), with B = P * G
    rows           which of the B rows, in any order; all of them by default
    shared_prompt  forward each prompt once for all its rows; False forwards one row per completion. The same numbers
                   to rounding, unless the model's layers carry state.
    reference      another model of the same vocabulary, for the exact KL at every token, over the tokens that the policy
                   keeps, with both distributions normalised over those; forwarded here, without gradient
    value_head     a module from hidden states (N, H) to points (N,)
    """
    rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows.cpu()
    device = next(model.parameters()).device
    batch = pack_rows(rollout, rows, shared_prompt, device)
    ids, positions, padding_mask = (part.to(device) for part in (batch.ids, batch.positions, batch.mask))
    layout = batch.layout.to(device) if shared_prompt else None
    mask = rollout.completion_mask[rows]                                         # (b, T)
    chosen, predictor = rollout.completion_ids[rows][mask], batch.predictor[mask]                # (N,)
    missing = (0, bucket(len(chosen), device) - len(chosen))                     # tokens that nobody asks for: no gradient
    chosen, predictor = pad(chosen, missing).to(device), pad(predictor, missing).to(device)

    def hidden_states(model):
        # Siblings' first tokens come from one place. An index's backward pass would add up there in any order of the threads.
        hidden = forward_packed(model, ids, positions, layout) if shared_prompt else model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=padding_mask, use_cache=False
        ).last_hidden_state
        return embedding(predictor, hidden.flatten(0, 1))                        # (N, H)

    reference_hidden = None
    if reference is not None:
        with torch.no_grad():
            reference_hidden = forward_pass(reference, partial(hidden_states, reference))

    def ask():
        hidden, head = hidden_states(model), model.get_output_embeddings()
        parts = HeadLogProbs.apply(
            hidden, head.weight, head.bias, chosen,
            partial(policy_logits, model, temperature=temperature, top_k=top_k, top_p=top_p), reference_hidden,
            None if reference is None else lambda hidden: compute_logits(reference, hidden) / temperature,
        )
        values = None if value_head is None else value_head(hidden).to(parts[0].dtype)
        return [None if part is None else part.clone() for part in (*parts, values)]             # FSDP warns of views

    logp, entropy, kl, values = forward_pass(model, ask)
    cut_graph(device)
    where = mask.to(eager_device(device))
    empty = torch.zeros(mask.shape, dtype=logp.dtype, device=where.device)

    def by_row(numbers):                                  # (N,) -> (b, T)
        return empty.masked_scatter(where, numbers.to(where.device))

    return LogProbs(
        by_row(logp), by_row(entropy), None if reference is None else by_row(kl), None if values is None else by_row(values)
    )
