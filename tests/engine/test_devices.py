"""Slices and batches of several processes, exceptions that are sent between them, and devices that are not there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import exhaustive, start_run

from analysis.chat import ChatModel
from analysis.infer_flags import parse_arguments
from config import GRPOConfig, ModelConfig
from engine import devices, ranks
from engine.precision import resolve_precision
from engine.devices import best_device
from engine.ranks import ManyRanks, picklable
from reward_functions.calling import RewardError


def test_shares_and_rounds_cover_everything_once(monkeypatch):
    these = ManyRanks(torch.device("cpu"))
    for size in 1, 2, 3, 5:
        monkeypatch.setattr(ranks, "num_processes", lambda size=size: size)
        for n in range(12):
            things, shares, counted = list(range(n)), [], []
            lengths = set()
            for rank in range(size):
                monkeypatch.setattr(ranks, "process_rank", lambda rank=rank: rank)
                shares += these.slice(things)
                mine = list(these.steps(things))
                lengths.add(len(mine))
                counted += [thing for thing, counts in mine if counts]
            assert shares == things and sorted(counted) == things and len(lengths) == 1


def test_what_one_process_raises_can_be_told_to_the_others():
    class Local(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    told = picklable(RewardError("no good"))
    assert type(told) is RewardError and str(told) == "no good"
    for odd in Local("no good", 2), Local(lambda: 0, 2):
        assert type(picklable(odd)) is RuntimeError and str(picklable(odd)).startswith("Local: ")


# ---- GPUs, as torch would describe them ----------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch):
    """A function that lets torch report a GPU of a kind, or none. What is set for it is undone."""
    before = torch.backends.cuda.matmul.fp32_precision
    monkeypatch.delenv("PJRT_DEVICE", raising=False)

    def report(kind):
        device = kind and torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: (check_available and device) or None)

    yield report
    torch.backends.cuda.matmul.fp32_precision = before


KINDS = None, "cuda", "mps", "xpu"


@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_that_torch_reports_is_used_unless_the_cpu_is_wanted_and_cuda_multiplies_in_tf32(accelerator, kind):
    accelerator(kind)
    before = torch.backends.cuda.matmul.fp32_precision
    assert best_device("cpu") == torch.device("cpu") and torch.backends.cuda.matmul.fp32_precision == before != "tf32"
    assert best_device() == best_device("auto") == torch.device(kind or "cpu")
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if kind == "cuda" else before)


@pytest.mark.parametrize("kind,expected,backends", [
    (None, "cpu", "cpu:gloo"), ("cuda", "cuda:3", "cpu:gloo,cuda:nccl"), ("mps", "cpu", "cpu:gloo"), ("xpu", "xpu:3", "cpu:gloo,xpu:xccl")])
def test_every_process_of_torchrun_has_a_gpu_and_the_backend_that_torch_has_for_it(accelerator, monkeypatch, kind, expected, backends):
    chosen, groups = [], []
    accelerator(kind)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(devices.dist, "init_process_group", groups.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    if expected != "cpu":
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
        with pytest.raises(ValueError, match=r"^--nproc_per_node: more processes than GPUs here .3.; or add --device cpu$"):
            best_device()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert best_device() == torch.device(expected)
    assert groups == [backends] and chosen == [torch.device(expected)] * (expected != "cpu")


def test_memory_is_that_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 3e9 if device.type == "xpu" else 4e9)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5e9)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 6e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1e9, 7e9))
    assert [devices.peak_memory_gb(torch.device(kind)) for kind in KINDS[1:]] == [4, 5, 3]
    assert [devices.available_gb(torch.device(kind)) for kind in KINDS[1:3]] == [7, 6]
    assert 0 < devices.peak_memory_gb(torch.device("cpu")) < devices.available_gb(torch.device("cpu"))


def test_the_cpu_can_be_asked_for_in_training_and_in_use(accelerator, tmp_path):
    accelerator("mps")
    assert start_run(tmp_path, "--device", "cpu").device == torch.device("cpu")
    args = parse_arguments(["--question", "1+1=?", "--device", "cpu"])
    assert ChatModel.load(ModelConfig(device=args.device), GRPOConfig(), seed=0).engine.device == torch.device("cpu")


# ---- run_tpu_training.sh and PJRT_DEVICE ----------------------------------------------------------------------------


def run_script(folder, *flags, **env):
    """The script on this interpreter: exit code, lines of output, lines of errors."""
    env = {"PYTHON": sys.executable, "XLA_PERSISTENT_CACHE_PATH": str(folder / "cache"), **env}
    inherited = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    script = Path(__file__).parents[2] / "run_tpu_training.sh"
    done = subprocess.run([script, *flags], env=inherited | env, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
@pytest.mark.parametrize("device", ["TPU", exhaustive("CPU")])
def test_the_script_without_torch_xla_ends_with_one_line(tmp_path, device):
    chosen = {} if device == "TPU" else {"PJRT_DEVICE": device}
    code, printed, errors = run_script(tmp_path, "--use_grpo", "--output_dir", str(tmp_path / "run"), **chosen)
    assert (code, printed, len(errors)) == (2, [], 1) and not (tmp_path / "run").exists(), errors
    assert f"train.py: error: PJRT_DEVICE={device}: No module named 'torch_xla'; see requirements-tpu.txt, or" in errors[0]


@pytest.mark.parametrize("flag,code", [("-h", 0), ("--help", 0), ("--use_grppo", 2)])
def test_help_and_mistakes_of_the_script_need_no_device(tmp_path, flag, code):
    found, printed, errors = run_script(tmp_path, flag)
    assert found == code and (any("--use_grpo" in line for line in printed) if code == 0 else len(errors) == 1), errors


@pytest.mark.parametrize("device,chips,failure,message", [
    ("TPU", 0, None, r"^PJRT_DEVICE=TPU: this machine has no TPU; PJRT_DEVICE=CPU runs XLA without one$"),
    ("TPU", 4, OSError("libtpu not found"), "^PJRT_DEVICE=TPU: libtpu not found; see requirements-tpu.txt, or start train.py without"),
    ("TPU", 4, RuntimeError("TPU initialization failed: busy\nC++ stack"), "^PJRT_DEVICE=TPU: TPU initialization failed: busy; see"),
    ("CPU", 0, None, None),
])
def test_an_xla_device_that_is_not_there_is_one_line(monkeypatch, device, chips, failure, message):
    def count():
        if failure:
            raise failure
        return 1

    parts = {
        "tpu": SimpleNamespace(num_available_chips=lambda: chips), "runtime": SimpleNamespace(global_runtime_device_count=count),
        "backends": SimpleNamespace(set_mat_mul_precision=lambda name: None), "device": lambda: devices.torch.device("cpu"),
    }
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(**parts))
    monkeypatch.setenv("PJRT_DEVICE", device)
    if message is None:
        assert devices.xla_device.__wrapped__() == devices.torch.device("cpu")
        return
    with pytest.raises(ValueError, match=message) as error:
        devices.xla_device.__wrapped__()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device,plugin,supported,precision", [
    ("cpu", None, True, "float32"), ("cuda", None, True, "bfloat16"), ("cuda", None, False, "float32"),
    ("xla", "TPU", True, "bfloat16"), ("xla", "CPU", True, "float32"),
])
def test_bfloat16_where_a_device_computes_in_it(monkeypatch, device, plugin, supported, precision):
    monkeypatch.setenv("PJRT_DEVICE", plugin or "")
    module = SimpleNamespace(is_bf16_supported=lambda including_emulation=True: supported or including_emulation)
    monkeypatch.setattr(torch, "get_device_module", lambda d: module if d.type == "cuda" else torch.cpu)
    assert resolve_precision("auto", torch.device(device)) == precision
    assert resolve_precision("float16", torch.device(device)) == "float16"
