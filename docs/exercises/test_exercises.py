"""Tests of the exercises, which name the error. EXERCISES=solutions tests the solutions instead."""

import importlib
import os

import torch

import grpo
from analysis.reward_linter import completions_of, flags_of

task = importlib.import_module(os.environ.get("EXERCISES", "exercises"))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def compare(what, found, expected, **mistakes):
    """Fail with a sentence that says what is wrong. mistakes: a sentence, with _ for spaces, and the result of that mistake."""
    __tracebackhide__ = True                              # show only the sentence
    assert isinstance(found, torch.Tensor), f"{what}: return a tensor, not {found!r:.40}"
    assert found.shape == expected.shape, f"{what}: has shape {tuple(found.shape)}, and should have {tuple(expected.shape)}"
    if torch.allclose(found, expected.to(found.dtype), atol=1e-6, rtol=1e-4):
        return
    for sentence, wrong in mistakes.items():
        if torch.allclose(found, wrong.to(found.dtype), atol=1e-6, rtol=1e-4, equal_nan=True):
            raise AssertionError(f"{what}: {sentence.replace('_', ' ')}")
    place = (~torch.isclose(found, expected.to(found.dtype), atol=1e-6, rtol=1e-4)).nonzero()[0].tolist()
    where = f" at {place}" if place else ""
    raise AssertionError(f"{what}: is {found[tuple(place)]:.4f}{where}, and should be {expected[tuple(place)]:.4f}")


def test_1_group_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.3, 0.3, 0.3, 0.3], [0.2, 0.4, 0.6, 0.8]])
    centred = rewards - rewards.mean(1, True)
    compare(
        "advantages of three groups", task.group_advantages(rewards), grpo.compute_group_advantages(rewards),
        the_standard_deviation_divides_by_G_and_not_by_G_minus_1=centred / rewards.std(1, correction=0, keepdim=True),
        the_rewards_are_not_divided_by_the_standard_deviation=centred,
        mean_and_standard_deviation_are_those_of_the_batch_and_not_of_each_row=(rewards - rewards.mean()) / rewards.std(),
        the_standard_deviation_is_that_of_the_batch_and_not_of_each_row=centred / rewards.std(),
        the_sign_is_reversed=-centred / rewards.std(1, keepdim=True),
    )
    for reward in 0.7, 0.1, 1.3, 0.0:
        for size in range(2, 17):
            largest = float(task.group_advantages(torch.full((1, size), reward)).abs().max())
            assert largest == 0, (
                f"{size} rewards of {reward} have zero variance, and an advantage is {largest:.3g}: the float32 mean is not exactly "
                f"{reward}, and the rounding error is divided by nearly 0. Detect groups of equal rewards before the division")
    beside = task.group_advantages(torch.tensor([[0.7] * 7, [0.0] * 6 + [1.0]]))
    assert float(beside[0].abs().max()) == 0, "equal rewards beside another group have advantages: compare within each row (dim=1)"
    assert float(beside[1].abs().max()) > 0, "a group beside equal rewards has no advantages: compare within each row (dim=1)"


def test_2_leave_one_out():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [4.0, 3.0, 2.0, 7.0]])
    expected = torch.tensor([[2 / 3, -2 / 3, -2 / 3, 2 / 3], [0.0, -4 / 3, -8 / 3, 4.0]])
    torch.testing.assert_close(grpo.compute_group_advantages(rewards, baseline="leave_one_out", scale="none"), expected)
    compare(
        "advantages of two groups", task.leave_one_out(rewards), expected,
        the_mean_contains_the_completion_itself=rewards - rewards.mean(1, True),
        the_sum_of_the_siblings_is_divided_by_G_and_not_by_G_minus_1=rewards - (rewards.sum(1, True) - rewards) / 4,
        the_sum_of_the_siblings_is_divided_by_P_minus_1_as_len_counts_prompts=rewards - (rewards.sum(1, True) - rewards) / 1,
        the_sign_is_reversed=-expected,
        this_is_the_mean_of_the_siblings_and_not_yet_subtracted=(rewards.sum(1, True) - rewards) / 3,
    )


def test_3_clipped_loss():
    logp, old_logp, advantages = numbers(4, 6).requires_grad_(), numbers(4, 7)[:, :6], numbers(4, 8)[:, :6]
    loss = task.clipped_loss(logp, old_logp, advantages, 0.2)
    ratio = (logp - old_logp).exp()
    plain, clipped = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
    compare(
        "loss of each token", loss, -torch.minimum(plain, clipped),
        it_is_the_larger_of_the_two_gains_and_the_formula_takes_the_smaller=-torch.maximum(plain, clipped),
        the_minimum_is_missing_so_that_a_token_outside_the_clip_cannot_come_back=-clipped,
        the_clip_is_missing=-plain,
        the_minus_is_missing_and_a_loss_is_minimised=torch.minimum(plain, clipped),
        the_minimum_is_taken_before_the_multiplication_by_A_which_reverses_the_order_where_A_is_negative=-torch.minimum(
            ratio, ratio.clamp(0.8, 1.2)) * advantages,
        the_ratio_is_that_of_old_to_new=-torch.minimum(advantages / ratio, (1 / ratio).clamp(0.8, 1.2) * advantages),
    )
    expected, _ = grpo.policy_loss(logp, old_logp, advantages, torch.ones(4, 6).bool(), torch.ones(4, 6))
    assert loss.requires_grad, "the loss has no gradient: something is detached"
    gradients = [torch.autograd.grad(value, logp, retain_graph=True)[0] for value in (loss.sum(), expected)]
    compare("gradient of the loss with respect to logp", *gradients)


def test_4_loss_of_a_piece():
    loss, lengths = numbers(6, 5), torch.tensor([5, 1, 2, 5, 3, 4])
    mask = torch.arange(5) < lengths[:, None]
    whole, count = loss[mask].mean(), int(mask.sum())
    found = task.loss_of_a_piece(loss.masked_fill(~mask, 100.0), mask, count)
    compare("loss with 100 in the padding", found, whole, the_padding_is_in_the_sum=whole + 100 * float((~mask).sum() / count))
    loss = loss.masked_fill(~mask, torch.nan)
    for pieces in ([0, 1, 2, 3, 4, 5],), ([0], [1], [2], [3, 4, 5]), ([5, 1], [0, 2, 4, 3]):
        found = sum(task.loss_of_a_piece(loss[rows], mask[rows], count) for rows in pieces)
        compare(
            f"sum over {len(pieces)} micro-batches", found, whole,
            each_micro_batch_divides_by_its_own_tokens_and_not_by_num_tokens=sum(loss[rows][mask[rows]].mean() for rows in pieces),
            NaN_of_the_padding_is_in_the_sum_as_NaN_times_0_is_NaN=torch.tensor(torch.nan),
        )


def test_5_kl_term():
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - q.log())).sum()
    term = task.kl_term(logp, logp.detach(), q.log())
    x = q.log() - logp
    compare(
        "value of each of three tokens", term, x.exp() - x - 1, this_is_k1=-x, this_is_k2=x**2 / 2,
        x_has_the_wrong_sign=(-x).exp() + x - 1)
    half = (logp - logp.detach() + 0.5).exp() * (x.exp() - x - 1)
    compare(
        "value where old_logp is logp - 0.5", task.kl_term(logp, logp.detach() - 0.5, q.log()), half,
        the_ratio_is_missing_or_ignores_old_logp=x.exp() - x - 1, the_ratio_is_that_of_old_to_new=(-0.5 * torch.ones(3)).exp() * (x.exp() - x - 1))
    assert term.requires_grad, "the penalty has no gradient: something is detached"
    mean = (p * term).sum()                                                      # by enumeration of the three tokens
    gradient = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    expected, of_k3 = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (exact, (p * (x.exp() - x - 1)).sum()))
    compare(
        "mean gradient", gradient, expected,
        the_ratio_has_no_gradient_and_this_is_the_gradient_of_the_other_KL=of_k3)


def test_6_right_number():
    def reward(text, answer="72"):
        try:
            values = task.right_number([text], answer=[answer], prompts=["7+65=?"])
        except NotImplementedError:
            raise
        except Exception as error:
            raise AssertionError(f"{text[:60]!r} raises {type(error).__name__}: {error}. A model may write anything; answer is a list") from error
        assert isinstance(values, list) and len(values) == 1, f"return a list with a number for each completion, not {values!r:.40}"
        return values[0]

    for text, answer in (
        ("<answer>72</answer>", "72"), ("so <answer> 72 </answer>", "72"), ("<answer>72.0</answer>", "72"),
        ("<answer>1,000</answer>", "1000"), ("<answer>-3</answer>", "-3"),
    ):
        assert reward(text, answer) == 1, f"{text!r} is right where the answer is {answer}, and earns {reward(text, answer)}"
    cheats = {
        "an empty completion": "", "a number without a tag": "72", "an open tag": "<answer>", "an empty tag": "<answer></answer>",
        "a number that ends like the answer": "<answer>172</answer>", "several numbers": "<answer>70 71 72 73</answer>",
        "two answers": "<answer>71</answer><answer>72</answer>", "two answers, the first right": "<answer>72</answer><answer>71</answer>",
        "a tag in a tag": "<answer><answer>72</answer>", "the same answer three times": "<answer>72</answer>" * 3,
        "the question": "<answer>the number of 7+65</answer>", "5000 digits": "<answer>" + "9" * 5000 + "</answer>",
        "an underscore, which float() accepts": "<answer>7_2</answer>", "not a number": "<answer>nan</answer>", "infinity": "\0<answer>inf</answer>",
    }
    for name, text in cheats.items():
        assert reward(text) == 0, f"{name} earns {reward(text)}, and should earn 0: {text[:60]!r}"
    assert reward("<answer>nan</answer>", "nan") == 0, "two unreadable answers are not equal answers"
    example = {"prompt": "7+65=?", "answer": "72", "completion": "<reasoning>65+7=72</reasoning><answer>72</answer>"}
    flags = flags_of({kind: reward(text) for kind, text in completions_of(example).items()})
    assert flags == [], f"the reward linter finds: {flags}"
