"""Sampling: the right distribution, the same numbers as in training, masks by position, reproducible streams."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS

from config import GRPOConfig
from data import encode_prompt
from engine.logits import restrict_logits
from logprobs import completion_log_probs
from engine.sampling_state import sample_inverse_cdf, uniform_streams
from sample import sample_completions_for_prompts, sampling_mode, stop_token_ids


def test_sampler_and_trainer_agree_on_every_log_probability(architecture, tokenizer, settings):
    _, model = architecture
    for policy in settings, replace(settings, generation_temperature=1.3, generation_top_p=1.0, generation_top_k=0):
        rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, policy, seed=1)
        trained = completion_log_probs(model, rollout, **policy.policy)
        assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4
        assert rollout.completion_mask.any(dim=1).all()


def test_shapes_and_masks_by_position(model, tokenizer):
    model.generation_config.eos_token_id = [1, 40, 41, 42, 43, 44, 45, 46]       # several stop ids, so that rows end early
    config = GRPOConfig(num_completions_per_prompt=8, generation_max_length=30, generation_top_k=0, generation_top_p=1.0)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, config, seed=0)
    stops = set(stop_token_ids(model, tokenizer))
    assert stops == {1, 40, 41, 42, 43, 44, 45, 46}
    assert len(rollout.completions) == len(rollout.completion_ids) == 32 and rollout.prompt_ids.shape[0] == 4
    assert 0 < rollout.finished.sum() < 32
    for ids, mask, finished, text in zip(
        rollout.completion_ids.tolist(), rollout.completion_mask.tolist(), rollout.finished.tolist(), rollout.completions
    ):
        first_stop = next((t for t, token in enumerate(ids) if token in stops and mask[t]), None)
        assert finished == (first_stop is not None)
        length = 30 if first_stop is None else first_stop + 1
        assert mask == [t < length for t in range(len(mask))]
        body = ids[: length - 1] if finished else ids[:length]
        assert text == tokenizer.decode(body, skip_special_tokens=True)
    for ids, mask, prompt in zip(rollout.prompt_ids, rollout.prompt_mask, PROMPTS):
        assert ids[mask].tolist() == encode_prompt(tokenizer, prompt)
        assert mask.tolist() == sorted(mask.tolist()), "padding on the left"


@pytest.mark.parametrize("pad", [1, 50])
def test_pad_may_be_a_stop_id_or_a_token_that_is_sampled(model, tokenizer, pad, settings):
    """Pad equal to EOS, and pad equal to an ordinary byte: the numbers still agree, for masks do not look at ids."""
    import copy

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    with torch.no_grad():
        model.get_output_embeddings().weight[50] *= 3
    everything = dict(generation_top_p=1.0, generation_top_k=0, generation_temperature=1.5)
    config = replace(settings, **everything, num_completions_per_prompt=16)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, config, seed=0)
    if pad == 50:
        assert (rollout.completion_ids == 50)[rollout.completion_mask].any(), "the pad token was sampled"
    trained = completion_log_probs(model, rollout, **config.policy)
    assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4


def test_the_same_completion_alone_in_a_batch_and_after_others_have_finished(model, tokenizer):
    model.generation_config.eos_token_id = list(range(1, 30))                    # rows end at different times
    config = GRPOConfig(num_completions_per_prompt=4, generation_max_length=30, generation_top_k=0, generation_top_p=1.0)
    together = sample_completions_for_prompts(model, tokenizer, PROMPTS[:3], config, seed=7)
    assert len(set(together.completion_mask.sum(1).tolist())) > 3
    for i, prompt in enumerate(PROMPTS[:3]):
        alone = sample_completions_for_prompts(model, tokenizer, [prompt], config, seed=7)
        assert alone.completions == together.completions[4 * i : 4 * i + 4]
    other_seed = sample_completions_for_prompts(model, tokenizer, PROMPTS[:3], config, seed=8)
    assert other_seed.completions != together.completions
    assert len(set(together.completions)) > 6, "siblings differ"


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


def test_temperature_zero_takes_the_likeliest_token(model, tokenizer):
    config = GRPOConfig(generation_temperature=0.0, generation_max_length=5)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS[:1], config, seed=0)
    ids = encode_prompt(tokenizer, PROMPTS[0])
    for token in rollout.completion_ids[0, :3].tolist():
        assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
        ids.append(token)


def test_sampling_leaves_the_model_as_it_was(model):
    model.train()
    with pytest.raises(KeyError), sampling_mode(model, shared_prompt=True):
        assert not model.training and not torch.is_grad_enabled()
        assert model.config._attn_implementation == "prefix_attention"
        raise KeyError
    assert model.training and torch.is_grad_enabled() and model.config._attn_implementation == "sdpa"
