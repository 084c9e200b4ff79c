"""
From final hidden states to the logits of the distribution that is sampled from: head, scaling and soft cap of
the model, then temperature, top-k and top-p. The sampler and the trainer use the same functions.

Shapes: n tokens, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor


def compute_logits(model, hidden: Tensor) -> Tensor:
    """Compute the model's own logits (n, V) from final hidden states (n, H)."""
    head = model.get_output_embeddings()
    return scale_and_softcap(model, lm_head(hidden, head.weight, head.bias))


def lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply hidden states (n, H) by a head (V, H) and add its bias: (n, V).

    On a CPU the result is a view of (V, n): for a few tokens that takes half the time (dev/LOG.md).
    """
    if hidden.device.type != "cpu":
        return torch.nn.functional.linear(hidden, weight, bias)
    raw = (weight @ hidden.T).T
    return raw if bias is None else raw + bias


def scale_and_softcap(model, raw: Tensor) -> Tensor:
    """Apply the model's scaling and soft cap, if it has any, to the output of the head (n, V)."""
    text_config = model.config.get_text_config()
    # Cohere has logit_scale, Granite logits_scaling.
    scale = getattr(text_config, "logit_scale", 1.0) / getattr(text_config, "logits_scaling", 1.0)
    raw = raw * scale if scale != 1 else raw
    cap = getattr(text_config, "final_logit_softcapping", None)                  # Gemma 2
    return raw if cap is None else torch.tanh(raw / cap) * cap


def restrict_logits(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, chosen: Tensor | None = None
) -> Tensor:
    """Return the logits of the distribution that is sampled from; a softmax of the result is the policy.

    Divides by the temperature, keeps the top_k most likely tokens, and of those the fewest that hold at least
    top_p of the probability (arXiv:1904.09751 sec. 3.1). The logits of all others are -inf.

    logits       (N, V);  top_k=0 and top_p=1 keep everything
    chosen       (N,) token ids that are always kept: they were sampled, and rounding between two forward
                 passes must not make them impossible
    returns      (N, V) float32 (float64 for float64 logits)
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature if temperature != 1 else logits  # at V = 262144 a division takes time
    if top_k <= 0 and top_p >= 1:
        return logits
    with torch.no_grad():
        k = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
        ranked = logits.topk(k, dim=-1).values                                   # (N, k), descending
        probs = ranked.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs             # probability of all likelier tokens
        kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)           # (N, 1)
        outside = logits < ranked.gather(-1, kept - 1)    # (N, V); ties are kept together
        if chosen is not None:
            outside.scatter_(-1, chosen[:, None], False)
    return logits.masked_fill(outside, -torch.inf)


def policy_logits(model, raw: Tensor, chosen: Tensor | None = None, **policy) -> Tensor:
    """Turn the head's output into the policy's logits, both (n, V): scale_and_softcap, restrict_logits.

    transformers has no public call for scaling and soft cap; the start-up check compares them with the
    model's own forward pass.
    """
    return restrict_logits(scale_and_softcap(model, raw), chosen=chosen, **policy)


def clamp_neg_inf(logits: Tensor) -> Tensor:
    """Replace -inf with the lowest finite number, so that 0 times it is 0."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)
