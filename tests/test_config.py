"""Settings: where they come from, which wins, and that every mistake is one line with exit code 2 before a model is loaded."""

import json
import re
from typing import get_args

import pytest

from runs import setup
import train
from config import PROFILES, Config, GRPOConfig, ModelConfig, TrainingConfig
from grpo import AGGREGATIONS, BASELINES, LOSSES, SCALES
from runs.command_line import parse_config


def test_the_choices_are_the_entries_of_the_tables_in_grpo():
    scales = [name for name in SCALES if name != "none"]  # that is --normalize_advantages false
    tables = dict(loss_type=[*LOSSES], baseline=[*BASELINES], advantage_scale=scales, loss_aggregation=["", *AGGREGATIONS])
    assert {name: [*get_args(GRPOConfig.__annotations__[name])] for name in tables} == tables


def test_the_defaults_that_others_rely_on():
    grpo = GRPOConfig()
    expected = dict(
        num_completions_per_prompt=4, generation_max_length=256, generation_temperature=0.8, generation_top_p=0.9,
        generation_top_k=50, normalize_advantages=True, advantage_epsilon=1e-8, use_kl_penalty=True, kl_penalty_coef=0.01,
    )
    assert {name: getattr(grpo, name) for name in expected} == expected


def test_profile_then_file_then_flags(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"use_grpo": True, "batch_size": 7, "seed": 5, "reward_functions": ["correctness"]}))
    config = parse_config([str(file), "--seed", "6"])
    assert config.training.profile == "demo" and config.grpo.generation_max_length == PROFILES["demo"]["generation_max_length"]
    assert (config.training.batch_size, config.training.seed) == (7, 6) and config.grpo.reward_functions == ["correctness"]
    assert parse_config(["--use_grpo", "--profile", "balanced"]).grpo.num_completions_per_prompt == 16
    assert parse_config(["--use_grpo", "--model_path", "some/model"]).grpo == GRPOConfig(), "no profile for a real model"


def test_a_run_can_be_repeated_from_its_config_json(tmp_path):
    config = parse_config(["--use_grpo", "--reward_functions", "correctness", "check_numbers", "--no_use_kl_penalty"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.as_dict()))
    assert parse_config([str(file)]) == config


def test_weights_go_with_functions():
    assert GRPOConfig().weights == [1.0, 0.2, 0.1]
    assert GRPOConfig(reward_functions=["correctness", "check_numbers"]).weights == [1.0, 1.0]
    assert GRPOConfig(reward_functions=["correctness"], reward_weights=[0.5]).weights == [0.5]
    assert GRPOConfig(use_kl_penalty=False).kl_coef == 0 and GRPOConfig().kl_coef == 0.01


def data_file(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


MISTAKES = {
    "group of one": (["--num_completions_per_prompt", "1"], "--num_completions_per_prompt=1: .*at least 2"),
    "unknown flag": (["--learning_rat", "1"], "--learning_rat: unknown flag; did you mean --learning_rate"),
    "stray word": (["--seed", "1", "2"], "2: unknown flag"),
    "not a number": (["--seed", "x"], "--seed.*'x'"),
    "unknown profile": (["--profile", "dmeo"], "--profile=dmeo: choose one of demo"),
    "unknown loss": (["--loss_type", "ppo"], "--loss_type.*'ppo'.*dapo"),
    "greedy": (["--generation_temperature", "0"], "--generation_temperature=0.0: siblings would all be equal"),
    "top-p": (["--generation_top_p", "1.5"], "--generation_top_p=1.5"),
    "k1 in the loss": (["--use_kl_penalty", "--kl_estimator", "k1"], "--kl_estimator=k1: in a loss its gradient is 0"),
    "exact offloaded": (
        ["--use_kl_penalty", "--kl_estimator", "exact", "--reference_offload"], "--reference_offload: .*ratio_k3"),
    "k3 in the reward": (
        ["--use_kl_penalty", "--kl_in", "reward", "--kl_estimator", "k3"], "--kl_estimator=k3: in a reward only k1"),
    "two updates": (["--loss_type", "reinforce", "--minibatch_size", "64"], "--loss_type=reinforce: .*of 4 updates"),
    "short horizon": (["--use_kl_penalty", "--kl_target", "1", "--kl_horizon", "9"], "--kl_horizon=9: .*choose at least"),
    "low cap": (["--importance_cap", "0.5"], "--importance_cap=0.5: .*choose from 1 up"),
    "idle value head": (["--use_value_head", "--value_coef", "0"], "--value_coef=0.0: .*would never learn"),
    "dual clip alone": (["--loss_type", "cispo", "--dual_clip", "3"], "--dual_clip=3.0: --loss_type=cispo clips no ratio"),
    "dual clip too low": (["--dual_clip", "1.1"], "--dual_clip=1.1: .*choose above 1.2"),
    "reinforce twice": (["--loss_type", "reinforce", "--ppo_epochs", "2"], "--loss_type=reinforce: has no ratio: of 2"),
    "target without KL": (["--use_kl_penalty", "false", "--kl_target", "0.1"], "--kl_target=0.1: .*--use_kl_penalty true"),
    "two baselines": (["--use_value_head", "--baseline", "group_median"], "--baseline=group_median: .*takes the value"),
    "value head and ties": (["--use_value_head", "--dynamic_sampling", "2"], "--dynamic_sampling=2: .*equal rewards too"),
    "buffer of nothing": (["--overlong_buffer", "5"], "--overlong_buffer=5: --overlong=keep has no penalty"),
    "buffer too long": (["--overlong", "penalise", "--overlong_buffer", "40"], "--overlong_buffer=40: must be below .*=40"),
    "no epochs": (["--ppo_epochs", "0"], "--ppo_epochs=0: must be above 0"),
    "alpha": (["--ema_alpha", "1.5"], "--ema_alpha=1.5: choose from 0 to 1"),
    "unknown estimator": (["--kl_estimator", "k4"], "--kl_estimator.*'k4'.*ratio_k3"),
    "negative clip": (["--reward_clip", "-1"], "--reward_clip=-1.0: cannot be negative"),
    "replay of nothing": (["--replay", "{tmp}/no.jsonl"], "--replay=.*no.jsonl: no such file"),
    "weights": (["--reward_weights", "1", "2"], "--reward_weights.*2 weights for 3 reward functions"),
    "unknown reward": (["--reward_functions", "corectness"], "corectness: unknown; did you mean correctness\\?"),
    "unimportable reward": (["--reward_functions", "{tmp}/broken.py:f"], "broken.py.*SyntaxError"),
    "missing column": (["--reward_functions", "{tmp}/needs.py:f"], "needs the column tests"),
    "narrow reward": (["--reward_functions", "{tmp}/narrow.py:f"], "add \\*\\*columns"),
    "taken name": (["--reward_functions", "{tmp}/needs.py:correctness"], "a built-in reward function correctness"),
    "demonstration wanted": (["--reward_functions", "{tmp}/needs.py:g"], "needs the column completion"),
    "missing data": (["--dataset", "{tmp}/none.jsonl"], "none.jsonl: no such file"),
    "empty data": (["--dataset", "{tmp}/empty.jsonl"], "empty.jsonl: the file is empty"),
    "malformed data": (["--dataset", "{tmp}/bad.jsonl"], "bad.jsonl: line 2 is not JSON.*--bad_lines skip"),
    "wrong columns": (["--dataset", "{tmp}/columns.jsonl"], "columns.jsonl: example 1 has columns text"),
    "unknown column": (["--dataset", "{tmp}/bare.jsonl", "--prompt_column", "q"], "--prompt_column=q: .*has columns prompt"),
    "kaggle's form": (["--dataset", "kaggle:a/b"], "kaggle:a/b: write kaggle:owner/name/file"),
    "no demonstrations": (["--dataset", "{tmp}/bare.jsonl", "--cold_start_steps", "5"],
                          "=5 needs demonstrations, .*for 2 of 2 examples.*--completion_column.*or pass --cold_start_steps 0"),
    "no answers": (["--dataset", "{tmp}/bare.jsonl", "--cold_start_steps", "0"], "correctness: needs the column answer"),
    "long prompt": (["--max_prompt_length", "5"], "--max_prompt_length=5: .* are longer.*raise it to 8.*--long_prompts"),
    "no such model": (["--model_path", "{tmp}/none"], "--model_path=.*none: no such folder"),
    "no weights": (["--model_path", "{tmp}/no_weights"], "no_weights: the folder has no weights"),
    "no tokenizer": (["--model_path", "{tmp}/no_tokenizer"], "no_tokenizer: the folder has no a? ?tokenizer"),
    "used folder": (["--output_dir", "{tmp}/used"], "--output_dir=.*used: holds another run"),
    "nothing to resume": (["--output_dir", "{tmp}/empty", "--resume"], "--output_dir=.*empty: there is no run in it"),
    "resume what": (["--resume"], "--resume: needs --output_dir"),
    "folder in a file": (["--output_dir", "{tmp}/empty.jsonl/run"], "empty.jsonl is no folder that can be written to"),
    "settings behind flags": (["--seed", "1", "settings.json"], "settings.json: .*comes before all flags"),
    "negative": (["--max_steps", "-1"], "--max_steps=-1: cannot be negative"),
    "settings file": (["{tmp}/no.json"], "no.json: not a readable JSON file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_before_any_model_and_overwrites_nothing(mistake, tmp_path, capsys, monkeypatch):
    data_file(tmp_path, "broken.py", "def f(:\n")
    data_file(tmp_path, "needs.py", "def f(completions, tests, **columns): ...\ndef g(completion, **columns): ...\n"
              "def correctness(completions, **columns): ...\n")
    data_file(tmp_path, "narrow.py", "def f(completions): ...\n")
    data_file(tmp_path, "empty.jsonl", "")
    data_file(tmp_path, "bad.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n')
    data_file(tmp_path, "columns.jsonl", '{"text": "a"}\n')
    data_file(tmp_path, "bare.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    for name in "used/config.json", "no_weights/config.json", "no_tokenizer/config.json", "no_tokenizer/model.safetensors":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data_file(tmp_path, name, '{"model_type": "llama"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(setup, "load_policy", lambda *_: pytest.fail("a model was loaded"))

    flags, message = MISTAKES[mistake]
    flags = [flag.replace("{tmp}", str(tmp_path)) for flag in flags]
    output = [] if "--output_dir" in flags or mistake == "resume what" else ["--output_dir", str(tmp_path / "out")]
    argv = [*flags, "--use_grpo", *output]
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    assert re.search(message, printed.err), printed.err
    assert printed.err.startswith("train.py: error: ")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    assert after == before


def test_the_five_names_import_from_train():
    sections = train.ModelConfig(), train.DataConfig(), train.GRPOConfig(), train.TrainingConfig()
    config = train.Config(*sections)
    assert config == Config() and isinstance(config.model, ModelConfig) and isinstance(config.training, TrainingConfig)


def test_validate_grpo_setup_wants_siblings_a_tokenizer_and_prompts(tokenizer):
    config = Config()
    train.validate_grpo_setup(config, tokenizer, [{"prompt": "p", "answer": "1"}])
    for bad in (None, [{"prompt": "p", "answer": "1"}]), (tokenizer, []), (tokenizer, [{"answer": "1"}]):
        with pytest.raises(ValueError):
            train.validate_grpo_setup(config, *bad)
    lone = GRPOConfig()
    object.__setattr__(lone, "num_completions_per_prompt", 1)                    # past the check of the dataclass itself
    for refused in lambda: GRPOConfig(num_completions_per_prompt=1), lambda: train.validate_grpo_setup(
        Config(grpo=lone), tokenizer, [{"prompt": "p", "answer": "1"}]
    ):
        with pytest.raises(ValueError, match="at least 2"):
            refused()


@pytest.mark.parametrize("flags,words", [
    ([], "clipping is inert: with one update per rollout every ratio is 1"),
    (["--minibatch_size", "9999"], "minibatch_size 9999 is inert with so few completions in a rollout"),
    (["--reference_mode", "ema", "--use_kl_penalty", "false"], "reference_mode ema is inert without --use_kl_penalty true"),
    (["--loss_type", "gspo", "--ppo_epochs", "2"], "gspo's ratio is a mean over a completion and hardly moves"),
])
def test_settings_that_change_nothing_announce_themselves(flags, words):
    assert any(line.startswith(words) for line in parse_config(["--use_grpo", *flags]).remarks())


@pytest.mark.parametrize("flags,words", [
    (["--max_policy_kl", "1"], "clipping and max_policy_kl are inert"),
    (["--use_value_head", "--advantage_scale", "batch"], "advantage_scale batch is inert with a value head"),
    (["--use_kl_penalty", "--ema_alpha", "0.5"], "ema_alpha 0.5 is inert without --reference_mode ema"),
    (["--use_kl_penalty", "false", "--kl_in", "reward"], "kl_in reward is inert without --use_kl_penalty true"),
    (["--use_kl_penalty", "--kl_horizon", "5000"], "kl_horizon 5000 is inert without --kl_target"),
    (["--loss_type", "reinforce", "--clip_low", "0.1"], "clip_low 0.1 is inert with --loss_type reinforce"),
    (["--gae_lambda", "0.5"], "gae_lambda 0.5 is inert without --use_value_head"),
    (["--no_normalize_advantages", "--advantage_scale", "batch"], "advantage_scale batch is inert without --normalize"),
    (["--cold_start_steps", "0", "--cold_start_learning_rate", "1"], "cold_start_learning_rate 1.0 is inert without"),
    (["--lora_alpha", "5"], "lora_alpha 5.0 is inert without --lora_rank"),
    (["--no_normalize_advantages", "--advantage_epsilon", "1"], "advantage_epsilon 1.0 is inert without --normalize"),
    (["--loss_type", "cispo", "--ppo_epochs", "2"], "cispo caps a token's weight at 1.2"),
    (["--loss_type", "dr_grpo"], "dr_grpo is meant for advantages in points"),
    (["--prefer_mixed", "--num_epochs", "1"], "prefer_mixed True is inert with one epoch"),
])
def test_what_is_seldom_meant_is_remarked_on(flags, words):
    assert any(line.startswith(words) for line in parse_config(["--use_grpo", *flags]).remarks())


def test_a_supervised_run_says_which_settings_are_for_grpo_alone():
    config = parse_config(["--loss_type", "gspo", "--use_value_head", "--generation_top_k", "7"])
    assert config.remarks() == ["loss_type gspo is inert without --use_grpo", "use_value_head True is inert without --use_grpo"]
    assert parse_config([]).remarks() == []


@pytest.mark.parametrize("flags", [
    ["--use_kl_penalty", "--kl_penalty_coef", "0"], ["--cold_start_steps", "0"], ["--resume", "false"],
    ["--no_normalize_advantages", "--advantage_epsilon", "1", "--reward_combination", "gdpo"],
])
def test_what_counts_or_switches_something_off_is_not_called_inert(flags):
    remarks = parse_config(["--use_grpo", *flags]).remarks()
    names = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    assert not any(name in line for name in names for line in remarks), remarks


def test_settings_that_work_together_are_neither_refused_nor_called_inert():
    flags = (
        "--use_grpo --use_kl_penalty --kl_in reward --kl_estimator k1 --kl_target 0.05 --kl_horizon 5000 "
        "--reference_mode ema --ema_alpha 0.5 "
        "--reference_offload --ppo_epochs 2 --minibatch_size 64 --max_policy_kl 0.1 --dual_clip 3 --importance_cap 2 "
        "--overlong penalise --overlong_buffer 8 "
        "--entropy_coef 0.01 --dynamic_sampling 3 --baseline global_mean --advantage_scale batch "
        "--reward_clip 10 --loss_type grpo --loss_aggregation token_mean"
    )
    config = parse_config(flags.split())
    assert config.remarks() == [] and config.updates_per_rollout == 2 * 4
    assert config.grpo.loss == dict(loss_type="grpo", clip_low=0.2, clip_high=0.2, dual_clip=3.0, aggregation="token_mean")
    assert config.grpo.scale == "batch" and parse_config(["--no_normalize_advantages"]).grpo.scale == "none"
    assert parse_config(["--use_kl_penalty", "false", "--kl_estimator", "k1"]).grpo.kl_coef == 0, "k1 nowhere is fine"


def test_a_replay_takes_the_settings_of_its_run_but_not_its_weights(tmp_path):
    run = parse_config(["--use_grpo", "--loss_type", "gspo", "--seed", "7", "--model_path", "some/model"])
    (tmp_path / "config.json").write_text(json.dumps(run.as_dict()))
    config = parse_config(["--replay", str(tmp_path / "rollouts.jsonl"), "--seed", "8"])
    assert (config.grpo.loss_type, config.training.seed, config.model.model_path) == ("gspo", 8, "")


def test_a_phase_is_as_many_steps_long_as_its_epochs_have_updates():
    def steps(flags):
        return [(phase.name, phase.steps) for phase in setup.plan(parse_config(flags.split()), num_examples=1000)]

    assert steps("--use_grpo --batch_size 64 --num_epochs 2 --cold_start_steps 9") == [("cold_start", 9), ("grpo", 32)]
    several = "--use_grpo --batch_size 64 --num_epochs 2 --cold_start_steps 0 --ppo_epochs 3 --minibatch_size 64"
    assert steps(several) == [("grpo", 32 * 3 * 4)] and steps(f"{several} --max_steps 50") == [("grpo", 50)]
    assert steps("--batch_size 64 --num_epochs 2 --ppo_epochs 3") == [("supervised", 32)]
