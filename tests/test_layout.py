"""The direction of imports: nothing imports from a layer above its own, and no modules import each other in a circle."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from project_files import PACKAGES, files_of_the_project, modules_of_the_program

ROOT = Path(__file__).parents[1]
LAYERS = [                      # modules and packages, the lowest layer first
    ("grpo", "logprobs", "rewards", "data", "config"),
    ("model", "sample"),
    ("experience",),
    ("engine",),
    ("sources", "reward_functions", "environments"),
    ("runs", "analysis"),
    ("train", "infer"),
    ("analysis.explain", "analysis.replay"),              # commands that call the functions of train.py
]
EXCEPTION = "rewards", "analysis.lint_command"            # `python rewards.py --lint` calls the linter
FILES_OF_A_PROJECT = {
    "README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "run_tpu_training.sh",
    "requirements.txt", "requirements-dev.txt", "requirements-tpu.txt", "requirements-vllm.txt", "requirements-vllm-cpu.txt",
}


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


def upward(graph):
    return [(a, b) for a, targets in graph.items() for b in targets if layer_of(b) > layer_of(a) and (a, b) != EXCEPTION]


def test_no_module_imports_from_a_layer_above_its_own_and_none_in_a_circle():
    known = modules()
    graph = {name: imports(path.read_text(), known) for name, path in known.items()}
    assert upward(graph) == []
    graph["rewards"] -= {EXCEPTION[1]}
    list(TopologicalSorter(graph).static_order())         # raises CycleError, which names the circle


def test_the_top_level_has_the_core_two_programs_a_test_and_the_files_of_every_project():
    files = files_of_the_project()
    top = {path.stem for path in files if path.parent == ROOT and path.suffix == ".py"}
    assert top == {"test_grpo", *(name for names in LAYERS for name in names if name not in PACKAGES and "." not in name)}
    others = {path.name for path in files if path.parent == ROOT and path.suffix != ".py" and path.name[0] != "."}
    assert others == FILES_OF_A_PROJECT
    assert {path.parent.name for path in files if path.name == "__init__.py"} == set(PACKAGES)


STEP = ["sample_completions", "compute_rewards_for_completions", "compute_group_advantages", "log_probs", "policy_loss"]


def test_every_module_has_tests_of_its_name_or_a_row_in_the_table_and_these_exist():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The tests of a file\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\S+\.py.*) \| (.+) \|$", section, re.M))
    of_table = {file: row.split(", ") for files, row in rows.items() for file in files.split(", ")}
    for path in modules_of_the_program():
        name = path.relative_to(ROOT)
        tests = of_table.pop(str(name), None) or [str(name.parent / f"test_{name.stem}")]
        for test in tests:
            assert (ROOT / f"tests/{test}.py").exists() or test == "test_grpo", f"{name}: {test}"
    assert not of_table, "no such modules"


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


def calls_of(source, function):
    """Names that a function calls, methods too, in the order of the text; functions of the same file with what they call."""
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}

    def visit(node, found):
        for child in ast.iter_child_nodes(node):
            visit(child, found)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found.append(getattr(node.func, "id", None) or node.func.attr)
            for name in node.func, *node.args[:1]:        # a function may be passed to what calls it
                if isinstance(name, ast.Name) and name.id in functions:
                    visit(functions[name.id], found)
        return found

    return visit(functions[function], [])


def test_the_step_calls_the_five_functions_in_their_order_and_asserts_shape_and_centre():
    source = (ROOT / "train.py").read_text()
    assert list(dict.fromkeys(name for name in calls_of(source, "grpo_training_step") if name in STEP)) == STEP
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    asserted = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "require"]
    assert any("rewards.shape == (P, G)" in test for test in asserted) and any("off_center" in test for test in asserted)


def test_no_public_function_or_class_has_the_name_of_another_one():
    """Two names are those of programs; load_examples of sources/ reads what that of data.py leaves out."""
    places = {}
    for path in modules_of_the_program():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() <= {"main", "run_command_line", "load_examples"}, twice
