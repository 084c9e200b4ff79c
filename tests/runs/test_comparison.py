"""Runs of a comparison: which are trained, with which seeds, from where; what is skipped, resumed and refused."""

import json
import re
from pathlib import Path

import pytest

from conftest import exhaustive
from runs import comparison
from runs.comparison import run_comparison
from sources.settings import read_settings


@pytest.fixture
def folder(tmp_path):
    settings = dict(use_grpo=True, cold_start_steps=2, max_steps=2, batch_size=2, eval_limit=4, eval_steps=0, report_to="none",
                    generation_max_length=8)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture
def programs(monkeypatch):
    """The programs that would run. They write what is looked for afterwards, unless they are in `failing`."""
    class Programs(list):
        failing = ()

    ran = Programs()

    def run_program(command, folder):
        ran.append((command, folder))
        if folder.name in ran.failing:
            return False
        (folder / "final").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        if command[0] == "infer.py":
            problems = [{"prompt": "p", "answer": "1", "right": [True], "points": {}}]
            Path(value_of("--json", command)).write_text(json.dumps({"samples": int(value_of("--samples", command)), "results": [{"problems": problems}]}))
        return True

    monkeypatch.setattr(comparison, "run_program", run_program)
    return ran


def compare(folder, *words):
    return run_comparison(["--compare", str(folder / "settings.json"), "--output_dir", str(folder / "out"), *words])


def value_of(flag, command):
    return command[command.index(flag) + 1]


TWO = "--variant", "a", "--loss_type gspo", "--variant", "b", "--learning_rate=1e-6", "--seeds", "3", "5"


def test_every_run_begins_with_the_one_cold_start_and_no_seed_is_used_twice(folder, programs, capsys):
    assert compare(folder, *TWO) == 0
    cold, *others = programs
    trained = [(command, run.relative_to(folder / "out")) for command, run in others if command[0] == "train.py"]
    seeds = {str(run): value_of("--seed", command) for command, run in trained}
    assert seeds == {"a/seed-3": "3", "a/seed-5": "5", "a-twin/seed-3": "1000003", "a-twin/seed-5": "1000005", "b/seed-3": "3", "b/seed-5": "5"}
    start = str(folder / "out/cold_start/final")
    assert cold[1].name == "cold_start" and "--model_path" not in cold[0] and value_of("--learning_rate", cold[0]) == "0"
    for command, run in trained:
        assert value_of("--model_path", command) == start and value_of("--cold_start_steps", command) == "0"
        assert ("--loss_type" in command) == str(run).startswith("a") and "--resume" not in command
    evaluations = [command for command, _ in programs if command[0] == "infer.py"]
    settings = [[word for word in command if str(folder) not in word] for command in evaluations]
    assert len(settings) == 6 and all(words == settings[0] for words in settings), "the same problems and settings of sampling"
    assert value_of("--evaluate", settings[0]) == "arithmetic" and value_of("--limit", settings[0]) == "4" and value_of("--samples", settings[0]) == "4"
    assert "--generation_max_length=8" in settings[0] and "--seed" not in " ".join(settings[0])
    assert "a-twin" in capsys.readouterr().out


def test_what_is_complete_is_skipped_and_what_has_begun_is_resumed(folder, programs, capsys):
    programs.failing = ("seed-5",)
    assert compare(folder, *TWO) == 1, "the others go on, and the table is printed"
    assert "  1      1.000" in capsys.readouterr().out
    (folder / "out/b/seed-5").mkdir(parents=True)
    (folder / "out/b/seed-5/config.json").write_text("{}")
    programs.clear()
    programs.failing = ()
    assert compare(folder, *TWO) == 0
    ran = [(command[0], str(run.relative_to(folder / "out")), "--resume" in command) for command, run in programs]
    assert ran == [(program, f"{name}/seed-5", name == "b" and program == "train.py")
                   for name in ("a", "a-twin", "b") for program in ("train.py", "infer.py")]
    programs.clear()
    assert compare(folder, *TWO) == 0 and not programs


def test_nothing_else_runs_if_the_cold_start_fails(folder, programs):
    programs.failing = ("cold_start",)
    assert compare(folder, *TWO) == 1 and len(programs) == 1


@pytest.mark.parametrize("words, message", [
    (("--variant", "a b", ""), "--variant 'a b': name it by letters"),
    (("--variant", "a-twin", ""), "--variant 'a-twin': name it"),
    (("--variant", "a", "--seed=1"), "--variant a: leave out --seed, which is the same for all runs"),
    (("--variant", "a", "--model-path x"), "--variant a: leave out --model_path, which"),
    (("--variant", "a", "--eval_limit 3"), "--variant a: leave out --eval_limit, which"),
    (("--variant", "a", "--dataset countdown"), "--variant a: leave out --dataset, which"),
    (("--variant", "a", "--batch_size 32"), "--variant a: it would change cold_start_learning_rate of the profile; name that in"),
    (("--variant", "a", "--lora_rank 4"), "--variant a: leave out --lora_rank, which"),
    (("--variant", "a", '"'), "--variant a: No closing quotation"),
    (("--variant", "a.b", ""), "--variant 'a.b': name it by letters, digits and hyphens"),
    (("--variant", "a", "", "--seeds", "-1", "0"), "--seeds=-1: at least two, each once, from 0 to 999999"),
    (("--variant", "a", "--los gspo"), "--variant a: --los: unknown"),
    (("--variant", "a", "", "--variant", "a", ""), "--variant: name at least one, NAME \"FLAGS\", each differently"),
    (("--variant", "a", "", "--seeds", "1"), "--seeds=1: at least two, each once"),
    (("--variant", "a", "", "--seeds", "1", "1"), "--seeds=1: at least two, each once"),
    (("--variant", "a", "", "--samples", "0"), "--samples=0: must be at least 1"),
    (("--seeds", "1", "2"), "--variant: name at least one"),
    (("--seeds", "1", "2", "--variant"), "--variant '': name it by letters"),
    (("--variant", "a", "", "--seeds", "x"), "argument --seeds: invalid int value: 'x'"),
])
def test_mistakes_are_one_line_before_anything_runs(folder, programs, words, message):
    with pytest.raises(ValueError) as caught:
        compare(folder, *words)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value) and not programs


@pytest.mark.parametrize("change, message", [
    (dict(use_grpo=False), "use_grpo is false"), (dict(eval_limit=0), "--eval_limit=0: runs are compared on held-out problems"),
    (dict(dataset="file.jsonl"), "--dataset=file.jsonl: each seed would hold out other problems; name an eval_dataset"),
])
def test_settings_that_cannot_be_compared_are_refused(folder, programs, change, message):
    settings = json.loads((folder / "settings.json").read_text()) | change
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        compare(folder, *TWO)


def test_a_folder_holds_runs_of_one_kind_and_other_samples_are_evaluated_again(folder, programs):
    compare(folder, *TWO)
    programs.clear()
    assert compare(folder, *TWO, "--samples", "2") == 0 and {command[0] for command, _ in programs} == {"infer.py"} and len(programs) == 6
    with pytest.raises(ValueError, match=r"out/a/flags.txt: runs there have other settings; take another --output_dir or --variant"):
        compare(folder, "--variant", "a", "--loss_type cispo", "--seeds", "3", "5")
    (folder / "settings.json").write_text(json.dumps(json.loads((folder / "settings.json").read_text()) | {"max_steps": 3}))
    with pytest.raises(ValueError, match=r"out/settings.json: runs there have other settings"):
        compare(folder, *TWO)


@pytest.mark.parametrize("names", [exhaustive(("a", "a-twin"))])
def test_two_seeds_from_the_command_to_the_table(folder, names, capsys):
    assert compare(folder, "--variant", "a", "", "--seeds", "0", "1", "--samples", "2") == 0
    out = folder / "out"
    assert all((out / name / f"seed-{seed}/final/model.safetensors").exists() for name in names for seed in (0, 1))
    settings = read_settings(out / "settings.json")
    assert settings["profile"] == "demo" and settings["max_steps"] == 2 and "learning_rate" not in settings, "what was named alone"
    seeds = {read_settings(out / name / f"seed-{seed}/config.json")["seed"] for name in names for seed in (0, 1)}
    cold = (out / "cold_start/final/model.safetensors").read_bytes()
    assert seeds == {0, 1, 10**6, 10**6 + 1} and cold == (out / "cold_start/checkpoints/step-00000003/model.safetensors").read_bytes()
    assert re.search(r"\na-twin +2 +\S+ \[.* by chance\n", capsys.readouterr().out)
