"""
Log-probabilities, entropies and exact KL of tokens, computed from hidden states a chunk at a time, forward and backward: no
(tokens, V) tensor outlives a chunk.

Shapes: N completion tokens, n of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.devices import bucket, cut_graph
from engine.logits import clamp_neg_inf, lm_head

LOGITS_AT_ONCE = 2**22          # tokens * V: 16 megabytes in float32
TOKENS_AT_ONCE = 64             # but no fewer tokens: every chunk goes through the whole head four times


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
            logits = shape(lm_head(h, weight, bias), c)
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
        entropy = total - row_dot(weights, logits) / sums
        kl = torch.zeros_like(total)
        if reference_logits is not None:
            log_q = log_probs_over(reference_logits, logits)
            kl = row_dot(weights, clamp_neg_inf(logits) - total - clamp_neg_inf(log_q)) / sums
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
            of_raw = HeadLogProbs.slope(ctx, lm_head(h, weight, bias), *rest)
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
            factor = factor - of_entropy * (clamp_neg_inf(logits.detach() - total) + entropy)
        if of_kl is not None:
            log_q = log_probs_over(ctx.reference(reference_hidden), logits.detach())
            factor = factor + of_kl * (clamp_neg_inf(logits.detach() - total) - clamp_neg_inf(log_q) - kl)
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


def row_dot(weights: Tensor, values: Tensor) -> Tensor:
    """weights, values (n, V) -> (n, 1) sum of their products; a value may be -inf where the weight is 0."""
    return torch.linalg.vecdot(weights, clamp_neg_inf(values))[:, None]


def log_probs_over(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """log q (n, V) of a reference, over the tokens whose logits are not -inf."""
    return reference_logits.to(logits.dtype).masked_fill(logits == -torch.inf, -torch.inf).log_softmax(dim=-1)
