"""Comparison of variants: which runs are trained, with which seeds, from where; intervals, verdicts and seeds by hand and by simulation."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import exhaustive

from analysis import comparison
from analysis.comparison import compare, comparison_table, differences, main, read_variants, seeds_needed
from analysis.evaluation import t_interval
from sources.settings import read_settings


def test_students_interval_by_hand():
    low, high = t_interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)      # t of 4 degrees of freedom, from a table
    assert (low, high) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))
    assert all(map(math.isnan, t_interval(np.array([1.0]))))


def test_equal_variants_are_told_apart_in_five_of_a_hundred_comparisons_at_most():
    """Three seeds with a spread of 0.05 that all problems share, which says nothing about the problems."""
    draws, found = np.random.default_rng(0), []
    for _ in range(4000):
        table = draws.normal(0, 0.05, (3, 1)) + draws.normal(0, 0.3, (3, 50))
        low, high = t_interval(table.mean(axis=1))
        found.append((low > 0 or high < 0, compare(table, 0.0)["verdict"] in ("better", "worse")))
    by_seed, both = np.mean(found, axis=0)
    assert 0.04 < by_seed < 0.06 and both <= by_seed      # with 3 degrees of freedom in place of 2 it is 0.09


def test_a_verdict_needs_both_intervals_and_more_than_chance():
    noise = np.array([[0.01], [-0.01], [0.0]])
    steady = 0.1 + noise + np.tile([0.05, -0.05], 20)
    assert compare(steady, 0.02)["verdict"] == "better" and compare(-steady, 0.02)["verdict"] == "worse"
    assert compare(steady, 0.2)["verdict"] == "no difference shown: the twin differs as much"
    few = 0.02 + noise / 10 + np.array([1.0, -1.0] * 4)   # all seeds agree, but on eight problems
    assert compare(few, 0.0)["verdict"] == "no difference shown: take more problems (--eval_limit)"
    noisy = compare(0.1 + 20 * noise + np.zeros((3, 40)), 0.0)
    assert noisy["verdict"].startswith("no difference shown; one of this size would take ")
    assert noisy["mean"] == pytest.approx(0.1) and noisy["over_seeds"][0] < 0 < noisy["over_seeds"][1]
    assert compare(np.zeros((3, 5)), 0.0)["verdict"] == "no difference shown" == compare(np.zeros((1, 5)), 0.1)["verdict"]


def test_as_many_seeds_as_are_named_tell_the_difference_in_four_of_five_cases():
    draws = np.random.default_rng(0)
    values = np.array([-1.0, 0.0, 1.0])
    values = 1.2 + values / values.std(ddof=1)            # mean 1.2, standard deviation 1
    n = int(seeds_needed(values))
    power = np.mean([t_interval(draws.normal(1.2, 1, n))[0] > 0 for _ in range(3000)])
    fewer = np.mean([t_interval(draws.normal(1.2, 1, n - 2))[0] > 0 for _ in range(3000)])
    assert fewer < 0.77 < power < 0.87, (n, fewer, power)
    assert seeds_needed(np.array([-1.0, 0.0, 1.0])) == "" == seeds_needed(np.ones(3)), "no difference, and no spread"
    assert seeds_needed(values - 1.1999) == "more than 1000"


def write_run(folder, right, points=None, prompts=("p", "q")):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    problems = [
        {"prompt": prompt, "answer": "1", "right": None if right is None else right[i], "points": {"reward": (points or [[0.0]] * 2)[i]}}
        for i, prompt in enumerate(prompts)]
    (folder / "evaluation.json").write_text(json.dumps({"results": [{"problems": problems}]}))
    return folder


def table_of(paths):
    return comparison_table(*read_variants(paths))


def test_runs_are_paired_by_their_names_and_the_variant_with_a_twin_comes_first(tmp_path):
    for name, shares in ("zero", [[True, False], [True, True]]), ("zero-twin", [[True, True]] * 2), ("alone", [[False, False]] * 2):
        for seed in range(3) if name != "alone" else (2, 7):
            write_run(tmp_path / name / f"seed-{seed}", shares)
    assert main([str(tmp_path)]) == 0                     # the command for a folder prints the table
    variants, measure = read_variants([tmp_path])
    assert list(variants) == ["zero", "zero-twin", "alone"] and measure == "accuracy of 2 held-out problems"
    assert variants["zero"]["seed-1"].tolist() == [0.5, 1.0]
    assert differences(variants["alone"], variants["zero"]).tolist() == [[-0.5, -1.0]], "seed 2 alone is of both"
    text = table_of([tmp_path])
    rows = [line.split() for line in text.splitlines()]
    assert rows[1][:3] == ["zero", "3", "0.750"] and rows[2][:2] == ["zero-twin", "3"] and rows[3][:3] == ["alone", "2", "0.000"]
    assert "+0.250" in rows[2] and text.splitlines()[2].endswith("by chance") and "-0.750" in rows[3]
    named = read_variants([tmp_path / "zero/seed-0", tmp_path / "alone/seed-2"])[0]
    assert {name: list(runs) for name, runs in named.items()} == {"alone": ["seed-2"], "zero": ["seed-0"]}


def test_a_variant_without_a_common_seed_has_a_row_and_a_twin_of_another_variant_is_no_measure(tmp_path):
    for name, seed in ("a", 0), ("a", 1), ("a-twin", 0), ("a-twin", 1), ("a-b", 2), ("a-b-twin", 2):
        write_run(tmp_path / name / f"seed-{seed}", [[name != "a-b-twin"]] * 2)
    rows = [line.split() for line in table_of([tmp_path]).splitlines()]
    assert rows[2][:3] == ["a-b", "1", "1.000"] and rows[4][0] == "a-twin" and rows[4][-2:] == ["by", "chance"]


def test_points_are_compared_where_no_answer_is_known(tmp_path):
    write_run(tmp_path / "a/seed-0", None, [[1.0, None], [None]])
    variants, measure = read_variants([tmp_path])
    values = variants["a"]["seed-0"]
    assert measure.startswith("points of") and values[0] == 1 and math.isnan(values[1])
    assert differences({"s": values}, {"s": values}).tolist() == [[0.0]], "without problems that were not scored"


def test_points_are_compared_where_correctness_is_no_reward(tmp_path):
    for names, expected in (["mine.py:last_number"], "points"), (["correctness"], "accuracy"), ([], "accuracy"), (["none"], "accuracy"):
        for name, points in ("a", 0.0), ("b", 1.0):
            folder = write_run(tmp_path / expected / str(len(names)) / "".join(names)[:4] / name / "seed-0", [[True], [False]], [[points]] * 2)
            evaluation = json.loads((folder / "evaluation.json").read_text())
            (folder / "evaluation.json").write_text(json.dumps(evaluation | {"reward_functions": names}))
        variants, measure = read_variants([folder.parents[1]])
        assert measure.startswith(expected) and variants["b"]["seed-0"].tolist() == ([1, 1] if expected == "points" else [1, 0])


def test_runs_that_cannot_be_compared_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="no run in it is complete and evaluated"):
        table_of([tmp_path])
    one = write_run(tmp_path / "a/seed-0", [[True]] * 2)
    other = write_run(tmp_path / "b/seed-0", [[True]] * 2, prompts=("p", "r"))
    with pytest.raises(ValueError, match=r"b/seed-0: evaluated on other problems than .*a/seed-0"):
        table_of([tmp_path])
    evaluation = json.loads((one / "evaluation.json").read_text())
    (other / "evaluation.json").write_text(json.dumps(evaluation | {"samples": 2}))
    with pytest.raises(ValueError, match=r"b/seed-0: evaluated on other problems"):
        table_of([tmp_path])
    write_run(tmp_path / "c" / "unscored", None, [[None], []])
    with pytest.raises(ValueError, match=r"c/unscored: no problem of its evaluation has points"):
        read_variants([tmp_path / "c/unscored"])
    with pytest.raises(ValueError, match=r"a/seed-0: another run has its name and variant"):
        table_of([one, one])
    (other / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=r"b/seed-0: it is not evaluated; python infer.py --model_path .*b/seed-0/final"):
        table_of([one, other])


# ---- runs -----------------------------------------------------------------------------------------------------------


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


def train_and_compare(folder, *words):
    return main([str(folder / "settings.json"), "--output_dir", str(folder / "out"), *words])


def value_of(flag, command):
    return command[command.index(flag) + 1]


TWO = "--variant", "a", "--loss_type gspo", "--variant", "b", "--learning_rate=1e-6", "--seeds", "3", "5"


def test_every_run_begins_with_the_one_cold_start_and_no_seed_is_used_twice(folder, programs, capsys):
    assert train_and_compare(folder, *TWO) == 0
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
    assert train_and_compare(folder, *TWO) == 1, "the others go on, and the table is printed"
    assert "  1      1.000" in capsys.readouterr().out
    (folder / "out/b/seed-5").mkdir(parents=True)
    (folder / "out/b/seed-5/config.json").write_text("{}")
    programs.clear()
    programs.failing = ()
    assert train_and_compare(folder, *TWO) == 0
    ran = [(command[0], str(run.relative_to(folder / "out")), "--resume" in command) for command, run in programs]
    assert ran == [(program, f"{name}/seed-5", name == "b" and program == "train.py")
                   for name in ("a", "a-twin", "b") for program in ("train.py", "infer.py")]
    programs.clear()
    assert train_and_compare(folder, *TWO) == 0 and not programs


def test_nothing_else_runs_if_the_cold_start_fails(folder, programs):
    programs.failing = ("cold_start",)
    with pytest.raises(ValueError, match=r"cold_start: the cold start did not end; see .*cold_start\.txt"):
        train_and_compare(folder, *TWO)
    assert len(programs) == 1


@pytest.mark.parametrize("words, message", [
    (("--variant", "a b", ""), "--variant 'a b': name it by letters, digits and hyphens"), (("--variant", "a-twin", ""), "--variant 'a-twin': name it"),
    (("--variant", "a", "--seed=1"), "--variant a: it would change seed, the same for all"),
    (("--variant", "a", "--lora-rank 4"), "--variant a: it would change lora_rank"),
    (("--variant", "a", "--dataset countdown"), "--variant a: it would change dataset"),
    (("--variant", "a", "--batch_size 32"), "--variant a: it would change cold_start_learning_rate"),
    (("--variant", "a", '"'), "--variant a: No closing quotation"), (("--variant", "a", "--los gspo"), "--variant a: --los: unknown"),
    (("--variant", "a", "", "--seeds", "-1", "0"), "--seeds=-1: at least two, each once, from 0 to 999999"),
    (("--variant", "a", "", "--seeds", "1", "1"), "--seeds=1: at least two, each once"),
    (("--variant", "a", "", "--variant", "a", ""), "--variant: name each differently"),
    (("--variant", "a", "", "--samples", "0"), "--samples=0: must be at least 1"),
    (("--variant", "a"), "argument --variant: expected 2 arguments"), (("--variant", "a", "", "--seeds", "x"), "argument --seeds: invalid int value: 'x'"),
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


def test_a_folder_holds_runs_of_one_kind_and_other_samples_are_evaluated_again(folder, programs):
    train_and_compare(folder, *TWO)
    programs.clear()
    assert train_and_compare(folder, *TWO, "--samples", "2") == 0 and {command[0] for command, _ in programs} == {"infer.py"} and len(programs) == 6
    with pytest.raises(ValueError, match=r"out/a/flags.txt: runs there have other settings; take another --output_dir or --variant"):
        train_and_compare(folder, "--variant", "a", "--loss_type cispo", "--seeds", "3", "5")
    (folder / "settings.json").write_text(json.dumps(json.loads((folder / "settings.json").read_text()) | {"max_steps": 3}))
    with pytest.raises(ValueError, match=r"out/settings.json: runs there have other settings"):
        train_and_compare(folder, *TWO)


@pytest.mark.parametrize("names", [exhaustive(("a", "a-twin"))])
def test_two_seeds_from_the_command_to_the_table(folder, names, capsys):
    assert train_and_compare(folder, "--variant", "a", "", "--seeds", "0", "1", "--samples", "2") == 0
    out = folder / "out"
    assert all((out / name / f"seed-{seed}/final/model.safetensors").exists() for name in names for seed in (0, 1))
    settings = read_settings(out / "settings.json")
    assert settings["profile"] == "demo" and settings["max_steps"] == 2 and "learning_rate" not in settings, "what was named alone"
    seeds = {read_settings(out / name / f"seed-{seed}/config.json")["seed"] for name in names for seed in (0, 1)}
    cold = (out / "cold_start/final/model.safetensors").read_bytes()
    assert seeds == {0, 1, 10**6, 10**6 + 1} and cold == (out / "cold_start/checkpoints/step-00000003/model.safetensors").read_bytes()
    assert re.search(r"\na-twin +2 +\S+ \[.* by chance\n", capsys.readouterr().out)
