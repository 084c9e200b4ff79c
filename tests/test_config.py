"""Settings: defaults, choices, and incompatible ones; from files, from a run and from profiles."""

import json
from pathlib import Path

import pytest

import train
from config import PROFILES, Config, GRPOConfig, TrainingConfig, profile_values
from runs import phases
from runs.command_line import parse_config, parse_infer
from sources.settings import complete, read_settings, resumed


@pytest.mark.parametrize("name,value", [("clip_low", 0.0), ("generation_top_p", 1.0), ("kl_penalty_coef", 1), ("output_dir", Path("a"))])
def test_a_bound_is_included_an_int_is_a_float_and_a_path_is_text(name, value):
    assert Config.of(**{name: value}).flags[name] == (str(value) if name == "output_dir" else value)


def test_validate_grpo_setup_requires_a_tokenizer_and_prompts(tokenizer):
    config = Config()
    train.validate_grpo_setup(config, tokenizer, [{"prompt": "p", "answer": "1"}])
    for bad in (None, [{"prompt": "p", "answer": "1"}]), (tokenizer, []), (tokenizer, [{"answer": "1"}]):
        with pytest.raises(ValueError):
            train.validate_grpo_setup(config, *bad)
    assert config == train.Config(train.ModelConfig(), train.DataConfig(), train.GRPOConfig(), train.TrainingConfig())


def test_compatible_flags_are_not_rejected():
    flags = (
        "--use_grpo --use_kl_penalty --kl_in reward --kl_estimator k1 --reference_mode ema --ema_alpha 0.5 --reference_offload "
        "--ppo_epochs 2 --minibatch_size 64 --loss_type grpo --loss_options dual_clip=3 off_policy_limit=1 --importance_cap 2 "
        "--overlong penalise --entropy_coef 0.01 --dynamic_sampling 3 --baseline global_mean --advantage_scale batch --reward_clip 10"
    )
    config = parse_config(flags.split())
    assert config.updates_per_rollout == 2 * 4
    assert config.grpo.loss_arguments == dict(loss_type="grpo", clip_low=0.2, clip_high=0.2, dual_clip=3.0, off_policy_limit=1.0)
    assert config.grpo.scale == "batch" and parse_config(["--no_normalize_advantages"]).grpo.scale == "none"
    assert parse_config(["--use_kl_penalty", "false", "--kl_estimator", "k1"]).grpo.kl_coef == 0, "k1 nowhere is fine"


def test_a_phase_is_as_many_steps_long_as_its_epochs_have_updates():
    def steps(flags):
        return [(phase.name, phase.steps) for phase in phases.plan_phases(parse_config(flags.split()), num_examples=1000)]

    assert steps("--use_grpo --batch_size 64 --num_epochs 2 --cold_start_steps 9") == [("cold_start", 9), ("grpo", 32)]
    several = "--use_grpo --batch_size 64 --num_epochs 2 --cold_start_steps 0 --ppo_epochs 3 --minibatch_size 64"
    assert steps(several) == [("grpo", 32 * 3 * 4)] and steps(f"{several} --max_steps 50") == [("grpo", 50)]
    assert steps("--batch_size 64 --num_epochs 2 --ppo_epochs 3 --generation_temperature 0") == [("supervised", 32)]


def test_defaults_are_those_of_the_fields_and_a_profile_is_named():
    plain = Config(training=TrainingConfig(use_grpo=True))
    assert plain == Config.of(use_grpo=True) and plain.grpo == GRPOConfig() and (plain.training.learning_rate, plain.peak_learning_rate) == (0.0, 1e-6)
    assert Config.from_profile("demo", use_grpo=True) == parse_config(["--use_grpo"])
    assert parse_config([]) == Config.from_profile("demo_supervised")
    with pytest.raises(ValueError, match="--kl_estimator=k1"):                   # the profile's is in the loss
        Config.from_profile("conservative", use_grpo=True, use_kl_penalty=True, kl_estimator="k1")
    assert Config.from_profile("guess_letter", use_grpo=True, max_turns=3).grpo.environment == "guess_letter"
    config = Config.from_profile("conservative", use_grpo=True, num_completions_per_prompt=4, batch_size=4)
    assert (config.grpo.num_completions_per_prompt, config.training.batch_size, config.training.learning_rate) == (4, 4, 1e-6)
    real = parse_config("--use_grpo --model_path some/model".split())
    assert real.training.profile == "" and real.grpo == GRPOConfig(), "no profile for a real model"


@pytest.mark.parametrize("bad,message", [
    ({"num_completions_per_prompt": "4"}, "must be int, not str"), ({"num_completions_per_prompt": 1}, "must be at least 2"),
    ({"use_kl_penalty": 1}, "must be bool, not int"), ({"generation_max_length": True}, "must be int, not bool"),
    ({"reward_weights": ["1"]}, r"=\['1'\]: must be list\[float\]"), ({"output_dir": 5}, "=5: must be str, not int"),
    ({"reward_functions": [len]}, r".*pass Python objects to train\(config, reward_functions=...\)"),
    ({"environment": len}, r".*pass Python objects to train\(config, environment=...\)"),
    ({"precision": "fp16"}, "choose one of auto, float32, bfloat16, float16"), ({"batch_size": None}, "must be int, not NoneType"),
])
def test_a_value_of_a_wrong_type_or_an_unknown_choice_is_rejected(bad, message):
    with pytest.raises(ValueError, match=f"^--{next(iter(bad))}.*{message}"):
        Config.of(**bad)


def test_a_run_that_python_resumes_has_its_settings_and_those_that_differ_from_the_defaults(tmp_path):
    saved = Config.of(use_grpo=True, overlong="penalise")
    (tmp_path / "config.json").write_text(json.dumps(saved.as_dict()))
    config = resumed(Config(grpo=GRPOConfig(ppo_epochs=2), training=TrainingConfig(resume=True, output_dir=str(tmp_path))))
    assert config == parse_config(["--resume", "--output_dir", str(tmp_path), "--ppo_epochs", "2"])
    assert (config.grpo.overlong, config.grpo.ppo_epochs) == ("penalise", 2) and resumed(saved) is saved
    (tmp_path / "config.json").write_text('{"no_such_flag": 1}')
    with pytest.raises(ValueError, match="no_such_flag: unknown"):
        resumed(config)
    with pytest.raises(ValueError, match="cls: unknown"):
        Config.of(cls=1)


@pytest.mark.parametrize("profile,name,value", [
    ("demo", "reward_weights", [-5e-05, 1.0, 0.5]), ("demo", "instruction", "- be brief"), ("demo", "instruction", "--help"),
    ("demo", "cold_start_accuracy", -1e-9), ("demo_supervised", "seed", 7),
])
def test_settings_of_any_run_are_read_as_data_whatever_they_begin_with(profile, name, value, tmp_path):
    saved = Config.from_profile(profile, use_grpo=profile == "demo", **{name: value})
    (tmp_path / "config.json").write_text(json.dumps(saved.as_dict()))
    assert parse_config([str(tmp_path / "config.json")]) == saved
    given = ["--output_dir", str(tmp_path), "--resume"], [str(tmp_path / "config.json")]
    for flags in given:
        sections = parse_config(flags).as_dict().values()
        assert [section[name] for section in sections if name in section] == [value], flags


def test_with_vllm_tokens_are_weighted():
    for flags, cap in ({}, 0.0), ({"engine": "vllm"}, 2.0), ({"engine": "vllm", "importance_cap": 3.0}, 3.0), (
            {"engine": "vllm", "loss_type": "icepop"}, 0.0), ({"engine": "vllm", "loss_type": "dppo"}, 0.0):
        assert GRPOConfig(**flags).importance_weight_cap == cap


def test_the_folder_of_the_user_is_that_in_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(["--use_grpo", "--output_dir=~/run", "--dataset=~/d.csv", "--reward_functions", "~/r.py:f", "--model_path=~/m", "--instruction=~ 5"])
    assert [config.training.output_dir, config.data.dataset, config.model.model_path] == [f"{tmp_path}/{name}" for name in ("run", "d.csv", "m")]
    assert config.grpo.reward_functions == [f"{tmp_path}/r.py:f"] and config.data.instruction == "~ 5"
    args = parse_infer(["--evaluate=~/d.csv", "--json=~/out.json", "--model_path=~/m"], "")
    assert (args.evaluate, str(args.json), args.model_path) == (f"{tmp_path}/d.csv", f"{tmp_path}/out.json", f"{tmp_path}/m")


def test_the_demonstration_counts_examples_at_every_batch_size_and_its_learning_rates_follow_the_square_root():
    own = PROFILES["demo"]
    for size in 1, 2, 4, 8, 16, 32, 64:
        values = profile_values("demo", size)
        for name in "cold_start_steps", "eval_steps", "save_steps":
            assert values[name] * size == own[name] * 64
        assert values["learning_rate"] / own["learning_rate"] == pytest.approx((size / 64) ** 0.5, rel=5e-3)
        assert values["cold_start_learning_rate"] / own["cold_start_learning_rate"] == pytest.approx((size / 64) ** 0.5, rel=5e-3)
        assert values["num_epochs"] == own["num_epochs"]
    large = profile_values("demo", 256)
    assert (large["learning_rate"], large["cold_start_steps"], large["eval_steps"]) == (own["learning_rate"], 75, 4)
    assert profile_values("demo", 64) == profile_values("demo") == own


def test_flags_win_over_the_adapted_values_and_other_profiles_are_not_adapted():
    config = Config.from_profile("demo", use_grpo=True, batch_size=2, eval_steps=7, learning_rate=1e-3)
    assert (config.training.eval_steps, config.training.learning_rate, config.training.cold_start_steps) == (7, 1e-3, 9600)
    assert Config.from_profile("balanced", use_grpo=True,
        batch_size=64).training.learning_rate == PROFILES["balanced"]["learning_rate"]
    assert Config.from_profile("demo_supervised", batch_size=2).training.learning_rate == 5e-4, "demo_supervised: 2e-3 at 32"
    assert profile_values("", 2) == {}


def test_a_file_may_have_sections_or_not_a_byte_order_mark_and_constants_of_other_systems(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text('{"training": {"seed": 1}, "max_steps": 2}')
    assert read_settings(file) == {"seed": 1, "max_steps": 2}
    file.write_text('{"loss_type": "dppo", "loss_options": {"delta": 0.1}}')
    assert Config.of(**read_settings(file)).grpo.loss_options == ["delta=0.1"]
    file.write_text('{"grpo": {"advantage_epsilon": 1e-8}, "value_clip": 0.2, "seed": 1}', encoding="utf-8-sig")
    assert read_settings(file) == {"seed": 1}


CODE = dict(reward_functions=["correctness", "r.py:r"], reward_weights=[1.0, 1.0], environment="e.py:e", max_turns=2,
    trust_remote_code=True, dataset="t.py")
AGAIN = dict(
    reward_functions=["s.py:s"], reward_weights=[1.0], environment="", max_turns=1, trust_remote_code=False, dataset="a:b")


def test_code_that_a_run_of_another_user_names_is_named_again(tmp_path, monkeypatch):
    file, resume = tmp_path / "config.json", dict(resume=True, output_dir=str(tmp_path))
    file.write_text(json.dumps({"use_grpo": True, **CODE}))
    assert Config.of(**complete(resume)).model.trust_remote_code
    (tmp_path / "settings.json").write_text(file.read_text())
    monkeypatch.setattr("os.getuid", lambda: file.stat().st_uid + 1)
    for given, missing in ({}, "--reward_functions correctness r.py:r --environment e.py:e --trust_remote_code True --dataset t.py"), (
            {name: value for name, value in AGAIN.items() if name != "environment"}, "--environment e.py:e"):
        with pytest.raises(ValueError, match=f"belongs to another user and names code; if you trust it, add {missing}$"):
            complete(resume | given)
    with pytest.raises(ValueError, match=r"add --reward_functions correctness r\.py:r"):
        parse_config([str(file), "--seed", "1"])          # its settings for a new run
    assert Config.of(**complete(resume | AGAIN)).grpo.reward_functions == ["s.py:s"]
    parse_config([str(tmp_path / "settings.json")])       # a file of settings that the user names
    file.write_text(json.dumps(dict(reward_functions=["correctness", "python:f"], reward_weights=[1.0, 1.0])))
    Config.of(**complete(resume))
