"""Mean points of reward functions: their intervals, and evaluations by infer.py of data with and without answers."""

import json
import math
import re
import statistics

import numpy as np
import pytest

import infer
from analysis import evaluation
from analysis.evaluation import estimate_points, share_interval, student_quantile
from data import load_examples
from engine.errors import RunError

T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 7: 2.365, 29: 2.045, 120: 1.980, 10**6: 1.960}        # of every textbook: two sides, 95 %
TIMES = 500                     # 95 % of them is found to within 2 % by two standard deviations


def test_quantiles_of_student_are_those_of_the_tables():
    for freedom, value in T_TABLE.items():
        assert student_quantile(freedom) == pytest.approx(value, abs=6e-4), freedom


def test_the_interval_of_points_is_students_over_problems_not_over_completions():
    points = [[1.0, 3.0], [-5.0, -6.0], [4.0, 4.0], [0.5, -0.5], [2.0, 8.0], [0.0, 1.0], [7.0, -9.0], [3.0, 3.0]]
    means = [statistics.mean(row) for row in points]
    found, half = estimate_points(points), T_TABLE[7] * statistics.stdev(means) / math.sqrt(8)
    assert found["mean"] == pytest.approx(statistics.mean(means))
    assert (found["low"], found["high"]) == pytest.approx((found["mean"] - half, found["mean"] + half), abs=2e-3)
    assert (found["problems"], found["unscored"]) == (8, 0)
    tripled = estimate_points([row * 3 for row in points])
    assert (tripled["low"], tripled["high"]) == pytest.approx((found["low"], found["high"])), "more completions, no more problems"


def test_a_difference_of_points_is_paired():
    hard = [[-100.0], [0.0], [100.0], [200.0]]
    better = [[row[0] + gain] for row, gain in zip(hard, [1.0, 2.0, 1.0, 2.0])]
    found, half = estimate_points(better, hard), T_TABLE[3] * statistics.stdev([1, 2, 1, 2]) / 2
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((1.5, 1.5 - half, 1.5 + half), abs=1e-3)
    assert estimate_points(hard, better)["mean"] == -1.5


def test_what_was_not_scored_is_counted_and_is_no_zero():
    found = estimate_points([[1.0, None], [None, None], [3.0, 5.0], [2.0, 3.0]])
    assert (found["mean"], found["problems"], found["unscored"]) == (pytest.approx((1 + 4 + 2.5) / 3), 3, 3)
    both = estimate_points([[1.0], [None], [3.0], [2.0]], [[0.5], [1.0], [None], [1.0]])
    assert (both["mean"], both["problems"], both["unscored"]) == (0.75, 2, 2)
    nothing = estimate_points([[None], [None]])
    assert (nothing["mean"], nothing["low"], nothing["problems"], nothing["unscored"]) == (None, None, 0, 2)


def test_points_of_0_and_1_are_shares_and_equal_points_have_no_interval():
    rows = [[float(i < 3)] for i in range(40)]
    assert (estimate_points(rows)["low"], estimate_points(rows)["high"]) == pytest.approx(share_interval(3, 40))
    for alone in ([[0.3]], [[0.1]] * 9, [[0.0]] * 9, [[1.0]] * 9):
        found = estimate_points(alone)
        assert found["low"] is None is found["high"]
        assert found["mean"] == pytest.approx(alone[0][0])


POINTS = {                      # problems; draw (problems, completions) points; their mean; share of intervals that hold it
    "normal": (4, lambda g, n: g.normal(2, 30, (n, 1)), 2.0, 0.936),
    "normal, over problems and completions": (8, lambda g, n: g.normal(2, 3, (n, 1)) + g.normal(0, 9, (n, 4)), 2.0, 0.924),
    "-0.3, 0.7 or 1": (40, lambda g, n: g.choice([-0.3, 0.7, 1.0], (n, 1), p=[0.5, 0.2, 0.3]), 0.29, 0.934),      # as of an environment
    "exponential": (100, lambda g, n: -g.exponential(50, (n, 2)), -50.0, 0.954),               # as of a penalty for length
    "exponential, few problems": (6, lambda g, n: -g.exponential(50, (n, 1)), -50.0, 0.900),
}


@pytest.mark.parametrize("kind", POINTS)
def test_mean_points_are_held_in_95_of_100_measurements_and_in_less_if_few_and_skewed(kind):
    size, draw, truth, share = POINTS[kind]
    generator, held = np.random.default_rng(0), 0
    for _ in range(TIMES):
        found = estimate_points(draw(generator, size).tolist())
        held += found["low"] <= truth <= found["high"]
    assert (0.85 if "few" in kind else 0.92) <= held / TIMES == share <= 0.98, held / TIMES


# ---- from the command line ------------------------------------------------------------------------------------------

MINE = '''
def length(completions, **columns):
    return [float(len(text)) for text in completions]

def later(completions, prompts, **columns):
    return [None if prompt == "p0" else 2.0 for prompt in prompts]

def strict(completions, prompts, **columns):
    if "p2" in prompts:
        raise ValueError("first line\\nsecond line")
    return [1.0 for prompt in prompts]
'''


@pytest.fixture
def prompts(tmp_path):
    """Eight prompts without answers, and reward functions in a file."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(8)))
    return ["--evaluate", str(tmp_path / "prompts.jsonl"), "--generation_max_length", "12"]


@pytest.fixture
def scripted(monkeypatch):
    """The completions are those of the list that this returns, over and over."""
    real, texts = evaluation.sample_completions, []

    def sample(*args, **options):
        rollout = real(*args, **options)
        rollout.completions = [texts[row % len(texts)] for row in range(len(rollout.completions))]
        return rollout

    monkeypatch.setattr(evaluation, "sample_completions", sample)
    return texts


def result_of(tmp_path, *argv):
    """Evaluate, and return what --json writes."""
    infer.main([*argv, "--json", str(tmp_path / "result.json")])
    return json.loads((tmp_path / "result.json").read_text())


SUMS = "--evaluate arithmetic --limit 40 --generation_max_length 4".split()


def test_prompts_without_answers_are_evaluated_by_ones_own_function(folder, tmp_path, prompts, capsys):
    functions = ["--reward_functions", f"{tmp_path}/mine.py:length", "repetition_penalty", "--reward_weights", "0.5", "2"]
    written = result_of(tmp_path, "--model_path", folder, *prompts, *functions, "--samples", "3")
    (result,), printed = written["results"], capsys.readouterr()
    assert written["reward_weights"] == [0.5, 2] and written["reward_functions"] == functions[1:3]
    points = [problem["points"] for problem in result["problems"]]
    assert len(points) == 8 and all(len(row) == 3 for of_problem in points for row in of_problem.values())
    means = [statistics.mean(of_problem["reward/length"]) for of_problem in points]
    half = T_TABLE[7] * statistics.stdev(means) / math.sqrt(8)
    low, high = statistics.mean(means) - half, statistics.mean(means) + half
    line = re.search(r"^reward/length (\S+) points \[(\S+), (\S+)\] of 8 x 3$", printed.out, flags=re.MULTILINE)
    assert [float(number) for number in line.groups()] == pytest.approx([statistics.mean(means), low, high], abs=0.01)
    for of_problem in points:
        pairs = zip(of_problem["reward/length"], of_problem["reward/repetition_penalty"])
        assert of_problem["reward"] == pytest.approx([0.5 * length + 2 * penalty for length, penalty in pairs])
    total = statistics.mean(statistics.mean(of_problem["reward"]) for of_problem in points)
    assert f"\nreward {total:.3f} points [" in printed.out and "accuracy" not in printed.out and not printed.err


def test_what_a_function_could_not_score_is_counted_and_left_out(folder, tmp_path, prompts, capsys):
    argv = ["--model_path", folder, *prompts, "--reward_functions", f"{tmp_path}/mine.py:length", f"{tmp_path}/mine.py:later"]
    (result,) = result_of(tmp_path, *argv, "--samples", "2")["results"]
    points = [problem["points"] for problem in result["problems"]]
    assert points[0]["reward/later"] == [None, None] and points[0]["reward"] == points[0]["reward/length"]
    means = [statistics.mean(of_problem["reward/length"]) + 2 * (p > 0) for p, of_problem in enumerate(points)]
    printed = capsys.readouterr().out
    assert "reward/later 2.000 points of 7 x 2, 2 completions unscored" in printed
    assert result["estimates"]["reward"]["mean"] == pytest.approx(statistics.mean(means))        # as in training
    assert re.search(rf"\nreward {statistics.mean(means):.3f} points \[.*\] of 8 x 2\n", printed)
    (result,) = result_of(tmp_path, *argv, "--reward_weights", "1", "0")["results"]
    assert all(problem["points"]["reward"] == problem["points"]["reward/length"] for problem in result["problems"])


def test_a_function_that_raises_is_one_line_or_unscored(folder, tmp_path, prompts, capsys):
    argv = ["--model_path", folder, *prompts, "--reward_functions", f"{tmp_path}/mine.py:strict"]
    with pytest.raises(RunError, match=r"^reward function strict raised ValueError: first line second line \(mine.py.*on 8 completions") as error:
        infer.main(argv)
    assert "\n" not in str(error.value)
    (both,) = result_of(tmp_path, *argv, f"{tmp_path}/mine.py:length", "--reward_errors", "none")["results"]
    assert [problem["points"]["reward"] for problem in both["problems"]] == [[None]] * 8
    assert "reward/strict ? points of 0, 8 completions unscored" in capsys.readouterr().out


def test_answers_are_evaluated_as_well_and_two_models_compared(folder, scripted, tmp_path, capsys):
    for p, example in enumerate(load_examples("arithmetic", "test", limit=40)):
        scripted += [f"<answer>{example['answer'] if p % 3 == 0 else 'x'}</answer>", "<answer>y</answer>"]
    argv = [*SUMS, "--samples", "2", "--reward_functions", "correctness", "reasoning_coherence", "--reward_weights", "1", "0.5"]
    written = result_of(tmp_path, "--model_path", folder, *argv, "--against_model", folder)
    printed = capsys.readouterr().out
    for result in written["results"]:
        right = [problem["right"] for problem in result["problems"]]
        assert right == [[p % 3 == 0, False] for p in range(40)]
        assert [problem["points"]["reward/correctness"] for problem in result["problems"]] == [list(map(float, row)) for row in right]
        accuracy, points = result["estimates"]["accuracy"], result["estimates"]["reward/correctness"]
        assert {name: points[name] for name in accuracy} == accuracy, "points of 0 and 1 are a share"
        assert result["estimates"]["pass@2"]["problems"] == 40 and "majority@2" in result["estimates"]
    assert set(written["differences"]) == set(written["results"][0]["estimates"])
    assert written["differences"]["reward"]["mean"] == 0 and written["differences"]["reward"]["low"] is None
    assert f"{folder} minus {folder}\naccuracy 0.000 of 40 x 2\n" in printed and "\nreward 0.000 points of 40 x 2" in printed


def test_rows_without_an_answer_count_for_points_and_not_for_accuracy(folder, scripted, tmp_path, capsys):
    scripted += ["<answer>1</answer>"]
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "answer": "2"}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--model_path", folder, "--evaluate", str(tmp_path / "some.jsonl"), "--generation_max_length", "4"]
    (result,) = result_of(tmp_path, *argv, "--reward_functions", "repetition_penalty", "correctness")["results"]
    assert [problem["right"] for problem in result["problems"]] == [[True], None, [False]]
    printed = capsys.readouterr().out
    assert "accuracy 0.500 [" in printed and "] of 2\n" in printed and "reward/repetition_penalty 0.000 points of 3" in printed
    assert "reward/correctness 0.500 points [" in printed and "] of 2, 1 completions unscored" in printed
    infer.main(argv)
    assert capsys.readouterr().out.startswith("accuracy 0.500 [")


def test_a_conversation_whose_environment_raises_is_one_line_or_unscored_and_not_right(folder, tmp_path, scripted, capsys):
    (tmp_path / "broken.py").write_text("def respond(conversation, answer):\n    return 1 / (int(answer) % 2)\n")
    scripted += ["<answer>1</answer>"]
    argv = ["--model_path", folder, "--evaluate", "arithmetic", "--limit", "8", "--environment", f"{tmp_path}/broken.py:respond",
            "--max_turns", "2", "--reward_functions", "environment", "--generation_max_length", "400"]
    with pytest.raises(RunError, match=r"environment .*broken.py:respond raised (ZeroDivision|Type)Error.*--reward_errors none"):
        infer.main(argv)
    (result,) = result_of(tmp_path, *argv, "--reward_errors", "none")["results"]
    points = [problem["points"]["reward/environment"] for problem in result["problems"]]
    assert [None] in points and all((problem["right"] is None) == (problem["points"]["reward"] == [None]) for problem in result["problems"])
    assert f"{points.count([None])} completions unscored" in capsys.readouterr().out


def test_an_answer_form_that_no_completion_has_is_mentioned(folder, tmp_path, prompts, scripted, capsys):
    scripted += ["The sum is 7."]
    sums, noted = ["--model_path", folder, *SUMS], "no completion has an <answer>...</answer>: ask for it with --instruction\n"
    assert result_of(tmp_path, *sums)["results"][0]["tagged"] == 0 and capsys.readouterr().err == noted
    infer.main(["--model_path", folder, *prompts, "--reward_functions", f"{tmp_path}/mine.py:later", "repetition_penalty"])
    assert capsys.readouterr().err == "", "these do not read the answer"
    scripted[0] = "<answer>x</answer>"
    infer.main(sums)
    assert capsys.readouterr().err == "", "wrong answers in the right form"
