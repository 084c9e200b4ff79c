"""Log-probabilities of completions: against the model's own logits, packed against plain rows, under any split."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import PROMPTS
from transformers.modeling_layers import GradientCheckpointingLayer

from engine import chunked_head
from config import GRPOConfig
from engine.packing import micro_batches, pack_rows
from grpo import policy_loss
from engine.logits import restrict_logits
from logprobs import completion_log_probs
from model import recompute_activations
from sample import sample_completions_for_prompts


def dense_log_probs(model, rollout, row, temperature):
    """One completion alone, without padding, through the model's own forward pass and its dense logits."""
    group_size = len(rollout.completion_ids) // len(rollout.prompt_ids)
    prompt = rollout.prompt_ids[row // group_size][rollout.prompt_mask[row // group_size]]
    completion = rollout.completion_ids[row][rollout.completion_mask[row]]
    logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(-1, completion[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_equal_to_the_models_own_logits_with_entropy(architecture, tokenizer, settings, shared_prompt):
    _, model = architecture
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    with torch.no_grad():
        ours = completion_log_probs(model, rollout, temperature=0.7, shared_prompt=shared_prompt)
        for row, mask in enumerate(rollout.completion_mask):
            logp, entropy = dense_log_probs(model, rollout, row, 0.7)
            torch.testing.assert_close(ours.logp[row, mask], logp, atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(ours.entropy[row, mask], entropy, atol=2e-5, rtol=1e-5)
            assert not ours.logp[row, ~mask].any()


def gradient(model, rollout, batches, **options):
    """All gradients, in one vector, of a loss that is cut into batches."""
    model.zero_grad()
    torch.manual_seed(5)
    advantages = torch.randn(len(rollout.completions))
    for rows in batches:
        new = completion_log_probs(model, rollout, rows, temperature=0.8, top_k=50, top_p=0.9, **options)
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
    plain = gradient(model, rollout, [everything], shared_prompt=False)
    splits = {
        "packed": [everything],
        "rows out of order": [torch.randperm(len(everything))],
        "groups torn apart": [torch.tensor([3, 0, 9]), torch.tensor([1, 2, 4, 5, 6, 7, 8]), everything[10:]],
        "small budget": micro_batches(rollout, everything, 100),
    }
    for name, batches in splits.items():
        difference = (gradient(model, rollout, batches) - plain).norm() / plain.norm()
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
    assert rollout.completion_mask.sum() > 500, "several chunks"
    with torch.no_grad():
        ours = completion_log_probs(model, rollout)
        for row, mask in enumerate(rollout.completion_mask):
            logp, _ = dense_log_probs(model, rollout, row, 1.0)
            torch.testing.assert_close(ours.logp[row, mask], logp, atol=2e-5, rtol=1e-5)


def test_micro_batches_cover_every_row_once_within_the_budget(model, tokenizer, settings):
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    rows = torch.tensor([0, 1, 2, 5, 6, 9, 13, 15])
    for shared_prompt in True, False:
        for budget in 1, 60, 150, 10**6:
            batches = micro_batches(rollout, rows, budget, shared_prompt)
            assert sorted(torch.cat(batches).tolist()) == rows.tolist()
            for batch in batches:
                pack = pack_rows(rollout, batch, shared_prompt)
                assert pack.ids.numel() <= budget or len(batch) == 1, f"{budget=} {pack.ids.shape=}"
            assert budget < 10**6 or len(batches) == 1


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


@pytest.mark.parametrize("policy", [
    dict(temperature=1.0, top_k=0, top_p=1.0), dict(temperature=0.7, top_k=5, top_p=1.0),
    dict(temperature=1.3, top_k=7, top_p=0.8),
])
@pytest.mark.parametrize("cap,bias", [(None, False), (3.0, True)])
def test_the_heads_gradient_written_by_hand_is_that_of_finite_differences(policy, cap, bias, monkeypatch):
    """Log-probability, entropy and exact KL, with a soft cap, a bias, a kept support, over several chunks, in float64."""
    monkeypatch.setattr(chunked_head, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(chunked_head, "TOKENS_AT_ONCE", 2)
    draws = torch.Generator().manual_seed(0)
    tokens, width, size = 5, 4, 11

    def normal(*shape):
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    hidden, weight, other = normal(tokens, width), 2 * normal(size, width), normal(size, width)
    fixed, offset = hidden.clone(), normal(size) if bias else None
    chosen = torch.randint(0, size, (tokens,), generator=draws)

    def shape(raw, chosen):
        return restrict_logits(raw if cap is None else torch.tanh(raw / cap) * cap, chosen=chosen, **policy)

    def ours(hidden, weight, offset=None):
        return chunked_head.HeadLogProbs.apply(hidden, weight, offset, chosen, shape, fixed, lambda hidden: hidden @ other.T)

    leaves = [part.requires_grad_() for part in (hidden, weight, offset) if part is not None]
    if policy["top_p"] == 1:                              # the kept support must not change under a finite difference
        assert torch.autograd.gradcheck(ours, leaves)
    logp, entropy, kl = ours(*leaves)
    log_probs = shape(hidden @ weight.T + (0 if offset is None else offset), chosen).log_softmax(-1)
    probs, kept = log_probs.exp(), log_probs.isfinite()
    log_q = (fixed @ other.T).masked_fill(~kept, -torch.inf).log_softmax(-1)
    dense = (
        log_probs.gather(-1, chosen[:, None])[:, 0], -(probs * torch.where(kept, log_probs, 0.0)).sum(-1),
        (probs * (torch.where(kept, log_probs, 0.0) - torch.where(kept, log_q, 0.0))).sum(-1),
    )
    for mine, theirs in zip((logp, entropy, kl), dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
        slopes = torch.arange(1, tokens + 1)
        gradients = [torch.autograd.grad((part * slopes).sum(), leaves, retain_graph=True) for part in (mine, theirs)]
        for left, right in zip(*gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_several_groups_share_a_pass_without_padding_and_the_gradient_stays(architecture, tokenizer, settings):
    """One long group and short ones, each token once, the gradient of rows."""
    _, model = architecture
    prompts = ["a prompt that is much longer than all of the other ones put together, I would say", "1+1=?", "é", "x"]
    rollout = sample_completions_for_prompts(model, tokenizer, prompts, replace(settings, num_completions_per_prompt=2), seed=0)
    everything = torch.arange(len(rollout.completions))
    batch = pack_rows(rollout, everything, shared_prompt=True)
    assert batch.ids.shape == (1, int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())) and batch.mask.all()
    plain = gradient(model, rollout, [everything], shared_prompt=False)
    assert (gradient(model, rollout, [everything]) - plain).norm() / plain.norm() < 1e-5


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


@pytest.mark.skipif(sys.platform != "linux", reason="counts the blocks of glibc's malloc")
def test_chunks_of_the_head_use_the_same_memory_one_after_the_other():
    """What a chunk leaves must not split the free blocks: 24 chunks of 16 MB each once took 1.6 GB."""
    program = """
import resource, torch
from engine.devices import keep_freed_memory
from engine.chunked_head import HeadLogProbs
keep_freed_memory()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hidden, weight = torch.randn(24 * 128, 8, requires_grad=True), torch.randn(32768, 8)
before = peak()
parts = HeadLogProbs.apply(hidden, weight, None, torch.arange(24 * 128), lambda raw, chosen: raw, None, None)
parts[0].sum().backward()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 16 * 15, f"{float(done.stdout):.0f} MB more for logits of 16 MB a chunk"
