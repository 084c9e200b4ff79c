"""What the README and the docs say must be so: files, flags, sizes, and the commands' settings."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from config import SECTIONS, parse_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_train_command_is_accepted(page):
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^ {4}python train\.py (.*)$", text, flags=re.MULTILINE):
        words = [word.strip("\"'") for word in re.findall(r'"[^"]*"|\S+', command)]
        if "--resume" not in words:                       # that one asks for a run folder
            parse_config(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_exists(page):
    names = {field.name for section in SECTIONS for field in dataclasses.fields(section)} | {"question", "evaluate", "seeds"}
    for flag in re.findall(r"--([a-z_]+)", page.read_text()):
        assert flag in names or flag == "help", flag


def test_sizes_stay_what_the_readme_says():
    sizes = {path.name: len(path.read_text().splitlines()) for path in ROOT.glob("*.py") if path.name != "test_grpo.py"}
    assert sizes["train.py"] <= 330, "about 300 lines: move a concern out"
    assert sum(sizes.values()) <= 3600, sizes


def test_the_algorithm_imports_torch_alone_and_every_public_name_has_a_docstring():
    for path in ROOT.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        imported |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path.name != "grpo.py" or imported - set(sys.stdlib_module_names) == {"torch"}
        if not path.name.startswith("test"):
            public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
            assert not [n.name for n in public if not ast.get_docstring(n)], path
