"""The core stands alone: it imports itself and libraries, and trains in an empty folder as it does here."""

import ast
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from project_files import ROOT

from config import ModelConfig
from model import ValueHead, load_policy

CORE = ["policy", "grpo", "logprobs", "sample", "rewards", "data", "guards", "model", "experience", "config"]
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "tokenizers"}


def imports_of(name: str) -> set[str]:
    """The modules at the top of the project and the libraries that a core file imports, wherever in it."""
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {module.partition(".")[0] for module in named | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}}


def test_core_files_import_core_files_and_libraries_alone():
    found = {name: imports_of(name) - LIBRARIES for name in CORE}
    assert found == {
        "grpo": set(), "rewards": set(), "logprobs": set(), "data": {"guards"}, "guards": set(), "config": {"grpo"}, "sample": {"data", "logprobs"}, "model": {"rewards"},
        "experience": {"grpo", "logprobs", "rewards", "sample"}, "policy": {"logprobs", "sample"},
    }
    assert imports_of("data") | imports_of("guards") <= {*sys.stdlib_module_names, "guards"} and imports_of("grpo") <= {*sys.stdlib_module_names, "torch"}


@pytest.mark.parametrize("options,message", [
    (dict(model_path="some/model"), "--model_path=some/model: this loads folders of float32 weights"),
    (dict(model_path=".", lora_rank=4), "--lora_rank=4: this loads"), (dict(model_path=".", precision="bfloat16"), "--precision=bfloat16: this loads"),
])
def test_what_the_core_cannot_load_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{message}.*$"):
        load_policy(ModelConfig(**options))


def test_values_are_0_before_a_value_head_is_trained():
    assert ValueHead(128)(torch.ones(2, 128)).tolist() == [0.0, 0.0]


def run(folder: Path, *command: str) -> None:
    """Run Python in a folder. An installation of the project for development is not found there."""
    if folder != ROOT:
        (folder / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
            f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_loop_over_the_core_alone_trains_as_train_py_does_bit_for_bit(tmp_path):
    flags = ["--cold_start_steps", "2", "--max_steps", "3", "--seed", "1", "--output_dir"]
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/minimal.py", tmp_path / "examples")
    run(tmp_path, "examples/minimal.py", *flags, "alone")
    run(ROOT, "train.py", "--use_grpo", "--engine", "plain", "--report_to", "none", *flags, str(tmp_path / "whole"))
    alone, whole = (
        hashlib.sha256((tmp_path / name / "final/model.safetensors").read_bytes()).hexdigest() for name in ("alone", "whole"))
    assert alone == whole
