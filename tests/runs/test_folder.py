"""The run folder: its files, the names in them, what a kill leaves of them, and trackers, of which services are replaced by fakes."""

import dataclasses
import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import QUICK, assert_same, experience_of, made_up_rollout, with_settings
from filelock import FileLock, Timeout
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from config import Config, GRPOConfig
from engine.errors import RunError
from engine.models import load_any_policy
from experience import Groups, compute_experience
from grpo import compute_group_advantages
from reward_functions.calling import Reports
from runs import checkpoint
from runs.command_line import parse_config
from runs.folder import RunFolder, completion_records, open_tracker, read_jsonl, read_records
from runs.groups import summarize_groups
from runs.setup import set_up


def test_the_run_folder_holds_what_it_promises(finished):
    assert {path.name for path in finished.iterdir()} == {
        "config.json", "lock", "metrics.jsonl", "rollouts.jsonl", "curves.png", "report.html", "tensorboard", "checkpoints", "final"
    }
    newest, _ = sorted((finished / "checkpoints").iterdir(), reverse=True)
    config = json.loads((finished / "config.json").read_text())
    assert torch.load(newest / "state.pt", weights_only=True)["settings"] == config
    assert config["training"]["max_tokens_per_forward"] == 2048, "the default on a CPU, written down for who resumes elsewhere"
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_have_the_documented_names_and_count_steps_from_one(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [(m["step"], m["phase"]) for m in lines] == [
        (0, "eval"), (1, "cold_start"), (2, "cold_start"), (3, "cold_start"), (3, "eval"),
        (4, "grpo"), (5, "grpo"), (6, "grpo"), (6, "eval"),
    ]
    grpo = lines[5]
    documented = [
        "policy_loss", "mean_reward", "mean_advantage", "std_advantage", "zero_variance_groups", "kl", "entropy", "clip_fraction",
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


HOLD = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('locked', flush=True); time.sleep(60)"


def test_a_folder_has_one_writer_and_is_free_when_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    refused = folder_of("--output_dir", tmp_path)
    for _ in range(2):                                    # a notebook tries again
        with pytest.raises(RunError, match=f"^{tmp_path}: another process writes to it; wait until it ends"):
            refused.open(Config(), 0, {})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="another process writes to it"):
        RunFolder(Config.of(resume=True, output_dir=str(tmp_path)))    # before it reads a checkpoint
    RunFolder(Config.of(resume=True, output_dir=str(tmp_path), check=True))  # which writes nothing
    process.send_signal(signal.SIGKILL)
    process.communicate()
    failed = RunFolder(Config.of(resume=True, output_dir=str(tmp_path)))      # a notebook's run that failed, and the next one
    assert failed.lock.is_locked and RunFolder(Config.of(resume=True, output_dir=str(tmp_path))).lock.is_locked


def folder_of(*flags):
    return RunFolder(parse_config([*map(str, flags), "--report_to", "none"]))


@pytest.mark.parametrize("fails", [None, "runs.plan.read_data", "runs.setup.build_run"])
def test_a_resumed_run_that_is_complete_or_fails_gives_up_its_lock(finished, monkeypatch, fails):
    config = parse_config(["--output_dir", str(finished), "--resume"])

    def fail(*args):
        with pytest.raises(Timeout), FileLock(finished / "lock", blocking=False):
            pass
        raise KeyError

    if fails:
        monkeypatch.setattr(fails, fail)
    with pytest.raises(KeyError) if fails else nullcontext() as error:           # whose traceback holds the folder
        set_up(config)
    with FileLock(finished / "lock", blocking=False):
        assert error or not fails


def test_of_two_runs_that_begin_together_the_second_ends(tmp_path):
    first, second = (folder_of("--output_dir", tmp_path / "same") for _ in range(2))
    config = Config.of(seed=1, report_to="none")
    first.open(config, 0, {})
    with pytest.raises(RunError, match=r"--output_dir=.*same: holds another run"):
        second.open(Config(), 0, {})
    assert json.loads((tmp_path / "same/config.json").read_text())["training"]["seed"] == 1
    first.log(1, "grpo", {"kl": 0.0})
    first.open(config, 0, {})                           # a notebook that goes on after Ctrl-C
    assert len(read_jsonl(tmp_path / "same/metrics.jsonl")) == 1


def test_runs_without_a_name_that_begin_in_the_same_second_take_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "outputs/now")
    folders = [folder_of(), folder_of()]
    for folder in folders:
        folder.open(Config.of(report_to="none"), 0, {})
    assert [str(folder.path) for folder in folders] == ["outputs/now", "outputs/now-2"]
    assert {path.name for path in (tmp_path / "outputs").glob("*/config.json")} and all(folder.lock.is_locked for folder in folders)


def test_advantages_of_a_group_sum_to_0_in_its_records_with_importance_weights_too(base):
    run = with_settings(base, importance_cap=1.3)
    rollout = train.sample_groups(run, next(run.batches)).rollout
    rollout.sampling_logp += 0.5 * torch.randn(rollout.sampling_logp.shape)
    records = completion_records(experience_of(run, rollout, torch.randn(4, 4)))
    assert sum(record["advantage"] for record in records[:4]) == pytest.approx(0, abs=1e-5)
    assert not any("token_advantages" in record for record in records)


def test_rollouts_hold_whole_groups(finished):
    records = read_jsonl(finished / "rollouts.jsonl")
    for line in read_jsonl(finished / "metrics.jsonl"):
        logp = [x for r in records if r["step"] == line["step"] for x in r["sampling_logp"]]
        if line["phase"] == "grpo":                       # groups without signal included
            assert line["entropy"] == pytest.approx(-sum(logp) / len(logp), rel=1e-5)
    assert len(records) == 3 * 4 * 4 and {r["step"] for r in records} == {4, 5, 6}
    for start in range(0, len(records), 4):
        group = records[start : start + 4]
        assert len({r["prompt"] for r in group}) == 1
        for r in group:
            weights = {"correctness": 1.0, "length": 0.5}
            assert r["reward"] == pytest.approx(sum(weights[name] * points for name, points in r["rewards"].items()))


DAMAGED = [b"no JSON\n", b"\0" * 64 + b"\n", b"\xff\xfe\n", b"[1]\n", b'{"step": 3, "phase": "gr']


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_from_a_damaged_line_on_a_file_is_left_out_with_one_line(tmp_path, capsys, damaged):
    path, line = tmp_path / "metrics.jsonl", b'{"step": %d, "phase": "grpo", "kl": NaN}\n'
    path.write_bytes(line % 1 + damaged + line % 2)
    assert [record["step"] for record in read_jsonl(path)] == [1]
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(f"{path}: reading stops at a damaged line: b'")
    assert read_jsonl(tmp_path / "missing.jsonl") == []


def test_records_are_read_one_at_a_time_and_of_the_last_steps_alone_only_their_lines_are_parsed(tmp_path, capsys):
    path, text = tmp_path / "rollouts.jsonl", "x" * 100_000
    lines = [json.dumps({"step": step, "phase": "grpo", "completion": text}) + "\n" for step in range(1, 41) for _ in range(4)]
    path.write_text("".join(lines))
    tracemalloc.start()
    assert [record["step"] for record in read_records(path)] == [step for step in range(1, 41) for _ in range(4)]
    assert [record["step"] for record in read_records(path, last_steps=2)] == [39] * 4 + [40] * 4
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000, f"{peak} bytes for steps of 400 kB"
    path.write_text("damaged, but of no interest\n" + "".join(lines[-8:]))
    assert len([*read_records(path, last_steps=2)]) == 8 and capsys.readouterr().err == ""


def test_groups_that_are_tied_and_all_right_are_counted(base):
    scores = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    groups = Groups(
        [{"prompt": "a"}] * 3, made_up_rollout([3] * 3, [3] * 6), scores, {"correctness": scores}, scores,
        compute_group_advantages(scores), reports=Reports())
    experience = compute_experience(groups, GRPOConfig(), base.policy)
    metrics = summarize_groups(groups, experience)
    assert (metrics["zero_variance_groups"], metrics["zero_variance_right_groups"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    own = summarize_groups(dataclasses.replace(groups, per_function={"length": 2 * scores, "mine": scores}), experience)
    assert metrics["correct"] == own["correct"] == 0.5 and own["zero_variance_right_groups"] == pytest.approx(1 / 3)
    unknown = summarize_groups(dataclasses.replace(groups, per_function={"length": 2 * scores}), experience)
    assert math.isnan(unknown["zero_variance_right_groups"]) and math.isnan(unknown["correct"])


RUN = [*QUICK, "--use_grpo", "--cold_start_steps", "1", "--max_steps", "2", "--log_rollouts_every", "1", "--report_to"]


@pytest.mark.slow
def test_a_service_gets_every_number_once_and_continues_after_a_resume(tmp_path, monkeypatch):
    inits, logs, ends = [], [], []
    wandb = SimpleNamespace(
        init=lambda **options: inits.append(options), log=lambda values, step: logs.append((step, values)),
        finish=lambda: ends.append(1), __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    folder = tmp_path / "run"
    train.main([*RUN, "wandb", "--output_dir", str(folder)])
    written = {
        (line["step"], f"{line['phase']}/{name}"): value for line in read_jsonl(folder / "metrics.jsonl")
        for name, value in line.items() if isinstance(value, int | float) and name != "step"
    }
    numbers = [(step, name, value) for step, values in logs for name, value in values.items()]
    assert {(step, name): value for step, name, value in numbers} == written and len(numbers) == len(written)
    assert ends == [1] and inits[0]["config"]["grpo"]["num_completions_per_prompt"] == 4
    shutil.rmtree(folder / "final")                       # as if it had been killed before it wrote that
    train.main(["--output_dir", str(folder), "--resume"])
    first, again = inits
    assert again["name"] == first["name"] == again["id"] == first["id"] and again["resume"] == "allow"
    train.main([*RUN, "wandb", "--output_dir", str(tmp_path / "other" / "run")])
    assert inits[2]["name"] != first["name"], "another run of the same folder name is another run"


def test_tensorboard_events_after_the_checkpoint_are_replaced_when_a_run_resumes(tmp_path):
    for last_step, value in (0, 1.0), (2, 2.0):
        log, close = open_tracker("tensorboard", tmp_path, {}, last_step)
        for step in range(last_step + 1, 5):
            log(step, {"grpo/loss": value})
        close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("grpo/loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_records_are_written_together_or_not_at_all(tmp_path):
    folder = SimpleNamespace(writes=True, path=tmp_path)
    RunFolder.append(folder, "rollouts.jsonl", 1, "grpo", [{"a": 1}, {"a": 2}])
    before = (tmp_path / "rollouts.jsonl").read_text()
    with pytest.raises(TypeError, match="keys must be str"):
        RunFolder.append(folder, "rollouts.jsonl", 2, "grpo", [{"a": 1}, {"a": {(1, 2): 3}}])
    assert (tmp_path / "rollouts.jsonl").read_text() == before and before.count("\n") == 2


STATE = {"progress": {"step": 1}, "settings": {}, "versions": {}}


@pytest.mark.parametrize("owner,operation,name", [
    (checkpoint, "flush", "model.safetensors"), (checkpoint, "flush", "writing"), (Path, "rename", "writing"),
])
def test_a_final_model_that_cannot_be_written_leaves_the_one_before_it(tmp_path, monkeypatch, owner, operation, name):
    (model, tokenizer), final, real = load_any_policy(train.ModelConfig()), tmp_path / "final", getattr(owner, operation)
    final.mkdir()
    (final / "before").touch()

    def no_room(path, *rest):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *rest)

    with monkeypatch.context() as patch, pytest.raises(RunError, match=f"^could not save {final}: .*No space left"):
        patch.setattr(owner, operation, no_room)
        checkpoint.write_policy(model, tokenizer, final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"] and [path.name for path in final.iterdir()] == ["before"]
    checkpoint.write_policy(model, tokenizer, final)
    assert [path.name for path in tmp_path.iterdir()] == ["final"] and not (final / "before").exists()


def test_a_run_that_lacks_only_its_final_model_writes_it_when_it_is_resumed(tmp_path, finished, capsys):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(folder / "final")
    (folder / "writing").mkdir()                        # a kill left it
    functions = json.loads((folder / "config.json").read_text())["grpo"]["reward_functions"]
    train.main(["--output_dir", str(folder), "--resume", "--reward_functions", *functions])     # one is in a file
    assert_same(finished, folder)
    assert "final model:" in capsys.readouterr().out and not (folder / "writing").exists()


def test_the_lines_of_a_step_are_on_the_disk_before_its_checkpoint_is(tmp_path, monkeypatch):
    """Otherwise a power cut would take them, and a resumed run would not repeat the step."""
    (tmp_path / "rollouts.jsonl").touch()
    flushed, flush = [], checkpoint.flush
    monkeypatch.setattr(checkpoint, "flush", lambda path: (flushed.append((path.name, list(target.parent.glob("step*")))), flush(path)))
    monkeypatch.setattr(checkpoint, "save_any_policy", lambda model, tokenizer, folder, weights: folder.mkdir(parents=True))
    target = tmp_path / "checkpoints/step-00000001"
    assert checkpoint.write_checkpoint(target.parent, 1, torch.nn.Linear(1, 1), None, None, STATE, keep=1) == target
    assert ("rollouts.jsonl", []) in flushed


def test_a_reference_is_saved_beside_the_model_and_old_checkpoints_go_but_no_copies_of_a_user(tmp_path, monkeypatch):
    saved, copies = [], {"step-best", "step-00000001-good", "step-00000002.bak"}
    for name in copies:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "save_any_policy", lambda model, tokenizer, folder, weights: (
        saved.append((model, folder.name, sorted(weights))), folder.mkdir(parents=True)))
    model, reference = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False)
    for step, other in enumerate([None, None, reference, reference], start=1):
        checkpoint.write_checkpoint(tmp_path / "checkpoints", min(step, 3), model, None, other, STATE, keep=2)
    assert saved == [(model, "writing", ["bias", "weight"])] * 3 + [
        (reference, "reference", ["weight"]), (model, "writing", ["bias", "weight"]), (reference, "reference", ["weight"])]
    left, newest = {path.name for path in (tmp_path / "checkpoints").iterdir()}, checkpoint.latest_checkpoint(tmp_path)
    assert left == {*copies, "step-00000002", "step-00000003"}, "the newest ones, of each step the last"
    assert newest.name == "step-00000003" and (newest / "reference").is_dir()
    assert not newest.with_name("step-00000002").joinpath("reference").exists()


def test_a_kill_between_the_two_renames_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    def write(text):
        checkpoint.write_folder(target, lambda partial: partial.mkdir(parents=True) or (
            torch.save({"text": text}, partial / "state.pt")))

    def killed(path, to, real=Path.rename):
        if path.name == "writing":
            raise KeyboardInterrupt
        return real(path, to)

    folder = tmp_path / "checkpoints"
    target = folder / "step-00000001"
    write("first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        write("second")
    assert checkpoint.read_state(checkpoint.latest_checkpoint(tmp_path))["text"] == "first"
    write("third")
    assert checkpoint.read_state(target)["text"] == "third"
    target.with_name("step-00000001-old").mkdir()         # a kill while that was deleted
    assert checkpoint.latest_checkpoint(tmp_path) == target
