"""The data of an update: rewards shaped, tied groups replaced, advantages of tokens, minibatches."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import experience_of, with_settings

import train
from config import GRPOConfig
from data import Batches
from experience import Batch, Experience, Groups, compute_experience, minibatches, sampled_kl, shape_rewards, token_advantages
from logprobs import LogProbs
from sample import Rollout
from train import sample_groups, without_signal


def shaped_rewards(config, scores, per_function=None, rollout=None):
    return shape_rewards(config, Groups([], rollout, scores, per_function or {}, scores))


def test_overlong_completions_are_kept_left_out_or_penalised(base):
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.25]] * 4)

    def look(**settings):
        torch.manual_seed(0)
        run = with_settings(base, normalize_advantages=False, generation_max_length=20, **settings)
        rollout = sample_groups(run, next(run.batches)).rollout
        finished = torch.arange(16) % 4 != 1              # the sampler's word is what counts, not the length
        rollout = replace(rollout, finished=finished)
        return rollout, experience_of(run, rollout, shaped_rewards(run.config.grpo, rewards, rollout=rollout))

    rollout, kept = look()
    assert torch.equal(kept.table.mask, rollout.completion_mask)
    rollout, masked = look(overlong="mask")
    assert torch.equal(masked.table.mask, rollout.completion_mask & rollout.finished[:, None])
    assert torch.equal(masked.table.advantages, kept.table.advantages), "their points still count for their siblings"
    rollout, penalised = look(overlong="penalise")
    lengths = rollout.completion_mask.sum(dim=1)
    shaped = rewards + torch.tensor([min(0.0, (20 - 4 - int(n)) / 4) for n in lengths]).view(4, 4)
    assert (shaped < rewards).any()
    assert_advantages(penalised, shaped - shaped.mean(dim=1, keepdim=True))
    for limit, expected in (20, [0.0, -0.25, -0.5, -0.75, -1.0]), (4, [0.0, 0.0, 0.0, -1.0]):  # buffers: 4, 1
        lengths = limit + 1 - torch.arange(len(expected), 0, -1)
        longest = replace(rollout, completion_mask=torch.arange(limit) < lengths[:, None])
        settings = GRPOConfig(generation_max_length=limit, overlong="penalise")
        found = shaped_rewards(settings, torch.zeros(1, len(expected)), rollout=longest)
        torch.testing.assert_close(found, torch.tensor([expected]))


def assert_advantages(experience, expected):
    """All tokens of a completion have its advantage: expected (P, G)."""
    torch.testing.assert_close(experience.table.advantages, expected.reshape(-1, 1).expand(experience.table.mask.shape))


def with_points(base, *rounds, **settings):
    """A run whose reward function gives these points (P, G) in each round of sampling; and the prompts and completions of each."""
    run, seen = with_settings(base, reward_functions=["points"], **settings), []

    def points(prompts, completions, log_extra, log_metric, **columns):
        log_extra("prompt", prompts)
        log_metric("round", len(seen))
        seen.append((prompts[::4], completions))
        return torch.tensor(rounds[len(seen) - 1]).double().flatten().tolist()

    return replace(run, plan=replace(run.plan, reward_functions=[points])), seen


def test_dynamic_sampling_replaces_tied_groups_by_new_prompts_in_bounded_rounds(base):
    mixed, tied = [1.0, 0.0, 0.0, 0.0], [0.7] * 4
    run, seen = with_points(base, [tied, mixed, tied, tied], [mixed, tied, tied], [tied, tied], dynamic_sampling=2)
    groups, asked = sample_groups(run, next(run.batches)), [prompts for prompts, _ in seen]
    order = Batches(run.plan.data.train_set, 9, 0)
    assert [*asked[0], *asked[1], *asked[2]] == [example["prompt"] for example in next(order)], "the next prompts, none twice"
    assert run.batches.position == 9 and groups.replaced == 3 + 2
    assert without_signal(run, groups).tolist() == [False, False, True, True], "the last round's stay"
    prompts = [asked[0][1], asked[1][0], *asked[2]]
    texts = [run.policy.tokenizer.decode(ids[mask]) for ids, mask in zip(groups.rollout.prompt_ids, groups.rollout.prompt_mask)]
    assert [text.removeprefix("<bos>") for text in texts] == [example["prompt"] for example in groups.examples] == prompts
    assert [row["prompt"] for row in groups.extra] == [prompt for prompt in prompts for _ in range(4)]
    assert groups.reports.metrics == [("round", 0.0), ("round", 1.0), ("round", 2.0)], "also of calls for replaced groups"
    assert groups.rollout.completion_mask.shape == groups.rollout.sampling_logp.shape
    assert groups.rollout.completions == seen[0][1][4:8] + seen[1][1][:4] + seen[2][1]
    torch.testing.assert_close(run.policy.log_probs(groups.rollout).logp, groups.rollout.sampling_logp, atol=1e-4, rtol=1e-4)


def test_groups_that_differ_in_length_alone_are_replaced(base, monkeypatch):
    rounds = [[0.0] * 4, [1.0, 0.0, 0.0, 0.0], [5.0, 6.0, 7.0, 8.0], [math.nan, 1.0, 1.0, 1.0]], [[0.0] * 4] * 3
    run, _ = with_points(base, *rounds, dynamic_sampling=1, overlong="penalise", generation_max_length=20, reward_clip=2.0)
    of_length = torch.arange(4).double() / 100            # penalties, as of lengths that differ
    monkeypatch.setattr(train, "shape_rewards", lambda config, groups: groups.scores.clamp(-2, 2) - of_length)
    groups = sample_groups(run, next(run.batches))
    assert groups.replaced == 3 and groups.scores[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    lacking = without_signal(run, groups)
    groups.advantages = train.group_advantages(run, groups)
    assert lacking.tolist() == [False, True, True, True] and not groups.zero_variance.any(), "their advantages are not 0"


def test_a_prompt_that_comes_up_again_in_a_round_is_answered_anew(base):
    run, seen = with_points(base, *[torch.zeros(4, 4).tolist()] * 2, dynamic_sampling=1)
    run.batches = Batches(run.plan.data.train_set[:4], 4, 0)                       # the new prompts are the old ones
    sample_groups(run, next(run.batches))
    first, second = (dict(zip(prompts, completions[::4])) for prompts, completions in seen)
    assert set(first) == set(second) and all(first[prompt] != second[prompt] for prompt in first)


PER_FUNCTION = {"a": [[1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]], "b": [[0.0, 2.0, 0.0, 2.0], [0.0] * 4]}


@pytest.mark.parametrize("settings,expected", [
    (dict(reward_combination="gdpo"), [False, False]), ({}, [True, False]), (dict(advantage_scale="mean"), [True, True])])
def test_a_group_has_no_signal_where_the_advantages_that_are_used_are_0(base, settings, expected):
    """Equal scores of unequal functions have one with gdpo; groups with a mean of at most 0 have none if they are divided by it."""
    run = with_settings(base, reward_functions=["a", "b"], reward_weights=[1.0, 0.5], **settings)
    per_function = {name: torch.tensor(points).double() for name, points in PER_FUNCTION.items()}
    scores = per_function["a"] + 0.5 * per_function["b"]
    groups = Groups([{}, {}], None, scores, per_function, shaped_rewards(run.config.grpo, scores, per_function))
    groups.advantages = train.group_advantages(run, groups)
    assert without_signal(run, groups).tolist() == groups.zero_variance.tolist() == expected


def test_the_global_mean_runs_over_the_run_of_clipped_rewards(base):
    run = with_settings(base, baseline="global_mean", normalize_advantages=False, reward_clip=2.0)
    rollout = sample_groups(run, next(run.batches)).rollout
    run.progress.reward_sum, run.progress.reward_count = 0.0, 0
    seen = []
    for points in 0.0, 1.0, 5.0:
        rewards = torch.full((4, 4), points)
        rewards[:, 0] = points + 1
        rewards[0, 1], rewards[1, 1] = math.nan, points - 9
        experience = experience_of(run, rollout, shaped_rewards(run.config.grpo, rewards))
        clipped = rewards.clamp(-2.0, 2.0)
        seen += clipped[~clipped.isnan()].tolist()
        mean = sum(seen) / len(seen)
        expected = (clipped - mean).nan_to_num(0.0)
        expected[(clipped.nan_to_num(2.0) == 2.0).all(dim=1)] = 0.0             # 6 and 5 are cut to a tie
        assert_advantages(experience, expected)


def test_minibatches_take_every_row_once_an_epoch_in_a_new_order_with_groups_together(base):
    run = with_settings(base, ppo_epochs=3, minibatch_size=8)
    parts = list(minibatches(run.config.grpo, 16, seed=7))
    assert [len(rows) for rows in parts] == [8] * 6
    epochs = [torch.cat(parts[i : i + 2]) for i in (0, 2, 4)]
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(16))
        assert (rows.view(-1, 4) - rows.view(-1, 4)[:, :1] == torch.arange(4)).all()
    assert len({tuple(rows.tolist()) for rows in epochs}) > 1
    again, later = (minibatches(run.config.grpo, 16, seed=seed) for seed in (7, 8))
    assert all(torch.equal(a, b) for a, b in zip(parts, again)), "the same again after a resume"
    assert not all(torch.equal(a, b) for a, b in zip(parts, later))
    run = with_settings(base, minibatch_size=6)
    assert [len(rows) for rows in minibatches(run.config.grpo, 16, seed=0)] == [6, 6, 4]
    assert [rows.tolist() for rows in minibatches(with_settings(base).config.grpo, 16, seed=0)] == [list(range(16))]


def numbers(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rewards,penalty,weights", [
    (numbers([2.0], [-1.0], [math.nan]), torch.zeros(3, 5), {"environment": 0.5}),
    (numbers([0.5], [4.0], [1.0]), torch.rand(3, 5), {"correctness": 1.0, "environment": 2.0}),
    (numbers([0.5], [4.0], [1.0]), torch.rand(3, 5), {"correctness": 1.0}),
])
def test_points_of_turns_stand_at_their_ends_and_what_is_left_at_the_last_token(normalize, rewards, penalty, weights):
    """By loops over the chosen tokens, with and without centring and scaling over all of them. The last row is not trained on."""
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    turn_points, values = numbers([0, 3.0, 5.0, 1.0, 0], [0, -2.0, 0, 0, 7.0], [1.0, 0, 0, 0, 0]), torch.randn(3, 5)
    config = GRPOConfig(
        gae_gamma=0.9, gae_lambda=0.8, normalize_advantages=normalize,
        reward_functions=list(weights), reward_weights=list(weights.values()))
    advantages, returns = token_advantages(config, rewards, penalty, values, mask, turn_points)
    expected = torch.zeros(3, 5)
    for row in range(2):
        chosen = mask[row].nonzero()[:, 0].tolist()
        points = {t: weights.get("environment", 0.0) * float(turn_points[row, t]) for t in chosen}
        points[chosen[-1]] += float(rewards[row]) - sum(points.values())
        later = next_value = 0.0
        for t in reversed(chosen):
            later = points[t] - float(penalty[row, t]) + 0.9 * next_value - float(values[row, t]) + 0.72 * later
            next_value, expected[row, t] = float(values[row, t]), later
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0))
    if normalize:
        every = expected[mask]
        expected = torch.where(mask, (expected - every.mean()) / every.std(), 0.0)
    torch.testing.assert_close(advantages, expected)
    alone = token_advantages(config, numbers([3.0]), torch.zeros(1, 2), numbers([1.0, 0.0]), torch.tensor([[True, False]]))[0]
    assert alone.tolist() == [[2.0, 0.0]], "a standard deviation needs two"


def policy_of(logp, values=None, same_arithmetic=True):
    """What compute_experience asks of a policy that gives completions these log-probabilities."""
    return SimpleNamespace(log_probs=lambda rollout: LogProbs(logp, None, None, values), value_head=values, same_arithmetic=same_arithmetic)


def rollout_of(mask, sampling_logp=None, num_prompts=1):
    ids, every = torch.ones(num_prompts, 2).long(), torch.ones(len(mask)).bool()
    return Rollout(ids, ids.bool(), mask.long(), mask, torch.zeros(mask.shape) if sampling_logp is None else sampling_logp, every, [""] * len(mask))


@pytest.mark.parametrize("same_arithmetic", [False, True])
def test_what_is_measured_between_sampler_and_trainer(same_arithmetic):
    """Two rows, of which one is not scored: deviations are those of all sampled tokens. Advantages get the weights."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    sampler, trainer = numbers([-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]), numbers([-1.5, -2.0, -2.0], [-1.2, 0.0, 0.0])
    rewards = numbers([1.0, math.nan])
    groups = Groups([{}], rollout_of(mask, sampler), rewards, {}, rewards, numbers([2.0, 0.0]))
    for cap in 1.5, 0.0:
        config = GRPOConfig(importance_cap=cap, num_completions_per_prompt=2, use_kl_penalty=False)
        made = compute_experience(groups, config, policy_of(trainer, same_arithmetic=same_arithmetic))
        ratios = [math.exp(x) for x in (-0.5, 0.0, 1.0, -0.2)]
        expected = {"mean_advantage": 1.0, "std_advantage": 2**0.5, "importance_weight": (ratios[0] + ratios[1] + 1.5) / 3 if cap else None}
        expected["sampler_deviation"] = sum(abs(x - 1) for x in ratios) / 4 if cap or not same_arithmetic else None
        assert dict.fromkeys(expected) | made.metrics == pytest.approx(expected) and made.table.old_logp.equal(trainer if cap else sampler)
        batch = made.batch(torch.arange(2))
        terms, _ = train.grpo_loss(replace(config, loss_type="reinforce"), LogProbs(trainer[:1], trainer[:1]), batch)
        factors = numbers(ratios[0], ratios[1], 1.5) if cap else numbers(1.0, 1.0, 1.0)
        assert float(terms["policy_loss"]) == pytest.approx(float(-(2 * factors * trainer[0]).sum() / 3))


def test_weights_of_a_batch_count_its_rows_and_all_tokens_of_their_groups():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool()
    mask = mask[:, :3]                                    # as make_rollout cuts it: not contiguous
    table = Batch.of_rollout(rollout_of(mask, num_prompts=3), torch.zeros(6, 1))
    torch.testing.assert_close(table.weights, mask / 6)
    made = Experience([], table)
    for aggregation, rows, expected in [
        ("token_mean", [0, 2, 3], [1 / 5, 0, 0, 1 / 5, 0, 0]), ("sequence_mean", [1, 3, 4], [0, 1 / 2, 0, 1 / 4, 0, 0]),
        ("constant", [0, 2], [1 / 7, 0, 0, 0, 0, 0]), ("prompt_mean", range(6), [1 / 8, 1 / 8, 0, 1 / 4, 0, 0]),
        ("prompt_mean", [0], [1 / 3, 0, 0, 0, 0, 0]), ("prompt_mean", [1, 3], [0, 1 / 5, 0, 2 / 5, 0, 0]), ("prompt_mean", [4, 5], [0] * 6),
    ]:
        batch = made.batch(torch.tensor(rows), aggregation, max_tokens=7)
        assert batch.rows.tolist() == [row for row in rows if mask[row].any()]
        torch.testing.assert_close(batch.weights, (mask * torch.tensor(expected).float()[:, None])[batch.rows])


@pytest.mark.parametrize("cap", [0.0, 1.0, 2.0])
def test_the_ratio_of_ratio_k3_is_capped_by_importance_cap_with_its_gradient_and_cut_at_e_to_the_20(cap):
    """On policy rounding decides whether a ratio is above 1."""
    logp, moved, x = torch.full((1, 5), -1.0, requires_grad=True), numbers([25.0, 1.0, 1e-6, 0.0, -1.0]), numbers([-1.0, 0.5, 0.5, 2.0, 1.0])
    before = logp.detach() - moved
    every = torch.ones(1, 5)
    made = Batch(
        None, torch.arange(1), every.bool(), every, every, before - 9, old_logp=before - 9, trainer_logp=before, lengths=None, finished=None,
        reference_logp=logp.detach() + x)
    kl = sampled_kl(logp, made, GRPOConfig(use_kl_penalty=True, importance_cap=cap))
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    for t in range(5):
        ratio = min(math.exp(min(float(moved[0, t]), 20.0)), cap or math.inf)
        k3, slope = math.exp(x[0, t]) - x[0, t] - 1, 1 - math.exp(x[0, t])
        expected = ratio * k3, ratio * ((0 if t == 0 else k3) + slope)
        torch.testing.assert_close(torch.stack([kl[0, t], gradient[0, t]]), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_kl_in_the_reward_is_taken_off_within_a_group_without_rows_that_are_not_trained_on():
    mask, logp = torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(), numbers([-1.0, -2.0], [-1.0, 0.0], [-1.0, -1.0])
    rewards = numbers([1.0, 2.0, math.nan])
    groups = Groups([{}], rollout_of(mask, logp - 3), rewards, {}, rewards, numbers([0.75, -0.75, 0.0]))  # another sampler
    config = GRPOConfig(use_kl_penalty=True, kl_penalty_coef=0.5, kl_in="reward", num_completions_per_prompt=3)
    reference = policy_of(numbers([-2.0, -2.5], [-1.5, 0.0], [-9.0, -9.0]))
    made = compute_experience(groups, config, policy_of(logp, same_arithmetic=False), reference)
    assert made.metrics["kl"] == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    # Sums of 1.5 and 0.5 nats, half of each from the reward, around their mean.
    assert_advantages(made, numbers([0.75 - 0.25, -0.75 + 0.25, 0.0]))


def test_with_a_value_head_tokens_have_advantages_of_their_own_and_the_penalty_of_each(base):
    run = with_settings(base, use_value_head=True, use_kl_penalty=True, kl_penalty_coef=0.7, kl_in="reward")
    rollout, rewards = sample_groups(run, next(run.batches)).rollout, torch.randn(4, 4)
    rewards[2, 1] = math.nan
    made = experience_of(run, rollout, rewards)
    now = run.policy.log_probs(rollout)
    penalty = 0.7 * (now.logp - run.reference.log_probs(rollout).logp)
    mask = rollout.completion_mask & ~rewards.view(-1, 1).isnan()
    expected = token_advantages(run.config.grpo, rewards.view(-1, 1), torch.where(mask, penalty, 0.0), now.values, mask)
    for found, wanted in zip((made.table.advantages, made.table.returns, made.table.old_values), (*expected, now.values)):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert now.values.abs().max() > 0.1 and torch.equal(made.table.mask, mask)
