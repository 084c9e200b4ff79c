"""Built-in tasks are correct, reproducible and split without overlap."""

import re


from reward_functions.arithmetic import countdown
from rewards import correctness, reasoning_coherence
from sources import load_examples


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
