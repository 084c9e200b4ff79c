"""Log-probabilities of completions: against the model's own logits, in chunks, recomputed; the exact KL; the chunked head."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS, kept_by_hand, logits_alone, made_up_rollout, run_process, shared_log_probs

import logprobs
from engine import chunked_head, shared as shared_engine
from config import GRPOConfig
from logprobs import completion_log_probs, in_chunks, micro_batches, restrict_logits
from engine.network import Network
from sample import sample_completions_for_prompts


@pytest.mark.parametrize("temperature,top_k,top_p,min_p", [
    (1.0, 0, 1.0, 0.0), (0.5, 0, 0.8, 0.0), (1.0, 3, 1.0, 0.0), (2.0, 5, 0.7, 0.0), (1.0, 1, 0.1, 0.0),
    (1.0, 0, 1.0, 0.2), (2.0, 0, 1.0, 0.2), (1.0, 2, 1.0, 0.2), (1.0, 0, 0.83, 0.2),
])
def test_the_kept_support_is_that_of_a_sorted_list(temperature, top_k, top_p, min_p):
    logits = [0.3, -1.0, 2.0, 1.9, 0.0, -3.0, 1.0, 0.5]
    policy = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    restricted = restrict_logits(torch.tensor([logits]), **policy)[0]
    assert restricted.isfinite().nonzero()[:, 0].tolist() == kept_by_hand(logits, **policy)
    kept = restricted.isfinite()
    torch.testing.assert_close(restricted[kept], torch.tensor(logits)[kept] / temperature)


def test_min_p_alone_however_the_probabilities_of_the_others_add_up():
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    kept = restrict_logits(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.1).isfinite()
    probs = logits.double().softmax(dim=-1)
    assert kept.equal(probs >= 0.1 * probs.amax(dim=-1, keepdim=True))


def test_the_support_at_its_edges():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0], [1.0, 0.0, 3.0, 2.0]])
    for top_k, top_p, kept in [
        (1, 1.0, [[0, 1, 1, 0], [0, 0, 1, 0]]),           # tokens of one probability are kept together
        (9, 1.0, [[1, 1, 1, 1], [1, 1, 1, 1]]),           # more than there are
        (0, 1e-9, [[0, 1, 1, 0], [0, 0, 1, 0]]),          # never none
    ]:
        restricted = restrict_logits(logits, temperature=1.0, top_k=top_k, top_p=top_p)
        assert restricted.isfinite().long().tolist() == kept, (top_k, top_p)
    sampled = restrict_logits(logits[:1], temperature=1.0, top_k=2, top_p=1.0, chosen=torch.tensor([3]))
    assert sampled.isfinite().tolist() == [[False, True, True, True]], "a sampled token always belongs to it"
    assert restrict_logits(logits, temperature=1.0, top_k=0, top_p=1.0) is logits
    assert restrict_logits(logits.bfloat16(), temperature=0.5, top_k=0, top_p=1.0).equal(2 * logits)


@pytest.mark.parametrize("options, scale", [(dict(logit_scale=0.5), 0.5), (dict(logits_scaling=4.0), 0.25)])
def test_the_scale_of_cohere_and_granite(options, scale):
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**options)))
    raw = torch.tensor([[1.0, -3.0]])
    assert logprobs.scale_and_softcap(model, raw).equal(scale * raw)
    assert logprobs.scale_and_softcap(SimpleNamespace(config=SimpleNamespace(get_text_config=SimpleNamespace)), raw) is raw


def test_rows_are_batched_by_length_within_a_budget():
    rollout = made_up_rollout([4, 2], [5, 1, 7, 3])       # 9, 5, 9 and 5 tokens with their prompts
    rows = torch.tensor([3, 2, 0, 1])

    def batches(max_tokens, parts=1):
        return [batch.tolist() for batch in micro_batches(rollout, rows, max_tokens, parts)]

    assert batches(36) == [[2, 0, 3, 1]], "the longest first, all padded to its length"
    assert batches(35) == [[2, 0, 3], [1]] and batches(18) == [[2, 0], [3, 1]] and batches(17) == [[2], [0], [3, 1]]
    assert batches(1) == [[2], [0], [3], [1]], "a longer row is alone"
    assert batches(10**9, parts=2) == [[2, 0], [3, 1]] and batches(10**9, parts=3) == [[2], [0], [3], [1]]
    assert batches(20, parts=9) == [[2], [0], [3], [1]], "fewer than asked for if there are fewer rows"
    assert micro_batches(rollout, rows[:0], 10, 2) == [] and len(micro_batches(rollout, rows, 36)) == 1


def test_a_pass_has_no_column_after_its_longest_row(model, monkeypatch):
    rollout, shapes, forward = made_up_rollout([4, 2], [5, 1, 7, 3]), [], model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda **inputs: shapes.append(tuple(inputs["input_ids"].shape)) or forward(**inputs))
    completion_log_probs(model, rollout)
    completion_log_probs(model, rollout, torch.tensor([3, 1]))
    assert shapes == [(4, 9), (2, 5)]


def test_the_head_sees_few_tokens_at_once_and_again_backward():
    """In 16 bits the results are float32; the last chunk is shorter, and a reference goes along with its tokens."""
    hidden = torch.randn(10, 3, dtype=torch.bfloat16, requires_grad=True)
    chosen, other, seen = torch.arange(10), torch.arange(10.0), []

    def head(hidden, chosen, reference):
        seen.append(chosen.tolist())
        assert len(hidden) == len(chosen) and (reference is None or reference.equal(chosen.float()))
        return [hidden.float().square().sum(-1), chosen.float(), *([] if reference is None else [reference])]

    parts = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    results = in_chunks(head, 4, hidden, chosen, other)
    assert seen == parts and [r.dtype for r in results] == [torch.float32] * 3
    assert results[0].equal(hidden.float().square().sum(-1)) and results[1].equal(other) and results[2].equal(other)
    results[0].sum().backward()
    assert sorted(seen[3:]) == parts and hidden.grad.equal(2 * hidden)
    with torch.no_grad():
        assert in_chunks(head, 4, hidden, chosen, None)[2] is None and seen[6:] == parts


@pytest.mark.parametrize("name", ["entropy", "kl"])
def test_tokens_that_are_not_kept_have_no_gradient_however_large_that_of_the_result_is(model, name):
    """As with the scale of float16. Their log-probabilities are -inf."""
    reference, gradients = Network(model).frozen_copy().module, []
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.1)
    for factor in 1.0, 1024.0:
        model.zero_grad()
        results = completion_log_probs(model, made_up_rollout([4, 6], [3, 5, 2, 4], top_k=5), reference=reference)
        (factor * getattr(results, name).sum()).backward()
        gradients.append(model.get_output_embeddings().weight.grad / factor)
    assert gradients[0].isfinite().all() and gradients[0].any()
    torch.testing.assert_close(*gradients)


def test_the_shared_engine_forwards_prompts_once_and_the_head_nothing_but_completions(shared, settings, monkeypatch):
    rollout = shared.sample(PROMPTS, settings, 0)
    heads, passes, apply, forward = [], [], chunked_head.HeadLogProbs.apply, shared_engine.forward_packed
    monkeypatch.setattr(shared_engine, "HeadLogProbs", SimpleNamespace(apply=lambda *args: heads.append(len(args[0])) or apply(*args)))
    monkeypatch.setattr(shared_engine, "forward_packed", lambda model, ids, *rest: passes.append(ids.numel()) or forward(model, ids, *rest))
    shared.log_probs(rollout)
    assert heads == [rollout.completion_mask.sum()] and passes == [rollout.prompt_mask.sum() + rollout.completion_mask.sum()]


def gradient(model, rollout):
    """All gradients, in one vector, of log-probabilities and entropies with random slopes."""
    model.zero_grad()
    new = shared_log_probs(model, rollout)
    slopes = torch.randn(new.logp.shape, generator=torch.Generator().manual_seed(5))
    (new.logp * slopes - 0.01 * new.entropy).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
def test_the_gradient_of_many_siblings_is_the_same_each_time_bit_for_bit(model, tokenizer):
    """All first tokens are predicted in one place, where two threads must not add up as they happen to come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = GRPOConfig(num_completions_per_prompt=1200, generation_max_length=1)
        rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS[:1], config, seed=0)
        first, *others = (gradient(model, rollout) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("log_probs", [shared_log_probs, completion_log_probs])
@pytest.mark.parametrize("distribution", [
    dict(top_k=0, top_p=1.0, temperature=1.0), dict(top_k=20, top_p=0.8, temperature=0.7),
    dict(top_k=0, top_p=1.0, temperature=0.7, min_p=0.3),
])
@pytest.mark.parametrize("architecture", ["gemma2"], indirect=True)              # its logits are capped
def test_the_exact_kl_and_its_gradient_are_those_of_the_whole_vocabulary(architecture, tokenizer, settings, distribution, log_probs):
    _, model = architecture
    reference = Network(model).frozen_copy().module
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(1.5)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    ours = log_probs(model, replace(rollout, distribution=distribution), reference=reference)
    ours.kl.sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    total = 0.0
    for row in range(len(rollout.completion_ids)):
        logits, ids = logits_alone(model, rollout, row)
        with torch.no_grad():
            other = logits_alone(reference, rollout, row)[0] / distribution["temperature"]
        kept = restrict_logits(logits, **distribution, chosen=ids).isfinite()
        for t in range(len(logits)):
            p = (logits[t] / distribution["temperature"])[kept[t]].log_softmax(0)
            kl = (p.exp() * (p - other[t][kept[t]].log_softmax(0))).sum()
            torch.testing.assert_close(ours.kl[row, t], kl, atol=2e-5, rtol=1e-4)
            total = total + kl
    model.zero_grad()
    total.backward()
    truth = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert truth.norm() > 0.1 and (gradients - truth).norm() < 1e-4 * truth.norm()


@pytest.mark.parametrize("policy", [
    dict(temperature=1.0, top_k=0, top_p=1.0), dict(temperature=0.7, top_k=5, top_p=1.0),
    dict(temperature=1.3, top_k=7, top_p=0.8),
])
@pytest.mark.parametrize("cap,bias", [(None, False), (3.0, True)])
def test_the_heads_gradient_written_by_hand_is_that_of_autograd(policy, cap, bias, monkeypatch):
    """Log-probability, entropy and exact KL, with a soft cap, a bias, a kept support, over several chunks, in float64."""
    monkeypatch.setattr(chunked_head, "tokens_in_chunk", lambda vocab_size, device: 2)
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


@pytest.mark.skipif(sys.platform != "linux", reason="counts the blocks of glibc's malloc")
def test_chunks_of_the_head_use_the_same_memory_one_after_the_other():
    """What a chunk leaves must not split the free blocks: 24 chunks of 16 MB each once took 1.6 GB."""
    program = """
import resource, torch
from engine.host import keep_freed_memory
from engine.chunked_head import HeadLogProbs
keep_freed_memory()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
hidden, weight = torch.randn(24 * 128, 8, requires_grad=True), torch.randn(32768, 8)
before = peak()
parts = HeadLogProbs.apply(hidden, weight, None, torch.arange(24 * 128), lambda raw, chosen: raw, None, None)
parts[0].sum().backward()
print(peak() - before)
"""
    done = run_process("-c", program)
    assert float(done.stdout) < 16 * 15, f"{float(done.stdout):.0f} MB more for logits of 16 MB a chunk"
