"""Command lines: which source wins, mistakes in one line with exit code 2 before a model is loaded, and fast answers."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import train
from infer import parse_arguments
from config import FLAGS, GRPOConfig
from runs import setup
from runs.command_line import COMMON, parse_config
from config import PROFILES

ROOT = Path(__file__).parents[2]
PROGRAMS = {                    # with a mistyped flag
    "train.py": ["--learning-rat", "1"], "infer.py": ["--envronment", "x"], "rewards.py": ["--lint", "--datset", "x"]}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_a_mistyped_flag_are_answered(program):
    def call(*argv):
        return subprocess.run([sys.executable, program, *argv], cwd=ROOT, capture_output=True, text=True)

    for flag in ["--help"] + ["--help_all"] * (program == "train.py"):
        assert call(flag).returncode == 0, call(flag).stderr
    answer = call(*PROGRAMS[program])
    assert answer.returncode == 2 and "unknown flag; did you mean --" in answer.stderr
    assert answer.stderr.startswith(f"{program}: error: ") and len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("program", ["train.py", "infer.py"])
def test_the_help_begins_with_three_examples_that_parse(program):
    parse = {"train.py": parse_config, "infer.py": parse_arguments}[program]
    shown = subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    examples = [line.strip().partition("   ")[0] for line in shown.splitlines()[:8] if f"python {program}" in line]
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example)[2:]
        if "--resume" not in words:                       # which needs a run
            parse(words)


@pytest.mark.parametrize("flag,names", [("--help", COMMON), ("--help_all", set(FLAGS))])
def test_help_shows_the_flags_that_most_runs_need_and_help_all_every_one(flag, names, capsys):
    with pytest.raises(SystemExit):
        parse_config([flag])
    printed = capsys.readouterr().out
    assert set(re.findall(r"^  --(\w+)", printed, re.MULTILINE)) == names | {"help_all"}
    assert re.search(r"\nOptimiser:\n  --learning_rate float +peak learning rate \[5e-06\]\n", printed), "heading, kind, help, default"


def test_flags_may_be_written_with_hyphens_and_booleans_as_words():
    training = parse_config(["--use-grpo", "--batch-size", "7", "--gradient_checkpointing", "true", "--check", "FALSE"]).training
    assert training.use_grpo and training.batch_size == 7 and training.gradient_checkpointing and not training.check
    assert not parse_config(["--no-use-kl-penalty"]).grpo.use_kl_penalty
    with pytest.raises(ValueError, match="--use_grpo: invalid true_or_false value: 'maybe'"):
        parse_config(["--use_grpo", "maybe"])


@pytest.mark.parametrize("flags,message", [
    ("--max_turns 3", "no environment continues the conversation"), ("--reward_weights 1", "1 weights for 3 reward functions"),
    ("--use_kl_penalty --kl_estimator k1", "--kl_estimator=k1: in a loss its gradient is 0"),
    ("--use_kl_penalty --kl_in reward --kl_estimator k3", "--kl_estimator=k3: in a reward only k1"),
    ("--use_kl_penalty --kl_estimator exact --reference_offload", "--reference_offload: .*ratio_k3"),
    ("--advantage_scale mean --reward_combination gdpo", "--advantage_scale=mean: is for points from 0 up"),
    ("--advantage_scale mean --overlong penalise", "--advantage_scale=mean: .*--overlong penalise"),
    ("--importance_cap 0.5", "--importance_cap=0.5: .*choose from 1 up"),
    ("--loss_type cispo --loss_options dual_clip=3", "--loss_options=dual_clip=3: cispo takes off_policy_limit from 0 to inf"),
    ("--loss_options dual_clip=0.9", "--loss_options=dual_clip=0.9: dapo takes dual_clip from 1 to inf"),
    ("--loss_options dual_clip", "--loss_options=dual_clip: dapo takes dual_clip from 1"),
    ("--use_value_head --baseline group_median", "--baseline=group_median: .*takes the value"),
    ("--use_value_head --dynamic_sampling 2", "--dynamic_sampling=2: .*equal rewards too"),
    ("--reward_timeout 1e-9", "--reward_timeout=1e-09: at least 0.001 seconds"),
    ("--reward_weights 1 inf 0", "--reward_weights=inf: must be a number of at most"),
])
def test_flags_that_do_not_fit_together_are_rejected_by_the_parser_before_slow_imports(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_config(["--use_grpo", *flags.split()])


def test_profile_then_file_then_flags(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"use_grpo": True, "batch_size": 7, "seed": 5, "reward_functions": ["correctness"]}))
    config = parse_config([str(file), "--seed", "6"])
    assert config.training.profile == "demo" and config.grpo.generation_max_length == PROFILES["demo"]["generation_max_length"]
    assert (config.training.batch_size, config.training.seed) == (7, 6) and config.grpo.reward_functions == ["correctness"]
    assert parse_config(["--use_grpo", "--profile", "balanced"]).grpo.num_completions_per_prompt == 16
    assert parse_config(["--use_grpo", "--model_path", "some/model"]).grpo == GRPOConfig(), "no profile for a real model"


def data_file(folder, name, text):
    (folder / name).write_text(text)
    return str(folder / name)


MISTAKES = {
    "stray word": (["--seed", "1", "2"], "2: unknown flag; see --help"),
    "removed": (["--explain"], "--explain: unknown flag; here `python -m analysis.explain`"),
    "not a number": (["--seed", "x"], "--seed.*'x'"),
    "learning rate": (["--learning_rate", "1e6"], "--learning_rate=1000000.0: must be at least 0 and at most 0.1"),
    "greedy": (["--generation_temperature", "0"], "--generation_temperature=0.0: all completions of a prompt would be equal"),
    "two updates": (["--loss_type", "reinforce", "--minibatch_size", "64"], "--loss_type=reinforce: .*of 4 updates"),
    "weights": (["--reward_weights", "1", "2"], "--reward_weights.*2 weights for 3 reward functions"),
    "unimportable reward": (["--reward_functions", "{tmp}/broken.py:f"], "broken.py.*SyntaxError"),
    "missing column": (["--reward_functions", "{tmp}/needs.py:f"], "needs the column tests"),
    "half a pair in .json": (["--dataset", "{tmp}/pair.json"], "pair.json: not JSON: 'utf-8' codec can't encode"),
    "reward that exits at import": (["--reward_functions", "{tmp}/exits.py:f"], "importing .*exits.py failed: RuntimeError: SystemExit: 0"),
    "no demonstrations": (["--dataset", "{tmp}/bare.jsonl", "--cold_start_steps", "5"],
                          "no completion for 2 of 2 examples, .*--completion_column.*or pass --use_grpo --cold_start_steps 0"),
    "long prompt": (["--max_prompt_length", "5"], "--max_prompt_length=5: .* are longer.*raise it to 8.*--long_prompts"),
    "no weights": (["--model_path", "{tmp}/no_weights"], "error: --model_path=[^:]*no_weights: it has no tokenizer"),
    "used folder": (["--output_dir", "{tmp}/used"], "--output_dir=.*used: holds another run"),
    "resume what": (["--resume"], "--resume: needs --output_dir"),
    "folder in a file": (["--output_dir", "{tmp}/empty.jsonl/run"], "empty.jsonl is not a writable folder"),
    "settings behind flags": (["--seed", "1", "settings.json"], "settings.json: unknown flag; see --help"),
    "negative": (["--max_steps", "-1"], "--max_steps=-1: must be at least 0"),
    "settings file": (["{tmp}/no.json"], "no.json: not a readable JSON file"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_before_any_model_and_overwrites_nothing(mistake, tmp_path, capsys, monkeypatch):
    data_file(tmp_path, "broken.py", "def f(:\n")
    data_file(tmp_path, "needs.py", "def f(completions, tests, **columns): ...\n")
    data_file(tmp_path, "empty.jsonl", "")
    data_file(tmp_path, "pair.json", '[{"prompt": "\\uD800"}]')
    data_file(tmp_path, "exits.py", "import sys\nsys.exit(0)\ndef f(completions): ...\n")
    data_file(tmp_path, "bare.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    for name in "used/config.json", "no_weights/config.json":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data_file(tmp_path, name, '{"model_type": "llama"}')
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(setup, "load_any_policy", lambda *_: pytest.fail("a model was loaded"))

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


@pytest.mark.parametrize("weight", ["-5e-05", "-1E3", "-.5", "-2", "-1e-3"])
def test_a_negative_number_is_a_value_however_it_is_written(weight):
    config = parse_config(["--use_grpo", "--reward_functions", "correctness", "safety", "--reward_weights", "1", weight])
    assert config.grpo.reward_weights == [1.0, float(weight)]
