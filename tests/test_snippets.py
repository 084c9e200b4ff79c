"""The Python in the pages: blocks marked `python run` are run in order, a page at a time; all others must at least compile."""

import contextlib
import io
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from project_files import ROOT

from config import ModelConfig

AT_THE_TOP = "README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md"
PAGES = [*(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, kind="python[^\n]*"):
    """The code of a page's blocks, each behind as many empty lines as it has above it, for the line numbers of errors."""
    text = page.read_text()
    found = re.finditer(rf"^```({kind})\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n" * text[: block.start(2)].count("\n") + block[2] for block in found]


RUN = [page for page in PAGES if blocks(page, "python run")]
NUMBER = r"-?\d+\.\d+"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_its_asserts_hold_and_it_prints_what_is_shown(page):
    """The text blocks of a page, if it has some, are what its blocks print: numbers up to their last digit."""
    names, code = {}, blocks(page, "python run")
    assert any("assert " in block for block in code), "nothing that could fail"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in code:
            exec(compile(block, page, "exec"), names)
    shown = "".join(block.lstrip("\n") for block in blocks(page, "text"))
    outputs = printed.getvalue() if shown else "", shown
    words, expected = (re.sub(rf" *{NUMBER}", " number", text) for text in outputs)
    found, right = ([float(number) for number in re.findall(NUMBER, text)] for text in outputs)
    assert words == expected and found == pytest.approx(right, rel=0.01, abs=0.0015)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_python_of_a_page_compiles(page):
    for block in blocks(page):
        signature = block.rstrip().endswith("-> list[float | None]")             # of a function, without its body
        compile(block.rstrip() + ": ...\n" if signature else block, page, "exec")


def test_the_functions_of_the_readme_do_what_it_says(monkeypatch, tmp_path):
    import train

    started, names = [], {}

    def small_train(config, **objects):
        """The run of the page with the built-in model, which needs no download, up to its first step."""
        started.append(config)
        training = replace(config.training, cold_start_steps=0)                   # the built-in model's profile has some
        run = train.set_up(replace(config, model=ModelConfig(), training=training), **objects)
        return run.policy.model, run.policy.tokenizer

    monkeypatch.setattr(train, "train", small_train)
    monkeypatch.chdir(tmp_path)                           # outputs/mine may hold a run
    for block in blocks(ROOT / "README.md"):
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(**names))       # the file of the first block
        exec(compile(block, "README.md", "exec"), names)
    texts = ["<answer>7</answer>", "a" * 50, "a" * 400 + "<answer>7</answer>"]
    assert names["short"](texts, answer=["7"] * 3) == [1.0, 0.0, 0.0]
    (config,) = started
    assert config.training.use_grpo and config.grpo.weights == [1, 0.2]
