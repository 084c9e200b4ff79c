"""Runs from end to end on the built-in model, the steps' gradients, stopping and going on, and that rewards rise."""

import itertools
import json
import math
import shutil
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experience import Experience
from runs.run import Run
from runs import phases
import train
from conftest import QUICK, start_run
from grpo import LOSSES
from rewards import load_reward_function
from runs.records import read_jsonl



def length_reward(folder):
    """A reward that hardly ever ties a group."""
    (folder / "length.py").write_text("def length(completions, **columns):\n    return [len(c) for c in completions]\n")
    return f"{folder}/length.py:length"


def run_folder(path, *flags):
    train.main([*QUICK, "--output_dir", str(path), *flags])
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short GRPO run with everything on."""
    path = tmp_path_factory.mktemp("run")
    folder = path / "out"
    flags = (
        f"--use_grpo --use_kl_penalty --max_steps 3 --save_steps 1 --keep_checkpoints 2 --log_rollouts_every 1 --log_groups 1 "
        f"--report_to tensorboard --reward_functions correctness {length_reward(path)} --reward_weights 1 0.5"
    )
    return run_folder(folder, *flags.split())


def test_the_run_folder_holds_what_it_promises(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "metrics.jsonl", "rollouts.jsonl", "curves.png", "report.html", "tensorboard", "checkpoints", "final"
    }
    newest, _ = sorted((finished / "checkpoints").iterdir(), reverse=True)
    config = json.loads((finished / "config.json").read_text())
    assert torch.load(newest / "state.pt", weights_only=True)["settings"] == config
    assert config["grpo"]["num_completions_per_prompt"] == 4 and config["training"]["use_grpo"] is True
    assert config["training"]["max_tokens_per_forward"] == 2048, "the default on a CPU, written down for who resumes elsewhere"
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())


def test_metrics_have_the_documented_names_and_count_steps_from_one(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [(m["step"], m["phase"]) for m in lines] == [
        (0, "eval"), (1, "cold_start"), (2, "cold_start"), (3, "cold_start"), (3, "eval"),
        (4, "grpo"), (5, "grpo"), (6, "grpo"), (6, "eval"),
    ]
    grpo = lines[5]
    documented = [
        "policy_loss", "mean_reward", "mean_advantage", "std_advantage", "tied_groups", "kl", "entropy", "clip_fraction",
        "grad_norm", "completion_tokens", "truncated", "step_seconds", "sampling_seconds", "training_seconds", "peak_memory_gb",
    ]
    assert set(documented) <= set(grpo) and all(isinstance(grpo[name], int | float) for name in documented)
    assert {"eval_accuracy", "eval_accuracy_low", "eval_accuracy_high"} <= set(lines[0])
    assert grpo["kl"] == pytest.approx(0, abs=1e-6) and lines[7]["kl"] > 0, "the reference is the policy after the cold start"
    assert abs(grpo["mean_advantage"]) < 1e-6 and grpo["clip_fraction"] == 0


def test_every_metric_is_in_the_glossary(finished):
    glossary = (Path(train.__file__).parent / "docs/metrics.md").read_text()
    for line in read_jsonl(finished / "metrics.jsonl"):
        for name in line:
            entry = name.partition("/")[0] + "/<function>" if "/" in name else name
            assert f"`{entry}`" in glossary, name
    of_completions = glossary.partition("## Completions")[2]
    for name in read_jsonl(finished / "rollouts.jsonl")[0]:
        assert f"`{name}`" in of_completions, name


def test_rollouts_hold_whole_groups(finished):
    records = read_jsonl(finished / "rollouts.jsonl")
    assert len(records) == 3 * 4 * 4 and {r["step"] for r in records} == {4, 5, 6}
    for start in range(0, len(records), 4):
        group = records[start : start + 4]
        assert len({r["prompt"] for r in group}) == 1
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-5)
        for r in group:
            weights = {"correctness": 1.0, "length": 0.5}
            assert r["reward"] == pytest.approx(sum(weights[name] * points for name, points in r["rewards"].items()))


def test_rollouts_hold_what_the_policy_says_of_its_tokens_after_the_update(finished):
    """The last step's against the final model, by transformers alone; the run samples at temperature 1 from everything."""
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    for r in read_jsonl(finished / "rollouts.jsonl")[-3:]:
        logits = model(torch.tensor([r["prompt_ids"] + r["completion_ids"]])).logits[0, len(r["prompt_ids"]) - 1 : -1]
        log_p = logits.log_softmax(-1)
        own = [row[token].item() for row, token in zip(log_p, r["completion_ids"])]
        assert r["logp_after"] == pytest.approx(own, abs=1e-4)
        assert r["logp_after"] != pytest.approx(r["sampling_logp"], abs=1e-4), "there was an update"
        assert r["entropies"] == pytest.approx((-log_p.exp() * log_p).sum(-1).tolist(), abs=1e-4)


def test_the_final_model_loads_without_this_project(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    tokenizer = AutoTokenizer.from_pretrained(finished / "final")
    assert model(**tokenizer("1+1=?", return_tensors="pt")).logits.isfinite().all()


def comparable(folder):
    """What must not depend on when a run was stopped: all but the times."""
    drop = ("seconds", "memory")
    return [{k: v for k, v in m.items() if not any(d in k for d in drop)} for m in read_jsonl(folder / "metrics.jsonl")]


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()


# Whatever a run carries from step to step: reference, coefficient, running mean, value head, order of minibatches, advice.
CARRIED = (
    "--reference_mode ema --ema_alpha 0.5 --kl_target 0.01 --kl_horizon 20 --baseline global_mean --ppo_epochs 2 "
    "--minibatch_size 8 --dynamic_sampling 1 --max_steps 16"
)


@pytest.mark.slow
@pytest.mark.parametrize("stop_after,more", [
    (0, ""), (2, ""), (5, ""), (20, CARRIED), (5, "--use_value_head"),
    pytest.param(5, "--adam_8bit", marks=pytest.mark.skipif(not find_spec("torchao"), reason="needs torchao")),
])
def test_ctrl_c_and_resume_equal_not_having_stopped(tmp_path, monkeypatch, stop_after, more, capsys):
    flags = f"--use_grpo --use_kl_penalty --max_steps 4 --save_steps 0 --learning_rate 1e-3 {more}".split()
    whole = run_folder(tmp_path / "whole", *flags)

    where = "log_step" if stop_after else "log_evaluation"
    original = getattr(Run, where)

    def press_ctrl_c(run, *rest):
        result = original(run, *rest)
        if run.progress.step == stop_after:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Run, where, press_ctrl_c)
    stopped = run_folder(tmp_path / "stopped", *flags)
    assert f"python train.py --output_dir {stopped} --resume" in capsys.readouterr().out
    assert not (stopped / "final").exists() and len(comparable(stopped)) < len(comparable(whole))
    monkeypatch.setattr(Run, where, original)
    train.main(["--output_dir", str(stopped), "--resume"])
    assert comparable(stopped) == comparable(whole)
    for (name, left), (_, right) in zip(weights_of(whole).items(), weights_of(stopped).items(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.slow
def test_a_phase_that_goes_on_takes_a_new_learning_rate_and_refuses_other_phases(tmp_path, monkeypatch, capsys):
    real = Run.log_step

    def press_ctrl_c(run, *rest):
        real(run, *rest)
        if run.progress.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log_step", press_ctrl_c)
    flags = "--use_grpo --cold_start_steps 1 --max_steps 5 --eval_limit 0 --learning_rate 1e-3"
    folder = run_folder(tmp_path / "out", *flags.split())
    monkeypatch.setattr(Run, "log_step", real)
    again = ["--output_dir", str(folder), "--resume"]
    for changed in ["--use_grpo", "false"], ["--cold_start_steps", "0"], ["--profile", "balanced"], ["--lora_alpha", "8"]:
        with pytest.raises(SystemExit):
            train.main([*again, *changed])
        assert f"{changed[0]}=" in capsys.readouterr().err.splitlines()[-1]
    train.main([*again, "--learning_rate", "1e-5", "--weight_decay", "0.25"])
    assert "changed: learning_rate 0.001 -> 1e-05, weight_decay 0.0 -> 0.25" in " ".join(capsys.readouterr().out.split())
    rates = [m["learning_rate"] for m in read_jsonl(folder / "metrics.jsonl") if m["phase"] == "grpo"]
    peaks = [1e-3, *[1e-5] * 4]
    factors = [phases.learning_rate_factor(step, steps=5, warmup=1, schedule="cosine") for step in range(1, 6)]
    assert rates == pytest.approx([peak * factor for peak, factor in zip(peaks, factors)], rel=1e-6)
    newest = max((folder / "checkpoints").glob("step-00000006*"))
    assert torch.load(newest / "state.pt", weights_only=True)["settings"]["training"]["weight_decay"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("began,changed,flag", [
    ("--use_kl_penalty false", "--use_kl_penalty true", "use_kl_penalty=True"),
    ("--use_kl_penalty true", "--kl_penalty_coef 0", "use_kl_penalty=False"),
    ("--use_value_head false", "--use_value_head true", "use_value_head=True"),
])
def test_what_a_phase_began_without_cannot_be_switched_on_when_resuming(tmp_path, monkeypatch, capsys, began, changed, flag):
    real = Run.log_step

    def press_ctrl_c(run, *rest):
        real(run, *rest)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "log_step", press_ctrl_c)
    folder = run_folder(tmp_path / "out", *f"--use_grpo --cold_start_steps 0 --max_steps 3 --eval_limit 0 {began}".split())
    monkeypatch.setattr(Run, "log_step", real)
    settings = (folder / "config.json").read_text()
    with pytest.raises(SystemExit):
        train.main(["--output_dir", str(folder), "--resume", *changed.split()])
    error = capsys.readouterr().err.rpartition("at once\n")[2]
    assert f"--{flag}: this run began with" in error and len(error.strip().splitlines()) == 1
    assert (folder / "config.json").read_text() == settings
    train.main(["--output_dir", str(folder), "--resume", "--learning_rate", "1e-5"])
    assert (folder / "final").exists()


@pytest.mark.slow
def test_resuming_says_what_changed_and_refuses_what_does_not_fit(tmp_path, capsys):
    folder = run_folder(tmp_path / "out", *"--use_grpo --cold_start_steps 0 --max_steps 1 --eval_limit 0".split())
    (begun, *_) = sorted((folder / "checkpoints").iterdir())
    state = torch.load(begun / "state.pt", weights_only=True)
    assert state["progress"]["phase"] == 1, "complete"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = ["--output_dir", str(folder), "--resume"]
    for flags, flag in (["--lora_rank", "8"], "lora_rank=8"), (["--model_path", str(begun)], f"model_path={begun}"), (
            ["--use_grpo", "false"], "use_grpo=False"):
        with pytest.raises(SystemExit) as stop:
            train.main([*again, *flags])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and f"--{flag}: this run began with" in error and len(error.strip().splitlines()) == 1
    train.main([*again, "--learning_rate", "0.5"])
    said = capsys.readouterr().out
    assert f"from {begun}" in said and "changed: learning_rate 0.0004 -> 0.5" in said and "this run is complete" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(SystemExit):
        train.main(again)
    assert "is complete and its checkpoints are gone" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before[folder / "metrics.jsonl"]


@pytest.mark.slow
def test_several_updates_per_rollout_count_as_so_many_steps_and_end_on_time(tmp_path):
    flags = "--use_grpo --cold_start_steps 0 --ppo_epochs 2 --minibatch_size 8 --max_steps 10 --learning_rate 1e-3"
    flags += f" --reward_functions {length_reward(tmp_path)}"
    folder = run_folder(tmp_path / "out", *flags.split(), "--eval_steps", "3", "--log_rollouts_every", "5")
    lines = read_jsonl(folder / "metrics.jsonl")
    steps = [m for m in lines if m["phase"] == "grpo"]
    assert [(m["step"], m["updates"]) for m in steps] == [(4, 4), (8, 4), (10, 2)]
    assert [m["step"] for m in lines if m["phase"] == "eval"] == [0, 4, 8, 10]
    assert all(m["policy_kl"] > 0 and m["ratio_deviation"] > 0 for m in steps) and steps[0]["clip_fraction"] > 0
    assert {r["step"] for r in read_jsonl(folder / "rollouts.jsonl")} == {4, 8}
    assert steps[-1]["learning_rate"] == pytest.approx(0, abs=1e-9), "the schedule counts the same steps"
    stopped = run_folder(tmp_path / "stopped", *flags.split(), "--max_policy_kl", "1e-6")
    updates = [m["updates"] for m in read_jsonl(stopped / "metrics.jsonl") if m["phase"] == "grpo"]
    assert set(updates[:-1]) == {1} and sum(updates) == 10, "the policy leaves the rollout with its first update"


@pytest.mark.slow
def test_an_update_that_is_not_made_leaves_nothing_behind(tmp_path):
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 3 --learning_rate 1e-3 --reward_functions {length_reward(tmp_path)}"
    once = run_folder(tmp_path / "once", *flags.split())
    stopped = run_folder(tmp_path / "stopped", *flags.split(), "--ppo_epochs", "3", "--max_policy_kl", "1e-9")
    assert comparable(stopped) == comparable(once)


@pytest.mark.slow
def test_a_run_whose_gradients_are_not_finite_skips_saves_and_stops(tmp_path, monkeypatch, capsys):
    real, calls = train.accumulate_gradients, []

    def broken(*args):
        run, losses = args[0], real(*args)
        calls.append(1)
        if len(calls) in (2, 4, 5):
            run.model.get_output_embeddings().weight.grad.fill_(float("nan"))
        return losses

    monkeypatch.setattr(train, "accumulate_gradients", broken)
    flags = (
        "--use_grpo --cold_start_steps 0 --max_steps 9 --max_skipped_steps 2 --eval_limit 0 --learning_rate 1e-3 "
        f"--reward_functions {length_reward(tmp_path)}"
    )
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "out", *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 1 and len(error.strip().splitlines()) == 1
    assert "2 steps in a row had a loss or gradient that is not finite" in error and "step-00000005" in error
    lines = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert [m["skipped"] for m in lines] == [0, 1, 0, 1, 1] and lines[1]["grad_norm"] is None
    skipped = read_jsonl(tmp_path / "out/skipped.jsonl")
    assert {record["step"] for record in skipped} == {2, 4, 5} and len(skipped) == 3 * 16
    monkeypatch.setattr(train, "accumulate_gradients", real)
    train.main(["--replay", str(tmp_path / "out/skipped.jsonl")])
    replayed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in replayed] == [2, 4, 5] and all(line["grad_norm"] > 0 for line in replayed)


def test_a_supervised_step_that_is_not_finite_can_be_replayed_too(tmp_path, monkeypatch, capsys):
    real = train.optimizer_step
    monkeypatch.setattr(train, "optimizer_step", lambda run, loss: real(run, float("nan") if run.progress.step == 1 else loss))
    folder = run_folder(tmp_path / "out", "--max_steps", "2", "--eval_limit", "0", "--save_steps", "1")
    first, second = read_jsonl(folder / "metrics.jsonl")
    assert (first["skipped"], second["skipped"]) == (0, 1)
    capsys.readouterr()
    train.main(["--replay", str(folder / "skipped.jsonl")])
    (replayed,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert replayed["phase"] == "supervised" and replayed["policy_loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert replayed["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kl_in,estimator", [("loss", "k2"), ("loss", "exact"), ("reward", "k1")])
def test_the_kl_coefficient_adapts_towards_its_target(tmp_path, kl_in, estimator):
    flags = (
        "--use_grpo --cold_start_steps 0 --max_steps 6 --eval_limit 0 --learning_rate 3e-3 --use_kl_penalty "
        f"--kl_penalty_coef 0.5 --kl_target 1e-3 --kl_horizon 16 --kl_in {kl_in} --kl_estimator {estimator} "
        f"--reward_functions {length_reward(tmp_path)}"
    )
    lines = read_jsonl(run_folder(tmp_path / "out", *flags.split()) / "metrics.jsonl")
    coefficient = 0.5
    for m in lines:
        coefficient *= 1 + max(-0.2, min(0.2, m["kl"] / 1e-3 - 1)) * 16 / 16
        assert m["kl_coef"] == pytest.approx(coefficient, rel=1e-6)
    assert lines[0]["kl_coef"] == pytest.approx(0.4, rel=1e-4) and lines[-1]["kl"] > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU there is nowhere else to put it")
def test_a_reference_on_the_cpu_gives_the_same_run(tmp_path):
    flags = "--use_grpo --cold_start_steps 0 --max_steps 2 --eval_limit 0 --use_kl_penalty --learning_rate 1e-3".split()
    there = run_folder(tmp_path / "a", *flags, "--reference_offload")
    assert comparable(there) == comparable(run_folder(tmp_path / "b", *flags))


def test_supervised_mode_has_its_own_metrics(tmp_path):
    folder = run_folder(tmp_path / "out", "--num_epochs", "0.03", "--eval_limit", "0")
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [m["phase"] for m in lines] == ["supervised"] * 3
    assert lines[0]["loss"] > lines[-1]["loss"] > 0 and "mean_reward" not in lines[0]
    assert not (folder / "rollouts.jsonl").read_text()


def test_check_prints_and_stops(tmp_path, capsys):
    train.main(["--use_grpo", "--check", "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    for word in "BOS", "stop ids", "padding", "head", "sampler", "packing", "pppTTT", "gold 1.30":
        assert word in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("schedule,last", [("constant", 1.0), ("linear", 1 / 8), ("cosine", 0.0381)])
def test_the_learning_rate_rises_falls_and_is_never_zero(schedule, last):
    factors = [phases.learning_rate_factor(step, steps=10, warmup=2, schedule=schedule) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0] and factors[-1] == pytest.approx(last, abs=1e-4)
    assert all(left >= right > 0 for left, right in itertools.pairwise(factors[1:]))


# ---- one step ------------------------------------------------------------------------------------------------------


def gradient_of(run, step, examples, monkeypatch):
    """What a step would have handed to the optimiser."""
    run.model.zero_grad()
    monkeypatch.setattr(train, "optimizer_step", lambda run, loss: 0.0)
    step(run, examples)
    return torch.cat([p.grad.flatten() for p in run.model.parameters()])


def half(completions, **columns):
    """A reward that ties one group in two and differs within the other."""
    return [float(i % 4) if i // 4 % 2 else 0.7 for i in range(len(completions))]


def test_leaving_out_groups_without_signal_changes_nothing(tmp_path, monkeypatch):
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0")
    run.reward_functions = [half]
    run.config = replace(run.config, grpo=replace(run.config.grpo, reward_functions=["half"]))
    examples = next(run.batches)
    seen = []
    real = train.completion_log_probs

    def spy(model, rollout, rows, **options):
        seen.extend(rows.tolist())
        return real(model, rollout, rows, **options)

    monkeypatch.setattr(train, "completion_log_probs", spy)
    without = gradient_of(run, train.grpo_training_step, examples, monkeypatch)
    assert sorted(seen) == [4, 5, 6, 7, 12, 13, 14, 15]
    monkeypatch.setattr(Experience, "has_gradient", lambda self, rows, config: torch.ones(len(rows), dtype=torch.bool))
    with_all = gradient_of(run, train.grpo_training_step, examples, monkeypatch)
    assert len(seen) == 24 and (without - with_all).norm() / with_all.norm() < 1e-5


def test_a_supervised_step_has_the_gradient_of_the_models_own_cross_entropy(tmp_path, monkeypatch):
    run = start_run(tmp_path, "--max_tokens_per_forward", "60")                  # several micro-batches
    examples = next(run.batches)
    ours = gradient_of(run, train.supervised_training_step, examples, monkeypatch)
    run.model.zero_grad()
    batch = train.demonstrations_as_rollout(run.model, run.tokenizer, examples)
    num_tokens = int(batch.completion_mask.sum())
    for i, example in enumerate(examples):                # one row at a time, transformers' own loss
        prompt = run.tokenizer(example["prompt"]).input_ids
        answer = [*run.tokenizer(example["completion"], add_special_tokens=False).input_ids, run.tokenizer.eos_token_id]
        assert batch.completion_ids[i][batch.completion_mask[i]].tolist() == answer
        ids, labels = torch.tensor([prompt + answer]), torch.tensor([[-100] * len(prompt) + answer])
        (run.model(ids, labels=labels).loss * len(answer) / num_tokens).backward()
    theirs = torch.cat([p.grad.flatten() for p in run.model.parameters()])
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("call,evaluated,saved", [(4, "0", 2), (8, "4", 5)])     # in the third step; in the last evaluation
def test_what_a_reward_function_raises_costs_no_step(tmp_path, capsys, call, evaluated, saved):
    """The run that was mended and resumed is the one that never raised. The first call is the start-up check's."""
    file = tmp_path / "late.py"
    file.write_text("calls = 0\ndef late(completions, **columns):\n    global calls\n    calls += 1\n"
                    f"    if calls == {call}: raise KeyError('late')\n    return [float(len(c) % 7) for c in completions]\n")
    flags = f"--use_grpo --cold_start_steps 0 --max_steps 5 --eval_limit {evaluated} --eval_steps 0".split()
    flags += ["--reward_functions", f"{file}:late"]
    with pytest.raises(SystemExit) as stop:
        train.main([*QUICK, *flags, "--output_dir", str(tmp_path / "a")])
    error = capsys.readouterr().err
    assert stop.value.code == 1 and len(error.strip().splitlines()) == 1
    assert "reward function late raised KeyError: 'late' (late.py, line 5)" in error
    assert f"step-0000000{saved}" in error and "--resume" in error
    file.write_text(file.read_text().replace(f"calls == {call}", "False"))
    load_reward_function.cache_clear()
    train.main(["--output_dir", str(tmp_path / "a"), "--resume"])
    load_reward_function.cache_clear()
    never = run_folder(tmp_path / "b", *flags)
    assert comparable(tmp_path / "a") == comparable(never)
    ours, theirs = weights_of(tmp_path / "a"), weights_of(never)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_broken_reward_function_stops_the_run_or_is_left_out(tmp_path, capsys):
    file = tmp_path / "fussy.py"
    file.write_text("def fussy(completions, **columns):\n    raise KeyError('always')\n")
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "never", "--use_grpo", "--reward_functions", f"{file}:fussy")
    assert stop.value.code == 2 and "reward function fussy raised KeyError: 'always'" in capsys.readouterr().err

    def later(name):                                      # raises when training, not in the start-up check
        (tmp_path / name).write_text(
            "calls = []\n"
            "def later(completions, **columns):\n"
            "    calls.append(1)\n"
            "    if len(calls) > 1: raise KeyError('no such thing')\n"
            "    return [0.0] * len(completions)\n"
        )
        return f"{tmp_path}/{name}:later"

    flags = "--use_grpo --cold_start_steps 0 --max_steps 1 --eval_limit 0 --reward_functions".split()
    with pytest.raises(SystemExit):
        run_folder(tmp_path / "a", *flags, later("one.py"))
    assert "reward function later raised KeyError: 'no such thing'" in capsys.readouterr().err
    folder = run_folder(tmp_path / "b", *flags, later("two.py"), "--reward_errors", "none")
    (line,) = read_jsonl(folder / "metrics.jsonl")
    assert line["unscored"] == 1.0 and line["mean_reward"] is None and line["grad_norm"] == 0.0


@pytest.mark.parametrize("policy", ["drop", "truncate"])
def test_long_prompts_are_dropped_or_cut_on_the_left_and_counted(tmp_path, capsys, policy):
    file = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{'x' * (50 * (i % 2))}{i}+1=?", "answer": str(i + 1)} for i in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limit = ["--max_prompt_length", "20", "--long_prompts", policy]
    run = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--dataset", str(file), *limit)
    assert f"4 of 8 prompts have more than 20 tokens: {policy}" in capsys.readouterr().out
    if policy == "drop":
        assert [e["answer"] for e in run.train_set] == ["1", "3", "5", "7"]
    else:
        assert [len(e["prompt"]) for e in run.train_set if isinstance(e["prompt"], list)] == [20] * 4
        assert run.tokenizer.decode(run.train_set[1]["prompt"]).endswith("x1+1=?")
        train.grpo_training_step(run, run.train_set[:4])


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_built_in_model_learns_a_one_token_task(tmp_path, loss_type):
    """A random policy finds the one byte in 263 that is rewarded more than others, and sticks to it."""
    file = tmp_path / "seven.py"
    file.write_text("def seven(completions, **columns):\n    return [float(c == '7') for c in completions]\n")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    settings = (
        "--use_grpo --cold_start_steps 0 --generation_max_length 1 --num_completions_per_prompt 16 --batch_size 8 "
        f"--max_steps 30 --num_epochs 100 --learning_rate 2e-3 --eval_limit 0 --loss_type {loss_type}"
    )
    folder = run_folder(tmp_path / "out", *settings.split(), "--dataset", str(data), "--reward_functions", f"{file}:seven")
    rewards = [m["mean_reward"] for m in read_jsonl(folder / "metrics.jsonl")]
    assert rewards[0] < 0.1 and sum(rewards[-5:]) / 5 > 0.9


@pytest.mark.slow
def test_float16_scales_the_loss_and_has_the_gradient_of_float32(tmp_path):
    norms = [
        [m["grad_norm"] for m in read_jsonl(run_folder(tmp_path / p, "--max_steps", "2", "--precision", p) / "metrics.jsonl")
         if m["phase"] == "supervised"]
        for p in ("float32", "float16")
    ]
    assert len(norms[0]) == 2 and norms[0] != norms[1] and norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.slow
def test_gradients_beyond_float16_lower_the_scale_and_are_not_held_against_the_run(tmp_path):
    run = start_run(tmp_path, "--precision", "float16")
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-8)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    metrics, _ = train.supervised_training_step(run, next(run.batches))
    assert not math.isfinite(metrics["grad_norm"]) and math.isfinite(metrics["loss"])
    assert (run.progress.skipped, run.progress.skipped_in_a_row) == (1, 0) and run.scaler.get_scale() == 2.0**32
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    while run.progress.skipped == run.progress.phase_step - 1:
        train.supervised_training_step(run, next(run.batches))
    assert run.scaler.get_scale() >= 1 and not all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
