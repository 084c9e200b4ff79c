"""The tasks of reasoning-gym, where the package is installed, and what is said where it is not."""

import sys

import pytest

import train

from reward_functions.loading import load_reward_function
from runs.command_line import parse_config
from sources import load_examples
from sources.gym_tasks import gym_examples, split_tasks


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for read in load_examples, load_reward_function:
        with pytest.raises(ValueError, match=r"^reasoning_gym: its .* pip install reasoning-gym$"):
            read("reasoning_gym:chain_sum")


def test_an_option_may_be_a_list():
    assert split_tasks('reasoning_gym:chain_sum?operators=["+","-"]&size=4,gcd') == ['chain_sum?operators=["+","-"]&size=4', "gcd"]


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
    ("nope", "there is no such task; there are ab, acre"), ("chain_sum?foo=1", "no option foo; there are allow_negation, max_digits"),
    ("chain_sum?seed=1", "no option seed"), ("gcd?size=9,gcd?size=8", "gcd: is named twice"),
    ("chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms"),
    ("chain_sum?min_terms=x", "reasoning_gym:chain_sum: "),
])
def test_wrong_tasks_and_options_are_one_line(source, message):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    with pytest.raises(ValueError, match=r"^reasoning_gym:") as error:
        load_examples(f"reasoning_gym:{source}")
    assert message in str(error.value) and "\n" not in str(error.value)


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
            assert all(point is None or point < 0.2 for point in function([text] * len(gold), **columns)), text


def test_the_linter_takes_the_scorers_of_the_tasks(capsys):
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    flags = "--use_grpo --check --report_to none --eval_limit 4 --dataset reasoning_gym:chain_sum?size=9,spell_backward?size=9"
    train.main(flags.split())
    printed = capsys.readouterr().out
    for task in "chain_sum", "spell_backward":
        assert f"| `reasoning_gym:{task}` | 1.00 | 0.00 | 0.0" in printed


def test_flags_go_before_the_rewards_of_tasks():
    config = parse_config(["--use_grpo", "--dataset", "reasoning_gym:chain_sum", "--reward_functions", "reasoning_gym:chain_sum"])
    assert config.grpo.reward_functions == ["reasoning_gym:chain_sum"] and config.grpo.weights == [1.0]
