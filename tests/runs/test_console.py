"""What a run prints: its settings, a line for each step, completions, what was learned."""

import importlib
import io
import math

from conftest import QUICK

import pytest
import runs
import train
from config import Config
from runs.command_line import parse_config
from runs.console import RunConsole, held_out_text
from runs.folder import read_jsonl
from runs.phases import Phase


def test_a_step_has_one_line_of_80_columns_with_what_matters_and_the_time_left(base, capsys):
    """Ten seconds a step: after step 15 of 225 of the phase, 210 steps are left. What is least important does not fit."""
    metrics = {"step_seconds": 10.0,
        "mean_reward": -0.25, "correct": 0.3515, "zero_variance_groups": 0.406, "kl": 0.01234, "entropy": 0.4321,
        "truncated": 0.0, "completion_tokens": 25.2, "grad_norm": 0.2, "skipped": 0, "unscored": 0.0}
    phase = Phase("grpo", 225, 1.0, eval_steps=0)
    base.folder.console.print_step(phase, 15, 135, metrics)
    line = capsys.readouterr().out
    assert line == "grpo  135/345  reward -0.25  correct 35%  zero-var 41%  kl 0.0123  left 0:35:00\n" and len(line) <= 81
    base.folder.console.print_step(phase, 16, 136, metrics | {"unscored": 0.25, "truncated": 0.5, "kl": math.nan})
    assert capsys.readouterr().out == "grpo  136/345  reward -0.25  correct 35%  unscored 25%  cut 50%  left 0:34:50\n"
    base.folder.console.print_step(phase, 17, 137, {"mean_reward": 0.5, "kl": None, "entropy": math.nan, "grad_norm": 0.0, "skipped": 0, "step_seconds": 19.0, "updates": 2})
    assert capsys.readouterr().out == "grpo  137/345  reward 0.50  grad 0.00  left 0:32:56\n", "what is no number is not shown"


def test_the_start_says_which_rewards_count_and_what_precedes_prompts(tmp_path, capsys):
    flags = [*QUICK, "--use_grpo", "--check", "--output_dir", str(tmp_path / "run"), "--reward_functions", "correctness", "reasoning_coherence"]
    train.main([*flags, "--reward_weights", "1", "0.5", "--max_steps", "5", "--instruction", "Add.", "--lora_rank", "4"])
    printed = capsys.readouterr().out
    assert not (tmp_path / "run").exists(), "nor the built-in model, which a new adapter needs there"
    assert printed.startswith("profile demo: num_completions_per_prompt 4, generation_max_length 16")
    assert "\nrewards correctness x 1, reasoning_coherence x 0.5\n" in printed
    assert "\ninstruction, before every prompt: 'Add.'\n" in printed and "\nphase grpo: 5 steps of 4 prompts, 16 completions\n" in printed


def test_the_last_paragraph_says_what_was_learned(finished, capsys):
    lines = read_jsonl(finished / "metrics.jsonl")
    RunConsole(quiet=False).print_summary(parse_config(["--use_grpo"]), finished, lines, ["a finding"])
    printed = capsys.readouterr().out.splitlines()
    evaluations = [line for line in lines if line["phase"] == "eval"]
    start = printed.index("results on held-out problems:") + 1
    names = "untrained", "after the cold start", "after GRPO"
    for line, name, measured in zip(printed[start : start + 3], names, evaluations, strict=True):
        assert line.split("accuracy")[0].strip() == name and f"accuracy {measured['eval_accuracy']:.3f} [" in line and len(line) <= 80
    assert printed[-4] == "doctor: a finding"
    assert [line.split()[-1] for line in printed[-3:]] == [f"{finished}/{name}" for name in ("final", "curves.png", "report.html")]


@pytest.mark.parametrize("prompt,completion,shown", [
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}], "2", r"'system: Be brief.\nuser: 1+1=?' -> '2'"),
    ("\x1b[2J", "\x9b2J\r\u202e\x07", r"'\x1b[2J' -> '\x9b2J\r\u202e\x07'"),
])
def test_a_completion_is_one_line_and_cannot_control_the_terminal(base, capsys, prompt, completion, shown):
    base.folder.console.print_completions([dict(prompt=prompt, completion=completion, reward=1.0, advantage=0.5)])
    assert f"  {shown}: reward +1.00\n" in capsys.readouterr().out


def test_held_out_points_of_ones_own_reward_have_an_interval_if_they_differ():
    config = Config.from_profile("demo", use_grpo=True, reward_functions=["diversity"])
    line = {"eval_reward/length": 5.0, "eval_reward_low/length": 4.5, "eval_reward_high/length": 5.5}
    assert held_out_text(line, config) == "reward length 5.000 [4.500, 5.500]"
    equal = line | {"eval_reward_low/length": None, "eval_reward_high/length": None}
    assert held_out_text(equal, config) == "reward length 5.000"


@pytest.mark.parametrize("encoding,shown", [("ascii", "'??' -> '?'"), ("latin-1", "'?é' -> '?'"), ("utf-8", "'字é' -> '😀'")])
def test_what_a_terminal_cannot_show_is_replaced(encoding, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, write_through=True))
    importlib.reload(runs)                                # as the programs begin
    completion = dict(prompt="字é", completion="😀", reward=1.0, advantage=0.5)
    RunConsole(quiet=False).print_completions([completion])
    print("字\ud800")                                     # as infer.py prints, and half of a surrogate pair
    lines = written.getvalue().decode(encoding).splitlines()
    assert lines[0] == f"  {shown}: reward +1.00" and lines[-1] == ("字?" if encoding == "utf-8" else "??")
