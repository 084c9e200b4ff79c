"""What a policy makes of any loss: rows that are forwarded, metrics, steps; and the first ratios after sampling."""

import math
from contextlib import nullcontext

import pytest
import torch
from conftest import experience_of, forward_backward, gradient, take_step, with_engine, with_settings

import train
from engine import make_engine
from engine.precision import with_precision
from grpo import weighted_loss
from policy import RatioError


def with_a_tied_group(run):
    rewards = torch.randn(4, 4)
    rewards[1] = 0.7
    return experience_of(run, train.sample_groups(run, next(run.batches)).rollout, rewards)


def test_a_new_term_of_the_loss_and_a_new_metric_are_one_edit_each(base, monkeypatch):
    """The term acts on tied rows too, which are not forwarded for the policy loss alone; supervised training has none of it."""
    run, usual_loss = with_settings(base), train.grpo_loss
    experience = with_a_tied_group(run)
    without, _ = gradient(run, experience)
    run.policy.clear_gradient()
    probability = run.policy.forward(experience.rollout, torch.arange(16)).logp.exp()[experience.mask]
    (0.1 * probability.mean()).backward()
    of_term = torch.cat([p.grad.flatten() for p in run.policy.parameters]).double()

    def grpo_loss(config, new, batch):
        terms, metrics = usual_loss(config, new, batch)
        terms["length_term"] = 0.1 * weighted_loss(new.logp.exp(), batch.weights)
        metrics["probability"] = new.logp.exp()
        return terms, metrics

    monkeypatch.setattr(train, "grpo_loss", grpo_loss)
    for budget in 10**6, 61, 1:
        with_engine(run, "shared", budget)
        both, losses = gradient(run, experience)
        assert (both - without - of_term).norm() < 2e-6 * both.norm()
        assert [losses["probability"], 10 * losses["length_term"]] == pytest.approx([probability.mean().item()] * 2, rel=1e-5)
        assert losses["total_loss"] == pytest.approx(losses["policy_loss"] + losses["length_term"])
    run.policy.optimizer.param_groups[0]["lr"] = 0.0
    metrics, _ = train.grpo_training_step(run, next(run.batches))
    assert metrics["probability"] == pytest.approx(10 * metrics["length_term"])
    metrics, experience = train.supervised_training_step(run, next(run.batches))
    logp = run.policy.log_probs(experience.rollout).logp[experience.mask]
    assert metrics["loss"] == pytest.approx(-float(logp.mean())) and "probability" not in metrics


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_step_whose_gradient_or_loss_alone_is_not_finite_changes_nothing_and_is_counted(base, engine):
    run = with_settings(base)
    with_engine(run, engine, 2048)
    run.progress.skipped = run.progress.skipped_in_a_row = 0
    experience = with_a_tied_group(run)

    def endless(new, batch):
        terms, metrics = train.grpo_loss(run.config.grpo, new, batch)
        return terms | {"endless_term": torch.tensor(math.inf)}, metrics

    for number, broken in enumerate(["gradient", "loss", None], start=1):
        before, step = [p.clone() for p in run.policy.parameters], run.progress.step
        losses = forward_backward(run, experience, loss_fn=endless if broken == "loss" else None)
        if broken == "gradient":
            run.policy.parameters[0].grad[0, 0] = math.nan
        norm = take_step(run, losses)["grad_norm"]
        same = all(torch.equal(a, b) for a, b in zip(before, run.policy.parameters))
        assert same == (broken is not None) and math.isfinite(norm) == (broken != "gradient")
        skipped = run.progress.skipped, run.progress.skipped_in_a_row
        assert run.progress.step == step + 1 and skipped == ((number, number) if broken else (2, 0))
        assert run.policy.scheduler.last_epoch == (broken is None)
        assert all(p.grad is None for p in run.policy.parameters)


@pytest.mark.parametrize("engine,precision,tolerance", [
    ("plain", "float32", 0.01), ("plain", "bfloat16", 0.1), ("shared", "float32", 0.01), ("vllm", "float32", 0.03), ("vllm", "bfloat16", 0.3)])
def test_first_ratios_may_differ_from_1_by_so_much(model, monkeypatch, engine, precision, tolerance):
    monkeypatch.setattr("engine.vllm_engine.VLLM", lambda policy: "a sampler")
    policy = make_engine(engine, with_precision(model, precision), None)
    for factor, wrong in (0.99, False), (1.01, True), (math.nan, False):
        for metrics in {"ratio_deviation": tolerance * factor}, {"ratio_deviation": 9.0, "sampler_deviation": tolerance * factor}:
            with pytest.raises(RatioError, match="first ratios must be 1") if wrong else nullcontext():
                policy.require_ratios_of_1(metrics)
