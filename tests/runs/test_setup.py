"""Setting up a run: settings that are filled in, and changed settings of a resumed run."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import QUICK, run_folder, start_run
from forked import Ranks

import train
from config import Config, ModelConfig
from engine import shared
from engine.errors import CannotShare
from engine.policy import load_any_policy, save_any_policy
from runs.setup import compare_settings, config_on_device


def test_float16_is_refused_on_xla_where_its_loss_would_not_be_scaled():
    config = Config.from_profile("demo", use_grpo=True, precision="float16")
    with pytest.raises(ValueError, match=r"^--precision=float16: on XLA the loss would not be scaled; use bfloat16$"):
        config_on_device(config, torch.device("xla"))
    assert config_on_device(config, torch.device("cpu")).model.precision == "float16"


@pytest.mark.parametrize("flags", [dict(seed=1), dict(eval_limit=5)])
@pytest.mark.parametrize("dataset,refused", [("mine.jsonl", True), ("arithmetic", False)])
def test_what_chooses_the_held_out_examples_of_a_file_stays_when_a_run_is_resumed(tmp_path, monkeypatch, flags, dataset, refused):
    begun, now = (Config.of(dataset=dataset, **{"eval_limit": 4} | more) for more in ({}, flags))
    monkeypatch.setattr("runs.setup.read_state", lambda *_, **__: {"settings": begun.as_dict()})
    compare_settings(begun, tmp_path / "checkpoints/step-1", print)
    with pytest.raises(ValueError, match=f"^--{next(iter(flags))}=.: this run began with .;") if refused else nullcontext():
        compare_settings(now, tmp_path / "checkpoints/step-1", print)


@pytest.mark.slow
def test_resuming_says_what_changed_and_refuses_what_does_not_fit(tmp_path, capsys):
    folder = run_folder(tmp_path / "out", *"--use_grpo --cold_start_steps 0 --max_steps 1 --eval_limit 0".split())
    (begun, *_) = sorted((folder / "checkpoints").iterdir())
    state = torch.load(begun / "state.pt", weights_only=True)
    assert state["progress"]["phase_step"] == 1, "complete"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    again = ["--output_dir", str(folder), "--resume"]
    for flags, flag in (["--lora_rank", "8"], "lora_rank=8"), (["--model_path", str(begun)], f"model_path={begun}"), (
            ["--use_grpo", "false"], "use_grpo=False"), (["--max_steps", "9"], "max_steps=9"):
        with pytest.raises(SystemExit) as stop:
            train.main([*again, *flags])
        error = capsys.readouterr().err
        assert stop.value.code == 2 and f"--{flag}: this run began with" in error and len(error.strip().splitlines()) == 1
    train.main([*again, "--learning_rate", "0.05"])
    said = capsys.readouterr().out
    assert f"from {begun}" in said and "changed: learning_rate 0.0001 -> 0.05" in said and "this run is complete" in said
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(SystemExit):
        train.main(again)
    assert "is complete and its checkpoints are gone" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before[folder / "metrics.jsonl"]


def test_check_prints_and_stops(tmp_path, capsys):
    train.main(["--use_grpo", "--check", "--engine", "shared", "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    for word in "BOS", "stop ids", "head", "sampler", "packing", "gold 1.30":
        assert word in printed
    assert not (tmp_path / "out").exists()


def test_the_tokens_of_a_forward_pass_are_chosen_by_device_printed_and_saved(tmp_path, capsys):
    assert start_run(tmp_path).config.training.max_tokens_per_forward == 2048
    assert "passes of up to 2048 tokens" in capsys.readouterr().out
    assert start_run(tmp_path / "more", "--max_tokens_per_forward", "300").config.training.max_tokens_per_forward == 300
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"prompt": "x" * n, "completion": "y"}) + "\n" for n in (3, 1500)))
    long = start_run(tmp_path / "long", "--dataset", str(tmp_path / "long.jsonl"), "--max_prompt_length", "1600")
    assert long.config.training.max_tokens_per_forward == long.folder.config.training.max_tokens_per_forward == 2 * 1501


def test_a_packing_fault_ends_a_run_of_the_built_in_model(tmp_path, monkeypatch, capsys):
    """The first token of a completion is predicted from the wrong place, in packs alone."""
    real = shared.pack_groups

    def wrong_predictor(*args):
        batch = real(*args)
        batch.predictor[:, 0] = 0
        return batch

    monkeypatch.setattr(shared, "pack_groups", wrong_predictor)
    flags = [*QUICK, "--output_dir", str(tmp_path / "run"), "--use_grpo", "--max_steps", "1"]
    with pytest.raises(SystemExit) as stop:
        train.main(flags)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "start-up check: packing: off: packed and plain rows differ by" in error
    assert "engine/packing.py" in error and not (tmp_path / "run/metrics.jsonl").exists()
    assert "plain rows instead" not in error and "--engine plain does without" in error
    train.main([*flags, "--check", "--engine", "plain"])
    assert "ok     plain rows   a row for each completion" in capsys.readouterr().out
    model, tokenizer = load_any_policy(ModelConfig())
    save_any_policy(model, tokenizer, tmp_path / "model")     # another one may have layers that carry state
    train.main([*flags, "--check", "--model_path", str(tmp_path / "model")])
    assert "note   packing      off: packed and plain rows differ by" in capsys.readouterr().out

    def cannot(*args):
        raise CannotShare("a layer with state")

    monkeypatch.setattr(shared, "pack_groups", cannot)
    train.main([*flags, "--check"])
    assert "note   packing      off: a layer with state; plain rows instead" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        train.main([*flags, "--check", "--engine", "shared", "--model_path", str(tmp_path / "model")])
    assert stop.value.code == 2 and "packing: off: a layer with state; " in capsys.readouterr().err


def test_another_error_of_the_shared_engine_ends_the_run(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("FlashAttention only supports newer GPUs")

    monkeypatch.setattr(shared, "pack_groups", broken)
    with pytest.raises(RuntimeError, match="newer GPUs"):
        train.main([*QUICK, "--output_dir", str(tmp_path / "run"), "--use_grpo", "--engine", "shared"])


@pytest.mark.slow
def test_supervised_training_may_be_evaluated_greedily(tmp_path):
    folder = run_folder(tmp_path / "run", *"--use_grpo false --generation_temperature 0 --max_steps 1".split())
    assert (folder / "final").exists()


def test_a_call_of_vllm_that_raises_on_one_rank_fails_on_all(tmp_path):
    """Both raise the same error, and their next collective fits together."""
    code = tmp_path / "ranks.py"
    code.write_text(
        "import sys\nfrom types import SimpleNamespace\n"
        f"sys.path[:0] = [{str(Path(train.__file__).parent)!r}]\n"
        "from engine.devices import all_gather_object, best_device, process_rank\n"
        "from engine.ranks import Ranks\nfrom engine.vllm_engine import VLLM\nengine = VLLM.__new__(VLLM)\n"
        "engine.ranks, engine.sleeps, engine.send_weights = Ranks(best_device('cpu')), True, lambda: None\n"
        "engine.llm = SimpleNamespace(sleep=lambda level: level // process_rank())\n"
        "try:\n    with engine.sampling():\n        pass\nexcept ZeroDivisionError as error:\n    print(all_gather_object(str(error)[:24]))\n"
    )
    done = Ranks(2, str(code)).wait(60)
    printed = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]          # of torch 2.9
    assert printed == ["['integer division or modu', 'integer division or modu']"] * 2, done.stderr
