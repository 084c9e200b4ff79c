"""What the README and the docs say must be so: files, flags, sizes, and the commands' settings."""

import ast
import dataclasses
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

import grpo
from analysis.infer_flags import parse_arguments
from config import GRPOConfig, ModelConfig, table_keys
from data import load_examples
from config import SECTIONS
from runs.command_line import parse_config
from grpo import LOSSES
from engine.policy import load_policy
from runs.folder import read_jsonl
from formula_language import formulas
from project_files import modules_of_the_program

ROOT = Path(__file__).parents[1]
PROGRAM = modules_of_the_program()
PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "dev/five-systems.md")),
         *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        to = page.parent / name if name else page
        assert target.startswith("http") or to.exists(), target
        if anchor and not target.startswith("http"):
            headings = re.findall(r"^#+ (.*)$", to.read_text(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_train_command_is_accepted(page):
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ {4}(?:[A-Z_]+=\d+ )?(?:python|torchrun .*?) train\.py (.*)$", text, flags=re.MULTILINE):
        words = shlex.split(command, comments=True)
        if "--resume" not in words:                       # it asks for a run folder
            parse_config(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_infer_command_is_accepted(page):
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ {4}python infer\.py (.*)$", text, flags=re.MULTILINE):
        parse_arguments(shlex.split(command, comments=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page):
    names = {field.name for section in SECTIONS for field in dataclasses.fields(section)}
    names |= {"question", "chat", "questions", "answers", "evaluate", "merge_into", "report", "against"}          # of infer.py
    names |= {"samples", "against_model", "json", "limit", "help_all"}
    names |= {"logprobs"}                                                        # of vllm serve
    names |= {"compare", "variant", "rollouts", "seeds", "kills", "lint", "figure"}                                          # of bench/ and rewards.py
    names |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint"}       # of torchrun
    names |= {"folder", "batch_sizes", "jobs", "tiny"}                           # of bench/
    names |= {"requirement", "tb"}                                               # of pip and pytest
    names |= {"train", "keep", "only"}                                           # of docs/figures.py and docs/left_out.py
    names |= {"no_use_kl_penalty", "help_all"}
    text = re.sub(r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL)     # what other systems type
    for flag in re.findall(r"--([a-z_0-9]+)", text):
        assert flag in names or flag == "help", flag


def test_every_reason_to_skip_a_test_is_in_the_table_of_the_contributing_page():
    found = set()
    for path in ROOT.glob("tests/**/*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("pytest.skip", "pytest.mark.skipif", "pytest.importorskip"):
                (reason,) = [word.value for word in call.keywords if word.arg == "reason"] or call.args[:1]
                found.add((reason.values[0] if isinstance(reason, ast.JoinedStr) else reason).value.strip())
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Skipped tests\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    assert set(re.findall(r"`(.*?)`", " ".join(rows))) == found


def test_the_page_of_all_flags_is_what_config_says():
    page = runpy.run_path(str(ROOT / "docs/make_configuration.py"))["page"]()
    assert (ROOT / "docs/configuration.md").read_text() == page, "run python docs/make_configuration.py"


def test_every_figure_is_drawn_and_shown_and_the_curves_numbers_are_in_the_text(monkeypatch):
    module = runpy.run_path(str(ROOT / "docs/figures.py"))
    kept, drawn = ROOT / "docs/figures", []
    monkeypatch.setattr("sys.argv", ["figures.py"])
    module["main"].__globals__["save"] = lambda figure, name, folder=None: drawn.append(name)
    module["main"]()
    assert sorted(drawn) == sorted(path.stem for path in kept.glob("*.svg"))
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("walkthrough", "lecture")}
    assert all(f"figures/{name}.svg" in pages["walkthrough"] for name in drawn)
    ends = [line for line in read_jsonl(kept / "curve.jsonl") if line["phase"] == "eval" and line["step"] in (100, 200)]
    for line in ends:
        text = f"{line['eval_accuracy']:.3f} [{line['eval_accuracy_low']:.3f}, {line['eval_accuracy_high']:.3f}]"
        assert all(text in page for page in pages.values()), text


def test_troubleshooting_looks_at_numbers_and_files_that_there_are():
    metrics, written = (ROOT / "docs/metrics.md").read_text(), (ROOT / "runs/folder.py").read_text()
    looked_at = re.findall(r"^\|[^|]+\|([^|]+)\|", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    names = {name for cell in looked_at for name in re.findall(r"`([a-z_/<>.]+)`", cell)}
    assert len(names) > 20
    for name in names:
        known = name if name.startswith("reward/<") else name.split("/")[0] + "/<function>" if "reward/" in name else name
        assert f"`{known}`" in metrics or (("." in name or "/" in name) and name in written), name


def test_sizes_stay_what_the_readme_says_and_every_room_is_linked():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PROGRAM}
    text = (ROOT / "README.md").read_text()
    core = re.findall(r"^    (\w+\.py) ", text.partition("These ten modules are")[2], flags=re.MULTILINE)
    assert sorted(core) == sorted(name for name in sizes if "/" not in name) and len(core) == 10
    rooms = {name.partition("/")[0] for name in sizes if "/" in name}
    assert {room for room in rooms if f"| [{room}/]({room}) |" not in text} == set(), "every room is in the README"
    assert sizes["train.py"] <= 300, "move a concern out"
    assert sum(sizes[name] for name in core) <= 2900, f"move a concern out of one of them: { {name: sizes[name] for name in core} }"


def functions_of(path):
    """Name -> node of the functions of a file, methods as Class.method, and of its classes."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}": method for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def raises_or_asserts(function):
    return isinstance(function, ast.FunctionDef) and any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Raise) and node.exc is not None)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reject")
        for node in ast.walk(function))


NOT_OF_A_TRAINING_RUN = {       # infer.py, --replay, --explain and the linter; what a reward function or a tool does by itself
    "infer.py", "runs/exit.py", "environments/tools.py",
    *(f"reward_functions/{name}.py" for name in ("arithmetic", "mathematics", "models", "programs", "sandbox")),
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("analysis/*.py")),
}


def test_every_check_of_the_table_exists_and_every_function_that_raises_or_asserts_has_a_row():
    table = (ROOT / "docs/guides.md").read_text().partition("\n## What is checked when\n")[2]
    lines = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| where |")]
    rows = [line.strip("|").split(" | ") for line in lines]
    assert len(rows) > 40 and all(len(row) == 2 for row in rows), [row for row in rows if len(row) != 2]
    listed = set()
    for where, checked in rows:
        pieces = re.findall(r"\[([\w/]+\.py)\]\(\.\./([\w/]+\.py)\)((?:,? `[\w.]+`)+)", where)
        assert pieces and len(re.findall("`", where)) == 2 * sum(piece[2].count("`") // 2 for piece in pieces), (checked, where)
        for shown, file, names in pieces:
            names = re.findall(r"`([\w.]+)`", names)
            assert shown == file and set(names) <= set(functions_of(ROOT / file)), f"{file} has not all of {names}"
            listed |= {(file, name) for name in names}
    missing = {
        (file, name) for file in (str(path.relative_to(ROOT)) for path in PROGRAM) if file not in NOT_OF_A_TRAINING_RUN
        for name, node in functions_of(ROOT / file).items() if raises_or_asserts(node) and name != "Section.reject"
    } - listed
    assert not missing, f"without a row in docs/guides.md: {missing}"


def test_the_result_of_the_readme_is_that_of_the_benchmarks():
    page = (ROOT / "docs/benchmarks.md").read_text().partition("bench/demo_seeds.py")[2].partition("\nSeed 0")[0]
    rows = re.findall(r"^\| \d \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) ", page, flags=re.MULTILINE)
    runs = [[float(figure) for figure in row] for row in rows]
    assert len(runs) == 5
    text, columns = (ROOT / "README.md").read_text(), list(zip(*runs, strict=True))
    assert "| mean | " + " | ".join(f"{sum(column) / 5:.3f}" for column in columns) + " |" in text
    ranges = [f"{min(column):.3f} to {max(column):.3f}" for column in columns]
    assert "| lowest to highest | " + " | ".join(ranges) + " |" in text


def test_the_step_of_the_readme_trains_and_its_functions_are_in_the_files_it_links_to():
    text = (ROOT / "README.md").read_text().partition("<!-- step -->")[2]
    block, links = re.search(r"```py\n(.*?)```\n\n(.*?)\n\n", text, flags=re.DOTALL).groups()
    calls = [node.func for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    called = [function.id for function in calls if isinstance(function, ast.Name)]
    files = re.findall(r"\]\(([\w/]+\.py)\)", links.partition("The step with all options")[0])
    sources = [(ROOT / name).read_text() for name in files]
    ours = [name for name in called if name not in ("len", "int")]
    assert len(block.splitlines()) == 10 and len(ours) == 6
    for name in ours:
        assert any(f"\ndef {name}(" in source for source in sources), name
    assert "\ndef grpo_training_step(" in (ROOT / "train.py").read_text()

    def some_points(completions, **columns):
        return [float(sum(map(ord, completion)) % 10) for completion in completions]

    torch.manual_seed(0)
    model, tokenizer = load_policy(ModelConfig())
    examples = load_examples("arithmetic", limit=4)
    before = [p.detach().clone() for p in model.parameters()]
    names = dict(
        torch=torch, model=model, tokenizer=tokenizer, examples=examples, prompts=[e["prompt"] for e in examples], step=0,
        config=GRPOConfig(num_completions_per_prompt=4, generation_max_length=8), functions=[some_points], weights=[1.0],
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), max_tokens_per_forward=64,
    )
    for name in ours:
        module = next(file for file, source in zip(files, sources, strict=True) if f"\ndef {name}(" in source)
        exec(f"from {module.removesuffix('.py').replace('/', '.')} import {name}", names)
    exec(compile(block, "README.md", "exec"), names)
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


def test_the_algorithm_imports_torch_alone_and_every_public_name_has_a_docstring():
    for path in PROGRAM:
        tree = ast.parse(path.read_text())
        imported = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path.name != "grpo.py" or imported - set(sys.stdlib_module_names) == {"torch"}
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
        assert not [n.name for n in public if not ast.get_docstring(n)], path


def test_the_page_on_the_algorithm_has_every_formula_of_the_docstrings_and_tests_that_exist():
    page = (ROOT / "docs/algorithm.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    first_cells = {row[0].strip("| `") for row in rows}
    variants = {*LOSSES, *(key for table in ("aggregations", "baselines", "scales") for key in table_keys(table)), *get_args(GRPOConfig.__annotations__["kl_estimator"])} - {""}
    assert variants <= first_cells, f"docs/algorithm.md has no row for {variants - first_cells}"
    shown = {row[0].strip("| `"): row[1].strip("`") for row in rows}
    functions = [
        grpo.compute_group_advantages, grpo.aggregate, grpo.kl_penalty, grpo.value_loss, grpo.generalized_advantage_estimation,
        grpo.overlong_penalty, grpo.adapt_kl_coefficient, grpo.token_loss, *(loss.per_token for loss in LOSSES.values()),
    ]
    for function in functions:
        for name, formula in formulas(function):
            if (name, formula) not in {("baseline", "b"), ("scale", "s")}:       # the heads of two columns
                assert formula in shown.get(name, page), f"{function.__name__} {name}: {formula}"
    for name, loss in LOSSES.items():
        (row,) = [row for row in rows if row[0].strip("| `") == name]
        assert row[1].strip("`") == formulas(loss.per_token)[0][1] and row[2].strip("`") == loss.aggregation
    tests = "".join(path.read_text() for path in [ROOT / "test_grpo.py", *(ROOT / "tests").rglob("test_*.py")])
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    for test in named:
        assert f"def {test}(" in tests, test


@pytest.mark.slow
def test_the_recipes_of_the_contributing_page_pasted_into_a_copy_pass_the_tests_of_formulas(tmp_path):
    """A loss and a normalisation: the lines that the page shows, and nothing else, are put into a copy of the project."""
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__"))
    page, source = (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / "grpo.py").read_text()
    (function, entry), (scale,) = (
        re.search(r"^(def capped.*?\n)\n(LOSSES.*?)\n", page, re.M | re.S).groups(), re.findall(r'^    "mean_distance": .*$', page, re.M))
    (row,) = re.findall(r"^ {8}mean_distance  .*$", page, re.M)
    key, _, value = entry.removeprefix("LOSSES[").partition("] = ")
    for old, new in {
        "@dataclass(frozen=True)\nclass Loss:": f"{function}\n\n@dataclass(frozen=True)\nclass Loss:",
        "LOSSES = {": f"LOSSES = {{\n    {key}: {value},",
        "    scales = {": f"    scales = {{\n    {scale}",
        "        leave_one_out  mean(siblings)      none    1\n": f"        leave_one_out  mean(siblings)      none    1\n{row}\n",
    }.items():
        assert source.count(old) == 1, old
        source = re.sub(re.escape(old) + ".*", lambda found, old=old, new=new: found[0].replace(old, new), source, count=1)
    (tmp_path / "grpo.py").write_text(source)
    algorithm = (ROOT / "docs/algorithm.md").read_text()
    for name, after in ("capped", "| `reinforce` "), ("mean_distance", "| `batch` "):
        (row,) = re.findall(rf"^    (\| `{name}` .*)$", page, re.M)
        algorithm = algorithm.replace(after, f"{row}\n{after}", 1)
    (tmp_path / "docs/algorithm.md").write_text(algorithm)
    checks = ["test_grpo.py", f"tests/test_docs.py::{test_the_page_on_the_algorithm_has_every_formula_of_the_docstrings_and_tests_that_exist.__name__}"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *checks], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    program = "from config import *; print(GRPOConfig(advantage_scale='mean_distance', loss_type='capped', loss_options=['cap=4']).loss)"
    used = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    assert "'cap': 4.0" in used.stdout, used.stderr
