"""Updates on a rollout: the gradient is that of the whole step however it is cut, and every term does what it says."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import experience_of, with_settings
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector

import train
from config import GRPOConfig
from engine import make_engine
from engine.network import set_precision
from experience import Batch, Experience, minibatches
from grpo import LOSSES, token_weights, weighted_loss
from policy import RatioError
from runs.plan import Objects
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
        experience.table.old_logp = experience.table.old_logp + torch.where(mask, noise, 0.0)
    return experience


def forward_backward(run, experience, rows=None, loss_fn=None):
    """The losses of an update on some rows, or all of them, as in grpo_training_step."""
    config, rows = run.config.grpo, experience.table.rows if rows is None else rows
    loss_fn = loss_fn or partial(run.objects.loss or train.grpo_loss, config)
    batch = train.batch_of_update(run, experience, rows, loss_fn)
    return run.policy.forward_backward(batch, loss_fn, reference=run.reference if config.exact_kl else None)


def gradient(run, experience, rows=None, loss_fn=None):
    """All gradients of an update in one vector, in float64; and its losses."""
    run.policy.clear_gradient()
    losses = forward_backward(run, experience, rows, loss_fn)
    return parameters_to_vector(p.grad for p in run.policy.trained_parameters).double(), losses


def gradient_of(policy, loss):
    """All gradients of a loss in one vector, in float64."""
    policy.clear_gradient()
    loss.backward()
    return parameters_to_vector(p.grad for p in policy.trained_parameters).double()


def differ(left, right):
    return float((left - right).norm() / right.norm())


def take_step(run, losses):
    """The end of an update with these losses, as in grpo_training_step."""
    update = losses | run.policy.optimizer_step(run.config.training.max_grad_norm)
    run.progress.count(update)
    train.move_reference(run, update)
    return update


def with_engine(run, name, max_tokens):
    """Let the policy of another engine take over the objects of a run's phase."""
    old = run.policy
    run.policy = make_engine(name, old.model, old.tokenizer, max_tokens=max_tokens)
    run.policy.set_optimizer(old.optimizer, old.scheduler, old.value_head)


def padded(experience, left, right):
    """The same experience with more padding before its 4 prompts and after its 16 completions, and garbage in it."""
    def wider(item):
        tensors = {name: x for name, x in vars(item).items() if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] > 1}
        sides = {4: (left, 0), 16: (0, right)}
        return {name: pad(x, sides[len(x)], value=False if x.dtype == torch.bool else 7) for name, x in tensors.items()}

    table = experience.table
    wide = replace(table, **wider(table), rollout=replace(table.rollout, **wider(table.rollout)))
    return replace(experience, table=replace(wide, old_logp=wide.old_logp.masked_fill(~wide.mask, math.nan)))


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
    for variant, rows in (padded(experience, 3, 5), None), (experience, torch.randperm(16)):
        same, _ = gradient(run, variant, rows)
        assert differ(same, whole) < tolerance, f"{rows=}: {differ(same, whole)}"
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
    table = experience.table
    table.advantages = table.advantages * (torch.arange(16) // 4 != 1)[:, None]
    table.mask[6] = table.mask[9] = False                 # nor are rows without tokens, one of them of the tied group
    monkeypatch.setattr(run.policy, "forward", lambda rollout, rows, *rest: forwarded.extend(rows.tolist()) or forward(rollout, rows, *rest))
    some, losses = gradient(run, experience)
    alone = not any(name.endswith("_term") for name in losses)
    assert alone == run.config.grpo.policy_loss_alone == (flags.keys() <= {"importance_cap"} or "reward" in flags.values())
    assert sorted(forwarded) == [row for row in range(16) if row not in ((4, 5, 6, 7, 9) if alone else (6, 9))]
    weights = token_weights(table.mask, run.config.grpo.aggregation)
    monkeypatch.setattr(Experience, "batch", lambda *_, **options: replace(table, weights=weights))
    monkeypatch.setattr(Batch, "with_signal", lambda batch: batch)
    every, _ = gradient(run, experience)
    assert len({*forwarded}) == 16 and differ(some, every) < 2e-6


@pytest.mark.parametrize("flags,name", [(dict(use_kl_penalty=True), "kl_term"), (dict(entropy_coef=0.1), "entropy_term")])
def test_a_term_of_rows_that_are_left_out_is_an_error(base, monkeypatch, flags, name):
    run = with_settings(base, **flags)
    run.progress.phase_step = 0
    monkeypatch.setattr(GRPOConfig, "policy_loss_alone", True)
    with pytest.raises(ValueError, match=f"{name} is .* in a pass, .* with the rows that GRPOConfig.policy_loss_alone leaves out"):
        gradient(run, off_policy(run))


@pytest.mark.parametrize("own,message", [
    (lambda new, batch: new.logp[batch.mask].mean(), "own is .* as the sum over two micro-batches"),
    (lambda new, batch: new.logp.sum() / len(batch.rows), "own is .* as the sum over two micro-batches"),
    (lambda new, batch: 1e-3 * new.logp.max(), "own is .* as the sum over two micro-batches"),
    (lambda new, batch: weighted_loss(new.logp, batch.weights), ""), (lambda new, batch: (new.logp * batch.mask).sum() / 16, ""),
    *((lambda new, batch, shape=shape: torch.zeros(shape), r"loss: own \(.*\) must be \(b, T\), \(b, 1\) or a scalar")
      for shape in [(16,), (1, 16), (16, 2), (1, 1)]),
])
def test_a_term_or_a_metric_that_does_not_add_up_over_micro_batches_or_has_another_shape_is_an_error(base, own, message):
    """What does not add up only at the first update of a phase."""
    of_shape = message.startswith("loss")
    for place in (1,) if of_shape else (0, 1):            # a term, and a metric
        def loss(config, new, batch, place=place):
            results = train.grpo_loss(config, new, batch)
            results[place]["own"] = own(new, batch)
            return results

        run = with_settings(base)
        run.plan = replace(run.plan, objects=Objects(loss=loss))
        for run.progress.phase_step in 0, 1:
            with pytest.raises(ValueError, match=message) if message and (of_shape or not run.progress.phase_step) else nullcontext():
                train.grpo_training_step(run, next(run.batches))


def test_all_columns_of_a_batch_keep_their_rows_and_metrics_are_means_over_tokens_or_completions_or_sums(base):
    """Among them two of one's own, of which one is normalised over the right completions of the whole update."""
    run = with_settings(base)
    experience = off_policy(run)
    table, config = experience.table, run.config.grpo
    right, row = table.scores > 0, torch.arange(16.0)[:, None]
    expected = gradient_of(run.policy, -run.policy.forward(table.rollout, table.rows).logp[table.mask & right].mean())

    def loss_fn(new, part):
        assert part.extra["row"][:, 0].tolist() == part.rows.tolist() and part.mask.shape == new.logp.shape
        for name in "mask", "advantages", "old_logp", "trainer_logp", "scores", "lengths", "finished":
            assert getattr(part, name).equal(getattr(table, name)[part.rows]), name
        metrics = {"of_tokens": part.extra["row"].expand(part.mask.shape), "of_completions": part.extra["row"], "sum": part.scores.sum()}
        return {"nll_term": weighted_loss(-new.logp, part.extra["right"])}, metrics

    for budget in 10**6, 61, 1:
        with_engine(run, "shared", budget)
        run.policy.clear_gradient()
        batch = experience.batch(torch.randperm(16), config.aggregation)
        batch.extra = {"right": token_weights(batch.mask & (batch.scores > 0)), "row": row[batch.rows]}
        losses = run.policy.forward_backward(batch, loss_fn)
        assert differ(parameters_to_vector(p.grad for p in run.policy.trained_parameters).double(), expected) < 2e-6
        assert [losses[name] for name in ("of_tokens", "of_completions", "sum")] == pytest.approx(
            [float((row * table.mask).sum() / table.mask.sum()), 7.5, float(table.scores.sum())], rel=1e-4)


@pytest.mark.parametrize("estimator,more", [
    ("", {}), ("ratio_k3", {}), ("k2", {}), ("k3", dict(use_value_head=True)), ("exact", dict(use_value_head=True, entropy_coef=0.5)),
    ("", dict(entropy_coef=0.5)),
])
def test_the_terms_of_the_loss_their_gradient_and_the_metrics_are_their_formulas(base, estimator, more):
    """Terms are averaged as the loss is, metrics over the tokens of forwarded rows: without terms not of the second group, which is tied."""
    kl_flags = dict(use_kl_penalty=True, kl_penalty_coef=0.7, kl_estimator=estimator) if estimator else {}
    run = with_settings(base, loss_type="grpo", **kl_flags, **more)
    experience = off_policy(run)
    table, (ours, losses) = experience.table, gradient(run, experience)
    mask, new = table.mask, run.policy.forward(table.rollout, table.rows, run.reference)
    log_ratio, A = new.logp - table.old_logp, table.advantages
    ratio = log_ratio.exp()
    metrics = {"ratio_deviation": (ratio - 1).abs(), "approx_kl": ratio - 1 - log_ratio}

    def mean(values):
        return (torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1)).mean()

    terms = {"policy_loss": mean(-torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A))}
    if estimator:
        x = run.reference.log_probs(table.rollout).logp - new.logp
        k3 = x.exp() - x - 1
        metrics["kl"] = {"ratio_k3": (new.logp - table.trainer_logp).exp() * k3, "k3": k3, "k2": x**2 / 2, "exact": new.kl}[estimator]
        terms["kl_term"] = 0.7 * mean(metrics["kl"])
    if "entropy_coef" in more:
        terms["entropy_term"] = -0.5 * mean(new.entropy)
    if "use_value_head" in more:
        terms["value_term"] = train.VALUE_COEF * mean(0.5 * (new.values - table.returns).square())
    looked_at = mask if len(terms) > 1 else mask & (A != 0)
    expected = {name: x.item() for name, x in terms.items()} | {name: x[looked_at].mean().item() for name, x in metrics.items()}
    expected["total_loss"] = sum(terms.values()).item()
    assert {name: losses[name] for name in expected} == pytest.approx(expected, rel=1e-3) and looked_at.equal(mask) != (len(terms) == 1)
    assert differ(ours, gradient_of(run.policy, sum(terms.values()))) < 1e-5
    if len(terms) == 1:
        tied = experience_of(run, table.rollout, torch.zeros(4, 4))
        of_none = dict.fromkeys(losses, math.nan) | {"total_loss": 0.0, "policy_loss": 0.0}
        assert forward_backward(run, tied) == pytest.approx(of_none, nan_ok=True), "the same names"


REWARD_KL = dict(use_kl_penalty=True, kl_penalty_coef=0.3, kl_in="reward")


@pytest.mark.parametrize("overlong", ["keep", "mask"])
@pytest.mark.parametrize("terms", [
    *TERMS.values(), REWARD_KL, REWARD_KL | dict(importance_cap=1.5), REWARD_KL | dict(use_value_head=True),
    REWARD_KL | dict(normalize_advantages=False, baseline="leave_one_out"), REWARD_KL | dict(advantage_scale="batch"),
    dict(loss_type="gspo", baseline="group_median"), dict(loss_type="dr_grpo", use_kl_penalty=True, kl_estimator="k2"),
], ids=str)
def test_rows_that_are_not_trained_on_have_no_influence(base, terms, overlong):
    run = with_settings(base, overlong=overlong, **terms)
    rollout = sample_groups(run, next(run.batches)).rollout
    rollout = replace(rollout, finished=torch.arange(16) % 5 != 2)
    points = torch.randn(4, 4)
    points[0], points[1, :2], points[3, 0] = 0.7, math.nan, math.nan             # a tied group; rows without a score
    untrained = points.flatten().isnan() | (~rollout.finished & (overlong == "mask"))
    others = torch.randint(3, 250, rollout.completion_ids.shape)
    other = replace(
        rollout, completion_ids=torch.where(untrained[:, None], others, rollout.completion_ids),
        completion_mask=rollout.completion_mask & (~untrained[:, None] | (torch.arange(rollout.completion_ids.shape[1]) < 5)),
        sampling_logp=torch.where(untrained[:, None], rollout.sampling_logp - 3.0, rollout.sampling_logp),
    )
    (first, whole, losses), (second, same, again) = (
        (experience, *gradient(run, experience)) for experience in (experience_of(run, which, points) for which in (rollout, other)))
    assert untrained.sum() >= 3 and not second.table.mask[untrained].any() and whole.norm() > 0
    torch.testing.assert_close(first.table.advantages[~untrained], second.table.advantages[~untrained], atol=1e-5, rtol=1e-5)
    assert differ(same, whole) < 1e-5 and again == pytest.approx(losses, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("settings", [{}, dict(use_kl_penalty=True), dict(use_value_head=True), dict(importance_cap=2.0),
                                      dict(use_kl_penalty=True, kl_in="reward"), dict(ppo_epochs=2, minibatch_size=4)])
def test_a_rollout_of_which_nothing_can_be_trained_on_changes_nothing_and_stops_nothing(base, settings):
    run = with_settings(base, overlong="mask", **settings)
    rollout = sample_groups(run, next(run.batches)).rollout
    unfinished = replace(rollout, finished=torch.zeros(16).bool())
    for which, points in (rollout, torch.full((4, 4), math.nan)), (unfinished, torch.randn(4, 4)):
        experience = experience_of(run, which, points)
        before = [p.clone() for p in run.policy.trained_parameters]
        for rows in minibatches(run.config.grpo, 16, seed=0):
            losses = forward_backward(run, experience, rows)
            assert not run.policy.optimizer_step(1.0)["skipped"]
            terms = {name for name in losses if name.endswith("_term")} | {"policy_loss", "total_loss"}
            assert losses == pytest.approx({name: 0.0 if name in terms else math.nan for name in losses}, nan_ok=True)
        assert all(torch.equal(a, b) for a, b in zip(before, run.policy.trained_parameters))


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


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_step_whose_gradient_or_loss_alone_is_not_finite_changes_nothing_and_is_counted(base, engine):
    run = with_settings(base)
    with_engine(run, engine, 2048)
    run.progress.skipped = run.progress.skipped_in_a_row = 0
    run.policy.optimizer.param_groups[0]["momentum"] = 0.9
    experience = off_policy(run)

    def endless(new, batch):
        terms, metrics = train.grpo_loss(run.config.grpo, new, batch)
        return terms | {"endless_term": torch.tensor(math.inf)}, metrics

    for number, broken in enumerate(["gradient", "loss", None], start=1):
        before, step = [p.clone() for p in run.policy.trained_parameters], run.progress.step
        losses = forward_backward(run, experience, loss_fn=endless if broken == "loss" else None)
        if broken == "gradient":
            run.policy.trained_parameters[0].grad[0, 0] = math.nan
        norm = take_step(run, losses)["grad_norm"]
        same = all(torch.equal(a, b) for a, b in zip(before, run.policy.trained_parameters))
        assert same == (broken is not None) and math.isfinite(norm) == (broken != "gradient")
        skipped = run.progress.skipped, run.progress.skipped_in_a_row
        assert run.progress.step == step + 1 and skipped == ((number, number) if broken else (2, 0))
        assert run.policy.scheduler.last_epoch == (broken is None)
        assert all(p.grad is None for p in run.policy.trained_parameters)
    before, losses = [p.clone() for p in run.policy.trained_parameters], forward_backward(run, experience)
    for parameter in run.policy.trained_parameters:               # not None: as of a KL of 0 in tied groups
        parameter.grad.zero_()
    assert take_step(run, losses)["skipped"] == 0
    assert all(map(torch.equal, before, run.policy.trained_parameters)), "momentum moves nothing"


@pytest.mark.parametrize("settings", [{}, dict(importance_cap=2.0), dict(use_value_head=True), dict(minibatch_size=4)], ids=str)
def test_a_wrong_sampler_is_found_in_the_first_update_that_forwards_a_row(base, monkeypatch, settings):
    """Groups without a signal have no ratios, unless the trainer's log-probabilities are computed before."""
    run = with_settings(base, **settings)
    groups, mixed = sample_groups(run, next(run.batches)), torch.zeros(4, 4)
    groups.rollout.sampling_logp -= 0.05 * groups.rollout.completion_mask
    mixed[3, 0] = 1.0
    monkeypatch.setattr(train, "minibatches", lambda config, *_: torch.arange(16).split(config.minibatch_size or 16))
    for rewards in torch.zeros(4, 4), mixed:
        monkeypatch.setattr(train, "sample_groups", lambda *_, rewards=rewards: replace(groups, rewards=rewards))
        found = rewards.any() or settings.keys() & {"importance_cap", "use_value_head"}
        with pytest.raises(RatioError, match="first ratios must be 1, but differ from 1 by") if found else nullcontext():
            train.grpo_training_step(run, next(run.batches))


@pytest.mark.parametrize("engine,precision,tolerance", [
    ("plain", "float32", 0.01), ("plain", "bfloat16", 0.1), ("shared", "float32", 0.01), ("vllm", "float32", 0.03), ("vllm", "bfloat16", 0.3)])
def test_first_ratios_may_differ_from_1_by_so_much(model, monkeypatch, engine, precision, tolerance):
    monkeypatch.setattr("engine.vllm_engine.VLLM", lambda policy: "a sampler")
    set_precision(model, precision)
    policy = make_engine(engine, model, None)
    for factor, wrong in (0.99, False), (1.01, True), (math.nan, False):
        with pytest.raises(RatioError, match="first ratios must be 1") if wrong else nullcontext():
            policy.require_ratios_of_1(tolerance * factor)
