"""Built-in tasks are correct, reproducible and split without overlap; so are those of reasoning-gym, where it is installed."""

import re
import sys

import pytest

from reward_functions.arithmetic import countdown
from reward_functions.loading import load_reward_function
from rewards import correctness, reasoning_coherence
from runs.command_line import parse_config
from sources import load_examples
from sources.gym_tasks import gym_examples, split_tasks


def test_arithmetic_is_right_reproducible_and_split_without_overlap():
    train, test = load_examples("arithmetic", "train", seed=1), load_examples("arithmetic", "test", seed=2)
    assert len(train) == 9000 and len(test) == 1000
    assert not {e["prompt"] for e in train} & {e["prompt"] for e in test}
    texts, answers = [e["completion"] for e in train], [e["answer"] for e in train]
    assert all(p == 1.0 for p in correctness(texts, answer=answers))
    assert all(p == 1.0 for p in reasoning_coherence(texts))
    for example in train[:50]:
        a, b = example["prompt"].removesuffix("=?").split("+")
        assert int(a) + int(b) == int(example["answer"])
        for step in example["completion"].partition("</reasoning>")[0].removeprefix("<reasoning>").split():
            left, right = step.split("=")
            assert sum(map(int, left.split("+"))) == int(right)
    for example in train:                                 # the last digit of the first result, behind the last result
        results = re.findall(r"=(\d+)", example["completion"])
        assert int(results[-1]) * 10 + int(results[0]) % 10 == int(example["answer"])
    assert train == load_examples("arithmetic", "train", seed=1) != load_examples("arithmetic", "train", seed=2)
    assert load_examples("arithmetic", limit=5, seed=1) == train[:5]


def test_every_countdown_problem_is_solved_by_its_demonstration_and_never_both_trained_and_tested_on():
    train, test = load_examples("countdown", "train", seed=1), load_examples("countdown", "test", seed=2)
    assert len(train) == 9000 and len(test) == 1000
    problems = [(*sorted(e["numbers"]), e["target"]) for e in [*train, *test]]
    assert len(set(problems)) == 10_000, "the same numbers in another order are the same problem"
    for example in [*train, *test]:
        assert re.findall(r"\d+", example["prompt"]) == [str(example["target"]), *map(str, example["numbers"])]
        assert len(example["numbers"]) == 3 and all(1 <= n <= 25 for n in example["numbers"]) and 10 <= example["target"] <= 99
        reasoning, _, answer = example["completion"].removesuffix("</answer>").partition("</reasoning><answer>")
        assert abs(eval(answer) - example["target"]) < 1e-9
        assert sorted(map(int, re.findall(r"\d+", answer))) == sorted(example["numbers"])
        for step in reasoning.removeprefix("<reasoning>").split():
            left, right = step.split("=")
            assert abs(eval(left) - int(right)) < 1e-9 and int(right) > 0
    columns = {name: [e[name] for e in train] for name in ("numbers", "target")}
    texts = [e["completion"] for e in train]
    assert set(countdown(texts, **columns)) == set(reasoning_coherence(texts)) == {1.0}
    assert all(any(part in text for text in texts) for part in ("+", "-", "*", "/", "<answer>(", ")</answer>"))
    assert train == load_examples("countdown", "train", seed=1) != load_examples("countdown", "train", seed=2)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for read in load_examples, load_reward_function:
        with pytest.raises(ValueError, match=r"^reasoning_gym: .* pip install reasoning-gym$"):
            read("reasoning_gym:chain_sum")


def test_options_are_json_or_text_and_may_be_lists():
    source = 'reasoning_gym:chain_sum?operators=["+","-"]&size=4&level=easy,gcd'
    assert split_tasks(source) == [("chain_sum", dict(operators=["+", "-"], size=4, level="easy")), ("gcd", {})]


def test_splits_have_other_problems_and_seeds_another_order():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    source = "reasoning_gym:chain_sum?size=40&min_digits=3,spell_backward?size=30"
    train, again, test = (load_examples(source, split, seed=seed) for split, seed in (("train", 0), ("train", 1), ("test", 0)))
    prompts = [[example["prompt"] for example in examples] for examples in (train, again, test)]
    assert len(train) == 70 and {example["task"] for example in train[:20]} == {"chain_sum", "spell_backward"}
    assert prompts[0] != prompts[1] and sorted(prompts[0]) == sorted(prompts[1])
    assert not {example["prompt"] for example in train if example["task"] == "chain_sum"} & {*prompts[2]}
    assert len(load_examples(source, "test", limit=5)) == 5
    for split in "validation", "train[:5]":
        with pytest.raises(ValueError, match="train and test"):
            gym_examples(source, split, 0)


@pytest.mark.parametrize("source, message", [
    ("nope", "'nope' not registered"), ("chain_sum?foo=1", "unexpected keyword argument 'foo'"), ("chain_sum?seed=1", "'seed'"),
    ("chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"), ("chain_sum?min_terms=x", "not supported between"),
])
def test_wrong_tasks_and_options_are_one_line(source, message):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    with pytest.raises(ValueError, match=rf"^reasoning_gym:{source.partition('?')[0]}: .*{message}.*$"):
        load_examples(f"reasoning_gym:{source}")


def test_the_scorer_of_a_task_scores_its_own_problems():
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    config = parse_config(["--use_grpo", "--dataset", "reasoning_gym:chain_sum?size=5,countdown?size=5"])
    assert config.grpo.reward_functions == [
        "reasoning_gym:chain_sum", "reasoning_gym:countdown", "reasoning_coherence", "explanation_quality"]
    assert config.grpo.weights == [1.0, 1.0, 0.2, 0.1]
    examples = load_examples(config.data.dataset)
    columns = {name: [example[name] for example in examples] for name in ("task", "entry")}
    gold = [example["completion"] for example in examples]
    for name in config.grpo.reward_functions[:2]:
        function = load_reward_function(name)
        assert function.__name__ == name
        is_own = [f"reasoning_gym:{example['task']}" == name for example in examples]
        assert function(gold, **columns) == [1.0 if own else None for own in is_own]
        for text in "", "<answer></answer>", "no tags: " + examples[0]["entry"]["answer"], "<answer>((</answer>":
            assert all(reward is None or reward < 0.2 for reward in function([text] * len(gold), **columns)), text


def test_flags_go_before_the_rewards_of_tasks():
    config = parse_config(["--use_grpo", "--dataset", "reasoning_gym:chain_sum", "--reward_functions", "reasoning_gym:chain_sum"])
    assert config.grpo.reward_functions == ["reasoning_gym:chain_sum"] and config.grpo.weights == [1.0]
