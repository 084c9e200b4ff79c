"""Runs from end to end on the built-in model: the steps' gradients, and that rewards rise."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import train
from conftest import assert_same, ctrl_c_after, length_reward, num_steps, quick_config, run_folder, start_run, watch_calls
from runs.folder import read_jsonl
from runs.setup import set_up


@pytest.mark.slow
def test_several_updates_per_rollout_count_as_so_many_steps_and_end_on_time(tmp_path, monkeypatch):
    calls = watch_calls(monkeypatch, train, "minibatches")
    flags = "--use_grpo --cold_start_steps 0 --ppo_epochs 2 --minibatch_size 8 --max_steps 10 --learning_rate 1e-3"
    flags += f" --reward_functions {length_reward(tmp_path)}"
    folder = run_folder(tmp_path / "out", *flags.split(), "--eval_steps", "3", "--log_rollouts_every", "5")
    lines = read_jsonl(folder / "metrics.jsonl")
    steps = [m for m in lines if m["phase"] == "grpo"]
    assert [(m["step"], m["updates"]) for m in steps] == [(4, 4), (8, 4), (10, 2)]
    assert [m["step"] for m in lines if m["phase"] == "eval"] == [0, 4, 8, 10]
    assert len({seed for *_, seed in calls}) == len(calls) == 3, "every step orders its minibatches anew"
    assert all(m["approx_kl"] > 0 and m["ratio_deviation"] > 0 for m in steps) and steps[0]["clip_fraction"] > 0
    assert {r["step"] for r in read_jsonl(folder / "rollouts.jsonl")} == {4, 8}
    assert steps[-1]["learning_rate"] == pytest.approx(0, abs=1e-9), "the schedule counts the same steps"


def test_the_hard_assertions_hold_under_python_O(tmp_path, monkeypatch):
    """Groups of another shape, and advantages that do not sum to 0, end the step: train.py is compiled as by python -O."""
    source, optimized = Path(train.__file__).read_text() + "\nassert False", ModuleType("optimized")
    exec(compile(source, "train.py", "exec", optimize=1), vars(optimized))
    run, shape = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0"), train.shape_rewards
    for name, wrong, message in (
        ("compute_group_advantages", lambda rewards, **options: torch.ones_like(rewards), "a group must sum to 0"),
        ("shape_rewards", lambda *args: shape(*args)[:, :3], "groups.rewards.shape"),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=message):
            patch.setattr(optimized, name, wrong)
            optimized.grpo_training_step(run, next(run.batches))


def test_a_supervised_step_has_the_gradient_of_the_models_own_cross_entropy(tmp_path, monkeypatch):
    run = start_run(tmp_path, "--max_tokens_per_forward", "60")                  # several micro-batches
    examples, model, tokenizer = next(run.batches), run.policy.model, run.policy.tokenizer
    examples[1]["completion"] = ""                        # its stop token alone
    monkeypatch.setattr(run.policy, "optimizer_step", lambda max_norm: {"grad_norm": 0.0, "skipped": 0})
    train.supervised_training_step(run, examples)
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    batch = train.demonstrations_as_rollout(model, tokenizer, examples)
    num_tokens = int(batch.completion_mask.sum())
    assert batch.completions == [example["completion"] for example in examples]
    assert batch.finished.all() and not batch.sampling_logp.any()
    for i, example in enumerate(examples):                # one row at a time, transformers' own loss
        prompt = tokenizer(example["prompt"]).input_ids
        answer = [*tokenizer(example["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        assert batch.completion_ids[i][batch.completion_mask[i]].tolist() == answer
        ids, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
        (model(ids, labels=labels).loss * len(answer) / num_tokens).backward()
    theirs = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_the_default_engine_learns_a_one_token_task_in_eight_steps(tmp_path):
    """Digits, 10 of 263 bytes. With half of the learning rate rewards are 0.83 then, in half of the steps 0.76."""
    config = quick_config(
        tmp_path / "run", max_steps=8, batch_size=8, num_completions_per_prompt=16, generation_max_length=1, num_epochs=100,
        learning_rate=5e-4, eval_limit=0, save_steps=0)
    digits = lambda completions, **columns: [float(text.isdigit()) for text in completions]  # noqa: E731
    train.train(config, reward_functions=[digits], dataset=[{"prompt": f"say {i}"} for i in range(8)])
    rewards = [line["mean_reward"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert rewards[0] < 0.25 and sum(rewards[4:]) / 4 > 0.88                     # 0.94


def test_a_loop_that_is_called_again_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """As in a notebook: Ctrl-C, and the cell once more."""
    flags = dict(max_steps=3, eval_limit=0, reward_functions=[length_reward(tmp_path)])
    run = set_up(quick_config(tmp_path / "run", **flags))
    with ctrl_c_after(1):
        train.training_loop(run)
    assert num_steps(tmp_path / "run") == 1 and not (tmp_path / "run/final").exists()
    train.training_loop(run)
    train.train(quick_config(tmp_path / "whole", **flags))
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("mode,stored", [("static", torch.bfloat16), ("periodic", torch.bfloat16), ("ema", torch.float32)])
def test_a_moving_average_keeps_the_bits_that_a_copy_does_not_need(tmp_path, mode, stored):
    flags = "--use_grpo --use_kl_penalty true --cold_start_steps 0 --precision bfloat16 --reference_mode"
    run = start_run(tmp_path, *flags.split(), mode)
    assert run.reference.model.model.layers[0].mlp.up_proj.weight.dtype == stored
    assert run.reference.model.model.embed_tokens.weight.dtype == run.policy.model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_tied_groups_alone_have_no_gradient_to_scale_in_float16(tmp_path):
    run = start_run(
        tmp_path, *"--use_grpo --cold_start_steps 0 --precision float16 --generation_max_length 40 --reward_functions".split(),
        length_reward(tmp_path))
    for points, learns in (0.5, False), (None, True), (0.5, False):
        run.plan.reward_functions[:] = [lambda completions, points=points, **columns: [points or len(c) for c in completions]]
        before = [p.clone() for p in run.policy.model.parameters()]
        metrics, _ = train.grpo_training_step(run, next(run.batches))
        assert (metrics["grad_norm"] > 0) is learns and run.progress.skipped == 0
        assert all(map(torch.equal, before, run.policy.model.parameters())) is not learns


@pytest.mark.slow
def test_gradients_beyond_float16_lower_the_scale_and_are_not_held_against_the_run(tmp_path):
    run = start_run(tmp_path, "--precision", "float16")
    run.policy.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-8)
    before = {name: p.clone() for name, p in run.policy.model.named_parameters()}
    metrics, _ = train.supervised_training_step(run, next(run.batches))
    assert not math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"]) and metrics["loss_scale"] == 2.0**32
    assert (run.progress.skipped, run.progress.skipped_in_a_row) == (1, 0) and run.policy.scaler.get_scale() == 2.0**32
    assert all(torch.equal(p, before[name]) for name, p in run.policy.model.named_parameters())
    while run.progress.skipped == run.progress.phase_step - 1:
        train.supervised_training_step(run, next(run.batches))
    assert run.policy.scaler.get_scale() >= 1 and not all(torch.equal(p, before[name]) for name, p in run.policy.model.named_parameters())
    run.policy.scaler.update(512.0)
    run.policy.optimizer = None                           # as between two phases
    checkpoint = run.save_checkpoint()
    for flags in ["--precision", "float16"], ["--engine", "plain"], ["--engine", "shared"]:
        resumed = start_run(tmp_path, *flags)
        resumed.restore(checkpoint, None)               # without a reference
        assert "float16" not in flags or resumed.policy.scaler.get_scale() == 512.0
