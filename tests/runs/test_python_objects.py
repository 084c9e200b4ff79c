"""train(config, reward_functions=..., dataset=..., environment=...) with Python objects, in memory and resumed."""

import json

import datasets
import pytest
from conftest import filled
import torch

import train
from config import Config, GRPOConfig, TrainingConfig
from rewards import correctness
from runs.records import read_jsonl
from runs.setup import set_up

EXAMPLES = [{"prompt": f"{a}+{b}=?", "answer": str(a + b), "hint": "x" * a} for a in range(5) for b in range(5)]


def shorter(completions, hint, **columns):
    return [-len(text) - len(h) for text, h in zip(completions, hint)]


def echo(conversation):
    return (None if len(conversation) > 2 else "again", float(len(conversation)))


def config_of(folder, grpo=None, **training):
    options = dict(
        use_grpo=True, cold_start_steps=0, max_steps=2, batch_size=3, report_to="none", save_steps=1, eval_steps=0,
        output_dir=folder, log_rollouts_every=1)
    return Config(grpo=GRPOConfig(**{"generation_max_length": 8, **(grpo or {})}), training=TrainingConfig(**options | training))


def test_callables_and_lists_train_and_the_model_is_returned(tmp_path):
    config = config_of(tmp_path / "run", dict(max_turns=2, reward_weights=[1.0, 0.5, 2.0]))
    model, tokenizer = train.train(
        config, reward_functions=[shorter, "correctness", "environment"], dataset=EXAMPLES, eval_dataset=EXAMPLES[:4], environment=echo)
    ids = model.generate(**tokenizer("1+1=?", return_tensors="pt"), max_new_tokens=3)
    assert ids.shape[1] <= 6 + 3
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["grpo"]["reward_functions"] == ["python:shorter", "correctness", "environment"]
    assert (saved["grpo"]["environment"], saved["data"]["dataset"]) == ("python:echo", "python:list")
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [line["eval_problems"] for line in lines if line["phase"] == "eval"] == [4, 4]
    rollouts = read_jsonl(tmp_path / "run/rollouts.jsonl")
    assert {r["prompt"] for r in rollouts} <= {e["prompt"] for e in EXAMPLES[4:]}, "held-out prompts are not trained on"
    assert all(set(r["rewards"]) == {"shorter", "correctness", "environment"} for r in rollouts)


def test_without_objects_names_of_the_configuration_count_and_a_built_in_function_keeps_its_name(tmp_path):
    run = set_up(config_of(tmp_path / "a"))
    assert [f.__name__ for f in run.reward_functions] == ["correctness", "reasoning_coherence", "explanation_quality"]
    run = set_up(config_of(tmp_path / "b"), reward_functions=[correctness])
    assert run.config.grpo.reward_functions == ["correctness"] and run.reward_functions == [correctness]
    assert run.config.data.dataset == "arithmetic" and run.config.grpo.weights == [1.0]


def test_prompts_alone_and_an_object_with_items_are_data_too(tmp_path):
    run = set_up(config_of(tmp_path / "a"), reward_functions=["reasoning_coherence"], eval_dataset=["four"],
                 dataset=["one", "two", [{"role": "user", "content": "three"}]])
    assert [example["prompt"] for example in run.train_set][:2] == ["one", "two"] and len(run.train_set) == 3
    run = set_up(config_of(tmp_path / "b"), dataset=datasets.Dataset.from_list(EXAMPLES))
    assert len(run.eval_set) == len(EXAMPLES) // 5 and run.train_set[0]["hint"] is not None


def test_a_run_from_python_is_resumed_with_the_same_objects_and_ends_with_the_same_weights(tmp_path, capsys):
    objects = dict(reward_functions=[shorter], dataset=EXAMPLES)
    whole, _ = train.train(config_of(tmp_path / "whole", max_steps=4), **objects)

    def stop_at_two(completions, **columns):
        stop_at_two.calls += 1
        if stop_at_two.calls == stop_at_two.limit:
            raise KeyboardInterrupt
        return shorter(completions, **columns)

    stop_at_two.__name__, stop_at_two.calls, stop_at_two.limit = "shorter", 0, 4    # start-up check, evaluation, two steps
    with pytest.raises(KeyboardInterrupt):
        train.train(config_of(tmp_path / "run", max_steps=4), reward_functions=[stop_at_two], dataset=EXAMPLES)
    again = filled(Config(training=TrainingConfig(output_dir=tmp_path / "run", resume=True)))
    assert (again.training.max_steps, again.grpo.reward_functions) == (4, ["python:shorter"]), "settings of the run"
    for missing in [{}, dict(reward_functions=[shorter]), dict(dataset=EXAMPLES)]:
        with pytest.raises(ValueError, match=r"a Python object of the program that began this run; pass it again: train\("):
            train.train(again, **missing)
    resumed, _ = train.train(again, **objects)
    assert "resuming" in capsys.readouterr().out
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name


class Rule:
    """Equal to others of its kind, hence without a hash; empty, hence false."""

    def __eq__(self, other):
        return isinstance(other, Rule)

    def __len__(self):
        return 0

    def __call__(self, completions, **columns):
        return [float(len(text) % 3) for text in completions]


def test_one_function_a_generator_of_functions_and_objects_without_a_hash_are_reward_functions(tmp_path):
    for number, functions in enumerate([shorter, "correctness", (f for f in [shorter]), [Rule()]]):
        run = set_up(config_of(tmp_path / f"{number}"), reward_functions=functions, dataset=EXAMPLES)
        assert len(run.reward_functions) == 1
    train.train(config_of(tmp_path / "run", max_steps=1), reward_functions=[Rule()], dataset=EXAMPLES)
    assert any("eval_reward/Rule" in line for line in read_jsonl(tmp_path / "run/metrics.jsonl"))


@pytest.mark.parametrize("objects,message", [
    (dict(reward_functions=[None]), "None is neither a function nor the name of one"),
    (dict(environment=3, reward_functions=["correctness"]), "3 is neither a function"),
    (dict(dataset={"train": EXAMPLES}), "must be a list of examples or a datasets.Dataset, not a dict"),
    (dict(dataset=(e for e in EXAMPLES)), "not a generator: choose a split, or pass list(...)"),
    (dict(eval_dataset=[]), "dataset: no examples in it"),
    (dict(reward_functions=[Rule(), Rule()]), "two have the name Rule; rename one by its __name__"),
    (dict(reward_functions=[shorter, lambda completions, **columns: [0]], dataset=EXAMPLES), "1 weights for 2 reward functions"),
    (dict(reward_functions=[lambda texts: [0]]), "--reward_functions python:<lambda>: add completions, a list of them, to its parameters"),
    (dict(reward_functions=[shorter], dataset=["p", "q", "r", "s"]), "needs the column hint, which python:list does not have"),
    (dict(environment=lambda: None, reward_functions=[correctness, "environment"]), "must take the conversation"),
    (dict(environment=echo), "with --max_turns=1 its messages are never used"),
    (dict(dataset=[]), "dataset: no examples in it"),
    (dict(dataset=[{"text": "p"}]), "it needs one of prompt"),
    (dict(reward_functions=[]), "name at least one"),
])
def test_wrong_objects_are_one_line_before_anything_is_loaded(objects, message, tmp_path):
    weights = [1.0] if "weights" in message else []
    turns = 2 if "conversation" in message else 1
    with pytest.raises(ValueError) as error:
        train.train(config_of(tmp_path / "run", dict(reward_weights=weights, max_turns=turns)), **objects)
    assert message in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


