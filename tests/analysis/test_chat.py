"""Answers to one prompt, in conversations and to files of prompts."""

import copy
import json

import pytest
import torch

import infer
import sample
from analysis import chat
from analysis.chat import ChatModel
from config import GRPOConfig, ModelConfig
from data import encode_prompt
from environments.messages import encode_turns, encode_reply


def scripted(monkeypatch, tokenizer, *turns):
    """Sample those texts instead of the model's, token by token. Return the prompts and seeds of the calls.

    turns  of each completion; a number n stands for n tokens of an environment
    """
    calls, stop, tokens = [], [tokenizer.eos_token_id], []
    for turn in turns:
        tokens += [0] * turn if isinstance(turn, int) else tokenizer.encode(turn, add_special_tokens=False) + stop
    real = chat.sample_completions

    def sample_scripted(engine, environment, examples, *args, **kwargs):
        calls.append((copy.deepcopy([example["prompt"] for example in examples]), kwargs["seed"]))
        return real(engine, environment, examples, *args, **kwargs)

    monkeypatch.setattr(sample, "sample_inverse_cdf", lambda logits, _: (torch.tensor([tokens.pop(0)]), torch.zeros(1)))
    monkeypatch.setattr(chat, "sample_completions", sample_scripted)
    monkeypatch.setattr(chat, "refuse_wrong_sampler", lambda engine: None)
    monkeypatch.setattr(chat, "choose_engine", lambda plain, *_: (plain, None))  # so that tokens come in one order
    return calls


def test_a_question_is_answered(folder, tokenizer, capsys, monkeypatch):
    scripted(monkeypatch, tokenizer, "<reasoning>1 and 1</reasoning><answer>2</answer>")
    infer.main(["--model_path", folder, "--question", "1+1=?"])
    assert capsys.readouterr().out == "<reasoning>1 and 1</reasoning><answer>2</answer>\n"


def test_a_single_answer_does_not_wait_for_the_check_of_packing_and_is_marked_if_truncated(folder, capsys, monkeypatch):
    monkeypatch.setattr(chat, "choose_engine", lambda *_: pytest.fail("seconds"))
    infer.main(["--model_path", folder, "--question", "1+1=?", "--generation_max_length", "5"])
    assert "(truncated at --generation_max_length=5)" in capsys.readouterr().out


def chat_of(folder, monkeypatch, typed, flags=(), template=None, positions=4096):
    """Hold a chat with those inputs; return the prompts of its answers."""
    load = chat.load_any_policy

    def changed(source, **options):
        model, tokenizer = load(source, **options)
        tokenizer.chat_template, model.config.max_position_embeddings = template, positions
        return model, tokenizer

    monkeypatch.setattr(chat, "load_any_policy", changed)
    lines = iter([*typed, ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    infer.main(["--model_path", folder, "--chat", *flags])


def test_a_chat_keeps_its_history_and_ends_at_an_empty_line(folder, tokenizer, capsys, monkeypatch):
    calls = scripted(monkeypatch, tokenizer, "two", "four")
    chat_of(folder, monkeypatch, ["1+1?", "2+2?"], ["--instruction", "Be brief."])
    printed = capsys.readouterr()
    assert printed.out == "two\nfour\n" and printed.err == "An empty line ends the conversation.\n"
    first = "Be brief.\n1+1?"                             # as --question would send it, and as training did
    (_, seed), ((then,), next_seed) = calls
    assert calls[0][0] == [first] and (seed, next_seed) == (0, 1), "another seed each time"
    assert tokenizer.decode(then) == f"<bos>{first}two<eos>\n2+2?\n"
    demonstration = [{"role": "assistant", "content": "two"}, {"role": "user", "content": "2+2?"}]
    trained = encode_turns(tokenizer, first, demonstration, [tokenizer.eos_token_id])[0]
    assert then == encode_prompt(tokenizer, first) + trained


def test_a_model_that_only_answers_is_stored_in_the_precision_it_computes_in(folder):
    dtypes = []
    for precision in "auto", "bfloat16":
        model = ChatModel.load(ModelConfig(folder, precision=precision), GRPOConfig(), 0).engine.model
        dtypes.append(model.model.layers[0].mlp.up_proj.weight.dtype)
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert dtypes == [torch.float32, torch.bfloat16]                     # auto: on a CPU


def test_a_message_that_is_too_long_is_left_out(folder, tokenizer, capsys, monkeypatch):
    calls = scripted(monkeypatch, tokenizer, "two", "four")
    chat_of(folder, monkeypatch, ["1+1?", "3" * 40, "2+2?"], ["--instruction", "Add.", "--generation_max_length", "8"], positions=44)
    out = capsys.readouterr().out
    assert "exceeds the model's 44 positions" in out and out.count("(this message is left out)") == 1 and out.endswith("four\n")
    assert [tokenizer.decode(ids) if isinstance(ids[0], int) else ids for (ids,), _ in calls] == [
        "Add.\n1+1?", "<bos>Add.\n1+1?two<eos>\n2+2?\n"]


def test_a_chat_goes_on_where_the_template_has_no_tools_or_rejects_a_message(folder, tokenizer, capsys, monkeypatch):
    template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('roles') }}{% endif %}"
        "{% if 'bad' in m.content %}{{ raise_exception('bad words') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
    tokenizer.chat_template = template
    try:
        reply = encode_reply(tokenizer, "2+2?", {"role": "tool", "content": "4"}, [tokenizer.eos_token_id])
    finally:
        tokenizer.chat_template = None
    calls = scripted(monkeypatch, tokenizer, "calculate(2+2)", len(reply), "4", "six")
    flags = ["--environment", "calculator", "--max_turns", "3"]
    chat_of(folder, monkeypatch, ["2+2?", "a bad word", "3+3?"], flags, template)
    out = capsys.readouterr().out
    assert "bad words" in out and out.endswith("assistant: six\n")
    roles = [message["role"] for message in calls[-1][0][0]]
    assert roles == ["user", "assistant", "user", "assistant", "user"], "the tool's is the user's"


@pytest.mark.parametrize("pressed", [EOFError, KeyboardInterrupt])
def test_a_chat_ends_quietly_at_ctrl_d_and_ctrl_c(folder, capsys, monkeypatch, pressed):
    def press(prompt):
        raise pressed

    monkeypatch.setattr("builtins.input", press)
    infer.main(["--model_path", folder, "--chat"])
    assert capsys.readouterr().out == "\n"


def test_a_chat_with_tools_shows_their_results(folder, tokenizer, capsys, monkeypatch):
    reply = encode_reply(tokenizer, "2+2?", {"role": "tool", "content": "4"}, [tokenizer.eos_token_id])
    scripted(monkeypatch, tokenizer, "calculate(2+2)", len(reply), "it is 4")
    chat_of(folder, monkeypatch, ["2+2?"], ["--environment", "calculator", "--max_turns", "3"])
    assert capsys.readouterr().out == "assistant: calculate(2+2)\ntool: 4\nassistant: it is 4\n"


def test_answers_to_a_file_are_those_of_one_question_and_keep_its_columns(folder, tmp_path, capsys):
    rows = [{"prompt": prompt, "answer": "2", "level": n} for n, prompt in enumerate(("1+1=?", "1+1=?", "4-2=?"))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--questions", str(tmp_path / "in.jsonl"), "--answers", str(tmp_path / "out.jsonl")]
    infer.main(["--model_path", folder, *files, "--generation_max_length", "6", "--samples", "2", "--generation_batch_size", "4"])
    assert capsys.readouterr().out == f"{tmp_path}/out.jsonl: 6 answers to 3 prompts\n"
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in rows[0]} for line in written] == [row for row in rows for _ in range(2)]
    config = GRPOConfig(generation_max_length=6, generation_temperature=1.0, generation_top_k=0, generation_top_p=1.0)
    alone = chat.ChatModel.load(ModelConfig(model_path=folder), config, 0).sample([rows[2]], 2)
    assert [line["completion"] for line in written[4:]] == alone.completions
    assert [line["finished"] for line in written[4:]] == alone.finished.tolist()
    assert len({line["completion"] for line in written[:4]}) == 4, "of equal prompts too"


@pytest.mark.parametrize("environment", [[], ["--environment", "calculator", "--max_turns", "2"]])
def test_control_characters_are_shown_as_escapes_and_kept_in_files(folder, tokenizer, tmp_path, capsys, monkeypatch, environment):
    answer, shown = "\x1b]0;owned\x07\x1b [2J\r\x9b\x7f\u202e \u2066é", r"\x1b]0;owned\x07\x1b [2J\r\x9b\x7f\u202e \u2066é"
    scripted(monkeypatch, tokenizer, answer, answer, answer)
    flags = ["--model_path", folder, *environment]
    infer.main([*flags, "--question", "1+1=?"])
    assert capsys.readouterr().out == f"{'assistant: ' if environment else ''}{shown}\n"
    (tmp_path / "q.jsonl").write_text('{"prompt": "1+1=?"}\n')
    infer.main([*flags, "--questions", str(tmp_path / "q.jsonl"), "--answers", str(tmp_path / "a.jsonl")])
    completion = json.loads((tmp_path / "a.jsonl").read_text())["completion"]
    assert (completion[0]["content"] if environment else completion) == answer
