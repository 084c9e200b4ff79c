"""The packed cache: what is rearranged stays right, and models that cannot be packed are sampled from all the same."""

import pytest
import torch
from conftest import PROMPTS

import cache
import sample
from check import can_share_prompts, check_setup
from config import GRPOConfig
from logprobs import completion_log_probs
from engine.packing import Places, may_look
from sample import sample_completions_for_prompts

EARLY = list(range(1, 30))                                # stop ids, so that completions end at different times
ANY = dict(generation_max_length=40, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)


def test_growing_closing_ranks_and_refilling_change_no_log_probability(architecture, tokenizer, monkeypatch):
    """Ten prompts, twelve completions at once, room for two steps at first: the cache is rearranged all the time."""
    _, model = architecture
    model.generation_config.eos_token_id = EARLY
    arrangements = []
    real = cache.PackedCache.arrange

    def counted(self, owners, prompts, nobody, steps):
        result = real(self, owners, prompts, nobody, steps)
        arrangements.append((result.shape[1], int((result != nobody).sum())))
        return result

    monkeypatch.setattr(cache.PackedCache, "arrange", counted)
    monkeypatch.setattr(sample, "FIRST_STEPS", 2)
    monkeypatch.setattr(cache, "COLUMNS_PER_TOKEN", 10)   # share even such short prompts
    prompts = PROMPTS * 2 + ["x", "another one"]
    config = GRPOConfig(num_completions_per_prompt=3, generation_batch_size=12, **ANY)
    queued = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=3)
    assert len(arrangements) > 5 and len({slots for slots, _ in arrangements}) > 1, "rows of different width were used"
    assert max(active for _, active in arrangements) <= 12
    trained = completion_log_probs(model, queued, temperature=1.0, shared_prompt=False)
    assert (queued.sampling_logp - trained.logp).abs().max() < 1e-4
    arrangements.clear()
    together = sample_completions_for_prompts(
        model, tokenizer, prompts, GRPOConfig(num_completions_per_prompt=3, **ANY), seed=3
    )
    assert together.completions == queued.completions, "the queue makes no difference to what is drawn"
    assert arrangements[0][1] > 20, "all of them at once"


def test_a_rearranged_cache_answers_as_before(model):
    """Logits of a next token, with all completions in the cache and with those that are left, in rows of another width."""
    torch.manual_seed(0)
    ids = torch.randint(3, 200, (2, 7))
    places = Places(torch.tensor([[0], [1]]).expand(2, 7).contiguous(), torch.zeros_like(ids), torch.arange(7).expand(2, 7))
    tokens = torch.randint(3, 200, (8, 6))                # of eight completions

    def ask(packed, owners, t):
        at = Places(torch.where(owners == 8, -1, owners // 4), owners + 1, torch.where(owners == 8, 0, 7 + t))
        logits = packed.forward(tokens[owners.clamp(max=7), t], at)
        return dict(zip(owners.flatten().tolist(), logits, strict=True))

    with torch.no_grad():
        packed = cache.PackedCache(model, ids, places)
        owners = packed.arrange(list(range(8)), [0] * 4 + [1] * 4, 8, 5)
        for t in range(5):
            before = ask(packed, owners, t)
        other = cache.PackedCache(model, ids, places)
        owners = other.arrange(list(range(8)), [0] * 4 + [1] * 4, 8, 4)
        for t in range(4):
            ask(other, owners, t)
        left = [0, 2, 3, 5]
        owners = other.arrange(left, [0, 0, 0, 1], 8, 3)
        after = ask(other, owners, 4)
    assert set(after) - {8} == set(left)
    for owner in left:
        torch.testing.assert_close(after[owner], before[owner], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "sizes,lengths,slots",
    [([8, 8], [500, 500], 8), ([8, 1], [10, 10], 1), ([8, 1], [10000, 10000], 8), ([1, 1, 1], [5, 5, 5], 1)],
)
def test_siblings_share_a_row_where_few_slots_stay_empty(sizes, lengths, slots):
    assert cache.best_number_of_slots(sizes, lengths) == slots


def test_who_sees_whom():
    """Written out for two prompts of two tokens, with completions of one token, behind each other in one pack."""
    places = Places(*torch.tensor([
        [0, 0, 0, 0, 1, 1, 1, -1],                        # prompt
        [0, 0, 1, 2, 0, 0, 3, 0],                         # sibling
        [0, 1, 2, 2, 0, 1, 2, 0],                         # position
    ]))
    seen = may_look(places[:, None], places[None, :]).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],                         # the first completion: its prompt and itself
        [1, 1, 0, 1, 0, 0, 0, 0],                         # its sibling
        [0, 0, 0, 0, 1, 0, 0, 0],                         # another prompt
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],                         # padding
    ]
    windowed = may_look(places[:, None], places[None, :], window=2).int().tolist()
    assert windowed[3] == [0, 1, 0, 1, 0, 0, 0, 0], "counted in positions: the sibling in between does not matter"


def test_a_model_that_cannot_be_packed_is_sampled_and_trained_in_rows(convolutional, tokenizer):
    prompts = ["1+1=?", "2+2=?"]                          # of one length: its convolutions would see padding
    assert not can_share_prompts(convolutional, tokenizer, prompts[0])
    config = GRPOConfig(num_completions_per_prompt=2, generation_batch_size=2, **ANY)
    rollout = sample_completions_for_prompts(convolutional, tokenizer, prompts, config, seed=0, shared_prompt=False)
    trained = completion_log_probs(convolutional, rollout, shared_prompt=False)
    assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4
    findings = {f.name: f for f in check_setup(convolutional, tokenizer, [{"prompt": p} for p in prompts], config, [])}
    assert findings["packing"].ok is None and findings["sampler"].ok


def test_a_model_with_keys_and_values_alone_can(model, tokenizer):
    assert can_share_prompts(model, tokenizer, "1+1=?")


def test_a_long_queue_does_not_widen_the_cache(model, tokenizer, monkeypatch):
    """Sixty prompts, four at once, one of them long: rows stay as wide as a prompt, its completions and the next steps."""
    widths = []
    real = cache.PackedCache.arrange

    def noted(self, *args):
        result = real(self, *args)
        widths.append(self.places.prompt.shape[1])
        return result

    monkeypatch.setattr(cache.PackedCache, "arrange", noted)
    model.generation_config.eos_token_id = EARLY
    prompts = ["what is 12 plus 34 plus 56?" for _ in range(60)]              # 28 tokens
    config = GRPOConfig(num_completions_per_prompt=2, **ANY | {"generation_max_length": 16})
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0, num_completions=1, at_once=4)
    assert len(widths) > 15 and max(widths) <= 64, widths
    assert len(set(rollout.completions)) > 10 and rollout.completion_mask.any(dim=1).all()


def test_prompts_are_no_wider_than_those_they_begin_with(model, tokenizer, monkeypatch):
    widths = []
    real = cache.PackedCache.__init__

    def noted(self, model, ids, places):
        widths.append(ids.shape[1])
        real(self, model, ids, places)

    monkeypatch.setattr(cache.PackedCache, "__init__", noted)
    config = GRPOConfig(num_completions_per_prompt=2, **ANY)
    sample_completions_for_prompts(model, tokenizer, ["a long prompt among short ones", "x", "y"], config, seed=0, at_once=2)
    assert sorted(widths) == [2, 2, 31]


def test_a_cache_that_nobody_needs_any_more_is_not_kept(model, tokenizer, monkeypatch):
    monkeypatch.setattr(cache.PackedCache, "join", lambda self, other: pytest.fail("joined to what is done"))
    config = GRPOConfig(num_completions_per_prompt=2, **ANY | {"generation_max_length": 1})
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, config, seed=0, at_once=2)
    assert rollout.completion_mask.shape == (8, 1)


def test_logits_that_are_not_finite_are_named(model, tokenizer, settings):
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(AssertionError, match="not finite"):
        sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
