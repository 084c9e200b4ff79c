"""Sampling: the right distribution, the same numbers as in training, masks by position, reproducible streams."""

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PROMPTS

from config import GRPOConfig
from data import encode_prompt
from engine import make_engine, sampler
from engine.device_policy import DevicePolicy
from engine.shared import Shared
from engine.vllm_engine import VLLM
from environments.conversations import sample_with_environment
from experience import Groups
from logprobs import distribution_of, restrict_logits
from model import byte_tokenizer
from reward_functions.calling import Reports
from sample import (
    Rollout, concatenate, decode_completion, left_pad, make_rollout, pad_rows, sample_completions_for_prompts, sample_inverse_cdf,
    select, stop_token_ids, uniform_streams,
)


@pytest.fixture(params=["plain", "shared"])
def engine(request, model, tokenizer):
    return make_engine(request.param, model, tokenizer)


def sample_by_hand(model, prompt, uniforms, policy, stops, reply):
    """One completion alone, each token from a forward pass over everything before it: ids, mask, whether it has ended."""
    ids, drawn, added = [], [], []
    while len(ids) < len(uniforms):
        drawn.append(not added)
        if added:
            ids.append(added.pop(0))
            continue
        logits = restrict_logits(model(torch.tensor([prompt + ids])).logits[:, -1], **policy)
        ids.append(sample_inverse_cdf(logits, uniforms[len(ids), None])[0].item())
        if ids[-1] in stops:
            added = reply(ids)
            if not added:
                return ids, drawn, True
    return ids, drawn, False


@pytest.mark.parametrize("with_environment", [False, True])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt2"], indirect=True)
def test_the_plain_sampler_is_that_of_each_completion_alone_by_hand(architecture, tokenizer, with_environment, monkeypatch):
    _, model = architecture
    model.generation_config.eos_token_id = list(range(3, 70 if with_environment else 40))     # many end early
    config = GRPOConfig(num_completions_per_prompt=3, generation_max_length=14, generation_top_k=100, generation_top_p=0.95)
    stops, asked, shapes = stop_token_ids(model, tokenizer), [], []

    def reply(ids):
        return [70 + len(ids)] * (sum(ids) % 5 - 1) if with_environment else []

    prompts = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    uniforms = uniform_streams(6, 4, 3, 14)
    with torch.no_grad():
        expected = [sample_by_hand(model, prompts[row // 3], uniforms[row], distribution_of(config), stops, reply) for row in range(12)]
    assert {ended for _, _, ended in expected} == {True, False} and any(False in drawn for _, drawn, _ in expected) == with_environment
    forward = model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda **inputs: shapes.append(tuple(inputs["input_ids"].shape)) or forward(**inputs))
    for size in 0, 7:                                     # all at once, and two prompts at once
        asked.clear(), shapes.clear()
        rollout = sample_completions_for_prompts(
            model, tokenizer, PROMPTS, replace(config, generation_batch_size=size), seed=6,
            reply=(lambda row, ids: asked.append((row, ids)) or reply(ids)) if with_environment else None)
        longest = max(len(ids) for ids, _, _ in expected)
        assert rollout.completion_ids.tolist() == [ids + [0] * (longest - len(ids)) for ids, _, _ in expected]
        assert rollout.completion_mask.tolist() == [drawn + [False] * (longest - len(drawn)) for _, drawn, _ in expected]
        assert rollout.finished.tolist() == [ended for _, _, ended in expected]
        assert rollout.completions == [
            tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=True) for ids, _, ended in expected]
        turns = [(row, ids[: t + 1]) for row, (ids, drawn, _) in enumerate(expected) for t in range(len(ids)) if drawn[t] and ids[t] in stops]
        assert sorted(asked) == (turns if with_environment else [])
        if not size:                                      # rows leave when a quarter of those that are forwarded has ended
            lengths, sizes = [len(ids) for ids, _, _ in expected], [12]
            for t in range(1, longest):
                going = sum(length > t for length in lengths)
                sizes.append(going if going <= 0.75 * sizes[-1] else sizes[-1])
            assert shapes == [(4, max(map(len, prompts))), *((rows, 1) for rows in sizes[1:])]
            assert with_environment or sizes[-1] < 12
    trained = make_engine("plain", model, tokenizer).log_probs(rollout)
    torch.testing.assert_close(rollout.sampling_logp, trained.logp, atol=1e-5, rtol=1e-5)


def test_every_prompt_and_every_sibling_has_a_stream_of_its_own():
    streams = uniform_streams(0, 3, 2, 5)
    assert streams.shape == (6, 5) and len({tuple(row) for row in streams.tolist()}) == 6
    assert torch.equal(streams[2:4], uniform_streams([(0, 1)], 1, 2, 9)[:, :5])
    assert torch.equal(uniform_streams([np.int64(7)], 1, 2, 5), uniform_streams([(7,)], 1, 2, 5))
    with pytest.raises(ValueError, match=r"^seed: 2 for 3 prompts; pass one integer, or one for each$"):
        uniform_streams([0, 1], 3, 2, 5)


@pytest.mark.parametrize("draw", [sample_inverse_cdf, sampler.sample_in_blocks], ids=["plain", "shared"])
@pytest.mark.parametrize("temperature,top_k,top_p,min_p", [
    (1.0, 0, 1.0, 0.0), (0.8, 5, 0.9, 0.0), (2.0, 0, 0.6, 0.0), (1.0, 0, 1.0, 0.1)])
def test_drawn_tokens_follow_the_distribution(temperature, top_k, top_p, min_p, draw):
    n = 20000
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5]])
    logits = restrict_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, logp = draw(logits.expand(n, -1), torch.rand(n, generator=torch.Generator().manual_seed(0)))
    probs = logits[0].softmax(0)
    counts = Counter(tokens.tolist())
    assert all(probs[token] > 0 for token in counts)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate(probs.tolist()) if p > 0)
    assert chi_square < 30, "of at most 7 degrees of freedom; 30 has probability 1e-4"
    torch.testing.assert_close(logp, probs.log()[tokens])


@pytest.mark.parametrize("draw", [sample_inverse_cdf, sampler.sample_in_blocks], ids=["plain", "shared"])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(draw):
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(4, -1)
    tokens, logp = draw(logits, torch.tensor([0.0, 0.5 - 2**-24, 0.5, 1 - 2**-24]))
    assert tokens.tolist() == [1, 1, 2, 2]                # an interval contains its start and not its end
    torch.testing.assert_close(logp, torch.tensor([0.5] * 4).log())


def test_a_callers_config_may_have_the_five_usual_settings_alone(engine, settings):
    usual = "num_completions_per_prompt generation_max_length generation_temperature generation_top_k generation_top_p".split()
    theirs = engine.sample(PROMPTS, SimpleNamespace(**{name: getattr(settings, name) for name in usual}), 0)
    assert torch.equal(theirs.completion_ids, engine.sample(PROMPTS, settings, 0).completion_ids)


def test_temperature_zero_takes_the_likeliest_token(engine, model, tokenizer):
    config = GRPOConfig(generation_temperature=0.0, generation_max_length=8)
    rollout = engine.sample(PROMPTS, config, seeds=0)
    for row, completion in enumerate(rollout.completion_ids):
        ids = encode_prompt(tokenizer, PROMPTS[row // 4])
        for token in completion[rollout.completion_mask[row]].tolist():
            assert token == model(torch.tensor([ids])).logits[0, -1].argmax()
            ids.append(token)
    assert not rollout.sampling_logp.any() and rollout.completion_mask.sum() > 64


@dataclass
class Traced(Rollout):
    """A rollout with fields that the program does not know."""

    hidden: torch.Tensor | None = None                    # (B, T)
    notes: list = field(default_factory=list)             # B
    levels: dict = field(default_factory=dict)            # name -> (P,)


def traced(groups, with_turns):
    """The rollout of groups, (number, length of the prompt, lengths of completions): ids are numbers that tell them apart."""
    prompts = [list(range(first, first + length)) for first, length, _ in groups]
    ids = [[first + 10 * row + t for t in range(n)] for first, _, lengths in groups for row, n in enumerate(lengths)]
    completions, mask, texts = pad_rows(ids), pad_rows([[True] * len(row) for row in ids]), [str(row) for row in ids]
    return Traced(
        *left_pad(prompts, 0), completions, mask, -completions / 4, mask[:, 0], texts, {"top_k": 5}, completions / 8 if with_turns else None,
        hidden=completions / 2, notes=[[text] for text in texts], levels={"hard": torch.tensor([length for _, length, _ in groups])})


def assert_equal_but_for_padding(found, expected):
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if torch.is_tensor(value) and value.ndim == 2:
            kept = slice(-value.shape[1], None) if name.startswith("prompt") else slice(value.shape[1])
            assert other[:, kept].equal(value) and other.count_nonzero() == value.count_nonzero(), name
        else:
            assert other.equal(value) if torch.is_tensor(value) else repr(other) == repr(value), name


@pytest.mark.parametrize("with_turns", [False, True])
def test_rollouts_are_joined_and_groups_selected_as_if_sampled_so(with_turns):
    all_groups = [(100, 2, [4, 1]), (300, 3, [2, 2]), (200, 5, [6, 3])]
    joined = concatenate([traced(all_groups[:2], with_turns), traced(all_groups[2:], with_turns)])
    chosen, expected = select(joined, torch.tensor([False, True, True])), traced(all_groups, with_turns)
    assert vars(joined).keys() == vars(expected).keys() and joined.prompt_ids.equal(expected.prompt_ids)
    assert joined.completion_ids.equal(expected.completion_ids)
    assert_equal_but_for_padding(joined, expected)
    assert_equal_but_for_padding(chosen, traced(all_groups[1:], with_turns))
    scores = torch.arange(6.0).view(3, 2)
    fields = [{"prompt": p} for p in range(3)], joined, scores, {"r": -scores}, scores, scores, list("abcdef")
    groups, new = (Groups(*fields, Reports(failures=[name])) for name in ("old", "new"))
    replaced = groups.substitute(torch.tensor([True, False, False]), new.subset(torch.tensor([False, False, True])))
    assert [example["prompt"] for example in replaced.examples] == [1, 2, 2] and replaced.extra == list("cdefef") and replaced.replaced == 1
    assert replaced.reports.failures == ["old", "new"] and groups.reports.failures == ["old"] and groups.extra == list("abcdef")
    assert replaced.scores.tolist() == (-replaced.per_function["r"]).tolist() == [[2, 3], [4, 5], [4, 5]]
    assert_equal_but_for_padding(replaced.rollout, traced([*all_groups[1:], all_groups[2]], with_turns))


@pytest.mark.parametrize("function,values,error", [
    (concatenate, [("a", "b")] * 2, "notes: not a tensor, list or dict"), (concatenate, [np.ones(2)] * 2, "notes: not a tensor"),
    (concatenate, [None, ["a", "b"]], "notes: parts are of different types"), (concatenate, [{"a": 1.0}, {}], "notes: parts have different"),
    (concatenate, [1.0, 2.0], "notes: differs between parts"), (select, [("a", "b")], "notes: not a tensor or list with entries for each"),
    (select, [np.ones(2)], "notes: not a tensor or list"), (select, [torch.ones(3)], "notes: not a tensor or list with entries for each"),
])
def test_a_field_that_cannot_be_joined_or_selected_is_named(function, values, error):
    ids = torch.ones(2, 1).long()
    parts = [Traced(ids, ids.bool(), ids, ids.bool(), ids.float(), ids[:, 0].bool(), ["", ""], notes=value) for value in values]
    with pytest.raises((TypeError, ValueError), match=f"^{error}"):
        concatenate(parts) if function is concatenate else select(parts[0], torch.tensor([True, False]))


def test_sampling_leaves_the_model_as_it_was(engine, model, settings):
    def look(*inputs):
        assert not model.training and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert model.config._attn_implementation == ("prefix_attention_by_sdpa" if type(engine) is Shared else "sdpa")
        raise KeyError

    for training in True, False:
        model.train(training)
        hook = model.base_model.register_forward_pre_hook(look)
        with pytest.raises(KeyError), torch.autocast("cpu", torch.bfloat16):
            engine.sample(PROMPTS, settings, seeds=0)
        hook.remove()
        assert model.training == training and torch.is_grad_enabled() and model.config._attn_implementation == "sdpa"


class Scripted(VLLM):
    """With a vLLM that draws prescribed tokens: siblings end after 1, 2, 3 ... tokens. Remembers the requests."""

    def __init__(self, policy):
        self.policy, policy.sampler = policy, self
        self.requests, self.llm = [], SimpleNamespace(generate=self.draw)

    def draw(self, inputs, parameters, use_tqdm):
        self.requests.append(dict(
            prompts=[request["prompt_token_ids"] for request in inputs], n=parameters[0].n, max_tokens=[p.max_tokens for p in parameters],
            seeds=[p.seed for p in parameters],
            distribution={name: getattr(parameters[0], name) for name in ("temperature", "top_k", "top_p", "min_p")}))
        outputs = []
        for p in parameters:
            stop = p.stop_token_ids[0]
            rows = [[50 + g] * g + [stop] for g in range(p.n)] if p.n > 1 else [[60, stop]]
            outputs.append(SimpleNamespace(outputs=[
                SimpleNamespace(
                    token_ids=ids, logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in ids],
                    finish_reason="stop" if ids[-1] == stop else "length")
                for ids in (row[: p.max_tokens] for row in rows)]))
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


def test_an_engine_fills_the_same_rollout(model, tokenizer, vllm):
    policies = [DevicePolicy(model, tokenizer) for _ in range(2)]
    engine, again = map(Scripted, policies)
    config = GRPOConfig(engine="vllm", num_completions_per_prompt=4, generation_max_length=3, generation_temperature=0.5, generation_top_k=50)
    rollout = policies[0].sample(PROMPTS, config, seeds=0)
    (request,) = engine.requests
    assert request["prompts"] == [encode_prompt(tokenizer, prompt) for prompt in PROMPTS] and request["n"] == 4
    assert rollout.distribution == request["distribution"] == dict(temperature=0.5, top_k=50, top_p=1.0, min_p=0.0) and request["max_tokens"] == [3] * len(PROMPTS)
    assert len(set(request["seeds"])) == len(PROMPTS)
    assert rollout.completion_mask.sum(dim=1).tolist() == [1, 2, 3, 3] * len(PROMPTS)
    assert rollout.finished.tolist() == [True, True, True, False] * len(PROMPTS)         # the last met the limit
    assert torch.equal(rollout.sampling_logp, torch.where(rollout.completion_mask, -0.5, 0.0))
    assert rollout.completions[:3] == [tokenizer.decode([50 + g] * g) for g in range(3)]
    policies[1].sample(PROMPTS, config, seeds=0)
    assert again.requests == engine.requests


def test_a_reply_ends_at_the_limit(engine, settings, monkeypatch):
    monkeypatch.setattr(engine.model.generation_config, "eos_token_id", list(range(engine.model.config.vocab_size)))
    limit = settings.generation_max_length
    for length, at_end in (100, True), (limit - 2, False):           # then the policy's last token ends a turn, and no reply fits
        rollout = engine.sample(PROMPTS[:2], settings, seeds=0, reply=lambda row, ids, length=length: [70] * length)
        assert rollout.completion_ids.shape[1] == limit and not rollout.finished.any()
        assert (rollout.completion_mask[:, -1] != at_end).all()


def test_an_engine_continues_conversations_after_each_reply(model, tokenizer, vllm):
    replies = {1: "no", 2: ({"role": "user", "content": "more"}, 0.5), 3: None}

    def respond(messages):
        return replies[sum(message["role"] == "assistant" for message in messages)]

    policy = DevicePolicy(model, tokenizer)
    engine, config = Scripted(policy), GRPOConfig(
        engine="vllm", num_completions_per_prompt=2, generation_max_length=80, environment="calculator", max_turns=4)
    rollout = sample_with_environment(policy, respond, [{"prompt": prompt} for prompt in PROMPTS[:2]], config, [0, 1])
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


def test_texts_lose_stop_pad_and_bos_tokens_and_no_other_special_token():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<tool_call>"]})
    ids = tokenizer("a<think>b<tool_call>").input_ids
    pad, bos = tokenizer.pad_token_id, tokenizer.bos_token_id
    assert ids[0] == bos and decode_completion(tokenizer, [*ids, pad]) == "a<think>b<tool_call>"
    drawn = torch.tensor([[*ids, tokenizer.eos_token_id]])
    rollout = make_rollout(
        tokenizer, [[5]], {}, drawn, torch.ones_like(drawn).bool(), torch.ones_like(drawn).bool(), torch.zeros(drawn.shape), torch.tensor([True]))
    assert rollout.completions == ["a<think>b<tool_call>"]


def test_the_text_of_a_completion_begins_with_the_thought_that_its_prompt_opened(model, tokenizer):
    prompts = ["1+1=?<think>\n", "1+1=?", "<think></think>1+1=?", "1+1=?<think> x"]
    config = GRPOConfig(num_completions_per_prompt=2, generation_max_length=3)
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0)
    assert [text[:8] == "<think>\n" for text in rollout.completions] == [True, True] + [False] * 6
    own = [decode_completion(tokenizer, ids[mask].tolist()) for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    assert rollout.completions[0].removeprefix("<think>\n") in own[0] and rollout.completions[2] in own[2]
