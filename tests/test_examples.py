"""Every script in examples/ has the settings of its .json file, and both train; the reward functions give what they say."""

import dataclasses
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import exhaustive

import train
from analysis.reward_linter import lint
from config import GRPOConfig, ModelConfig
from engine.policy import load_policy, save_policy
from environments.conversations import run_scripted_turns, start_conversations
from environments.instances import OPEN, closing_environments
from environments.loading import load_environment
from model import byte_tokenizer
from reward_functions.loading import load_reward_function
from rewards import correctness
from sources import load_examples
from runs.command_line import parse_config

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAYED = {"adventure": "Adventure", "sql_shell": "Shell"}
SITUATIONS = ["demo", "gsm8k_lora", "ema_reference", "conversation"]
ROWS = [{"question": f"Tom has {n} apples and buys {n}. How many?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"} for n in range(1, 13)]


@pytest.fixture
def shortened(monkeypatch, tmp_path):
    """Let train and train.py end after a step, on a small model and small data where those would be downloaded."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    save_policy(*load_policy(ModelConfig()), tmp_path / "model")
    seen, real = [], train.set_up

    def set_up(config, **objects):
        seen.append(config)
        data, model = config.data, config.model
        if model.model_path:
            model = dataclasses.replace(model, model_path=str(tmp_path / "model"), lora_rank=2, chat_template_kwargs="")
            data = data if data.dataset.startswith("examples/") else dataclasses.replace(data, dataset=str(tmp_path / "gsm8k.jsonl"))
        training = dataclasses.replace(
            config.training, max_steps=2, cold_start_steps=min(1, config.training.cold_start_steps), batch_size=2, report_to="none",
            output_dir=str(tmp_path / f"run{len(seen)}"))
        grpo = dataclasses.replace(config.grpo, generation_max_length=24, minibatch_size=min(4, config.grpo.minibatch_size))
        data = dataclasses.replace(data, eval_limit=2)
        return real(dataclasses.replace(config, model=model, data=data, grpo=grpo, training=training), **objects)

    monkeypatch.setattr(train, "set_up", set_up)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("situation", ["demo", exhaustive("gsm8k_lora"), exhaustive("ema_reference"), exhaustive("conversation")])
def test_the_script_and_the_settings_file_are_the_same_run_and_train(situation, shortened, tmp_path):
    train.main([f"examples/{situation}.json"])
    runpy.run_path(str(EXAMPLES / f"{situation}.py"), run_name="__main__")
    assert all((tmp_path / f"run{number}/final").exists() for number in (1, 2))
    by_file, by_script = shortened
    names = dict(reward_functions=by_file.grpo.reward_functions, environment=by_file.grpo.environment)   # objects in the script
    assert dataclasses.replace(by_script, grpo=dataclasses.replace(by_script.grpo, **names)) == by_file
    assert by_file == parse_config([f"examples/{situation}.json"])


def test_there_is_a_script_and_a_file_for_each_situation_and_a_page_that_lists_them():
    for kind in ".py", ".json":
        found = {path.stem for path in EXAMPLES.glob(f"*{kind}")} - {"customer_service", "rewards_example", "gsm8k", "minimal", *PLAYED}
        assert {name for name in found if not name.startswith("smollm2")} == set(SITUATIONS)
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert all(f"(examples/{name}.py)" in readme and f"(examples/{name}.json)" in readme for name in SITUATIONS)
    assert "(examples/rewards_example.py)" in readme
    assert "(../examples/gsm8k.json)" in (EXAMPLES.parent / "docs/recipes.md").read_text()


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
    last_number, person = (load_reward_function(f"{EXAMPLES}/smollm2_rewards.py:{name}") for name in ("last_number", "person_as_json"))
    texts = ["16 + 9 = 25", "25 or 26", "", "025", "1, 25\n"]
    assert last_number(texts, answer=[25] * 5) == last_number(texts, answer=["25"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    texts = ['{"age": 5,\n "name": "Tom"}', '```json\n{"name": "Tom", "age": 5}\n```', '{"name": "Tom", "age": "5"}', "[5]", "NaN", "[" * 9000]
    assert person(texts, name=["Tom"] * 6, age=["5"] * 6) == [1.0] + [0.0] * 5


def test_the_reward_functions_pass_the_linter():
    examples = load_examples("arithmetic", limit=8)
    for name in "brevity", "closeness":
        function = load_reward_function(f"{EXAMPLES}/rewards_example.py:{name}")
        assert lint([function], [1.0], examples)[1] == []
        assert lint([correctness, function], [1.0, 1.0], examples)[1] == []


def test_the_reward_functions_give_what_they_say():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "rewards_example.py"], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    assert done.stdout.splitlines() == ["brevity [0.98, 0.951, 0.0, 0.0]", "closeness [1.0, 1.0, 0.333, 0.0]"]
    names = runpy.run_path(str(EXAMPLES / "rewards_example.py"))
    assert names["brevity"](["<answer>5</answer>"], answer=[None]) == [None]
    assert names["closeness"](["<answer>nan</answer>", "<answer>5</answer>", "5"], answer=["1", None, "5"]) == [0.0, None, 0.0]


def play(name, *calls, **columns):
    """Play the first row of the data: what the tools answer, and the points."""
    row = load_examples(f"{EXAMPLES}/{name}.jsonl")[0] | columns
    config = GRPOConfig(max_turns=len(calls) + 1, environment=name)
    calls = [f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}</tool_call>' for tool, arguments in calls]
    with closing_environments():
        environment = load_environment(f"{EXAMPLES}/{name}.py:{PLAYED[name]}")
        (conversation,) = start_conversations(byte_tokenizer(), environment, [row], config, [1])
        messages, points = run_scripted_turns(conversation, [*calls, "done"])
    return [message["content"] for message in messages[1::2]], pytest.approx(points)


def test_the_adventure_is_won_by_those_who_search_in_both_rooms():
    calls = [("unlock", {}), ("search", {"place": "shelf"}), ("go", {"room": "cellar"}), ("search", {"place": "sack"}),
             ("search", {"place": "sack"}), ("search", {"place": "shelf"}), ("unlock", {}), ("go", {"room": "hall"}), ("unlock", {})]
    said, points = play("adventure", *calls, hidden="shelf")
    assert said == [
        "error: you have no key", "error: there is no shelf in the hall", "You are in the cellar, with barrel, shelf, sack.", "Nothing.",
        "Nothing.", "You have the key.", "error: the door is in the hall", "You are in the hall, with rug, vase, coat. The door is locked.",
        "The door is open. You have won."]
    assert points == 0.98 and play("adventure", *calls, ("unlock", {}), hidden="shelf")[1] == 0.98, "once"
    assert play("adventure", *calls[:6], hidden="shelf")[1] == 0.28 and play("adventure", *calls, hidden="rug")[1] == -0.02


def test_the_shell_checks_the_content_of_a_database_and_reaches_no_file(tmp_path):
    right = ("run", {"sql": "UPDATE customers SET discount = 10 WHERE city = 'Oslo'"})
    look = ("run", {"sql": "SELECT name, discount FROM customers WHERE city = 'Oslo'"})
    assert play("sql_shell", look, right, look) == (["Ada | 0\nCem | 0", "done", "Ada | 10\nCem | 10"], 1.0)
    assert play("sql_shell", look)[1] == 0.0 and play("sql_shell", right, ("run", {"sql": "DROP TABLE customers"}))[1] == 0.0
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    for sql, answer in {
        f"ATTACH '{tmp_path}/a' AS a": "not authorized", f"VACUUM INTO '{tmp_path}/a'": "authorization denied", "PRAGMA writable_schema = 1": "not auth",
        endless: "interrupted", "SELECT zeroblob(2000000)": "too big", "SELECT load_extension('x')": "not authorized", "SELECT 1; SELECT 2": "one statement",
        "SELEC": "syntax error",
    }.items():
        assert answer in play("sql_shell", ("run", {"sql": sql}))[0][0], sql
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAYED)
def test_the_settings_of_the_environments_train(name, shortened, tmp_path):
    train.main([f"examples/{name}.json"])
    assert (tmp_path / "run1/final").exists() and OPEN == []
