"""
What the README and the docs say must be so: links, files, flags, commands, names.

The Python in the pages: blocks marked `python run` are run in order, a page at a time; all others must at least compile.
"""

import ast
import contextlib
import io
import re
import runpy
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

import grpo
import infer
import train
from config import FLAGS, GRPOConfig, ModelConfig
from grpo import LOSSES, compute_group_advantages
from conftest import ROOT
from test_layout import modules_of_the_program
from runs.command_line import parse_config, parse_infer

PROGRAM = modules_of_the_program()
PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md", "dev/five-systems.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]                # it names flags and programs that are gone
OF_OTHERS = {"logprobs", "nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "requirement", "tb", "help"}
OF_OTHERS |= {"to", "execute", "outtype"}                 # vllm serve, torchrun, pip, pytest, jupyter nbconvert, llama.cpp


def commands(page, program):
    """What follows a program in the indented commands of a page, as words."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(rf"^ {{4}}(?:[A-Z_]+=\d+ )?(?:python|torchrun .*?) {program}(?: (.*))?$", text, flags=re.MULTILINE)
    return [shlex.split(command, comments=True) for command in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        to = page.parent / name if name else page
        assert target.startswith("http") or to.exists(), target
        if anchor and not target.startswith("http"):
            headings = re.findall(r"^#+ (.*)$", to.read_text(), flags=re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], target


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_every_command_of_a_program_is_accepted_and_every_file_that_is_run_is_a_program(page):
    for words in commands(page, r"train\.py"):
        if not {"--resume", "--task"} & {*words}:         # they read files
            parse_config(words)
    for words in commands(page, r"infer\.py"):
        parse_infer(words, "")
    for words in commands(page, r"-m analysis\.explain"):
        parse_config(words)
    names = re.findall(r"python (?:-m )?((?:analysis|bench|docs|examples)[./]\w+)", page.read_text())
    paths = {name: ROOT / f"{name.replace('.', '/')}.py" for name in names}
    programs = {name for name, path in paths.items() if path.exists() and (
        "__main__" in path.read_text() or path.parent.name == "examples")}
    assert paths.keys() == programs


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_every_flag_exists(page):
    programs = [path for name in (".", "runs", "analysis", "bench", "docs") for path in ROOT.glob(f"{name}/*.py")]
    names = {name for path in programs for name in re.findall(r'"--(\w+)"', path.read_text())}
    names |= {*FLAGS, *OF_OTHERS, "help_all"}
    text = re.sub(r"```text\n.*?```", "", page.read_text(), flags=re.DOTALL)     # what other systems type
    unknown = set(re.findall(r"--([a-z_0-9]+)", text)) - names
    assert not unknown


def test_every_figure_is_drawn_and_shown(monkeypatch):
    module = runpy.run_path(str(ROOT / "docs/figures.py"))
    kept, drawn = ROOT / "docs/figures", {}
    monkeypatch.setattr("sys.argv", ["figures.py"])
    module["main"].__globals__["save"] = lambda figure, name, folder=None: drawn.update({name: figure})
    module["main"]()
    assert sorted(drawn) == sorted(path.stem for path in kept.glob("*.svg"))
    lecture, *others = ((ROOT / f"docs/{name}.md").read_text() for name in ("lecture", "walkthrough", "algorithm"))
    assert all(f"figures/{name}.svg" in "".join([lecture, *others]) for name in drawn)
    (shape,) = re.findall(r"^mask (\(\d+, \d+\))", others[0], flags=re.MULTILINE)            # of the walkthrough's rollout
    assert sum(shape in text.get_text() for text in drawn["flow"].axes[0].texts) == 2


def test_troubleshooting_looks_at_numbers_and_files_that_there_are():
    metrics, written = (ROOT / "docs/metrics.md").read_text(), (ROOT / "runs/folder.py").read_text()
    looked_at = re.findall(r"^\|[^|]+\|([^|]+)\|", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    names = {name for cell in looked_at for name in re.findall(r"`([a-z_/<>.]+)`", cell)}
    assert names
    for name in names:
        known = name if name.startswith("reward/<") else name.split("/")[0] + "/<function>" if "reward/" in name else name
        assert f"`{known}`" in metrics or (("." in name or "/" in name) and name in written), name


def test_the_readme_lists_every_file_at_the_top_and_links_every_folder():
    names = {str(path.relative_to(ROOT)) for path in PROGRAM}
    text = (ROOT / "README.md").read_text()
    listed = re.findall(r"^    (\w+\.py) ", text.partition("## Where everything is")[2], flags=re.MULTILINE)
    assert sorted(listed) == sorted(name for name in names if "/" not in name)
    for folder in {name.partition("/")[0] for name in names if "/" in name}:
        assert f"| [{folder}/]({folder}) |" in text, folder


def test_the_functions_of_the_readmes_step_are_in_the_files_it_links_to():
    """The step itself runs in test_layout.py, beside nothing but the files that it needs."""
    text = (ROOT / "README.md").read_text().partition("<!-- step -->")[2]
    block, links = re.search(r"```py\n(.*?)```\n\n(.*?)\n\n", text, flags=re.DOTALL).groups()
    calls = [node.func for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    ours = {function.id for function in calls if isinstance(function, ast.Name)} - {"len", "int"}
    sources = "".join((ROOT / name).read_text() for name in re.findall(r"\]\(([\w/]+\.py)\)", links.partition("all options")[0]))
    assert len(ours) >= 4 and all(f"\ndef {name}(" in sources for name in ours)
    assert "\ndef grpo_training_step(" in (ROOT / "train.py").read_text()


def test_every_public_function_has_a_docstring():
    for path in PROGRAM:
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        public = [node for node in functions if not node.name.startswith("_")]
        assert not [n.name for n in public if not ast.get_docstring(n)], path


def test_the_page_on_the_algorithm_has_a_row_for_every_variant():
    page = (ROOT / "docs/algorithm.md").read_text()
    rows = [[cell.strip("| `") for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| `")]
    averages = {loss.aggregation for loss in LOSSES.values()}
    variants = {*LOSSES, *averages, *grpo.BASELINES, *grpo.SCALES, *get_args(GRPOConfig.__annotations__["kl_estimator"])} - {""}
    assert variants <= {row[0] for row in rows}
    shown = {row[0]: row[2] for row in rows if row[0] in LOSSES}
    assert shown == {name: loss.aggregation for name, loss in LOSSES.items()}


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


# ---- docs/your-own-task.md: its files are written, its commands are run, with fewer steps -------------------------------

OWN_TASK = (ROOT / "docs/your-own-task.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", OWN_TASK, flags=re.DOTALL))
COMMANDS = re.findall(r"^ {4}python (\S+) ?(.*)$", OWN_TASK.replace("\\\n        ", ""), flags=re.MULTILINE)
# Several turns, as the page says: the environment is in the task's file.
FILES["turns.py"] = """
from sorting import examples

SETTINGS = {"environment": "turns.py:again", "max_turns": 2, "reward_functions": ["environment"], "profile": "demo"}


def again(conversation):
    return "again", 0.5
"""
COMMANDS.append(("train.py", "--task turns.py --output_dir outputs/turns"))
FEWER = "--max_steps 2 --cold_start_steps 2 --batch_size 4 --eval_limit 4 --report_to none"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder; and program, code and output of every command, in order, in a folder with nothing but the page's files."""
    folder, results = tmp_path_factory.mktemp("task"), []
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for program, arguments in COMMANDS:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', arguments)]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.chdir(folder)
            code = train.main([*words, *FEWER.split()]) if program == "train.py" else infer.main(words)
        results.append((program, code, output.getvalue()))
    return folder, results


@pytest.mark.slow
def test_every_command_of_the_page_runs(ran):
    folder, results = ran
    assert len(results) == 5
    for program, code, output in results:
        assert not code, f"{program}: {output}"
    assert (folder / "outputs/words/report.html").exists() and (folder / "outputs/turns/final").is_dir()


def test_the_linter_says_what_the_page_says(ran):
    printed = [output for _, _, output in ran[1] if "| reward |" in output]
    assert len(printed) == 2 and "\n- not less than gold" in printed[0] and "\n- " not in printed[1]
    lines = [line for output in printed for line in output.splitlines() if line.startswith(("|", "- "))]
    of_kinds = {re.sub(r"(?<=\|)[^|]*\|$", "", line) for line in lines}         # without the column of the model
    assert of_kinds <= set(OWN_TASK.splitlines())


# ---- docs/truth_table.py: its expectations against formulas by hand, identities, and sampled groups -----------------------

table = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/truth_table.py")))
P = table.P


@pytest.mark.parametrize("baseline,scale,loss_type,age", [
    ("group_mean", "group", "dapo", 0), ("group_median", "mean", "gspo", 1), ("leave_one_out", "none", "icepop", 8),
    ("global_mean", "group", "sapo", 8), ("leave_one_out", "none", "dapo", 0),
])
def test_a_hundred_thousand_sampled_groups_agree_within_their_error(baseline, scale, loss_type, age):
    result, N, G = table.exact(4, baseline, scale, loss_type, age), 100_000, 4
    generator = torch.Generator().manual_seed(1)
    for n in 2, 7, 13:                                    # of P
        before = torch.sigmoid(torch.logit(P[n]) - age * table.STEP)
        right = (torch.rand(N, G, generator=generator, dtype=torch.float64) < before).double()
        advantages = compute_group_advantages(right, baseline=baseline, scale=scale, global_mean=float(P.mean()))
        groups = table.gradients(right, advantages, P[n].expand(N), age, loss_type=loss_type)
        assert abs(groups.mean() - result["mean"][n]) < 4 * groups.std() / N**0.5, (n, groups.mean(), result["mean"][n])
        assert groups.var() == pytest.approx(float(result["variance"][n]), rel=0.05)
        assert (groups == 0).double().mean() == pytest.approx(float(result["no_signal"][n]), abs=0.01)


def test_the_page_has_its_figures():
    page = (ROOT / "docs/algorithm.md").read_text().partition("### Which one?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| scale (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page, re.M)
    assert len(rows) == 6
    for scale, G, rare, sure, noise in rows:
        result = table.exact(int(G), "group_mean", scale)
        weights, found = table.weights(result["mean"]), table.summary(result)
        assert (rare, sure, noise) == tuple(f"{x:.2f}" for x in (weights["0.05"], weights["0.95"], found["noise"]))
    rows = re.findall(r"^\| ([a-z_, ]+?)(?:: [a-z ]+)? \|(( [\d.]+ \|){5})$", page, re.M)
    assert {name for names, *_ in rows for name in names.split(", ")} == set(LOSSES)
    for names, cells, _ in rows:
        for name in names.split(", "):
            kept = [table.summary(table.exact(8, "leave_one_out", "none", name, age)) for age in (1, 4, 8)]
            figures = [*(each["length"] for each in kept), kept[-1]["cosine"], kept[-1]["noise"]]
            assert re.findall(r"[\d.]+", cells) == [f"{figure:.2f}" for figure in figures], name
