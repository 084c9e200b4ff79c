"""
Log-probabilities, entropies and exact KL of tokens, computed from hidden states one chunk at a time, forward
and backward: no (tokens, V) tensor outlives a chunk.

Shapes: N completion tokens, n of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.xla import bucket, cut_graph
from logprobs import lm_head, tokens_in_chunk


class HeadLogProbs(torch.autograd.Function):
    """Compute logp, entropy and exact KL, (N,) nats each, of next tokens chosen (N,), from hidden (N, H).

        log p(i) = logits[i] - logsumexp(logits)      d log p(chosen) / d logits[i] = [i = chosen] - p(i)
        H = -sum_i p(i) log p(i)                      d H / d logits[i] = -p(i) (log p(i) + H)
        KL = sum_i p(i) (log p(i) - log q(i))         d KL / d logits[i] = p(i) (log p(i) - log q(i) - KL)

    autograd would keep a dozen (n, V) tensors for this, whose handling took longer than the matrix products,
    and a gradient of the whole embedding for every chunk. Here only a few tensors of one chunk exist at a
    time, and all chunks accumulate one gradient in place. Where logits are -inf, p and p log p are 0.

    to_policy_logits  (output of the head (n, V), chosen (n,)) -> logits (n, V) of the policy
    reference         hidden states (n, H) -> logits (n, V) of another model, whose distribution q is
                      normalised over the tokens that the policy keeps; KL is 0 without one
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, chosen, to_policy_logits, reference_hidden, reference):
        ctx.set_materialize_grads(False)                  # entropy is rarely part of the loss
        ctx.to_policy_logits, ctx.reference = to_policy_logits, reference
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Results are allocated before the chunks: a small tensor that malloc places between the logits of a
        # chunk leaves a hole too small for the next chunk's. A pass then took twice its memory (dev/LOG.md).
        results = [hidden.new_empty((len(c), 4), dtype=dtype) for c in chosen.split(chunk_size(weight))]
        chunks = split_chunks(weight, hidden, chosen, reference_hidden)
        for (h, c, r), result in zip(chunks, results, strict=True):
            logits = to_policy_logits(lm_head(h, weight, bias), c)
            reference_logits = None if r is None else reference(r)
            result.copy_(torch.cat(HeadLogProbs.chunk_log_probs(logits, c, reference_logits), dim=1))
            del logits, reference_logits
        logp, entropy, kl, lse = torch.cat(results).split(1, dim=1)              # (N, 1) each
        ctx.save_for_backward(hidden, weight, bias, chosen, reference_hidden, lse, entropy, kl)
        return logp[:, 0], entropy[:, 0], kl[:, 0]

    @staticmethod
    def chunk_log_probs(logits, chosen, reference_logits):
        """Compute logp, entropy, KL and log-sum-exp, (n, 1) each, from logits (n, V) and chosen (n,)."""
        top = logits.amax(dim=-1, keepdim=True)
        weights = (logits - top).exp_()                                          # (n, V)
        sums = weights.sum(dim=-1, keepdim=True)
        lse = top + sums.log()
        logp = logits.gather(-1, chosen[:, None]) - lse
        entropy = lse - row_dot(weights, logits) / sums
        kl = torch.zeros_like(lse)
        if reference_logits is not None:
            log_q = reference_log_probs(reference_logits, logits)
            kl = row_dot(weights, clamp_neg_inf(logits) - lse - clamp_neg_inf(log_q)) / sums
        return logp, entropy, kl, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy, grad_kl):
        hidden, weight, bias, chosen, reference_hidden, *saved = ctx.saved_tensors
        grads = [None if grad is None else grad[:, None] for grad in (grad_logp, grad_entropy, grad_kl)]
        grad_hidden, dtype = [torch.empty_like(h) for h in hidden.split(chunk_size(weight))], saved[0].dtype
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        chunks = split_chunks(weight, hidden, chosen, reference_hidden, *saved, *grads)
        for (h, *rest), grad_h in zip(chunks, grad_hidden, strict=True):
            grad_raw = HeadLogProbs.chunk_grad(ctx, lm_head(h, weight, bias), *rest)
            grad_h.copy_(grad_raw @ weight)
            if grad_weight is not None:
                grad_weight.addmm_(grad_raw.T.to(dtype), h.to(dtype))
            if grad_bias is not None:
                grad_bias += grad_raw.sum(dim=0)
            del grad_raw                                  # before the graph is cut
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return torch.cat(grad_hidden), grad_weight, grad_bias, None, None, None, None

    @staticmethod
    def chunk_grad(ctx, raw, chosen, reference_hidden, lse, entropy, kl, grad_logp, grad_entropy, grad_kl):
        """Compute the gradient of the head's output raw (n, V); chosen (n,), the rest (n, ...) or None."""
        with torch.enable_grad():
            logits = ctx.to_policy_logits(raw.requires_grad_(), chosen)
        grad_logits = (logits.detach() - lse).exp_()                             # (n, V) p
        factor = -grad_logp if grad_logp is not None else 0.0
        if grad_entropy is not None:
            factor = factor - grad_entropy * (clamp_neg_inf(logits.detach() - lse) + entropy)
        if grad_kl is not None:
            log_q = reference_log_probs(ctx.reference(reference_hidden), logits.detach())
            factor = factor + grad_kl * (clamp_neg_inf(logits.detach() - lse) - clamp_neg_inf(log_q) - kl)
        grad_logits.mul_(factor)
        if grad_logp is not None:
            grad_logits.scatter_add_(-1, chosen[:, None], grad_logp)
        return torch.autograd.grad(logits, raw, grad_logits)[0]


def clamp_neg_inf(logits: Tensor) -> Tensor:
    """Replace -inf with the lowest finite number, so that 0 times it is 0."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def split_chunks(weight: Tensor, *columns: Tensor | None) -> Iterator[tuple]:
    """Split each column (N, ...) into chunks of chunk_size tokens; a column may be None.

    On XLA the graph is cut around each chunk, so that one program serves all chunks, for any N.
    """
    splits = [repeat(None) if column is None else column.split(chunk_size(weight)) for column in columns]
    cut_graph(weight.device)
    for chunk in zip(*splits, strict=False):
        yield chunk
        cut_graph(weight.device)


def chunk_size(weight: Tensor) -> int:
    """Return the number of tokens in a chunk; on XLA it divides N, or is larger."""
    return tokens_in_chunk(bucket(len(weight), weight.device), weight.device)


def row_dot(weights: Tensor, values: Tensor) -> Tensor:
    """Sum weights * values (n, V) over V: (n, 1); a value may be -inf where the weight is 0."""
    return torch.linalg.vecdot(weights, clamp_neg_inf(values))[:, None]


def reference_log_probs(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """Compute log q (n, V) of a reference over the tokens whose logits under the policy are not -inf."""
    return reference_logits.to(logits.dtype).masked_fill(logits == -torch.inf, -torch.inf).log_softmax(dim=-1)
