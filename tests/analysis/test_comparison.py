"""Comparison of variants: intervals, verdicts and seeds by hand and by simulation, and the runs that are read."""

import json
import math

import numpy as np
import pytest

from analysis.comparison import compare, differences, read_variants, seeds_needed, write_comparison
from analysis.evaluation import t_interval


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


def test_runs_are_paired_by_their_names_and_the_variant_with_a_twin_comes_first(tmp_path):
    for name, shares in ("zero", [[True, False], [True, True]]), ("zero-twin", [[True, True]] * 2), ("alone", [[False, False]] * 2):
        for seed in range(3) if name != "alone" else (2, 7):
            write_run(tmp_path / name / f"seed-{seed}", shares)
    variants, measure = read_variants([tmp_path])
    assert list(variants) == ["zero", "zero-twin", "alone"] and measure == "accuracy of 2 held-out problems"
    assert variants["zero"]["seed-1"].tolist() == [0.5, 1.0]
    assert differences(variants["alone"], variants["zero"]).tolist() == [[-0.5, -1.0]], "seed 2 alone is of both"
    text = write_comparison([tmp_path])
    rows = [line.split() for line in text.splitlines()]
    assert rows[1][:3] == ["zero", "3", "0.750"] and rows[2][:2] == ["zero-twin", "3"] and rows[3][:3] == ["alone", "2", "0.000"]
    assert "+0.250" in rows[2] and text.splitlines()[2].endswith("by chance") and "-0.750" in rows[3]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    named = read_variants([tmp_path / "zero/seed-0", tmp_path / "alone/seed-2"])[0]
    assert {name: list(runs) for name, runs in named.items()} == {"alone": ["seed-2"], "zero": ["seed-0"]}


def test_a_twin_that_differs_is_pointed_out(tmp_path):
    for seed in range(3):
        for name, right in ("a", False), ("a-twin", True):
            write_run(tmp_path / name / f"seed-{seed}", [[right]] * 2)
    assert "The twin differs: these intervals are too short here." in write_comparison([tmp_path])


def test_a_variant_without_a_common_seed_has_a_row_and_a_twin_of_another_variant_is_no_measure(tmp_path):
    for name, seed in ("a", 0), ("a", 1), ("a-twin", 0), ("a-twin", 1), ("a-b", 2), ("a-b-twin", 2):
        write_run(tmp_path / name / f"seed-{seed}", [[name != "a-b-twin"]] * 2)
    rows = [line.split() for line in write_comparison([tmp_path]).splitlines()]
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
        write_comparison([tmp_path])
    one = write_run(tmp_path / "a/seed-0", [[True]] * 2)
    other = write_run(tmp_path / "b/seed-0", [[True]] * 2, prompts=("p", "r"))
    with pytest.raises(ValueError, match=r"b/seed-0: evaluated on other problems than .*a/seed-0"):
        write_comparison([tmp_path])
    evaluation = json.loads((one / "evaluation.json").read_text())
    (other / "evaluation.json").write_text(json.dumps(evaluation | {"samples": 2}))
    with pytest.raises(ValueError, match=r"b/seed-0: evaluated on other problems"):
        write_comparison([tmp_path])
    write_run(tmp_path / "c" / "unscored", None, [[None], []])
    with pytest.raises(ValueError, match=r"c/unscored: no problem of its evaluation has points"):
        read_variants([tmp_path / "c/unscored"])
    with pytest.raises(ValueError, match=r"a/seed-0: another run has its name and variant"):
        write_comparison([one, one])
    (other / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=r"b/seed-0: it is not evaluated; python infer.py --model_path .*b/seed-0/final"):
        write_comparison([one, other])
