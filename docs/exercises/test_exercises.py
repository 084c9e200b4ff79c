"""When an exercise is solved. EXERCISES=solutions tests the solutions instead."""

import importlib
import os

import torch

import grpo
from analysis.reward_linter import completions_of, flags_of

task = importlib.import_module(os.environ.get("EXERCISES", "exercises"))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_1_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.3, 0.3, 0.3, 0.3], [0.2, 0.4, 0.6, 0.8]])
    torch.testing.assert_close(task.group_advantages(rewards), grpo.compute_group_advantages(rewards))
    for points in 0.7, 0.1, 1.3, 0.0:
        for size in range(2, 17):
            assert (task.group_advantages(torch.full((1, size), points)) == 0).all(), f"{size} times {points} is a tie"


def test_2_leave_one_out():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [4.0, 3.0, 2.0, 7.0]])
    torch.testing.assert_close(task.leave_one_out(rewards)[1], torch.tensor([0.0, -4 / 3, -8 / 3, 4.0]))
    expected = grpo.compute_group_advantages(rewards, baseline="leave_one_out", scale="none")
    torch.testing.assert_close(task.leave_one_out(rewards), expected)


def test_3_clipped_loss():
    logp, old_logp, advantages = numbers(4, 6).requires_grad_(), numbers(4, 7)[:, :6], numbers(4, 8)[:, :6]
    loss = task.clipped_loss(logp, old_logp, advantages, 0.2)
    assert loss.shape == (4, 6)
    expected, _ = grpo.policy_loss(logp, old_logp, advantages, torch.ones(4, 6, dtype=torch.bool), num_tokens=1)
    torch.testing.assert_close(loss.sum(), expected)
    gradients = [torch.autograd.grad(value, logp, retain_graph=True)[0] for value in (loss.sum(), expected)]
    torch.testing.assert_close(*gradients)


def test_4_loss_of_a_piece():
    loss, lengths = numbers(6, 5), torch.tensor([5, 1, 2, 5, 3, 4])
    mask = torch.arange(5) < lengths[:, None]
    loss = loss.masked_fill(~mask, torch.nan)
    whole = loss[mask].mean()
    for pieces in ([0, 1, 2, 3, 4, 5],), ([0], [1], [2], [3, 4, 5]), ([5, 1], [0, 2, 4, 3]):
        found = sum(task.loss_of_a_piece(loss[rows], mask[rows], int(mask.sum())) for rows in pieces)
        torch.testing.assert_close(found, whole, msg=f"in {len(pieces)} pieces: {found}, as one: {whole}")


def test_5_kl_term():
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - q.log())).sum()
    mean = (p * task.kl_term(logp, logp.detach(), q.log())).sum()                # by enumeration of the three tokens
    torch.testing.assert_close(mean, exact)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (mean, exact)]
    torch.testing.assert_close(*gradients)


def test_6_right_number():
    def points(text, answer="72"):
        (value,) = task.right_number([text], answer=[answer], prompts=["7+65=?"])
        return value

    for text in "<answer>72</answer>", "so <answer> 72 </answer>", "<answer>72.0</answer>":
        assert points(text) == 1, text
    assert points("<answer>1,000</answer>", "1000") == 1 and points("<answer>-3</answer>", "-3") == 1
    cheats = [
        "", "72", "<answer>", "<answer></answer>", "<answer>172</answer>", "<answer>70 71 72 73</answer>",
        "<answer>71</answer><answer>72</answer>", "<answer>72</answer><answer>71</answer>", "<answer><answer>72</answer>",
        "<answer>72</answer>" * 3, "<answer>the number of 7+65</answer>", "<answer>" + "9" * 5000 + "</answer>",
        "<answer>nan</answer>", "\0<answer>inf</answer>",
    ]
    for text in cheats:
        assert points(text) == 0, text[:60]
    assert points("<answer>nan</answer>", "nan") == 0, "two unreadable answers are not equal answers"
    example = {"prompt": "7+65=?", "answer": "72", "completion": "<reasoning>65+7=72</reasoning><answer>72</answer>"}
    flags = flags_of({kind: points(text) for kind, text in completions_of(example).items()}, is_total=True)
    assert flags == [], "see analysis/reward_linter.py"
