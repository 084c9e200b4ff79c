"""The chunked head: its gradient against finite differences and dense formulas, and its memory."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from engine import chunked_head
from logprobs import restrict_logits


@pytest.mark.parametrize("policy", [
    dict(temperature=1.0, top_k=0, top_p=1.0), dict(temperature=0.7, top_k=5, top_p=1.0),
    dict(temperature=1.3, top_k=7, top_p=0.8),
])
@pytest.mark.parametrize("cap,bias", [(None, False), (3.0, True)])
def test_the_heads_gradient_written_by_hand_is_that_of_finite_differences(policy, cap, bias, monkeypatch):
    """Log-probability, entropy and exact KL, with a soft cap, a bias, a kept support, over several chunks, in float64."""
    monkeypatch.setattr(chunked_head, "tokens_in_chunk", lambda vocab_size, device: 2)
    draws = torch.Generator().manual_seed(0)
    tokens, width, size = 5, 4, 11

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    hidden, weight, other = normal(tokens, width), 2 * normal(size, width), normal(size, width)
    fixed, offset = hidden.clone(), normal(size) if bias else None
    chosen = torch.randint(0, size, (tokens,), generator=draws)

    def shape(raw, chosen):
        return restrict_logits(raw if cap is None else torch.tanh(raw / cap) * cap, chosen=chosen, **policy)

    def ours(hidden, weight, offset=None):
        return chunked_head.HeadLogProbs.apply(hidden, weight, offset, chosen, shape, fixed, lambda hidden: hidden @ other.T)

    leaves = [part.requires_grad_() for part in (hidden, weight, offset) if part is not None]
    if policy["top_p"] == 1:                              # the kept support must not change under a finite difference
        assert torch.autograd.gradcheck(ours, leaves)
    logp, entropy, kl = ours(*leaves)
    log_probs = shape(hidden @ weight.T + (0 if offset is None else offset), chosen).log_softmax(-1)
    probs, kept = log_probs.exp(), log_probs.isfinite()
    log_q = (fixed @ other.T).masked_fill(~kept, -torch.inf).log_softmax(-1)
    dense = (
        log_probs.gather(-1, chosen[:, None])[:, 0], -(probs * torch.where(kept, log_probs, 0.0)).sum(-1),
        (probs * (torch.where(kept, log_probs, 0.0) - torch.where(kept, log_q, 0.0))).sum(-1),
    )
    for mine, theirs in zip((logp, entropy, kl), dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        slopes = torch.arange(1, tokens + 1)
        gradients = [torch.autograd.grad((part * slopes).sum(), leaves, retain_graph=True) for part in (mine, theirs)]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the blocks of glibc's malloc")
def test_chunks_of_the_head_use_the_same_memory_one_after_the_other():
    """What a chunk leaves must not split the free blocks: 24 chunks of 16 MB each once took 1.6 GB."""
    program = """
import resource, torch
from engine.host import keep_freed_memory
from engine.chunked_head import HeadLogProbs
keep_freed_memory()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hidden, weight = torch.randn(24 * 128, 8, requires_grad=True), torch.randn(32768, 8)
before = peak()
parts = HeadLogProbs.apply(hidden, weight, None, torch.arange(24 * 128), lambda raw, chosen: raw, None, None)
parts[0].sum().backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 16 * 15, f"{float(done.stdout):.0f} MB more for logits of 16 MB a chunk"
