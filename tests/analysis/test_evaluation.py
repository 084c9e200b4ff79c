"""pass@k, majority votes and intervals: against enumeration, formulas and simulation."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from analysis import chat, evaluation
import infer
from config import Config, ModelConfig
from data import load_examples
from analysis.evaluation import (
    estimate_by_t, estimate_mean, evaluate, majority_vote, pass_at_k, share_interval, summarise, values_by_problem,
)
from engine import make_engine
from engine.ranks import Ranks
from engine.policy import load_any_policy
from runs.console import held_out_text


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_hold_a_right_one(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        choices = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@pytest.mark.parametrize("answers,vote", [
    (["7", "7", "8"], 1.0), (["8", "8", "7"], 0.0), (["7", "7.0", "8", "8 ", "$7"], 1.0), (["7", "8"], 0.5),
    (["7", "8", "9"], 1 / 3), ([None, None, "7"], 1.0), ([None, None], 0.0), ([], 0.0),
])
def test_a_majority_votes_by_value_draws_are_shared_and_the_unreadable_abstain(answers, vote):
    texts = ["no answer" if answer is None else f"<answer>{answer}</answer>" for answer in answers]
    assert majority_vote(texts, "7") == pytest.approx(vote)


def test_the_summary_by_hand():
    problems = [{"right": [True, False, False, False], "majority": 0.5}, {"right": [False] * 4, "majority": 0.0}]
    found = {name: estimate["mean"] for name, estimate in summarise(problems).items()}
    assert found == {"accuracy": 0.125, "pass@1": 0.125, "pass@2": 0.25, "pass@4": 0.5, "majority@4": 0.25}
    assert list(summarise([{"right": [True], "majority": 1.0}])) == ["accuracy"]
    better = [problems[0], {"right": [True] * 4, "majority": 1.0}]
    assert {name: d["mean"] for name, d in summarise(better, problems).items()} == {
        "accuracy": 0.5, "pass@1": 0.5, "pass@2": 0.5, "pass@4": 0.5, "majority@4": 0.5
    }


# ---- intervals: how often they hold the truth -----------------------------------------------------------------------

TIMES = 500                     # 95 % of them is found to within 2 % by two standard deviations


def measured(generator, n, chances):
    """Problems with these chances of success, each with n completions."""
    return [{"right": row, "majority": 0.0} for row in (generator.random((len(chances), n)) < chances[:, None]).tolist()]


def test_an_interval_ends_where_results_as_far_or_farther_have_a_chance_of_2_5_in_100():
    """The ends are tried in the sums of the binomial distribution; where all problems agree, in its one term."""
    def chance(n, p, counts):
        return sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts)

    for successes, n in (1, 20), (7, 20), (19, 20), (3, 256), (128, 256):
        low, high = share_interval(successes, n)
        assert chance(n, low, range(successes, n + 1)) == pytest.approx(0.025, abs=1e-5)
        assert chance(n, high, range(successes + 1)) == pytest.approx(0.025, abs=1e-5)
    for n in 1, 20, 256:
        for value in 0.0, 1.0:
            found = estimate_mean(np.full(n, value))
            exact = (0.025 ** (1 / n), 1.0) if value else (0.0, 1 - 0.025 ** (1 / n))
            assert (found["low"], found["high"]) == pytest.approx(exact, abs=1e-6)


def test_completions_of_one_problem_are_no_more_problems():
    """An interval over all completions would be far too short: it takes them for independent."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(TIMES):
        right = np.array([problem["right"] for problem in measured(generator, 16, generator.beta(0.6, 1.4, 60))])
        low, high = share_interval(right.sum(), right.size)
        held += low <= 0.3 <= high
    assert held / TIMES < 0.7


def test_the_interval_of_fractional_values_is_that_of_their_variance():
    values = np.random.default_rng(1).random(200)
    found, half = estimate_mean(values), 1.96 * values.std() / math.sqrt(200)
    assert (found["low"], found["high"]) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.005)
    alike = estimate_mean(np.full(20, 0.5))
    assert alike["low"] < 0.45 and alike["high"] > 0.55, "a few equal values are no certainty"


CHANCES = {                     # of success, by problem
    "some easy, some hard": lambda g, size: g.beta(0.6, 1.4, size),
    "near 1": lambda g, size: g.beta(5, 0.3, size),
    "3 % hard": lambda g, size: np.where(g.random(size) < 0.97, 0.999, 0.1),
    "90 % never": lambda g, size: np.where(g.random(size) < 0.9, 0.0, 0.7),
}
COVERED = [                     # estimate, its interval, chances, problems, completions, share of intervals that hold the truth
    ("accuracy", "mean", "some easy, some hard", 100, 1, 0.964),
    ("accuracy", "mean", "near 1", 10, 16, 0.998),
    ("pass@8", "mean", "near 1", 10, 8, 1.000),
    ("pass@4", "mean", "3 % hard", 20, 4, 0.996),
    ("pass@4", "mean", "90 % never", 100, 4, 0.954),
    ("accuracy", "difference", "some easy, some hard", 100, 1, 0.964),
    ("accuracy", "difference", "near 1", 10, 16, 0.914),
    ("pass@4", "difference", "90 % never", 50, 4, 0.932),
]


@pytest.mark.slow
@pytest.mark.parametrize("name,kind,chances,size,n,share", COVERED)
def test_the_coverage_is_the_measured_one(name, kind, chances, size, n, share):
    generator, gain = np.random.default_rng(0), 0.05 * (kind == "difference")

    def values(difficulty):
        return values_by_problem(measured(generator, n, difficulty))[name]

    many = CHANCES[chances](generator, 1_000_000)
    k = int(name.removeprefix("pass@")) if "@" in name else 1
    truth = np.mean(1 - (1 - np.minimum(1, many + gain)) ** k - (1 - (1 - many) ** k) * bool(gain))
    held = 0
    for _ in range(TIMES):
        difficulty = CHANCES[chances](generator, size)
        found = estimate_by_t(values(np.minimum(1, difficulty + gain)) - values(difficulty)) if gain else estimate_mean(values(difficulty))
        held += found["low"] is not None and found["low"] <= truth <= found["high"]
    assert held / TIMES == share >= (0.91 if gain else 0.94), held / TIMES


# ---- from the command line ------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch):
    """The first two completions of every problem with an even answer are right; the model called "other" is always wrong."""
    real, truth = evaluation.sample_completions, lambda prompt: eval(prompt.removesuffix("=?"))

    def sample(engine, environment, examples, config, *, num_completions, **options):
        rollout = real(engine, environment, examples, config, num_completions=num_completions, **options)
        prompts = [example["prompt"] for example in examples]
        rollout.completions = [
            f"<answer>{truth(prompt) if g < 2 and truth(prompt) % 2 == 0 and engine.model.name_or_path != 'other' else 'x'}</answer>"
            for prompt in prompts for g in range(num_completions)
        ]
        return rollout

    monkeypatch.setattr(evaluation, "sample_completions", sample)


ASK = "--evaluate arithmetic --limit 40 --generation_max_length 4".split()


def test_several_samples_are_measured_written_down_and_compared(folder, scripted, capsys, tmp_path, monkeypatch):
    load = chat.load_any_policy

    def named(config, **options):
        model, tokenizer = load(config, **options)
        model.name_or_path = "other" if config.model_path == "" else "first"
        return model, tokenizer

    monkeypatch.setattr(chat, "load_any_policy", named)
    file = tmp_path / "result.json"
    infer.main(["--model_path", folder, *ASK, "--samples", "4", "--json", str(file)])
    printed, result = capsys.readouterr().out, json.loads(file.read_text())
    even = np.mean([int(problem["answer"]) % 2 == 0 for problem in result["results"][0]["problems"]])
    assert 0 < even < 1
    found = {name: estimate["mean"] for name, estimate in result["results"][0]["estimates"].items()}
    assert found == pytest.approx(
        {"accuracy": even / 2, "pass@1": even / 2, "pass@2": even * (1 - 1 / 6), "pass@4": even, "majority@4": even / 2}
    )
    for name, mean in found.items():
        assert f"{name} {mean:.3f} [" in printed
    assert "] of 40 x 4\n" in printed
    assert result["samples"] == 4 and "differences" not in result

    monkeypatch.setattr(chat, "load_any_policy", lambda config, **_: named(ModelConfig(config.model_path.replace("none", ""))))
    infer.main(["--model_path", folder, *ASK, "--samples", "4", "--against_model", "none", "--json", str(file)])
    differences = json.loads(file.read_text())["differences"]
    assert differences["pass@4"]["mean"] == pytest.approx(even) and differences["pass@4"]["low"] > 0
    assert f"{folder} minus none\naccuracy {even / 2:.3f} [" in capsys.readouterr().out


def test_one_sample_is_what_evaluate_says(folder, scripted, settings, capsys):
    model, tokenizer = load_any_policy(ModelConfig(model_path=folder))
    infer.main(["--model_path", folder, *ASK])
    examples = load_examples("arithmetic", "test", limit=40)
    result = evaluate(make_engine("shared", model, tokenizer), Ranks(), examples, settings, seed=0)
    assert 0 < result["eval_accuracy"] < 1
    assert capsys.readouterr().out == held_out_text(result, Config()) + "\n"


def test_accuracy_counts_sampled_answers(folder, monkeypatch, settings, capsys):
    engine = make_engine("shared", *load_any_policy(ModelConfig(model_path=folder)))
    real, settings = evaluation.sample_completions, replace(settings, generation_batch_size=2)

    def scripted(engine, environment, examples, *args, **kwargs):
        rollout = real(engine, environment, examples, *args, **kwargs)
        rollout.completions = [f"<answer>{'1' if e['prompt'] == 'easy' else '0'}</answer>" for e in examples]
        return rollout

    monkeypatch.setattr(evaluation, "sample_completions", scripted)
    examples = [{"prompt": "easy", "answer": "1"}] * 3 + [{"prompt": "hard", "answer": "1"}] + [{"prompt": "unknown"}]
    result = evaluate(engine, Ranks(), examples, settings, seed=0)
    assert result["eval_accuracy"] == 0.75 and result["eval_problems"] == 4
    assert (result["eval_accuracy_low"], result["eval_accuracy_high"]) == pytest.approx(share_interval(3, 4))
    assert "eval_accuracy" not in evaluate(engine, Ranks(), examples[-1:], settings, seed=0)
    infer.main(["--model_path", folder, "--evaluate", "arithmetic", "--limit", "4", "--generation_max_length", "4"])
    assert "accuracy 0.000 [0.000, 0.602] of 4" in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 3])
def test_the_batch_size_bounds_what_is_sampled_at_once_and_changes_no_answer(folder, tmp_path, monkeypatch, size):
    real, batches = evaluation.sample_completions, []

    def counting(engine, environment, examples, config, **options):
        batches.append(config.generation_batch_size)
        return real(engine, environment, examples, config, **options)

    monkeypatch.setattr(evaluation, "sample_completions", counting)
    (tmp_path / "q.jsonl").write_text("".join(f'{{"prompt": "{n}+1=?", "answer": "{n + 1}"}}\n' for n in range(3)))
    flags = ["--model_path", folder, "--evaluate", f"{tmp_path}/q.jsonl", "--generation_max_length", "6", "--samples", "2",
             "--reward_functions", "diversity"]
    for name, more in ("all", []), ("few", ["--generation_batch_size", f"{size}"]):
        infer.main([*flags, *more, "--json", f"{tmp_path}/{name}.json"])
    every, few = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("all", "few"))
    assert batches == [64, size] and every == few


@pytest.mark.parametrize("flags,message", [
    ("--evaluate arithmetic --samples 0", "--samples=0: must be at least 1"),
    ("--evaluate arithmetic --samples 4 --generation_temperature 0", "--samples=4: all equal with --generation_temperature=0"),
    ("--evaluate {tmp}/bare.jsonl", "no example has an answer; name --reward_functions that need none, or the column with --answer"),
    ("--evaluate {tmp}/bare.jsonl --reward_functions correctness", "correctness: needs the column answer"),
    ("--evaluate {tmp}/blank.jsonl", "no example has an answer"),
    ("--evaluate {tmp}/object.jsonl", "the answers in .*object.jsonl are objects; name a field: --answer_column answer.truth"),
    ("--evaluate arithmetic --reward_functions {tmp}/mine.py:f {tmp}/other.py:f", "two have the name"),
    ("--evaluate arithmetic --reward_functions countdown --reward_weights 1 2", "2 weights for 1 reward functions, countdown"),
])
def test_mistakes_are_one_line_before_a_model_is_loaded(tmp_path, monkeypatch, flags, message):
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a", "answer": " "}\n')
    (tmp_path / "object.jsonl").write_text('{"prompt": "a", "answer": {"truth": "1"}}\n')
    for name in "mine.py", "other.py":
        (tmp_path / name).write_text("def f(completions, **columns): ...\n")
    monkeypatch.setattr(chat, "load_any_policy", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message) as error:
        infer.main(flags.replace("{tmp}", str(tmp_path)).split())
    assert "\n" not in str(error.value)
