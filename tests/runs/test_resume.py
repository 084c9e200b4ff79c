"""A run that is stopped and resumed is the run that never stopped, bit for bit: whatever stops it, and whatever it carries along."""

import pydoc
import random
import signal
import time

import numpy
import pytest
import torch
from conftest import QUICK, assert_same, ctrl_c_after, exhaustive, num_steps, run_folder, start_run
from forked import Ranks

import train
from engine.errors import RunError
from runs import phases
from runs.folder import read_jsonl
from runs.results import held_out_score
from runs.run import Run

# Scores that a random number decides, as a reward function may.
REWARDS = """
import random
import numpy, torch

def length(completions, **columns):
    return [float(len(c)) for c in completions]

def drawn(completions, **columns):
    return [points + random.random() + numpy.random.rand() + float(torch.rand(())) for points in length(completions)]
"""
COMMON = "--eval_limit 4 --eval_steps 2 --log_rollouts_every 1 --learning_rate 1e-3 --generation_max_length 12 --max_steps"
KINDS = {                       # whatever a run carries from step to step
    "default": "4 --use_grpo --cold_start_steps 1",
    "everything": "6 --use_grpo --cold_start_steps 2 --use_kl_penalty --reference_mode ema --ema_alpha 0.5 --baseline global_mean "
                  "--ppo_epochs 2 --minibatch_size 8 --dynamic_sampling 1",
    "value head": "3 --use_grpo --cold_start_steps 0 --precision bfloat16 --use_kl_penalty --kl_estimator exact "
                  "--reference_mode periodic --reference_update_freq 2 --use_value_head",
    "LoRA": "3 --use_grpo --cold_start_steps 1 --lora_rank 4 --use_kl_penalty --reference_mode ema",
    "supervised": "4 --use_grpo false",
    "two processes": "3 --use_grpo --cold_start_steps 1 --use_kl_penalty",
}


def flags_of(kind, folder):
    (folder / "rewards.py").write_text(REWARDS)
    function = "length" if kind == "default" else "drawn"
    rewards = [] if kind == "supervised" else ["--reward_functions", f"{folder}/rewards.py:{function}"]
    return [*COMMON.split(), *KINDS[kind].split(), *rewards]


def resume(folder, *flags):
    train.main(["--output_dir", str(folder), "--resume", *flags])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "everything", "value head", exhaustive("LoRA"), exhaustive("supervised")])
def test_ctrl_c_in_every_step(tmp_path, kind, monkeypatch):
    flags, pressed = flags_of(kind, tmp_path), {}
    whole = run_folder(tmp_path / "whole", *flags)
    for owner, name in (Run, "log_step"), (Run, "log_evaluation"):
        real = getattr(owner, name)

        def press_ctrl_c(run, *rest, real=real, name=name):
            result = real(run, *rest)
            at = name, run.progress.step
            if at not in pressed and run.folder not in pressed.values():         # once in each part of the run
                pressed[at] = run.folder
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(owner, name, press_ctrl_c)
    stopped = run_folder(tmp_path / "stopped", *flags)
    while not (stopped / "final").exists():
        before = len(pressed)
        resume(stopped)
        assert (stopped / "final").exists() or len(pressed) > before
    steps = {line["step"] for line in read_jsonl(whole / "metrics.jsonl") if line["phase"] != "eval"}
    assert {step for _, step in pressed} >= steps
    assert_same(stopped, whole)


def kill(run, folder, draws):
    """Kill all processes of a run at a random moment after its next step, or when a checkpoint begins to be written."""
    if draws.random() < 0.5:
        time.sleep(draws.random())
    else:
        while run.returncode is None and not (folder / "checkpoints/writing").exists():
            time.sleep(0.001)
    run.kill()


def terminate(run, folder, draws):
    """As torchrun and batch systems do: SIGTERM to all processes."""
    time.sleep(draws.random())
    run.send_signal(signal.SIGTERM)
    assert run.wait(100).returncode == 0 or (folder / "final").exists(), run.stderr[-3000:]             # it was about to exit


@pytest.mark.slow
@pytest.mark.parametrize("stop,kind", [
    (kill, "everything"), (kill, "two processes"), (terminate, "default"), exhaustive(kill, "supervised"),
    exhaustive(kill, "value head"), exhaustive(kill, "LoRA"), exhaustive(terminate, "two processes"),
])
def test_signals_at_random_moments(tmp_path, stop, kind):
    flags, draws = [*flags_of(kind, tmp_path), "--save_steps", "1"], random.Random(kind)
    processes = 2 if kind == "two processes" else 1

    def start(name, *more):
        return Ranks(processes, "train.py", "--output_dir", str(tmp_path / name), *more)

    whole = start("whole", *QUICK, *flags).wait(200)
    assert whole.returncode == 0, whole.stderr[-3000:]
    folder = tmp_path / "stopped"
    run = start("stopped", *QUICK, *flags)
    for _ in range(3):
        before = num_steps(folder)
        while run.returncode is None and num_steps(folder) == before:
            time.sleep(0.005)
        stop(run, folder, draws)
        run = start("stopped", *(["--resume"] if (folder / "config.json").exists() else [*QUICK, *flags]))
    assert run.wait(200).returncode == 0, run.stderr[-3000:]
    assert_same(folder, tmp_path / "whole")


# ---- other settings, errors --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*get_last_lr")
def test_a_phase_that_goes_on_takes_a_new_learning_rate(tmp_path, capsys):
    flags = "--use_grpo --use_kl_penalty true --cold_start_steps 1 --max_steps 5 --eval_limit 0 --learning_rate 1e-3"
    with ctrl_c_after(2):
        folder = run_folder(tmp_path / "out", *flags.split())
    resume(folder, "--learning_rate", "1e-5", "--max_grad_norm", "0.25")
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
    resume(short, "--max_steps", "4")
    assert_same(short, run_folder(tmp_path / "long", *flags, "4"))
    assert not list(short.glob("checkpoints/*/reference")), "an adapter is in the state"


@pytest.mark.slow
@pytest.mark.parametrize("where,error,saved,save_steps", [
    # Between gradient and update, when scores, prompts and random numbers of the step were recorded and drawn.
    ("engine.device_policy.sum_and_clip_gradient", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, 0),
    exhaustive("engine.device_policy.sum_and_clip_gradient", AssertionError("a bug"), 2, 0),
    ("train.sample_groups", RunError("reward function own raised KeyError"), 2, 0),            # scores the completions
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
            if where in ("train.sample_groups", "runs.run.write_step"):
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
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", never)
    assert len(read_jsonl(never / "rollouts.jsonl")) == 4 * 32


def test_the_score_is_what_is_shown_accuracy_or_the_weighted_sum_of_known_points(base, tmp_path):
    points = {"eval_reward/correctness": None, "eval_reward/reasoning_coherence": 0.5, "eval_reward/explanation_quality": 2.0}
    assert held_out_score(base.scoring, points | {"eval_accuracy": 0.25}) == 0.25
    assert held_out_score(base.scoring, points) == pytest.approx(0.2 * 0.5 + 0.1 * 2.0)
    assert numpy.isnan(held_out_score(start_run(tmp_path).scoring, points)), "a supervised run has no rewards"
    assert numpy.isnan(held_out_score(base.scoring, dict.fromkeys(points)))
    assert numpy.isnan(held_out_score(base.scoring, {})), "nothing could be scored, as with a teacher and prompts without answers"
