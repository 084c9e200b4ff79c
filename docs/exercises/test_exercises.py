"""Tests of the exercises, which name the error. EXERCISES=solutions tests the solutions instead."""

import importlib
import os
import traceback
from functools import reduce

import pytest
import torch

import grpo
from analysis.reward_linter import completions_of, flags_of

task = importlib.import_module(os.environ.get("EXERCISES", "exercises"))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def gradient(value, variable):
    return torch.autograd.grad(value.sum(), variable, retain_graph=True)[0]


def standardised(r, dim=1, correction=1, epsilon=1e-8):
    return (r - r.mean(dim, True)) / (r.std(dim, correction=correction, keepdim=True) + epsilon)


def gain(ratio, a, clip, choose=torch.minimum):
    return choose(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


IN_PLACE = "an argument is changed in place (by -=, /= or [...] = 0), and the caller still needs it: make a new tensor"
MISTAKES = {                                 # function -> what is said about a mistake -> the function with that mistake
    "group_advantages": {
        "the standard deviation divides by G and not by G - 1": lambda r: standardised(r, correction=0),
        "the rewards are not divided by the standard deviation": lambda r: r - r.mean(1, True),
        "the sign is reversed": lambda r: -standardised(r),
        "mean and standard deviation are those of the batch and not of each row": lambda r: (r - r.mean()) / r.std(),
        "the standard deviation is that of the batch and not of each row": lambda r: (r - r.mean(1, True)) / r.std(),
        "mean and standard deviation are those of a column (dim=0) and not of a row (dim=1)": lambda r: standardised(r, dim=0),
        "equal rewards are not detected, and a rounding error of their mean is divided by nearly 0": standardised,
        "one group of equal rewards changes other groups": lambda r: torch.where((r.amax(1) == r.amin(1)).any(), 0.0, standardised(r)),
        "rewards that differ by little are treated as equal": lambda r: torch.where(r.std(1, keepdim=True) < 0.05, 0.0, standardised(r)),
        **{f"epsilon is {e}, and should be 1e-8": lambda r, e=e: standardised(r, epsilon=float(e)) for e in ("1e-4", "1e-5", "1e-6")},
    },
    "leave_one_out": {
        "the mean contains the completion itself": lambda r: r - r.mean(1, True),
        "the sum of the siblings is divided by G and not by G - 1": lambda r: r - (r.sum(1, True) - r) / r.shape[1],
        "the sum of the siblings is not divided": lambda r: r - (r.sum(1, True) - r),
        "the sum of the siblings is divided by P - 1, as len counts prompts": lambda r: r - (r.sum(1, True) - r) / (len(r) - 1),
        "the sum of the siblings is always divided by 3, and not by G - 1": lambda r: r - (r.sum(1, True) - r) / 3,
        "the sign is reversed": lambda r: (r.sum(1, True) - r) / (r.shape[1] - 1) - r,
        "this is the mean of the siblings, and not yet subtracted": lambda r: (r.sum(1, True) - r) / (r.shape[1] - 1),
        "the result is divided by the standard deviation": lambda r: (r - (r.sum(1, True) - r) / (r.shape[1] - 1)) / r.std(1, keepdim=True),
        "this is exercise 1: the mean contains the completion itself, and the result is scaled": standardised,
    },
    "clipped_loss": {
        "it is the larger of the two gains, and the formula takes the smaller": lambda p, o, a, c: -gain((p - o).exp(), a, c, torch.maximum),
        "the minimum is missing, so a token outside the clip interval cannot come back": lambda p, o, a, c: -(p - o).exp().clamp(1 - c, 1 + c) * a,
        "the clip is missing": lambda p, o, a, c: -(p - o).exp() * a,
        "the minus is missing, and a loss is minimised": lambda p, o, a, c: gain((p - o).exp(), a, c),
        "multiply by A before the minimum, because a negative A reverses the order": lambda p, o, a, c: -gain((p - o).exp(), 1, c) * a,
        "the ratio is that of old to new": lambda p, o, a, c: -gain((o - p).exp(), a, c),
        "0.8 and 1.2 are written in the code, instead of 1 - clip and 1 + clip": lambda p, o, a, c: -gain((p - o).exp(), a, 0.2),
        "the ratio is clamped to (-clip, clip) and not around 1": lambda p, o, a, c: -torch.minimum((p - o).exp() * a, (p - o).exp().clamp(-c, c) * a),
        "the ratio is a difference, and exp is missing": lambda p, o, a, c: -gain(p - o, a, c),
        "the ratio is logp / old_logp, and should be exp(logp - old_logp)": lambda p, o, a, c: -gain(p / o, a, c),
    },
    "micro_batch_loss": {
        "NaN of the padding is in the sum, as NaN times 0 is NaN": lambda loss, mask, n: (loss * mask).sum() / n,
        "the padding is in the sum": lambda loss, mask, n: loss.sum() / n,
        "the padding is in the mean": lambda loss, mask, n: loss.mean(),
        "the sum is divided by all positions, padding included, and not by num_tokens": lambda loss, mask, n: loss[mask].sum() / mask.numel(),
        "each micro-batch divides by its own tokens and not by num_tokens": lambda loss, mask, n: loss[mask].mean(),
    },
    "kl_term": {
        "this is k1 alone, and should be the ratio times k3": lambda p, o, q: p - q,
        "this is k2 alone, and should be the ratio times k3": lambda p, o, q: (p - q) ** 2 / 2,
        "this is the ratio times k1, and should be the ratio times k3": lambda p, o, q: (p - o).exp() * (p - q),
        "this is the ratio times k2, and should be the ratio times k3": lambda p, o, q: (p - o).exp() * (p - q) ** 2 / 2,
        "x has the wrong sign": lambda p, o, q: (p - o).exp() * k3(q, p),
        "the ratio is that of old to new": lambda p, o, q: (o - p).exp() * k3(p, q),
        "the ratio has no gradient, and this is the gradient of the other KL": lambda p, o, q: (p - o).exp().detach() * k3(p, q),
        "only the ratio has a gradient: do not detach k3": lambda p, o, q: (p - o).exp() * k3(p, q).detach(),
        "this is k3 alone: the ratio is missing or ignores old_logp": lambda p, o, q: k3(p, q),
    },
}


def check(right, sentence):
    """Fail with the sentence alone, without a traceback."""
    if not right:
        pytest.fail(sentence, pytrace=False)


def compare(name, what, result_of, expected, variable=None):
    """Compare the result of an exercise's function, and its gradient, with what is expected and with those of the mistakes."""
    def is_near(result):
        return torch.isclose(found.double(), result.double(), atol=1e-6, rtol=1e-4, equal_nan=True)

    found, kind = result_of(getattr(task, name)), "a tensor with a gradient" if expected.requires_grad else "a tensor"
    check(isinstance(found, torch.Tensor), f"{what}: return {kind}, not {found!r:.40}")
    check(found.shape == expected.shape, f"{what}: has shape {tuple(found.shape)}, and should have {tuple(expected.shape)}")
    if not is_near(expected).all():
        place = tuple((~is_near(expected)).nonzero()[0].tolist())
        values = f"is {found[place]:.4f}{f' at {list(place)}' if place else ''}, and should be {expected[place]:.4f}"
        named = [sentence for sentence, wrong in MISTAKES[name].items() if is_near(result_of(wrong)).all()]
        check(False, f"{what}: {[*named, values][0]}")
    has_gradient = found.requires_grad or not expected.requires_grad
    check(has_gradient, f"{what}: is right, but has no gradient, as detach(), item(), no_grad() or torch.tensor() removed it")
    if variable is not None:
        compare(name, f"gradient of the {what}", lambda f: gradient(result_of(f), variable), gradient(expected, variable))


def test_1_group_advantages():
    for groups in [[1.0, 0.0, 0.0, 1.0], [0.2, 0.4, 0.6, 0.9]], [[0.5, 0.50024414], [1.0, 0.0]], [[0.7] * 7, [0.0] * 6 + [1.0]]:
        rewards = torch.tensor(groups)
        compare("group_advantages", f"advantages of {groups}", lambda f, rewards=rewards: f(rewards), grpo.compute_group_advantages(rewards))
        check(torch.equal(rewards, torch.tensor(groups)), IN_PLACE)
    for reward in 0.7, 0.1, 1.3, 0.0:
        for size in range(2, 17):
            largest = float(task.group_advantages(torch.full((1, size), reward)).abs().max())
            check(largest == 0, f"{size} rewards of {reward} are equal, so advantages should be exactly 0, and one is {largest:.3g}")


def test_2_leave_one_out():
    for groups in [[1.0, 0.0, 0.0, 1.0], [4.0, 3.0, 2.0, 7.0], [0.0, 5.0, 1.0, 1.0]], [[2.0, 0.0, 1.0, 5.0, 3.0], [1.0] * 5]:
        rewards = torch.tensor(groups)
        expected = grpo.compute_group_advantages(rewards, baseline="leave_one_out", scale="none")
        compare("leave_one_out", f"advantages of {groups}", lambda f, rewards=rewards: f(rewards), expected)
        check(torch.equal(rewards, torch.tensor(groups)), IN_PLACE)


def test_3_clipped_loss():
    logp, old_logp, advantages = numbers(4, 6).requires_grad_(), numbers(4, 7)[:, :6], numbers(4, 8)[:, :6]
    for clip in 0.2, 0.5:
        expected, _, _ = grpo.token_loss(logp, old_logp, advantages, torch.ones(4, 6).bool(), clip_low=clip, clip_high=clip)
        compare("clipped_loss", f"loss of each token, clip={clip}", lambda f, c=clip: f(logp, old_logp, advantages, c), expected, logp)


def test_4_micro_batch_loss():
    loss, mask = numbers(6, 5).requires_grad_(), torch.arange(5) < torch.tensor([[5], [1], [2], [5], [3], [4]])
    whole, count = loss[mask].mean(), int(mask.sum())
    task.micro_batch_loss(padded := loss.masked_fill(~mask, 100.0), mask, count)
    check(torch.equal(padded, loss.masked_fill(~mask, 100.0)), IN_PLACE)
    for padding, what, pieces in (
        (100.0, "loss with 100 in the padding", [[0, 1, 2, 3, 4, 5]]), (torch.nan, "loss with NaN in the padding", [[0, 1, 2, 3, 4, 5]]),
        (torch.nan, "sum over four micro-batches", [[0], [1], [2], [3, 4, 5]]), (torch.nan, "sum over two micro-batches", [[5, 1], [0, 2, 4, 3]]),
    ):
        calls = [(loss.masked_fill(~mask, padding)[rows], mask[rows], count) for rows in pieces]
        compare("micro_batch_loss", what, lambda f, calls=calls: reduce(torch.add, [f(*call) for call in calls]), whole, loss)
    check(task.micro_batch_loss(loss * torch.nan, mask, count).isnan(), "a NaN where mask is True is hidden, and should make the result NaN")


def test_5_kl_term():
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(0)
    old_logp = logp.detach() - torch.tensor([0.5, -0.3, 0.2])
    compare("kl_term", "value of each of three tokens", lambda f: f(logp, old_logp, q.log()), (logp - old_logp).exp() * k3(logp, q.log()))
    exact = gradient(logp.exp() * (logp - q.log()), logits)                      # of the sum over the three tokens
    compare("kl_term", "mean gradient", lambda f: gradient(p * f(logp, logp.detach(), q.log()), logits), exact)


def test_6_right_number():
    def rewards(texts, answers):
        try:
            values = task.right_number(texts, answer=answers, prompts=["7+65=?"] * len(texts))
        except NotImplementedError:
            raise
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1].line
            advice = "A model may write anything, so never raise an error; and answer is a list"
            check(False, f"{texts[0][:40]!r} raises {type(error).__name__}: {error}, in\n    {line}\n{advice}")
        check(isinstance(values, list), f"return a list with a number for each completion, not {values!r:.40}")
        check(len(values) == len(texts), f"the list for {len(texts)} completions has length {len(values)}: is `return` inside the loop?")
        return values

    def reward(text, answer="72"):
        return rewards([text], [answer])[0]

    for number, answer in ("72", "72"), (" 72 ", "72"), ("72.0", "72"), ("1,000", "1000"), ("-3", "-3"), ("0.5", "0.5"):
        text = f"so <answer>{number}</answer>"
        check(reward(text, answer) == 1, f"{text!r} is right where the answer is {answer}, and earns {reward(text, answer)}")
    values = rewards(["<answer>72</answer>", "<answer>5</answer>", "<answer>72</answer>"], ["72", "5", "9"])
    check(values == [1, 1, 0], f"72, 5 and 72 earn {values} where the answers are 72, 5 and 9: compare each completion with its own answer")
    cheats = {
        "not a number, and two unreadable answers are not equal": "<answer>nan</answer>", "an empty completion": "", "an open tag": "<answer>",
        "a number that ends like the answer": "<answer>172</answer>", "several numbers": "<answer>70 71 72 73</answer>",
        "two answers": "<answer>71</answer><answer>72</answer>", "two answers, the first right": "<answer>72</answer><answer>71</answer>",
        "a tag in a tag": "<answer><answer>72</answer>", "the same answer three times": "<answer>72</answer>" * 3,
        "another number, which int() cuts to 72": "<answer>72.9</answer>", "another number, and no tolerance is allowed": "<answer>72.001</answer>",
        "another number, as the sign counts": "<answer>-72</answer>", "not a number, as a comma stands before three digits": "<answer>7,2</answer>",
        "four digits after a comma, not three": "<answer>1,0000</answer>", "four digits before a comma, not up to three": "<answer>1234,567</answer>",
        "the question": "<answer>the number of 7+65</answer>", "5000 digits": f"<answer>{'9' * 5000}</answer>", "infinity": "\0<answer>inf</answer>",
        "an underscore, which float() accepts": "<answer>7_2</answer>", "a number without a tag": "72", "an empty tag": "<answer></answer>",
    }
    for name, text, answer in [(*cheat, answer) for answer in ("72", "10000", "1234567", "nan") for cheat in cheats.items()]:
        check(reward(text, answer) == 0, f"{text[:60]!r} earns {reward(text, answer)} where the answer is {answer}, and should earn 0: it is {name}")
    example = {"prompt": "7+65=?", "answer": "72", "completion": "<reasoning>65+7=72</reasoning><answer>72</answer>"}
    flags = flags_of({kind: reward(text) for kind, text in completions_of(example).items()})
    check(flags == [], f"the reward linter finds: {flags}")
