"""Command lines: which source wins, help, and mistakes in one line with exit code 2 before a model is loaded."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import pytest
from conftest import ROOT
from forked import Ranks

import infer
import train
from config import FLAGS, PROFILES
from runs import setup
from runs.command_line import COMMON, parse_config, parse_infer


@pytest.mark.parametrize("program,typed", [("train.py", ["--learning-rat", "1"]), ("infer.py", ["--envronment", "x"])])
def test_a_mistyped_flag_of_a_program_is_one_line(program, typed):
    done = Ranks(1, program, *typed).wait(60)
    assert done.returncode == 2 and re.fullmatch(rf"{program}: error: --\w+: unknown flag; did you mean --\w+\?\n", done.stderr)


@pytest.mark.parametrize("program,parse,flag,names", [
    ("train.py", parse_config, "--help", COMMON), ("train.py", parse_config, "--help_all", set(FLAGS)), ("train.py", parse_config, "--help-all", set(FLAGS)),
    ("infer.py", partial(parse_infer, description=infer.__doc__), "--help", None),
])
def test_help_begins_with_three_examples_that_parse_and_shows_the_flags(program, parse, flag, names, capsys):
    with pytest.raises(SystemExit):
        parse([flag])
    printed = capsys.readouterr().out
    examples = [line.strip().partition("   ")[0] for line in printed.splitlines()[:8] if f"python {program}" in line]
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example)[2:]
        if "--resume" not in words:                       # which needs a run
            parse(words)
    if names:
        assert set(re.findall(r"^  --(\w+)", printed, re.MULTILINE)) == names | {"help_all", "task", "debug"}
        of_profile = re.findall(r"\w+", printed.partition("\n  --profile ")[2].partition("\n  --")[0])
        assert "profile" not in names or PROFILES.keys() <= {*of_profile}
        assert re.search(r"\nOptimiser:\n  --learning_rate float +peak learning rate; 0: 1e-6 ", printed)


def test_flags_may_be_written_with_hyphens_and_booleans_as_words():
    training = parse_config(["--use-grpo", "--batch-size", "7", "--gradient_checkpointing", "true", "--check", "FALSE"]).training
    assert training.use_grpo and training.batch_size == 7 and training.gradient_checkpointing and not training.check
    assert not parse_config(["--no-use-kl-penalty"]).grpo.use_kl_penalty


def test_profile_then_file_then_flags(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"use_grpo": True, "batch_size": 7, "seed": 5, "reward_functions": ["correctness"]}))
    config = parse_config([str(file), "--seed", "6"])
    assert config.training.profile == "demo" and config.grpo.generation_max_length == PROFILES["demo"]["generation_max_length"]
    assert (config.training.batch_size, config.training.seed) == (7, 6) and config.grpo.reward_functions == ["correctness"]


@pytest.mark.parametrize("weight", ["-5e-05", "-1E3", "-.5", "-2"])
def test_a_negative_number_is_a_value_however_it_is_written(weight):
    config = parse_config(["--use_grpo", "--reward_functions", "correctness", "safety", "--reward_weights", "1", weight])
    assert config.grpo.reward_weights == [1.0, float(weight)]


FILES = {
    "task.py": "SETTINGS = ['seed']", "short.py": "SETTINGS = {'sead': 1}", "half.py": "def reward(completions): ...",
    "exits.py": "import sys\nsys.exit(0)\ndef f(completions): ...\n", "open.json": "{",
    "pair.json": '{"instruction": "\\ud800"}', "type.json": '{"reward_functions": "correctness"}',
    "epsilon.json": '{"advantage_epsilon": 1e-6}', "empty.jsonl": "", "bare.jsonl": '{"prompt": "a"}\n{"prompt": "b"}\n',
    "environments.py": "def needy(conversation, level): ...\n",
    "used/config.json": '{"model_type": "llama"}', "no_weights/config.json": '{"model_type": "llama"}',
}
MISTAKES = [                    # flags of train.py behind --use_grpo, and what the one line matches
    # words that are no flags, and values that are none
    ("--seed 1 2", "2: a second value, but the flag before it takes one; of several files make one"),
    ("--explain", "--explain: unknown flag; here `python -m analysis.explain`"),
    ("--use_grpo maybe", "--use_grpo: invalid true_or_false value: 'maybe'"),
    ("--profile experimental", "--profile=experimental: choose one of demo, guess_letter"),
    ("--clip_low 1", "--clip_low=1.0: must be at least 0 and below 1"),
    ("--gae_lambda nan", "--gae_lambda=nan: must be at least 0 and at most 1"),
    ("--reward_weights 1 inf 0", "--reward_weights=inf: must be a number of at most"),
    ("--chat_template_kwargs {", "--chat_template_kwargs={: must be a JSON object"),
    ("--chat_template_kwargs [1]", "--chat_template_kwargs=.*must be a JSON object of the template's own variables"),
    # flags that do not fit together
    ("--reward_functions environment", "--reward_functions=environment: .* add --environment"),
    ("--environment calculator --max_turns 2 --use_value_head --reward_combination gdpo "
     "--reward_functions environment", "--reward_combination=gdpo: --use_value_head uses the unscaled reward"),
    ("--use_grpo false --reward_functions correctness", "--reward_functions: not used in supervised training; add --use_grpo"),
    ("--use_kl_penalty --kl_in reward --kl_estimator k3", "--kl_estimator=k3: in a reward only k1"),
    ("--use_kl_penalty --kl_estimator exact --reference_offload", "--reference_offload: .*remove one of the two"),
    ("--advantage_scale mean --reward_combination gdpo", "--advantage_scale=mean: needs rewards >= 0"),
    ("--advantage_scale mean --overlong penalise", "--advantage_scale=mean: .*--overlong penalise"),
    ("--importance_cap 0.5", "--importance_cap=0.5: .*choose at least 1"),
    ("--loss_type cispo --loss_options dual_clip=3", "--loss_options=dual_clip=3: cispo takes off_policy_limit from 0 to inf"),
    ("--loss_options dual_clip=0.9", "--loss_options=dual_clip=0.9: dapo takes dual_clip from 1 to inf"),
    ("--loss_type reinforce --minibatch_size 64", "--loss_type=reinforce: .*of 4 updates"),
    ("--use_value_head --baseline group_median", "--baseline=group_median: .*uses the value"),
    ("--use_value_head --advantage_scale batch", "--advantage_scale=batch: --use_value_head computes advantages without groups"),
    ("--use_value_head --dynamic_sampling 2", "--dynamic_sampling=2: .*zero-variance groups"),
    ("--generation_temperature 0", "--generation_temperature=0.0: all completions of a prompt would be equal"),
    ("--reference_path t --use_kl_penalty --reference_mode ema", "--reference_mode=ema: .*_path is never updated"),
    ("--reward_functions none --use_kl_penalty false", "--reward_functions=none: nothing would be trained on"),
    ("--reward_functions none --reference_path t --use_kl_penalty --kl_in reward", "nothing would be trained on"),
    ("--resume --output_dir=", "--resume: needs --output_dir"),
    # settings files
    ("{tmp}/no.json", "no.json: not a readable JSON file"), ("{tmp}/open.json", "open.json: not a readable JSON file"),
    ("{tmp}/pair.json", "pair.json: not a readable JSON file of settings: 'utf-8' codec can't encode"),
    ("{tmp}/type.json", r"--reward_functions=correctness: must be list\[str\], not str"),
    ("{tmp}/epsilon.json", "advantage_epsilon: unknown flag; here always 1e-8"),
    ("--task {tmp}/task.py", "task.py: SETTINGS must be flags and values"), ("--task {tmp}/short.py", "sead: unknown flag"),
    ("--task {tmp}/no.py", "--task: importing .*no.py failed"),
    # what is found while a run is set up
    ("--task {tmp}/half.py", "--dataset .*half.py:examples: .*half.py has no function examples"),
    ("--reward_functions {tmp}/exits.py:f", "importing .*exits.py failed: RuntimeError: SystemExit: 0"),
    ("--environment calculater --max_turns 2", "--environment calculater: unknown.*calculator"),
    ("--environment {tmp}/environments.py:needy --max_turns 2", "--environment=.*needs the column level"),
    ("--reward_functions none --use_kl_penalty", "needs a teacher; add --reference_path"),
    ("--reference_path /nowhere --use_kl_penalty", "--reference_path=/nowhere: no such folder"),
    ("--keep_best --eval_limit 0", "--keep_best: needs held-out problems: an --eval_limit above 0"),
    ("--dataset {tmp}/bare.jsonl --cold_start_steps 5",
     "no completion for 2 of 2 examples, .*--completion_column.*or pass --use_grpo --cold_start_steps 0"),
    ("--max_prompt_length 5", "--max_prompt_length=5: .* are longer.*raise it to 8, or pass --long_prompts drop"),
    ("--model_path {tmp}/no_weights", "error: --model_path=[^:]*no_weights: cannot be loaded: .*tokenizer"),
    ("--output_dir {tmp}/used", "--output_dir=.*used: holds another run"),
    ("--output_dir {tmp}/empty.jsonl/run", "empty.jsonl is not a writable folder"),
    ("--output_dir {tmp}/none --resume", "--output_dir=.*none: there is no run in it to resume"),
    ("--report_to wandb", "--report_to=wandb: is not installed; pip install it"),
    ("--engine vllm", r"--engine=vllm: vllm is not installed.*requirements-vllm\.txt"),
]


@pytest.mark.parametrize("flags,message", MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2_before_any_model_and_writes_nothing(flags, message, tmp_path, capsys, monkeypatch):
    package = flags.rpartition(" ")[2]
    if package in ("vllm", "wandb") and importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(setup, "load_any_policy", lambda *_: pytest.fail("a model was loaded"))
    words = flags.replace("{tmp}", str(tmp_path)).split()
    use_grpo = ["--use_grpo"] * ("--use_grpo" not in words)
    output = ["--output_dir", str(tmp_path / "out")] * ("--output_dir" not in flags)
    with pytest.raises(SystemExit) as stop:
        train.main([*words, *use_grpo, *output])
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and printed.startswith("train.py: error: ") and len(printed.strip().splitlines()) == 1, printed
    assert re.search(message, printed), printed
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "__pycache__" not in str(path)}
    assert after == before


# ---- a Python that is too old is refused in one line, before anything is installed or imported ---------------------------

OLD = """#!/bin/sh
exec {python} -c '
import atexit, runpy, sys
sys.version_info, sys.argv = (3, 9, 18), sys.argv[1:]
atexit.register(lambda: print({{"config", "torch"}} & set(sys.modules) or "nothing imported"))
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


@pytest.fixture
def path(tmp_path):
    """Environment variables with which python3 says that it is 3.9, without those of a make that started the tests."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(OLD.format(python=sys.executable))
    (tmp_path / "bin/python3").chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return inherited | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.parametrize("program", ["train.py", "infer.py"])
def test_the_programs_end_before_their_imports(path, program):
    done = subprocess.run(["python3", program, "--help"], cwd=ROOT, env=path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "nothing imported\n", done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("this is Python ") and "3.11 or newer" in line


@pytest.mark.parametrize("target", ["demo", "test", "test-tpu"])
def test_make_ends_before_it_installs(path, tmp_path, target):
    for name in "Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt", "requirements-tpu.txt", ".ci/oldest.txt", ".ci/usual.txt", "runs/__init__.py":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(["make", target], cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "nothing imported\n"
    assert done.stderr.startswith("this is Python ") and not list(tmp_path.glob(".venv*"))


def test_the_oldest_versions_are_the_lower_bounds():
    files = (ROOT / "requirements.txt").read_text() + (ROOT / "requirements-dev.txt").read_text()
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", files, flags=re.M))
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci/oldest.txt").read_text(), flags=re.M))
    assert {name: re.sub(r"(\.0)+$", "", version) for name, version in pinned.items()} == {
        name: bound for name, bound in bounds.items() if name not in ("ruff", "mypy")}
