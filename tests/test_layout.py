"""
The direction of imports: nothing imports from a layer above its own, and none in a circle; how many files a step reaches.

The core stands alone: it imports itself and libraries, and trains in an empty folder as it does here.
"""

import ast
import hashlib
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT, run_process, start_run

import train
from config import ModelConfig
from model import load_policy

LAYERS = [                      # modules and packages, the lowest layer first
    ("grpo", "logprobs", "rewards", "data", "config"),
    ("model", "sample"),
    ("policy", "experience"),
    ("engine",),
    ("sources", "reward_functions", "environments"),
    ("runs", "analysis"),
    ("train", "infer"),
    ("analysis.explain",),                                # a command that calls the functions of train.py
]


def modules_of_the_program():
    """The modules at the top, but for the test, and those of the packages."""
    folders = [ROOT, *(ROOT / name for names in LAYERS for name in names if (ROOT / name).is_dir())]
    return sorted(path for folder in folders for path in folder.glob("*.py") if path.name not in ("test_grpo.py", "__init__.py"))


def modules():
    """Name -> path of every module of the program."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules_of_the_program()}


def imported(source):
    """The modules, and what is in modules, that some source imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(module):
    """A module is in the layer that names it, else in that of its package."""
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    return layers.get(module, layers[module.partition(".")[0]])


def test_no_module_imports_from_a_layer_above_its_own_and_none_in_a_circle():
    known = modules()
    graph = {name: imported(path.read_text()) & known.keys() for name, path in known.items()}
    assert [(a, b) for a, targets in graph.items() for b in targets if layer_of(b) > layer_of(a)] == []
    list(TopologicalSorter(graph).static_order())         # raises CycleError, which names the circle


def test_the_installation_declares_every_module_package_and_data_file():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools, project = declared["tool"]["setuptools"], declared["project"]
    known = modules()
    assert set(setuptools["py-modules"]) == {name for name in known if "." not in name}
    assert set(setuptools["packages"]) == {name.partition(".")[0] for name in known if "." in name}
    data = {path for path in ROOT.glob("*/*.html") if (path.parent / "__init__.py").exists()}
    assert data == {ROOT / package / name for package, names in setuptools["package-data"].items() for name in names}
    module, _, function = project["scripts"]["plain-grpo"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_importing_train_loads_what_a_default_run_needs_and_nothing_else():
    done = run_process("-c", "import sys, train; print(*sys.modules)")
    loaded = modules().keys() & set(done.stdout.split())
    chosen = {"engine.vllm_engine", "engine.shared", "engine.adapters", "engine.reference", "environments.conversations"}
    assert not {name for name in loaded if name.startswith("analysis.")} | loaded & chosen
    assert len(loaded) <= 44, sorted(loaded)


def test_a_plain_step_visits_few_files_and_train_py_few_members_of_run(tmp_path):
    run, visited = start_run(tmp_path, "--use_grpo", "--cold_start_steps", "0", "--engine", "plain"), set()
    paths = {str(path): name for name, path in modules().items()}
    sys.setprofile(lambda frame, event, _: visited.add(paths.get(frame.f_code.co_filename)))
    try:
        train.grpo_training_step(run, next(run.batches))
    finally:
        sys.setprofile(None)
    assert {"train", "policy", "experience", "grpo"} < visited and len(visited - {None}) <= 14, visited
    names = [node for node in ast.walk(ast.parse((ROOT / "train.py").read_text())) if isinstance(node, ast.Attribute)]
    members = {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "run"}
    assert len(members) <= 16 and all(hasattr(run, name) for name in members), members


@pytest.mark.slow
def test_the_installed_command_and_imports_work_from_another_folder(tmp_path):
    command = Path(sys.executable).parent / "plain-grpo"
    if not command.exists():
        pytest.skip("not installed: pip install -e .")
    done = subprocess.run([command, "--beta", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "here --kl_penalty_coef" in done.stderr
    code = "import train, grpo; print(train.__file__); print(grpo.compute_group_advantages([[1, 0]]).tolist())"
    done = run_process("-c", code, cwd=tmp_path)
    assert Path(done.stdout.splitlines()[0]).name == "train.py" and "[[0.707" in done.stdout


def test_no_public_function_or_class_has_the_name_of_another_one():
    """But for two names of programs, and in __init__.py load_examples, which reads more sources than that of data.py."""
    places = {}
    for path in modules_of_the_program():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= {"main", "run_command_line"}, twice


# ---- the core --------------------------------------------------------------------------------------------------------

CORE = ["policy", "grpo", "logprobs", "sample", "rewards", "data", "model", "experience", "config"]
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers", "tokenizers"}


def rows_to_copy() -> dict[str, tuple[list[str], set[str]]]:
    """What can be copied -> its files and packages, of the table in the README."""
    table = (ROOT / "README.md").read_text().partition("\n## Copying\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if ".py |" in line or "_calls.py," in line]
    return {name.strip("`"): (re.findall(r"[\w/]+\.py", files), set(re.findall(r"[\w-]+", packages)) - {"none"}) for name, files, packages in rows}


MODEL = """
import torch
from types import SimpleNamespace
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=1)).eval()
"""
COPIED = {                      # what to copy -> a program that calls it
    "compute_group_advantages": "from grpo import compute_group_advantages as f; assert f([[1.0, 0.0, 1.0, 0.0]]).sum() == 0",
    "policy_loss": "import torch, grpo; x = torch.zeros(2, 3); grpo.policy_loss(x, x, torch.ones(2), x == 0)",
    "completion_log_probs": MODEL + """
from logprobs import completion_log_probs
ids, mask = torch.tensor([[5, 6, 7], [8, 9, 1]]), torch.ones(2, 3, dtype=torch.bool)
rollout = SimpleNamespace(prompt_ids=ids[:1], prompt_mask=mask[:1], completion_ids=ids, completion_mask=mask, distribution={})
logits = model(torch.cat([ids[:1].expand(2, 3), ids], dim=1)).logits[:, 2:-1]
torch.testing.assert_close(completion_log_probs(model, rollout).logp, logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0])""",
    "sample_completions_for_prompts": MODEL + """
from sample import sample_completions_for_prompts
config = SimpleNamespace(num_completions_per_prompt=2, generation_max_length=4, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1, bos_token_id=2, decode=str)
assert len(sample_completions_for_prompts(model, tokenizer, [[5, 6], [7]], config, seed=0).completions) == 4""",
    "the step above": MODEL + """
from grpo import compute_group_advantages, policy_loss
from logprobs import completion_log_probs
from rewards import compute_rewards_for_completions
from sample import sample_completions_for_prompts
config = SimpleNamespace(num_completions_per_prompt=4, generation_max_length=4, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
tokenizer, before = SimpleNamespace(pad_token_id=0, eos_token_id=1, bos_token_id=2, decode=str), model.lm_head.weight.clone()
optimizer, prompts, examples = torch.optim.SGD(model.parameters(), lr=1.0), [[5, 6], [7]], [{"prompt": "a"}, {"prompt": "b"}]
step, correctness = 0, lambda completions, **columns: [float(completion.count("3")) for completion in completions]
""" + (ROOT / "README.md").read_text().partition("<!-- step -->\n```py\n")[2].partition("```")[0] + "assert not torch.equal(model.lm_head.weight, before)",
    "phases, data and evaluation too": "import policy, experience, config, model",    # and examples/minimal.py below
    "run_python": "from reward_functions.sandbox import run_python; assert run_python('print(1 + 1)').stdout == '2\\n'",
    "math_equality": "import sys; sys.modules['torch'] = None\nfrom reward_functions.mathematics import math_equality as f\nassert f([r'\\\\boxed{1/2}'], answer=['0.5']) == [1.0]",
}


@pytest.mark.parametrize("name", COPIED)
def test_what_the_readme_says_to_copy_works_in_an_empty_folder_and_needs_no_other_package(tmp_path, name):
    files, packages = rows_to_copy()[name]
    assert rows_to_copy().keys() == COPIED.keys()
    copy(files, tmp_path)
    run(tmp_path, "-c", COPIED[name])
    ours = {file.partition("/")[0].removesuffix(".py") for file in files} | {"reward_functions"}                # only to load examples
    used = {name.partition(".")[0] for file in files for name in imported((ROOT / file).read_text())} - ours - {*sys.stdlib_module_names}
    assert packages == ({"math-verify"} if name == "math_equality" else used)    # torch is imported where tensors are made


@pytest.mark.parametrize("package", ["", "theirs"])
def test_the_sandbox_works_beside_other_files_and_misses_its_list_when_it_is_imported(tmp_path, package):
    folder, module = tmp_path / package, f"{package}.sandbox".lstrip(".")
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "reward_functions/sandbox.py", folder)
    with pytest.raises(AssertionError, match=r"ModuleNotFoundError: No module named '.*system_calls'"):
        run(tmp_path, "-c", f"import {module}")
    shutil.copy(ROOT / "reward_functions/system_calls.py", folder)
    run(tmp_path, "-c", COPIED["run_python"].replace("reward_functions.sandbox", module))


def test_core_files_import_core_files_and_libraries_alone():
    """The file data.py, which others copy alone, needs no library, grpo.py torch."""
    for name in CORE:
        allowed = {"data": set(), "grpo": {"torch"}}.get(name, LIBRARIES | {*CORE})
        found = {module.partition(".")[0] for module in imported((ROOT / f"{name}.py").read_text())}
        assert found <= {*sys.stdlib_module_names} | allowed, name


@pytest.mark.parametrize("options,message", [
    (dict(model_path="some/model"), "--model_path=some/model: only folders of float32 weights are supported"),
    (dict(model_path=".", lora_rank=4), "--lora_rank=4: only folders"), (dict(model_path=".", precision="bfloat16"), "--precision=bfloat16: only folders"),
])
def test_what_the_core_cannot_load_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{message}.*$"):
        load_policy(ModelConfig(**options))


def copy(files: list[str], folder: Path) -> None:
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)


def run(folder: Path, *command: str) -> None:
    """Run Python in a folder. An installation of the project for development is not found there."""
    if folder != ROOT:
        (folder / "sitecustomize.py").write_text(
            "import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]\n"
            f"sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]\n")
    run_process(*command, cwd=folder, PYTHONPATH=str(folder), CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")


@pytest.mark.slow
def test_the_loop_over_the_core_alone_trains_as_train_py_does_bit_for_bit(tmp_path):
    flags = ["--cold_start_steps", "2", "--max_steps", "3", "--seed", "1", "--output_dir"]
    copy(rows_to_copy()["phases, data and evaluation too"][0], tmp_path)
    run(tmp_path, "examples/minimal.py", *flags, "alone")
    run(ROOT, "train.py", "--use_grpo", "--engine", "plain", "--report_to", "none", *flags, str(tmp_path / "whole"))
    alone, whole = (
        hashlib.sha256((tmp_path / name / "final/model.safetensors").read_bytes()).hexdigest() for name in ("alone", "whole"))
    assert alone == whole
