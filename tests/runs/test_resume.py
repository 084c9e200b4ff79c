"""A run that is stopped and resumed is the run that never stopped, bit for bit: whatever stops it, and whatever it carries along."""

import random
import signal
import time

import pytest
from conftest import QUICK, assert_same, exhaustive, num_steps, run_folder
from forked import Ranks

import runs.run
import train
from runs.folder import read_jsonl
from runs.run import Run

# Scores that a random number decides, as a reward function may; with a file "fails" beside it each call raises once.
REWARDS = """
import random
from pathlib import Path
import numpy, torch
failed = set()

def length(completions, **columns):
    if Path(__file__).with_name("fails").exists() and tuple(completions) not in failed:
        failed.add(tuple(completions))
        raise KeyError("failed")
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


def resume(folder):
    train.main(["--output_dir", str(folder), "--resume"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "everything", "value head", exhaustive("LoRA"), exhaustive("supervised")])
def test_ctrl_c_in_every_step(tmp_path, kind, monkeypatch):
    flags, pressed = flags_of(kind, tmp_path), {}
    whole = run_folder(tmp_path / "whole", *flags)
    for owner, name in (Run, "log_step"), (runs.run, "evaluate_and_log"):
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


@pytest.mark.slow
def test_a_reward_function_that_raises_in_every_call(tmp_path, capsys):
    flags = flags_of("default", tmp_path)
    whole = run_folder(tmp_path / "whole", *flags)
    (tmp_path / "fails").touch()
    folder, errors = tmp_path / "raised", []
    while not (folder / "final").exists():
        try:
            resume(folder) if (folder / "config.json").exists() else run_folder(folder, *flags)
        except SystemExit as stop:
            errors.append(capsys.readouterr().err)
            assert stop.code in (1, 2) and "length raised KeyError: 'failed' (rewards.py, line 10)" in errors[-1], errors
            assert len(errors[-1].strip().splitlines()) == 1
    assert len(errors) > 5
    assert_same(folder, whole)


def kill(run, folder, draws):
    """Kill all processes of a run at a random moment after its next step, or when a checkpoint begins to be written."""
    if draws.random() < 0.5:
        time.sleep(draws.random())
    else:
        while run.poll() is None and not (folder / "checkpoints/writing").exists():
            time.sleep(0.001)
    run.kill()


def terminate(run, folder, draws):
    """As torchrun and batch systems do: SIGTERM to all processes."""
    time.sleep(draws.random())
    for program in run.programs:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)
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
        while run.poll() is None and num_steps(folder) == before:
            time.sleep(0.005)
        stop(run, folder, draws)
        run = start("stopped", *(["--resume"] if (folder / "config.json").exists() else [*QUICK, *flags]))
    assert run.wait(200).returncode == 0, run.stderr[-3000:]
    assert_same(folder, tmp_path / "whole")
