"""Settings from files, from a run and from profiles."""

import json

import pytest

from config import PROFILES, Config, profile_values

from runs.command_line import parse_config
from sources.settings import complete, read_settings


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
