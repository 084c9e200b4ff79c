"""The sampler of the shared engine: intervals and lengths."""

import pytest
import torch

from engine import sampler
from engine.sampler import SamplingState, find_interval


def test_what_u_times_the_total_may_round_up_to_draws_a_possible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert sampler.sample_in_blocks(logits, torch.tensor([1.0]))[0].tolist() == [2]


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
