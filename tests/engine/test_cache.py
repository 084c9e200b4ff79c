"""The key-value cache: what is compacted stays right, memory is bounded, models with recurrent layers are sampled as well."""

from dataclasses import replace

import pytest
import torch
from conftest import CURRENT_ARCHITECTURES, PROMPTS

from runs.startup_check import check_setup, choose_engine
from config import GRPOConfig
from engine import cache, make_engine, sampler
from engine.prefix_attention import use_prefix_attention
from engine.precision import with_precision
from engine.ranks import OneRank
from logprobs import completion_log_probs

EARLY = list(range(1, 30))                                # stop ids, so that completions end at different times
ANY = dict(generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)


@pytest.fixture
def compactions(monkeypatch):
    """(completions, rows, capacity) of every call of compact."""
    calls = []
    real = cache.PrefixCache.compact

    def noted(self, row_ids, prompt_of, dummy, capacity):
        result = real(self, row_ids, prompt_of, dummy, capacity)
        calls.append((len(row_ids), len(result), capacity))
        return result

    monkeypatch.setattr(cache.PrefixCache, "compact", noted)
    return calls


def test_growing_compacting_and_refilling_change_no_log_probability(architecture, tokenizer, monkeypatch, compactions):
    """Ten prompts, twelve completions at once, room for two steps at first: the cache is compacted all the time."""
    _, model = architecture
    model.generation_config.eos_token_id = EARLY
    monkeypatch.setattr(sampler, "INITIAL_CAPACITY", 2)
    monkeypatch.setattr(cache, "COLUMNS_AT_ONCE", 3)
    prompts = PROMPTS * 2 + ["x", "another one"]
    engine, config = make_engine("shared", model, tokenizer), GRPOConfig(num_completions_per_prompt=3, **ANY)
    queued = engine.sample(prompts, replace(config, generation_batch_size=12), seed=3)
    assert len(compactions) > 5 and max(active for active, _, _ in compactions) <= 12
    trained = completion_log_probs(model, queued, temperature=1.0)
    assert (queued.sampling_logp - trained.logp).abs().max() < 1e-4
    compactions.clear()
    together = engine.sample(prompts, config, seed=3)
    assert together.completions == queued.completions, "the queue makes no difference to what is drawn"
    assert compactions[0][0] > 20, "all of them at once"
    assert all(rows == active for active, rows, _ in compactions), "finished completions leave the batch"


@pytest.mark.parametrize("lengths", [(7, 7), (7, 4), (2, 9)])
@pytest.mark.parametrize("left,prompt_of", [([0, 2, 3, 5], [0, 0, 0, 1]), ([5, 2, 7, 0, 4], [1, 0, 1, 0, 1]), ([6, 7], [1, 1])])
def test_a_compacted_cache_answers_as_before_and_a_token_forwarded_twice_changes_nothing(model, lengths, left, prompt_of):
    """Hidden states of a next token, with all completions in the cache and with those that are left, in any order."""
    torch.manual_seed(0)
    prompts = [torch.randint(3, 200, (length,)).tolist() for length in lengths]
    tokens = torch.randint(3, 200, (8, 6))                # of eight completions

    def forward(held, row_ids, t):
        hidden = held.forward(tokens[row_ids, t], torch.full((len(row_ids),), t + 1), t + 1)
        return dict(zip(row_ids.tolist(), hidden, strict=True))

    with torch.no_grad(), use_prefix_attention(model):
        held = cache.PrefixCache(model)
        held.add_prompts([0, 1], prompts)
        row_ids = held.compact(list(range(8)), [0] * 4 + [1] * 4, 8, 5)
        for t in range(5):
            before = forward(held, row_ids, t)
        again = forward(held, row_ids, 4)
        other = cache.PrefixCache(model)
        other.add_prompts([0], prompts[:1])
        other.add_prompts([1], prompts[1:])               # later than the other one
        row_ids = other.compact(list(range(8)), [0] * 4 + [1] * 4, 8, 4)
        for t in range(4):
            forward(other, row_ids, t)
        after = forward(other, other.compact(left, prompt_of, 8, 7), 4)
    assert set(after) == set(left)
    for row in range(8):
        torch.testing.assert_close(again[row], before[row], atol=0, rtol=0)
    for row in left:
        torch.testing.assert_close(after[row], before[row], atol=1e-5, rtol=1e-5)


def test_a_prompt_is_held_once_in_the_layers_precision_and_no_more_than_its_window(shared, monkeypatch):
    held = []
    real = cache.PrefixCache.compact

    def noted(self, *args):
        result = real(self, *args)
        held[:] = [(layer.prompt_keys, layer.keys) for layer in self.layers]
        return result

    monkeypatch.setattr(cache.PrefixCache, "compact", noted)
    for precision, dtype in ("float32", torch.float32), ("bfloat16", torch.bfloat16):
        held.clear()
        config = GRPOConfig(num_completions_per_prompt=8, **ANY | {"generation_max_length": 10})
        with_precision(shared.model, precision)
        shared.sample(["a prompt of 23 tokens"], config, seed=0)
        (windowed, own), (full, _) = held                 # the first layer has a window of 5
        assert windowed.shape == (1, 2, 4, 8) and full.shape == (1, 2, 22, 8) and own.shape == (8, 2, 9, 8)
        assert {part.dtype for pair in held for part in pair} == {dtype}


def test_layers_that_share_keys_have_one_cache_between_them(tokenizer, monkeypatch):
    caches = []
    real = cache.PrefixCache.__init__
    monkeypatch.setattr(cache.PrefixCache, "__init__", lambda self, model: (caches.append(self), real(self, model))[1])
    torch.manual_seed(0)
    model = CURRENT_ARCHITECTURES["gemma4_shared_keys"]().eval()
    for precision in "float32", "bfloat16":
        with_precision(model, precision)
        make_engine("shared", model, tokenizer).sample(PROMPTS[:1], GRPOConfig(num_completions_per_prompt=2, **ANY), seed=0)
        assert model.config.num_hidden_layers == 4 and len(caches.pop().layers) == 2


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_model_with_state_forwards_prompts_once_and_is_trained_in_rows(name, tokenizer):
    torch.manual_seed(0)
    model = CURRENT_ARCHITECTURES[name]().eval()
    model.generation_config.eos_token_id = EARLY
    prompts, plain = ["1+1=?", "2+2=?", "3+3=?"], make_engine("plain", model, tokenizer)
    config = GRPOConfig(num_completions_per_prompt=4, generation_batch_size=8, **ANY)
    engine, packing = choose_engine(plain, OneRank(), prompts, config)
    assert engine is plain and packing.ok is None and "plain rows instead" in packing.found
    shapes = []
    hook = model.base_model.register_forward_pre_hook(lambda _, args, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True)
    rollout = engine.sample(prompts, config, seed=0)
    hook.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [(2, 6), (1, 6)], "each prompt once"
    assert min(rows for rows, columns in shapes if columns == 1) < 3, "finished completions leave the batch"
    trained = engine.log_probs(rollout, None, {})
    assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4
    findings = {f.name: f for f in check_setup(engine, [{"prompt": p} for p in prompts], config, [])}
    assert findings["sampler"].ok


def test_a_long_queue_does_not_widen_the_cache(shared, compactions):
    """Sixty prompts, four at once: rows have room for a completion, whatever number of them has been there before."""
    shared.model.generation_config.eos_token_id = EARLY
    prompts = ["what is 12 plus 34 plus 56?" for _ in range(60)]
    config = GRPOConfig(num_completions_per_prompt=2, generation_batch_size=4, **ANY | {"generation_max_length": 16})
    rollout = shared.sample(prompts, config, seed=0, num_completions=1)
    assert len(compactions) > 15 and max(capacity for _, _, capacity in compactions) == 15
    assert max(rows for _, rows, _ in compactions) == 4
    assert len(set(rollout.completions)) > 10 and rollout.completion_mask.any(dim=1).all()


def test_prompts_are_forwarded_end_to_end_without_padding(shared, monkeypatch):
    sizes = []
    real = cache.forward_packed
    monkeypatch.setattr(cache, "forward_packed", lambda model, ids, *args: (
        sizes.append(tuple(ids.shape)), real(model, ids, *args))[1])
    config = GRPOConfig(num_completions_per_prompt=2, **ANY | {"generation_max_length": 1})
    shared.sample(["a long prompt among short ones", "x", "y"], config, seed=0)
    assert sizes == [(1, 31 + 2 + 2)]


def test_what_is_done_leaves_the_cache_before_new_prompts_come(shared, monkeypatch):
    held = []
    real = cache.PrefixCache.add_prompts

    def noted(self, *args):
        held.append(len(self.prompts))
        return real(self, *args)

    monkeypatch.setattr(cache.PrefixCache, "add_prompts", noted)
    config = GRPOConfig(num_completions_per_prompt=2, generation_batch_size=2, **ANY | {"generation_max_length": 1})
    rollout = shared.sample(PROMPTS, config, seed=0)
    assert rollout.completion_mask.shape == (8, 1) and held == [0, 0, 0, 0]


def test_logits_that_are_not_finite_are_named(shared, settings):
    with torch.no_grad():
        shared.model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(AssertionError, match="not finite"):
        shared.sample(PROMPTS, settings, seed=0)
