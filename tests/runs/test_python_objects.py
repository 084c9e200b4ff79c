"""train(config, reward_functions=..., dataset=..., environment=...) with Python objects, in memory and resumed."""

import json
import re
from dataclasses import replace

import datasets
import pytest
from conftest import ROOT, quick_config

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import train
from config import Config, TrainingConfig
from engine.errors import RunError
from policy import Policy
from rewards import correctness
from runs.checkpoint import latest_checkpoint
from runs.folder import read_jsonl
from runs.plan import Objects
from runs.setup import set_up

EXAMPLES = [{"prompt": f"{a}+{b}=?", "answer": str(a + b), "hint": "x" * a} for a in range(5) for b in range(5)]


def shorter(completions, hint, **columns):
    return [-len(text) - len(h) for text, h in zip(completions, hint)]


def echo(conversation):
    return (None if len(conversation) > 2 else "again", float(len(conversation)))


def test_callables_and_lists_train_and_the_model_is_returned(tmp_path):
    config = quick_config(tmp_path / "run", max_turns=2, reward_weights=[1.0, 0.5, 2.0])
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
    run = set_up(quick_config(tmp_path / "a"))
    assert [f.__name__ for f in run.plan.reward_functions] == ["correctness", "reasoning_coherence", "explanation_quality"]
    run = set_up(quick_config(tmp_path / "b"), reward_functions=[correctness])
    assert run.config.grpo.reward_functions == ["correctness"] and run.plan.reward_functions == [correctness]
    assert run.config.data.dataset == "arithmetic" and run.config.grpo.weights == [1.0]


def test_prompts_alone_and_an_object_with_items_are_data_too(tmp_path):
    prompts = ["one", "two", [{"role": "user", "content": "three"}]]
    run = set_up(
        quick_config(tmp_path / "a"), reward_functions="diversity", dataset=prompts, eval_dataset=["four"])
    assert [example["prompt"] for example in run.plan.data.train_set][:2] == ["one", "two"] and len(run.plan.data.train_set) == 3
    run = set_up(quick_config(tmp_path / "b", eval_limit=256), dataset=datasets.Dataset.from_list(EXAMPLES))
    assert len(run.plan.data.eval_set) == len(EXAMPLES) // 5 and run.plan.data.train_set[0]["hint"] is not None


def test_a_callback_gets_every_logged_step_of_all_phases_and_its_error_saves_the_state_behind_the_step(tmp_path):
    seen = []

    def on_step(run, metrics, experience):
        step, metrics["mine"] = run.progress.step, run.progress.step / 2
        names = {"grad_norm", "learning_rate", "step_seconds"} <= metrics.keys()
        seen.append((step, run.phase.name, type(experience).__name__, len(experience.examples), names))
        if step == 3 and seen.count(seen[-1]) == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train.train(quick_config(tmp_path / "run", cold_start_steps=2, save_steps=0), on_step=on_step)
    assert latest_checkpoint(tmp_path / "run").name == "step-00000003"
    train.train(Config.of(output_dir=str(tmp_path / "run"), resume=True), on_step=on_step)
    phases = "cold_start", "cold_start", "grpo", "grpo"
    assert seen == [(step, phase, "Experience", 4, True) for step, phase in enumerate(phases, start=1)]
    lines = [line for line in read_jsonl(tmp_path / "run/metrics.jsonl") if line["phase"] in phases]
    assert [(line["step"], line["mine"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)], "what it adds is logged"


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
        run = set_up(quick_config(tmp_path / f"{number}"), reward_functions=functions, dataset=EXAMPLES)
        assert len(run.plan.reward_functions) == 1
    train.train(quick_config(tmp_path / "run", max_steps=1), reward_functions=[Rule()], dataset=EXAMPLES)
    assert any("eval_reward/Rule" in line for line in read_jsonl(tmp_path / "run/metrics.jsonl"))


SMALL = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=8, n_layer=1, n_head=1))


@pytest.mark.parametrize("objects,flags,message", [
    (dict(reward_functions=[None]), {}, "None is neither a function nor the name of one"),
    (dict(environment=3, reward_functions=["correctness"]), {}, "3 is neither a function"),
    (dict(eval_dataset=[]), {}, "dataset: no examples in it"),
    (dict(reward_functions=[Rule(), Rule()]), {}, "two have the name Rule; rename one by its __name__"),
    (dict(reward_functions=[shorter, lambda completions, **columns: [0]], dataset=EXAMPLES), dict(reward_weights=[1.0]),
     "1 weights for 2 reward functions"),
    (dict(reward_functions=[lambda texts: [0]]), {}, "--reward_functions python:<lambda>: add completions, a list of them, to its parameters"),
    (dict(reward_functions=[shorter], dataset=["p", "q", "r", "s"]), {}, "needs the column hint, which python:list does not have"),
    (dict(environment=lambda: None, reward_functions=[correctness, "environment"]), dict(max_turns=2), "must take the conversation"),
    (dict(environment=echo), {}, "with --max_turns=1 its messages would not be used"),
    (dict(reward_functions=[]), {}, "name at least one"),
    (dict(reference=SMALL), dict(use_kl_penalty=False), "--reference_path=python:GPT2LMHeadModel: there is no KL penalty that would use it"),
    (dict(reference=SMALL), dict(use_grpo=False, use_kl_penalty=True), "reference: only for GRPO; add --use_grpo"),
    (dict(reference=SMALL), dict(use_kl_penalty=True), "reference: it has 100 tokens, the tokenizer 263"),
    (dict(engine=Policy), dict(precision="float16"), "engine: Policy supports neither several processes nor float16; derive it from DevicePolicy"),
    ({}, dict(check=True), "check: is for the command line"),
    (dict(reward_function=shorter), {}, "unexpected keyword argument 'reward_function'"),
])
def test_wrong_objects_are_one_line_before_a_run_begins(objects, flags, message, tmp_path):
    with pytest.raises((ValueError, TypeError)) as error:
        train.train(quick_config(tmp_path / "run", **flags), **objects)
    assert message in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


PAGE = ROOT / "CONTRIBUTING.md"
CODE = re.search(r"```python run\n(.*?)\nconfig = ", PAGE.read_text().partition("## An optimiser, a teacher")[2], flags=re.DOTALL)[1]


def length(completions, **columns):
    return list(map(len, completions))


@pytest.mark.slow
def test_a_run_from_python_is_resumed_with_the_same_objects_bit_for_bit(tmp_path, capsys):
    """Among them the optimiser and the teacher of the page."""
    page, calls = {}, []
    exec(CODE, page)
    teacher = page["teacher"]
    objects = dict(reward_functions=[length], dataset=EXAMPLES, optimizer=page["muon"], reference=teacher)
    flags = dict(max_steps=4, save_steps=2, eval_limit=0, use_kl_penalty=True, kl_penalty_coef=0.5)
    before = [parameter.clone() for parameter in teacher.parameters()]
    whole, _ = train.train(quick_config(tmp_path / "whole", **flags), **objects)
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters())), "the teacher stays as it is"
    lines = read_jsonl(tmp_path / "whole/metrics.jsonl")
    assert all(line["kl"] > 1e-3 for line in lines), "it is not a copy of the policy"

    def stopped(completions, **columns):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return length(completions)

    stopped.__name__ = "length"
    with pytest.raises(KeyboardInterrupt):
        train.train(quick_config(tmp_path / "run", **flags), **objects | dict(reward_functions=[stopped]))
    assert not list((tmp_path / "run/checkpoints").glob("*/reference"))
    again = Config(training=TrainingConfig(output_dir=tmp_path / "run", resume=True))
    for missing, message in {
        "reward_functions": r"--reward_functions .*python:length.*: a Python object;",
        "dataset": "--dataset python:list: a Python object;",
        "reference": r"--reference_path python:\w+: a Python object;", "optimizer": "optimizer:",
    }.items():
        given = {name: thing for name, thing in objects.items() if name != missing}
        with pytest.raises(ValueError, match=rf"^{message} pass it to train\(\) again$"):
            train.train(again, **given)
    resumed, _ = train.train(again, **objects)
    assert f"from {tmp_path / 'run/checkpoints/step-00000002'}" in capsys.readouterr().out
    for name, weights in whole.state_dict().items():
        assert torch.equal(weights, resumed.state_dict()[name]), name


def test_what_is_no_optimizer_is_refused_when_its_phase_begins(tmp_path):
    run = set_up(quick_config(tmp_path / "run"), optimizer=lambda pairs: [1, 2])
    with pytest.raises(RunError, match="optimizer: returned a list, not a torch Optimizer"):
        run.begin_phase()

    class TwoInOne(torch.optim.SGD):
        def state_dict(self):
            return {"one": super().state_dict(), "other": {}}

    objects = Objects(optimizer=lambda pairs: TwoInOne([parameter for _, parameter in pairs]))
    run.plan = replace(run.plan, objects=objects)
    with pytest.raises(RunError, match="optimizer: its state_dict lacks state or param_groups: no run could be resumed"):
        run.begin_phase()
