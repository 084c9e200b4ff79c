"""The linter finds the flaws it looks for, and docs/rewards.md has its table of points."""

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
    assert points.pop("gold") == 1 and set(points) == {*reward_linter.KINDS, "untagged", "reversed"} - {"gold"} and set(points.values()) == {0}
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
        (lambda completions, **columns: [0.5 for c in completions], "gives 0.5 to every completion"),
        (lambda completions, **columns: [None for c in completions], "scores none of the examples"),
        (lambda completions, **columns: [1 / len(c) for c in completions], "failed on '': ZeroDivisionError"),
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


CHOICES = [
    {"prompt": "4-2?", "answer": "2", "choices": ["5", "4", "3", "2"]},
    {"prompt": "Which is a fruit?", "answer": "B", "choices": ["stone", "apple"], "completion": "I say <answer>B</answer>, a fruit."},
    *({"prompt": f"{n}+1=?", "answer": "AC"[n % 2], "choices": [f"{n}+1", "no number", str(n + 1), "0"]} for n in range(8)),
]


def test_a_function_that_credits_a_wrong_choice_or_denies_the_right_one_is_flagged():
    def letters_alone(completions, answer, choices, **columns):
        return correctness(completions, answer)

    def any_choice(completions, answer, choices, **columns):
        return [float(any(f">{choice}<" in text for choice in options)) for text, options in zip(completions, choices, strict=True)]

    examples = load_examples(CHOICES)
    assert flags_for(BUILT_IN["multiple_choice"], examples) == flags_for(BUILT_IN["multiple_choice"], examples[:1]) == []
    assert "any_choice gives more to other choice (0.50) than to wrong (0.00)" in flags_for(any_choice, examples[1:])
    assert flags_for(letters_alone, examples[1:]) == ["letters_alone gives more to gold (1.00) than to right choice (0.50)"]


def test_a_function_that_does_not_read_the_choices_is_not_compared_on_them():
    def short(completions, answer, **columns):
        return [right and 1 / (1 + len(text)) for right, text in zip(correctness(completions, answer), completions)]

    points, _, _ = reward_linter.score_kinds(short, load_examples(CHOICES))
    assert not {"other choice", "right choice"} & set(points) and flags_for(short, load_examples(CHOICES)) == []
    _, flags = reward_linter.lint([BUILT_IN["multiple_choice"], short], [1.0, 0.2], load_examples(CHOICES[1:]))
    assert flags == [], "and a total has only what all functions have"


def test_malformed_tags_are_gold_with_and_without_the_tags_in_reversed_order():
    texts = reward_linter.completions_of({"prompt": "p", "answer": "7", "completion": "so <answer>7</answer>."})
    assert texts["reversed"] == "so </answer><answer>7." and texts["untagged"] == "so 7."
    assert correctness([texts["reversed"], texts["untagged"]], answer=["7"] * 2) == [0.0, 0.0]


def test_the_texts_of_choices_are_gold_with_each_letter_and_text():
    choices = ["stone", "apple"]
    texts = reward_linter.completions_of(load_examples(CHOICES)[1], choices=choices)
    named = {kind: text for kind, text in texts.items() if "choice" in kind}
    assert named == {f"{kind} choice: {name}": f"I say <answer>{name}</answer>, a fruit."
                     for kind, names in (("other", ["A", "stone"]), ("right", ["B", "apple"])) for name in names}
    unnamed = reward_linter.completions_of({"prompt": "p", "answer": "C"}, choices=choices)
    assert not any("choice" in kind for kind in unnamed), "the answer is none of them"


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


def test_without_names_the_functions_are_those_that_score_something(capsys):
    lint_command.main(["--lint", "--limit", "2"])
    printed = capsys.readouterr().out
    assert "| `correctness` |" in printed and "environment" not in printed, "it needs an environment"
    assert "multiple_choice" not in printed and "passes_tests" not in printed and "failed" not in printed


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


FLAGS = [                       # of the built-in functions on docs/reward_examples.jsonl, each alone
    "reasoning_coherence gives more to form (1.00) than to wrong (0.91)",
    "explanation_quality gives more to form (1.00), spam (1.00) than to wrong (0.89)",
    "xml_tags gives more to form (1.00) than to wrong (0.50)",
    "diversity gives more to empty (1.00), wrong (0.91), confident (0.95), form (1.00), spam (0.83), "
    "repeated (0.74), truncated (0.81), echo (1.00) than to gold (0.72)",
    "diversity gives more to empty (1.00), form (1.00), echo (1.00) than to wrong (0.91)",
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
    others = "countdown", "environment", "none"           # the first has data of its own, points of the others are not from texts
    functions = [load_reward_function(name) for name in BUILT_IN if name not in others]
    table, flags = reward_linter.lint(functions, [1.0] * len(functions), examples)
    rows = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == table[0].count("|")]
    assert len(rows) > 4 and table[0] in page and set(rows) <= set(table)
    alone = [flag for flag in flags if not flag.startswith("the total") and "s a completion" not in flag]
    assert alone == FLAGS
