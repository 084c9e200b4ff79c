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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad

from devices import bucket, cut_graph, eager_device, forward_pass
from engine.packing import pack_rows
from engine.prefix_attention import forward_packed
from model import logits_of, product, scaled

LOGITS_AT_ONCE = 2**22          # tokens * V: 16 megabytes in float32
TOKENS_AT_ONCE = 64             # but no fewer tokens: every chunk goes through the whole head four times


@dataclass
class LogProbs:
    """What a policy says about completion tokens, with rows in the order they were asked for; from XLA, on the CPU."""

    logp: Tensor                # (rows, T) nats, with gradient where the model has one; 0 where completion_mask is False
    entropy: Tensor             # (rows, T) nats, entropy of the same distribution; 0 where completion_mask is False
    kl: Tensor | None = None    # (rows, T) nats, KL(policy || reference) over the whole vocabulary, if there is a reference
    values: Tensor | None = None        # (rows, T) points expected before each token, if there is a value head


def restrict_logits(logits: Tensor, *, temperature: float, top_k: int, top_p: float, chosen: Tensor | None = None) -> Tensor:
    """The logits of the distribution that is really sampled from; a softmax of the result is the policy.

    Divides by the temperature, keeps the top_k likeliest tokens, and of those the fewest that hold at least top_p of
    the probability (arXiv:1904.09751 sec. 3.1). The rest gets -inf.

    logits       (N, V);  top_k=0 and top_p=1 keep everything
    chosen       (N,) token ids that belong to the kept ones whatever happens: they were sampled, and rounding
                 between two forward passes must not make them impossible
    returns      (N, V) float32 (float64 for float64 logits)
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature if temperature != 1 else logits                # at V = 262144 a division is felt
    if top_k <= 0 and top_p >= 1:
        return logits
    with torch.no_grad():
        k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
        ranked = logits.topk(k, dim=-1).values                                   # (N, k), descending
        probs = ranked.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs                                    # probability of all likelier tokens
        kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)           # (N, 1)
        outside = logits < ranked.gather(-1, kept - 1)                           # (N, V); equal logits stay together
        if chosen is not None:
            outside.scatter_(-1, chosen[:, None], False)
    return logits.masked_fill(outside, -torch.inf)


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
            None if reference is None else lambda hidden: logits_of(reference, hidden) / temperature,
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


def policy_logits(model, raw: Tensor, chosen: Tensor | None = None, **policy) -> Tensor:
    """From the head's product to the policy's logits, (n, V) both: the model's scaling and soft cap, then the kept support.

    transformers offers no public call for the former; the start-up check compares it with the model's forward pass.
    """
    return restrict_logits(scaled(model, raw), chosen=chosen, **policy)


class HeadLogProbs(torch.autograd.Function):
    """hidden (N, H), head, the tokens chosen next (N,) -> their log-probabilities, entropies, exact KLs; (N,) nats each.

        log p(i) = logits[i] - logsumexp(logits)            d log p(chosen) / d logits[i] = [i = chosen] - p(i)
        H = -sum_i p(i) log p(i)                            d H / d logits[i] = -p(i) (log p(i) + H)
        KL = sum_i p(i) (log p(i) - log q(i))               d KL / d logits[i] = p(i) (log p(i) - log q(i) - KL)

    autograd would keep and traverse a dozen (n, V) tensors for this, which took longer than the matrix products around
    them, and a gradient of the whole embedding for every chunk. Here a handful, of one chunk, are alive at a time, and
    chunks add their part to one gradient in place. Logits may be -inf where nothing can be drawn: p and p log p are 0 there.

    shape      (raw (n, V), chosen (n,)) -> logits (n, V): what lies between the head's product and the policy's logits
    reference  hidden states (n, H) -> logits (n, V) of another model, whose distribution q is normalised over the tokens
               that the policy keeps; KL is 0 without one
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, chosen, shape, reference_hidden, reference):
        ctx.set_materialize_grads(False)                                         # entropy is seldom part of the loss
        ctx.shape, ctx.reference = shape, reference
        precision = torch.promote_types(hidden.dtype, torch.float32)
        # What stays is allocated before the chunks: a small tensor that malloc places between the logits of a chunk leaves
        # a hole too small for the next chunk's, and a pass then took twice its memory (dev/LOG.md).
        results = [hidden.new_empty((len(part), 4), dtype=precision) for part in chosen.split(chunk_size(weight))]
        for (h, c, r), result in zip(chunks(weight, hidden, chosen, reference_hidden), results, strict=True):
            logits = shape(product(h, weight, bias), c)
            result.copy_(torch.cat(HeadLogProbs.look(logits, c, None if r is None else reference(r)), dim=1))
            del logits
        logp, entropy, kl, total = torch.cat(results).split(1, dim=1)            # (N, 1) each
        ctx.save_for_backward(hidden, weight, bias, chosen, reference_hidden, total, entropy, kl)
        return logp[:, 0], entropy[:, 0], kl[:, 0]

    @staticmethod
    def look(logits, chosen, reference_logits):
        """logits (n, V), chosen (n,) -> log-probability, entropy, KL and logsumexp, (n, 1) each."""
        top = logits.amax(dim=-1, keepdim=True)
        weights = (logits - top).exp_()                                          # (n, V)
        sums = weights.sum(dim=-1, keepdim=True)
        total = top + sums.log()
        logp = logits.gather(-1, chosen[:, None]) - total
        entropy = total - expectation(weights, logits) / sums
        kl = torch.zeros_like(total)
        if reference_logits is not None:
            log_q = log_probs_over(reference_logits, logits)
            kl = expectation(weights, finite(logits) - total - finite(log_q)) / sums
        return logp, entropy, kl, total

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logp, of_entropy, of_kl):
        hidden, weight, bias, chosen, reference_hidden, *known = ctx.saved_tensors
        slopes = [None if slope is None else slope[:, None] for slope in (of_logp, of_entropy, of_kl)]
        of_hidden, precise = [torch.empty_like(part) for part in hidden.split(chunk_size(weight))], known[0].dtype
        of_weight = torch.zeros_like(weight, dtype=precise) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        columns = chunks(weight, hidden, chosen, reference_hidden, *known, *slopes)
        for (h, *rest), of_h in zip(columns, of_hidden, strict=True):
            of_raw = HeadLogProbs.slope(ctx, product(h, weight, bias), *rest)
            of_h.copy_(of_raw @ weight)
            if of_weight is not None:
                of_weight.addmm_(of_raw.T.to(precise), h.to(precise))
            if of_bias is not None:
                of_bias += of_raw.sum(dim=0)
            del of_raw                                    # before the graph is cut
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return torch.cat(of_hidden), of_weight, of_bias, None, None, None, None

    @staticmethod
    def slope(ctx, raw, chosen, reference_hidden, total, entropy, kl, of_logp, of_entropy, of_kl):
        """The gradient with respect to the head's product, (n, V): raw (n, V), chosen (n,), the rest (n, ...) or None."""
        with torch.enable_grad():
            logits = ctx.shape(raw.requires_grad_(), chosen)
        slope = (logits.detach() - total).exp_()                                 # (n, V) p
        factor = -of_logp if of_logp is not None else 0.0
        if of_entropy is not None:
            factor = factor - of_entropy * (finite(logits.detach() - total) + entropy)
        if of_kl is not None:
            log_q = log_probs_over(ctx.reference(reference_hidden), logits.detach())
            factor = factor + of_kl * (finite(logits.detach() - total) - finite(log_q) - kl)
        slope.mul_(factor)
        if of_logp is not None:
            slope.scatter_add_(-1, chosen[:, None], of_logp)
        return torch.autograd.grad(logits, raw, slope)[0]


def chunks(weight: Tensor, *columns: Tensor | None) -> Iterator[tuple]:
    """The same tokens of each column (N, ...), not so many that their logits are large; None stays None.

    The graph is cut around each: on XLA one program of one chunk serves all of them, whatever N is.
    """
    parts = [repeat(None) if column is None else column.split(chunk_size(weight)) for column in columns]
    cut_graph(weight.device)
    for part in zip(*parts, strict=False):
        yield part
        cut_graph(weight.device)


def chunk_size(weight: Tensor) -> int:
    """Tokens of a chunk; divides N on XLA."""
    return max(TOKENS_AT_ONCE, LOGITS_AT_ONCE // bucket(len(weight), weight.device))


def finite(logits: Tensor) -> Tensor:
    """The lowest number for -inf, so that 0 times it is 0."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def expectation(weights: Tensor, values: Tensor) -> Tensor:
    """weights, values (n, V) -> (n, 1) sum of their products; a value may be -inf where the weight is 0."""
    return torch.linalg.vecdot(weights, finite(values))[:, None]


def log_probs_over(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """log q (n, V) of a reference, over the tokens whose logits are not -inf."""
    return reference_logits.to(logits.dtype).masked_fill(logits == -torch.inf, -torch.inf).log_softmax(dim=-1)
