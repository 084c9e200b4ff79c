"""The direction of imports: nothing imports from a layer above its own, and none in a circle; how many files a step reaches."""

import ast
import importlib
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import start_run
from project_files import ROOT, modules_of_the_program

import train

LAYERS = [                      # modules and packages, the lowest layer first
    ("grpo", "logprobs", "rewards", "guards", "data", "config"),
    ("model", "sample"),
    ("policy", "experience"),
    ("engine",),
    ("sources", "reward_functions", "environments"),
    ("runs", "analysis"),
    ("train", "infer"),
    ("analysis.explain",),                                # a command that calls the functions of train.py
]


def modules():
    """Name -> path of every module of the program."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules_of_the_program()}


def imports(source, known):
    """Modules of the program that some source imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(known)


def layer_of(module):
    """A module is in the layer that names it, else in that of its package."""
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    return layers.get(module, layers[module.partition(".")[0]])


def test_no_module_imports_from_a_layer_above_its_own_and_none_in_a_circle():
    known = modules()
    graph = {name: imports(path.read_text(), known) for name, path in known.items()}
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
    code = "import sys, train; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = modules().keys() & set(done.stdout.split())
    chosen = {"engine.vllm_engine", "engine.shared", "engine.adapters", "engine.reference", "environments.conversations"}
    assert not {name for name in loaded if name.startswith("analysis.")} | loaded & chosen
    assert len(loaded) <= 43, sorted(loaded)


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
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
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
