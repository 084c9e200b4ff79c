"""docs/your-own-task.md must do what it says: its files are written, its commands are run, with fewer steps."""

import contextlib
import io
import re

import pytest
from conftest import ROOT

import infer

import train

PAGE = (ROOT / "docs/your-own-task.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"^ {4}python (\S+) ?(.*)$", PAGE.replace("\\\n        ", ""), flags=re.MULTILINE)
FEWER = "--max_steps 2 --cold_start_steps 2 --batch_size 4 --eval_limit 4 --report_to none"


def run(program, words):
    """What `python program words` does, with fewer steps; returns what its main function does."""
    if program == "train.py":
        return train.main([*words, *FEWER.split()])
    return infer.main(words)


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
            code = run(program, words)
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
    assert of_kinds <= set(PAGE.splitlines())
