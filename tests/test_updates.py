"""Updates on a rollout: the gradient is that of the whole step however it is cut, and every term does what it says."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import experience_of, logits_alone, with_settings
from torch.nn.functional import pad

import train
from engine import make_engine
from experience import minibatches
from grpo import LOSSES, policy_loss
from sample import Rollout
from train import accumulate_gradients, sample_groups

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
    if experience.importance_weights is not None:         # then ratios are taken to the policy as it is
        experience.old_logp = experience.old_logp + torch.where(mask, noise, 0.0)
    return experience


def gradient(run, experience, *parts):
    """All gradients in one vector, in float64, of accumulate_gradients called for each part, or for all rows at once."""
    run.model.zero_grad()
    if run.value_head is not None:
        run.value_head.zero_grad()
    for rows in parts or [torch.arange(len(experience.mask))]:
        losses = accumulate_gradients(run, experience, rows, run.config.grpo)
    parameters = [*run.model.parameters(), *(run.value_head.parameters() if run.value_head is not None else [])]
    return torch.cat([p.grad.flatten() for p in parameters]).double(), losses


def differ(left, right):
    return float((left - right).norm() / right.norm())


def reordered(experience, groups):
    """The same experience with its groups in another order."""
    size = len(experience.mask) // len(experience.rollout.prompt_ids)
    rows = (groups[:, None] * size + torch.arange(size)).flatten()

    def move(tensor):
        return None if tensor is None else tensor[rows]

    old = experience.rollout
    rollout = Rollout(
        old.prompt_ids[groups], old.prompt_mask[groups], move(old.completion_ids), move(old.completion_mask),
        move(old.sampling_logp), move(old.finished), [old.completions[row] for row in rows],
    )
    tensors = {
        name: move(getattr(experience, name))
        for name in ("mask", "advantages", "trainer_logp", "old_logp", "importance_weights", "reference_logp", "old_values", "returns",
                     "group_tokens")
    }
    return replace(experience, rollout=rollout, **tensors)


def padded(experience, left, right):
    """The same experience with more padding before the prompts and after the completions, and garbage in it."""
    old = experience.rollout

    def wider(tensor, value):
        return tensor if tensor is None or tensor.shape[1] == 1 else pad(tensor, (0, right), value=value)

    rollout = replace(
        old, prompt_ids=pad(old.prompt_ids, (left, 0), value=7), prompt_mask=pad(old.prompt_mask, (left, 0)),
        completion_ids=wider(old.completion_ids, 5), completion_mask=wider(old.completion_mask, False),
        sampling_logp=wider(old.sampling_logp, -3.0),
    )
    return replace(
        experience, rollout=rollout, mask=wider(experience.mask, False), advantages=wider(experience.advantages, 9.0),
        trainer_logp=wider(experience.trainer_logp, -3.0),
        old_logp=wider(experience.old_logp, math.nan), reference_logp=wider(experience.reference_logp, 2.0),
        importance_weights=wider(experience.importance_weights, 7.0),
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
    for module in run.model, run.reference, run.value_head:
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
        same, _ = gradient(run, variant, *([] if rows is None else [rows]))
        assert differ(same, whole) < tolerance, f"{name}: {differ(same, whole)}"
    for budget, shared in (200, True), (61, True), (1, True), (150, False):
        run.engine = make_engine("shared" if shared else "plain", run.model, run.tokenizer, max_tokens=budget)
        cut, parts = gradient(run, experience)
        assert differ(cut, whole) < tolerance, f"{budget=} {shared=}: {differ(cut, whole)}"
        for metric, value in losses.items():
            assert parts[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric


# ---- on policy, and after an update --------------------------------------------------------------------------------


def test_what_describes_the_policy_is_a_mean_over_the_tokens_that_were_looked_at(base):
    run = with_settings(base)
    experience = off_policy(run)                          # the second group is tied, so it is left out
    _, losses = gradient(run, experience)
    with torch.no_grad():
        now = run.engine.log_probs(experience.rollout, None, {})
    looked_at = experience.mask & (experience.advantages != 0)
    assert looked_at.sum() < experience.mask.sum()
    log_ratio = (now.logp - experience.old_logp)[looked_at]
    assert losses["entropy"] == pytest.approx(float(now.entropy[looked_at].mean()), rel=1e-4)
    assert losses["ratio_deviation"] == pytest.approx(float((log_ratio.exp() - 1).abs().mean()), rel=1e-4)
    assert losses["approx_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-4)
    up = (experience.advantages > 0).expand_as(looked_at)[looked_at]
    too_far = torch.where(up, log_ratio.exp() > 1.2, log_ratio.exp() < 0.8)
    assert losses["clip_fraction"] == pytest.approx(float(too_far.float().mean()), rel=1e-4) and too_far.any()
    tied = experience_of(run, experience.rollout, torch.zeros(len(experience.mask) // 4, 4))
    names = "entropy", "clip_fraction", "ratio_deviation", "approx_kl"
    losses = accumulate_gradients(run, tied, torch.arange(len(tied.mask)), run.config.grpo)
    assert all(math.isnan(losses[name]) for name in names), "of no tokens"


def one_token_rollout(run, prompt, tokens):
    """A group of one-token completions of a prompt."""
    ids = torch.tensor(tokens)[:, None]
    ones = torch.ones_like(ids, dtype=torch.bool)
    prompt_ids = torch.tensor([run.tokenizer(prompt).input_ids])
    prompt_mask = torch.ones_like(prompt_ids, dtype=torch.bool)
    return Rollout(prompt_ids, prompt_mask, ids, ones, torch.zeros(ids.shape), ones[:, 0], [""] * len(ids))


@pytest.mark.parametrize("policy", [dict(top_k=50, top_p=0.9, temperature=0.8), dict(top_k=5, top_p=1.0, temperature=1.5),
                                    dict(top_k=0, top_p=0.6, temperature=1.0), dict(top_k=0, top_p=1.0, temperature=1.0)])
def test_the_policy_gradient_is_the_enumerated_gradient_of_the_truncated_policy(base, policy):
    """Every token, weighted by how often it is drawn, against the gradient of the expected reward itself."""
    run = with_settings(base)
    prompt, vocabulary = "1+1=?", 263
    rewards = torch.randn(vocabulary)
    logits = run.model(torch.tensor([run.tokenizer(prompt).input_ids])).logits[0, -1] / policy["temperature"]
    weights = logits.detach().exp().tolist()
    ranked = sorted(range(vocabulary), key=lambda v: -weights[v])[: policy["top_k"] or vocabulary]
    total, kept, before = sum(weights[v] for v in ranked), [], 0.0
    for v in ranked:                                      # nucleus by hand: as long as the likelier ones hold less than top_p
        if before / total < policy["top_p"]:
            kept.append(v)
        before += weights[v]
    expected_reward = (logits[kept].softmax(0) * rewards[kept]).sum()
    run.model.zero_grad()
    (-expected_reward).backward()
    truth = torch.cat([p.grad.flatten() for p in run.model.parameters()]).double()

    rollout = one_token_rollout(run, prompt, kept)
    run.model.zero_grad()
    new = run.engine.log_probs(rollout, None, policy)
    drawn = new.logp.detach().exp()
    assert float(drawn.sum()) == pytest.approx(1, abs=1e-5)
    loss, _ = policy_loss(new.logp, new.logp.detach(), drawn * rewards[kept][:, None], rollout.completion_mask, num_tokens=1)
    loss.backward()
    ours = torch.cat([p.grad.flatten() for p in run.model.parameters()]).double()
    assert len(kept) > 1 and differ(ours, truth) < 1e-5
    if policy["top_k"] or policy["top_p"] < 1:            # and the distribution without the truncation has another one
        run.model.zero_grad()
        full = run.engine.log_probs(rollout, None, {"temperature": policy["temperature"]})
        weighted = drawn * rewards[kept][:, None]
        policy_loss(full.logp, full.logp.detach(), weighted, rollout.completion_mask, num_tokens=1)[0].backward()
        assert differ(torch.cat([p.grad.flatten() for p in run.model.parameters()]).double(), truth) > 1e-3


# ---- the other terms -----------------------------------------------------------------------------------------------


def test_the_entropy_bonus_has_the_gradient_of_the_entropy(base):
    run = with_settings(base, entropy_coef=0.5)
    rollout = sample_groups(run, next(run.batches)).rollout
    experience = experience_of(run, rollout, torch.zeros(4, 4))          # all tied: nothing but the bonus is left
    ours, losses = gradient(run, experience)
    run.model.zero_grad()
    total = 0.0
    for row in range(len(rollout.completion_ids)):
        logits, _ = logits_alone(run.model, rollout, row)
        total = total - (logits.softmax(-1) * logits.log_softmax(-1)).sum()
    (-0.5 * total / rollout.completion_mask.sum()).backward()
    truth = torch.cat([p.grad.flatten() for p in run.model.parameters()]).double()
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
    if "kl" in first.metrics and run.value_head is None:  # centred over the others of the group alone
        run.config = replace(run.config, grpo=replace(run.config.grpo, kl_penalty_coef=0.0))
        penalty = (first.advantages - experience_of(run, rollout, points).advantages).view(4, 4)
        assert not penalty.masked_fill(~untrained.view(4, 4), 0.0).any() and penalty.abs().max() > 0.01
        torch.testing.assert_close(penalty.sum(dim=1), torch.zeros(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cap,same_arithmetic", [(2.0, True), (0.0, False)])
def test_the_kl_is_that_of_the_policy_where_its_own_log_probabilities_were_computed(base, cap, same_arithmetic):
    """An engine that rounds differently: neither penalty nor the loss's KL term depends on its log-probabilities."""
    for kl_in in "reward", "loss":
        run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.3, kl_in=kl_in, importance_cap=cap)
        run.engine.same_arithmetic = same_arithmetic
        rollout = sample_groups(run, next(run.batches)).rollout
        noise = torch.where(rollout.completion_mask, 0.5 * torch.randn(rollout.sampling_logp.shape), 0.0)
        exact, other = (experience_of(run, replace(rollout, sampling_logp=rollout.sampling_logp + n), torch.full((4, 4), 0.7))
                        for n in (0 * noise, noise))
        torch.testing.assert_close(exact.advantages, other.advantages, atol=1e-5, rtol=1e-5)
        kl = [made.metrics["kl"] if kl_in == "reward" else gradient(run, made)[1]["kl"] for made in (exact, other)]
        assert kl[0] == pytest.approx(kl[1], rel=1e-5) and kl[0] != 0


def test_the_ratio_of_ratio_k3_is_capped_by_importance_cap(base):
    run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.3, importance_cap=2.0)
    made = off_policy(run)
    far = made.trainer_logp + torch.where(made.mask, torch.linspace(-2, 2, made.mask.shape[1]), 0.0)
    ratio = (far - made.trainer_logp).exp().clamp(max=2.0)
    x = made.reference_logp - far
    assert (ratio[made.mask] == 2.0).any() and (ratio[made.mask] < 1).any()
    kl = made.sampled_kl(far, run.config.grpo)
    torch.testing.assert_close(kl[made.mask], (ratio * (x.exp() - x - 1))[made.mask], atol=1e-4, rtol=1e-4)
    gradients = []
    for cap in 0.0, 1.0:                                  # on policy, where rounding decides whether a ratio is above 1
        logp = (made.trainer_logp + torch.where(made.mask, 1e-6, 0.0)).requires_grad_()
        kl = made.sampled_kl(logp, replace(run.config.grpo, importance_cap=cap))
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
        before = [p.clone() for p in run.model.parameters()]
        for rows in minibatches(run.config.grpo, 16, seed=run.minibatch_seed):
            losses = accumulate_gradients(run, experience, rows, run.config.grpo)
            train.optimizer_step(run, losses["total_loss"])
            assert losses["total_loss"] == 0 and math.isnan(losses["entropy"])
            assert math.isnan(losses.get("kl", math.nan)) and math.isnan(losses.get("value_loss", math.nan))
        assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))


@pytest.mark.parametrize("estimator", ["ratio_k3", "k3", "k2", "exact"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_the_kl_term_is_the_estimate_averaged_as_the_loss_is_times_its_coefficient(base, estimator, loss_type):
    run = with_settings(base, use_kl_penalty=True, kl_penalty_coef=0.7, kl_estimator=estimator, loss_type=loss_type)
    experience = off_policy(run)
    rollout, mask = experience.rollout, experience.mask
    with torch.no_grad():
        logp = run.engine.log_probs(rollout, None, {}, reference=run.reference)
        x = run.engine.log_probs(rollout, None, {}, model=run.reference).logp - logp.logp
        k3 = x.exp() - x - 1
        ratio = (logp.logp - rollout.sampling_logp).exp()
    kl = {"ratio_k3": ratio * k3, "k3": k3, "k2": x**2 / 2, "exact": logp.kl}[estimator] * mask
    averaged = {
        "dapo": kl.sum() / mask.sum(), "grpo": (kl.sum(1) / mask.sum(1)).mean(), "dr_grpo": kl.sum() / (16 * run.config.grpo.generation_max_length)
    }[loss_type]
    _, losses = gradient(run, experience)
    assert losses["kl"] == pytest.approx(float(kl.sum() / mask.sum()), rel=1e-3)
    assert losses["total_loss"] - losses["policy_loss"] == pytest.approx(0.7 * float(averaged), rel=1e-3)


def test_values_are_learned_where_no_advantage_is_left_too(base):
    run = with_settings(base, use_value_head=True)
    rollout = sample_groups(run, next(run.batches)).rollout
    experience = experience_of(run, rollout, torch.randn(4, 4))
    experience.advantages = torch.zeros_like(experience.advantages)
    _, losses = gradient(run, experience)
    error = (experience.old_values - experience.returns)[experience.mask]
    assert losses["value_loss"] == pytest.approx(float(0.5 * error.square().mean()), rel=1e-4)
    with torch.no_grad():
        run.value_head.layers[-1].bias += 0.5             # further than the clip of 0.2
    _, losses = gradient(run, experience)
    far, near = (error + 0.5).square(), (error + 0.2).square()
    assert losses["value_loss"] == pytest.approx(float(0.5 * torch.maximum(far, near).mean()), rel=1e-3)
    assert not torch.equal(torch.maximum(far, near), far)


@pytest.mark.parametrize("mode", ["static", "ema", "periodic"])
def test_the_reference_stays_follows_slowly_or_is_replaced(base, mode):
    run = with_settings(base, use_kl_penalty=True, reference_mode=mode, ema_alpha=0.75, reference_update_freq=2)
    run.progress.phase_step = 0
    expected = [p.clone() for p in run.reference.parameters()]
    rollout = sample_groups(run, next(run.batches)).rollout
    for step in 1, 2, 3:
        losses = accumulate_gradients(run, experience_of(run, rollout, torch.randn(4, 4)), torch.arange(16), run.config.grpo)
        train.optimizer_step(run, losses["total_loss"])
        policy = [p.detach().clone() for p in run.model.parameters()]
        if mode == "ema":
            expected = [0.75 * kept + 0.25 * new for kept, new in zip(expected, policy)]
        elif mode == "periodic" and step == 2:
            expected = policy
        for kept, wanted in zip(run.reference.parameters(), expected):
            torch.testing.assert_close(kept, wanted, rtol=1e-5 if mode == "ema" else 0, atol=1e-7 if mode == "ema" else 0)
    assert all(p.grad is None for p in run.reference.parameters())


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(base):
    run = with_settings(base)
    run.progress.skipped = run.progress.skipped_in_a_row = 0
    rollout = sample_groups(run, next(run.batches)).rollout
    experience = experience_of(run, rollout, torch.randn(4, 4))
    for number, broken in enumerate(["gradient", "loss", None], start=1):
        before = [p.clone() for p in run.model.parameters()]
        step = run.progress.step
        losses = accumulate_gradients(run, experience, torch.arange(16), run.config.grpo)
        if broken == "gradient":
            next(run.model.parameters()).grad[0, 0] = math.nan
        norm = train.optimizer_step(run, math.inf if broken == "loss" else losses["total_loss"])["grad_norm"]
        same = all(torch.equal(a, b) for a, b in zip(before, run.model.parameters()))
        assert same == (broken is not None) and math.isfinite(norm) == (broken != "gradient")
        skipped = run.progress.skipped, run.progress.skipped_in_a_row
        assert run.progress.step == step + 1 and skipped == ((number, number) if broken else (2, 0))
        assert all(p.grad is None for p in run.model.parameters())
