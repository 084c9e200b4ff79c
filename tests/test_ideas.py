"""The programs in examples/ideas/ train with the functions that they define, and each idea does what it says."""

import math
import runpy
import statistics
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, made_up_rollout, start_run

import train
from config import Config
from experience import Groups
from grpo import LOSSES, policy_loss
from logprobs import LogProbs
from runs.checkpoint import latest_checkpoint, read_state
from runs.folder import read_jsonl

ROWS = torch.tensor([9, 2, 14, 5, 0, 7])                  # of an update: some of the 16 completions, in another order
QUICK = "--cold_start_steps 0 --max_steps 2 --batch_size 4 --generation_max_length 8 --eval_limit 0 --report_to none".split()
IDEAS = {                       # the functions in place of those of train.py, and a metric that is not 0
    "ipo": ([], "grad_norm"), "length_estimator": (["advantages"], "grad_norm"),
    "entropy_bonus": (["columns", "loss"], "entropy_bonus"), "nll_of_right": (["columns", "loss"], "nll_of_right"),
    "self_distillation": (["columns", "loss"], "distillation"),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Remove what the programs add: an entry of LOSSES, and a folder in sys.path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    LOSSES.pop("ipo", None)


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """A reward that is 1 for half of what an untrained model writes."""
    path = tmp_path_factory.mktemp("rewards") / "parity.py"
    path.write_text("def parity(completions, **columns):\n    return [len(text) % 2 for text in completions]\n")
    return f"{path}:parity"


@pytest.fixture(scope="module")
def stepped(tmp_path_factory, parity):
    """A run after a step of GRPO, and the experience of that step, with 1 to 7 tokens of each completion to train on."""
    run = start_run(tmp_path_factory.mktemp("run"), "--use_grpo", "--cold_start_steps", "0", "--reward_functions", parity)
    _, experience = train.grpo_training_step(run, next(run.batches))
    table = experience.table
    kept = torch.arange(table.mask.shape[1]) < torch.arange(len(table.mask))[:, None] % 7 + 1
    return run, replace(experience, table=replace(table, mask=table.mask & kept))


def load(name):
    return SimpleNamespace(**runpy.run_path(str(ROOT / f"examples/ideas/{name}.py")))


def load_with_batch(name, run, experience):
    """An idea, and the batch of an update with its columns."""
    idea, batch = load(name), experience.batch(ROWS)
    return idea, replace(batch, extra=idea.columns(run, experience, batch))


def values_of_right(batch, x):
    """The values (b, T) at the tokens of each right completion, as lists."""
    right = [len(batch.rollout.completions[row]) % 2 == 1 for row in batch.rows.tolist()]
    assert 0 < sum(right) < len(right)
    return [values[mask].tolist() for values, mask, is_right in zip(x, batch.mask, right) if is_right]


@pytest.mark.parametrize("name", IDEAS)
def test_the_program_takes_two_steps_with_its_functions(name, parity, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, *QUICK, "--reward_functions", parity, "--output_dir", str(tmp_path / "run")])
    runpy.run_path(str(ROOT / f"examples/ideas/{name}.py"), run_name="__main__")
    functions, metric = IDEAS[name]
    state, steps = read_state(latest_checkpoint(tmp_path / "run")), read_jsonl(tmp_path / "run/metrics.jsonl")
    assert state["own_functions"] == functions and (state["settings"]["grpo"]["loss_type"] == "ipo") == (name == "ipo")
    assert len(steps) == 2 and all(line[metric] for line in steps)


def test_ipo_drops_tokens_that_have_moved_in_either_direction():
    load("ipo")
    old, new, advantages = [0.5, 0.5, 0.5, 0.1, 0.9], [0.6, 0.75, 0.25, 0.25, 0.6], [1.0, -2.0, 3.0, -1.0, 1.0]
    by_hand = [-n / o * a if abs(n - o) <= 0.2 else 0.0 for o, n, a in zip(old, new, advantages)]
    assert [loss != 0 for loss in by_hand] == [True, False, False, True, False]
    logp, mask = torch.tensor([[math.log(p) for p in new]], requires_grad=True), torch.ones(1, 5, dtype=torch.bool)
    config = Config.of(use_grpo=True, loss_type="ipo", loss_options={"eps": 0.2}).grpo
    loss, stats = policy_loss(
        logp, torch.tensor([old]).log(), torch.tensor([advantages]), mask, torch.ones(1, 5), **config.loss_arguments)
    loss.backward()
    assert loss.item() == pytest.approx(sum(by_hand)) and logp.grad[0].tolist() == pytest.approx(by_hand)
    assert stats["clip_fraction"].tolist() == [[0, 1, 1, 0, 1]]
    for flags, words in (dict(loss_options={"eps": 2}), "eps from 0 to 1"), (dict(importance_cap=2.0), "already corrects"):
        with pytest.raises(ValueError, match=words):
            Config.of(use_grpo=True, loss_type="ipo", **flags)


def test_terms_of_right_completions_are_a_mean_of_the_mean_entropy_of_each_and_a_mean_over_their_tokens(stepped):
    run = stepped[0]
    for name, expected in (
        ("entropy_bonus", lambda now, batch: -0.01 * statistics.mean(map(statistics.mean, values_of_right(batch, now.entropy)))),
        ("nll_of_right", lambda now, batch: -0.1 * statistics.mean(x for row in values_of_right(batch, now.logp) for x in row)),
    ):
        idea, batch = load_with_batch(name, *stepped)
        expected = expected(run.policy.log_probs(batch.rollout, ROWS), batch)
        for run.policy.max_tokens in 2048, 70, 1:         # micro-batches of any size
            found = run.policy.forward_backward(batch, partial(idea.loss, run.config.grpo))[name]
            assert found == pytest.approx(expected, rel=1e-4), (name, run.policy.max_tokens)


def test_the_length_reward_is_that_of_the_paper_within_the_group():
    lengths = 2, 4, 6, 3, 5, 5, 5, 5, 9, 1, 5, 3
    rewards = [[1.3, 1.0, 0.2, 0.0], [1.3, 0.0, 1.0, 0.2], [1.0, 1.0, 1.0, 1.0]]
    correct = torch.tensor(rewards).floor()
    groups = Groups([{}] * 3, made_up_rollout([3, 4, 2], lengths), correct, {"parity": correct}, torch.tensor(rewards))
    shaped = [[1.3 + 0.25, 1.0, 0.2 - 0.25, 0.0], rewards[1], [1.0 - 0.25, 1.0 + 0.25, 1.0, 1.0 + 0.125]]
    expected = [[(r - statistics.mean(row)) / statistics.stdev(row) for r in row] for row in shaped]
    torch.testing.assert_close(load("length_estimator").advantages(None, groups), torch.tensor(expected))


def test_the_teacher_is_the_policy_with_the_solution_in_its_prompt(stepped):
    (run, experience), (idea, batch) = stepped, load_with_batch("self_distillation", *stepped)
    teacher, rollout = batch.extra["teacher_logp"], batch.rollout
    for row, found in zip(ROWS.tolist(), teacher):
        example, ids = experience.examples[row // 4], rollout.completion_ids[row][rollout.completion_mask[row]]
        prompt = run.policy.tokenizer(f"{example['completion']}\n{example['prompt']}").input_ids
        with torch.no_grad():
            logits = run.policy.model(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(dim=-1).gather(-1, ids[:, None])[:, 0]
        torch.testing.assert_close(found[: len(ids)], expected, rtol=1e-4, atol=1e-4)
    logp = run.policy.log_probs(rollout, ROWS).logp.requires_grad_()
    assert not teacher.requires_grad and (teacher - logp)[batch.mask].abs().mean() > 0.01
    idea.loss(run.config.grpo, LogProbs(logp, 0 * logp), batch)[0]["distillation"].backward()
    torch.testing.assert_close(logp.grad, 0.1 * batch.weights * (logp - teacher).detach())
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}
    told = [system, user | {"content": "2\n1+1=?"}]
    assert idea.with_solution({"prompt": [system, user], "answer": "2"})["prompt"] == told
