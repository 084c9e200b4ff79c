"""Tool calls: their formats, the calculator and the Python interpreter."""

import pytest

from environments import instances, tools
from environments.instances import load_environment
from environments.tools import calculate, run_calls
from model import byte_tokenizer
from reward_functions.sandbox import SandboxResult


@pytest.mark.parametrize("expression,result", [
    ("47+85", "132"), (" (3+4)*12 ", "84"), ("2**10", "1024"), ("7/2", "3.5"), ("6/2", "3"), ("-7//2", "-4"), ("1e3", "1000"),
    ("0.1+0.2", "0.3"), ("10%4", "2"),
])
def test_the_calculator_computes(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", [
    "", "1/0", "9**9**9", "2**-99999", "__import__('os').system('true')", "a+1", "'x'*3", "[1]*9", "True+1", "1 if 1 else 2",
    "(-8)**0.5",     "1+" * 200 + "1", "(" * 150, "1\0", "1j", "10.0**400", "lambda: 1", "9**999**1.5",
])
def test_what_is_no_arithmetic_is_told_to_the_model_and_harms_nobody(expression):
    (answer,) = run_calls(f"calculate({expression})", {"calculate": calculate})
    assert answer.startswith("error: ") and len(answer) < 200 and "\n" not in answer


SUM = '{"name": "calculate", "arguments": {"expression": "47+85"}}'
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'


def weather(city: str, unit: "str | None" = "C"):
    return f"{city} {unit}"


def look(city: str):
    return city.strip()


def multiply(a: int, b: int):
    return a * b


def fails(**arguments):
    raise KeyError


TOOLS = dict(
    calculate=calculate, weather=weather, look=look, multiply=multiply, fails=fails, silent=lambda: " \n",
    echo=lambda n="none": n)


@pytest.mark.parametrize("text,results", [
    # As Hermes and Qwen write them: the arguments may be text, or missing, and Llama calls them parameters.
    ("I need 47+85. " + CALL % "47+85", ["132"]), (CALL % "1+1" + "\n" + CALL % "2+2", ["2", "4"]),
    ((CALL % "1+1").removesuffix("\n</tool_call>"), ["2"]),                   # the end was its stop token
    *((f'<tool_call>{{"name": "echo"{rest}}}</tool_call>', [result]) for rest, result in [
        ("", "none"), (', "arguments": null', "none"), (', "arguments": " "', "none"), (', "arguments": {}', "none"),
        (', "arguments": "{\\"n\\": 3}"', "3"), (', "arguments": "null"', "none"), (', "parameters": {"n": 3}', "3"),
        (', "arguments": "n=3"', "error: not {"), (', "arguments": 3', "error: not {"),
    ]),
    ("silent" + "<tool_call>" + '{"name": "silent", "arguments": {}}', ["(nothing)"]),
    ("<tool_call>{broken</tool_call>", ["error: not {"]), ("<tool_call>[1]</tool_call>", ["error: not {"]),
    ("<tool_call></tool_call>", ["error: not {"]),
    ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', ['error: not {"name": "calculate|weather|']),
    ('<tool_call>{"name": [], "arguments": {}}</tool_call>', ["error: "]),
    ('<tool_call>{"name": "fails", "arguments": [1]}</tool_call>', ["error: not {"]),
    ('<tool_call>{"name": "fails", "arguments": {"a": 1}}</tool_call>', ["error: KeyError"]),
    ('<tool_call>{"name": "calculate", "arguments": {"x": 1}}</tool_call>', ["error: calculate() got an unexpected keyword"]),
    # In a fenced block or without tags, behind thoughts.
    (f"<think>\nI use it.\n</think>\n\n{SUM}", ["132"]), (f"```json\n{SUM}\n```", ["132"]), (f"```\n{SUM}\n```", ["132"]),
    (f"I will use the calculator:\n```json\n{SUM}\n```\nand then tell you.", ["132"]), (SUM.replace("arguments", "parameters"), ["132"]),
    (f"<think>\n<tool_call>\n{SUM}\n</tool_call>\n</think>\nIt is 132.", []), (f"<think>\n<tool_call>\n{SUM}\n</tool_call>", []),
    ("<think>calculate(47+85)", []), ('```json\n{"name": "Tom", "age": 5}\n```', []), ('{"name": ["calculate"]}', []),
    ("```json\n[1]\n```", []), (f"```json\n{'[' * 9000}\n```", []),
    # At the end of a message.
    ("so: calculate(3*(4+5))", ["27"]), ("With calculate(x) I get calculate(3*(4+5)) ", ["27"]), ("calculate('1+1')", ["2"]),
    ("calculate(7)", ["7"]),
    ("calculate(1)) calculate(2", []), ("the answer is 132", []), ("calculated(1+1)", []), ("calculate(1+1) is 2", []),
    ("look(Oslo, Norway)", ["Oslo, Norway"]), ("look(5)", ["5"]), ("look(x = 1; print(x))", ["x = 1; print(x)"]),
    ("look(city='Oslo')", ["Oslo"]),
    ("look(city=Oslo)", ["Oslo"]), ("look()", ["error: look() missing"]), ('look("Oslo", "F")', ["error: "]),
    ('look(__import__("os").getcwd())', ['__import__("os").getcwd()']),
    ('weather("Oslo", "F")', ["Oslo F"]), ('weather(unit="F", city="Rome")', ["Rome F"]),
    ("weather(Oslo)", ["error: not weather(city=..., unit=...)"]),
    ("weather(**{'city': 'Oslo'})", ["error: "]), ('weather(town="Oslo")', ["error: "]), ("multiply(3, b=-4)", ["-12"]),
    ("multiply(3)", ["error: "]),
    ("silent()", ["(nothing)"]), ("silent(5)", ["error: "]),
])
def test_tool_calls_are_found_and_answered(text, results):
    found = run_calls(text, TOOLS)
    assert len(found) == len(results)
    for answer, result in zip(found, results):
        assert answer.startswith(result) if result.startswith("error: ") else answer == result


def test_annotations_may_be_postponed():
    namespace = {}
    exec("from __future__ import annotations\ndef find(city: str):\n    return city.upper()", namespace)
    assert run_calls("find(Oslo, Norway)", {"find": namespace["find"]}) == ["OSLO, NORWAY"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
FORMS = {                       # of tool calls in chat templates, and whether they are read
    "Hermes": (f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>', True),
    "Llama 3": (f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', True),
    "Qwen 3 Coder": (
        f"<tool_call>\n<function={NAME}>\n{{% for k, v in c.function.arguments.items() %}}<parameter={{{{ k }}}}>\n{{{{ v }}}}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>", False),
    "Mistral": (f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {ARGUMENTS}, "id": "{{{{ c.id }}}}"}}]', False),
    "DeepSeek": (f"<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{NAME}\n```json\n{ARGUMENTS}\n```", False),
    "none": ("", True),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_tool_calls_that_is_not_read_is_named(form):
    written, is_read = FORMS[form]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace("CALL", written)
    notes = []
    instances.offer_tools(tokenizer, instances.BUILT_IN["calculator"], notes.append)
    assert notes == [] if is_read else "not read" in notes[0] and "calculate" in notes[0] and "\n" not in notes[0]


def test_a_message_without_a_call_ends_the_conversation():
    respond = load_environment("calculator")
    assert respond([{"role": "assistant", "content": "calculate(1+1)"}]) == {"role": "tool", "content": "2"}
    assert respond([{"role": "assistant", "content": "it is 2"}]) is None


def test_python_runs_in_the_sandbox_and_is_refused_where_nothing_can_be_contained(monkeypatch):
    results = {"": None, "print(6*7)": SandboxResult(ok=True, stdout="42\n", stderr="", reason=""),
               "1/0": SandboxResult(ok=False, stdout="", stderr="ZeroDivisionError", reason="exit code 1")}
    monkeypatch.setattr(tools, "run_python", results.__getitem__)
    monkeypatch.setattr(instances, "run_python", results.__getitem__)
    respond = load_environment("python")
    ask = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
    assert respond([{"role": "assistant", "content": ask % "print(6*7)"}])["content"] == "42"
    assert respond([{"role": "assistant", "content": ask % "1/0"}])["content"] == "error: exit code 1 ZeroDivisionError"

    def refuses(code):
        raise RuntimeError("programs cannot be isolated here")

    monkeypatch.setattr(instances, "run_python", refuses)
    with pytest.raises(ValueError, match=r"^--environment=python: programs cannot be isolated here$"):
        load_environment("python")
