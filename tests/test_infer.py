"""Asking and measuring."""

import copy
import json
import re

import pytest
import torch

from analysis import chat
from analysis import evaluation
import infer
from engine import sampling_state
from config import GRPOConfig, ModelConfig
from data import encode_demonstration, encode_prompt
from engine.chat_template import encode_reply
from analysis.evaluation import evaluate, wilson_interval
from model import load_policy, save_policy


@pytest.fixture
def folder(tmp_path):
    save_policy(*load_policy(ModelConfig()), tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("successes,n,low,high", [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)])
def test_wilson_intervals_of_the_literature(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=1e-4)


def scripted(monkeypatch, tokenizer, *turns):
    """Samples those texts instead of what the model would say, token by token. Returns the prompts and seeds that it was asked.

    turns  of each completion; a number between them stands for so many tokens of an environment
    """
    asked, stop, tokens = [], [tokenizer.eos_token_id], []
    for turn in turns:
        tokens += [0] * turn if isinstance(turn, int) else tokenizer.encode(turn, add_special_tokens=False) + stop
    real = chat.sample_completions_for_prompts

    def sample_completions(model, tokenizer, prompts, *args, **kwargs):
        asked.append((copy.deepcopy(prompts), kwargs["seed"]))
        return real(model, tokenizer, prompts, *args, **kwargs)

    monkeypatch.setattr(sampling_state, "sample_inverse_cdf", lambda logits, _: (torch.tensor([tokens.pop(0)]), torch.zeros(1)))
    monkeypatch.setattr(chat, "sample_completions_for_prompts", sample_completions)
    monkeypatch.setattr(chat, "can_share_prompts", lambda *_: False)             # then a turn is answered at once
    return asked


def test_a_question_is_answered_word_by_word_with_reasoning_set_apart(folder, tokenizer, capsys, monkeypatch):
    scripted(monkeypatch, tokenizer, "<reasoning>1 and 1</reasoning><answer>2</answer>")
    pieces, real = [], chat.Words.on_finalized_text

    def note(self, text, stream_end=False):
        pieces.append(text)
        real(self, text, stream_end)

    monkeypatch.setattr(chat.Words, "on_finalized_text", note)
    infer.main(["--model_path", folder, "--question", "1+1=?"])
    assert capsys.readouterr().out == "reasoning: 1 and 1\nanswer: 2\n"
    assert [piece for piece in pieces if piece] == ["<reasoning>1 ", "and ", "1</reasoning><answer>2</answer>"]


def test_an_answer_that_is_cut_says_so(folder, capsys):
    infer.main(["--model_path", folder, "--question", "1+1=?", "--generation_max_length", "5"])
    assert "(cut off at --generation_max_length=5)" in capsys.readouterr().out


def test_a_chat_remembers_what_was_said_and_ends_at_an_empty_line(folder, tokenizer, capsys, monkeypatch):
    asked, typed = scripted(monkeypatch, tokenizer, "two", "four"), iter(["1+1?", "2+2?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    infer.main(["--model_path", folder, "--chat", "--instruction", "Be brief."])
    said = capsys.readouterr()
    assert said.out == "two\nfour\n" and said.err == "An empty line ends the conversation.\n"
    first = "Be brief.\n1+1?"                             # as --question would send it, and as training did
    (_, seed), ((then,), next_seed) = asked
    assert asked[0][0] == [first] and (seed, next_seed) == (0, 1), "another seed each time"
    assert tokenizer.decode(then) == f"<bos>{first}two<eos>\n2+2?\n"
    demonstration = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2?"}]
    trained = encode_demonstration(tokenizer, first, demonstration, [tokenizer.eos_token_id])[0]
    assert then == encode_prompt(tokenizer, first) + trained


def test_with_a_chat_template_a_chat_is_messages(folder, tokenizer, capsys, monkeypatch):
    asked, typed = scripted(monkeypatch, tokenizer, "two", "four"), iter(["1+1?", "2+2?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    load = chat.load_policy

    def with_template(source):
        model, tokenizer = load(source)
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
        return model, tokenizer

    monkeypatch.setattr(chat, "load_policy", with_template)
    infer.main(["--model_path", folder, "--chat"])
    first = {"role": "user", "content": "1+1?"}
    then = [first, {"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2?"}]
    assert [prompts for prompts, _ in asked] == [[[first]], [then]]


@pytest.mark.parametrize("pressed", [EOFError, KeyboardInterrupt])
def test_a_chat_ends_quietly_at_ctrl_d_and_ctrl_c(folder, capsys, monkeypatch, pressed):
    def press(prompt):
        raise pressed

    monkeypatch.setattr("builtins.input", press)
    infer.main(["--model_path", folder, "--chat"])
    assert capsys.readouterr().out == "\n"


def test_a_chat_with_tools_shows_what_they_answered(folder, tokenizer, capsys, monkeypatch):
    reply = encode_reply(tokenizer, "2+2?", {"role": "tool", "content": "4"}, [tokenizer.eos_token_id])
    scripted(monkeypatch, tokenizer, "calculate(2+2)", len(reply), "it is 4")
    typed = iter(["2+2?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    infer.main(["--model_path", folder, "--chat", "--environment", "calculator", "--max_turns", "3"])
    assert capsys.readouterr().out == "assistant: calculate(2+2)\ntool: 4\nassistant: it is 4\n"


def test_answers_to_a_file_are_those_of_one_question_and_keep_its_columns(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chat, "AT_ONCE", 2)
    rows = [{"prompt": f"{n}+1=?", "answer": str(n + 1), "level": n} for n in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--questions", str(tmp_path / "in.jsonl"), "--answers", str(tmp_path / "out.jsonl")]
    infer.main(["--model_path", folder, *files, "--generation_max_length", "6", "--samples", "2"])
    assert capsys.readouterr().out == f"{tmp_path}/out.jsonl: 6 answers to 3 prompts\n"
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in rows[0]} for line in written] == [row for row in rows for _ in range(2)]
    config = GRPOConfig(generation_max_length=6, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    alone = chat.ChatModel.load(ModelConfig(model_path=folder), config, 0).sample([rows[2]], 2)
    assert [line["completion"] for line in written[4:]] == alone.completions
    assert [line["finished"] for line in written[4:]] == alone.finished.tolist()


def test_accuracy_counts_sampled_answers(folder, monkeypatch, settings, capsys):
    model, tokenizer = load_policy(ModelConfig(model_path=folder))
    real = evaluation.sample_completions_for_prompts

    def scripted(model, tokenizer, prompts, *args, **kwargs):
        rollout = real(model, tokenizer, prompts, *args, **kwargs)
        rollout.completions = [f"<answer>{'1' if p == 'easy' else '0'}</answer>" for p in prompts]
        return rollout

    monkeypatch.setattr(evaluation, "sample_completions_for_prompts", scripted)
    examples = [{"prompt": "easy", "answer": "1"}] * 3 + [{"prompt": "hard", "answer": "1"}] + [{"prompt": "unknown"}]
    result = evaluate(model, tokenizer, examples, settings, seed=0, batch_size=2)
    assert result["eval_accuracy"] == 0.75 and result["eval_problems"] == 4
    assert (result["eval_accuracy_low"], result["eval_accuracy_high"]) == wilson_interval(3, 4)
    assert "eval_accuracy" not in evaluate(model, tokenizer, examples[-1:], settings, seed=0)
    infer.main(["--model_path", folder, "--evaluate", "arithmetic", "--limit", "4", "--generation_max_length", "4"])
    assert "accuracy 0.000 [0.000, 0.490] of 4" in capsys.readouterr().out


@pytest.mark.parametrize("argv,message", [
    ([], "one of them"), (["--question", "q", "--evaluate", "arithmetic"], "one of them"),
    (["--questions", "arithmetic"], "--answers FILE belong together"), (["--question", "q", "--samples", "2"], "--samples=2"),
    (["--questions", "arithmetic", "--answers", "no/such/folder.jsonl"], "there is no folder no/such"),
    (["--question", "q", "--generation_max_length", "9999"], "exceeds the model's 4096 positions; at most 4094, or"),
    (["--question", ""], "--question: is empty"), (["--questoin", "q"], "--questoin: unknown flag; did you mean --question?"),
    (["--question"], "--question: expected one argument"), (["--xyz"], "--xyz: unknown flag; see --help"),
    (["--evaluate", "arithmetic", "--split", "foo"], "arithmetic: there is no split foo; it has train and test"),
])
def test_what_cannot_be_asked_is_one_line(argv, message):
    with pytest.raises(ValueError, match=message):
        infer.main(argv)


def test_the_built_in_model_is_said_to_know_nothing_yet(folder, capsys):
    ask = ["--question", "1+1=?", "--generation_max_length", "2"]
    infer.main(ask)
    assert "no --model_path: this is the built-in model with random weights" in capsys.readouterr().err
    infer.main(["--model_path", folder, *ask])
    assert capsys.readouterr().err == ""


def test_a_model_that_is_not_there_is_named_by_the_flag_that_named_it(folder):
    with pytest.raises(ValueError, match=r"^--against_model=\./nope: no such folder"):
        infer.main(["--model_path", folder, "--evaluate", "arithmetic", "--limit", "1", "--generation_max_length", "2",
                    "--against_model", "./nope"])


def test_the_help_describes_every_flag_and_shows_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        infer.main(["--help"])
    flags = dict(re.findall(r"^  --(\w+)(?: \S+)?(?:\n +|  +)(\S.*)$", capsys.readouterr().out, flags=re.MULTILINE))
    assert len(flags) == 27 and not [flag for flag, said in flags.items() if said.startswith("--")], "no help for it"
    for flag, default in ("split", "test"), ("seed", 0), ("precision", "float32"), ("generation_top_p", 1.0), ("samples", 1):
        assert f"[{default}]" in flags[flag] and len(flags[flag]) > 12, flag
