"""The state of a run is complete: stopped or resumed, it is the run that never stopped."""

import pydoc
import random

import numpy
import pytest
import torch
from conftest import assert_same, ctrl_c_after, exhaustive, run_folder, start_run

import train
from runs import phases
from runs.folder import read_jsonl
from runs.results import held_out_score


@pytest.mark.slow
def test_a_phase_that_goes_on_takes_a_new_learning_rate_and_refuses_other_phases(tmp_path, capsys):
    flags = "--use_grpo --use_kl_penalty true --cold_start_steps 1 --max_steps 5 --eval_limit 0 --learning_rate 1e-3"
    with ctrl_c_after(2):
        folder = run_folder(tmp_path / "out", *flags.split())
    again = ["--output_dir", str(folder), "--resume"]
    for changed, name in ("--use_grpo false", "use_grpo"), ("--cold_start_steps 0", "cold_start_steps"), ("--profile balanced", "profile"), (
            "--lora_alpha 8", "lora_alpha"), ("--kl_penalty_coef 0", "use_kl_penalty"), ("--use_value_head true", "use_value_head"):
        with pytest.raises(SystemExit):
            train.main([*again, *changed.split()])
        assert f"--{name}=" in capsys.readouterr().err.splitlines()[-1]
    train.main([*again, "--learning_rate", "1e-5", "--max_grad_norm", "0.25"])
    assert "changed: learning_rate 0.001 -> 1e-05, max_grad_norm 1.0 -> 0.25" in " ".join(capsys.readouterr().out.split())
    rates = [m["learning_rate"] for m in read_jsonl(folder / "metrics.jsonl") if m["phase"] == "grpo"]
    peaks = [1e-3, *[1e-5] * 4]
    factors = [phases.learning_rate_factor(step, steps=5, warmup=1, schedule="cosine") for step in range(1, 6)]
    assert rates == pytest.approx([peak * factor for peak, factor in zip(peaks, factors)], rel=1e-6)
    newest = max((folder / "checkpoints").glob("step-00000006*"))
    assert torch.load(newest / "state.pt", weights_only=True)["settings"]["training"]["max_grad_norm"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--cold_start_steps 1 --lora_rank 4 --use_kl_penalty --reference_mode ema"])
def test_a_complete_run_with_a_constant_learning_rate_goes_on_as_if_it_had_been_longer(tmp_path, more):
    flags = f"--use_grpo --cold_start_steps 0 --eval_limit 0 --lr_schedule constant --warmup_ratio 0 {more} --max_steps".split()
    short = run_folder(tmp_path / "short", *flags, "2")
    train.main(["--output_dir", str(short), "--resume", "--max_steps", "4"])
    assert_same(short, run_folder(tmp_path / "long", *flags, "4"))
    assert not list(short.glob("checkpoints/*/reference")), "an adapter is in the state"


@pytest.mark.slow
@pytest.mark.parametrize("where,error,saved,save_steps", [
    # Between gradient and update, when scores, prompts and random numbers of the step were recorded and drawn.
    ("engine.device_policy.sum_and_clip_gradient", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, 0),
    exhaustive("engine.device_policy.sum_and_clip_gradient", AssertionError("a bug"), 2, 0),
    ("runs.run.write_step", OSError("no such console"), 3, 0),                 # after the update
    ("torch.optim.AdamW.step", torch.OutOfMemoryError("CUDA out of memory."), 2, 2),               # in it: the last checkpoint
])
def test_any_error_in_a_step_saves_first_and_no_step_is_lost_or_counted_twice(
    tmp_path, monkeypatch, capsys, where, error, saved, save_steps
):
    file = tmp_path / "drawn.py"
    file.write_text("import random\ndef drawn(completions, **columns):\n    return [random.random() for c in completions]\n")
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 4 --eval_limit 0 --baseline global_mean --batch_size 8 " \
        f"--generation_max_length 8 --log_rollouts_every 1 --save_steps {save_steps} --reward_functions {file}:drawn".split()
    random.seed(0)
    never = run_folder(tmp_path / "never", *flags)
    real, calls = pydoc.locate(where), []

    def fails_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            if saved == 3:
                real(*args)
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(where, fails_once)
    random.seed(0)
    with pytest.raises((SystemExit, AssertionError)):
        run_folder(tmp_path / "run", *flags)
    printed = capsys.readouterr()
    assert ("saved to" in printed.out) == (save_steps == 0)
    assert isinstance(error, AssertionError) or (len(printed.err.splitlines()) == 1 and str(error)[:12] in printed.err)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-0000000{saved}"]
    random.seed(1)
    train.main(["--output_dir", str(tmp_path / "run"), "--resume"])
    assert_same(tmp_path / "run", never)
    assert len(read_jsonl(never / "rollouts.jsonl")) == 4 * 32


def test_the_score_is_what_is_shown_accuracy_or_the_weighted_sum_of_known_points(tmp_path):
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0")
    points = {"eval_reward/correctness": None, "eval_reward/reasoning_coherence": 0.5, "eval_reward/explanation_quality": 2.0}
    assert held_out_score(run, points | {"eval_accuracy": 0.25}) == 0.25 and held_out_score(run, points) == pytest.approx(0.2 * 0.5 + 0.1 * 2.0)
    assert numpy.isnan(held_out_score(run, dict.fromkeys(points))) and numpy.isnan(held_out_score(start_run(tmp_path), points))
    assert numpy.isnan(held_out_score(run, {})), "nothing could be scored, as with a teacher and prompts without answers"
