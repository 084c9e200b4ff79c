"""docs/your-own-task.md must do what it says: its files are written, its commands are run, with fewer steps."""

import contextlib
import io
import re

import pytest
from project_files import ROOT

import infer

import train

PAGE = (ROOT / "docs/your-own-task.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = re.findall(r"^ {4}python (\S+) ?(.*)$", PAGE.replace("\\\n        ", ""), flags=re.MULTILINE)
# Several turns, as the page says: the environment and the conversations are those of the task's file.
FILES["turns.py"] = '''
import sorting
from rewards import extract_answer

SETTINGS = {
    "environment": "turns.py:backwards",
    "max_turns": 2,
    "reward_functions": ["environment", "correctness"],
    "reward_weights": [1, 0],
    "profile": "demo",
    "model_path": "outputs/words/final",
    "generation_max_length": 30,
    "num_epochs": 0.6,
    "eval_limit": 256,
}


def examples(split):
    for row in sorting.examples(split):
        second = f"<answer>{row['answer'][::-1]}</answer>"
        texts = [("assistant", row["completion"]), ("user", "backwards"), ("assistant", second)]
        messages = [{"role": role, "content": text} for role, text in texts]
        yield row | {"answer": row["answer"][::-1], "completion": messages}


def backwards(conversation, answer):
    first = len([message for message in conversation if message["role"] == "assistant"]) == 1
    right = extract_answer(conversation[-1]["content"]) == (answer[::-1] if first else answer)
    return ("backwards" if first else None), 0.5 * right
'''
COMMANDS.append(("train.py", "--task turns.py --output_dir outputs/turns"))
FEWER = "--max_steps 2 --cold_start_steps 2 --batch_size 4 --eval_limit 4 --report_to none"


def run(program, words):
    """What `python program words` does, with fewer steps; returns what its main function does."""
    if program == "train.py":
        return train.main([*words, *FEWER.split()])
    return infer.main(words)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder; and program, code and output of every command, in order, in a folder with nothing but the page's files."""
    folder, results = tmp_path_factory.mktemp("task"), []
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for program, arguments in COMMANDS:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', arguments)]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
            patch.chdir(folder)
            code = run(program, words)
        results.append((program, code, output.getvalue()))
    return folder, results


@pytest.mark.slow
def test_every_command_of_the_page_runs(ran):
    folder, results = ran
    assert len(results) == 5
    for program, code, output in results:
        assert not code, f"{program}: {output}"
    assert (folder / "outputs/words/report.html").exists() and (folder / "outputs/turns/final").is_dir()


def test_the_linter_says_what_the_page_says(ran):
    printed = [output for _, _, output in ran[1] if "| reward |" in output]
    assert len(printed) == 2 and "\n- not less than gold" in printed[0] and "\n- " not in printed[1]
    lines = [line for output in printed for line in output.splitlines() if line.startswith(("|", "- "))]
    of_kinds = {re.sub(r"(?<=\|)[^|]*\|$", "", line) for line in lines}         # without the column of the model
    assert of_kinds <= set(PAGE.splitlines())
