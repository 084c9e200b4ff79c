"""Names of other systems: each is answered with what exists here; the lines of dev/five-systems.md are typed as they stand."""

import importlib
import json
import re
import runpy
import shlex
import sys
import time
from operator import attrgetter
from pathlib import Path

import pytest
from conftest import build_gpt2

import infer
from config import Config, FLAGS
from engine.policy import save_any_policy
from model import byte_tokenizer
from runs.command_line import parse_config
from sources import foreign_names
from sources.foreign_names import explain_unknown
from sources.settings import CONSTANT, read_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text()
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
        answer, foreign = type_line(line), [name for name in re.findall(pattern, line) if name not in FLAGS and name not in CONSTANT]
        if line[0] not in "p{":                           # Python names the first one
            assert foreign[0] in answer and "\n" not in answer and explain_unknown(foreign, FLAGS).count("; here ") == len(foreign)
            continue
        assert len(foreign) > 1 and "\n" not in answer and answer.endswith("(more in docs/coming-from.md)")
        for name in foreign:
            (said,) = [part for part in answer.split("|") if f"{name}: unknown" in part]
            assert re.search(r"here .*--\w+", said), said


@pytest.mark.parametrize("system", OTHERS)
def test_the_settings_that_the_page_gives_instead_are_accepted(system, tmp_path):
    here = settings_here(system)
    (tmp_path / "settings.json").write_text(json.dumps(here))
    config = parse_config([str(tmp_path / "settings.json")])
    assert config == Config.of(**read_settings(tmp_path / "settings.json")) and config.training.use_grpo


@pytest.mark.parametrize("system", ["ReLax", "StateSet's GRPO guide"])           # model and data of Agent-Tunix are on the hub
def test_the_settings_that_the_page_gives_instead_train(system, type_line, tmp_path):
    """In place of the model there is a small GPT-2 with random weights; prompts and reward function are those of a user."""
    here = settings_here(system)
    save_any_policy(build_gpt2(), byte_tokenizer(), tmp_path / here["model_path"])
    (tmp_path / "prompts.json").write_text('{"prompts": ["Spell plank.", "1+1=?", "2+2=?"]}')
    (signature,) = re.findall(r"`(def .*?)` in `mine.py`", FIVE)
    (tmp_path / "mine.py").write_text(f"from typing import List\n{signature}:\n    return [float(sum(ids)) for ids in completions]\n")
    assert type_line(json.dumps(here), "--max_steps 1 --batch_size 2 --generation_max_length 8 --report_to none") is None
    assert len(list(tmp_path.rglob("final/model.safetensors"))) == 1


def test_iterations_of_rollouts_are_counted_in_optimiser_steps():
    """What the page says: 1000 rollouts of 256 x 4 completions, 2 epochs in minibatches of 64, are 32,000 steps."""
    here, there = settings_here("ReLax"), json.loads(typed("ReLax")[1])
    per_rollout = Config.of(**here).updates_per_rollout
    assert here["max_steps"] == there["num_iterations"] * per_rollout == 32_000
    assert here["reference_update_freq"] == there["reference_update_freq"] * per_rollout


def test_every_answer_names_flags_that_exist_and_no_flag_is_in_the_table():
    of_infer, table = {"question", "evaluate", "samples", "json"}, foreign_names.foreign_names()
    for here in table.values():
        assert set(re.findall(r"--(\w+)", here)) <= set(FLAGS) | of_infer | {"nproc_per_node"}, here
    assert not set(table) & set(FLAGS)
    known = set(FLAGS) | {action.dest for action in infer.build_infer_parser()._actions}
    for name, here in table.items():
        assert explain_unknown([name], known).startswith(f"{name}: unknown flag; here {here}")
    lines = [line for line in PAGE.partition("## Names")[2].splitlines() if line.startswith("| ")][1:]
    listed = [name for line in lines for name in line.split("|")[1].strip().split(", ")]
    assert len(listed) == len(set(listed)) == len(table) > 130 and all(line.count("|") == 4 for line in lines)


NOT_FLAGS = (
    "generate_rollouts", "train_on_rollout", "from_profile", "TunixTrainer", "TrainState", "create_value_function", "inference.py",
    "run_training.py", "example_usage.py")


def test_functions_classes_and_scripts_are_answered_with_what_exists():
    section = PAGE.partition("\n## Functions, classes and scripts\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    answers = {name: here for names, _, here in rows for name in names.split(", ")}
    assert answers.keys() >= {*NOT_FLAGS, *(name for system in PARTS for name in missing(system) if "(" not in name)}
    assert not answers.keys() & foreign_names.foreign_names().keys() and not any((ROOT / name).exists() for name in answers)
    for name, here in answers.items():
        commands, flags = re.findall(r"`python (.*?)`", here), re.findall(r"--(\w+)", re.sub("`.*?`", "", here))
        places = re.findall(r"\]\(\.\./(.*?)\)([^\[]*)", here)                 # a file, and what is said of it
        assert commands or places, name
        assert set(flags) <= set(FLAGS), name
        for file, names in places:
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            assert all(attrgetter(name)(module).__module__ == module.__name__ for name in re.findall("`(.*?)`", names)), (file, names)
        for script, *words in map(shlex.split, commands):
            assert (ROOT / script).exists(), script
            {"train.py": parse_config, "infer.py": infer.parse_arguments}.get(script, list)(words)


def test_without_the_page_a_foreign_name_is_an_unknown_flag(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign_names, "PAGE", tmp_path / "not installed.md")
    foreign_names.foreign_names.cache_clear()
    assert explain_unknown(["--xyzzy"], FLAGS) == "--xyzzy: unknown flag; see --help"
    assert explain_unknown(["--beta"], []) == "--beta: unknown flag; see --help"
    foreign_names.foreign_names.cache_clear()


@pytest.mark.parametrize("typed,answer", [
    ("--kl_coef", "--kl_penalty_coef"), ("--group-size", "--num_completions_per_prompt"), ("--beta=0.1", "--kl_penalty_coef"),
    ("actor_rollout_ref.rollout.n=8", "--num_completions_per_prompt"), ("actor_rollout_ref.actor.optim.lr=1e-6", "--learning_rate"),
    ("--num_generation", "--num_completions_per_prompt"),            # misspelt
    ("--nnodes", "torchrun"),
    ("--max_new_tokens", "--generation_max_length"), ("--micro_batch_size", "--max_tokens_per_forward"),
])
def test_a_foreign_name_is_answered_however_it_is_spelt(typed, answer):
    with pytest.raises(ValueError, match=f"{re.escape(typed.replace('group-size', 'group_size'))}: unknown flag; here {answer}"):
        parse_config([typed, "--use_grpo"])


def test_a_value_with_an_equals_sign_is_not_answered_as_a_name():
    with pytest.raises(ValueError) as error:
        parse_config(["--use_grpo", "--mesh_shape", "fsdp=2"])
    assert str(error.value).count("unknown flag") == 1


def test_a_name_with_several_meanings_gets_all_of_them_and_an_unknown_one_the_nearest_flag():
    iterations = explain_unknown(["num_iterations"], FLAGS)
    assert "--ppo_epochs for TRL's" in iterations and "--max_steps" in iterations and "times ppo_epochs" in iterations
    assert explain_unknown(["--learning_rat"], FLAGS) == "--learning_rat: unknown flag; did you mean --learning_rate?"
    assert explain_unknown(["--dataset_configuration_x"], FLAGS) == "--dataset_configuration_x: unknown flag; see --help"


def test_infer_answers_with_its_own_flags_alone():
    with pytest.raises(ValueError, match="--max_new_tokens: unknown flag; here --generation_max_length"):
        infer.parse_arguments(["--question", "1+1", "--max_new_tokens", "5"])
    with pytest.raises(ValueError, match="--lora_r: unknown flag; see --help"):
        infer.parse_arguments(["--question", "1+1", "--lora_r", "5"])
