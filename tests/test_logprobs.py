"""Log-probabilities of completions: against the model's own logits, packed against plain rows, under any split."""

from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS, shared_log_probs
from transformers.modeling_layers import GradientCheckpointingLayer

import logprobs
from engine import chunked_head, make_engine, shared as shared_engine
from config import GRPOConfig
from engine.packing import micro_batches
from engine.recomputation import recompute_activations
from grpo import policy_loss
from logprobs import completion_log_probs, restrict_logits
from engine.policy import frozen_copy
from sample import sample_completions_for_prompts


def dense_log_probs(model, rollout, row, temperature):
    """One completion alone, without padding, through the model's own forward pass and its dense logits."""
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    prompt = rollout.prompt_ids[row // group_size][rollout.prompt_mask[row // group_size]]
    completion = rollout.completion_ids[row][rollout.completion_mask[row]]
    logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, completion[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("name", ["shared", "plain"])
def test_equal_to_the_models_own_logits_with_entropy(architecture, tokenizer, settings, name):
    _, model = architecture
    engine = make_engine(name, model, tokenizer)
    rollout = engine.sample(PROMPTS, settings, seed=0)
    with torch.no_grad():
        ours = engine.log_probs(rollout, None, dict(temperature=0.7))
        for row, mask in enumerate(rollout.completion_mask):
            logp, entropy = dense_log_probs(model, rollout, row, 0.7)
            torch.testing.assert_close(ours.logp[row, mask], logp, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(ours.entropy[row, mask], entropy, atol=2e-5, rtol=1e-5)
            assert not ours.logp[row, ~mask].any()


def test_the_shared_engine_forwards_prompts_once_and_the_head_nothing_but_completions(shared, settings, monkeypatch):
    rollout = shared.sample(PROMPTS, settings, seed=0)
    heads, passes, apply, forward = [], [], chunked_head.HeadLogProbs.apply, shared_engine.forward_packed
    monkeypatch.setattr(shared_engine, "HeadLogProbs", SimpleNamespace(apply=lambda *args: heads.append(len(args[0])) or apply(*args)))
    monkeypatch.setattr(shared_engine, "forward_packed", lambda model, ids, *rest: passes.append(ids.numel()) or forward(model, ids, *rest))
    shared.log_probs(rollout, None, {})
    assert heads == [rollout.completion_mask.sum()] and passes == [rollout.prompt_mask.sum() + rollout.completion_mask.sum()]


def gradient(model, rollout, batches, log_probs=shared_log_probs):
    """All gradients, in one vector, of a loss that is cut into batches."""
    model.zero_grad()
    torch.manual_seed(5)
    advantages = torch.randn(len(rollout.completions))
    for rows in batches:
        new = log_probs(model, rollout, rows, temperature=0.8, top_k=50, top_p=0.9)
        loss, _ = policy_loss(
            new.logp, rollout.sampling_logp[rows], advantages[rows], rollout.completion_mask[rows],
            num_tokens=int(rollout.completion_mask.sum()),
        )
        (loss - 0.01 * new.entropy.sum()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_packing_and_any_split_give_the_same_gradient(architecture, tokenizer, settings):
    _, model = architecture
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    everything = torch.arange(len(rollout.completions))
    plain = gradient(model, rollout, [everything], completion_log_probs)
    splits = {
        "packed": [everything],
        "rows out of order": [torch.randperm(len(everything))],
        "groups torn apart": [torch.tensor([3, 0, 9]), torch.tensor([1, 2, 4, 5, 6, 7, 8]), everything[10:]],
        "small budget": micro_batches(rollout, everything, 100),
    }
    for name, batches in splits.items():
        for log_probs in shared_log_probs, completion_log_probs:
            difference = (gradient(model, rollout, batches, log_probs) - plain).norm() / plain.norm()
            assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.slow
def test_the_gradient_of_many_siblings_is_the_same_each_time_bit_for_bit(model, tokenizer):
    """All first tokens are predicted in one place, where two threads must not add up as they happen to come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = GRPOConfig(num_completions_per_prompt=1200, generation_max_length=1)
        rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS[:1], config, seed=0)
        first, *others = (gradient(model, rollout, [torch.arange(1200)]) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


def test_the_borders_between_chunks_of_the_head_change_nothing(model, tokenizer, monkeypatch):
    config = GRPOConfig(generation_max_length=40, num_completions_per_prompt=20)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS[:2], config, seed=0)
    monkeypatch.setattr(chunked_head, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(chunked_head, "TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 1)
    assert rollout.completion_mask.sum() > 500, "several chunks"
    with torch.no_grad():
        both = shared_log_probs(model, rollout).logp, completion_log_probs(model, rollout).logp
        for row, mask in enumerate(rollout.completion_mask):
            logp, _ = dense_log_probs(model, rollout, row, 1.0)
            for ours in both:
                torch.testing.assert_close(ours[row, mask], logp, atol=2e-5, rtol=1e-5)


def test_recomputed_activations_give_the_same_gradient(architecture, tokenizer, settings):
    _, model = architecture
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    everything = torch.arange(len(rollout.completions))
    kept = gradient(model, rollout, [everything])
    calls = []
    recompute_activations(model)
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    next(layer.children()).register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(gradient(model, rollout, [everything]), kept, rtol=0, atol=0)
    assert len(calls) == 2, "once forward, once again backward"
    assert not any(module.training for module in model.modules()), "no dropout"


@pytest.mark.parametrize("log_probs", [shared_log_probs, completion_log_probs])
@pytest.mark.parametrize("policy", [dict(top_k=0, top_p=1.0, temperature=1.0), dict(top_k=20, top_p=0.8, temperature=0.7)])
def test_the_exact_kl_and_its_gradient_are_those_of_the_whole_vocabulary(model, tokenizer, settings, policy, log_probs):
    reference = frozen_copy(model)
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(1.5)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    ours = log_probs(model, rollout, **policy, reference=reference)
    ours.kl.sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    total = 0.0
    for row, mask in enumerate(rollout.completion_mask):
        prompt = rollout.prompt_ids[row // 4][rollout.prompt_mask[row // 4]]
        ids = torch.cat([prompt, rollout.completion_ids[row][mask]])[None]
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        with torch.no_grad():
            other = reference(ids).logits[0, len(prompt) - 1 : -1] / policy["temperature"]
        kept = restrict_logits(logits, **policy, chosen=rollout.completion_ids[row][mask]).isfinite()
        for t in range(len(logits)):
            p = (logits[t] / policy["temperature"])[kept[t]].log_softmax(0)
            kl = (p.exp() * (p - other[t][kept[t]].log_softmax(0))).sum()
            torch.testing.assert_close(ours.kl[row, t], kl, atol=2e-5, rtol=1e-4)
            total = total + kl
    model.zero_grad()
    total.backward()
    truth = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert truth.norm() > 0.1 and (gradients - truth).norm() < 1e-4 * truth.norm()
