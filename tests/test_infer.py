"""The command line of infer.py: its help, and mistakes in one line."""

import json

import pytest

import infer


@pytest.mark.parametrize("argv,message", [
    ([], "one of the arguments --question .* is required"), (["--question", "q", "--evaluate", "arithmetic"], "not allowed with argument --question"),
    (["--question", "q", "--answers", "a.jsonl"], "--answers: needs --questions"), (["--question", "q", "--samples", "2"], "--samples: needs --evaluate or --questions"),
    (["--questions", "arithmetic", "--answers", "no/such/folder.jsonl"], "name a file, in a folder that exists"),
    (["--question", "q", "--generation_max_length", "9999"], "exceeds the model's 4096 positions; at most 4094, or"),
    (["--chat", "--instuction", "q"], "--instuction: unknown flag; did you mean --instruction?"),
    (["--report", ""], "--report: is empty"), (["--question", ""], "--question: is empty"),
    (["--questions", "arithmetic", "--answers", "/proc/answers.jsonl", "--model_path", "no/such"], "/proc/answers.jsonl"),
    (["--evaluate", "arithmetic", "--split", "foo"], "arithmetic: there is no split foo; it has train and test"),
])
def test_a_mistake_is_one_line(argv, message):
    with pytest.raises((ValueError, OSError), match=message):
        infer.main(argv)


def test_the_file_of_the_problems_is_not_overwritten_and_a_folder_is_no_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "1+1=?", "answer": "2"}\n')
    (tmp_path / "link.jsonl").symlink_to(file)
    for path, message in (file, "is the file of the problems"), ("./q.jsonl", "is the file"), ("link.jsonl", "is the file"), (
            tmp_path, "name a file, in a folder"):
        for flags in ["--questions", str(file), "--answers", str(path)], ["--evaluate", str(file), "--json", str(path)]:
            with pytest.raises(ValueError, match=rf"^{flags[2]}=.*: {message}"):
                infer.main(["--model_path", folder, *flags])
    with pytest.raises(ValueError, match=rf"^--merge_into={file}: name a folder, not a file"):
        infer.main(["--model_path", folder, "--merge_into", str(file)])
    assert file.read_text() == '{"prompt": "1+1=?", "answer": "2"}\n'


def test_an_evaluation_beyond_the_positions_is_one_line(folder, tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "1" * 4090, "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match="exceeds the model's 4096 positions; at most 5, or shorten the prompts"):
        infer.main(["--model_path", folder, "--evaluate", str(tmp_path / "q.jsonl"), "--generation_max_length", "6"])


def test_the_built_in_model_is_announced_as_untrained(folder, capsys):
    argv = ["--question", "1+1=?", "--generation_max_length", "2"]
    infer.main(argv)
    assert "no --model_path: this is the built-in model with random weights" in capsys.readouterr().err
    infer.main(["--model_path", folder, *argv])
    assert capsys.readouterr().err == ""


def test_answers_without_a_file_are_printed_one_line_of_ascii_each_and_are_those_of_the_file(folder, tmp_path, capsys):
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "1\x9b31m+1"}) + "\n" + json.dumps({"prompt": "é"}))
    flags = f"--model_path {folder} --questions {tmp_path}/questions.jsonl --samples 3 --generation_max_length 4".split()
    infer.main([*flags, "--answers", str(tmp_path / "answers.jsonl")])
    capsys.readouterr()
    infer.main(flags)
    printed = capsys.readouterr().out
    written = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert list(map(json.loads, printed.splitlines())) == list(map(json.loads, written)) and len(written) == 6
    assert printed.isascii() and "\x1b" not in printed
