"""infer.py: answers to a question, evaluations and what --json writes, and mistakes in one line."""

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import watch_calls
from test_data import write_lines

import infer
import sample
from analysis import evaluation
from config import DEFAULTS, Config
from data import load_examples
from engine import make_engine
from engine.errors import RunError
from engine.models import load_any_policy
from environments.messages import encode_reply
from policy import Policy
from runs import engine_choice
from runs.command_line import parse_infer
from runs.console import held_out_text


def script_tokens(monkeypatch, tokenizer, *turns):
    """Sample those texts instead of the model's, token by token; a number n stands for n tokens of an environment."""
    tokens = []
    for turn in turns:
        tokens += [0] * turn if isinstance(turn, int) else [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
    monkeypatch.setattr(sample, "sample_inverse_cdf", lambda logits, _: (torch.tensor([tokens.pop(0)]), torch.zeros(1)))
    monkeypatch.setattr(infer, "build_policy", lambda network, tokenizer, *_, **others: (Policy(network.module, tokenizer), None))


@pytest.mark.parametrize("environment", [[], ["--environment", "calculator", "--max_turns", "2"]])
def test_control_characters_are_shown_as_escapes_and_kept_in_files(folder, tokenizer, tmp_path, capsys, monkeypatch, environment):
    answer, shown = "\x1b]0;owned\x07\x1b [2J\r\x9b\x7f\u202e \u2066é", r"\x1b]0;owned\x07\x1b [2J\r\x9b\x7f\u202e \u2066é"
    script_tokens(monkeypatch, tokenizer, answer, answer)
    flags = ["--model_path", folder, *environment]
    infer.main([*flags, "--question", "1+1=?"])
    assert capsys.readouterr().out == f"{'assistant: ' if environment else ''}{shown}\n"
    file = write_lines(tmp_path / "q.jsonl", [{"prompt": "1+1=?"}])
    infer.main([*flags, "--evaluate", file, "--json", str(tmp_path / "a.json")])
    completion = json.loads((tmp_path / "a.json").read_text())["problems"][0]["completions"][0]["completion"]
    assert (completion[0]["content"] if environment else completion) == answer


def test_the_prompt_of_a_question_has_the_instruction_and_a_conversation_shows_its_tools(folder, tokenizer, capsys, monkeypatch):
    reply = encode_reply(tokenizer, "Add.\n2+2?", {"role": "tool", "content": "4"}, [tokenizer.eos_token_id])
    script_tokens(monkeypatch, tokenizer, "calculate(2+2)", len(reply), "it is 4")
    scored = watch_calls(monkeypatch, evaluation, "score")
    infer.main(["--model_path", folder, "--question", "2+2?", "--instruction", "Add.", "--environment", "calculator", "--max_turns", "3"])
    assert [example["prompt"] for _, examples, *_ in scored for example in examples] == ["Add.\n2+2?"]
    assert capsys.readouterr().out == "assistant: calculate(2+2)\ntool: 4\nassistant: it is 4\n"


def test_answers_do_not_wait_for_the_check_of_packing_and_are_marked_if_truncated(folder, capsys, monkeypatch):
    monkeypatch.setattr(engine_choice, "fault_of_sharing", lambda *_: pytest.fail("seconds"))
    flags = ["--question", "1+1=?", "--generation_max_length", "2", "--seed", "1"]        # draws far from 0, that is from a stop token
    infer.main([*flags, "--model_path", folder, "--samples", "3"])
    printed = capsys.readouterr()
    assert printed.out.count("(truncated at --generation_max_length=2)\n") == 3 and printed.err == ""
    infer.main(flags)
    assert "no --model_path: using the built-in model with random weights" in capsys.readouterr().err


def test_a_model_that_only_answers_is_frozen_and_stored_in_the_precision_it_computes_in(folder, monkeypatch):
    engines = []
    monkeypatch.setattr(infer, "print_answers", lambda *_: None)
    monkeypatch.setattr(evaluation, "sample_and_score_problems", lambda engine, *_, **options: engines.append(engine) or [])
    for precision in "auto", "bfloat16":
        infer.main(["--model_path", folder, "--question", "1", "--precision", precision])
    models = [engine.model for engine in engines]
    assert [model.model.layers[0].mlp.up_proj.weight.dtype for model in models] == [torch.float32, torch.bfloat16]
    assert not any(parameter.requires_grad for model in models for parameter in model.parameters())


MINE = '''
def length(completions, **columns):
    return [float(len(text)) for text in completions]

def later(completions, prompts, **columns):
    return [None if prompt == "p0" else 2.0 for prompt in prompts]
'''
SUMS = "--evaluate arithmetic --limit 40 --generation_max_length 4".split()


@pytest.fixture
def prompts(tmp_path):
    """Eight prompts without answers, and reward functions in a file."""
    (tmp_path / "mine.py").write_text(MINE)
    return ["--evaluate", write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"p{i}", "level": i} for i in range(8)]),
            "--generation_max_length", "12"]


@pytest.fixture
def scripted(monkeypatch):
    """The completions are those of the list that this returns, over and over."""
    real, texts, scored_before = evaluation.score, [], []

    def scored(rollout, *args):
        count = len(rollout.completions)
        rollout.completions = [texts[(len(scored_before) + row) % len(texts)] for row in range(count)]
        scored_before.extend(rollout.completions)
        return real(rollout, *args)

    monkeypatch.setattr(evaluation, "score", scored)
    return texts


def result_of(tmp_path, *argv):
    """Evaluate, if there is an argv, and return what --json wrote."""
    if argv:
        infer.main([*argv, "--json", str(tmp_path / "result.json")])
    return json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)


def test_one_completion_is_what_a_run_says(folder, scripted, settings, capsys):
    for p, example in enumerate(load_examples("arithmetic", "test", limit=40)):
        scripted.append(f"<answer>{example['answer'] if p % 3 == 0 else 'x'}</answer>")
    infer.main(["--model_path", folder, *SUMS])
    engine = make_engine("shared", *load_any_policy(Config.of(model_path=folder).model))
    settings = replace(settings, generation_max_length=4, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    result = evaluation.evaluate(engine, load_examples("arithmetic", "test", limit=40), settings, seed=0)
    assert capsys.readouterr().out == held_out_text(result, Config()) + "\n" and result["eval_accuracy"] == 14 / 40


def test_several_samples_and_reward_functions_are_printed_and_written(folder, scripted, tmp_path, capsys):
    for p, example in enumerate(load_examples("arithmetic", "test", limit=40)):
        scripted += [f"<answer>{example['answer'] if p % 2 == 0 else 'x'}</answer>", "<answer>y</answer>", "none"]
    functions = ["--reward_functions", "correctness", "reasoning_coherence", "--reward_weights", "1", "0.5"]
    written = result_of(tmp_path, "--model_path", folder, *SUMS, "--samples", "3", *functions)
    printed = capsys.readouterr().out
    found = {name: estimate["mean"] for name, estimate in written["estimates"].items()}
    assert found == pytest.approx({"accuracy": 1 / 6, "pass@2": 1 / 3, "pass@3": 0.5, "majority@3": 0.25,
                                   "reward/reasoning_coherence": 2 / 15, "reward": 1 / 6 + 1 / 15})
    for name, mean in found.items():
        cut = ", cut \\d+%" if name == "accuracy" else ""
        assert re.search(rf"^{name} {mean:.3f}( \[.*\])? of 40 x 3{cut}$", printed, flags=re.MULTILINE)
    assert written["samples"] == 3 and written["reward_weights"] == [1, 0.5]
    first = written["problems"][0]
    assert [completion["completion"] for completion in first["completions"]] == scripted[:3]
    assert first["answer"] == load_examples("arithmetic", "test", limit=1)[0]["answer"]
    for completion in first["completions"]:
        rewards = completion["rewards"]
        assert completion["reward"] == rewards["correctness"] + 0.5 * rewards["reasoning_coherence"]


def test_prompts_without_answers_are_completed_into_a_file_with_their_columns(folder, prompts, tmp_path, capsys):
    written = result_of(tmp_path, "--model_path", folder, *prompts, "--samples", "2", "--generation_max_length", "3")
    assert capsys.readouterr().out == f"{tmp_path}/result.json: 8 prompts with their completions\n"
    assert [(problem["prompt"], problem["level"]) for problem in written["problems"]] == [(f"p{i}", i) for i in range(8)]
    completions = [completion for problem in written["problems"] for completion in problem["completions"]]
    assert len(completions) == 16 and len({completion["completion"] for completion in completions}) > 8
    assert {type(completion["finished"]) for completion in completions} == {bool}
    assert all(completion["reward"] is None for completion in completions)


def test_what_a_function_could_not_score_is_left_out(folder, tmp_path, prompts, capsys):
    functions = ["--reward_functions", f"{tmp_path}/mine.py:length", f"{tmp_path}/mine.py:later"]
    written = result_of(tmp_path, "--model_path", folder, *prompts, *functions, "--samples", "2")
    assert [completion["rewards"]["later"] for completion in written["problems"][0]["completions"]] == [None, None]
    printed, length, total = capsys.readouterr().out, *(written["estimates"][name] for name in ("reward/length", "reward"))
    assert "reward/later 2.000 of 7 x 2\n" in printed and "accuracy" not in printed
    assert f"\nreward {total['mean']:.3f} [" in printed
    assert f"reward/length {length['mean']:.3f} [{length['low']:.3f}, " in printed


def test_a_conversation_whose_environment_raises_is_one_line_or_unscored_and_not_right(folder, tmp_path, scripted):
    (tmp_path / "broken.py").write_text("def respond(conversation, answer):\n    return 1 / (int(answer) % 2)\n")
    scripted += ["<answer>1</answer>"]
    argv = ["--model_path", folder, "--evaluate", "arithmetic", "--limit", "8", "--environment", f"{tmp_path}/broken.py:respond",
            "--max_turns", "2", "--reward_functions", "correctness", "environment", "--generation_max_length", "400"]
    with pytest.raises(RunError, match=r"environment .*broken.py:respond raised (ZeroDivision|Type)Error.*--reward_errors none"):
        infer.main(argv)
    written = result_of(tmp_path, *argv, "--reward_errors", "none")
    rewards = [problem["completions"][0]["rewards"] for problem in written["problems"]]
    unscored = [row["environment"] is None for row in rewards]
    assert any(unscored) and unscored == [row["correctness"] is None for row in rewards]
    assert written["estimates"].get("accuracy", {"problems": 0})["problems"] == 8 - sum(unscored)


@pytest.mark.parametrize("size", [1, 3])
def test_the_batch_size_bounds_what_is_sampled_at_once_and_changes_no_answer(folder, tmp_path, monkeypatch, prompts, size):
    calls = watch_calls(monkeypatch, evaluation, "score")
    argv = ["--model_path", folder, *prompts, "--limit", "3", "--samples", "2", "--reward_functions", "diversity"]
    every = result_of(tmp_path, *argv)["problems"]
    (tmp_path / "result.json").unlink()
    assert every == result_of(tmp_path, *argv, "--generation_batch_size", f"{size}")["problems"]
    assert [config.generation_batch_size for *_, config in calls] == [64, size, size, size], "at least the two completions of one problem"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RunError, None])
def test_an_evaluation_that_stopped_continues_and_its_file_is_that_of_one_that_did_not(folder, tmp_path, prompts, capsys, monkeypatch, error):
    """The third of four batches raises; after None, all is there, and the model is not loaded."""
    def raise_in_third(number):
        if error and number == 3:
            raise error("in the third batch")

    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"p{i}", "level": math.nan if i else 0.5} for i in range(8)])
    argv = ["--model_path", folder, *prompts, "--reward_functions", f"{tmp_path}/mine.py:length", "--generation_batch_size", "2"]
    infer.main([*argv, "--json", str(tmp_path / "whole.json")])
    printed = capsys.readouterr().out
    calls = watch_calls(monkeypatch, evaluation, "score", raise_in_third)
    with pytest.raises(error) if error else nullcontext():
        result_of(tmp_path, *argv)
    if error:
        assert capsys.readouterr().err.endswith("result.json: 4 of 8 problems\n")
        assert result_of(tmp_path)["estimates"]["reward/length"]["problems"] == 4
    else:
        monkeypatch.setattr(infer, "load_any_policy", lambda *_, **options: pytest.fail("a model was loaded"))
    result_of(tmp_path, *argv)
    assert len(calls) == (5 if error else 4) and capsys.readouterr().out.splitlines()[:2] == printed.splitlines()[:2]
    assert (tmp_path / "result.json").read_bytes() == (tmp_path / "whole.json").read_bytes()


def test_results_with_other_settings_are_not_continued(folder, tmp_path, prompts):
    argv = ["--model_path", folder, *prompts, "--reward_functions", "diversity"]
    result_of(tmp_path, *argv)
    for flags, change in (["--seed", "1"], "seed 0, not 1"), (["--limit", "7"], "limit 256, not 7"), (["--model_path", ""], "model_path"):
        with pytest.raises(ValueError, match=rf"result.json: was written with {change}.*; name another file"):
            result_of(tmp_path, *argv, *flags)
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"q{i}"} for i in range(8)])
    with pytest.raises(ValueError, match=r"was written with examples 8 examples, .*, not 8 examples"):
        result_of(tmp_path, *argv)
    for text in "[1]", "{", '{"problem": 1}':
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(ValueError, match=r"is not a file of infer\.py; name another one"):
            result_of(tmp_path, *argv)
        assert (tmp_path / "result.json").read_text() == text


def test_an_answer_form_that_no_completion_has_is_mentioned(folder, scripted, capsys):
    for text, noted in ("The sum is 7.", True), ("<answer>x</answer>", False):
        scripted[:] = [text]
        infer.main(["--model_path", folder, *SUMS])
        assert ("no completion has an <answer>...</answer> or a \\boxed{}: request it" in capsys.readouterr().err) == noted


@pytest.mark.parametrize("flags,message", [
    ("", "give one of --question, --evaluate and --report"),
    ("--question q --evaluate arithmetic", "not allowed with argument --question"),
    ("--question q --json a.json", "--json and --reward_functions: need --evaluate"),
    ("--question q --reward_functions countdown", "--json and --reward_functions: need --evaluate"),
    ("--question q --generation_top_p 2", "--generation_top_p=2.0: must be above 0"),
    ("--question q --max_turns 3", "there is no environment to continue the conversation"),
    ("--evaluate arithmetic --json x", "WORLD_SIZE: infer.py runs in one process; start it without torchrun"),
    ("--evaluate arithmetic --samples 0", "--samples=0: must be at least 1"),
    ("--evaluate arithmetic --limit -1", "--limit=-1: must be at least 0"),
    ("--evaluate arithmetic --json {tmp}/no/such.json", "No such file or directory: '.*/no/such.json'"),
    ("--evaluate {tmp}/bare.jsonl --json {tmp}/link.jsonl", "link.jsonl: is the file of the problems"),
    ("--evaluate {tmp}/bare.jsonl", "no example has an answer; name its column with --answer_column, choose --reward_functions that need none"),
    ("--evaluate {tmp}/bare.jsonl --reward_functions correctness countdown", "countdown: needs the column numbers"),
    ("--evaluate {tmp}/bare.jsonl --split train", "--split=train: all rows of a file or list are used"),
    ("--evaluate {tmp}/bare.jsonl --environment {tmp}/mine.py:respond --max_turns 2 --json x", "mine.py:respond: needs the column level"),
    ("--evaluate arithmetic --reward_functions {tmp}/mine.py:f {tmp}/other.py:f", "two have the name"),
])
def test_mistakes_are_one_line_before_a_model_is_loaded(tmp_path, monkeypatch, flags, message):
    bare = write_lines(tmp_path / "bare.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": " "}])
    (tmp_path / "link.jsonl").symlink_to(bare)
    for name in "mine.py", "other.py":
        (tmp_path / name).write_text("def f(completions, **columns): ...\ndef respond(conversation, level): ...\n")
    monkeypatch.setattr(infer, "load_any_policy", lambda *_, **options: pytest.fail("a model was loaded"))
    monkeypatch.setenv("WORLD_SIZE", "2" if "torchrun" in message else "1")
    with pytest.raises((ValueError, OSError), match=rf"^.*{message}.*$"):
        infer.main(flags.replace("{tmp}", str(tmp_path)).split())


def test_a_prompt_beyond_the_positions_of_the_model_is_one_line(folder, tmp_path):
    file = write_lines(tmp_path / "q.jsonl", [{"prompt": "1" * 4090, "answer": "2"}])
    with pytest.raises(ValueError, match="exceeds the model's 4096 positions; at most 5, or shorten the prompts"):
        infer.main(["--model_path", folder, "--evaluate", file, "--generation_max_length", "6"])


def test_flags_that_are_not_given_have_the_defaults_of_the_configuration():
    """trust_remote_code above all."""
    args = vars(parse_infer(["--question", "1+1=?"], ""))
    own = {"reward_functions": ["correctness"], "generation_batch_size": 64,
           "generation_temperature": 1.0, "generation_top_p": 1.0, "generation_top_k": 0}
    assert (args["samples"], args["split"], args["limit"]) == (1, "test", 256)
    shared = args.keys() & DEFAULTS.keys()
    assert len(shared) == 22 and {name: args[name] for name in shared} == {name: DEFAULTS[name] for name in shared} | own
    assert vars(parse_infer(["--question", "q", "--trust_remote_code"], ""))["trust_remote_code"] is True
