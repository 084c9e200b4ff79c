"""Names of other systems: each is answered with what exists here; the lines of dev/five-systems.md are typed as they stand."""

import json
import re
import runpy
import shlex
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from config import Config, FLAGS
from runs.command_line import parse_config, parse_infer
from sources.foreign_names import FOREIGN, explain_unknown
from sources.settings import CONSTANT

FIVE = (ROOT / "dev/five-systems.md").read_text()
PARTS = {part.partition("\n")[0]: part for part in FIVE.partition("## Their settings")[0].split("## ")[1:]}
FIRST, *OTHERS = PARTS


def typed(system):
    """The lines of the first block: commands, settings and expressions."""
    block = PARTS[system].partition("```text\n")[2].partition("```")[0]
    return re.sub(r",\n ", ", ", block).splitlines()     # settings of several lines


def settings_here(system):
    """The second block: settings that are accepted here."""
    (here,) = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PARTS[system], flags=re.DOTALL))
    return here


def missing(system):
    """What the page says is missing: {name there: name here}."""
    return dict(re.findall(r"`([^`]+)`\s\(here\s`([^`]+)`\)", PARTS[system].partition("\nMissing: ")[2]))


@pytest.fixture
def type_line(tmp_path, monkeypatch, capsys):
    """A function that types a line in a folder with the scripts of this repository. It returns the error, None without one.

    A command runs the file that it names, settings are put into the file that the page names, and an expression has the names
    that `from train import *` gives. appended: flags that make a run short.
    """
    for path in *ROOT.glob("*.py"), ROOT / "examples":
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("from train import *", names)

    def type_line(line, appended=""):
        if line.startswith("{"):
            (tmp_path / "settings.json").write_text(line)
            line = re.search(r"`(python train.py \S+)`", FIVE)[1]
        capsys.readouterr()
        try:
            if not line.startswith("python "):
                eval(line, names)
                return None
            _, script, *words = shlex.split(f"{line} {appended}")
            monkeypatch.setattr(sys, "argv", [script, *words])
            runpy.run_path(script, run_name="__main__")
        except (ValueError, TypeError, NameError, AttributeError, FileNotFoundError) as error:
            return f"{type(error).__name__}: {error}"
        except SystemExit:
            return capsys.readouterr().err.strip()

    return type_line


@pytest.mark.parametrize("system", PARTS)
def test_what_the_page_calls_missing_is_missing_and_all_else_is_there(system, type_line):
    pairs = missing(system)
    named = re.findall(r"(?<=^python )\S+|\b[A-Z]\w+(?=\()", "\n".join(typed(system)), flags=re.MULTILINE)
    for name in [*named, *pairs, *pairs.values()]:
        error = None if Path(name).exists() else "no file" if name.endswith(".py") else type_line(name)
        assert (error is None) == (name not in pairs), name
        assert "(" not in name or error is None or error.startswith("AttributeError"), error     # the class is there


@pytest.mark.slow
def test_the_lines_of_the_first_system_run_with_the_changes_that_the_page_names(type_line, tmp_path, capsys):
    short = "--max_steps 1 --cold_start_steps 0 --eval_limit 4 --batch_size 2 --report_to none"
    ((error, folder),) = re.findall(r"the second ends\swith the error `(.*?)`; it runs with `(--output_dir .*?)`", PARTS[FIRST])
    models = []
    for number, line in enumerate(typed(FIRST), start=1):
        for there, here in missing(FIRST).items():
            if there in line:
                assert there in type_line(line)
                line = line.replace(there, here)
        appended = "--generation_max_length 4" if "infer.py" in line else short
        time.sleep(1)                                     # the folder of a run is named by the second
        if number == 2:
            assert error in type_line(line, appended)
            line = re.sub(r"--output_dir \S+", folder, line)
        assert type_line(line, appended) is None, line
        assert bool(capsys.readouterr().out) == line.startswith(("python ", "{"))
        models.append(len(list(tmp_path.rglob("final/model.safetensors"))))
    assert models == [1, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("system", OTHERS)
def test_a_line_of_the_others_ends_with_one_line_that_has_a_flag_for_each_name(system, type_line):
    for line in typed(system):
        for there, here in missing(system).items():
            line = line.replace(there, here)
        pattern = {"p": r"--(\w+)", "{": r'"(\w+)":'}.get(line[0], r"(\w+)=")
        answer, foreign = type_line(line), [name for name in re.findall(pattern,
            line) if name not in FLAGS and name not in CONSTANT]
        if line[0] not in "p{":                           # Python names the first one
            assert foreign[0] in answer and "\n" not in answer and explain_unknown(foreign,
                FLAGS).count("; here ") == len(foreign)
            continue
        assert len(foreign) > 1 and "\n" not in answer and answer.count(" | ") == len(foreign) - 1
        for name in foreign:
            (said,) = [part for part in answer.split(" | ") if f"{name}: unknown" in part]
            assert re.search(r"(here|did you mean) .*--\w+", said), said


def test_iterations_of_rollouts_are_counted_in_optimiser_steps():
    """What the page says: 1000 rollouts of 256 x 4 completions, 2 epochs in minibatches of 64, are 32,000 steps."""
    for system in "Agent-Tunix (Gemma 3)", "StateSet's GRPO guide":
        assert Config.of(**settings_here(system)).training.use_grpo
    here, there = settings_here("ReLax"), json.loads(typed("ReLax")[1])
    per_rollout = Config.of(**here).updates_per_rollout
    assert here["max_steps"] == there["num_iterations"] * per_rollout == 32_000
    assert here["reference_update_freq"] == there["reference_update_freq"] * per_rollout


def test_every_answer_names_flags_that_exist_and_no_name_is_a_flag():
    of_infer = {"question", "evaluate", "samples", "json", "report"}
    for here in FOREIGN.values():
        assert set(re.findall(r"--(\w+)", here)) <= {*FLAGS, *of_infer}, here
    assert not FOREIGN.keys() & FLAGS.keys()


@pytest.mark.parametrize("typed,answer", [
    ("--group-size 4", "--group_size: unknown flag; here --num_completions_per_prompt"),
    ("--beta=0.1", "--beta=0.1: unknown flag; here --kl_penalty_coef, with another --kl_estimator than the usual k3"),
    ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n=8: unknown flag; here --num_completions_per_prompt"),
    ("--num_generation 4", "--num_generation: unknown flag; here --num_completions_per_prompt"),
    ("--learning_rat 1", "--learning_rat: unknown flag; did you mean --learning_rate?"),
    ("--xyzzy --top_p 1", "--xyzzy: unknown flag; see --help | --top_p: unknown flag; did you mean --generation_top_p?"),
    # infer.py answers with its own flags alone.
    ("--question 1+1 --max_new_tokens 5", "--max_new_tokens: unknown flag; here --generation_max_length"),
    ("--question 1+1 --lora_r 5", "--lora_r: unknown flag; see --help"),
])
def test_a_name_is_answered_however_it_is_spelt(typed, answer):
    with pytest.raises(ValueError) as error:
        parse_infer(typed.split(), "") if "--question" in typed else parse_config([*"--use_grpo --seed 1".split(), *typed.split()])
    assert str(error.value) == answer
