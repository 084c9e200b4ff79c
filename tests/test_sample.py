"""Sampling: the right distribution, the same numbers as in training, masks by position, reproducible streams."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS

from config import GRPOConfig
from data import encode_prompt
from engine import cache, make_engine, sampler
from engine.plain import Engine
from engine.vllm_engine import VLLM
from environments.conversations import sample_with_environment
from runs.groups import join_rollouts, select_groups
from sample import Rollout, left_pad, pad_rows, stop_token_ids


def test_sampler_and_trainer_agree_on_every_log_probability(architecture, tokenizer, settings):
    engine = make_engine("shared", architecture[1], tokenizer)
    for policy in settings, replace(settings, generation_temperature=1.3, generation_top_p=1.0, generation_top_k=0):
        rollout = engine.sample(PROMPTS, policy, seed=1)
        trained = engine.log_probs(rollout, None, policy.policy)
        assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4
        assert rollout.completion_mask.any(dim=1).all()


def test_shapes_and_masks_by_position(shared, model, tokenizer):
    model.generation_config.eos_token_id = [1, 40, 41, 42, 43, 44, 45, 46]       # several stop ids, so that rows end early
    config = GRPOConfig(num_completions_per_prompt=8, generation_max_length=30, generation_top_k=0, generation_top_p=1.0)
    rollout = shared.sample(PROMPTS, config, seed=0)
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
    engine = make_engine("shared", model, tokenizer)
    rollout = engine.sample(PROMPTS, config, seed=0)
    if pad == 50:
        assert (rollout.completion_ids == 50)[rollout.completion_mask].any(), "the pad token was sampled"
    trained = engine.log_probs(rollout, None, config.policy)
    assert (rollout.sampling_logp - trained.logp).abs().max() < 1e-4


def test_the_same_completion_alone_in_a_batch_and_after_others_have_finished(shared, monkeypatch):
    shared.model.generation_config.eos_token_id = list(range(1, 30))             # rows end at different times
    config = GRPOConfig(num_completions_per_prompt=4, generation_max_length=30, generation_top_k=0, generation_top_p=1.0)
    together = shared.sample(PROMPTS[:3], config, seed=7)
    assert len(set(together.completion_mask.sum(1).tolist())) > 3
    for i, prompt in enumerate(PROMPTS[:3]):
        alone = shared.sample([prompt], config, seed=7)
        assert alone.completions == together.completions[4 * i : 4 * i + 4]
    monkeypatch.setattr(sampler, "INITIAL_CAPACITY", 5)
    monkeypatch.setattr(cache, "COLUMNS_AT_ONCE", 4)
    at_once, queued = (shared.sample(
        PROMPTS * 2, replace(config, generation_batch_size=size), seed=7, num_completions=1) for size in (8, 3))
    assert queued.completions == at_once.completions      # some begin while others are long
    torch.testing.assert_close(queued.sampling_logp, at_once.sampling_logp, atol=1e-5, rtol=1e-5)
    for steps in 3, 100:                                  # between two looks at which rows have ended
        monkeypatch.setitem(sampler.STEPS_BETWEEN_CHECKS, "cpu", steps)
        seldom = shared.sample(PROMPTS[:3], config, seed=7)
        assert torch.equal(seldom.completion_ids, together.completion_ids) and torch.equal(seldom.completion_mask, together.completion_mask)
        torch.testing.assert_close(seldom.sampling_logp, together.sampling_logp, atol=1e-5, rtol=1e-5)
    other_seed = shared.sample(PROMPTS[:3], config, seed=8)
    assert other_seed.completions != together.completions
    assert len(set(together.completions)) > 6, "siblings differ"


def test_temperature_zero_takes_the_likeliest_token(shared, model, tokenizer):
    config = GRPOConfig(generation_temperature=0.0, generation_max_length=8)
    rollout = shared.sample(PROMPTS, config, seed=0)
    for row, completion in enumerate(rollout.completion_ids):
        ids = encode_prompt(tokenizer, PROMPTS[row // 4])
        for token in completion[rollout.completion_mask[row]].tolist():
            assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(token)
    assert not rollout.sampling_logp.any() and rollout.completion_mask.sum() > 64


def test_a_queue_takes_as_many_prompts_as_there_is_room_for(monkeypatch):
    """Groups of two completions, three at once."""
    trace, ends = [], iter([1, 1, 3, 2, 5])               # rows that end in each call of decode

    def prefill(model, prompts, new, state, cache, group_size):
        trace.append(f"new {''.join(map(str, new))}")
        return [p * group_size + g for p in new for g in range(group_size)]

    def decode(model, active, state, cache, group_size):
        trace.append(f"decode {len(active)}")
        return active[next(ends) :]

    for name, stand_in in ("prefill", prefill), ("decode", decode), ("PrefixCache", lambda _: None):
        monkeypatch.setattr(sampler, name, stand_in)
    sampler.sample_from_queue(None, [[1]] * 6, SimpleNamespace(active_rows=list), 2, groups_at_once=3)
    assert ", ".join(trace) == "new 012, decode 6, decode 5, new 3, decode 6, new 4, decode 5, new 5, decode 5"


@pytest.mark.parametrize("with_turns", [False, True])
def test_rollouts_are_joined_and_groups_selected_as_if_sampled_so(with_turns):
    def rollout(first, widths, lengths):
        ids = [[first + 10 * row + t for t in range(n)] for row, n in enumerate(lengths)]
        prompts, completions = [list(range(first, first + n)) for n in widths], pad_rows(ids)
        mask = pad_rows([[True] * n for n in lengths])
        points = completions / 8 if with_turns else None
        return Rollout(*left_pad(prompts, 0), completions, mask, -completions / 4, mask[:, 0], [f"{first}-{n}" for n in lengths], points)

    parts = rollout(100, [2, 3], [4, 1, 2, 2]), rollout(200, [5], [6, 3])
    joined = join_rollouts(parts)
    assert [ids[mask].tolist() for ids, mask in zip(joined.prompt_ids, joined.prompt_mask)] == [[100, 101], [100, 101, 102], [*range(200, 205)]]
    assert joined.prompt_mask.tolist() == [[False] * 3 + [True] * 2, [False] * 2 + [True] * 3, [True] * 5]
    assert joined.completion_mask.sum(dim=1).tolist() == [4, 1, 2, 2, 6, 3] and not (joined.completion_mask[:, 1:] & ~joined.completion_mask[:, :-1]).any()
    assert joined.completion_ids[4].tolist() == [200, 201, 202, 203, 204, 205] and joined.completion_ids[0].tolist() == [100, 101, 102, 103, 0, 0]
    assert torch.equal(joined.sampling_logp, -joined.completion_ids / 4) and joined.finished.all()
    assert joined.completions == ["100-4", "100-1", "100-2", "100-2", "200-6", "200-3"]
    chosen = select_groups(joined, torch.tensor([False, True, True]))
    for part in (joined, chosen) if with_turns else ():
        assert torch.equal(part.turn_points, part.completion_ids / 8)
    assert chosen.completions == joined.completions[2:] and torch.equal(chosen.prompt_ids, joined.prompt_ids[1:])
    for name in "prompt_mask", "completion_ids", "completion_mask", "sampling_logp", "finished":
        assert torch.equal(getattr(chosen, name), getattr(joined, name)[1 if name == "prompt_mask" else 2 :]), name
    assert with_turns or chosen.turn_points is joined.turn_points is None


def test_sampling_leaves_the_model_as_it_was(shared, model, settings):
    def look(tokens):
        assert not model.training and not torch.is_grad_enabled()
        assert model.config._attn_implementation == "prefix_attention"
        raise KeyError

    model.train()
    with pytest.raises(KeyError):
        shared.sample(PROMPTS, settings, seed=0, on_tokens=look)
    assert model.training and torch.is_grad_enabled() and model.config._attn_implementation == "sdpa"


class Scripted(VLLM):
    """Draws prescribed tokens in place of vLLM: siblings end after 1, 2, 3 ... tokens, and remembers the requests."""

    def __init__(self, *args):
        Engine.__init__(self, *args)
        self.requests = []

    def generate(self, prompts, *, num_completions, max_tokens, seeds, stop_ids, policy):
        self.requests.append(dict(prompts=prompts, n=num_completions, max_tokens=max_tokens, seeds=seeds, policy=policy))
        turns = []
        for limit in max_tokens:
            rows = [([50 + g] * g + [stop_ids[0]] for g in range(num_completions))] if num_completions > 1 else [[[60, stop_ids[0]]]]
            turns.append([(ids[:limit], [-0.5] * len(ids[:limit]), ids[:limit][-1] in stop_ids) for ids in rows[0]])
        return turns


def test_an_engine_fills_the_same_rollout(model, tokenizer):
    engine, again = Scripted(model, tokenizer), Scripted(model, tokenizer)
    config = GRPOConfig(engine="vllm", num_completions_per_prompt=4, generation_max_length=3, generation_temperature=0.5)
    rollout = engine.sample(PROMPTS, config, seed=0)
    (request,) = engine.requests
    assert request["prompts"] == [encode_prompt(tokenizer, prompt) for prompt in PROMPTS] and request["n"] == 4
    assert request["policy"] == dict(temperature=0.5, top_k=50, top_p=0.9) and request["max_tokens"] == [3] * len(PROMPTS)
    assert len(set(request["seeds"])) == len(PROMPTS)
    assert rollout.completion_mask.sum(dim=1).tolist() == [1, 2, 3, 3] * len(PROMPTS)
    assert rollout.finished.tolist() == [True, True, True, False] * len(PROMPTS)         # the last met the limit
    assert torch.equal(rollout.sampling_logp, torch.where(rollout.completion_mask, -0.5, 0.0))
    assert rollout.completions[:3] == [tokenizer.decode([50 + g] * g) for g in range(3)]
    again.sample(PROMPTS, config, seed=0)
    assert again.requests == engine.requests


def test_an_engine_continues_conversations_after_each_reply(model, tokenizer):
    replies = {1: "no", 2: ({"role": "user", "content": "more"}, 0.5), 3: None}

    def respond(messages):
        return replies[sum(message["role"] == "assistant" for message in messages)]

    engine = Scripted(model, tokenizer)
    config = GRPOConfig(
        engine="vllm", num_completions_per_prompt=2, generation_max_length=80, environment="calculator", max_turns=4)
    rollout = sample_with_environment(engine, respond, [{"prompt": prompt} for prompt in PROMPTS[:2]], config, seed=0)
    first, second, third = engine.requests
    assert first["n"] == 2 and second["n"] == third["n"] == 1
    assert [len(request["prompts"]) for request in engine.requests] == [2, 4, 4]
    for row, prompt in enumerate(second["prompts"]):
        start = len(first["prompts"][row // 2])
        assert prompt[:start] == first["prompts"][row // 2]
        sampled = rollout.completion_mask[row].tolist()
        assert prompt[start:] == rollout.completion_ids[row, : len(prompt) - start].tolist()
        assert second["max_tokens"][row] == 80 - (len(prompt) - start)
        assert sampled[: len(prompt) - start].count(False) > 0       # tokens of the reply
    assert (rollout.sampling_logp == torch.where(rollout.completion_mask, -0.5, 0.0)).all()
    assert all([m["content"] for m in messages if m["role"] == "user"] == ["no", "more"] for messages in rollout.completions)
    assert rollout.finished.all() and rollout.turn_points.sum(dim=1).tolist() == [0.5] * 4
