"""The run folder: its files, the names in them, and what a kill leaves of them."""

import copy
import io
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import train
from conftest import QUICK
from engine.ranks import OneRank
from runs.command_line import parse_config
from runs.console import RunConsole
from runs.flag_notes import template_notes
from runs.folder import RunFolder
from runs.records import read_jsonl


def test_the_run_folder_holds_what_it_promises(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.json", "lock", "metrics.jsonl", "rollouts.jsonl", "curves.png", "report.html", "tensorboard", "checkpoints", "final"
    }
    newest, _ = sorted((finished / "checkpoints").iterdir(), reverse=True)
    config = json.loads((finished / "config.json").read_text())
    assert torch.load(newest / "state.pt", weights_only=True)["settings"] == config
    assert config["grpo"]["num_completions_per_prompt"] == 4 and config["training"]["use_grpo"] is True
    assert config["training"]["max_tokens_per_forward"] == 2048, "the default on a CPU, written down for who resumes elsewhere"
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())


def test_metrics_have_the_documented_names_and_count_steps_from_one(finished):
    lines = read_jsonl(finished / "metrics.jsonl")
    assert [(m["step"], m["phase"]) for m in lines] == [
        (0, "eval"), (1, "cold_start"), (2, "cold_start"), (3, "cold_start"), (3, "eval"),
        (4, "grpo"), (5, "grpo"), (6, "grpo"), (6, "eval"),
    ]
    grpo = lines[5]
    documented = [
        "policy_loss", "mean_reward", "mean_advantage", "std_advantage", "tied_groups", "kl", "entropy", "clip_fraction",
        "grad_norm", "completion_tokens", "truncated", "step_seconds", "sampling_seconds", "training_seconds", "peak_memory_gb",
    ]
    assert set(documented) <= set(grpo) and all(isinstance(grpo[name], int | float) for name in documented)
    assert {"eval_accuracy", "eval_accuracy_low", "eval_accuracy_high"} <= set(lines[0])
    assert grpo["kl"] == pytest.approx(0, abs=1e-6) and lines[7]["kl"] > 0, "the reference is the policy after the cold start"
    assert abs(grpo["mean_advantage"]) < 1e-6 and grpo["clip_fraction"] == 0


def test_every_metric_is_in_the_glossary(finished):
    glossary = (Path(train.__file__).parent / "docs/metrics.md").read_text()
    for line in read_jsonl(finished / "metrics.jsonl"):
        for name in line:
            entry = name.partition("/")[0] + "/<function>" if "/" in name else name
            assert f"`{entry}`" in glossary, name
    of_completions = glossary.partition("## Completions")[2]
    for name in read_jsonl(finished / "rollouts.jsonl")[0]:
        assert f"`{name}`" in of_completions, name


def test_a_kill_while_a_run_is_taken_up_again_loses_no_line(tmp_path, monkeypatch):
    """Files are truncated or replaced in one call: whenever SIGKILL comes, what was there is there, or what should be."""
    folder = RunFolder(parse_config(["--output_dir", str(tmp_path / "run"), "--report_to", "none"]), OneRank())
    folder.open(last_step=0)
    for step in 1, 2, 3:
        folder.log(step, "grpo", {"kl": 0.5})
    seen = []

    def in_the_middle(descriptor):
        seen.append([line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")])
        json.loads((tmp_path / "run/config.json").read_text())

    monkeypatch.setattr(os, "fsync", in_the_middle)
    folder = RunFolder(parse_config(["--output_dir", str(tmp_path / "run"), "--resume"]), OneRank())
    folder.open(last_step=2)
    assert seen == [[1, 2, 3]] * 2 and [line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2]


def test_what_is_no_number_is_not_on_the_console(base, capsys):
    base.folder.console.print_step("grpo", 3, 9, 3, {"mean_reward": 0.5, "entropy": math.nan, "kl": math.nan, "grad_norm": 0.0, "skipped": 0})
    assert capsys.readouterr().out == "grpo    3/9  reward 0.50  grad 0.00\n"


def test_a_step_has_one_line_of_80_columns_with_what_matters_and_the_time_left(base, capsys, monkeypatch):
    """Ten seconds a step: after step 15 of 225 of the phase, 210 steps are left. What is least important does not fit."""
    seconds = iter(range(0, 10**6, 10))
    monkeypatch.setattr(base.folder.console.progress, "get_time", lambda: next(seconds))
    metrics = {
        "mean_reward": -0.25, "reward/correctness": 0.3515, "tied_groups": 0.406, "kl": 0.01234, "entropy": 0.4321,
        "truncated": 0.0, "completion_tokens": 25.2, "grad_norm": 0.2, "skipped": 0, "unscored": 0.0}
    monkeypatch.setattr("rich.progress.Task.speed", property(lambda task: 0.1))
    base.folder.console.print_step("grpo", 15, 225, 135, metrics)
    line = capsys.readouterr().out
    assert line == "grpo  135/345  reward -0.25  correct 35%  tied 41%  kl 0.0123  left 0:35:00\n" and len(line) <= 81
    base.folder.console.print_step("grpo", 16, 225, 136, metrics | {"unscored": 0.25, "truncated": 0.5, "kl": math.nan})
    assert capsys.readouterr().out == "grpo  136/345  reward -0.25  correct 35%  unscored 25%  tied 41%  left 0:34:50\n"
    base.folder.console.print_step("grpo", 17, 225, 137, {"mean_reward": 0.5, "truncated": 0.0, "completion_tokens": 25.2})
    assert capsys.readouterr().out == "grpo  137/345  reward 0.50  len 25  left 0:34:40\n"


def test_the_start_says_which_rewards_count_what_precedes_prompts_and_that_epochs_end_first(tmp_path, capsys):
    flags = [*QUICK, "--use_grpo", "--check", "--output_dir", str(tmp_path / "run"), "--reward_functions", "correctness", "reasoning_coherence",
             "--reward_weights", "1", "0.5"]
    train.main([*flags, "--max_steps", "5000", "--instruction", "Add."])
    printed = capsys.readouterr().out
    assert "\nrewards correctness x 1, reasoning_coherence x 0.5\n" in printed
    assert "\ninstruction, before every prompt: 'Add.'\n" in printed and "max_steps is 5000, but num_epochs ends the run before" in printed
    assert "shortens the cold start" not in printed
    train.main([*flags, "--max_steps", "5"])
    printed = capsys.readouterr().out
    assert "instruction" not in printed and "ends the run before" not in printed
    assert re.search(r"\n  note   max_steps shortens the cold start of \d+ steps: without right answers at its end", printed)


def test_the_last_paragraph_says_what_was_learned(finished, capsys):
    """The held-out results before training and after each phase, from metrics.jsonl, in lines of 80 columns."""
    folder = RunFolder(parse_config(["--use_grpo", "--output_dir", str(finished), "--resume", "--report_to", "none"]), OneRank())
    folder.console.print_summary(folder.path)
    printed = capsys.readouterr().out.splitlines()
    evaluations = [line for line in read_jsonl(finished / "metrics.jsonl") if line["phase"] == "eval"]
    start = printed.index("what was learned, on held-out problems:") + 1
    names = "untrained", "after the cold start", "after GRPO"
    for line, name, measured in zip(printed[start : start + 3], names, evaluations, strict=True):
        assert line.split("accuracy")[0].strip() == name and f"accuracy {measured['eval_accuracy']:.3f} [" in line and len(line) <= 80
    assert [line.split()[-1] for line in printed[-3:]] == [f"{finished}/{name}" for name in ("final", "curves.png", "report.html")]


def test_the_console_shows_a_line_for_each_message_of_a_prompt(base, capsys):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]
    ids = [2, 5, 6]                                       # of a prompt that was cut
    base.folder.console.print_completions([dict(prompt=ids, completion="2", reward=1.0, advantage=0.5)])
    assert "  '[2, 5, 6]' -> '2': +1.00 points\n" in capsys.readouterr().out
    base.folder.console.print_completions([dict(prompt=prompt, completion="2", reward=1.0, advantage=0.5)])
    assert r"  'system: Be brief.\nuser: 1+1=?' -> '2': +1.00 points" in capsys.readouterr().out


def test_without_a_profile_the_settings_that_matter_are_printed(base, capsys):
    console = RunConsole(parse_config(["--use_grpo", "--model_path", "MODEL"]), quiet=False)
    console.describe(base.model, torch.device("cpu"), 1, 1, base.phases)
    assert re.match(r"no profile: num_completions_per_prompt \d+, generation_max_length", capsys.readouterr().out)


THINKING = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.mark.parametrize("template,variables,notes", [
    ("{{ messages }}", {}, []), (THINKING, {}, ["thoughts"]), (THINKING, {"enable_thinking": False}, []), (None, {}, []),
    ("{{ messages }}", {"enable_thinkin": False}, ["does not read enable_thinkin"]),
])
def test_variables_of_the_chat_template_that_are_unread_or_missing_for_thoughts_are_noted(template, variables, notes, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template, tokenizer.init_kwargs["chat_template_kwargs"] = template, variables
    lines = template_notes(tokenizer)
    assert len(lines) == len(notes) and all(note in line for note, line in zip(notes, lines, strict=True))


def test_lines_wrap_between_words_in_a_terminal_and_stay_whole_in_a_file(base):
    words = ["advice"] * 40
    for terminal in True, False:
        base.folder.console.rich = Console(file=io.StringIO(), force_terminal=terminal, width=80, highlight=False, soft_wrap=True)
        base.folder.console.print(" ".join(words))
        lines = base.folder.console.rich.file.getvalue().splitlines()
        assert (max(map(len, lines)) <= 80) == terminal and (len(lines) == 1) != terminal
        assert " ".join(line.strip() for line in lines).split() == words, "no word is broken"
