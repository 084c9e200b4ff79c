"""The data of an update: rewards shaped, tied groups replaced, advantages of tokens, minibatches."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch
from conftest import experience_of, with_settings

import train
from sources.batches import ShuffledBatches
from experience import minibatches, shape_rewards
from grpo import compute_group_advantages
from logprobs import completion_log_probs
from train import sample_groups


def test_overlong_completions_are_kept_left_out_or_penalised(base):
    rewards = torch.tensor([[0.0, 1.0, 0.5, 0.25]] * 4)

    def look(**settings):
        torch.manual_seed(0)
        run = with_settings(base, normalize_advantages=False, generation_max_length=20, **settings)
        rollout = sample_groups(run, next(run.batches)).rollout
        finished = torch.arange(16) % 4 != 1              # the sampler's word is what counts, not the length
        rollout = replace(rollout, finished=finished)
        return rollout, experience_of(run, rollout, shape_rewards(run.config.grpo, rollout, rewards))

    rollout, kept = look()
    assert torch.equal(kept.mask, rollout.completion_mask)
    rollout, masked = look(overlong="mask")
    assert torch.equal(masked.mask, rollout.completion_mask & rollout.finished[:, None])
    assert torch.equal(masked.advantages, kept.advantages), "their points still count for their siblings"
    rollout, penalised = look(overlong="penalise", overlong_buffer=15)
    lengths = rollout.completion_mask.sum(dim=1)
    shaped = rewards + torch.tensor([min(0.0, (20 - 15 - int(n)) / 15) for n in lengths]).view(4, 4)
    assert (shaped < rewards).any()
    torch.testing.assert_close(penalised.advantages.view(4, 4), shaped - shaped.mean(dim=1, keepdim=True))
    every_length = replace(rollout, completion_mask=torch.arange(20) < torch.arange(5, 21)[:, None])
    settings = with_settings(base, generation_max_length=20, overlong="penalise").config.grpo
    expected = [0.0] * 12 + [-0.25, -0.5, -0.75, -1.0]    # the buffer is a fifth of the limit
    torch.testing.assert_close(shape_rewards(settings, every_length, torch.zeros(4, 4)).flatten(), torch.tensor(expected))


def test_with_gdpo_points_of_an_unscored_completion_do_not_count_for_its_siblings(base):
    """One function scored it, the other did not."""
    config = with_settings(base, reward_combination="gdpo", reward_functions=["a", "b"], reward_weights=[1.0, 1.0]).config.grpo
    shaped = []
    for points in 0.0, 9.0:
        per_function = {"a": torch.tensor([[1.0, 2.0, 4.0, math.nan]]).double(), "b": torch.tensor([[0.0, 1.0, 0.5, points]]).double()}
        scores = torch.tensor([[1.0, 3.0, 4.5, math.nan]]).double()
        shaped.append(shape_rewards(config, None, scores, per_function))
    torch.testing.assert_close(*shaped, equal_nan=True)
    assert shaped[0].isnan().tolist() == [[False, False, False, True]]


def test_dynamic_sampling_replaces_tied_groups_by_new_prompts_in_bounded_rounds(base, monkeypatch):
    run = with_settings(base, dynamic_sampling=2)
    plan = [[0, 1, 0, 0], [1, 0, 0], [0, 0]]              # which groups of each round have something to teach
    asked = []

    def rewards_of(functions, weights, rollout, examples, **_):
        wanted = plan[len(asked)]
        asked.append([example["prompt"] for example in examples])
        points = torch.tensor([[1.0, 0.0, 0.0, 0.0] if mixed else [0.7] * 4 for mixed in wanted]).double()
        return points, {"points": points}

    monkeypatch.setattr(train, "compute_rewards_for_completions", rewards_of)
    groups = sample_groups(run, next(run.batches))
    order = ShuffledBatches(run.train_set, 9, 0)
    assert list(itertools.chain(*asked)) == [example["prompt"] for example in next(order)], "the next prompts, none twice"
    assert run.batches.position == 9 and groups.replaced == 3 + 2
    assert groups.tied.tolist() == [False, False, True, True], "the last round's stay"
    assert [example["prompt"] for example in groups.examples] == [asked[0][1], asked[1][0], *asked[2]]
    texts = [run.tokenizer.decode(ids[mask]) for ids, mask in zip(groups.rollout.prompt_ids, groups.rollout.prompt_mask)]
    assert [text.removeprefix("<bos>") for text in texts] == [example["prompt"] for example in groups.examples]
    assert groups.rollout.completion_mask.shape == groups.rollout.sampling_logp.shape and len(groups.rollout.completions) == 16
    with torch.no_grad():
        logp = completion_log_probs(run.model, groups.rollout).logp
    torch.testing.assert_close(logp, groups.rollout.sampling_logp, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_comes_up_again_in_a_round_is_answered_anew(base, monkeypatch):
    run = with_settings(base, dynamic_sampling=1)
    run.batches = ShuffledBatches(run.train_set[:4], 4, 0)                       # the new prompts are the old ones
    seen = []

    def never_any_signal(functions, weights, rollout, examples, **_):
        seen.append(dict(zip([example["prompt"] for example in examples], rollout.completions[::4])))
        return torch.zeros(4, 4).double(), {"points": torch.zeros(4, 4).double()}

    monkeypatch.setattr(train, "compute_rewards_for_completions", never_any_signal)
    sample_groups(run, next(run.batches))
    first, second = seen
    assert set(first) == set(second) and all(first[prompt] != second[prompt] for prompt in first)


def test_clipped_rewards_are_clipped_before_anything_else(base):
    run = with_settings(base, reward_clip=2.0)
    rollout = sample_groups(run, next(run.batches)).rollout
    rewards = torch.tensor([[-9.0, 0.0, 1.0, 9.0], [2.0, 3.0, 4.0, 5.0], [math.nan, 7.0, -7.0, 1.0], [0.0, 0.5, 1.0, 1.5]])
    cut = torch.tensor([[-2.0, 0.0, 1.0, 2.0], [2.0, 2.0, 2.0, 2.0], [math.nan, 2.0, -2.0, 1.0], [0.0, 0.5, 1.0, 1.5]])
    points = shape_rewards(run.config.grpo, rollout, rewards)
    torch.testing.assert_close(points, cut, equal_nan=True)
    experience = experience_of(run, rollout, points)
    torch.testing.assert_close(experience.advantages.view(4, 4), compute_group_advantages(cut))


def test_the_global_mean_runs_over_the_run(base):
    run = with_settings(base, baseline="global_mean", normalize_advantages=False, reward_clip=2.0)
    shape = functools.partial(shape_rewards, run.config.grpo)
    rollout = sample_groups(run, next(run.batches)).rollout
    run.progress.reward_sum, run.progress.reward_count = 0.0, 0
    seen = []
    for points in 0.0, 1.0, 5.0:
        rewards = torch.full((4, 4), points)
        rewards[:, 0] = points + 1
        rewards[0, 1] = math.nan
        experience = experience_of(run, rollout, shape(rollout, rewards))
        clipped = rewards.clamp(max=2.0)
        seen += clipped[~clipped.isnan()].tolist()
        mean = sum(seen) / len(seen)
        expected = (clipped - mean).nan_to_num(0.0) if points < 2 else torch.zeros(4, 4)         # 6 and 5 are cut to a tie
        torch.testing.assert_close(experience.advantages.view(4, 4), expected)


def test_groups_that_dynamic_sampling_replaced_count_in_the_global_mean(base, monkeypatch):
    run, rounds = with_settings(base, dynamic_sampling=1, baseline="global_mean"), []

    def rewards_of(functions, weights, rollout, examples, **_):
        rounds.append(len(examples))
        points = torch.full((len(examples), 4), 8.0).double()                    # all tied, all replaced
        if len(rounds) == 2:
            points[:] = torch.tensor([0.0, 1.0, 2.0, math.nan])
        return points, {"points": points}

    monkeypatch.setattr(train, "compute_rewards_for_completions", rewards_of)
    run.progress.reward_sum, run.progress.reward_count = 0.0, 0
    sample_groups(run, next(run.batches))
    assert rounds == [4, 4] and run.progress.reward_count == 16 + 12
    assert run.progress.mean_reward == pytest.approx((16 * 8.0 + 4 * 3.0) / 28)


def test_minibatches_take_every_row_once_an_epoch_in_a_new_order_with_groups_together(base):
    run = with_settings(base, ppo_epochs=3, minibatch_size=8)
    parts = list(minibatches(run.config.grpo, 16, seed=run.minibatch_seed))
    assert [len(rows) for rows in parts] == [8] * 6
    epochs = [torch.cat(parts[i : i + 2]) for i in (0, 2, 4)]
    for rows in epochs:
        assert sorted(rows.tolist()) == list(range(16))
        assert (rows.view(-1, 4) - rows.view(-1, 4)[:, :1] == torch.arange(4)).all()
    assert len({tuple(rows.tolist()) for rows in epochs}) > 1
    again = minibatches(run.config.grpo, 16, seed=run.minibatch_seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again)), "the same again after a resume"
    run.progress.step += 1
    later = minibatches(run.config.grpo, 16, seed=run.minibatch_seed)
    assert not all(torch.equal(a, b) for a, b in zip(parts, later))
    run = with_settings(base, minibatch_size=6)
    assert [len(rows) for rows in minibatches(run.config.grpo, 16, seed=run.minibatch_seed)] == [6, 6, 4]
    assert [rows.tolist() for rows in minibatches(with_settings(base).config.grpo, 16, seed=0)] == [list(range(16))]


def test_token_advantages_come_from_gae_over_the_last_tokens_reward(base):
    run = with_settings(base, use_value_head=True, gae_gamma=0.9, gae_lambda=0.8, normalize_advantages=False,
                        use_kl_penalty=True, kl_in="reward")
    run.progress.kl_coef = 0.7
    rollout = sample_groups(run, next(run.batches)).rollout
    rewards = torch.randn(4, 4)
    rewards[2, 1] = math.nan
    experience = experience_of(run, rollout, rewards)
    with torch.no_grad():
        now = completion_log_probs(run.model, rollout, value_head=run.value_head)
        values, penalty = now.values, 0.7 * (now.logp - completion_log_probs(run.reference, rollout).logp)
    assert values.abs().max() > 0.1
    for row in range(16):
        points, length = float(rewards.view(-1)[row]), int(rollout.completion_mask[row].sum())
        if math.isnan(points):
            assert not experience.mask[row].any() and not experience.advantages[row].any()
            continue
        v = [*values[row, :length].tolist(), 0.0]
        own = [(points if t == length - 1 else 0.0) - float(penalty[row, t]) for t in range(length)]
        deltas = [own[t] + 0.9 * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            expected = sum((0.9 * 0.8) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert float(experience.advantages[row, t]) == pytest.approx(expected, abs=1e-4)
            assert float(experience.returns[row, t]) == pytest.approx(expected + v[t], abs=1e-4)
