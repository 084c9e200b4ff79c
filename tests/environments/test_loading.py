"""Choosing an environment by name or file, and the columns that it needs."""

import re
from pathlib import Path

import pytest
from conftest import QUICK

import train
from environments.loading import refuse_missing_columns, responders

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_environment_gets_the_columns_it_asks_for():
    examples = [{"prompt": "p", "completion": "c", "topic": "t", "answer": "3"}, {"prompt": "q", "answer": "4"}]
    (first, second) = responders(lambda conversation, topic: (conversation, topic), examples)
    assert first("x") == ("x", "t") and second("x") == ("x", None)
    (first, _) = responders(lambda conversation, **columns: columns, examples)
    assert first([]) == {"topic": "t", "answer": "3"}, "never the demonstration"
    (first, _) = responders(lambda conversation, level, topic=1: (level, topic), examples)
    assert first([]) == (None, "t"), "other examples have the column"
    with pytest.raises(ValueError, match="--environment=mine: needs the column level"):
        refuse_missing_columns("mine", lambda conversation, level, topic=1: None, examples)
    refuse_missing_columns("mine", lambda conversation, topic: None, examples)


@pytest.mark.parametrize("flags,message", [
    ("--max_turns 3", "--max_turns=3: no environment continues"),
    ("--environment calculator", "--environment=calculator: with --max_turns=1 its messages are never used"),
    ("--reward_functions environment", "--reward_functions=environment: the reward function environment needs points"),
    ("--environment calculator --max_turns 2 --reward_functions environment --use_value_head --reward_combination gdpo",
     "--reward_combination=gdpo: --use_value_head takes the points of each turn"),
    ("--environment calculater --max_turns 2", "--environment calculater: unknown.*calculator"),
    ("--environment {dir}/mine.py:bare --max_turns 2", "must take the conversation"),
    ("--environment {dir}/mine.py:needy --max_turns 2", "--environment=.*needs the column level"),
    ("--environment {dir}/mine.py:broken --max_turns 2 --generation_max_length 300 --generation_top_k 0 --generation_top_p 1",
     "raised ZeroDivisionError"),
])
def test_mistakes_are_one_line_before_the_first_step(tmp_path, capsys, flags, message):
    (tmp_path / "mine.py").write_text(
        "def bare():\n    pass\ndef needy(conversation, level):\n    pass\ndef broken(conversation):\n    return 1 / 0\n"
    )
    with pytest.raises(SystemExit) as stop:
        train.main([*QUICK, "--use_grpo", "--output_dir", str(tmp_path / "run"), *flags.format(dir=tmp_path).split()])
    error = capsys.readouterr().err
    assert stop.value.code == (1 if "raised" in message else 2) and len(error.strip().splitlines()) == 1
    assert re.search(message, error), error
