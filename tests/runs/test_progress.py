"""What a run does next, and what of its files it keeps, follow from its progress and from its newest checkpoint."""

import math
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same, ctrl_c_after, peaked_reward, run_folder
from forked import Ranks as Processes

import train
from runs.checkpoint import latest_checkpoint
from runs.folder import read_jsonl
from runs.phases import Phase
from runs.run import Progress, Run


@pytest.mark.parametrize("mode", ["--use_grpo --cold_start_steps 2", "--use_grpo false --batch_size 4"])
def test_a_run_without_evaluations_ends(tmp_path, mode):
    """In a process of its own: a loop that takes no step would not end."""
    flags = f"{mode} --eval_limit 0 --eval_steps 2 --max_steps 4 --report_to none --generation_max_length 8 --output_dir".split()
    done = Processes(1, "train.py", *flags, str(tmp_path / "run")).wait(120)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert done.programs[0].returncode == 0 and lines[-1]["step"] == len(lines) == (6 if "cold" in mode else 4)
    assert not any(line["phase"] == "eval" for line in lines)


@pytest.mark.parametrize("eval_steps,updates_per_step,resumed_at,expected", [
    (2, 1, None, [0, 2, 3, 5, 7, 8]), (0, 1, None, [0, 3, 8]), (9, 1, None, [0, 3, 8]), (2, 2, None, [0, 2, 3, 5, 7, 8]),
    (3, 4, None, [0, 3, 7, 8]),
    (2, 1, 5, [0, 2, 3, 5, 7, 8]),                        # its evaluation raised, and the run was resumed
])
def test_evaluations_are_due_before_the_first_step_every_eval_steps_of_a_phase_and_at_its_end(
    monkeypatch, eval_steps, updates_per_step, resumed_at, expected
):
    """Phases of 3 and 5 steps, counted by hand."""
    progress, evaluated, raises_at = Progress(), [], {resumed_at}
    run = SimpleNamespace(progress=progress, eval_set=[1], saved_on_error=nullcontext)

    def evaluate(run):
        if progress.step in raises_at:
            raises_at.clear()
        else:
            evaluated.append(progress.step)
            progress.evaluated_at = progress.step

    monkeypatch.setattr("runs.run.evaluate_and_log", evaluate)
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


@pytest.mark.slow
def test_a_resumed_run_keeps_the_bytes_of_its_files_that_the_checkpoint_knew(tmp_path):
    """What came later is cut off, whole lines of the same step and half a line of a kill."""
    flags = "--use_grpo --cold_start_steps 0 --max_steps 4 --save_steps 2 --keep_checkpoints 9".split()
    whole = run_folder(tmp_path / "whole", *flags)
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints/step-00000004")
    shutil.rmtree(folder / "final")
    sizes = torch.load(latest_checkpoint(folder) / "state.pt", weights_only=True)["file_sizes"]
    lines = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(lines[: sizes["metrics.jsonl"]] + b'{"step": 2, "phase": "eval"}\n{"step": 3, "ph')
    train.main(["--output_dir", str(folder), "--resume"])
    assert_same(folder, whole)


def fake_checkpoint(folder, step, content=None):
    path = folder / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    torch.save({"step": step}, path / "state.pt")
    if content is not None:
        (path / "state.pt").write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"PK\3\4 no archive", b"\x80\x04cos\nsystem\n."])
def test_a_checkpoint_that_cannot_be_read_is_one_line_that_names_it_and_the_one_before(tmp_path, content):
    assert latest_checkpoint(tmp_path) is None
    good, bad = fake_checkpoint(tmp_path, 1), fake_checkpoint(tmp_path, 2, content)
    with pytest.raises(ValueError) as error:
        latest_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{bad} cannot be read: ") and str(error.value).endswith(f"remove it, to continue from {good}")
    shutil.rmtree(good)
    with pytest.raises(ValueError, match=r"cannot be read: .*start in another folder$"):
        latest_checkpoint(tmp_path)
    shutil.rmtree(bad)
    assert latest_checkpoint(tmp_path) is None


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
