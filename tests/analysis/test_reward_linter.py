"""The linter finds the flaws it looks for, and docs/rewards.md has its table of points."""

import json
import os
import time
from pathlib import Path

import pytest

from analysis import lint_command, reward_linter
from reward_functions.loading import BUILT_IN, load_reward_function
from rewards import correctness
from sources import load_examples
from test_rewards import needs_math_verify

ROOT = Path(__file__).parents[2]
EXAMPLES = load_examples("arithmetic", limit=4)


def flags_for(function, examples=EXAMPLES):
    return reward_linter.lint([function], [1.0], examples)[1]


def test_correctness_has_no_flags():
    points, _, _ = reward_linter.score_kinds(correctness, EXAMPLES)
    assert points.pop("gold") == 1 and points.pop("newline") == 1
    assert set(points) == {*reward_linter.KINDS, "untagged", "reversed"} - {"gold"} and set(points.values()) == {0}
    assert flags_for(correctness) == []


@pytest.mark.parametrize(
    "function,flag",
    [
        (lambda completions, **columns: [-float(len(c)) for c in completions], "more to empty (0.00), "),
        (lambda completions, **columns: [float("certain" in c) for c in completions], "more to confident (1.00) than to gold"),
        (lambda completions, answer, **columns: [float(a in c) for c, a in zip(completions, answer)], "spam (1.00) than to"),
        (lambda completions, **columns: [float("..." in c) for c in completions], "form (1.00) than to wrong"),
        (lambda completions, answer, **columns: [float(f">{a}<" in c) for c, a in zip(completions, answer)], "as much to spam"),
        (lambda completions, prompts, **columns: [float(p in c) for c, p in zip(completions, prompts)], "echo (1.00) than to gold"),
        (lambda completions, **columns: [float("<answer>" in c and "\n" not in c) for c in completions], "more to gold (1.00) than to newline (0.00)"),
        (lambda completions, **columns: [0.5 for c in completions], "gives 0.5 to every completion"),
        (lambda completions, **columns: [None for c in completions], "scores none of the examples"),
        (lambda completions, **columns: [1 / len(c) for c in completions], "failed: ZeroDivisionError"),
        (lambda completions, **columns: [time.sleep(0.12) or float("7" in c) for c in completions], "s a completion"),
    ],
)
def test_what_is_odd_is_flagged(function, flag):
    assert any(flag in found for found in flags_for(function, EXAMPLES[:1])), flags_for(function, EXAMPLES[:1])


def test_a_total_that_rewards_something_else_is_flagged_although_its_parts_are_fine():
    def clear(completions, **columns):
        return [float("certain" in c) / 2 + 0.5 * bool(c) for c in completions]

    table, flags = reward_linter.lint([correctness, clear], [0.1, 1.0], EXAMPLES)
    assert len(table) == 5 and any(flag.startswith("the total gives more to confident (") for flag in flags)


@pytest.mark.parametrize("example,wrong", [
    ({}, "y = 2"), ({"wrong": "x = 3"}, "x = 3"), *(({"wrong": column}, "y = 2") for column in (27, True, ["x = 3"], "")),
    ({"answer": "Paris", "completion": ""}, "<answer>not Paris</answer>"), ({"answer": "-7", "completion": ""}, "<answer>-21</answer>"),
    ({"answer": "we", "completion": ""}, "<answer>not we</answer>"),
    ({"answer": "$\\boxed{\\frac{3}{2}}$", "completion": "so $\\boxed{\\frac{3}{2}}$"}, "so $\\boxed{\\frac{13}{2}}$"),
    ({"answer": "10", "completion": "<reasoning>5 and 5 are 10</reasoning><answer>10</answer>"}, "<reasoning>5 and 5 are 10</reasoning><answer>27</answer>"),
])
def test_what_counts_as_wrong_comes_from_the_column_the_answer_or_another_example(example, wrong):
    texts = reward_linter.completions_of({"prompt": "p", "completion": "x = 1"} | example, {"prompt": "q", "completion": "y = 2"})
    assert texts["wrong"].endswith(wrong)
    assert "<answer>27</answer><answer>10</answer><answer>271</answer>" in texts["spam"] or "10" not in example.values()


def test_functions_of_tokens_see_one_for_each_word():
    rollout = reward_linter.texts_as_rollout(["a b a", "", [{"role": "assistant", "content": "b c"}]])
    first, empty, last = (ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask))
    assert len(first) == 4 and first[0] == first[2] != first[1] == last[0] != last[1]
    assert empty == [first[3]] == [last[2]] and len(last) == 3


def exit_code(argv):
    with pytest.raises(SystemExit) as stop:
        lint_command.run_command_line(argv)
    return stop.value.code


def test_the_exit_code_tells_flags_from_mistakes(capsys, tmp_path):
    assert exit_code(["--lint", "--reward_functions", "correctness", "--limit", "2"]) == 0
    assert exit_code(["--lint", "--reward_functions", "check_answer", "--limit", "2"]) == 1
    assert "| `check_answer` | 3.00 | 0.00 | -1.00 |" in capsys.readouterr().out
    assert exit_code(["--lint", "--reward_functions", "no_such"]) == 2
    assert exit_code(["--lint", "--dataset", str(tmp_path / "none.jsonl")]) == 2
    assert exit_code(["--lint", "--reward_functions", "correctness", "--reward_weights", "1", "2"]) == 2
    assert exit_code(["--lint", "--datset", "arithmetic"]) == 2
    printed = capsys.readouterr()
    assert "error: --reward_functions no_such" in printed.err and printed.out == ""
    assert "--datset: unknown flag; did you mean --dataset?" in printed.err and len(printed.err.splitlines()) == 4


def test_data_is_read_as_training_reads_it(capsys, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"q": "1+1=?", "a": "2", "c": "<answer>2</answer>"}\n')
    command = ["--lint", "--dataset", str(tmp_path / "own.jsonl"), "--reward_functions", "correctness"]
    assert exit_code(command) == 2 and "--prompt_column" in capsys.readouterr().err
    assert lint_command.main([*command, "--prompt_column", "q", "--answer_column", "a", "--completion_column", "c"]) == 0
    assert "| `correctness` | 1.00 |" in capsys.readouterr().out


def test_of_a_conversation_the_last_turn_is_changed():
    (game,) = load_examples("guess_letter", limit=1)
    texts = reward_linter.completions_of(game)
    assert texts["gold"] == game["completion"][-1]["content"] == f"<answer>{game['answer']}</answer>"
    assert texts["wrong"] == f"<answer>not {game['answer']}</answer>"
    conversations = [[*game["completion"][:-1], {"role": "assistant", "content": text}] for text in texts.values()]
    rollout = reward_linter.texts_as_rollout(conversations)
    assert rollout.completions == conversations and rollout.completion_mask.sum(dim=1).min() == 1
    assert reward_linter.lint([correctness], [1.0], load_examples("guess_letter", limit=4))[1] == []


@pytest.mark.parametrize("answer,gold", [(["132", "one hundred and thirty-two"], True), ([7], True), ([], False), ({"x": 1}, False)])
def test_of_a_list_of_answers_the_first_is_the_gold_one(answer, gold):
    texts = reward_linter.completions_of({"prompt": "p", "answer": answer})
    assert ("gold" in texts) == gold
    if gold:
        assert correctness([texts["gold"], texts["wrong"]], answer=[answer] * 2) == [1.0, 0.0]


def test_countdown_is_linted_on_its_own_data():
    table, flags = reward_linter.lint([load_reward_function("countdown")], [1.0], load_examples("countdown", limit=8))
    assert flags == [] and table[-1] == "| `countdown` | 1.00 |" + " 0.00 |" * 8, "docs/rewards.md says: 1 to gold, 0 to the others"


# ---- completions of a run -----------------------------------------------------------------------------------------


def make_run(folder, form="<reasoning>{a} and {b} more</reasoning><answer>{answer}</answer>", answer=str, **settings):
    """Six groups of a run, in each two right completions and one that is too large by one; the first group is tied."""
    sums = [(20, 7), (31, 5), (608, 7), (44, 4), (1200, 34), (63, 6)]
    data = [{"prompt": f"{a}+{b}=?", "answer": answer(a + b)} for a, b in sums]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    records = [
        {"step": 1 + p // 2, "phase": "grpo", "prompt": data[p]["prompt"], "group": p % 2, "completions_of_step": 6,
         "completion": form.format(a=a, b=b, answer=answer(a + b + more)), "reward": float(more == 0 or p == 0)}
        for p, (a, b) in enumerate(sums) for more in (1, 0, 0)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"dataset": str(folder / "data.jsonl"), "reward_functions": ["correctness"]} | settings
    (folder / "config.json").write_text(json.dumps({"section": settings}))
    return str(folder / "rollouts.jsonl")


def lint_run(capsys, folder, source=None, *flags, **run):
    """Return the flags for a function `reward` of some source, or for the functions of the run, and what is printed."""
    if source:
        (folder / "own.py").write_text(source)
        flags = ["--reward_functions", f"{folder}/own.py:reward", *flags]
    lint_command.main(["--lint", "--rollouts", make_run(folder, **run), *flags])
    printed = capsys.readouterr().out
    return [line[2:] for line in printed.splitlines() if line.startswith("- ")], printed


BUGS = {                        # of published rewards: source, the run, the flag
    "huggingface/open-r1#86, #293: a gold answer that is not LaTeX cannot be parsed, and all get full points": (
        """from rewards import extract_answer
def reward(completions, answer, **columns):
    return [1.0 if "$" not in a else float(a == extract_answer(c)) for c, a in zip(completions, answer)]
""", dict(answer=lambda n: f"x = {n} or 5"), "reward gives 1 to every completion"),
    "unslothai/unsloth#1761, huggingface/open-r1#237: the form may have no newlines": (
        """import re
def reward(completions, **columns):
    return [float(bool(re.match("<reasoning>.*?</reasoning>.*?<answer>.*?</answer>", c))) for c in completions]
""", {}, "reward gives more to gold (1.00) than to newline (0.00)"),
    "the answer counts anywhere": (
        """def reward(completions, answer, **columns):
    return [float(a in c) for c, a in zip(completions, answer)]
""", {}, "spam (1.00) than to wrong (0.00)"),
    "the answer counts in any box": (
        r"""import re
def reward(completions, answer, **columns):
    return [float(a in re.findall(r"boxed{\s*(.*?)\s*}", c)) for c, a in zip(completions, answer)]
""", dict(form="{a} and {b} more: \\boxed{{{answer}}}."), "spam (1.00) than to wrong (0.00)"),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_of_published_rewards_are_named(capsys, tmp_path, name):
    source, run, expected = BUGS[name]
    flags, _ = lint_run(capsys, tmp_path, source, **run)
    assert any(expected in flag for flag in flags), flags


@pytest.mark.parametrize("settings", [{}, {"reward_functions": ["environment", "correctness"], "environment": "calculator", "max_turns": 2}])
def test_correct_rewards_have_no_flags(capsys, tmp_path, settings):
    flags, printed = lint_run(capsys, tmp_path, **settings)
    assert flags == [] and "| `correctness` | 1.00 | 0.00 |" in printed
    assert ("environment is left out" in printed) == ("environment" in settings)


def test_gold_is_the_best_completion_of_the_newest_group_that_is_not_tied(tmp_path):
    path, data = Path(make_run(tmp_path)), load_examples(str(tmp_path / "data.jsonl"))
    best = reward_linter.examples_of_run(path, data)
    assert [example["prompt"] for example in best] == [f"{a}=?" for a in ("63+6", "1200+34", "44+4", "608+7", "31+5")]
    assert all(f"<answer>{example['answer']}</answer>" in example["completion"] for example in best)
    again = [json.loads(line) | {"step": 9, "completions_of_step": 3} for line in path.read_text().splitlines()[3:6]]
    again[0] |= {"completion": "<answer>of step 9</answer>", "reward": 2.0}
    path.write_text(path.read_text() + "".join(json.dumps(record) + "\n" for record in again))
    newest, *_ = others = reward_linter.examples_of_run(path, data)
    assert newest["prompt"] == "31+5=?" and newest["completion"] == "<answer>of step 9</answer>" and len(others) == 5


def test_mistakes_with_a_run_are_one_line(capsys, tmp_path, monkeypatch):
    def mistake(*argv):
        assert exit_code(["--lint", "--rollouts", *argv]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    (tmp_path / "own.py").write_text("def reward(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    rollouts = make_run(tmp_path, reward_functions=[f"{tmp_path}/own.py:reward"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        assert "give again --reward_functions" in mistake(rollouts), "the folder is another user's"
    assert "is in the data" in mistake(rollouts, "--reward_functions", "correctness", "--dataset", "countdown")
    (tmp_path / "config.json").unlink()
    assert "config.json: not a readable JSON file" in mistake(rollouts)


FLAGS = [                       # of the built-in functions on docs/reward_examples.jsonl, each alone
    "reasoning_coherence gives more to form (1.00) than to wrong (0.91)",
    "explanation_quality gives more to form (1.00), spam (1.00) than to wrong (0.89)",
    "xml_tags gives more to form (1.00) than to wrong (0.50)",
    "diversity gives more to empty (1.00), wrong (0.90), confident (0.95), form (1.00), spam (0.82), "
    "repeated (0.69), truncated (0.79), echo (1.00) than to gold (0.66)",
    "diversity gives more to empty (1.00), form (1.00), echo (1.00) than to wrong (0.90)",
    "safety gives more to empty (1.00), form (1.00), echo (1.00) than to wrong (0.00)",
    "match_format_exactly gives more to form (3.00), spam (3.00) than to wrong (2.67)",
    "match_format_exactly gives more to reversed (3.00) than to untagged (0.00)",
    "match_format_approximately gives more to form (2.00) than to wrong (1.78)",
    "match_format_approximately gives more to reversed (2.00) than to untagged (0.00)",
    "check_answer gives more to empty (0.00), form (-0.50), echo (0.00) than to wrong (-0.83)",
    "check_answer gives more to reversed (3.00) than to untagged (0.00)",
    "check_numbers gives more to reversed (1.00) than to untagged (0.00)",
]


@needs_math_verify
def test_the_table_in_the_docs_is_what_the_command_there_prints():
    page = (ROOT / "docs/rewards.md").read_text().replace("\n  ", " ")
    command = "python rewards.py --lint --dataset docs/reward_examples.jsonl --limit 99 --reward_functions"
    assert command in page.replace(" \\\n        ", " ")
    examples = load_examples(str(ROOT / "docs/reward_examples.jsonl"))
    others = "countdown", "environment", "none", "json_format"       # data of its own, points that are not from texts, needs jsonschema
    functions = [load_reward_function(name) for name in BUILT_IN if name not in others]
    table, flags = reward_linter.lint(functions, [1.0] * len(functions), examples)
    rows = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == table[0].count("|")]
    assert len(rows) > 4 and table[0] in page and set(rows) <= set(table)
    alone = [flag for flag in flags if not flag.startswith("the total") and "s a completion" not in flag]
    assert alone == FLAGS
