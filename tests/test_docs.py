"""What the README and the docs say must be so: files, flags, sizes, and the commands' settings."""

import ast
import dataclasses
import re
import runpy
import sys
from pathlib import Path
from typing import get_args

import pytest

import grpo
from config import GRPOConfig
from runs.command_line import HEADINGS, SECTIONS, parse_config
from grpo import AGGREGATIONS, BASELINES, LOSSES, LOSS_TYPES
from runs.records import read_jsonl
from test_grpo import SCALES, formulas

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]


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
    for command in re.findall(r"^ {4}python train\.py (.*)$", text, flags=re.MULTILINE):
        words = [word.strip("\"'") for word in re.findall(r'"[^"]*"|\S+', command)]
        if "--resume" not in words:                       # that one asks for a run folder
            parse_config(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page):
    names = {field.name for section in SECTIONS for field in dataclasses.fields(section)}
    names |= {"question", "chat", "questions", "answers", "evaluate", "merge_into", "report", "against"}          # of infer.py
    names |= {"samples", "against_model", "json"}
    names |= {"seeds", "kills", "lint"}                                          # of bench/ and rewards.py
    names |= {"nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint"}       # of torchrun
    names |= {"requirement"}                                                     # of pip
    names |= {"train", "only"}                                                   # of docs/figures.py and docs/left_out.py
    names |= {"no_use_kl_penalty"}                                               # made by transformers' parser
    for flag in re.findall(r"--([a-z_0-9]+)", page.read_text()):
        assert flag in names or flag == "help", flag


def test_the_page_of_all_flags_is_what_config_says():
    page = runpy.run_path(str(ROOT / "docs/make_configuration.py"))["page"]()
    assert (ROOT / "docs/configuration.md").read_text() == page, "run python docs/make_configuration.py"


def test_every_figure_is_drawn_and_shown_and_the_curves_numbers_are_in_the_text(monkeypatch):
    module = runpy.run_path(str(ROOT / "docs/figures.py"))
    kept, drawn = ROOT / "docs/figures", []
    monkeypatch.setattr("sys.argv", ["figures.py"])
    module["main"].__globals__["save"] = lambda figure, name: drawn.append(name)
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


def test_help_shows_every_flag_under_a_heading_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and set(HEADINGS.values()) <= set(lines)
    for section in SECTIONS:
        for field in dataclasses.fields(section):
            at = next(number for number, line in enumerate(lines) if line.startswith(f"  --{field.name} "))
            said = " ".join(" ".join(lines[at : at + 3]).split())                # a flag takes up to three lines
            assert field.metadata["help"][:40] in said, field.name
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert any(line.rstrip().endswith(f"[{field.default}]") for line in lines[at : at + 3]), field.name


def test_sizes_stay_what_the_readme_says():
    paths = [path for path in [*ROOT.glob("*.py"), *ROOT.glob("engine/[a-z]*.py")] if path.name != "test_grpo.py"]
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert sizes["train.py"] <= 330, "about 300 lines: move a concern out"
    text = (ROOT / "README.md").read_text()
    core = re.findall(r"\[([\w/]+\.py)\]", text.partition("These eleven are")[2].partition("Around them")[0])
    assert len(core) == 11 and sum(sizes[name] for name in core) <= 3150, {name: sizes[name] for name in core}
    assert {name for name in sizes if f"[{name}]({name})" not in text} == set(), "every file is in the table"


def test_the_algorithm_imports_torch_alone_and_every_public_name_has_a_docstring():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("engine/*.py")]:
        tree = ast.parse(path.read_text())
        imported = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path.name != "grpo.py" or imported - set(sys.stdlib_module_names) == {"torch"}
        if not path.name.startswith("test"):
            public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            assert not [n.name for n in public if not ast.get_docstring(n)], path


def test_the_page_on_the_algorithm_has_every_formula_of_the_docstrings_and_tests_that_exist():
    page = (ROOT / "docs/algorithm.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    first_cells = {row[0].strip("| `") for row in rows}
    variants = {*LOSS_TYPES, *AGGREGATIONS, *BASELINES, *SCALES, *get_args(GRPOConfig.__annotations__["kl_estimator"])} - {""}
    assert variants <= first_cells, variants - first_cells
    shown = {row[0].strip("| `"): row[1].strip("`") for row in rows}
    functions = [
        grpo.compute_group_advantages, grpo.aggregate, grpo.kl_penalty, grpo.value_loss, grpo.generalized_advantage_estimation,
        grpo.overlong_penalty, grpo.adapt_kl_coefficient, grpo.clipped_ratio, *(loss for loss, _ in LOSSES.values()),
    ]
    for function in functions:
        for name, formula in formulas(function):
            if (name, formula) not in {("baseline", "b"), ("scale", "s")}:       # the heads of two columns
                assert formula in (page if not name else shown[name]), f"{function.__name__} {name}: {formula}"
    for name, (loss, aggregation) in LOSSES.items():
        (row,) = [row for row in rows if row[0].strip("| `") == name]
        assert row[1].strip("`") == formulas(loss)[0][1] and row[2].strip("`") == aggregation
    tests = "".join(path.read_text() for path in [ROOT / "test_grpo.py", *(ROOT / "tests").rglob("test_*.py")])
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    for test in named:
        assert f"def {test}(" in tests, test
