"""Comparison of variants: which runs are trained, with which seeds, from where; the table by hand."""

import json
import math
import re

import numpy as np
import pytest
from conftest import exhaustive

from analysis import comparison
from analysis.comparison import comparison_table, main, read_variants
from analysis.evaluation import t_interval
from sources.settings import read_settings


def test_students_interval_by_hand():
    low, high = t_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)      # t of 4 degrees of freedom, from a table
    assert (low, high) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))


def write_run(folder, *accuracies, flags=""):
    (folder / "final").mkdir(parents=True)
    (folder.parent / "flags.txt").write_text(flags)
    lines = [{"phase": "eval", "step": step, "eval_accuracy": value, "eval_reward/length": 2.0} for step, value in enumerate(accuracies)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"phase": "grpo", "step": 9}]))


def test_runs_are_paired_by_their_seeds_and_the_variant_without_flags_comes_first(tmp_path, capsys):
    for seed, accuracy in enumerate((0.25, 0.5, 0.75)):
        write_run(tmp_path / f"zero/seed-{seed}", 0.1, accuracy)
        write_run(tmp_path / f"better/seed-{seed}", 0.1, accuracy + 0.1 + seed / 100, flags="--loss_type gspo")
    for seed in 2, 7:
        write_run(tmp_path / f"alone/seed-{seed}", 0.0, flags="--clip_low 0.1")
    assert main([str(tmp_path)]) == 0                     # the command for a folder prints the table
    rows = [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["variant", "seeds", "eval_accuracy", "minus zero, over seeds"]
    half = 4.3027 * 0.25 / math.sqrt(3)                   # t of 2 degrees of freedom; standard deviation 0.25
    assert rows[1] == ["zero", "3", f"0.500 [{0.5 - half:.3f}, {0.5 + half:.3f}]"]
    assert rows[2] == ["alone", "2", "0.000 [0.000, 0.000]", "-0.750"], "seed 2 alone is of both"
    half = 4.3027 * 0.01 / math.sqrt(3)
    assert rows[3][0] == "better" and rows[3][3] == f"+0.110 [{0.11 - half:+.3f}, {0.11 + half:+.3f}]"


def test_a_variant_without_a_common_seed_has_a_row():
    rows = comparison_table({"a": {"seed-0": 1.0}, "b": {"seed-1": 0.5}}, "eval_accuracy").splitlines()
    assert rows[2].split() == ["b", "1", "0.500"]


def test_other_metrics_are_compared_and_a_missing_one_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no run in it is complete"):
        read_variants(tmp_path, "eval_accuracy")
    write_run(tmp_path / "a/seed-0", None)
    assert read_variants(tmp_path, "eval_reward/length") == {"a": {"seed-0": 2.0}}
    with pytest.raises(ValueError, match=r"^--metric=eval_accuracy: .*a/seed-0 has eval_reward/length$"):
        read_variants(tmp_path, "eval_accuracy")


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    settings = dict(use_grpo=True, cold_start_steps=2, max_steps=2, batch_size=2, eval_limit=4, eval_steps=0, report_to="none",
                    generation_max_length=8)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.fixture
def programs(monkeypatch):
    """The runs that would be trained. They write what is looked for afterwards, unless they are in `failing`."""
    class Programs(list):
        failing = ()

    ran = Programs()

    def run_training(words, log):
        folder = log.with_suffix("")
        ran.append((words, folder))
        if folder.name in ran.failing:
            return 1
        (folder / "final").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text('{"phase": "eval", "step": 2, "eval_accuracy": 1.0}\n')
        return 0

    monkeypatch.setattr(comparison, "run_training", run_training)
    return ran


def train_and_compare(folder, *words):
    return main([str(folder / "settings.json"), "--output_dir", str(folder / "out"), *words])


def value_of(flag, command):
    return command[command.index(flag) + 1]


TWO = "--variant", "a", "--loss_type gspo", "--variant", "b", "--learning_rate=1e-6", "--seeds", "3", "5"


def test_a_run_that_was_stopped_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "run_training", lambda words, log: 0)        # as after SIGTERM
    assert not comparison.train_run(tmp_path / "a/seed-0", tmp_path, []) and "ended with code 0, see" in capsys.readouterr().out


def test_every_run_begins_with_the_one_cold_start_and_has_its_seed(folder, programs, capsys):
    assert train_and_compare(folder, *TWO) == 0
    cold, *others = programs
    trained = [(words, run.relative_to(folder / "out")) for words, run in others]
    seeds = {str(run): value_of("--seed", command) for command, run in trained}
    assert seeds == {"a/seed-3": "3", "a/seed-5": "5", "b/seed-3": "3", "b/seed-5": "5"}
    start = str(folder / "out/cold_start/final")
    assert cold[1].name == "cold_start" and "--model_path" not in cold[0] and value_of("--learning_rate", cold[0]) == "0"
    for command, run in trained:
        assert value_of("--model_path", command) == start and value_of("--cold_start_steps", command) == "0"
        assert ("--loss_type" in command) == str(run).startswith("a") and "--resume" not in command
    assert "eval_accuracy" in capsys.readouterr().out


def test_what_is_complete_is_skipped_and_what_has_begun_is_resumed(folder, programs, capsys):
    programs.failing = ("seed-5",)
    assert train_and_compare(folder, *TWO) == 1, "the others go on, and the table is printed"
    assert "  1      1.000" in capsys.readouterr().out
    (folder / "out/b/seed-5").mkdir(parents=True)
    (folder / "out/b/seed-5/config.json").write_text("{}")
    programs.clear()
    programs.failing = ()
    assert train_and_compare(folder, *TWO) == 0
    ran = [(str(run.relative_to(folder / "out")), "--resume" in words) for words, run in programs]
    assert ran == [("a/seed-5", False), ("b/seed-5", True)]
    programs.clear()
    assert train_and_compare(folder, *TWO) == 0 and not programs


def test_nothing_else_runs_if_the_cold_start_fails(folder, programs):
    programs.failing = ("cold_start",)
    with pytest.raises(ValueError, match=r"cold_start: the cold start did not end; see .*cold_start\.txt"):
        train_and_compare(folder, *TWO)
    assert len(programs) == 1


@pytest.mark.parametrize("words, message", [
    (("--variant", "a b", ""), "--variant 'a b': name it by letters, digits and hyphens"),
    (("--variant", "a", "--seed=1"), "--variant a: it would change seed, the same for all"),
    (("--variant", "a", "--dataset countdown"), "--variant a: it would change dataset"),
    (("--variant", "a", "--los gspo"), "--variant a: --los: unknown"),
    (("--variant", "a", "", "--variant", "a", ""), "--variant: name each differently"),
])
def test_mistakes_are_one_line_before_anything_runs(folder, programs, words, message):
    with pytest.raises(ValueError) as caught:
        train_and_compare(folder, *words)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value) and not programs


@pytest.mark.parametrize("change, message", [
    (dict(use_grpo=False), "use_grpo is false"), (dict(eval_limit=0), "--eval_limit=0: runs are compared on held-out problems"),
    (dict(dataset="file.jsonl"), "--dataset=file.jsonl: each seed would hold out other problems; name an eval_dataset"),
])
def test_settings_that_cannot_be_compared_are_refused(folder, programs, change, message):
    settings = json.loads((folder / "settings.json").read_text()) | change
    (folder / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        train_and_compare(folder, *TWO)


def test_a_folder_holds_runs_of_one_kind(folder, programs):
    train_and_compare(folder, *TWO)
    with pytest.raises(ValueError, match=r"out/a/flags.txt: runs there have other settings; take another --output_dir or --variant"):
        train_and_compare(folder, "--variant", "a", "--loss_type cispo", "--seeds", "3", "5")
    (folder / "settings.json").write_text(json.dumps(json.loads((folder / "settings.json").read_text()) | {"max_steps": 3}))
    with pytest.raises(ValueError, match=r"out/settings.json: runs there have other settings"):
        train_and_compare(folder, *TWO)


@pytest.mark.parametrize("seeds", [exhaustive(("0", "1"))])
def test_two_seeds_from_the_command_to_the_table(folder, seeds, capsys):
    assert train_and_compare(folder, "--variant", "a", "", "--seeds", *seeds) == 0
    out = folder / "out"
    settings = read_settings(out / "settings.json")
    assert settings["profile"] == "demo" and settings["max_steps"] == 2 and "learning_rate" not in settings, "what was named alone"
    assert [str(read_settings(out / f"a/seed-{seed}/config.json")["seed"]) for seed in seeds] == list(seeds)
    cold = (out / "cold_start/final/model.safetensors").read_bytes()
    assert cold == (out / "cold_start/checkpoints/step-00000003/model.safetensors").read_bytes()
    assert re.search(r"\na +2 +\S+ \[", capsys.readouterr().out)
