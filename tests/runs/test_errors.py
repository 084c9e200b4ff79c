"""What a run does when memory runs out; early ends: signals, exit codes, and the line that each prints."""

import errno
import json
import os
import pty
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from conftest import (
    QUICK, ROOT, assert_same, ctrl_c_after, length_reward, num_steps, run_folder, start_run, watch_calls,
)
from forked import Ranks

import train
from engine.cache import PrefixCache
from engine.errors import RunError
from engine.models import load_any_policy, save_any_policy
from infer import main
from policy import Policy, RatioError
from runs.checkpoint import latest_checkpoint
from runs.exits import STOP, exit_on_errors, stop_on_signal
from runs.folder import read_jsonl
from runs.results import evaluate_held_out
from sample import LogitsError

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
)


# ---- memory that runs out ------------------------------------------------------------------------------------------


@pytest.fixture
def flags(tmp_path):
    """A run whose updates take two passes of 200 tokens, with a reference, and a moving average that would carry a fault on."""
    return (
        "--use_grpo --cold_start_steps 0 --max_steps 4 --eval_limit 0 --learning_rate 1e-3 --max_tokens_per_forward 200 --use_kl_penalty "
        f"--reference_mode ema --ema_alpha 0.5 --log_rollouts_every 1 --reward_functions {length_reward(tmp_path)}").split()


def fail(patch, step, passes, error):
    """Let the backward passes of a step with these numbers, repeats included, find no memory."""
    take_step, backward, at = train.grpo_training_step, torch.Tensor.backward, [0, 0]            # step, pass

    def counted_step(run, examples):
        at[:] = run.progress.step + 1, 0
        return take_step(run, examples)

    def failing_backward(loss, *args, **options):
        at[1] += 1
        if at[0] == step and at[1] in passes:
            raise error
        return backward(loss, *args, **options)

    patch.setattr(train, "grpo_training_step", counted_step)
    patch.setattr(torch.Tensor, "backward", failing_backward)
    return at


def saved_setting(folder, section, name):
    return json.loads((folder / "config.json").read_text())[section][name]


@pytest.mark.slow
def test_an_update_that_finds_no_memory_takes_smaller_passes_from_then_on_and_when_resumed(tmp_path, monkeypatch, capsys, flags):
    """It fails behind the first pass's gradient, twice. That gradients stay the same is tested in test_engines.py."""
    folders = []
    for name, stop in ("failed", nullcontext()), ("stopped", ctrl_c_after(3)):
        with monkeypatch.context() as patch, stop:
            fail(patch, 2, {2, 4}, OUT_OF_MEMORY[1])
            folders.append(run_folder(tmp_path / name, *flags))
        printed = re.findall(r"--max_tokens_per_forward (\d+) -> (\d+), trying again", " ".join(capsys.readouterr().out.split()))
        assert printed == [("200", "100"), ("100", "50")]
        assert saved_setting(tmp_path / name, "training", "max_tokens_per_forward") == 50
    train.main(["--output_dir", str(tmp_path / "stopped"), "--resume"])
    assert_same(*folders)


def test_an_update_of_which_no_row_fits_ends_the_run_in_one_line(tmp_path, monkeypatch, capsys, flags):
    fail(monkeypatch, 2, range(1, 99), OUT_OF_MEMORY[0])
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "run", *flags)
    printed = capsys.readouterr()
    assert stop.value.code == 1 and len(printed.err.splitlines()) == 1 and "lower --generation_batch_size" in printed.err
    least = saved_setting(tmp_path / "run", "training", "max_tokens_per_forward")
    rollout = read_jsonl(tmp_path / "run/rollouts.jsonl")
    longest = max(len(r["prompt_ids"]) + len(r["completion_ids"]) for r in rollout if r["step"] == 1)
    assert 16 < least <= longest + 8 and printed.out.count("trying again") == 4, "200, 100, 50, 25, a row"
    assert latest_checkpoint(tmp_path / "run").name == "step-00000001"


@pytest.mark.parametrize("where,rows", [("step", 16), ("evaluation", 8)])
def test_sampling_that_finds_no_memory_samples_fewer_at_once_from_then_on_and_the_same(tmp_path, monkeypatch, capsys, flags, where, rows):
    """It fails when some tokens are drawn."""
    run = start_run(tmp_path, *flags, "--generation_batch_size", "64", "--eval_limit", "8")
    examples = next(run.batches)

    def sample():
        return train.sample_groups(run, examples).rollout.completion_ids.tolist() if where == "step" else evaluate_held_out(run)

    def fail_in_the_third_pass(number):
        if number == 3:
            raise OUT_OF_MEMORY[1]

    whole = sample()
    capsys.readouterr()
    watch_calls(monkeypatch, PrefixCache, "forward", fail_in_the_third_pass)
    assert sample() == whole and run.config.grpo.generation_batch_size == rows // 2
    assert f"--generation_batch_size {rows} -> {rows // 2}, trying again" in " ".join(capsys.readouterr().out.split())


def test_weights_that_are_not_finite_are_one_line(tmp_path, folder, capsys):
    model, tokenizer = load_any_policy(train.ModelConfig(model_path=folder))
    model.get_output_embeddings().weight.data[7] = torch.nan
    save_any_policy(model, tokenizer, tmp_path / "damaged")
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "run", "--use_grpo", "--model_path", str(tmp_path / "damaged"))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and line.startswith("train.py: the model's logits are not finite: its weights are damaged")


# ---- signals and exit codes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_closed_terminal_ends_the_step_and_saves(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        flags = [*QUICK, "--output_dir", str(tmp_path / "run"), *"--use_grpo --save_steps 1 --max_steps 1000 --num_epochs 99".split()]
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
            os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *flags])
        finally:
            os._exit(1)
    reader = threading.Thread(target=read_until_closed, args=[terminal], daemon=True)
    reader.start()
    while num_steps(tmp_path / "run") < 3:
        assert reader.is_alive()
        time.sleep(0.05)
    os.close(terminal)                                    # SIGHUP, and EIO for what is printed from then on
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    last = read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["step"]
    state = torch.load(latest_checkpoint(tmp_path / "run") / "state.pt", weights_only=True)
    assert last < 1000 and state["progress"]["step"] == last


def read_until_closed(terminal):
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_signals_of_a_batch_system_stop_after_the_step_and_an_ignored_one_does_not(number):
    """SIGHUP is ignored, as under nohup, whose runs a closed terminal does not end."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop_requested:
            assert not stop_requested()
            signal.raise_signal(number)
            assert stop_requested() == (number != signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_to_one_process_of_several_stops_all(tmp_path):
    """Also to the second one of a tensor-parallel pair, which is not the first of its slice."""
    (tmp_path / "ranks.py").write_text(
        "import signal\nfrom engine.devices import best_device, process_rank\nfrom runs.exits import stop_on_signal\n"
        "best_device('cpu')\nwith stop_on_signal() as stop_requested:\n    before = stop_requested()\n"
        "    if process_rank() == 1:\n        signal.raise_signal(signal.SIGTERM)\n    print(before, stop_requested())\n")
    done = Ranks(2, tmp_path / "ranks.py").wait(60)
    assert [line for line in done.stdout.splitlines() if "[Gloo]" not in line] == ["False True"] * 2, done.stderr     # of torch 2.9


def test_in_another_thread_signals_are_left_alone():
    def requested() -> bool:
        with stop_on_signal() as stop_requested:
            return stop_requested()

    with ThreadPoolExecutor() as pool:
        assert not pool.submit(requested).result()


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_with_one_line(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef wait(completions, **columns):\n    time.sleep(60)\n")
    flags = [*QUICK, "--output_dir", str(tmp_path / "run"), "--use_grpo", "--reward_functions", f"{slow}:wait",
             "--cold_start_steps", "2", "--eval_limit", "0", "--save_steps", "1"]
    process = Ranks(1, "train.py", *flags)
    while num_steps(tmp_path / "run") < 2:
        assert process.returncode is None
        time.sleep(0.05)
    time.sleep(2)                                         # now it waits in the reward function
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.returncode is None                         # the step has not ended
    process.send_signal(signal.SIGINT)
    error = process.wait(20).stderr
    assert process.returncode == 130
    assert error.strip().splitlines()[-1].startswith("train.py: stopped at once; --resume continues")
    assert latest_checkpoint(tmp_path / "run").name == "step-00000002"


@pytest.mark.parametrize("error,code,shown", [
    (RunError("wrong"), 1, "train.py: wrong"), (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left"),
    (RatioError("wrong"), 1, "train.py: wrong"), (LogitsError("wrong"), 1, "train.py: wrong"),
    (KeyboardInterrupt(), 130, "train.py: stopped at once; --resume continues"), (ValueError("--seed=x: wrong"), 2, "train.py: error: --seed=x: wrong"),
    (OUT_OF_MEMORY[0], 1, "lower --generation_batch_size"), (OUT_OF_MEMORY[1], 1, "lower --generation_batch_size"),
    (RuntimeError("a bug"), None, ""), (KeyError("a bug"), None, ""),
], ids=repr)
def test_what_is_no_fault_of_the_program_ends_it_with_one_line_and_its_exit_code(error, code, shown, capsys):
    with pytest.raises(SystemExit if code else type(error)) as stop, exit_on_errors("train.py", mistakes=(ValueError,)):
        raise error
    printed = capsys.readouterr().err
    assert shown in printed and len(printed.splitlines()) == (code is not None) and getattr(stop.value, "code", None) == code


def test_debug_prints_the_traceback_before_the_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    for program, flags in (train.main, ["--model_path", str(tmp_path)]), (main, ["--question", "q", "--model_path", str(tmp_path)]):
        for more, calls in ([], 0), (["--debug"], 1):
            monkeypatch.setattr(sys, "argv", ["program", *flags, *more])
            with pytest.raises(SystemExit) as stop, exit_on_errors("infer.py"):
                program(sys.argv[1:])
            *traceback, line = capsys.readouterr().err.splitlines()
            assert stop.value.code == 2 and "cannot be loaded" in line and "\n".join(traceback).count("in load_tokenizer") == calls


@pytest.mark.slow
def test_a_run_whose_gradients_are_not_finite_skips_saves_and_stops(tmp_path, monkeypatch, capsys):
    real, calls = Policy.forward_backward, []

    def broken(policy, *args, **options):
        losses = real(policy, *args, **options)
        calls.append(1)
        if len(calls) in (2, 4, 5, 6):
            policy.model.get_output_embeddings().weight.grad.fill_(float("nan"))
        return losses

    monkeypatch.setattr(Policy, "forward_backward", broken)
    flags = (
        "--use_grpo --cold_start_steps 2 --max_steps 9 --eval_limit 0 --learning_rate 1e-3 "
        f"--reward_functions {length_reward(tmp_path)}"
    )
    with pytest.raises(SystemExit) as stop:
        run_folder(tmp_path / "out", *flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 1 and len(error.strip().splitlines()) == 1
    assert "3 steps in a row had a loss or gradient that is not finite" in error and "step-00000006" in error
    lines = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert [m["skipped"] for m in lines] == [0, 1, 0, 1, 1, 1] and lines[1]["grad_norm"] is None
    skipped = read_jsonl(tmp_path / "out/skipped.jsonl")
    assert [record["step"] for record in skipped] == [2] * 4 + [4] * 16 + [5] * 16 + [6] * 16
    assert {record["phase"] for record in skipped[:4]} == {"cold_start"}
