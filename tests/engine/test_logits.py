"""Temperature, top-k and top-p: the kept tokens are those of a sorted list."""

import pytest
import torch

from logprobs import restrict_logits


def kept_by_hand(logits, temperature, top_k, top_p):
    """Ids that survive, from a sorted list of Python floats."""
    probs = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    total, kept, before = sum(probs[i] for i in order), [], 0.0
    for i in order:
        if before / total < top_p:
            kept.append(i)
        before += probs[i]
    return sorted(kept)


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.5, 0, 0.8), (1.0, 3, 1.0), (2.0, 5, 0.7), (1.0, 1, 0.1)])
def test_the_kept_support_is_that_of_a_sorted_list(temperature, top_k, top_p):
    logits = [0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5]
    restricted = restrict_logits(torch.tensor([logits]), temperature=temperature, top_k=top_k, top_p=top_p)[0]
    assert restricted.isfinite().nonzero()[:, 0].tolist() == kept_by_hand(logits, temperature, top_k, top_p)
    kept = restricted.isfinite()
    torch.testing.assert_close(restricted[kept], torch.tensor(logits)[kept] / temperature)


def test_a_sampled_token_always_belongs_to_the_support():
    logits = torch.tensor([[5.0, 4.0, 0.0, -9.0]])
    restricted = restrict_logits(logits, temperature=1.0, top_k=2, top_p=1.0, chosen=torch.tensor([3]))
    assert restricted.isfinite().tolist() == [[True, True, False, True]]
