"""Replay: a saved step has its numbers again, and a changed variant has those that its formula gives."""

import json

import pytest
from conftest import QUICK

import train
from analysis.replay import main, saved_name
from rewards import name_of
from reward_functions.loading import load_reward_function
from runs.folder import read_jsonl

@pytest.mark.parametrize("code,saved", [
    ("def points(completions, **columns): return [0.0]\n", "points"),
    ("def points(completions, **columns):\n    return [0.0] * len(completions)\npoints.__name__ = 'politeness'\n", "politeness"),
    ("class Length:\n    def __call__(self, completions, **columns): return [0.0]\npoints = Length()\n", "Length"),
    ("def f(completions, **columns): return [0.0]\npoints = f\n", "f"),
])
def test_a_function_is_found_by_the_name_it_was_saved_under(tmp_path, code, saved):
    (tmp_path / "mine.py").write_text(code)
    name = f"{tmp_path}/mine.py:points"
    assert saved_name(name, {"other": 0, name_of(load_reward_function(name)): 0}) == saved
    with pytest.raises(ValueError, match=r"mine.py:points: not among those saved, other$"):
        saved_name(name, {"other": 0})


def test_objects_of_python_are_found_by_their_names():
    assert saved_name("python:politeness", {"politeness": 0}) == "politeness"


SAME = ["policy_loss", "total_loss", "value_loss", "entropy", "kl", "grad_norm", "clip_fraction", "mean_reward", "approx_kl"]


def replay(capsys, *flags):
    """Return the lines that the command prints."""
    capsys.readouterr()
    main([*map(str, flags)])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    reward = folder.parent / "length.py"
    reward.write_text("def length(completions, **columns):\n    return [len(c) / 9 for c in completions]\n")
    flags = (
        f"--reward_functions match_format_approximately {reward}:length --reward_weights 1 1 "
        "--use_grpo --cold_start_steps 3 --max_steps 4 --save_steps 1 --keep_checkpoints 9 --log_rollouts_every 1 "
        "--eval_limit 0 --use_kl_penalty --learning_rate 1e-3 --overlong penalise --use_value_head"
    )
    train.main([*QUICK, "--output_dir", str(folder), *flags.split()])
    return folder


@pytest.mark.slow
def test_a_step_replayed_on_the_checkpoint_before_it_has_its_numbers(finished, capsys):
    logged = {line["step"]: line for line in read_jsonl(finished / "metrics.jsonl") if line["phase"] == "grpo"}
    assert list(logged) == [4, 5, 6, 7]
    for step in 5, 6, 7:                                  # before step 4 there is neither reference nor value head
        weights = finished / f"checkpoints/step-{step - 1:08d}"
        lines = replay(capsys, finished / "rollouts.jsonl", "--model_path", weights)
        assert [(line["step"], line["phase"]) for line in lines] == [(step, "grpo") for step in (4, 5, 6, 7)]
        (line,) = [line for line in lines if line["step"] == step]
        for name in SAME:
            assert line[name] == pytest.approx(logged[step][name], rel=1e-5, abs=1e-6), name


def test_without_a_model_path_the_newest_checkpoint_is_taken_and_nothing_is_written(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    newest = replay(capsys, finished / "rollouts.jsonl")
    assert newest == replay(capsys, finished / "rollouts.jsonl", "--model_path", max((finished / "checkpoints").iterdir()))
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


@pytest.mark.slow
def test_a_flag_changes_the_variant_and_nothing_else(finished, capsys):
    plain = replay(capsys, finished / "rollouts.jsonl")
    for flag, changed in {
        "--loss_type gspo": "policy_loss", "--clip_low 0.01 --clip_high 0.01": "clip_fraction", "--kl_estimator k2": "kl",
        "--kl_estimator exact": "kl", "--entropy_coef 1": "total_loss", "--gae_lambda 0": "value_loss",
        "--reward_weights 1 2": "mean_reward",
    }.items():
        other = replay(capsys, finished / "rollouts.jsonl", *flag.split())
        assert all(a[changed] != b[changed] for a, b in zip(plain, other)), flag
        if changed != "mean_reward":
            assert [line["mean_reward"] for line in plain] == [line["mean_reward"] for line in other]
            assert [line["entropy"] for line in plain] == [line["entropy"] for line in other]


@pytest.mark.parametrize("flags,message", [
    ([], "no rollouts in it"), (["nowhere.jsonl"], "nowhere.jsonl: no rollouts in it"), (["{run}/metrics.jsonl"], "no rollouts in it"),
    (["{run}/moved/rollouts.jsonl"], "name the weights with --model_path"),
    (["{run}/rollouts.jsonl", "--model_path", "{run}/final"], "no reference beside it"),
    (["{run}/rollouts.jsonl", "--model_path", "{run}/final", "--use_kl_penalty", "false"], "has no value head"),
    (["{run}/rollouts.jsonl", "--reward_functions", "correctness", "--reward_weights", "1"],
     "correctness: not among those saved"),
])
def test_what_cannot_be_replayed_is_one_line_of_error(finished, flags, message):
    (finished / "moved").mkdir(exist_ok=True)
    for name in "rollouts.jsonl", "config.json":
        (finished / "moved" / name).write_bytes((finished / name).read_bytes())
    with pytest.raises(ValueError, match=message):
        main([flag.replace("{run}", str(finished)) for flag in flags])


@pytest.mark.slow
def test_a_rollout_that_a_function_failed_on_stays_unscored(tmp_path, capsys):
    (tmp_path / "fails.py").write_text(
        "calls = []\ndef fails(completions, **columns):\n    calls.append(1)\n"         # call 1: the start-up check, 2: step 1
        "    if len(calls) > 2:\n        raise ValueError('no')\n"
        "    return [len(c) / 9 for c in completions]\n")
    folder = tmp_path / "run"
    train.main([*QUICK, *f"--use_grpo --output_dir {folder} --reward_functions reasoning_coherence {tmp_path}/fails.py:fails "
                "--reward_weights 1 1 --reward_errors none --cold_start_steps 0 --max_steps 2 --save_steps 1 --keep_checkpoints 9 "
                "--log_rollouts_every 1 --eval_limit 0 --learning_rate 1e-3 --batch_size 8".split()])
    logged = next(line for line in read_jsonl(folder / "metrics.jsonl") if line["step"] == 2)
    assert logged["unscored"] == 1
    again = replay(capsys, folder / "rollouts.jsonl", "--model_path", folder / "checkpoints/step-00000001")[1]
    assert again["mean_reward"] is None and again["grad_norm"] == logged["grad_norm"] == 0
