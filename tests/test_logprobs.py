"""Log-probabilities of completions: against the model's own logits, packed against plain rows, under any split."""

from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS

import logprobs
from config import GRPOConfig
from grpo import policy_loss
from logprobs import completion_log_probs, restrict_logits
from packing import micro_batches, pack_rows
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


def test_the_borders_between_chunks_of_the_head_change_nothing(model, tokenizer, monkeypatch):
    config = GRPOConfig(generation_max_length=40, num_completions_per_prompt=20)
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS[:2], config, seed=0)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(logprobs, "TOKENS_AT_ONCE", 100)
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


def test_dropping_the_window_or_the_walls_between_siblings_would_be_noticed(model, tokenizer, settings, monkeypatch):
    """The parity tests above can fail: they do when a mask is wrong."""
    rollout = sample_completions_for_prompts(model, tokenizer, PROMPTS, settings, seed=0)
    everything = torch.arange(len(rollout.completions))
    plain = gradient(model, rollout, [everything], shared_prompt=False)
    right_masks, right_pack = logprobs.attention_masks, logprobs.pack_rows

    def no_window(*args):
        return {name: right_masks(*args)["full_attention"] for name in ("full_attention", "sliding_attention")}

    def no_walls(*args):
        packs = right_pack(*args)
        return replace(packs, places=replace(packs.places, sibling=packs.places.sibling.clamp(max=1)))

    for name, wrong in ("attention_masks", no_window), ("pack_rows", no_walls):
        with monkeypatch.context() as patch:
            patch.setattr(logprobs, name, wrong)
            assert (gradient(model, rollout, [everything]) - plain).norm() / plain.norm() > 1e-3, name
