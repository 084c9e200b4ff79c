"""Updates on a rollout: the gradient is that of the whole step however it is cut, and every term does what it says."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import experience_of, forward_backward, gradient, logits_alone, take_step, with_engine, with_settings
from torch import Tensor
from torch.nn.functional import pad

from experience import Batch, minibatches, sampled_kl
from grpo import LOSSES, importance_weights, policy_loss
from sample import Rollout
from train import sample_groups

# Every term there is, so that none can depend on how a step is cut.
TERMS = {
    "loss alone": {},
    "with KL and entropy": dict(use_kl_penalty=True, kl_penalty_coef=0.3, entropy_coef=0.2),
    "with exact KL": dict(use_kl_penalty=True, kl_penalty_coef=0.3, kl_estimator="exact"),
    "with a value head too": dict(use_kl_penalty=True, kl_penalty_coef=0.3, entropy_coef=0.2, use_value_head=True),
    "with importance weights": dict(importance_cap=1.3),
}


def off_policy(run, seed=0):
    """An experience whose ratios are far from 1, with a group of equal rewards and completions of every length."""
    torch.manual_seed(seed)
    rollout = sample_groups(run, next(run.batches)).rollout
    kept = torch.randint(1, rollout.completion_mask.shape[1] + 1, (len(rollout.completions), 1))
    mask = rollout.completion_mask & (torch.arange(rollout.completion_mask.shape[1]) < kept)
    noise = 0.3 * torch.randn(mask.shape)
    rollout = replace(rollout, completion_mask=mask, sampling_logp=torch.where(mask, rollout.sampling_logp + noise, 0.0))
    rewards = torch.randn(len(rollout.prompt_ids), run.config.grpo.num_completions_per_prompt)
    rewards[1] = 0.7
    experience = experience_of(run, rollout, rewards)
    if run.config.grpo.importance_cap:                    # then ratios are taken to the policy as it is
        experience.old_logp = experience.old_logp + torch.where(mask, noise, 0.0)
    return experience


def differ(left, right):
    return float((left - right).norm() / right.norm())


def reordered(experience, groups):
    """The same experience with its groups in another order."""
    rows = (4 * groups[:, None] + torch.arange(4)).flatten()

    def move(item, **changes):
        tensors = {name: x[groups if len(x) == len(groups) else rows] for name, x in vars(item).items() if isinstance(x, Tensor)}
        return replace(item, **tensors, **changes)

    return move(experience, rollout=move(experience.rollout))


def padded(experience, left, right):
    """The same experience with more padding before the prompts and after the completions, and garbage in it."""
    old = experience.rollout

    def wider(tensor, value):
        return None if tensor is None else pad(tensor, (0, right), value=value)

    rollout = replace(
        old, prompt_ids=pad(old.prompt_ids, (left, 0), value=7), prompt_mask=pad(old.prompt_mask, (left, 0)),
        completion_ids=wider(old.completion_ids, 5), completion_mask=wider(old.completion_mask, False),
        sampling_logp=wider(old.sampling_logp, -3.0),
    )
    return replace(
        experience, rollout=rollout, mask=wider(experience.mask, False), advantages=wider(experience.advantages, 9.0),
        trainer_logp=wider(experience.trainer_logp, -3.0),
        old_logp=wider(experience.old_logp, math.nan), reference_logp=wider(experience.reference_logp, 2.0),
        old_values=wider(experience.old_values, 4.0), returns=wider(experience.returns, -4.0),
    )


# Each loss with each term once, and with all of them in float64, which Gemma's norms never are.
CASES = [
    *(("gemma3", loss_type, "loss alone") for loss_type in LOSSES), *(("gemma3", "grpo", terms) for terms in list(TERMS)[1:]),
    *(("gpt2", loss_type, "with a value head too") for loss_type in LOSSES),
]


@pytest.mark.parametrize("architecture,loss_type,terms", CASES)
def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut_padded_or_ordered(base, architecture, loss_type, terms):
    dtype, tolerance = (torch.float32, 2e-6) if architecture == "gemma3" else (torch.float64, 1e-12)
    tolerance *= 5 if loss_type == "sequence_mask" else 1            # a product of ratios adds up their rounding
    run = with_settings(base, architecture, loss_type=loss_type, **TERMS[terms])
    experience = off_policy(run)
    for module in run.policy.model, run.reference and run.reference.model, run.policy.value_head:
        if module is not None:
            module.to(dtype)
    whole, losses = gradient(run, experience)
    assert whole.norm() > 0 and losses["ratio_deviation"] > 0.1
    num_rows = len(experience.mask)
    variants = {
        "padding": (padded(experience, 3, 5), None),
        "permuted groups": (reordered(experience, torch.tensor([2, 0, 3, 1])), None),
        "permuted rows": (experience, torch.randperm(num_rows)),
    }
    for name, (variant, rows) in variants.items():
        same, _ = gradient(run, variant, rows)
        assert differ(same, whole) < tolerance, f"{name}: {differ(same, whole)}"
    for budget, shared in (200, True), (61, True), (1, True), (150, False):
        with_engine(run, "shared" if shared else "plain", budget)
        cut, parts = gradient(run, experience)
        assert differ(cut, whole) < tolerance, f"{budget=} {shared=}: {differ(cut, whole)}"
        for metric, value in losses.items():
            assert parts[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize("flags", [
    {}, dict(use_kl_penalty=True), dict(use_kl_penalty=True, kl_estimator="exact"), dict(use_kl_penalty=True, kl_in="reward"),
    dict(entropy_coef=0.2), dict(use_value_head=True), dict(importance_cap=1.3),
], ids=str)
def test_rows_that_are_not_forwarded_would_have_no_gradient(base, monkeypatch, flags):
    run = with_settings(base, **flags)
    experience, forward, forwarded = off_policy(run), run.policy.forward, []
    experience.advantages = experience.advantages * (torch.arange(16) // 4 != 1)[:, None]
    monkeypatch.setattr(run.policy, "forward", lambda rollout, rows, *rest: forwarded.extend(rows.tolist()) or forward(rollout, rows, *rest))
    some, losses = gradient(run, experience)
    alone = not any(name.endswith("_term") for name in losses)
    assert alone == (flags.keys() <= {"importance_cap"} or "reward" in flags.values())
    assert sorted(forwarded) == ([*range(4), *range(8, 16)] if alone else [*range(16)])
    monkeypatch.setattr(Batch, "rows_with_gradient", lambda batch, of_policy_loss_alone: batch.rows)
    every, _ = gradient(run, experience)
    assert len({*forwarded}) == 16 and differ(some, every) < 2e-6


# ---- on policy, and after an update --------------------------------------------------------------------------------


def test_what_describes_the_policy_is_a_mean_over_the_tokens_that_were_looked_at(base):
    run = with_settings(base)
    experience = off_policy(run)                          # the second group is tied, so it is left out
    _, losses = gradient(run, experience)
    now = run.policy.log_probs(experience.rollout)
    looked_at = experience.mask & (experience.advantages != 0)
    assert looked_at.sum() < experience.mask.sum()
    log_ratio = (now.logp - experience.old_logp)[looked_at]
    assert losses["entropy"] == pytest.approx(float(now.entropy[looked_at].mean()), rel=1e-4)
    assert losses["ratio_deviation"] == pytest.approx(float((log_ratio.exp() - 1).abs().mean()), rel=1e-4)
    assert losses["approx_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-4)
    up = (experience.advantages > 0)[looked_at]
    too_far = torch.where(up, log_ratio.exp() > 1.2, log_ratio.exp() < 0.8)
    assert losses["clip_fraction"] == pytest.approx(float(too_far.float().mean()), rel=1e-4) and too_far.any()
    tied = experience_of(run, experience.rollout, torch.zeros(len(experience.mask) // 4, 4))
    of_none = dict.fromkeys(losses, math.nan) | {"total_loss": 0.0, "policy_loss": 0.0}
    assert forward_backward(run, tied) == pytest.approx(of_none, nan_ok=True), "the same names"


def one_token_rollout(run, prompt, tokens):
    """A group of one-token completions of a prompt."""
    ids = torch.tensor(tokens)[:, None]
    ones = torch.ones_like(ids, dtype=torch.bool)
    prompt_ids = torch.tensor([run.policy.tokenizer(prompt).input_ids])
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    return Rollout(prompt_ids, prompt_mask, ids, ones, torch.zeros(ids.shape), ones[:, 0], [""] * len(ids))


@pytest.mark.parametrize("distribution", [dict(top_k=50, top_p=0.9, temperature=0.8), dict(top_k=5, top_p=1.0, temperature=1.5),
                                          dict(top_k=0, top_p=0.6, temperature=1.0), dict(top_k=0, top_p=1.0, temperature=1.0)])
def test_the_policy_gradient_is_the_enumerated_gradient_of_the_truncated_policy(base, distribution):
    """Every token, weighted by how often it is drawn, against the gradient of the expected reward itself."""
    run = with_settings(base)
    model, policy = run.policy.model, run.policy
    prompt, vocabulary = "1+1=?", 263
    rewards = torch.randn(vocabulary)
    logits = model(torch.tensor([policy.tokenizer(prompt).input_ids])).logits[0, -1] / distribution["temperature"]
    weights = logits.detach().exp().tolist()
    ranked = sorted(range(vocabulary), key=lambda v: -weights[v])[: distribution["top_k"] or vocabulary]
    total, kept, before = sum(weights[v] for v in ranked), [], 0.0
    for v in ranked:                                      # nucleus by hand: as long as the likelier ones hold less than top_p
        if before / total < distribution["top_p"]:
            kept.append(v)
        before += weights[v]
    expected_reward = (logits[kept].softmax(0) * rewards[kept]).sum()
    model.zero_grad()
    (-expected_reward).backward()
    truth = torch.cat([p.grad.flatten() for p in model.parameters()]).double()

    rollout = replace(one_token_rollout(run, prompt, kept), distribution=distribution)
    model.zero_grad()
    new, weights = policy.forward(rollout, torch.arange(len(kept))), torch.ones(len(kept), 1)
    drawn = new.logp.detach().exp()
    assert float(drawn.sum()) == pytest.approx(1, abs=1e-5)
    weighted = drawn * rewards[kept][:, None]
    policy_loss(new.logp, new.logp.detach(), weighted, rollout.completion_mask, weights)[0].backward()
    ours = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    assert len(kept) > 1 and differ(ours, truth) < 1e-5
    if distribution["top_k"] or distribution["top_p"] < 1:            # and the distribution without the truncation has another one
        model.zero_grad()
        rollout = replace(rollout, distribution={"temperature": distribution["temperature"]})
        full = policy.forward(rollout, torch.arange(len(kept)))
        policy_loss(full.logp, full.logp.detach(), weighted, rollout.completion_mask, weights)[0].backward()
        assert differ(torch.cat([p.grad.flatten() for p in model.parameters()]).double(), truth) > 1e-3


# ---- the other terms -----------------------------------------------------------------------------------------------


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(base):
    run = with_settings(base, entropy_coef=0.5)
    rollout = sample_groups(run, next(run.batches)).rollout
    experience = experience_of(run, rollout, torch.zeros(4, 4))          # all tied: nothing but the bonus is left
    ours, losses = gradient(run, experience)
    run.policy.clear_gradient()
    total = 0.0
    for row in range(len(rollout.completion_ids)):
        logits, _ = logits_alone(run.policy.model, rollout, row)
        total = total - (logits.softmax(-1) * logits.log_softmax(-1)).sum()
    (-0.5 * total / rollout.completion_mask.sum()).backward()
    truth = torch.cat([p.grad.flatten() for p in run.policy.parameters]).double()
    assert differ(ours, truth) < 1e-4
    assert losses["entropy"] == pytest.approx(total.item() / int(rollout.completion_mask.sum()), rel=1e-5)


REWARD_KL = dict(use_kl_penalty=True, kl_penalty_coef=0.3, kl_in="reward")


@pytest.mark.parametrize("overlong", ["keep", "mask"])
@pytest.mark.parametrize("terms", [
    *TERMS.values(), REWARD_KL, REWARD_KL | dict(importance_cap=1.5), REWARD_KL | dict(use_value_head=True),
    REWARD_KL | dict(normalize_advantages=False, baseline="leave_one_out"), REWARD_KL | dict(advantage_scale="batch"),
    dict(loss_type="gspo", baseline="group_median"), dict(loss_type="dr_grpo", use_kl_penalty=True, kl_estimator="k2"),
], ids=str)
def test_rows_that_are_not_trained_on_have_no_influence(base, terms, overlong):
    """Their tokens and log-probabilities are replaced by others: advantages, losses and gradient of the rest stay."""
    run = with_settings(base, overlong=overlong, **terms)
    rollout = sample_groups(run, next(run.batches)).rollout
    rollout = replace(rollout, finished=torch.arange(16) % 5 != 2)
    points = torch.randn(4, 4)
    points[0], points[1, :2], points[3, 0] = 0.7, math.nan, math.nan             # a tied group; rows without a score
    untrained = points.flatten().isnan() | (~rollout.finished & (overlong == "mask"))
    others = torch.randint(3, 250, rollout.completion_ids.shape)
    changed = replace(
        rollout, completion_ids=torch.where(untrained[:, None], others, rollout.completion_ids),
        completion_mask=rollout.completion_mask & (~untrained[:, None] | (torch.arange(rollout.completion_ids.shape[1]) < 5)),
        sampling_logp=torch.where(untrained[:, None], rollout.sampling_logp - 3.0, rollout.sampling_logp),
    )
    (first, whole, losses), (second, same, again) = (
        (experience, *gradient(run, experience)) for experience in (experience_of(run, which, points) for which in (rollout, changed)))
    assert untrained.sum() >= 3 and not second.mask[untrained].any() and whole.norm() > 0
    torch.testing.assert_close(first.advantages[~untrained], second.advantages[~untrained], atol=1e-5, rtol=1e-5)
    assert differ(same, whole) < 1e-5 and again == pytest.approx(losses, rel=1e-4, abs=1e-6)
    if "kl" in first.metrics:                             # of the reward: the loss has no second one
        assert "kl" not in losses
        assert first.metrics["kl"] == pytest.approx(second.metrics["kl"], rel=1e-4)
    if "kl" in first.metrics and run.policy.value_head is None:  # centred over the others of the group alone
        run.config = replace(run.config, grpo=replace(run.config.grpo, kl_penalty_coef=0.0))
        penalty = (first.advantages - experience_of(run, rollout, points).advantages)[:, 0].view(4, 4)
        assert not penalty.masked_fill(~untrained.view(4, 4), 0.0).any() and penalty.abs().max() > 0.01
        torch.testing.assert_close(penalty.sum(dim=1), torch.zeros(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cap,same_arithmetic", [(2.0, True), (0.0, False)])
def test_the_kl_is_that_of_the_policy_where_its_own_log_probabilities_were_computed(base, cap, same_arithmetic):
    """An engine that rounds differently: neither penalty nor the loss's KL term depends on its log-probabilities."""
    for kl_in in "reward", "loss":
        run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.3, kl_in=kl_in, importance_cap=cap)
        rollout = sample_groups(run, next(run.batches)).rollout
        run.policy.sampler = None if same_arithmetic else "another one"
        noise = torch.where(rollout.completion_mask, 0.5 * torch.randn(rollout.sampling_logp.shape), 0.0)
        exact, other = (experience_of(run, replace(rollout, sampling_logp=rollout.sampling_logp + n), torch.full((4, 4), 0.7))
                        for n in (0 * noise, noise))
        weights = importance_weights(other.trainer_logp, other.rollout.sampling_logp, other.mask, cap=cap) if cap else 1.0
        torch.testing.assert_close(exact.advantages * weights, other.advantages, atol=1e-5, rtol=1e-5)
        kl = [made.metrics["kl"] if kl_in == "reward" else gradient(run, made)[1]["kl"] for made in (exact, other)]
        assert kl[0] == pytest.approx(kl[1], rel=1e-5) and kl[0] != 0


def test_the_ratio_of_ratio_k3_is_capped_by_importance_cap(base):
    run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.3, importance_cap=2.0)
    made = off_policy(run)
    far = made.trainer_logp + torch.where(made.mask, torch.linspace(-2, 2, made.mask.shape[1]), 0.0)
    ratio = (far - made.trainer_logp).exp().clamp(max=2.0)
    x = made.reference_logp - far
    assert (ratio[made.mask] == 2.0).any() and (ratio[made.mask] < 1).any()
    kl = sampled_kl(far, made, run.config.grpo)
    torch.testing.assert_close(kl[made.mask], (ratio * (x.exp() - x - 1))[made.mask], atol=1e-4, rtol=1e-4)
    gradients = []
    for cap in 0.0, 1.0:                                  # on policy, where rounding decides whether a ratio is above 1
        logp = (made.trainer_logp + torch.where(made.mask, 1e-6, 0.0)).requires_grad_()
        kl = sampled_kl(logp, made, replace(run.config.grpo, importance_cap=cap))
        gradients.append(torch.autograd.grad(kl[made.mask].sum(), logp)[0])
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, dict(use_kl_penalty=True), dict(use_value_head=True), dict(importance_cap=2.0),
                                      dict(use_kl_penalty=True, kl_in="reward"), dict(ppo_epochs=2, minibatch_size=4)])
def test_a_rollout_of_which_nothing_can_be_trained_on_changes_nothing_and_stops_nothing(base, settings):
    run = with_settings(base, overlong="mask", **settings)
    rollout = sample_groups(run, next(run.batches)).rollout
    unfinished = replace(rollout, finished=torch.zeros(16).bool())
    for which, points in (rollout, torch.full((4, 4), math.nan)), (unfinished, torch.randn(4, 4)):
        experience = experience_of(run, which, points)
        before = [p.clone() for p in run.policy.parameters]
        for rows in minibatches(run.config.grpo, 16, seed=0):
            losses = forward_backward(run, experience, rows)
            assert not run.policy.optimizer_step(1.0)["skipped"]
            terms = {name for name in losses if name.endswith("_term")} | {"policy_loss", "total_loss"}
            assert losses == pytest.approx({name: 0.0 if name in terms else math.nan for name in losses}, nan_ok=True)
        assert all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters))


@pytest.mark.parametrize("estimator", ["ratio_k3", "k3", "k2", "exact"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_kl_term_is_the_estimate_averaged_as_the_loss_is_times_its_coefficient(base, estimator, loss_type):
    run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.7, kl_estimator=estimator, loss_type=loss_type)
    experience = off_policy(run)
    rollout, mask = experience.rollout, experience.mask
    new = run.policy.log_probs(rollout, reference=run.reference)
    x = run.reference.log_probs(rollout).logp - new.logp
    k3, ratio = x.exp() - x - 1, (new.logp - rollout.sampling_logp).exp()
    kl = {"ratio_k3": ratio * k3, "k3": k3, "k2": x**2 / 2, "exact": new.kl}[estimator] * mask
    averaged = {
        "dapo": kl.sum() / mask.sum(), "grpo": (kl.sum(1) / mask.sum(1)).mean(), "dr_grpo": kl.sum() / (16 * run.config.grpo.generation_max_length)
    }[loss_type]
    _, losses = gradient(run, experience)
    assert losses["kl"] == pytest.approx(float(kl.sum() / mask.sum()), rel=1e-3)
    assert losses["kl_term"] == pytest.approx(0.7 * float(averaged), rel=1e-3)
    assert losses["total_loss"] == pytest.approx(losses["policy_loss"] + losses["kl_term"])


def test_values_are_learned_where_no_advantage_is_left_too(base):
    run = with_settings(base, use_value_head=True)
    rollout = sample_groups(run, next(run.batches)).rollout
    experience = experience_of(run, rollout, torch.randn(4, 4))
    experience.advantages = torch.zeros_like(experience.advantages)
    _, losses = gradient(run, experience)
    error = (experience.old_values - experience.returns)[experience.mask]
    assert losses["value_loss"] == pytest.approx(float(0.5 * error.square().mean()), rel=1e-4)
    with torch.no_grad():
        run.policy.value_head.layers[-1].bias += 0.5             # further than the clip of 0.2
    _, losses = gradient(run, experience)
    far, near = (error + 0.5).square(), (error + 0.2).square()
    assert losses["value_loss"] == pytest.approx(float(0.5 * torch.maximum(far, near).mean()), rel=1e-3)
    assert not torch.equal(torch.maximum(far, near), far)


@pytest.mark.parametrize("mode", ["static", "ema", "periodic"])
def test_the_reference_stays_follows_slowly_or_is_replaced(base, mode):
    run = with_settings(base, use_kl_penalty=True, reference_mode=mode, ema_alpha=0.75, reference_update_freq=2)
    run.progress.phase_step = 0
    kept = [*run.reference.model.parameters()]
    expected, rollout = [p.clone() for p in kept], sample_groups(run, next(run.batches)).rollout
    for step in 1, 2, 3:
        losses = forward_backward(run, experience_of(run, rollout, torch.randn(4, 4)))
        take_step(run, losses)
        policy = [p.detach().clone() for p in run.policy.model.parameters()]
        if mode == "ema":
            expected = [0.75 * old + 0.25 * new for old, new in zip(expected, policy)]
        elif mode == "periodic" and step == 2:
            expected = policy
        for found, wanted in zip(kept, expected):
            torch.testing.assert_close(found, wanted, rtol=1e-5 if mode == "ema" else 0, atol=1e-7 if mode == "ema" else 0)
    assert all(p.grad is None for p in kept)
