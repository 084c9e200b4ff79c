"""
The algorithm's executable specification: formulas against loops over lists, identities, and gradients.

Every expected value is computed some other way than in grpo.py: by formulas for one number at a time, by enumeration, or by a law.
"""

import inspect
import itertools
import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from grpo import (
    BASELINES, CENTERED_BASELINES, LOSSES, SCALES, clipped_loss, compute_group_advantages, generalized_advantage_estimation,
    importance_weights, kl_penalty, overlong_penalty, policy_loss, token_loss, token_weights, value_loss, weighted_loss,
)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=tolerance)


BASELINES_BY_HAND = {
    "group_mean": lambda group, siblings, everything: statistics.fmean(group),
    "group_median": lambda group, siblings, everything: statistics.median(group),
    "global_mean": lambda group, siblings, everything: statistics.fmean(everything),
    "leave_one_out": lambda group, siblings, everything: statistics.fmean(siblings),
}
SCALES_BY_HAND = {
    "group": lambda group, everything: statistics.stdev(group) + 0.01,
    "batch": lambda group, everything: statistics.stdev(everything) + 0.01,
    "mean": lambda group, everything: statistics.fmean(group) if statistics.fmean(group) > 0 else math.inf,
    "none": lambda group, everything: 1.0,
}


def advantages_by_hand(rewards, baseline, scale):
    """The formulas over lists, with epsilon 0.01, so a misunderstanding of torch cannot hide in both."""
    everything = [r for row in rewards for r in row if r is not None]
    result = [[0.0] * len(row) for row in rewards]
    for out, row in zip(result, rewards):
        group = [r for r in row if r is not None]
        for i, r in enumerate(row):
            if r is None or len(group) < 2 or max(group) == min(group):
                continue
            siblings = [other for j, other in enumerate(row) if other is not None and j != i]
            out[i] = (r - BASELINES_BY_HAND[baseline](group, siblings, everything)) / SCALES_BY_HAND[scale](group, everything)
    return result


settings.register_profile("repeatable", derandomize=True, deadline=None)         # the same examples on every machine
settings.load_profile("repeatable")
BASELINE, SCALE = st.sampled_from([*BASELINES]), st.sampled_from([*SCALES])


@st.composite
def reward_groups(draw):
    """(P, G) rewards in eighths, of which sums are exact, that repeat, so that ties come up; some are None."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(2, 6))
    values = st.sampled_from([*draw(st.lists(st.integers(-800, 800).map(lambda n: n / 8), min_size=1, max_size=4)), None])
    return draw(st.lists(st.lists(values, min_size=columns, max_size=columns), min_size=rows, max_size=rows))


@settings(max_examples=400)
@given(reward_groups(), BASELINE, SCALE)
def test_advantages_equal_the_formula_by_hand(rewards, baseline, scale):
    """Unscored completions are as good as not there, and siblings' advantages sum to 0 under baselines that promise it."""
    tensor = torch.tensor([[math.nan if r is None else r for r in row] for row in rewards], dtype=torch.float64)
    actual = compute_group_advantages(tensor, baseline=baseline, scale=scale, epsilon=0.01)
    close(actual, advantages_by_hand(rewards, baseline, scale))
    if baseline in CENTERED_BASELINES:
        assert (actual.sum(dim=1).abs() <= 1e-9 * actual.abs().amax(dim=1).clamp(min=1)).all()


@given(st.floats(-100, 100, width=32), st.integers(2, 64), BASELINE, SCALE, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_any_tied_group_has_exactly_zero_advantage(reward, size, baseline, scale, dtype):
    rewards = torch.full((1, size), reward, dtype=dtype)
    assert (compute_group_advantages(rewards, baseline=baseline, scale=scale, global_mean=0.0) == 0).all()


def test_ties_are_judged_relative_to_the_size_of_the_rewards():
    rewards = [[1e3, 1000.0009], [1e3, 1000.0011], [0, 1.1e-6], [0, 9e-7], [-1e3, -1000.0009], [-1e3, -1000.0011]]
    tied = (compute_group_advantages(torch.tensor(rewards, dtype=torch.float64)) == 0).all(dim=1)
    assert tied.tolist() == [True, False, False, True, True, False]


def test_a_running_mean_takes_the_place_of_the_batchs():
    rewards = torch.tensor([[0.0, 1.0], [3.0, 4.0], [2.0, 2.0]])
    advantages = compute_group_advantages(rewards, baseline="global_mean", scale="none", global_mean=0.25)
    close(advantages, [[-0.25, 0.75], [2.75, 3.75], [0.0, 0.0]], 1e-7)
    assert compute_group_advantages(rewards, global_mean=0.25).equal(compute_group_advantages([[0, 1], [3, 4], [2, 2]])), "not that of a group"


@pytest.mark.parametrize("rewards", [[0.8, 0.5, 0.9, 0.6], torch.zeros(4, 1), torch.zeros(2, 2, 2)])
def test_rewards_without_siblings_are_refused(rewards):
    with pytest.raises(ValueError, match="group >= 2"):
        compute_group_advantages(rewards)


CLIP_LOW, CLIP_HIGH, MAX_TOKENS = 0.2, 0.3, 11


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


def clip(x, low, high):
    return max(min(x, high), low)


def clipped(A, ratio, dual_clip=None, **_):
    gain = min(ratio * A, clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH) * A)
    return -max(gain, dual_clip * A) if dual_clip and A < 0 else -gain


def capped(A, ratio, logp, **_):
    return -min(ratio, 1 + CLIP_HIGH).detach() * A * logp if ratio < 1 + CLIP_HIGH else -(1 + CLIP_HIGH) * A * logp


def sapo(A, ratio, tau_positive=1.0, tau_negative=1.05, **_):
    tau = tau_positive if A > 0 else tau_negative
    return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * A


def sequence_mask(A, logp, product, alpha=0.0, beta=3.0, **_):
    return -product.detach() * A * logp if alpha <= product <= beta else 0.0


# The loss of one token, of scalars: its ratio, the geometric mean and the product of the ratios of its completion.
LOSSES_BY_HAND = {
    "dapo": clipped, "grpo": clipped, "dr_grpo": clipped, "cispo": capped, "scale_rl": capped, "sapo": sapo,
    "gspo": lambda A, sequence_ratio, dual_clip=None, **_: clipped(A, sequence_ratio, dual_clip),
    "dppo": lambda A, ratio, logp, old_logp, delta=0.2, **_: (
        -ratio * A if math.copysign(1, A) * (logp.exp() - old_logp.exp()) <= delta else 0.0),
    "icepop": lambda A, ratio, alpha=0.5, beta=5.0, **_: -ratio * A if alpha <= ratio <= beta else 0.0,
    "sequence_mask": sequence_mask,
    "reinforce": lambda A, logp, **_: -A * logp,
}
def weights_by_hand(mask, aggregation):
    """The factor of each token, over lists: rows of an update in groups of two, with their numbers of tokens counted one by one."""
    lengths = [sum(row) for row in mask.tolist()]
    group_tokens = [lengths[row] + lengths[row ^ 1] for row in range(len(lengths))]
    num_sequences, num_prompts = sum(n > 0 for n in lengths), sum(n > 0 for n in group_tokens[::2])
    divisor = {
        "token_mean": lambda row: sum(lengths), "sequence_mean": lambda row: lengths[row] * num_sequences,
        "prompt_mean": lambda row: group_tokens[row] * num_prompts, "constant": lambda row: num_sequences * MAX_TOKENS,
    }[aggregation]
    return torch.tensor([[1 / divisor(row) if chosen else 0 for chosen in tokens] for row, tokens in enumerate(mask.tolist())]).double()


CLIPS = dict(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)


def assert_equal_by_hand(batch, loss_type, **options):
    """Value and gradient against a loop over tokens, each alone. clip_fraction is 1 without a gradient or with a capped weight."""
    logp, old_logp, advantages, mask = batch
    total, weights = 0.0 * logp.sum(), weights_by_hand(mask, LOSSES[loss_type].aggregation)
    for row in range(len(mask)):
        tokens = mask[row].nonzero().flatten().tolist()
        log_ratios = [logp[row, t] - old_logp[row, t] for t in tokens]
        for t, log_ratio in zip(tokens, log_ratios):
            total += weights[row, t] * LOSSES_BY_HAND[loss_type](
                A=advantages[row, t % advantages.shape[1]].item(), logp=logp[row, t], old_logp=old_logp[row, t],
                ratio=log_ratio.exp(), sequence_ratio=(sum(log_ratios) / len(tokens)).exp(), product=sum(log_ratios).exp(), **options)
    loss, stats = policy_loss(logp, old_logp, advantages, mask, weights, loss_type=loss_type, **options, **CLIPS)
    close(loss, total)
    (ours,), (by_hand,) = torch.autograd.grad(loss, logp), torch.autograd.grad(total, logp)
    close(ours, by_hand)
    removed = (logp - old_logp).exp() > 1 + CLIP_HIGH if loss_type in ("cispo", "scale_rl") else ours == 0
    assert stats["clip_fraction"].equal((removed & mask).float())
    return loss, stats


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("loss_type", LOSSES)             # among them every aggregation
def test_every_loss_equals_a_loop_over_its_formula(loss_type, token_level):
    assert_equal_by_hand(toy_batch(token_level=token_level), loss_type)


def far_off_policy(seed, token_level):
    logp, old_logp, advantages, mask = toy_batch(seed=seed, token_level=token_level)
    return logp, logp.detach() + 3 * (old_logp - logp.detach()), advantages, mask


@pytest.mark.parametrize("loss_type,option", [(name, option) for name, loss in LOSSES.items() for option in loss.bounds if option != "dual_clip"])
def test_each_option_of_a_loss_is_that_of_its_formula(loss_type, option):
    default, (low, high) = defaults(LOSSES[loss_type].per_token)[option], LOSSES[loss_type].bounds[option]
    other, tells = (default + (low if default > low else min(high, 2 * default + 1))) / 2, False
    for seed in range(6):
        batch = far_off_policy(seed, token_level=True)
        before, after = (assert_equal_by_hand(batch, loss_type, **options)[0] for options in ({}, {option: other}))
        tells |= bool(before != after)
    assert tells


def defaults(per_token):
    """The options of a loss with their defaults: parameters after *."""
    parameters = inspect.signature(per_token).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if "dual_clip" in loss.bounds])
def test_the_dual_clip_equals_its_formula_and_bounds_what_the_first_one_lets_through(loss_type):
    logp, old_logp, advantages, mask = toy_batch(seed=4)
    advantages = advantages.abs() * torch.tensor([[-1.0], [-1.0], [-1.0], [1.0]])
    batch = logp, old_logp - 1, advantages, mask          # ratios around e: with a negative advantage nothing else stops them
    single, double = (assert_equal_by_hand(batch, loss_type, **options)[1]["clip_fraction"] for options in ({}, dict(dual_clip=2.5)))
    assert 0 < single.sum() < double.sum()


def test_no_gradient_flows_through_weights_statistics_or_generalized_advantages():
    logp, old_logp, advantages, mask = toy_batch()
    _, stats = policy_loss(logp, old_logp, advantages, mask)
    sampling_logp = toy_batch(seed=6)[0]
    weights = importance_weights(logp, sampling_logp, mask, cap=1.2)
    estimates = generalized_advantage_estimation(torch.ones_like(logp), logp, mask)
    assert logp.requires_grad and sampling_logp.requires_grad
    assert not any(x.requires_grad for x in (*stats.values(), weights, *estimates))


def test_a_call_without_options_takes_their_usual_values():
    values, _, _, mask = toy_batch(seed=9)
    assert value_loss(values, values, 2 * values, mask).equal(value_loss(values, values, 2 * values, mask, token_weights(mask)))
    assert token_weights(mask).equal(token_weights(mask, "token_mean"))
    assert token_weights(mask, "constant").equal(token_weights(mask, "constant", max_tokens=6))
    assert token_weights(mask, "prompt_mean").equal(token_weights(mask, "prompt_mean", group_tokens=mask.sum()))
    for function, usual in {
        policy_loss: dict(loss_type="dapo"), clipped_loss: dict(dual_clip=math.inf), kl_penalty: dict(estimator="k3", ratio=None),
        token_loss: dict(loss_type="dapo", clip_low=0.2, clip_high=0.2, off_policy_limit=math.inf),
        compute_group_advantages: dict(baseline="group_mean", scale="group", epsilon=1e-8, global_mean=None),
        value_loss: dict(clip=0.2), generalized_advantage_estimation: dict(gamma=0.99, lam=0.95),
    }.items():
        assert defaults(function) == usual


@pytest.mark.parametrize("loss_type", LOSSES)
def test_importance_weights_by_hand_multiply_a_tokens_loss_when_they_multiply_its_advantage(loss_type):
    logp, old_logp, advantages, mask = far_off_policy(5, token_level=False)
    sampling_logp = toy_batch(seed=6)[0].detach()
    weights = importance_weights(old_logp, sampling_logp, mask, cap=1.2)
    for i, t in itertools.product(range(4), range(6)):
        close(weights[i, t], min(math.exp(old_logp[i, t] - sampling_logp[i, t]), 1.2) if mask[i, t] else 1.0)
    assert (weights == 1.2).any() and (weights[mask] < 1).any()
    dual = [dict(dual_clip=1.2)] if "dual_clip" in LOSSES[loss_type].bounds else []
    for options in {}, dict(off_policy_limit=0.1), *dual:
        apart, removed, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type, **options)
        folded, same, _ = token_loss(logp, old_logp, advantages * weights, mask, loss_type=loss_type, **options)
        close(folded[mask], (apart * weights)[mask])
        assert same[mask].equal(removed[mask]) and (removed.any() or not options)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_ratio_beyond_all_bounds_stays_finite_and_without_tokens_loss_and_gradient_are_0(loss_type):
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    for gap, advantage, chosen in itertools.product([1e4, -1e4], [1.0, -1.0, 0.0], [True, False]):
        mask = torch.full((1, 2), chosen)
        loss, _ = policy_loss(logp, logp.detach() + gap, torch.tensor([advantage]), mask, loss_type=loss_type)
        (gradient,) = torch.autograd.grad(loss, logp)
        assert loss.isfinite() and gradient.isfinite().all(), f"{gap} {advantage}"
        assert chosen or (loss == 0 and not gradient.any())


@pytest.mark.parametrize("loss_type,A,gap,loss", [
    ("dapo", -1.0, 50.0, math.exp(20)), ("dapo", 1.0, -50.0, -math.exp(-20)), ("cispo", 1.0, 50.0, math.exp(20)),
    ("gspo", -1.0, 50.0, math.exp(20)), ("gspo", 1.0, -50.0, -math.exp(-20)), ("cispo", 1.0, -50.0, math.exp(-20)),
])
def test_a_ratio_is_cut_at_e_to_the_twenty(loss_type, A, gap, loss):
    logp, advantages = torch.tensor([[-1.0]], dtype=torch.float64), torch.tensor([A], dtype=torch.float64)
    options = dict(loss_type=loss_type, clip_high=1e12 if loss_type == "cispo" else 0.2)
    actual, stats = policy_loss(logp, logp - gap, advantages, torch.ones(1, 1, dtype=torch.bool), **options)
    close(actual, loss, 1e-12)
    close(stats["ratio_deviation"], [[abs(math.exp(math.copysign(20, gap)) - 1)]], 1e-12)
    close(stats["approx_kl"], [[math.exp(math.copysign(20, gap)) - 1 - gap]], 1e-12)


@pytest.mark.parametrize("aggregation", sorted({loss.aggregation for loss in LOSSES.values()}))
def test_weights_equal_their_formulas_and_those_of_minibatches_that_split_a_group_add_up(aggregation):
    """The second row is empty, and so is the last group."""
    mask = torch.tensor([[1, 0, 1, 1, 1], [0] * 5, [1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0] * 5, [0] * 5]).bool()
    group_tokens = torch.tensor([4, 4, 5, 5, 0, 0])[:, None]
    weights = token_weights(mask, aggregation, group_tokens=group_tokens, max_tokens=MAX_TOKENS)
    close(weights.double(), weights_by_hand(mask, aggregation), 1e-7)
    close(weights.sum(), 9 / (3 * MAX_TOKENS) if aggregation == "constant" else 1.0, 1e-6)
    first, second = (
        token_weights(mask[rows], aggregation, group_tokens=group_tokens[rows], max_tokens=MAX_TOKENS)
        for rows in (slice(0, 3), slice(3, 6)))
    part = {"token_mean": 5 / 9, "prompt_mean": 1.2 / 2}.get(aggregation, 2 / 3)  # 5 of 9 tokens, 1.2 of 2 prompts, 2 of 3 completions
    close(torch.cat([part * first, (1 - part) * second]), weights, 1e-7)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_the_padding_changes_nothing(loss_type, garbage):
    logp, old_logp, advantages, mask = toy_batch(seed=2, masked_value=0.0)
    clean = policy_loss(logp, old_logp, advantages, mask, loss_type=loss_type)
    dirty = policy_loss(logp, old_logp.masked_fill(~mask, garbage), advantages, mask, loss_type=loss_type)
    clean[0].backward()
    expected, logp.grad = logp.grad, None
    dirty[0].backward()
    assert torch.equal(clean[0], dirty[0]) and torch.equal(logp.grad, expected)
    assert all(dirty[1][name].equal(x) for name, x in clean[1].items())
    weights = token_weights(mask)
    assert weighted_loss(logp, weights).equal(weighted_loss(logp.masked_fill(~mask, garbage), weights))


@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if loss.aggregation == "token_mean"])
def test_on_the_first_step_the_gradient_is_reinforce(loss_type):
    logp, _, advantages, mask = toy_batch()
    loss, stats = policy_loss(logp, logp.detach(), advantages, mask, loss_type=loss_type)
    loss.backward()
    close(logp.grad, -advantages * mask / mask.sum(), 1e-7)
    assert not stats["clip_fraction"].any() and not stats["ratio_deviation"].any()


def test_other_names_options_and_shapes_are_refused():
    logp, old_logp, advantages, mask = toy_batch(width=4)
    with pytest.raises(ValueError, match="loss_type"):
        policy_loss(logp, old_logp, advantages, mask, loss_type="ppo")
    for loss_type, known in ("cispo", []), ("gspo", ["dual_clip"]):
        with pytest.raises(ValueError, match=re.escape(f"{loss_type} has no option ['delta']; its options: {known}")):
            policy_loss(logp, old_logp, advantages, mask, loss_type=loss_type, delta=0.1)
    with pytest.raises(ValueError, match="aggregation"):
        token_weights(mask, "mean")
    for shape in (), (3,), (2, 2), (2, 1), (1, 4), (1, 1), (4, 2), (4, 1, 1):     # among them (P, G), with T = G too
        with pytest.raises(ValueError, match=r"advantages must be .* use \.view\(-1, 1\) on the .* compute_group_advantages$"):
            policy_loss(logp, old_logp, torch.ones(shape), mask)
        with pytest.raises(ValueError, match=r"advantages .* must be \(B, 1\) or \(B, T\): \.view\(-1, 1\)$"):
            clipped_loss(logp, torch.ones(shape), 0.2, 0.2)


@pytest.mark.parametrize("shape", [(4,), (1, 4)])         # would be broadcast along the wrong dimension where B = T
def test_tensors_of_other_shapes_than_tokens_are_refused(shape):
    logp, old_logp, advantages, mask = toy_batch(width=4)
    other = torch.ones(shape)
    for call in (
        lambda: policy_loss(logp, old_logp, advantages, mask, other), lambda: weighted_loss(logp, other),
        lambda: value_loss(logp, other, logp, mask), lambda: value_loss(logp, logp, other, mask),
        lambda: value_loss(logp, logp, logp, mask, other), lambda: kl_penalty(logp, other),
        lambda: importance_weights(logp, other, mask, cap=2.0), lambda: generalized_advantage_estimation(other, logp, mask),
        lambda: token_weights(mask, "prompt_mean", group_tokens=torch.ones(4)),
    ):
        with pytest.raises(AssertionError, match="shape="):
            call()


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
    for sign in 2.0, -2.0:
        advantages = torch.full((4, 1), sign)
        loss, clipped, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type, off_policy_limit=0.5)
        free, removed, _ = token_loss(logp, old_logp, advantages, mask, loss_type=loss_type)
        for i in range(4):
            dropped = sign < 0 and statistics.fmean((old_logp - logp.detach())[i][mask[i]].tolist()) > 0.5
            close(loss[i], [0.0 if dropped else x for x in free[i].tolist()])
            assert clipped[i].tolist() == [bool(x) or dropped for x in removed[i]]
        assert (loss[0] == 0).all() == (sign < 0) and not (loss[3] == 0).all()


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


@pytest.mark.parametrize("estimator,corrected,unbiased,gradient_of", [
    ("k1", False, True, "nothing"),
    ("k2", False, False, "KL(policy || reference)"),
    ("k3", False, True, "KL(reference || policy)"),
    ("k1", True, True, "KL(policy || reference)"),
    ("k3", True, True, "KL(policy || reference)"),
    ("k2", True, False, "neither"),
    ("k3", "detached", True, "KL(reference || policy)"),     # without its gradient the ratio corrects nothing
])
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
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
    close(overlong_penalty(torch.tensor(lengths), max_tokens=10, buffer=3), [0, 0, -1 / 3, -2 / 3, -1], 1e-6)


def gae_by_hand(rewards, values, mask, gamma, lam):
    """The sum of eq. 16 over the chosen tokens of each row."""
    advantages = [[0.0] * len(row) for row in rewards]
    for out, r, V, chosen in zip(advantages, rewards, values, mask):
        tokens = [t for t in range(len(r)) if chosen[t]]
        following = [V[t] for t in tokens[1:]] + [0.0]
        deltas = [r[t] + gamma * next_V - V[t] for t, next_V in zip(tokens, following)]
        for n, t in enumerate(tokens):
            out[t] = sum((gamma * lam) ** m * delta for m, delta in enumerate(deltas[n:]))
    return advantages


@pytest.mark.parametrize("gamma,lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_equals_its_formulas_and_steps_over_tokens_of_others(gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 7, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 0]]).bool()
    advantages, returns = generalized_advantage_estimation(rewards, values, mask, gamma=gamma, lam=lam)
    close(advantages, gae_by_hand(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam), 1e-12)
    close(returns, torch.where(mask, advantages + values, 0.0), 1e-12)


def test_value_loss_by_hand_and_its_gradient_stops_outside_the_clip():
    points = [(1.0, 0.0, 2.0), (0.1, 0.0, 1.0), (-0.7, 0.5, -2.0), (0.4, 0.5, -1.0), (-0.7, 0.5, 3.0), (9.0, 0.0, 5.0)]           # V, old_V, R
    values, old, returns = (torch.tensor([column], dtype=torch.float64) for column in zip(*points))
    values, mask = values.requires_grad_(), torch.tensor([[True] * 5 + [False]])
    loss = value_loss(values, old, returns, mask, torch.full((1, 6), 0.25), clip=0.2)
    errors = (0.2 - 2) ** 2, (0.1 - 1) ** 2, (0.3 + 2) ** 2, (0.4 + 1) ** 2, (-0.7 - 3) ** 2
    close(loss, 0.5 * sum(errors) / 4, 1e-12)
    loss.backward()
    close(values.grad, [[0.0, (0.1 - 1) / 4, 0.0, (0.4 + 1) / 4, (-0.7 - 3) / 4, 0.0]], 1e-12)


def test_every_function_but_four_works_copied_alone_into_another_project():
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    of_tokens = dict(logp=ones, log_ratio=ones, advantages=ones, mask=mask, clip_low=0.2, clip_high=0.2)
    calls = {
        compute_group_advantages: lambda f: [
            f(torch.rand(2, 3), baseline=baseline, scale=scale) for baseline in BASELINES for scale in SCALES],
        token_weights: lambda f: [f(mask, loss.aggregation) for loss in LOSSES.values()],
        weighted_loss: lambda f: f(ones, ones),
        kl_penalty: lambda f: f(ones, ones),
        generalized_advantage_estimation: lambda f: f(ones, ones, mask),
        overlong_penalty: lambda f: f(torch.tensor([3, 4]), max_tokens=4, buffer=2),
        importance_weights: lambda f: f(ones, ones, mask, cap=2.0),
        grpo.off_policy_mask: lambda f: f(ones, ones, mask, 1.0),
    } | {loss.per_token: lambda f: f(**of_tokens) for loss in LOSSES.values() if loss.per_token is not grpo.gspo}
    functions = {f for f in vars(grpo).values() if inspect.isfunction(f) and f.__module__ == "grpo"}
    assert functions - set(calls) == {policy_loss, token_loss, value_loss, grpo.gspo}
    imports = re.search(r"below `(.*?)` and `(.*?)`; only", " ".join(grpo.__doc__.split())).groups()
    for function, call in calls.items():
        project = {}
        exec("\n".join(imports), project)
        exec(inspect.getsource(function), project)
        call(project[function.__name__])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_bandit_with_one_right_token_is_solved_in_fifty_steps(loss_type):
    torch.manual_seed(0)
    logits = torch.zeros(10, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.3)
    for _ in range(50):
        tokens = torch.multinomial(logits.softmax(0).detach(), 32, replacement=True).view(32, 1)
        advantages = compute_group_advantages((tokens == 7).float().view(4, 8)).view(-1)
        logp = logits.log_softmax(0)[tokens]
        loss, _ = policy_loss(logp, logp.detach(), advantages, torch.ones_like(tokens).bool(), loss_type=loss_type)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert logits.softmax(0)[7] > 0.9
