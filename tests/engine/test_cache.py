"""The key-value cache and the sampler of the shared engine: what is held, forwarded and compacted; intervals and lengths."""

from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS, watch_calls

from config import GRPOConfig
from engine import cache, sampler
from engine.network import set_precision
from engine.sampler import SamplingState, find_interval
from sample import LogitsError

ANY = dict(generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)


@pytest.fixture
def compactions(monkeypatch):
    """(completions, rows, the cache) of every call of compact."""
    calls, real = [], cache.PrefixCache.compact

    def noted(self, row_ids, *args):
        result = real(self, row_ids, *args)
        calls.append((len(row_ids), len(result), self))
        return result

    monkeypatch.setattr(cache.PrefixCache, "compact", noted)
    return calls


def test_the_cache_is_compacted_as_completions_end_and_grow(shared, monkeypatch, compactions):
    shared.model.generation_config.eos_token_id = list(range(1, 30))             # completions end at different times
    prompts, config = PROMPTS * 2 + ["x", "another one"], GRPOConfig(num_completions_per_prompt=3, **ANY)

    def sample(size, capacity, kept=0):
        monkeypatch.setitem(sampler.INITIAL_CAPACITY, "cpu", capacity)
        monkeypatch.setitem(sampler.KEPT_TOKENS, "cpu", kept)
        compactions.clear()
        return shared.sample(prompts, replace(config, generation_batch_size=size), seeds=3).completions

    queued = sample(12, capacity=2)
    assert len(compactions) > 5 and max(active for active, _, _ in compactions) <= 12
    assert sample(0, capacity=2) == queued and compactions[0][0] > 20, "all of them at once"
    assert all(rows <= 3 * active for active, rows, _ in compactions), "finished completions leave the batch"
    assert sample(0, capacity=64, kept=2**14) == queued and len(compactions) == 1, "as on CUDA"
    assert sample(12, capacity=64, kept=2**14) == queued and len(compactions) > 3, "prompts that wait begin as soon as others have ended"


def test_a_prompt_is_held_once_for_two_siblings_in_the_layers_precision(shared, compactions):
    for precision, dtype in ("float32", torch.float32), ("bfloat16", torch.bfloat16):
        config = GRPOConfig(num_completions_per_prompt=8, **ANY | {"generation_max_length": 10})
        set_precision(shared.model, precision)
        shared.sample(["a prompt of 23 tokens"], config, seeds=0)
        assert {(keys.shape, keys.dtype) for keys, _ in compactions[-1][2].layers} == {((4, 22 + 2 * 9, 2, 8), dtype)}, "a row for two siblings"


def test_prompts_are_forwarded_end_to_end_without_padding(shared, monkeypatch):
    passes = watch_calls(monkeypatch, cache, "forward_packed")
    config = GRPOConfig(num_completions_per_prompt=2, **ANY | {"generation_max_length": 1})
    shared.sample(["a long prompt among short ones", "x", "y"], config, seeds=0)
    assert [tuple(ids.shape) for _, ids, *_ in passes] == [(1, 31 + 2 + 2)]


def test_logits_that_are_not_finite_are_named(shared, settings):
    with torch.no_grad():
        shared.model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(LogitsError, match="not finite"):
        shared.sample(PROMPTS, settings, seeds=0)


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
