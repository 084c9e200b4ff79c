"""The four verbs of a policy, its seeds, and dataclasses that are joined by their fields."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import PROMPTS, experience_of, with_engine, with_settings

import train
from config import GRPOConfig
from grpo import LOSSES, add_up, token_loss
from policy import Policy
from sample import concatenate, select
from train import sample_groups


def made(run):
    torch.manual_seed(0)
    rollout = sample_groups(run, next(run.batches)).rollout
    rewards = torch.randn(4, 4)
    rewards[1] = 0.7
    return experience_of(run, rollout, rewards)


def gradient(run, experience, loss_fn, skip_tied=True):
    run.model.zero_grad()
    batch = experience.batch(torch.arange(16), skip_tied=skip_tied)
    losses = run.policy.forward_backward(batch, loss_fn)
    return torch.cat([p.grad.flatten() for p in run.model.parameters()]).double(), losses, batch


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_when_memory_runs_out_all_is_added_up_again_with_half_the_tokens(base, monkeypatch, engine):
    run = with_settings(base)
    with_engine(run, engine, 200)
    experience, loss_fn, seen = made(run), partial(train.grpo_loss, run.config.grpo), []
    whole, losses, _ = gradient(run, experience, loss_fn)
    run.policy.on_less_memory = lambda name, before, value: seen.append((name, value))
    real, calls = run.policy.forward, []

    def forward(*args, **options):
        calls.append(args)
        if len(calls) == 3 or run.policy.max_tokens > 100:
            raise MemoryError("out of memory")
        return real(*args, **options)

    monkeypatch.setattr(run.policy, "forward", forward)
    again, same, _ = gradient(run, experience, loss_fn)
    assert seen[:1] == [("max_tokens", 100)] and len(seen) <= 2
    assert (again - whole).norm() / whole.norm() < 2e-6 and same == pytest.approx(losses, rel=1e-4, abs=1e-6)
    run.policy.max_tokens = 30                            # at least a row
    monkeypatch.setattr(run.policy, "forward", lambda *args, **options: (_ for _ in ()).throw(MemoryError("out of memory")))
    with pytest.raises(MemoryError):
        gradient(run, experience, loss_fn)


def test_a_new_term_of_a_loss_is_one_edit(base):
    """It is logged under its name, and tied rows are forwarded for it, unless they are skipped for the policy loss alone."""
    run = with_settings(base)
    experience, config = made(run), run.config.grpo
    plain = partial(train.grpo_loss, config)

    def with_length_term(new, batch):
        loss, metrics = plain(new, batch)
        confidence = new.logp.exp()
        return loss + 0.1 * add_up(confidence, batch.weights), metrics | {"confidence": confidence, "passes": torch.ones(())}

    without, losses, batch = gradient(run, experience, plain)
    assert batch.rows.tolist() == [0, 1, 2, 3, *range(8, 16)]
    changed, more, batch = gradient(run, experience, with_length_term, skip_tied=False)
    assert batch.rows.tolist() == list(range(16)) and (changed - without).norm() > 0.01 * without.norm()
    with torch.no_grad():
        now = run.policy.log_probs(experience.rollout).logp.exp()
    assert more["confidence"] == pytest.approx(float(now[experience.mask].mean()), rel=1e-5) and more["passes"] >= 1
    assert more["total_loss"] - more["policy_loss"] == pytest.approx(0.1 * more["confidence"], rel=1e-4)


def test_a_seed_gives_the_same_completions_alone_and_in_a_batch(model, tokenizer):
    policy, config = Policy(model, tokenizer), GRPOConfig(generation_max_length=12, num_completions_per_prompt=3)
    together = policy.sample(PROMPTS, config, [(7, p) for p in range(4)])
    assert together.completions == policy.sample(PROMPTS, config, 7).completions
    for p, prompt in enumerate(PROMPTS):
        alone = policy.sample([prompt], config, [(7, p)])
        assert alone.completions == together.completions[3 * p : 3 * p + 3]
    assert together.completions[3:6] != together.completions[9:12], "the same prompt, another seed"
    logp = policy.log_probs(together).logp
    torch.testing.assert_close(logp, together.sampling_logp, atol=1e-4, rtol=1e-4)       # with its own distribution
    assert together.distribution.top_p == 0.9


@pytest.mark.parametrize("loss_type", LOSSES)
def test_weights_of_importance_may_multiply_the_advantages(loss_type):
    torch.manual_seed(0)
    logp = (-3 * torch.rand(64, 7, dtype=torch.float64)).requires_grad_()
    old_logp, mask = logp.detach() + 0.6 * torch.randn(64, 7).double(), torch.rand(64, 7) < 0.8
    advantages, weights = torch.randn(64, 1).double(), (0.7 * torch.randn(64, 7).double()).exp().clamp(max=1.5)
    for option in {}, {"off_policy_limit": 0.05}, *([{"dual_clip": 1.2}] if "dual_clip" in LOSSES[loss_type].bounds else []):
        outside, removed, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type, **option)
        inside, same, _ = token_loss(logp, old_logp, advantages * weights, mask, loss_type=loss_type, **option)
        torch.testing.assert_close(torch.where(mask, outside * weights, 0.0), torch.where(mask, inside, 0.0))
        assert torch.equal(removed & mask, same & mask)


def test_groups_are_replaced_by_others_field_by_field(base):
    run = with_settings(base)
    groups = sample_groups(run, next(run.batches))
    kept = torch.tensor([True, False, True, True])
    some = select(groups, kept)
    twice = select(concatenate([groups, some]), torch.tensor([False] * 4 + [True] * 3))
    assert twice.examples == some.examples == [groups.examples[p] for p in (0, 2, 3)] and torch.equal(twice.rewards, groups.rewards[kept])
    assert twice.rollout.completions == groups.rollout.completions[:4] + groups.rollout.completions[8:]
    new = select(groups, torch.tensor([False, False, False, True]))
    new = replace(new, reports=replace(groups.reports, metrics={"calls": [2.0]}), extra=[{"a": i} for i in range(4)])
    groups = replace(groups, reports=replace(groups.reports, metrics={"calls": [1.0]}), extra=[{"b": i} for i in range(16)])
    made = groups.replace(~kept, new).replace(torch.tensor([True, False, False, False]), new)
    assert [example["prompt"] for example in made.examples] == [groups.examples[p]["prompt"] for p in (2, 3, 3, 3)]
    assert made.extra == [{"b": i} for i in range(8, 16)] + [{"a": i} for i in range(4)] * 2
    assert made.replaced == 2 and made.reports.metrics == {"calls": [1.0, 2.0, 2.0]}, "of calls for replaced groups too"
    other = replace(groups, rollout=replace(groups.rollout, distribution=replace(groups.rollout.distribution, top_k=3)))
    with pytest.raises(ValueError, match="differ"):
        concatenate([groups, other])


def test_when_memory_runs_out_sampling_starts_again_with_half_as_many(model, tokenizer, monkeypatch):
    policy, config, seen = Policy(model, tokenizer), GRPOConfig(generation_max_length=6, num_completions_per_prompt=2), []
    expected, real = policy.sample(PROMPTS, config, 0), policy.sample_batches

    def fails(prompts, config, seeds, **options):
        if not 0 < config.generation_batch_size <= 2:
            raise MemoryError
        return real(prompts, config, seeds, **options)

    monkeypatch.setattr(policy, "sample_batches", fails)
    policy.on_less_memory = lambda name, before, value: seen.append((name, value))
    assert policy.sample(PROMPTS, config, 0).completions == expected.completions
    assert seen == [("completions_at_once", 4), ("completions_at_once", 2)]
    policy.completions_at_once = 0
    with pytest.raises(MemoryError):                      # a group is sampled together
        policy.sample(PROMPTS, config, 0, num_completions=3)
    assert seen[2:] == [("completions_at_once", 6), ("completions_at_once", 3)]


def test_a_loss_function_keeps_its_metrics(base):
    run, metrics = with_settings(base), {"passes": torch.ones(())}
    gradient(run, made(run), lambda new, batch: (add_up(new.logp, batch.weights), metrics))
    assert metrics == {"passes": torch.ones(())}
