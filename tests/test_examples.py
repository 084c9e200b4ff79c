"""A script in examples/ has the settings of its .json file, and both train; reward functions and tasks are right."""

import dataclasses
import json
import math
import re
import runpy

import pytest
from conftest import ROOT, exhaustive, run_process

import train
from analysis.reward_linter import lint
from config import Config, GRPOConfig, ModelConfig
from engine.models import load_any_policy, save_any_policy
from reward_functions.loading import load_reward_function
from rewards import correctness
from sources import load_examples
from runs.command_line import parse_config

EXAMPLES = ROOT / "examples"
ROWS = [
    {"question": f"Tom has {n} apples and buys {n}. How many?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
    for n in range(1, 13)
]


@pytest.fixture
def shortened(monkeypatch, tmp_path):
    """Let train and train.py end after a step, on a small model and small data where those would be downloaded."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    save_any_policy(*load_any_policy(ModelConfig()), tmp_path / "model")
    seen, real = [], train.set_up

    def set_up(config, **objects):
        seen.append(config)
        flags = config.flags | dict(
            eval_limit=2, max_steps=2, batch_size=2, report_to="none", output_dir=str(tmp_path / f"run{len(seen)}"),
            generation_max_length=24, minibatch_size=min(4, config.grpo.minibatch_size),
            cold_start_steps=min(1, config.training.cold_start_steps))
        if config.model.model_path:
            flags |= dict(model_path=str(tmp_path / "model"), lora_rank=2, chat_template_kwargs="")
        if config.model.model_path and not config.data.dataset.startswith("examples/"):
            flags["dataset"] = str(tmp_path / "gsm8k.jsonl")
        return real(Config.of(**flags), **objects)

    monkeypatch.setattr(train, "set_up", set_up)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("situation", ["demo", exhaustive("gsm8k_lora"), exhaustive("ema_reference")])
def test_the_script_and_the_settings_file_are_the_same_run_and_train(situation, shortened, tmp_path):
    train.main([f"examples/{situation}.json"])
    runpy.run_path(str(EXAMPLES / f"{situation}.py"), run_name="__main__")
    assert all((tmp_path / f"run{number}/final").exists() for number in (1, 2))
    by_file, by_script = shortened
    grpo = dataclasses.replace(by_script.grpo, reward_functions=by_file.grpo.reward_functions)       # objects in the script
    by_script = dataclasses.replace(by_script, grpo=grpo)
    assert by_script == by_file == parse_config([f"examples/{situation}.json"])


@pytest.mark.parametrize("name", ["smollm2", "smollm2_form", "smollm2_problems"])
def test_the_tasks_of_the_pretrained_model_have_right_answers_and_held_out_problems_of_their_own(name, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    config = parse_config([f"examples/{name}.json"])
    columns = {"prompt": config.data.prompt_column, "answer": ""}
    training, held_out = (load_examples(source, columns=columns) for source in (config.data.dataset, config.data.eval_dataset))
    prompts = [{example["prompt"] for example in examples} for examples in (training, held_out)]
    assert len(held_out) == len(prompts[1]) == 256 and len(training) == len(prompts[0]) and not prompts[0] & prompts[1]
    reward = load_reward_function(config.grpo.reward_functions[0])
    for example in [*training, *held_out]:
        numbers = [int(word) for word in re.findall(r"\d+", example["prompt"])]
        if name == "smollm2_form":
            right, wrong = (json.dumps({"name": example["name"], "age": numbers[0] + off}) for off in (0, 1))
        else:
            times, minus = "in each" in example["prompt"], "gives away" in example["prompt"]
            right = math.prod(numbers) if times else numbers[0] - numbers[1] if minus else sum(numbers)
            right, wrong = f"That is {right}.", f"That is {right + 1}."
        rows = {column: [value] * 2 for column, value in example.items() if column != "prompt"}
        assert reward([right, wrong], **rows) == [1.0, 0.0], example


def test_the_rewards_of_the_pretrained_model_take_nothing_but_the_form_asked_for():
    person = load_reward_function(f"{EXAMPLES}/smollm2_rewards.py:person_as_json")
    texts = ['{"age": 5,\n "name": "Tom"}', '```json\n{"name": "Tom", "age": 5}\n```', '{"name": "Tom", "age": "5"}']
    texts += ["[5]", "NaN", "[" * 9000]
    assert person(texts, name=["Tom"] * 6, age=["5"] * 6) == [1.0] + [0.0] * 5


def test_the_reward_functions_give_what_they_say_and_pass_the_linter(model, tokenizer):
    done = run_process(EXAMPLES / "rewards_example.py", PYTHONPATH=str(ROOT))
    assert done.stdout.splitlines() == ["brevity [0.98, 0.951, 0.0, 0.0]", "closeness [1.0, 1.0, 0.333, 0.0]"]
    brevity, closeness = (load_reward_function(f"{EXAMPLES}/rewards_example.py:{name}") for name in ("brevity", "closeness"))
    assert brevity(["<answer>5</answer>"], answer=[None]) == [None]
    assert closeness(["<answer>nan</answer>", "<answer>5</answer>", "5"], answer=["1", None, "5"]) == [0.0, None, 0.0]
    config = GRPOConfig(reward_functions=["correctness", "own"], reward_weights=[1.0, 1.0])
    for function in brevity, closeness:
        assert lint([correctness, function], config, load_examples("arithmetic", limit=8), model, tokenizer)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adventure", "gsm8k_real"])
def test_these_settings_train(shortened, tmp_path, name):
    train.main([f"examples/{name}.json"])
    assert (tmp_path / "run1/final").exists()
