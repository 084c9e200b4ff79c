"""Sampling a token: the right distribution, possible tokens only, a random stream for each completion."""

from collections import Counter

import pytest
import torch

from engine.sampler import SamplingState, find_interval, sample_inverse_cdf
from logprobs import restrict_logits
from sample import uniform_streams


def test_a_repeated_prompt_and_every_sibling_have_streams_of_their_own():
    streams = uniform_streams([[1, 2], [3], [1, 2]], [0, 0, 1], 2, 5, seed=0)
    assert streams.shape == (6, 5) and len({tuple(row) for row in streams.tolist()}) == 6
    assert (streams[2] == uniform_streams([[3]], [0], 2, 9, seed=0)[0, :5]).all()


@pytest.mark.parametrize("temperature,top_k,top_p", [(1.0, 0, 1.0), (0.8, 5, 0.9), (2.0, 0, 0.6)])
def test_drawn_tokens_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square against the enumerated probabilities of eight tokens."""
    n = 20000
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5]])
    logits = restrict_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logp = sample_inverse_cdf(logits.expand(n, -1), torch.rand(n, generator=torch.Generator().manual_seed(0)))
    probs = logits[0].softmax(0)
    counts = Counter(tokens.tolist())
    assert all(probs[token] > 0 for token in counts)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probs.tolist()) if p > 0)
    assert chi_square < 30, "of at most 7 degrees of freedom; 30 has probability 1e-4"
    torch.testing.assert_close(logp, probs.log()[tokens])


def test_the_ends_of_the_unit_interval_draw_possible_tokens():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    tokens, _ = sample_inverse_cdf(logits, torch.tensor([0.0, 1.0]))    # what u * total may round up to
    assert tokens.tolist() == [1, 2]


@pytest.mark.parametrize("lengths,ends,goal,index,distance", [
    ([1.0, 1.0], [1.0, 2.0], 1.0, 1, 0.0),                # an interval does not contain its end
    ([0.5, 0.0, 0.5], [0.5, 0.625, 1.0], 0.5625, 2, -0.0625),                    # rounded ends: never an empty interval
    ([0.5, 0.5, 0.0], [0.5, 1.0, 1.0], 1.0, 1, 0.5),      # beyond the last end: the last interval that is not empty
    ([0.0, 2.0], [0.0, 2.0], 0.5, 1, 0.5),
])
def test_the_interval_of_a_point(lengths, ends, goal, index, distance):
    found, inside = find_interval(torch.tensor([lengths]), torch.tensor([ends]), torch.tensor([[goal]]))
    assert (found.item(), inside.item()) == (index, distance)


def test_a_completion_of_full_length_gets_no_more_tokens():
    policy = dict(temperature=1.0, top_k=0, top_p=1.0)
    state = SamplingState(torch.full((2, 3), 0.5), [9], 0, policy, torch.device("cpu"))
    for _ in range(5):
        state.step(torch.tensor([0, 1]), torch.zeros(2, 5))
    ids, drawn, mask, logp, stopped = state.results()
    assert torch.equal(drawn, mask) and ids.tolist() == [[2, 2, 2]] * 2 and mask.all() and not stopped.any()
    torch.testing.assert_close(logp, torch.full((2, 3), 0.2).log())
