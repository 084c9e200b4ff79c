"""The state of a run is complete: stopped, resumed or mended, it is the run that never stopped."""

import io
import pydoc
import random
import shutil
from contextlib import redirect_stdout

import numpy
import pytest
import torch
from conftest import QUICK, assert_same, comparable, ctrl_c_after, exhaustive, peaked_reward, run_folder, start_run

import train
from analysis.report import metric_series
from config import ModelConfig
from engine.devices import limit_threads
from engine.policy import load_any_policy
from reward_functions.loading import function_from_file
from runs import phases, setup
from runs.folder import read_jsonl


# Whatever a run carries from step to step: reference, running mean, value head, order of minibatches.
CARRIED = "--reference_mode ema --ema_alpha 0.5 --baseline global_mean --ppo_epochs 2 --minibatch_size 8 --dynamic_sampling 1"


@pytest.mark.slow
@pytest.mark.parametrize("stop_after,more", [
    (0, ""), (0, "--keep_best"), exhaustive(2, ""), (5, "--use_value_head"), exhaustive(20, CARRIED + " --max_steps 16"), (8, CARRIED + " --max_steps 8"),
    (2, "--precision bfloat16 --cold_start_steps 0 --reference_mode ema --ema_alpha 0.5 --kl_estimator exact"),
    exhaustive(3, "--precision bfloat16 --cold_start_steps 0 --reference_mode periodic --reference_update_freq 2"),
])
def test_ctrl_c_and_resume_equal_not_having_stopped(tmp_path, stop_after, more, capsys):
    (tmp_path / "drawn.py").write_text(                   # the evaluation before the first step draws too
        "import random, numpy, torch\nrandom.seed(1)\nnumpy.random.seed(1)\ndef drawn(completions, **columns):\n"
        "    return [random.random() + numpy.random.rand() for c in completions]\n")
    flags = "--use_grpo --use_kl_penalty --max_steps 4 --save_steps 0 --learning_rate 1e-3 --log_rollouts_every 1 "
    flags = f"{flags} --reward_functions {tmp_path}/drawn.py:drawn {more}".split()
    whole = run_folder(tmp_path / "whole", *flags)

    function_from_file.cache_clear()
    with ctrl_c_after(stop_after, "log_step" if stop_after else "log_evaluation"):
        stopped = run_folder(tmp_path / "stopped", *flags)
    assert (stopped / f"checkpoints/step-{stop_after:08d}").exists()
    assert f"python train.py --output_dir {stopped} --resume" in capsys.readouterr().out
    assert not (stopped / "final").exists() and len(comparable(stopped)) < len(comparable(whole))
    function_from_file.cache_clear()
    train.main(["--output_dir", str(stopped), "--resume"])
    assert_same(stopped, whole)


@pytest.mark.slow
def test_a_run_resumes_with_the_threads_that_it_began_with_on_which_its_last_bits_depend(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(setup, "leave_busy_cores", lambda notify: limit_threads(1, "others use 1 of 2 cores", notify))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ctrl_c_after(1):
            folder = run_folder(tmp_path / "run", "--use_grpo", "--cold_start_steps", "0", "--max_steps", "2")
        torch.set_num_threads(2)
        monkeypatch.setattr(setup, "leave_busy_cores", lambda notify: None)      # now they are idle
        capsys.readouterr()
        train.main(["--output_dir", str(folder), "--resume"])
        printed = capsys.readouterr().out
        assert torch.get_num_threads() == 1 and "threads 2 -> 1: the number that the run began with" in printed
        assert "equal up to rounding" not in printed
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_seed_seeds_the_generators_that_reward_functions_draw_from(tmp_path):
    """Also at the beginning of a run that was killed before its first checkpoint."""
    (tmp_path / "drawn.py").write_text(
        "import random, numpy, torch\nimported = random.random()\ndef drawn(completions, **columns):\n"
        "    return [imported + random.random() + numpy.random.rand() + float(torch.rand(())) for c in completions]\n")
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 1 --reward_functions {tmp_path}/drawn.py:drawn".split()
    runs = []
    for name, seed in ("a", "0"), ("b", "0"), ("c", "1"):
        for module in random, numpy.random:
            module.seed(len(runs))
        function_from_file.cache_clear()
        runs.append([line.get("mean_reward") for line in comparable(run_folder(tmp_path / name, *flags, "--seed", seed))])
    assert runs[0] == runs[1] != runs[2]


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
@pytest.mark.parametrize("call,evaluated,saved", [
    (3, "0", 2), (7, "4 --eval_steps 0", 5), (4, "4 --eval_steps 2", 2),         # in the third step, the last evaluation, the first one
    (9, "4 --eval_steps 0 --keep_best", 5),               # in the last evaluation on other draws
])
def test_what_a_reward_function_raises_costs_no_step(tmp_path, capsys, call, evaluated, saved):
    """The run that was mended and resumed is the one that never raised."""
    file = tmp_path / "late.py"
    file.write_text("calls = 0\ndef late(completions, **columns):\n    global calls\n    calls += 1\n"
                    f"    if calls == {call}: raise KeyError('late')\n    return [float(len(c) % 7) for c in completions]\n")
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 5 --eval_limit {evaluated}".split()
    flags += ["--reward_functions", f"{file}:late"]
    with pytest.raises(SystemExit) as stop:
        train.main([*QUICK, *flags, "--output_dir", str(tmp_path / "a")])
    printed = capsys.readouterr()
    assert stop.value.code == 1 and len(printed.err.strip().splitlines()) == 1
    assert "reward function late raised KeyError: 'late' (late.py, line 5)" in printed.err
    assert f"step-0000000{saved}; continue with: python train.py --output_dir {tmp_path}/a --resume" in " ".join(printed.out.split())
    file.write_text(file.read_text().replace(f"calls == {call}", "False"))
    function_from_file.cache_clear()
    train.main(["--output_dir", str(tmp_path / "a"), "--resume"])
    function_from_file.cache_clear()
    assert_same(tmp_path / "a", run_folder(tmp_path / "b", *flags))


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--cold_start_steps 1 --lora_rank 4 --use_kl_penalty --reference_mode ema"])
def test_a_complete_run_with_a_constant_learning_rate_goes_on_as_if_it_had_been_longer(tmp_path, more):
    flags = f"--use_grpo --cold_start_steps 0 --eval_limit 0 --lr_schedule constant --warmup_ratio 0 {more} --max_steps".split()
    short = run_folder(tmp_path / "short", *flags, "2")
    train.main(["--output_dir", str(short), "--resume", "--max_steps", "4"])
    assert_same(short, run_folder(tmp_path / "long", *flags, "4"))


@pytest.mark.slow
def test_a_run_of_the_built_in_model_with_an_adapter_can_be_moved(tmp_path):
    flags = "--use_grpo --cold_start_steps 0 --max_steps 3 --eval_limit 0 --lora_rank 4".split()
    with ctrl_c_after(2):
        begun = run_folder(tmp_path / "begun", *flags)
    moved = begun.rename(tmp_path / "moved")
    train.main(["--output_dir", str(moved), "--resume"])
    assert comparable(moved) == comparable(run_folder(tmp_path / "never", *flags))
    load_any_policy(ModelConfig(str(moved / "final")))


@pytest.mark.slow
@pytest.mark.parametrize("where,error,saved,save_steps", [
    # Between gradient and update, when scores, prompts and random numbers of the step were recorded and drawn.
    ("train.sum_and_clip_gradient", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, 0),
    exhaustive("train.sum_and_clip_gradient", AssertionError("a bug"), 2, 0),
    ("runs.run.Run.log_step", OSError("no such console"), 3, 0),                 # after the update
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


@pytest.mark.slow
def test_a_broken_reward_function_stops_the_run_or_is_left_out(tmp_path, capsys):
    (tmp_path / "fussy.py").write_text(
        "def always(completions, **columns):\n    raise KeyError('always')\n")
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 1 --eval_limit 0 --reward_functions {tmp_path}/fussy.py:always"
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "never", *flags.split())
    assert stop.value.code == 1 and "reward function always raised KeyError: 'always'" in capsys.readouterr().err
    folder = run_folder(tmp_path / "run", *f"{flags} --reward_errors none".split())
    (line,) = read_jsonl(folder / "metrics.jsonl")
    assert line["unscored"] == 1.0 and line["mean_reward"] is None and line["grad_norm"] == 0.0


KEEP_BEST = "--use_grpo --keep_best --cold_start_steps 1 --max_steps 5 --eval_steps 1 --save_steps 2 --learning_rate 1e-3".split()


@pytest.fixture(scope="module")
def best_of_5(tmp_path_factory):
    """A run whose best policy is that of its third step of GRPO, step 4 of all, with all checkpoints, and what it printed."""
    path = tmp_path_factory.mktemp("best")
    with redirect_stdout(io.StringIO()) as printed:
        folder = run_folder(path / "whole", *KEEP_BEST, *peaked_reward(path), "--save_steps", "1", "--keep_checkpoints", "9")
    return folder, printed.getvalue()


@pytest.mark.slow
def test_the_best_policy_is_kept_and_compared_with_the_last_on_other_draws(best_of_5):
    folder, printed = best_of_5
    best, at_4, at_6, final = (
        (folder / name / "model.safetensors").read_bytes()
        for name in ("best", "checkpoints/step-00000004", "checkpoints/step-00000006", "final"))
    assert best == at_4 != at_6 == final
    evals = [line for line in read_jsonl(folder / "metrics.jsonl") if line["phase"] == "eval"]
    again = {line["step"]: line["other_draws/eval_reward/peaked"] for line in evals if "other_draws/eval_reward/peaked" in line}
    assert [line["step"] for line in evals] == [0, 1, 2, 3, 4, 5, 6]
    assert {0, 2, 3, 4, 6} <= again.keys() and 5 not in again, "the best ones so far, and the last"
    assert all(line["eval_reward/peaked"] != again[line["step"]] for line in evals if line["step"] in again), "other draws"
    for name, step in ("best", 4), ("last", 6):
        assert f"\n  {name}: step {step}          peaked {again[step]:.3f} [" in printed
    series = metric_series(evals)["eval_reward/peaked"]
    assert [*series.values()] == [line["eval_reward/peaked"] for line in evals], "the curve has the draws of all evaluations"


@pytest.mark.slow
@pytest.mark.parametrize("killed_in,resumed_from", [(1, ""), (5, "step-00000003"), (6, "step-00000005")])
def test_a_run_that_is_killed_and_resumed_keeps_the_same_best_policy(tmp_path, best_of_5, monkeypatch, capsys, killed_in, resumed_from):
    """Killed before the first checkpoint; after best/ was written, which the resumed run repeats; after a later checkpoint."""
    whole, printed = best_of_5
    log_step = train.Run.log_step

    def killed(run, *rest):
        if run.progress.step == killed_in:
            raise KeyboardInterrupt                       # no Exception: nothing is saved
        log_step(run, *rest)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("runs.run.Run.log_step", killed)
        run_folder(tmp_path / "run", *KEEP_BEST, *peaked_reward(tmp_path))
    assert max((path.name for path in (tmp_path / "run/checkpoints").glob("*")), default="") == resumed_from
    if killed_in < 6:
        shutil.rmtree(tmp_path / "run/best")
    train.main(["--output_dir", str(tmp_path / "run"), "--resume"])
    assert_same(tmp_path / "run", whole)
    assert (tmp_path / "run/best/model.safetensors").read_bytes() == (whole / "best/model.safetensors").read_bytes()
    results = [[line for line in text.splitlines() if line.startswith(("  best: ", "  last: "))] for text in (printed, capsys.readouterr().out)]
    assert results[0] == results[1] and len(results[0]) == 2


def test_of_equal_scores_the_first_is_the_best_and_none_if_nothing_is_scored(tmp_path, monkeypatch):
    run, written = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0"), []
    monkeypatch.setattr("runs.run.write_policy", lambda *rest: written.append(run.progress.step))
    monkeypatch.setattr(run, "evaluate", lambda draws: {"eval_accuracy": float(draws)}, raising=False)
    for run.progress.step, score in enumerate([numpy.nan, 0.2, 0.5, 0.5, numpy.nan, 0.4], start=1):
        found = run.update_best(score)
        assert found == ({"other_draws/eval_accuracy": 1.0} if written[-1:] == [run.progress.step] else {})
    assert written == [2, 3] and (run.progress.best_step, run.progress.best_score) == (3, 0.5)


def test_the_score_is_what_is_shown_accuracy_or_the_weighted_sum_of_known_points(tmp_path):
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0")
    points = {"eval_reward/correctness": None, "eval_reward/reasoning_coherence": 0.5, "eval_reward/explanation_quality": 2.0}
    assert run.held_out_score(points | {"eval_accuracy": 0.25}) == 0.25 and run.held_out_score(points) == pytest.approx(0.2 * 0.5 + 0.1 * 2.0)
    assert numpy.isnan(run.held_out_score(dict.fromkeys(points))) and numpy.isnan(start_run(tmp_path).held_out_score(points))


def test_without_held_out_problems_there_is_no_best_policy(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.main([*QUICK, "--use_grpo", "--keep_best", "--eval_limit", "0", "--max_steps", "1", "--output_dir", str(tmp_path / "run")])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--keep_best: needs held-out problems: an --eval_limit above 0, or a larger file")
