"""The ladder: five programs that stand alone, and whose loss, gradient and advantages are those of grpo.py."""

import difflib
import importlib
import sys

import pytest
import torch
from conftest import ROOT
from test_layout import imported
from transformers import LlamaConfig, LlamaForCausalLM

import grpo

sys.path.append(str(ROOT / "examples/ladder"))
FILES = sorted((ROOT / "examples/ladder").glob("*.py"))
one, two, three, four, five = PROGRAMS = [importlib.import_module(file.stem) for file in FILES]
B, T = five.P * five.G, five.T


def gradient(loss, x):
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def toy_batch():
    """Return logp, old_logp, ref_logp (B, T), advantages (B, 1) and mask (B, T), with garbage in the padding."""
    torch.manual_seed(0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1))
    logp, old, ref = -3 * torch.rand(3, B, T)
    return logp.requires_grad_(), old.masked_fill(~mask, -torch.inf), ref.masked_fill(~mask, torch.nan), torch.randn(B, 1), mask


def small_model():
    """Return a model of large random weights, so that probabilities depend on tokens and positions."""
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(five.VOCABULARY), **size)).eval()


@pytest.mark.parametrize("beta", [0.0, 0.05, 1.0])
def test_loss_and_gradient_of_the_last_program_are_those_of_the_project(monkeypatch, beta):
    monkeypatch.setattr(five, "BETA", beta)
    logp, old, ref, A, mask = toy_batch()
    weights = mask / mask.sum()
    torch.testing.assert_close(weights, grpo.token_weights(mask))
    policy, _ = grpo.policy_loss(logp, old, A, mask, weights)
    ratio = torch.where(mask, logp - old, 0.0).exp()
    penalty = grpo.kl_penalty(logp, torch.where(mask, ref, logp.detach()), ratio=ratio)
    ours, theirs = five.policy_loss(logp, old, ref, A, mask, weights), policy + beta * (penalty * weights).sum()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient(ours, logp), gradient(theirs, logp), atol=1e-7, rtol=1e-4)


def test_with_ratios_of_1_the_gradient_of_every_program_is_that_of_reinforce(monkeypatch):
    monkeypatch.setattr(five, "BETA", 0.0)
    logp, _, _, A, mask = toy_batch()
    old, weights = logp.detach(), mask / mask.sum()
    arguments = (A, mask), (A, mask), (old, A, mask), (old, A, mask, weights), (old, old, A, mask, weights)
    for program, rest in zip(PROGRAMS, arguments):
        torch.testing.assert_close(gradient(program.policy_loss(logp, *rest), logp), -A * mask / mask.sum())


@pytest.mark.parametrize("program", PROGRAMS[1:])
def test_advantages_are_those_of_the_project_and_other_shapes_are_refused(program):
    rewards = torch.randint(0, 2, (five.P, five.G), generator=torch.Generator().manual_seed(0)).float()
    rewards[0], rewards[1] = 0.7, 1.0                     # zero variance
    torch.testing.assert_close(program.compute_advantages(rewards), grpo.compute_group_advantages(rewards))
    assert (program.compute_advantages(rewards)[:2] == 0).all()
    with pytest.raises(AssertionError, match="must be"):
        program.compute_advantages(rewards.T)


@pytest.mark.parametrize("program", PROGRAMS[2:])
def test_trainer_and_sampler_agree_whatever_the_padding_and_the_mask_ends_with_the_stop_token(program):
    ids, mask, logp = program.sample(model := small_model(), program.encode(["____25=", "327514="] * (B // 2)))
    for columns in (0, 3):                                # more padding on the left
        padded = torch.cat([torch.full((B, columns), program.PAD), ids], dim=1)
        torch.testing.assert_close(program.completion_logp(model, padded)[mask], logp[mask], rtol=1e-4, atol=1e-4)
    seen = []
    model.model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    program.completion_logp(model, program.encode(["____25=52....."]))
    assert seen[0].tolist() == [[0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    for row, kept in zip(ids[:, -T:].tolist(), mask.tolist()):
        length = row.index(program.EOS) + 1 if program.EOS in row else T
        assert kept == [t < length for t in range(T)] and set(row[length:]) <= {program.PAD}


@pytest.mark.parametrize("program", PROGRAMS[3:])
def test_the_gradient_of_a_step_does_not_depend_on_the_size_of_micro_batches(monkeypatch, program):
    found = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, _: found.append([p.grad.clone() for p in parameters]) or 0.0)
    monkeypatch.setattr(program, "UPDATES", 1)
    monkeypatch.setattr(program, "reward", lambda completion, answer: float(len(completion) % 3))
    for size in (B, 8, 1):
        monkeypatch.setattr(program, "MICRO_BATCH", size)
        model, reference = small_model(), [small_model().requires_grad_(False)] * (program is five)
        problems = [("__2751=", "1257"), ("327514=", "123457")] * (program.P // 2)
        program.train_step(model, *reference, torch.optim.SGD(model.parameters(), 1e-9), problems)
    assert found[0][0].norm() > 0
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_learns_from_demonstrations_with_the_stop_token_and_takes_two_steps(monkeypatch, capsys, program):
    demonstration, measured, accuracy, warm_up = program.encode(["____25=25.____"]), [], program.accuracy, program.warm_up

    def short_warm_up(model, problems, held_out):
        measured.append(program.completion_logp(model, demonstration)[0, :3])
        shares = iter([0.0] * 10 + [1.0])                 # so it stops after twenty updates
        monkeypatch.setattr(program, "accuracy", lambda *_: next(shares))
        warm_up(model, problems, held_out)
        measured.append(program.completion_logp(model, demonstration)[0, :3])
        monkeypatch.setattr(program, "accuracy", lambda model, problems: accuracy(model, problems[:8]))

    for name, value in dict(STEPS=2, warm_up=short_warm_up, reward=lambda completion, _: len(completion) / 7).items():
        monkeypatch.setattr(program, name, value)
    program.main()
    assert (measured[1] > measured[0] + 0.1).all(), measured
    lines = capsys.readouterr().out.splitlines()
    assert [line[:19] for line in lines] == ["after demonstration", "step   1  reward 0.", "step   2  reward 0."]


@pytest.mark.parametrize("file", FILES)
def test_a_program_stands_alone_and_the_next_one_adds_25_lines_at_most(file):
    modules = {name.partition(".")[0] for name in imported(file.read_text())}
    assert modules <= {"copy", "random", "sys", "torch", "transformers"}
    for after in FILES[FILES.index(file) + 1 :][:1]:
        changes = difflib.ndiff(file.read_text().splitlines(), after.read_text().splitlines())
        assert sum(line.startswith("+ ") for line in changes) <= 25
