"""
Published forms of data sets: a table of functions of a row, which return the columns that they change, or {}
if the row is not in this form. What is in no form is taken as it is, or refused by data.py.
"""

import ast
import json
import re
from string import ascii_uppercase as LETTERS

from data import as_map, demonstration, without_nulls
from rewards import extract_boxed

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}            # of ShareGPT


def from_gsm8k(row: dict) -> dict:
    """Split "48/2 = <<48/2=24>>24 clips.\\n#### 72" at the hashes; annotations in << >> are removed."""
    solution, _, answer = str(row["answer"]).rpartition("####")
    answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer.strip())
    reasoning = re.sub(r"<<.*?>>", "", solution).strip()
    return demonstrated(row, reasoning, answer) if answer and "\n" not in answer else {}


def from_math(row: dict) -> dict:
    """Take the answer from the last \\boxed{...} of a solution, unless it has a column (MATH)."""
    solution, given = str(row.get("solution") or row["answer"]), row["answer"]
    alone = re.match(r"\W*(boxed|fbox|framebox)", solution)                      # without reasoning
    answer = extract_boxed(str(given)) or given
    return demonstrated(row, "" if alone else solution, answer) if extract_boxed(solution) else {}


def demonstrated(row: dict, solution: str, answer) -> dict:
    """Return an answer, and a demonstration of a solution if the row has no other."""
    free = solution and not row.get("completion") and isinstance(row.get("prompt"), str)
    return {"answer": answer} | ({"completion": demonstration(solution, answer)} if free else {})


def from_choices(row: dict) -> dict:
    """Write lettered choices below a question, and the answer, an index or a label, as a letter.

    ["no", "yes"] (MMLU), {"text": ["no", "yes"], "label": ["1", "2"]} (ARC), {"A": "no", "B": "yes"} (MedQA)
    """
    name = "options" if row.get("choices") is None else "choices"
    choices, answer = row.get(name), row.get("answer")
    if row.get("prompt") != row["question"] or choices is None:
        return {}
    by_label = choices if isinstance(choices, dict) else {"label": [], "text": choices}
    labels, texts = [*by_label.get("label", by_label)], by_label.get("text", [*by_label.values()])
    place = labels.index(str(answer)) if str(answer) in labels else answer
    if not isinstance(texts, list) or {*map(type, texts)} != {str} or len(texts) > len(LETTERS):
        raise ValueError(
            f"choices or options must be a list of at most {len(LETTERS)} texts, not {texts!r:.60}: "
            f"{as_map('choices', '[...]')}, or data.rename_column('options', '...')")
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    if isinstance(place, int):
        answer = dict(enumerate(LETTERS[: len(texts)])).get(place, answer)
    if answer not in [None, *LETTERS[: len(texts)], *texts]:
        name = f"the answer {answer!r:.40}"
        raise ValueError(f"{name} is no index, label or text of its {len(texts)} choices: {as_map('answer')}")
    prompt = "\n".join([row["question"], *lines])
    return {"prompt": prompt, "answer": answer, name: choices, "choices": texts}


def from_alpaca(row: dict) -> dict:
    """Write the input below the instruction, with an empty line between them."""
    text = f"{row['instruction']}\n\n{row['input']}"
    return {"prompt": text} if row["input"] and row["prompt"] == row["instruction"] else {}


def from_sharegpt(row: dict) -> dict:
    """Make messages of turns {"from": "human", "value": "..."}, after the message in `system`, if any."""
    turns, system = row["prompt"], row.get("system")
    if turns != row["conversations"] or not all({"from", "value"} <= {*turn} for turn in turns):
        return {}
    turns = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    return {"prompt": [{"role": "system", "content": system}] * bool(system) + turns, "system": system}


def from_countdown(row: dict) -> dict:
    """Name the numbers of a task as the reward function countdown does."""
    return {"numbers": row["nums"]}


def from_mbpp(row: dict) -> dict:
    """Write the tests below the text, because they name the function; the code is the demonstration."""
    tests, text = row["test_list"], row.get("text")       # no text: it is the prompt
    prompt = "\n".join([text or row["prompt"], "Your code must pass these tests:", *tests])
    return {"tests": tests, "text": text, "prompt": prompt, "completion": row["code"]}


def from_humaneval(row: dict) -> dict:
    """Take the asserts of check(candidate) as tests. The prompt asks for the program with its beginning."""
    checks = [node for node in ast.parse(row["test"]).body if isinstance(node, ast.FunctionDef)]
    asserts = [node for check in checks for node in check.body if isinstance(node, ast.Assert)]
    texts = [ast.unparse(node.test) for node in asserts]
    imports = re.findall("^(?:from|import) .*", row["prompt"], re.MULTILINE)
    calls = [re.sub(r"\bcandidate\b", row["entry_point"], text) for text in texts if "candidate(" in text]
    tests = ["\n".join([*imports, f"assert {call}"]) for call in calls]
    prompt = f"Complete this program, and write it in whole:\n\n{row['prompt']}"
    return {"tests": tests, "prompt": prompt, "completion": row["prompt"] + row["canonical_solution"]}


def from_verl(row: dict) -> dict:
    """Take the answer, or the columns of a task, from {"reward_model": {"ground_truth": ...}}."""
    truth = row["reward_model"]["ground_truth"]
    texts = json.loads(truth) if isinstance(truth, str) and truth.startswith('["') else truth
    return truth if isinstance(truth, dict) else {"answer": texts}


def from_tools(row: dict) -> dict:
    """Parse schemas of tools that are JSON text, and wrap those without a type."""
    tools = [] if row["tools"] is None else row["tools"]
    tools = json.loads(tools) if isinstance(tools, str) and tools.startswith("[{") else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"tools must be a list of schemas of functions, or its JSON text, not {tools!r:.60}: "
            f"{as_map('tools', '[...]')}, or data.rename_column('tools', '...')")
    schemas = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return {"tools": without_nulls(schemas)}


FORMS = {     # columns that a row needs, text that its solution or answer contains, function that converts it
    "gsm8k": ({"answer"}, "####", from_gsm8k), "math": ({"answer"}, "box", from_math),
    "choices": ({"question"}, "", from_choices), "alpaca": ({"instruction", "input"}, "", from_alpaca),
    "sharegpt": ({"conversations"}, "", from_sharegpt), "countdown": ({"nums"}, "", from_countdown),
    "mbpp": ({"code", "test_list"}, "", from_mbpp),
    "humaneval": ({"test", "entry_point", "canonical_solution"}, "", from_humaneval),
    "verl": ({"reward_model"}, "", from_verl), "tools": ({"tools"}, "", from_tools),
}
