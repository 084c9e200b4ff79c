"""The linter finds the flaws it looks for, among them those of published rewards."""

import re

import pytest
from conftest import QUICK, ROOT

import train
from analysis.reward_linter import EXAMPLES, completions_of, doubtful_answers, lint
from config import GRPOConfig
from rewards import correctness
from sources import load_examples

SUMS = load_examples("arithmetic", limit=4)


@pytest.fixture
def linted(model, tokenizer):
    """Table and flags of functions."""
    def call(*functions, weights=(), examples=SUMS):
        names = [function.__name__ for function in functions]
        config = GRPOConfig(reward_functions=names, reward_weights=list(weights) or [1.0] * len(names))
        return lint(list(functions), config, examples, model, tokenizer)

    return call


@pytest.mark.parametrize("function,flag", [
    (lambda completions, **columns: [-float(len(c)) for c in completions], "not less than gold (-"),
    (lambda completions, answer, **columns: [float(a in c) for c, a in zip(completions, answer)],
     "not less than gold (1.00): spam (1.00)"),
    (lambda completions, **columns: [float("..." in c) for c in completions], "more than wrong (0.00): form (1.00)"),
    (lambda completions, **columns: [0.5 for c in completions], "every completion gets 0.5, so all advantages would be 0"),
    (lambda completions, **columns: [float("\n" not in c) for c in completions], "gold with a newline in it gets less (0.00)"),
    (correctness, ""),
])
def test_what_is_odd_is_flagged(linted, function, flag):
    _, flags = linted(function)
    assert any(found.startswith(flag) for found in flags) == bool(flag), flags


def test_flags_are_those_of_the_weighted_sum(linted):
    def brief(completions, **columns):
        return [1.0 if len(c) < 5 else 0.0 for c in completions]

    table, flags = linted(correctness, brief, weights=[1.0, 2.0])
    assert table[-3:] == [
        "| `correctness` | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 | 1.00 |", "| `brief` | 0.00 | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 |",
        "| `total` | 1.00 | 2.00 | 0.00 | 0.00 | 0.00 | 1.00 |"]
    assert flags == ["not less than gold (1.00): empty (2.00)", "more than wrong (0.00): empty (2.00)"]
    assert linted(correctness, brief, weights=[1.0, 0.5])[1] == ["more than wrong (0.00): empty (0.50)"]


@pytest.mark.parametrize("example,wrong", [
    ({}, "y = 2"), ({"wrong": "x = 3"}, "x = 3"), ({"wrong": ""}, "y = 2"),
    ({"answer": "Paris", "completion": ""}, "<answer>not Paris</answer>"),
    ({"answer": "-7", "completion": ""}, "<answer>-21</answer>"),
    ({"answer": ["we", "us"], "completion": ""}, "<answer>not we</answer>"), ({"answer": {"x": 1}}, "y = 2"),
    ({"answer": "$\\boxed{\\frac{3}{2}}$", "completion": "so $\\boxed{\\frac{3}{2}}$"}, "so $\\boxed{\\frac{13}{2}}$"),
    ({"answer": "10", "completion": "<reasoning>5 and 5 are 10</reasoning><answer>10</answer>"},
     "<reasoning>5 and 5 are 10</reasoning><answer>27</answer>"),
])
def test_what_counts_as_wrong_comes_from_the_column_the_answer_or_another_example(example, wrong):
    texts = completions_of({"prompt": "p", "completion": "x = 1"} | example, {"prompt": "q", "completion": "y = 2"})
    assert texts["wrong"].endswith(wrong) and texts["spam"] == f"{texts['wrong']}\n{texts['gold']}\n{texts['wrong']}"


def test_of_a_conversation_the_last_turn_is_changed_and_without_an_answer_there_is_no_gold(linted):
    (game,) = load_examples("guess_letter", limit=1)
    texts = completions_of(game)
    assert texts["gold"] == game["completion"][-1]["content"] and texts["wrong"] == f"<answer>not {game['answer']}</answer>"
    messages = [{"prompt": [{"role": "user", "content": "1+1=?"}], "answer": "2"}, {"prompt": "2+2=?"}]
    assert linted(correctness, examples=messages)[0][2] == "| `correctness` | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 | 1.00 |"
    with pytest.raises(ValueError, match=r"^--reward_functions: they score no completion; does the data have their columns"):
        linted(correctness, examples=messages[1:])


def test_check_prints_the_table_in_the_docs(capsys, monkeypatch):
    page = (ROOT / "docs/rewards.md").read_text().partition("## Rewards of right")[2].partition("\n## ")[0]
    command = re.search(r"^ {4}python train.py (.*)$", page.replace("\\\n        ", ""), re.M)[1]
    monkeypatch.chdir(ROOT)
    train.main(command.split())
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0].endswith("| newline | model |"), "the last column is of a model, and not in the page"
    assert len(table) > 5 and "\n".join(re.sub(r"[^|]*\|$", "", line) for line in table) in page


@pytest.mark.parametrize("answer,prompt,words", [
    ("Add them.\n72", "p", "have several lines, such as 'Add them.\\n72'"),
    ("[1, 2]", "p", "are the text of a list, such as '[1, 2]'"), ("['a'", "p", ""), ("[0, 1)", "p", ""), ("72\n", "p", ""),
    ("2", "2*2?\nA. 2\nB. 3\nC. 4", "are numbers while the prompt offers letters, such as '2'"),
    ("2.0", "2*2? A) 2 B) 3", "are numbers"), ("2", "2*2? (A) 2 (B) 3", "are numbers"),
    ("2", [{"role": "user", "content": "2*2?\nA. 2\nB. 3"}], "are numbers"), ("C", "2*2?\nA. 2\nB. 3\nC. 4", ""),
    ("2", "A has 2, B has 3.", ""), ("2", "Is it USA. or B. 2?", ""), ("2", "Is it A. Smith or AB. 2?", ""),
    (["1", "2"], "p", ""), (None, "p", ""),
])
def test_gold_answers_that_may_be_misread_are_counted(answer, prompt, words):
    found = doubtful_answers([{"prompt": "3?", "answer": "3"}, {"prompt": prompt, "answer": answer}])
    assert len(found) == bool(words) and all(line.startswith("1 of 2 answers " + words) for line in found)


def check(capsys, folder, *flags):
    train.main([*QUICK, "--use_grpo", "--check", "--output_dir", str(folder / "run"), *flags])
    assert not (folder / "run").exists()
    return capsys.readouterr().out


def test_check_scores_as_many_examples_as_it_says_and_none_of_conversations(capsys, tmp_path):
    (tmp_path / "own.py").write_text(
        "def count(completions, **columns):\n    print('called with', len(completions))\n    return [0.0] * len(completions)\n"
        "def fussy(completions, **columns):\n    raise KeyError('level')\n")
    printed = check(capsys, tmp_path, "--reward_functions", f"{tmp_path}/own.py:count")
    assert printed.count("called with") == 4 and f"called with {6 * EXAMPLES}\n" in printed
    (tmp_path / "data.jsonl").write_text('{"prompt": "2*2?\\nA. 3\\nB. 4", "answer": "4"}\n' * 20)
    assert "- 20 of 20 answers are numbers while" in check(capsys, tmp_path, "--dataset", f"{tmp_path}/data.jsonl",
        "--eval_limit", "0", "--cold_start_steps", "0")
    assert "| reward |" not in check(capsys, tmp_path,
        *"--environment calculator --max_turns 2 --reward_functions environment".split())
    with pytest.raises(SystemExit) as stop:
        check(capsys, tmp_path, "--reward_functions", f"{tmp_path}/own.py:fussy")
    assert stop.value.code == 1 and "reward function fussy raised KeyError: 'level'" in capsys.readouterr().err
