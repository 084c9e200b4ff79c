"""Choosing reward functions by name or file, and the columns that they need."""

import pytest

import rewards
from reward_functions.loading import missing_columns
from rewards import load_reward_function


def test_reward_functions_come_from_the_library_or_a_file(tmp_path):
    assert load_reward_function("correctness") is rewards.correctness
    file = tmp_path / "mine.py"
    file.write_text("def short(completions, **columns):\n    return [-len(c) for c in completions]\n\nnumber = 3\n")
    assert load_reward_function(f"{file}:short")(["abc"]) == [-3]
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "same.py").write_text(
        "def correctness(completions, **columns): ...\ndef narrow(completions): ...\n"
        "async def later(completions, **columns): ...\ndef one(text): ...\n"
        "class Short:\n    def __call__(self, completions, **columns): ...\n"
    )
    for name, message in {
        "corectness": "unknown; did you mean correctness\\? Else use path/to/file.py:function or one of correctness",
        "xyz": "unknown; use path",
        f"{file}:long": "has no function long",
        f"{file}:number": "has no function number",
        f"{tmp_path}/none.py:f": "no file",
        f"{tmp_path}/broken.py:f": "no_such_module",
        f"{tmp_path}/same.py:correctness": "there is a built-in reward function correctness; rename yours",
        f"{tmp_path}/same.py:narrow": r"it must accept columns it does not use: add \*\*columns",
        f"{tmp_path}/same.py:one": r"does not use: add completions \(a list of them\) and \*\*columns to its parameters",
        f"{tmp_path}/same.py:later": "it is async; name a plain function",
        f"{tmp_path}/same.py:Short": r"it is a class; name a plain function f\(completions, \*\*columns\)",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            load_reward_function(name)
        assert "\n" not in str(error.value)


def test_a_function_may_ask_for_the_answer_under_trls_names_and_never_for_the_demonstration():
    def curious(completions, solution, completion, level=0, **columns): ...

    assert missing_columns(curious, {"prompt", "completion", "answer"}) == ["completion"]
    assert missing_columns(curious, {"prompt", "completion"}) == ["solution", "completion"]
