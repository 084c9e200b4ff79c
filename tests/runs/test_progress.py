"""What a run does next follows from its progress and from its newest checkpoint; the learning rate of a phase."""

import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import ctrl_c_after, peaked_reward, quick_config, run_folder

import train
from config import Config
from runs import phases
from runs.checkpoint import latest_checkpoint
from runs.phases import Phase
from runs.run import Progress, Run
from runs.setup import set_up


@pytest.mark.parametrize("eval_steps,updates_per_step,resumed_at,expected", [
    (2, 1, None, [0, 2, 3, 5, 7, 8]), (0, 1, None, [0, 3, 8]), (9, 1, None, [0, 3, 8]), (2, 2, None, [0, 2, 3, 5, 7, 8]),
    (3, 4, None, [0, 3, 7, 8]),
    (2, 1, 5, [0, 2, 3, 5, 7, 8]),                        # its evaluation raised, and the run was resumed
])
def test_evaluations_are_due_before_the_first_step_every_eval_steps_of_a_phase_and_at_its_end(
    monkeypatch, eval_steps, updates_per_step, resumed_at, expected
):
    progress, evaluated, raises_at = Progress(), [], {resumed_at}
    data = SimpleNamespace(eval_set=[1])
    run = SimpleNamespace(
        progress=progress, plan=SimpleNamespace(data=data), mark_state=lambda: None, log_evaluation=lambda result: None)

    def evaluate(run):
        if progress.step in raises_at:
            raises_at.clear()
        else:
            evaluated.append(progress.step)
            progress.evaluated_at = progress.step

    monkeypatch.setattr("runs.run.evaluate_held_out", evaluate)
    for run.phase in Phase("cold_start", 3, 1.0, eval_steps), Phase("grpo", 5, 1.0, eval_steps):
        progress.phase_step = 0
        while True:
            for _ in range(3):                            # never twice at a step
                Run.evaluate_if_due(run)
            if run.phase.is_over(progress):
                break
            taken = min(updates_per_step, run.phase.steps - progress.phase_step)
            progress.step, progress.phase_step = progress.step + taken, progress.phase_step + taken
    assert evaluated == expected


@pytest.mark.parametrize("step,accuracy,evaluated_at,over", [
    (0, 0.9, 7, False), (1, 0.4, 8, False), (1, 0.5, 8, True), (1, math.nan, 8, False), (2, 0.9, 8, False), (3, math.nan, -1, True)])
def test_a_phase_is_over_at_its_last_step_or_when_its_evaluation_was_good_enough(step, accuracy, evaluated_at, over):
    """Its steps are those behind step 7; an earlier evaluation does not count."""
    progress = Progress(phase_step=step, step=7 + step, evaluated_at=evaluated_at, accuracy=accuracy)
    assert Phase("cold_start", 3, 1.0, 1, end_accuracy=0.5).is_over(progress) == over


def test_between_two_phases_nothing_of_the_optimiser_stays(tmp_path):
    run = set_up(quick_config(tmp_path / "run", cold_start_steps=1))
    run.begin_phase()
    assert run.policy.scheduler and run.batches
    run.next_phase()
    assert run.phase.name == "grpo" and run.policy.optimizer is run.policy.scheduler is run.batches is None


@pytest.mark.parametrize("schedule,last", [("constant", 1.0), ("linear", 1 / 8), ("cosine", 0.0381)])
def test_the_learning_rate_rises_falls_and_is_never_zero(schedule, last):
    factors = [phases.learning_rate_factor(step, steps=10, warmup=2, schedule=schedule) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0] and factors[-1] == pytest.approx(last, abs=1e-4)
    assert all(left >= right > 0 for left, right in itertools.pairwise(factors[1:]))


@pytest.mark.parametrize("size", [1, 2, 8, 32, 64, 128, 256])
def test_the_demonstration_is_evaluated_a_twentieth_of_a_run_apart_and_its_cold_start_as_often_as_every_5_steps_of_64(size):
    config = Config.from_profile("demo", use_grpo=True, batch_size=size)
    cold_start, grpo_phase = phases.plan_phases(config, 9000)
    assert cold_start.eval_steps == math.ceil(5 * 64 / size), "the accuracy that ends it is measured after the same examples"
    assert 14 <= grpo_phase.steps / grpo_phase.eval_steps <= 22
    cold_start, grpo_phase = phases.plan_phases(Config.from_profile("demo", use_grpo=True, cold_start_accuracy=1.0, eval_steps=7), 9000)
    assert cold_start.eval_steps == grpo_phase.eval_steps == 7
    assert {phase.eval_steps for phase in phases.plan_phases(Config.from_profile("demo", use_grpo=True, eval_steps=0), 9000)} == {0}


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"PK\3\4 no archive", b"\x80\x04cos\nsystem\n."])
def test_a_checkpoint_that_cannot_be_read_is_one_line_that_names_it_and_the_one_before(tmp_path, content):
    assert latest_checkpoint(tmp_path) is None
    good, bad = (tmp_path / f"checkpoints/step-0000000{step}" for step in (1, 2))
    for path in good, bad:
        path.mkdir(parents=True)
    torch.save({"step": 1}, good / "state.pt")
    (bad / "state.pt").write_bytes(content)
    with pytest.raises(ValueError) as error:
        latest_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{bad} cannot be read: ") and str(error.value).endswith(f"remove it to continue from {good}")
    shutil.rmtree(good)
    with pytest.raises(ValueError, match=r"cannot be read: .*start in another folder$"):
        latest_checkpoint(tmp_path)


@pytest.mark.slow
def test_the_policy_with_the_highest_held_out_score_is_kept(tmp_path):
    """Its score is highest at step 3 of GRPO, which is step 4 of all; the run is stopped before and after it."""
    flags = "--use_grpo --keep_best --cold_start_steps 1 --max_steps 5 --eval_steps 1 --learning_rate 1e-3 --save_steps 1 --keep_checkpoints 9"
    flags = [*flags.split(), *peaked_reward(tmp_path)]
    whole = run_folder(tmp_path / "whole", *flags)
    best, at_4, last = ((whole / name / "model.safetensors").read_bytes() for name in ("best", "checkpoints/step-00000004", "final"))
    assert best == at_4 != last
    for step in 2, 5:
        with ctrl_c_after(step):
            stopped = run_folder(tmp_path / f"stopped{step}", *flags)
        train.main(["--output_dir", str(stopped), "--resume"])
        assert (stopped / "best/model.safetensors").read_bytes() == best
