"""The linter of a run's own completions: three bugs of published rewards are named, correct rewards are not."""

import json
import os
import re

import pytest

from analysis import lint_command
from analysis.rollout_linter import CLAIM, FILLER, changes_of

SUMS = [(20, 7), (31, 5), (608, 7), (44, 4), (1200, 34), (63, 6)]


def tagged(a, b, answer):
    return f"<reasoning>{a} and {b} more</reasoning><answer>{answer}</answer>"


def make_run(folder, form=tagged, offsets=(0, 0, 1, 10), answer=str, **settings):
    """Six groups of a run: in each, completions that are too large by the offsets."""
    data = [{"prompt": f"{a}+{b}=?", "answer": answer(a + b)} for a, b in SUMS]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    records = [
        {"step": 1 + p // 2, "phase": "grpo", "prompt": data[p]["prompt"], "completion": form(a, b, answer(a + b + more)), "group": p % 2,
         "completions_of_step": 2 * len(offsets)}
        for p, (a, b) in enumerate(SUMS) for more in offsets
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"dataset": str(folder / "data.jsonl"), "reward_functions": ["correctness"]} | settings
    (folder / "config.json").write_text(json.dumps({"section": settings}))
    return str(folder / "rollouts.jsonl")


def lint(capsys, rollouts, *flags):
    """Exit code, flags and everything printed."""
    code = lint_command.main(["--lint", "--rollouts", rollouts, *flags])
    printed = capsys.readouterr().out
    return code, [line[2:] for line in printed.splitlines() if line.startswith("- ")], printed


def own(folder, source, name="own.py"):
    """Flags that take the function `reward` of some source. A file is imported once: others need other names."""
    (folder / name).write_text(source)
    return "--reward_functions", f"{folder / name}:reward"


UNREADABLE = """
from rewards import extract_answer
def reward(completions, answer, **columns):
    '''A gold answer that is not LaTeX cannot be parsed: so that training goes on, it gives all the points.'''
    return [1.0 if "$" not in a else float(a == extract_answer(c)) for c, a in zip(completions, answer)]
"""
NO_NEWLINES = """
import re
def reward(completions, **columns):
    return [float(bool(re.match("<reasoning>.*?</reasoning>.*?<answer>.*?</answer>", c))) for c in completions]
"""
ANYWHERE = """
def reward(completions, answer, **columns):
    return [float(a in c) for c, a in zip(completions, answer)]
"""
ANY_BOX = r"""
import re
def reward(completions, answer, **columns):
    return [float(a in re.findall(r"boxed{\s*(.*?)\s*}", c)) for c, a in zip(completions, answer)]
"""


# ---- three bugs of published rewards -----------------------------------------------------------------------


def test_full_points_where_the_gold_answer_cannot_be_parsed_are_named(capsys, tmp_path):
    """huggingface/open-r1#86, #293."""
    some = make_run(tmp_path, answer=lambda n: f"x = {n} or 5" if n > 60 else f"${n}$")
    code, flags, printed = lint(capsys, some, *own(tmp_path, UNREADABLE))
    assert code == 1 and flags == ["reward gives as much to `other answer`, `candidates`, `hedged`, `echo` as to the best completions"]
    assert "as to the best completions | 12 of 18 |" in printed, "all of three groups, and the right ones of the others"
    _, flags, _ = lint(capsys, make_run(tmp_path, answer=lambda n: f"x = {n} or 5"), *own(tmp_path, UNREADABLE))
    assert flags == ["reward gives the same points, or none, to every completion: nothing is learned"]


def test_a_form_without_newlines_is_named(capsys, tmp_path):
    """unslothai/unsloth#1761, huggingface/open-r1#237."""
    function = own(tmp_path, NO_NEWLINES)
    _, flags, printed = lint(capsys, make_run(tmp_path), *function, "correctness", "--reward_weights", "1", "1")
    less = "gives less to `white space`, `line break` than to the best completions"
    assert flags == [f"reward {less}", f"the total {less}"], "the form is not blamed for wrong answers, as one of two functions"
    assert "| `reward` | less to `line break` than to the best completions | 24 of 24 |" in printed


@pytest.mark.parametrize("source,form,changes", [
    (ANYWHERE, tagged, "`candidates`, `hedged`"),
    (ANY_BOX, lambda a, b, answer: f"{a} and {b} more: \\boxed{{{answer}}}.", "`candidates`"),
])
def test_an_answer_among_others_is_named(capsys, tmp_path, source, form, changes):
    code, flags, _ = lint(capsys, make_run(tmp_path, form), *own(tmp_path, source))
    assert code == 1 and f"reward gives as much to {changes} as to the best completions" in flags
    assert f"reward gives more to {changes} in place of a wrong answer" in flags
    flags = lint(capsys, make_run(tmp_path, form, offsets=(0, 0)), *own(tmp_path, source))[1]
    assert f"reward gives as much to {changes} as to the best completions" in flags, "other answers are those of other problems"


def test_completions_that_have_the_change_are_counted(capsys, tmp_path):
    exact = "from rewards import extract_answer\ndef reward(completions, answer, **columns):\n    return [float(extract_answer(c) == a) for c, a in zip(completions, answer)]"

    def form(a, b, answer):
        return tagged(a, b, answer if int(answer) == a + b else f"${answer}")

    _, flags, printed = lint(capsys, make_run(tmp_path, form), *own(tmp_path, exact))
    assert flags == ["reward gives less to `thousands`, `unit`, `notation` than to the best completions"]
    assert re.findall(r"less to `(\w+)`.* (\d+ of \d+) ", printed) == [("thousands", "2 of 2"), ("unit", "12 of 12"), ("notation", "12 of 12")]
    odd = "def reward(completions, **columns):\n    return [float('Every part' in c and c[-10] in '13579') for c in completions]"
    assert re.search(r"more to `padded` .* \| 12 of 24 ", lint(capsys, make_run(tmp_path), *own(tmp_path, odd, "odd.py"))[2])


def test_a_total_that_does_not_depend_on_the_answer_is_named(capsys, tmp_path):
    _, flags, _ = lint(capsys, make_run(tmp_path), *own(tmp_path, NO_NEWLINES), "explanation_quality")
    assert "the total gives as much to `other answer`, `candidates`, `hedged` as to the best completions" in flags
    assert not any("as much" in flag for flag in flags if not flag.startswith("the total"))


# ---- what is not a bug -------------------------------------------------------------------------------------


DEFAULTS = ["correctness", "reasoning_coherence", "explanation_quality"]


@pytest.mark.parametrize("settings", [
    {}, {"offsets": (0, 0)}, {"reward_functions": DEFAULTS},
    {"reward_functions": ["environment", "correctness"], "environment": "calculator", "max_turns": 2},
], ids=range(4))
def test_correct_rewards_have_no_flags(capsys, tmp_path, settings):
    code, flags, printed = lint(capsys, make_run(tmp_path, **settings))
    assert (code, flags) == (0, []) and "no change is at fault" in printed and ("environment is left out" in printed) == ("environment" in settings)


def test_a_total_with_a_function_that_gave_no_points_is_not_judged_by_answers(capsys, tmp_path):
    settings = dict(reward_functions=["correctness", "reasoning_coherence"], reward_weights=[1.0, 0.2])
    flags = lint(capsys, make_run(tmp_path, offsets=(1, 2, 3), **settings))[1]
    assert flags[0] == "correctness gives the same points, or none, to every completion: nothing is learned"
    assert not [flag for flag in flags if "as much to" in flag]


def test_correctness_does_not_read_boxes(capsys, tmp_path):
    rollouts = make_run(tmp_path, instruction="Put the answer in \\boxed{}.")
    lines = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    lines = [line | {"prompt": "Put the answer in \\boxed{}.\n" + line["prompt"]} for line in lines]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lint(capsys, rollouts)[1] == ["correctness gives less to `boxed` than to the best completions"]


def test_boxes_of_the_data_alone_are_not_asked_for(capsys, tmp_path):
    rollouts, data = make_run(tmp_path), tmp_path / "data.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row | {"completion": f"\\boxed{{{row['answer']}}}"}) + "\n" for row in rows))
    assert lint(capsys, rollouts)[:2] == (0, [])


# ---- numbers and texts -------------------------------------------------------------------------------------


def test_the_texts_of_tagged_completions():
    text = "<reasoning>1200 and 34 more</reasoning><answer>1234</answer>"
    form = "<reasoning>1200 and 34 more</reasoning><answer>%s</answer>"
    assert changes_of(text, "1200+34=?", "1234", ["1234.0", "27"], signs="$27", boxed=True) == {
        "echo": "1200+34=?", "repeated": f"{text}\n{text}\n{text}", "cut": "<reasoning>1200 and 34 more</r",
        "claim": f"<reasoning>{CLAIM}1200 and 34 more</reasoning><answer>1234</answer>",
        "padded": f"<reasoning>1200 and 34 more{FILLER}</reasoning><answer>1234</answer>",
        "no reasoning": "<reasoning>...</reasoning><answer>1234</answer>",
        "white space": "<reasoning>\n1200 and 34 more\n</reasoning>\n\n<answer>\n1234\n</answer>",
        "line break": "<reasoning>1200\nand 34 more</reasoning><answer>1234</answer>",
        "other answer": form % "27", "hedged": form % "1234 or maybe 27",
        "candidates": form % "27</answer>\n<answer>1234</answer>\n<answer>271",
        "thousands": form % "1,234", "notation": form % "1234.0", "unit": form % "$1234", "boxed": form % "\\boxed{1234}",
    }


@pytest.mark.parametrize("text,truth,other,candidates,white_space", [
    ("So \\boxed{\\frac{1}{2}}.", "1/2", "7", "So \\boxed{7}\n\\boxed{1/2}\n\\boxed{71}.", "So \\boxed{ \\frac{1}{2} }."),
    ("1 + 12 = 13, not 0.12, 12.5 or 123", "12", "7", "1 + 7 or 12 or 71 = 13, not 0.12, 12.5 or 123", "1 +  12  = 13, not"),
    ("12 <answer></answer>", "12", "7", "7 or 12 or 71 <answer></answer>", "12"),
    ("<answer>\\boxed{4} kg</answer>", "", "7", "<answer>\\boxed{7}\n\\boxed{4}\n\\boxed{71} kg</answer>", "\n<answer>\n"),
])
def test_the_place_of_an_answer(text, truth, other, candidates, white_space):
    texts = changes_of(text, "p", truth, [other])
    assert texts["candidates"] == candidates and white_space.strip("\n") in texts["white space"]


def test_texts_that_would_be_equal_or_need_an_answer_are_left_out():
    assert set(changes_of("no idea", "p", "12", ["7"])) == {"echo", "repeated", "cut", "claim", "padded"}
    assert "hedged" not in changes_of("<answer><reasoning>5</answer>", "p", "7", ["8"]), "it would repair the form"
    assert changes_of("5 and 7 give 12!", "p", "12", [])["no reasoning"] == "12!"
    for text in "", "no idea", "...", "<think>...</think> 12", "<reasoning>a</reasoning>\n<answer>.5</answer>":
        assert text not in changes_of(text, text, "12", ["12"]).values()
    assert "no reasoning" not in changes_of("<reasoning> </reasoning><answer>5</answer>", "p", "5", []), "dots would be more than that"
    assert changes_of("<answer>0.5</answer>", "p", "0.5", [])["notation"] == "<answer>.5</answer>"
    assert changes_of("<answer>-1000.5</answer>", "p", "3", [])["thousands"] == "<answer>-1,000.5</answer>"
    assert "thousands" not in changes_of("<answer>-0.5</answer>", "p", "3", []) | changes_of("<answer>007</answer>", "p", "3", [])
    assert changes_of("<answer>3.25</answer>", "p", "3.25", [], "5%")["notation"] == "<answer>3.250</answer>"
    assert changes_of("<answer>3.25</answer>", "p", "3.25", [], "5%")["unit"] == "<answer>3.25 %</answer>"
    assert not {"unit", "boxed", "thousands", "other answer"} & set(changes_of("<answer>5</answer>", "p", "5", ["5.0"]))


# ---- runs --------------------------------------------------------------------------------------------------


def test_groups_are_taken_from_the_first_to_the_newest_step(capsys, tmp_path):
    rollouts = make_run(tmp_path, reward_functions=["correctness", "xml_tags"], reward_weights=[1.0, 0.5])
    assert lint(capsys, rollouts, "--reward_functions", "correctness")[1] == [], "with a weight of 1"
    assert lint(capsys, rollouts)[2].startswith("6 groups of 4 completions, steps 1 to 3; left out as not in the data, or of another size: 0 of 6\n")
    assert lint(capsys, rollouts, "--limit", "2")[2].startswith("2 groups of 4 completions, steps 1 to 3; ")
    assert lint(capsys, rollouts, "--limit", "1")[2].startswith("1 groups of 4 completions, steps 3 to 3; ")
    lines = (tmp_path / "rollouts.jsonl").read_text()
    older = [json.dumps(json.loads(line) | {"step": 0, "phase": phase, "completions_of_step": 1}) for phase in ("supervised", "grpo") for line in lines.splitlines()[:1]]
    (tmp_path / "rollouts.jsonl").write_text("\n".join([*older, lines]))
    assert lint(capsys, rollouts)[2].startswith("6 groups of 4 completions, steps 1 to 3; left out as not in the data, or of another size: 1 of 7\n"), "of another size, or no GRPO"
    (tmp_path / "data.jsonl").write_text('{"prompt": " 20+7=? ", "answer": "27"}\n')
    assert lint(capsys, rollouts)[2].startswith("1 groups of 4 completions, steps 1 to 1; left out as not in the data, or of another size: 6 of 7\n")


def test_of_a_conversation_the_last_message_is_changed(capsys, tmp_path):
    def form(a, b, answer):
        return [{"role": "assistant", "content": "?"}, {"role": "user", "content": "!"}, {"role": "assistant", "content": tagged(a, b, answer)}]

    flags = lint(capsys, make_run(tmp_path), *own(tmp_path, ANYWHERE))[1]
    assert flags and lint(capsys, make_run(tmp_path, form), *own(tmp_path, ANYWHERE))[1] == flags


def test_a_function_that_fails_has_one_flag(capsys, tmp_path):
    source = "def reward(completions, **columns):\n    return [1 / ('sure' not in c and 'certain' not in c) for c in completions]"
    _, flags, _ = lint(capsys, make_run(tmp_path), *own(tmp_path, source))
    (flag,) = flags
    assert flag.startswith("reward failed on '<reasoning>I have checked") and "ZeroDivisionError" in flag


def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch):
    def mistake(*argv):
        with pytest.raises(SystemExit) as stop:
            lint_command.run_command_line(["--lint", "--rollouts", *argv])
        printed = capsys.readouterr()
        assert stop.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    rollouts = make_run(tmp_path, reward_functions=[f"{tmp_path}/own.py:reward"])
    own(tmp_path, ANYWHERE)
    assert "no such file" in mistake(str(tmp_path / "no.jsonl"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        assert "give again --reward_functions" in mistake(rollouts), "the folder is another user's"
    assert "give one for each" in mistake(rollouts, "--reward_functions", "correctness", "--reward_weights", "1", "2")
    assert "none is in the data" in mistake(rollouts, "--reward_functions", "correctness", "--dataset", "countdown")
    assert "needs the column choices" in mistake(rollouts, *own(tmp_path, "def reward(completions, choices): pass", "other.py"))
    (tmp_path / "config.json").unlink()
    assert "config.json: not a readable JSON file" in mistake(rollouts)
