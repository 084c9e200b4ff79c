"""Slices of several processes, GPUs as torch reports them, errors for want of memory."""

import importlib.util
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from engine import devices, host
from engine.models import resolve_precision
from engine.devices import Ranks, best_device
from engine.errors import RunError, is_out_of_memory


def test_slices_cover_everything_once_and_differ_by_at_most_one(monkeypatch):
    for size, together in product((1, 2, 3, 5), (1, 2)):
        ranks = Ranks(together)                           # with tp=2, two processes have one slice
        monkeypatch.setattr(devices, "num_processes", lambda processes=size * together: processes)
        for n in range(12):
            slices = []
            for rank in range(size * together):
                monkeypatch.setattr(devices, "process_rank", lambda rank=rank: rank)
                slices.append(ranks.slice(list(range(n))))
            assert slices[::together] == slices[together - 1 :: together]
            slices = slices[::together]
            assert [item for part in slices for item in part] == list(range(n)) and max(map(len, slices)) - min(map(len, slices)) <= 1


# ---- GPUs, as torch would describe them ----------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch, matmul_precision):
    """A function that lets torch report a GPU of a kind, or none. What is set for it is undone."""
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(devices, "chosen_device", "auto")

    def report(kind):
        device = kind and torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: (check_available and device) or None)

    return report


@pytest.mark.parametrize("kind", [None, "cuda", "mps", "xpu"])
def test_the_gpu_that_torch_reports_is_used_unless_the_cpu_is_wanted_and_cuda_multiplies_in_tf32(accelerator, kind):
    accelerator(kind)
    before = torch.get_float32_matmul_precision()
    assert best_device("cpu") == torch.device("cpu") and torch.get_float32_matmul_precision() == before == "highest"
    assert best_device() == torch.device("cpu"), "as in the last call"
    assert best_device("auto") == best_device() == torch.device(kind or "cpu")
    assert torch.get_float32_matmul_precision() == ("high" if kind == "cuda" else before)


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


# ---- a busy machine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy,threads", [
    ([0.1, 0.2], [4, 4]), ([1, 1], [3, 3]), ([1.4, 0.7, 0.3], [3, 3, 4]), ([4, 0], [1, 4]), ([2.8, 3.3, 2], [1, 1, 2]), ([-1, 0.5], [4, 4])])
def test_threads_leave_cores_to_others_while_they_use_them(monkeypatch, busy, threads):
    """Seconds of a core that others have used in each second. Core 4 is not ours: it is always busy."""
    clock, others = 0, 0

    def cpu_times(percpu):
        used = others + 2 * clock                         # this process uses two cores
        return [SimpleNamespace(user=used * share, system=used * (0.25 - share)) for share in (0.1, 0.2, 0.05, 0.15)] + [
            SimpleNamespace(user=clock, system=0)]

    monkeypatch.setattr(host.psutil, "cpu_times", cpu_times)
    child = SimpleNamespace(cpu_times=lambda: (0.25 * clock, 0, 0.25 * clock, 0, 99))        # and a child of it that has ended
    process = SimpleNamespace(cpu_times=lambda: (clock, 0.25 * clock, 0.25 * clock, 0, 99), children=lambda recursive: [child] * recursive)
    monkeypatch.setattr(host.psutil, "Process", lambda: process)
    monkeypatch.setattr(host.time, "monotonic", lambda: clock)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    chosen, printed = [4], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = host.IdleCores()
    for used, expected in zip(busy, threads):
        clock, others = clock + 0.2, others + 5           # too short to tell
        cores.choose_threads(pytest.fail)
        clock, others = clock + 0.8, others - 5 + used
        cores.choose_threads(printed.append)
        assert chosen[-1] == expected
    assert len(printed) == len(chosen) - 1 and all("others use" in line for line in printed)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setattr(host, "used_seconds", lambda: pytest.fail("all processes were walked"))
    clock, others = clock + 1, others + 4
    cores.choose_threads(pytest.fail)


@pytest.mark.parametrize("measured", [lambda percpu: [], lambda percpu: Path("/no/such/file").read_text()])
def test_threads_stay_where_the_load_of_the_cores_is_not_known(monkeypatch, measured):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(host.psutil, "cpu_times", measured)                   # a container may number its cores otherwise
    cores = host.IdleCores()
    cores.before = cores.before - 1
    cores.choose_threads(pytest.fail)


# ---- TPUs, precision, memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
def test_the_script_without_torch_xla_ends_with_one_line(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    env |= {"PYTHON": sys.executable, "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache")}
    script, flags = ROOT / "run_tpu_training.sh", ["--use_grpo", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([script, *flags], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and not (tmp_path / "run").exists(), done.stderr
    assert "train.py: error: PJRT_DEVICE=TPU: No module named 'torch_xla'; see requirements-tpu.txt, or" in done.stderr


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


def test_an_allocation_that_fails_is_out_of_memory_on_every_device():
    with pytest.raises(RuntimeError) as on_cpu:
        torch.empty(2**50)
    for error in (
        on_cpu.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError(
            "MPS backend out of memory (MPS allocated: 9 GB)"), RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 1.5G"),
    ):
        assert is_out_of_memory(error), error
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(RunError("out of memory after step 3"))
