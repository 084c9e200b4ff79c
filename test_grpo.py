"""
The algorithm's executable specification: formulas against loops over lists, identities, and gradients.

Every expected value is computed some other way than in grpo.py: with Python floats, by enumeration, or by a law. The
formulas are read from grpo.py's docstrings (tests/formula_language.py).
"""

import inspect
import itertools
import math
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import grpo
from formula_language import Dual, dual, evaluate, evaluate_first, exp, formulas
from grpo import (
    BASELINES, CENTERED_BASELINES, LOSSES, SCALES, aggregate, clipped_loss, compute_group_advantages,
    generalized_advantage_estimation, importance_weights, kl_penalty, overlong_penalty, policy_loss, token_loss, value_loss,
)

# ---- advantages ----------------------------------------------------------------------------------------------------


def test_a_group_of_two_scores_plus_and_minus_one_over_root_two():
    close(compute_group_advantages(torch.tensor([[0.0, 1.0]], dtype=torch.float64)), [[-(0.5**0.5), 0.5**0.5]], 1e-7)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=tolerance)


def advantages_by_hand(rewards, baseline, scale, epsilon):
    """The docstring's formulas over lists, so a misunderstanding of torch cannot hide in both."""
    (_, formula), *table = formulas(compute_group_advantages)
    table = dict(table)
    assert {baseline, scale} <= table.keys(), f"{baseline=} {scale=}: the docstring of compute_group_advantages lacks a formula"
    everything = [r for row in rewards for r in row if r is not None]
    result = []
    for row in rewards:
        group = [r for r in row if r is not None]
        out = []
        for i, r in enumerate(row):
            if r is None or len(group) < 2 or max(group) == min(group):
                out.append(0.0)
                continue
            siblings = [other for j, other in enumerate(row) if other is not None and j != i]
            names = dict(group=group, siblings=siblings, everything=everything, epsilon=epsilon)
            out.append(evaluate(formula, r=r, b=evaluate(table[baseline], **names), s=evaluate(table[scale], **names)))
        result.append(out)
    return result


REWARDS = [
    [0.0, 1.0, 0.25, 0.5],
    [1.3, 0.2, None, -0.7],
    [0.7, 0.7, 0.7, 0.7],
    [2.0, None, None, None],
    [5.0, 5.0, -1.0, 5.0],
]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_equal_the_formula_by_hand(baseline, scale):
    rewards = torch.tensor([[math.nan if r is None else r for r in row] for row in REWARDS], dtype=torch.float64)
    actual = compute_group_advantages(rewards, baseline=baseline, scale=scale, epsilon=0.01)
    close(actual, advantages_by_hand(REWARDS, baseline, scale, 0.01))


def test_ties_are_judged_relative_to_the_size_of_the_rewards():
    rewards = [[1e3, 1000.0009], [1e3, 1000.0011], [0, 1.1e-6], [0, 9e-7], [-1e3, -1000.0009], [-1e3, -1000.0011]]
    tied = (compute_group_advantages(torch.tensor(rewards, dtype=torch.float64)) == 0).all(dim=1)
    assert tied.tolist() == [True, False, False, True, True, False]


def test_lists_are_rewards_too():
    rewards = [[1, 0, 0.5], [2, 2, 2]]
    assert torch.equal(compute_group_advantages(rewards), compute_group_advantages(torch.tensor(rewards)))
    assert compute_group_advantages([[1, 0]]).dtype == torch.float32
    with pytest.raises(ValueError, match="group >= 2"):
        compute_group_advantages([0.8, 0.5, 0.9, 0.6])


# ---- laws that hold for any rewards --------------------------------------------------------------------------------

settings.register_profile("repeatable", derandomize=True, deadline=None)         # the same examples on every machine
settings.load_profile("repeatable")
finite = st.floats(-100, 100, allow_nan=False, width=32)


@st.composite
def reward_groups(draw, unscored=True):
    """(P, G) float64, from rewards that repeat, so that ties and near ties come up; some of them NaN."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(2, 6)))
    values = draw(st.lists(finite, min_size=1, max_size=4)) + [math.nan] * unscored
    flat = draw(st.lists(st.sampled_from(values), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(flat, dtype=torch.float64).view(shape)


variants = st.fixed_dictionaries({"baseline": st.sampled_from([*BASELINES]), "scale": st.sampled_from([*SCALES])})


@given(reward_groups(), st.sampled_from(CENTERED_BASELINES), st.sampled_from([*SCALES]))
def test_siblings_advantages_add_up_to_zero_under_baselines_that_promise_it(rewards, baseline, scale):
    advantages = compute_group_advantages(rewards, baseline=baseline, scale=scale, epsilon=1e-3)
    assert advantages.isfinite().all()
    assert (advantages.sum(dim=1).abs() <= 1e-9 * advantages.abs().amax(dim=1).clamp(min=1)).all()


def test_the_baselines_that_promise_rows_that_sum_to_zero_are_those_whose_rows_do():
    rewards = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.5, 4.0]], dtype=torch.float64)
    for name, is_centered in dict(group_mean=True, leave_one_out=True, group_median=False, global_mean=False).items():
        rows = compute_group_advantages(rewards, baseline=name).sum(dim=1)
        assert (name in CENTERED_BASELINES) == is_centered == bool((rows.abs() < 1e-9).all()), name


@given(reward_groups(), variants.filter(lambda variant: variant["scale"] in ("group", "batch", "none")), st.floats(0.1, 10), st.floats(-50, 50))
def test_advantages_do_not_depend_on_where_points_begin_and_only_unscaled_ones_on_their_unit(rewards, variant, unit, shift):
    spread = rewards.nan_to_num(-math.inf).amax(dim=1) - rewards.nan_to_num(math.inf).amin(dim=1)
    assume(((spread <= 0) | (spread > 1e-2)).all())       # neither side of the border at which a group counts as tied
    before = compute_group_advantages(rewards, **variant, epsilon=0.0)
    after = compute_group_advantages(rewards * unit + shift, **variant, epsilon=0.0)
    close(after, before * (unit if variant["scale"] == "none" else 1.0), 1e-6)


@given(reward_groups(), variants, st.randoms())
def test_siblings_and_groups_in_another_order_have_the_same_advantages(rewards, variant, random):
    p, g = (random.sample(range(n), n) for n in rewards.shape)
    close(compute_group_advantages(rewards[p][:, g], **variant), compute_group_advantages(rewards, **variant)[p][:, g], 1e-9)


@given(reward_groups(), variants)
def test_a_completion_that_could_not_be_scored_is_as_good_as_not_there(rewards, variant):
    assume(variant["baseline"] != "global_mean" and variant["scale"] != "batch")
    advantages = compute_group_advantages(rewards, **variant)
    for row, out in zip(rewards, advantages):
        scored = ~row.isnan()
        assert (out[~scored] == 0).all()
        if scored.sum() >= 2:
            close(out[scored], compute_group_advantages(row[scored][None], **variant)[0], 1e-9)


@given(finite, st.integers(2, 64), variants, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_tied_group_has_exactly_zero_advantage(reward, size, variant, dtype):
    rewards = torch.full((1, size), reward, dtype=dtype)
    assert (compute_group_advantages(rewards, **variant, epsilon=1e-8, global_mean=0.0) == 0).all()


def test_eight_times_seven_tenths_is_a_tie_although_its_float32_mean_is_not_seven_tenths():
    rewards = torch.full((4, 8), 0.7)
    phantom = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-8)
    assert phantom.abs().max() > 5, "the trap is there"
    assert (compute_group_advantages(rewards, epsilon=1e-8) == 0).all()


def test_a_running_mean_takes_the_place_of_the_batchs():
    rewards = torch.tensor([[0.0, 1.0], [3.0, 4.0], [2.0, 2.0]])
    advantages = compute_group_advantages(rewards, baseline="global_mean", scale="none", global_mean=0.25)
    close(advantages, [[-0.25, 0.75], [2.75, 3.75], [0.0, 0.0]], 1e-7)
    close(compute_group_advantages(rewards, baseline="global_mean", scale="none"), [[-2.0, -1.0], [1.0, 2.0], [0.0, 0.0]], 1e-7)
    close(compute_group_advantages(rewards, global_mean=0.25), compute_group_advantages(rewards), 0)


def test_the_advantages_of_maximum_likelihood_by_hand():
    advantages = compute_group_advantages([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, -4], [1, -1, 0, 0]], scale="mean")
    close(advantages, [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4, [0] * 4], 1e-6)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2, 2)])
def test_rewards_without_siblings_are_refused(shape):
    with pytest.raises(ValueError, match="group"):
        compute_group_advantages(torch.zeros(shape))


# ---- losses --------------------------------------------------------------------------------------------------------

CLIP_LOW, CLIP_HIGH, MAX_TOKENS = 0.2, 0.3, 11
KL_ESTIMATORS = "k1", "k2", "k3"


def toy_batch(seed=0, rows=4, width=6, masked_value=float("-inf"), token_level=False):
    """logp, old_logp, advantages, mask in float64, off policy, with ragged rows, one hole and garbage in the padding."""
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    old_logp = logp + 0.4 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, width if token_level else 1, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([width, 1, 4, 2])[:rows]
    mask = torch.arange(width) < lengths[:, None]
    mask[2, 1] = False
    return logp.requires_grad_(), old_logp.masked_fill(~mask, masked_value), advantages, mask


def objective_by_hand(batch, loss_type, dual_clip=None, kl=None, weights=None, moved=None, options=None):
    """Loss, and its derivative with respect to logp[moved], by a loop over tokens with the docstrings' formulas."""
    logp, old_logp, ref_logp, advantages, mask = (tensor.tolist() for tensor in batch)
    per_token = LOSSES[loss_type].per_token
    total = Dual(0.0)
    for i in range(len(mask)):
        tokens = [t for t in range(len(mask[i])) if mask[i][t]]
        now = {t: Dual(logp[i][t], float((i, t) == moved)) for t in tokens}
        log_ratios = [now[t] - old_logp[i][t] for t in tokens]
        sequence_ratio = exp(sum(log_ratios, Dual(0.0)) / len(tokens))
        for t, log_ratio in zip(tokens, log_ratios):
            ratio = sequence_ratio if dual_clip and loss_type == "gspo" else exp(log_ratio)
            names = defaults(per_token) | (options or {}) | dict(
                ratio=ratio, sequence_ratio=sequence_ratio, product=exp(sum(log_ratios, Dual(0.0))), logp=now[t],
                old_logp=old_logp[i][t], A=advantages[i][t if len(advantages[i]) > 1 else 0],
                clip_low=CLIP_LOW, clip_high=CLIP_HIGH,
            )
            x = evaluate(formulas(clipped_loss)[1][1], **names | dict(dual_clip=dual_clip)) if dual_clip else evaluate_first(per_token, **names)
            x = x * (weights[i][t].item() if weights is not None else 1.0)
            if kl:
                k = evaluate(dict(formulas(kl_penalty))[kl.removeprefix("ratio_")], x=ref_logp[i][t] - now[t])
                x = x + 0.7 * (exp(log_ratio) * k if kl.startswith("ratio_") else k)
            counts = COUNTS | dict(length=len(tokens), group_tokens=COUNTS["group_tokens"][i].item())
            total += evaluate(dict(formulas(aggregate))[LOSSES[loss_type].aggregation], x=x, **counts)
    return total


def defaults(per_token):
    """The options of a loss with their defaults: parameters after *."""
    parameters = inspect.signature(per_token).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


COUNTS = dict(                  # of the whole step, of which a batch is a part
    num_tokens=17, num_sequences=9, max_tokens=MAX_TOKENS, num_prompts=3, group_tokens=torch.tensor([[8], [8], [6], [6]]))
ONES = dict(num_tokens=1, num_sequences=1, max_tokens=1, num_prompts=1, group_tokens=torch.ones(1, 1))
AGGREGATIONS = {loss.aggregation for loss in LOSSES.values()}
KL_TERMS = [None, *KL_ESTIMATORS, "ratio_k1", "ratio_k2", "ratio_k3"]


def assert_equal_by_hand(loss, batch, **settings):
    """Value and gradient, token by token."""
    logp, mask = batch[0], batch[4]
    loss.backward()
    close(loss, objective_by_hand(batch, **settings).value)
    for i, t in itertools.product(range(mask.shape[0]), range(mask.shape[1])):
        close(logp.grad[i, t], objective_by_hand(batch, **settings, moved=(i, t)).slope)


@pytest.mark.parametrize("kl", KL_TERMS)
@pytest.mark.parametrize("loss_type", LOSSES)             # among them every aggregation
def test_every_loss_and_kl_term_equals_a_loop_over_its_formulas(loss_type, kl):
    logp, old_logp, advantages, mask = toy_batch(token_level=kl == "k2")
    ref_logp = toy_batch(seed=7)[0].detach()
    loss, _ = policy_loss(
        logp, old_logp, advantages, mask, loss_type=loss_type, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, **COUNTS)
    if kl:
        ratio = (logp - old_logp.masked_fill(~mask, 0.0)).exp() if kl.startswith("ratio") else None
        penalty = kl_penalty(logp, ref_logp, estimator=kl.removeprefix("ratio_"), ratio=ratio)
        loss = loss + 0.7 * aggregate(penalty, mask, LOSSES[loss_type].aggregation, **COUNTS)
    assert_equal_by_hand(loss, (logp, old_logp, ref_logp, advantages, mask), loss_type=loss_type, kl=kl)


@pytest.mark.parametrize("loss_type,option", [(name, option) for name, loss in LOSSES.items() for option in loss.bounds if option != "dual_clip"])
def test_each_option_of_a_loss_is_that_of_its_formula(loss_type, option):
    default, (low, high) = defaults(LOSSES[loss_type].per_token)[option], LOSSES[loss_type].bounds[option]
    other, tells = (default + (low if default > low else min(high, 2 * default + 1))) / 2, False
    for seed in range(20):
        logp, old_logp, advantages, mask = toy_batch(seed=seed, token_level=True)
        old_logp = logp.detach() + 3 * (old_logp - logp.detach())                # far off policy
        before, after = (
            policy_loss(logp, old_logp, advantages, mask, loss_type=loss_type, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, **{option: value}, **COUNTS)[0]
            for value in (default, other))
        tells |= bool(before != after)
        batch = logp, old_logp, logp.detach(), advantages, mask
        assert_equal_by_hand(after, batch, loss_type=loss_type, options={option: other})
    assert tells


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_the_dual_clip_equals_its_formula_and_bounds_what_the_first_one_lets_through(loss_type):
    logp, old_logp, advantages, mask = toy_batch(seed=4)
    advantages = advantages.abs() * torch.tensor([[-1.0], [-1.0], [-1.0], [1.0]])
    old_logp = old_logp - 1                               # ratios around e: with a negative advantage nothing else stops them
    options = dict(loss_type=loss_type, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, **COUNTS)
    loss, stats = policy_loss(logp, old_logp, advantages, mask, dual_clip=2.5, **options)
    single = policy_loss(logp, old_logp, advantages, mask, **options)[1]["clip_fraction"]
    assert 0 < single < stats["clip_fraction"]
    batch = logp, old_logp, logp.detach(), advantages, mask
    assert_equal_by_hand(loss, batch, loss_type=loss_type, dual_clip=2.5)


@pytest.mark.parametrize("loss_type,dual_clip", [
    *((name, None) for name in LOSSES), *((name, 1.5) for name, loss in LOSSES.items() if "dual_clip" in loss.bounds)])
def test_the_clip_fraction_counts_tokens_without_gradient_or_with_a_capped_weight(loss_type, dual_clip):
    logp, old_logp, advantages, mask = toy_batch(seed=8, token_level=True)
    old_logp, per_token = logp.detach() + 3 * (old_logp - logp.detach()), LOSSES[loss_type].per_token      # far off policy
    options = dict(loss_type=loss_type, clip_low=CLIP_LOW, clip_high=CLIP_HIGH) | ({"dual_clip": dual_clip} if dual_clip else {})
    _, stats = policy_loss(logp, old_logp, advantages, mask, **options, **COUNTS)
    count = 0
    for i in range(4):
        row = [(logp[i, t] - old_logp[i, t]).item() for t in range(6) if mask[i, t]]
        for t, A in zip(mask[i].nonzero().flatten(), advantages[i][mask[i]].tolist()):
            now = Dual(logp[i, t].item(), 1.0)
            ratio = exp(Dual(sum(row) / len(row), 1.0)) if per_token is grpo.gspo else exp(now - old_logp[i, t].item())
            names = dict(
                ratio=ratio, sequence_ratio=ratio, product=exp(sum(row)), A=A, logp=now, old_logp=old_logp[i, t].item(),
                clip_low=CLIP_LOW, clip_high=CLIP_HIGH) | defaults(per_token)
            formula = formulas(clipped_loss)[1][1] if dual_clip else None       # gspo's too, with its own ratio
            x = evaluate(formula, **names | dict(dual_clip=dual_clip)) if dual_clip else evaluate_first(per_token, **names)
            count += ratio.value > 1 + CLIP_HIGH if per_token is grpo.cispo else dual(x).slope == 0
    assert count > 0 or loss_type in ("reinforce", "sapo")
    close(stats["clip_fraction"], count / COUNTS["num_tokens"], 1e-6)


def test_no_gradient_flows_through_weights_statistics_or_generalized_advantages():
    logp, old_logp, advantages, mask = toy_batch()
    _, stats = policy_loss(logp, old_logp, advantages, mask, **COUNTS)
    sampling_logp = toy_batch(seed=6)[0]
    weights = importance_weights(logp, sampling_logp, mask, cap=1.2)
    estimates = generalized_advantage_estimation(torch.ones_like(logp), logp, mask)
    assert logp.requires_grad and sampling_logp.requires_grad
    assert not any(x.requires_grad for x in (*stats.values(), weights, *estimates))


def test_a_call_without_options_takes_their_usual_values():
    logp, old_logp, advantages, mask = toy_batch(seed=9)
    ref_logp, rewards = toy_batch(seed=7)[0].detach(), torch.tensor([[0.0, 1e-7], [0.0, 1.0]], dtype=torch.float64)
    values, filled = 3 * ref_logp, old_logp.masked_fill(~mask, 0.0)
    pairs = [
        (policy_loss(logp, old_logp, advantages, mask, num_tokens=3)[0], policy_loss(
            logp, old_logp, advantages, mask, loss_type="dapo", num_tokens=3, clip_low=0.2, clip_high=0.2)[0]),
        (policy_loss(logp, old_logp, advantages, mask, num_tokens=3)[0], policy_loss(
            logp, old_logp, advantages, mask, num_tokens=3, dual_clip=math.inf)[0]),
        (compute_group_advantages(rewards / 3e-6), compute_group_advantages(
            rewards / 3e-6, baseline="group_mean", scale="group", epsilon=1e-8)),
        (kl_penalty(logp, ref_logp), kl_penalty(logp, ref_logp, estimator="k3")),
        (value_loss(values, filled, ref_logp, mask, num_tokens=3), value_loss(
            values, filled, ref_logp, mask, num_tokens=3, clip=0.2)),
        (generalized_advantage_estimation(logp, values, mask)[0], generalized_advantage_estimation(
            logp, values, mask, gamma=0.99, lam=0.95)[0]),
    ]
    for by_default, expected in pairs:
        assert torch.equal(by_default, expected)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_importance_weights_multiply_a_tokens_loss(loss_type):
    logp, old_logp, advantages, mask = toy_batch(seed=5)
    sampling_logp = toy_batch(seed=6)[0].detach()
    weights = importance_weights(old_logp, sampling_logp, mask, cap=1.2)
    ((_, formula),) = formulas(importance_weights)
    for i, t in itertools.product(range(4), range(6)):
        names = dict(trainer_logp=old_logp[i, t].item(), sampling_logp=sampling_logp[i, t].item(), cap=1.2)
        close(weights[i, t], dual(evaluate(formula, **names)).value if mask[i, t] else 1.0)
    assert (weights == 1.2).any() and (weights[mask] < 1).any()
    options = dict(loss_type=loss_type, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, **COUNTS)
    loss, _ = policy_loss(logp, old_logp, advantages, mask, weights=weights, **options)
    batch = logp, old_logp, logp.detach(), advantages, mask
    assert_equal_by_hand(loss, batch, loss_type=loss_type, weights=weights)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_ratio_beyond_all_bounds_stays_finite(loss_type):
    logp, mask = torch.tensor([[-1.0, -2.0]], requires_grad=True), torch.ones(1, 2, dtype=torch.bool)
    for gap, advantage in itertools.product([1e4, -1e4], [1.0, -1.0, 0.0]):
        loss, _ = policy_loss(logp, logp.detach() + gap, torch.tensor([advantage]), mask, loss_type=loss_type, **ONES)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert loss.isfinite() and gradient.isfinite().all(), f"{gap} {advantage}"


@pytest.mark.parametrize("loss_type,A,gap,loss", [
    ("dapo", -1.0, 50.0, math.exp(20)), ("dapo", 1.0, -50.0, -math.exp(-20)), ("cispo", 1.0, 50.0, math.exp(20)),
    ("gspo", -1.0, 50.0, math.exp(20)), ("gspo", 1.0, -50.0, -math.exp(-20)), ("cispo", 1.0, -50.0, math.exp(-20)),
])
def test_a_ratio_is_cut_at_e_to_the_twenty(loss_type, A, gap, loss):
    logp, advantages = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([A], dtype=torch.float64)
    options = dict(loss_type=loss_type, clip_high=1e12 if loss_type == "cispo" else 0.2, num_tokens=1, num_sequences=1)
    actual, stats = policy_loss(logp, logp - gap, advantages, torch.ones(1, 1, dtype=torch.bool), **options)
    close(actual, loss, 1e-12)
    close(stats["ratio_deviation"], abs(math.exp(math.copysign(20, gap)) - 1), 1e-12)
    close(stats["approx_kl"], math.exp(math.copysign(20, gap)) - 1 - gap, 1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_halves_of_a_batch_add_up_to_the_whole(loss_type):
    logp, old_logp, advantages, mask = toy_batch(seed=1)
    policy_loss(logp, old_logp, advantages, mask, loss_type=loss_type, **COUNTS)[0].backward()
    whole, logp.grad = logp.grad, None
    for rows in torch.tensor([0]), torch.tensor([3, 1, 2]):
        counts = COUNTS | dict(group_tokens=COUNTS["group_tokens"][rows])
        part = policy_loss(logp[rows], old_logp[rows], advantages[rows], mask[rows], loss_type=loss_type, **counts)
        part[0].backward()
    close(logp.grad, whole, 1e-12)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_the_padding_changes_nothing(loss_type, garbage):
    logp, old_logp, advantages, mask = toy_batch(seed=2, masked_value=0.0)
    counts = COUNTS | dict(loss_type=loss_type)
    clean = policy_loss(logp, old_logp, advantages, mask, **counts)
    dirty = policy_loss(logp, old_logp.masked_fill(~mask, garbage), advantages, mask, **counts)
    clean[0].backward()
    expected, logp.grad = logp.grad, None
    dirty[0].backward()
    assert torch.equal(clean[0], dirty[0]) and torch.equal(logp.grad, expected)
    assert clean[1] == dirty[1]


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.aggregation == "token_mean"])
def test_on_the_first_step_the_gradient_is_reinforce(loss_type):
    logp, _, advantages, mask = toy_batch()
    loss, stats = policy_loss(logp, logp.detach(), advantages, mask, loss_type=loss_type, num_tokens=int(mask.sum()))
    loss.backward()
    close(logp.grad, -advantages * mask / mask.sum(), 1e-12)
    assert stats["clip_fraction"] == 0 and stats["ratio_deviation"] == 0


def test_the_clip_stops_tokens_that_left_the_trust_region_in_the_direction_of_their_advantage():
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    logp, mask = ratio.log().requires_grad_(), torch.ones(1, 5, dtype=torch.bool)
    loss, stats = policy_loss(logp, torch.zeros_like(logp), advantages, mask, num_tokens=5)
    loss.backward()
    assert (logp.grad[0] == 0).tolist() == [True, False, False, True, False]
    close(stats["clip_fraction"], 2 / 5, 1e-7)
    close(stats["ratio_deviation"], (4 * 0.5 + 0.1) / 5)
    close(stats["approx_kl"], sum(r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.1)) / 5)


def test_a_fully_masked_micro_batch_has_a_loss_of_zero_that_can_be_differentiated():
    logp, old_logp, advantages, mask = toy_batch()
    for loss_type in LOSSES:
        loss, _ = policy_loss(logp, old_logp, advantages, torch.zeros_like(mask), loss_type=loss_type, **COUNTS)
        loss.backward()
        assert loss == 0 and (logp.grad == 0).all()


def test_missing_denominators_are_named():
    logp, old_logp, advantages, mask = toy_batch()
    with pytest.raises(ValueError, match="num_sequences"):
        policy_loss(logp, old_logp, advantages, mask, loss_type="grpo", num_tokens=3)
    with pytest.raises(ValueError, match="max_tokens"):
        policy_loss(logp, old_logp, advantages, mask, loss_type="dr_grpo", num_tokens=3, num_sequences=3)
    with pytest.raises(ValueError, match="divides by num_prompts and group_tokens: pass"):
        policy_loss(logp, old_logp, advantages, mask, loss_type="scale_rl", num_tokens=3)
    for missing, incomplete in ("group_tokens", dict(num_prompts=3)), ("num_prompts", dict(group_tokens=torch.ones(4, 1))):
        with pytest.raises(ValueError, match=f"divides by {missing}: pass"):
            policy_loss(logp, old_logp, advantages, mask, loss_type="scale_rl", num_tokens=3, **incomplete)
    with pytest.raises(ValueError, match="loss_type"):
        policy_loss(logp, old_logp, advantages, mask, loss_type="ppo", num_tokens=3)
    with pytest.raises(ValueError, match="aggregation"):
        aggregate(logp, mask, "mean", num_tokens=3)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_entry_has_bounds_for_each_option_of_its_function_and_its_default_keeps_them(loss):
    options = defaults(loss.per_token)
    assert options.keys() == loss.bounds.keys()
    assert all(low <= options[name] <= high for name, (low, high) in loss.bounds.items())
    assert {*inspect.signature(loss.per_token).parameters} <= {"logp", "log_ratio", "advantages", "mask", "clip_low", "clip_high", "unused", *options}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_completions_that_got_too_unlikely_are_dropped_if_they_were_below_the_mean(loss_type):
    logp, old_logp, _, mask = toy_batch(seed=3)
    old_logp = logp.detach() + torch.tensor([[0.6], [0.6], [0.3], [-0.4]])       # unlikelier, unlikelier, by less than the limit, likelier
    for sign in 1.0, -1.0:
        advantages, ((_, formula),) = torch.full((4, 1), sign), formulas(grpo.too_unlikely)
        loss, clipped, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type, off_policy_limit=0.5)
        free, removed, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type)
        for i in range(4):
            old_now = dict(old_logp=old_logp[i][mask[i]], logp=logp[i][mask[i]].detach())
            dropped = evaluate(formula, **old_now, off_policy_limit=0.5, A=sign)
            close(loss[i], [0.0 if dropped else x for x in free[i].tolist()])
            assert clipped[i].tolist() == [bool(x) or dropped for x in removed[i]]
        assert (loss[0] == 0).all() == (sign < 0) and not (loss[3] == 0).all()


def test_every_aggregation_has_a_formula_and_a_loss():
    assert {name for name, _ in formulas(aggregate)} == AGGREGATIONS


def test_an_option_that_a_loss_does_not_have_is_named():
    for loss_type, known in ("cispo", []), ("gspo", ["dual_clip"]):
        with pytest.raises(ValueError, match=re.escape(f"{loss_type} has no option ['delta']; its options: {known}")):
            policy_loss(*toy_batch(), loss_type=loss_type, delta=0.1, **COUNTS)


# ---- KL ------------------------------------------------------------------------------------------------------------


def expectation(estimator, corrected):
    """E[penalty] and its gradient for a policy over six symbols, by enumeration: every symbol, weighted by its probability."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    ref_logp = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    probs = logp.exp().detach()                           # how often each symbol is sampled; sampling has no gradient
    ratio = (logp - logp.detach()).exp() if corrected else None
    ratio = ratio.detach() if corrected == "detached" else ratio
    penalty = (probs * kl_penalty(logp, ref_logp, estimator=estimator, ratio=ratio)).sum()
    (gradient,) = torch.autograd.grad(penalty, logits, retain_graph=True)
    forward = (logits.softmax(0) * (logits.log_softmax(0) - ref_logp)).sum()     # KL(policy || reference)
    backward = (ref_logp.exp() * (ref_logp - logits.log_softmax(0))).sum()       # KL(reference || policy)
    return penalty, gradient, forward, *(torch.autograd.grad(kl, logits, retain_graph=True)[0] for kl in (forward, backward))


@pytest.mark.parametrize(
    "estimator,corrected,unbiased,gradient_of",
    [
        ("k1", False, True, "nothing"),
        ("k2", False, False, "KL(policy || reference)"),
        ("k3", False, True, "KL(reference || policy)"),
        ("k1", True, True, "KL(policy || reference)"),
        ("k3", True, True, "KL(policy || reference)"),
        ("k2", True, False, "neither"),
        ("k3", "detached", True, "KL(reference || policy)"),     # without its gradient the ratio corrects nothing
    ],
)
def test_which_kl_estimator_has_which_value_and_gradient(estimator, corrected, unbiased, gradient_of):
    penalty, gradient, kl, forward, backward = expectation(estimator, corrected)
    assert (abs(penalty - kl) < 1e-12) == unbiased
    matches = {
        "nothing": torch.zeros(6, dtype=torch.float64),
        "KL(policy || reference)": forward,
        "KL(reference || policy)": backward,
    }
    for name, expected in matches.items():
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12) == (name == gradient_of), name


def test_in_the_reward_only_k1_pulls_the_policy_to_the_reference():
    """The gradient of an expected reward is that of log p times the points: by enumeration, against that of the KL itself."""
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(6, generator=generator, dtype=torch.float64)
    ref_logp = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    pull = {}
    for distance in 1.0, 0.1, 0.01:
        logits = (ref_logp + distance * direction).requires_grad_()
        logp = logits.log_softmax(0)
        (truth,) = torch.autograd.grad((logp.exp() * (logp - ref_logp)).sum(), logits, retain_graph=True)
        for estimator in KL_ESTIMATORS:
            points = kl_penalty(logp, ref_logp, estimator=estimator).detach()
            (gradient,) = torch.autograd.grad((logp.exp().detach() * points * logp).sum(), logits, retain_graph=True)
            pull[estimator, distance] = float(gradient @ truth / truth.square().sum())
        assert pull["k1", distance] == pytest.approx(1, abs=1e-12)
    for estimator in "k2", "k3":
        assert abs(pull[estimator, 0.01]) < 0.05 and abs(pull[estimator, 0.1]) < 0.5


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_values_by_hand(estimator):
    for logp, ref_logp in [(-1.0, -1.0), (-0.5, -2.0), (-3.0, -0.25)]:
        x = ref_logp - logp
        expected = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[estimator]
        actual = kl_penalty(torch.tensor([[logp]]).double(), torch.tensor([[ref_logp]]).double(), estimator=estimator)
        close(actual, [[expected]], 1e-12)
    with pytest.raises(ValueError, match="estimator"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), estimator="k4")


def test_the_overlong_penalty_falls_over_the_buffer_and_nowhere_else():
    lengths = [1, 7, 8, 9, 10]
    ((_, formula),) = formulas(overlong_penalty)
    by_hand = [evaluate(formula, length=n, max_tokens=10, buffer=3) for n in lengths]
    close(overlong_penalty(torch.tensor(lengths), max_tokens=10, buffer=3), by_hand, 1e-6)
    assert by_hand == [0, 0, -1 / 3, -2 / 3, -1]


# ---- value function ------------------------------------------------------------------------------------------------


def gae_by_hand(rewards, values, mask, gamma, lam):
    """The docstring's recursion over the chosen tokens of each row, and the sum of eq. 16, which must be the same."""
    step = dict(formulas(generalized_advantage_estimation))
    advantages, returns = ([[0.0] * len(row) for row in rewards] for _ in range(2))
    for i, row in enumerate(rewards):
        chosen = [t for t in range(len(row)) if mask[i][t]]
        deltas, names = {}, dict(next_V=0.0, next_A=0.0, gamma=gamma, lam=lam)
        for t in reversed(chosen):
            names |= dict(r=row[t], V=values[i][t])
            names["delta"] = deltas[t] = evaluate(step["delta"], **names)
            names["A"] = advantages[i][t] = evaluate(step["A"], **names)
            returns[i][t] = evaluate(step["R"], **names)
            names |= dict(next_V=names["V"], next_A=names["A"])
        for n, t in enumerate(chosen):
            assert advantages[i][t] == pytest.approx(sum((gamma * lam) ** m * deltas[u] for m, u in enumerate(chosen[n:])))
    return advantages, returns


@pytest.mark.parametrize("gamma,lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_its_formulas_and_steps_over_tokens_of_others(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 7, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0]]).bool()
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, gamma=gamma, lam=lam)
    advantages_by_hand, returns_by_hand = gae_by_hand(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    close(advantages, advantages_by_hand, 1e-12)
    close(returns, returns_by_hand, 1e-12)


def test_gae_with_lambda_one_is_return_minus_value_and_with_lambda_zero_the_td_error():
    torch.manual_seed(1)
    rewards, values = torch.randn(2, 2, 5, dtype=torch.float64)
    mask = torch.ones(2, 5, dtype=torch.bool)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    close(generalized_advantage_estimation(rewards, values, mask, gamma=1.0, lam=1.0)[0], to_go - values, 1e-12)
    following = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    td_error = rewards + 0.9 * following - values
    close(generalized_advantage_estimation(rewards, values, mask, gamma=0.9, lam=0.0)[0], td_error, 1e-12)
    of_one_token = generalized_advantage_estimation(rewards[:, :1], values[:, :1], mask[:, :1])
    close(of_one_token[0], rewards[:, :1] - values[:, :1], 1e-12)


def test_value_loss_by_hand_and_its_gradient_stops_outside_the_clip():
    points = [(1.0, 0.0, 2.0), (0.1, 0.0, 1.0), (-0.7, 0.5, -2.0), (0.4, 0.5, -1.0), (-0.7, 0.5, 3.0)]     # V, old_V, R
    values, old, returns = (torch.tensor([[*column, 9.0]], dtype=torch.float64) for column in zip(*points))
    values, mask = values.requires_grad_(), torch.tensor([[True] * 5 + [False]])
    loss = value_loss(values, old, returns, mask, num_tokens=4, clip=0.2)
    ((_, formula),) = formulas(value_loss)
    by_hand = sum(evaluate(formula, V=v, old_V=before, R=r, c=0.2, num_tokens=4) for v, before, r in points)
    errors = (0.2 - 2) ** 2, (0.1 - 1) ** 2, (0.3 + 2) ** 2, (0.4 + 1) ** 2, (-0.7 - 3) ** 2
    assert by_hand == pytest.approx(0.5 * sum(errors) / 4)
    close(loss, by_hand, 1e-12)
    loss.backward()
    close(values.grad, [[0.0, (0.1 - 1) / 4, 0.0, (0.4 + 1) / 4, (-0.7 - 3) / 4, 0.0]], 1e-12)


# ---- copied out ----------------------------------------------------------------------------------------------------


def test_every_function_but_three_works_copied_alone_into_another_project():
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    of_tokens = dict(logp=ones, log_ratio=ones, advantages=ones, mask=mask, clip_low=0.2, clip_high=0.2)
    calls = {
        compute_group_advantages: lambda f: [
            f(torch.rand(2, 3), baseline=baseline, scale=scale) for baseline in BASELINES for scale in SCALES],
        aggregate: lambda f: [f(ones, mask, kind, **ONES) for kind in AGGREGATIONS],
        kl_penalty: lambda f: f(ones, ones),
        value_loss: lambda f: f(ones, ones, ones, mask, num_tokens=6),
        generalized_advantage_estimation: lambda f: f(ones, ones, mask),
        overlong_penalty: lambda f: f(torch.tensor([3, 4]), max_tokens=4, buffer=2),
        importance_weights: lambda f: f(ones, ones, mask, cap=2.0),
        grpo.too_unlikely: lambda f: f(ones, ones, mask, 1.0),
    } | {loss.per_token: lambda f: f(**of_tokens) for loss in LOSSES.values() if loss.per_token is not grpo.gspo}
    functions = {f for f in vars(grpo).values() if inspect.isfunction(f) and f.__module__ == "grpo"}
    assert functions - set(calls) == {policy_loss, token_loss, grpo.gspo}
    imports = re.search(r"below `(.*)` and `(.*)`\swithout", grpo.__doc__).groups()
    for function, call in calls.items():
        project = {}
        exec("\n".join(imports), project)
        exec(inspect.getsource(function), project)
        call(project[function.__name__])


# ---- and it learns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_bandit_with_one_right_token_is_solved_in_fifty_steps(loss_type):
    torch.manual_seed(0)
    logits = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(50):
        tokens = torch.multinomial(logits.softmax(0).detach(), 32, replacement=True).view(32, 1)
        advantages = compute_group_advantages((tokens == 7).float().view(4, 8)).view(-1)
        logp = logits.log_softmax(0)[tokens]
        loss, _ = policy_loss(logp, logp.detach(), advantages, torch.ones_like(tokens).bool(), loss_type=loss_type,
                              num_tokens=32, num_sequences=32, max_tokens=1, num_prompts=4, group_tokens=torch.tensor(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert logits.softmax(0)[7] > 0.9
