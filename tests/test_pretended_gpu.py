"""
The program on a GPU that is not there: tests/pretend_cuda.py enforces CUDA's rules on devices and dtypes, on a CPU build of torch,
and counts launches of kernels and waits of the host. What it cannot tell is in its docstring.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICK, length_reward

import train
from runs.folder import read_jsonl

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def pretend(tmp_path, *command, capability=90) -> str:
    """Run a command as if there were a GPU. Returns the report, which must name no error of device, dtype or kernel."""
    report = tmp_path / "report"
    env = {"PRETEND_REPORT": report, "PRETEND_QUIET": 1, "PRETEND_TRACK_MEMORY": 1, "PRETEND_CC": capability, "PRETEND_ROOT": ROOT}
    done = subprocess.run(
        [sys.executable, "tests/pretend_cuda.py", *map(str, command)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in env.items()})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = report.read_text()
    assert "errors of device, dtype or kernel arguments: 0\n" in text and "no kernel found" not in text, text
    return text


@pytest.mark.parametrize("capability,tests", [
    (90, "(two_steps_learn and (float16 or value_head)) or resumed or cpu or (two_steps_of and (gemma3 or gpt_oss or qwen3_5))"),
    (75, "two_steps_learn and (float16 or value_head) and not bfloat16"),
])
def test_the_tests_for_a_gpu_pass(tmp_path, capability, tests):
    pretend(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py", "-k", tests, capability=capability)


def test_conversations_and_the_other_programs_run(tmp_path):
    chosen = "tests/environments/test_games.py", "tests/environments/test_instances.py", "tests/test_infer.py"
    pretend(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)


@pytest.mark.parametrize("engine,flags", [
    ("shared", "--kl_estimator exact --reference_mode ema --ema_alpha 0.5 --use_value_head"), ("plain", "--kl_estimator exact --lora_rank 4"),
])
def test_a_run_in_float32_is_that_of_the_cpu(tmp_path, engine, flags):
    flags = [
        *QUICK, *"--use_grpo --use_kl_penalty true --max_steps 3 --learning_rate 1e-4 --log_rollouts_every 1".split(), *flags.split(),
        "--engine", engine, "--precision", "float32", "--reward_functions", length_reward(tmp_path),
    ]
    report = pretend(tmp_path, "train.py", *flags, "--output_dir", tmp_path / "gpu")
    train.main([*flags, "--device", "cpu", "--output_dir", str(tmp_path / "cpu")])
    assert counts(report)["optimiser step"][0] > 0        # it did run there
    on_gpu, on_cpu = (read_jsonl(tmp_path / device / "rollouts.jsonl") for device in ("gpu", "cpu"))
    assert [r["completion_ids"] for r in on_gpu] == [r["completion_ids"] for r in on_cpu] != []
    lines = [read_jsonl(tmp_path / device / "metrics.jsonl") for device in ("gpu", "cpu")]
    for line, other in zip(*lines, strict=True):
        for name in {"kl", "policy_loss", "value_loss", "total_loss", "entropy", "grad_norm", "mean_reward"} & other.keys():
            assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def counts(report: str) -> dict[str, tuple[float, float]]:
    """Launches and waits per token, pass or step, by region of the program."""
    rows = re.findall(r"^  (\S.*?) +\d+ +\d+ +([\d.]+) +\d+ +([\d.]+)$", report, re.MULTILINE)
    return {region: (float(launches), float(waits)) for region, launches, waits in rows}


# Two layers of Qwen 3 in bfloat16. Those of transformers are counted too: an eager layer launches about 56 kernels for a token.
MOST = {
    "shared": {"shared: decode": (268, 2), "shared: prefill": (245, 6), "training pass": (325, 10), "training pass, backward": (515, 1)},
    "plain": {"plain: sample_batch": (195, 3.2), "training pass": (260, 14), "training pass, backward": (340, 1)},
}


@pytest.mark.parametrize("engine", MOST)
def test_launches_and_waits_are_no_more_than_they_were(tmp_path, engine):
    subprocess.run([sys.executable, "bench/workloads.py", "qwen3-tiny", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    found = counts(pretend(
        tmp_path, "bench/our_steps.py", "qwen3-tiny", tmp_path, 0, "--precision", "bfloat16", "--engine", engine))
    assert found["optimiser step"] <= (32, 2)
    for region, (launches, waits) in MOST[engine].items():
        assert found[region][0] <= launches and found[region][1] <= waits, (region, found)
