"""
Log-probabilities of completions under a model: the policy that sampled them, a later one, or the reference.

Two ideas keep this fast. A group shares one prompt, so the prompt is forwarded once, followed by its G
completions (engine/packing.py). The vocabulary is large, so the head runs on a few tokens at a time, again in
the backward pass: no (tokens, V) tensor outlives a chunk (engine/chunked_head.py).

Left out on purpose: models whose layers carry state from token to token cannot be packed. The start-up check
detects them, and the plain engine forwards one row per completion.
Shapes: B rows of T completion tokens, N completion tokens in all, H hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from engine.chunked_head import HeadLogProbs
from engine.devices import bucket, cut_graph, eager_device
from engine.logits import compute_logits, policy_logits
from engine.packing import PackedBatch, plain_rows
from engine.prefix_attention import forward_packed
from engine.sharding import forward_pass


@dataclass
class LogProbs:
    """Hold results of completion_log_probs in the order of its rows, on the CPU if the model is on XLA."""

    logp: Tensor                        # (rows, T) nats, with gradient; 0 where completion_mask is False
    entropy: Tensor                     # (rows, T) nats, of the same distribution; 0 there too
    kl: Tensor | None = None            # (rows, T) nats, KL(policy || reference), with a reference
    values: Tensor | None = None        # (rows, T) expected points before each token, with a value head


def completion_log_probs(
    model, rollout, rows: Tensor | None = None, *, temperature: float = 1.0, top_k: int = 0,
    top_p: float = 1.0, reference=None, value_head=None, pack: Callable = plain_rows,
) -> LogProbs:
    """Compute log p(token | all tokens before it) under the policy: model, temperature, top-k and top-p.

    rollout     prompt_ids, prompt_mask (P, Tp), completion_ids, completion_mask (B, T), with B = P * G
    rows        indices of some of the B rows, in any order; None: all of them
    reference   another model of the same vocabulary, for the exact KL at every token, over the tokens that
                the policy keeps, with both distributions normalised over those; forwarded without gradient
    value_head  a module from hidden states (N, H) to points (N,)
    pack        how rows are arranged in a pass: plain_rows, or pack_groups, which forwards each prompt once
                for all its rows. Results are equal to rounding, unless the model's layers carry state.
    """
    rows = torch.arange(len(rollout.completion_ids)) if rows is None else rows.cpu()
    device = next(model.parameters()).device
    batch = pack(rollout, rows, device)
    mask = rollout.completion_mask[rows]                                         # (b, T)
    chosen, predictor = rollout.completion_ids[rows][mask], batch.predictor[mask]                # (N,)
    padding = (0, bucket(len(chosen), device) - len(chosen))                     # without a gradient
    chosen, predictor = pad(chosen, padding).to(device), pad(predictor, padding).to(device)
    batch, reference_hidden = batch.to(device), None
    if reference is not None:
        with torch.no_grad():
            reference_hidden = forward_pass(reference, partial(forward_hidden, reference, batch, predictor))
    to_policy_logits = partial(policy_logits, model, temperature=temperature, top_k=top_k, top_p=top_p)

    def forward_head():
        hidden, head = forward_hidden(model, batch, predictor), model.get_output_embeddings()
        logp, entropy, kl = HeadLogProbs.apply(
            hidden, head.weight, head.bias, chosen, to_policy_logits, reference_hidden,
            lambda hidden: compute_logits(reference, hidden) / temperature,
        )
        values = None if value_head is None else value_head(hidden).to(logp.dtype)
        results = logp, entropy, None if reference is None else kl, values
        return [None if result is None else result.clone() for result in results]  # FSDP warns of views

    results = forward_pass(model, forward_head)
    cut_graph(device)
    mask = mask.to(eager_device(device))
    zeros = torch.zeros(mask.shape, dtype=results[0].dtype, device=mask.device)
    return LogProbs(*(
        None if result is None else zeros.masked_scatter(mask, result.to(mask.device)) for result in results
    ))


def forward_hidden(model, batch: PackedBatch, predictor: Tensor) -> Tensor:
    """Forward a batch and return the final hidden states (N, H) of the tokens at predictor (N,)."""
    if batch.layout is not None:
        hidden = forward_packed(model, batch.ids, batch.positions, batch.layout)
    else:
        hidden = model.base_model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
        ).last_hidden_state
    # The first tokens of siblings have one predictor. The backward pass of indexing would add up their
    # gradients in the order in which threads finish.
    return embedding(predictor, hidden.flatten(0, 1))
