"""Tool calls: their formats, the calculator and the Python interpreter."""

import pytest

from environments import loading, tools
from environments.loading import load_environment
from environments.tools import calculate, run_calls
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


def test_tool_calls_are_found_in_the_formats_of_models_and_answered():
    def fails(**arguments):
        raise KeyError

    tools = {"calculate": calculate, "fails": fails, "silent": lambda: " \n"}
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
    assert run_calls("I need 47+85. " + call % "47+85", tools) == ["132"]
    assert run_calls(call % "1+1" + "\n" + call % "2+2", tools) == ["2", "4"]
    assert run_calls((call % "1+1").removesuffix("\n</tool_call>"), tools) == ["2"], "the end was its stop token"
    assert run_calls("so: calculate(3*(4+5))", tools) == ["27"]
    for mention in "With calculate(x) I get", "calculate( adds.", "calculate() or fails():":
        assert run_calls(f"{mention} calculate(3*(4+5))", tools) == ["27"], mention
    assert run_calls("calculate(1)) calculate(2", tools) == []
    def take(count: int):
        return f"{count + 1} left"

    def pay(amount: float):
        return amount + 1

    def name(text: "str | None" = None):
        return repr(text)

    for text, result in ("calculate('1+1')", "2"), ('calculate("1+1")', "2"), ("take(2)", "3 left"), ("take(two)", "error: can only concatenate"), ("calculate(7)", "7"), (
            "pay(5)", "6"), ("pay(0.5)", "1.5"), ("name(5)", "'5'"), ("silent(5)", "error"):
        assert run_calls(text, tools | {"take": take, "pay": pay, "name": name})[0].startswith(result), text
    for text in "the answer is 132", "calculated(1+1)", "calculate(1+1) is 2":
        assert run_calls(text, tools) == []
    for text, problem in {
        "<tool_call>{broken</tool_call>": "not {", "<tool_call>[1]</tool_call>": "not {", "<tool_call></tool_call>": "not {",
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>': 'not {"name": "calculate|fails|silent"',
        '<tool_call>{"name": [], "arguments": {}}</tool_call>': "error", '<tool_call>{"name": "fails", "arguments": [1]}</tool_call>': "not {",
        '<tool_call>{"name": "calculate", "arguments": {"x": 1}}</tool_call>': "unexpected keyword",
        '<tool_call>{"name": "fails", "arguments": {"a": 1}}</tool_call>': "KeyError", "fails(1)": "takes 0 positional",
    }.items():
        (answer,) = run_calls(text, tools)
        assert answer.startswith("error: ") and problem in answer, answer
    assert run_calls("silent" + "<tool_call>" + '{"name": "silent", "arguments": {}}', tools) == ["(nothing)"]
    respond = load_environment("calculator")
    assert respond([{"role": "assistant", "content": "calculate(1+1)"}]) == {"role": "tool", "content": "2"}
    assert respond([{"role": "assistant", "content": "it is 2"}]) is None


@pytest.mark.parametrize("call,result", [
    ('weather(city="Oslo")', "Oslo C"), ('weather("Oslo", "F")', "Oslo F"), ("weather(Oslo, unit=F)", "Oslo F"),
    ('weather(unit="F", city=5)', "5 F"), ("weather(New York)", "New York C"), ("weather(New York, F)", "error: not weather(city=..., unit=...)"),
    ("weather(**{'city': 'Oslo'})", "error: "), ('weather(town="Oslo")', "error: "),
    ('look("Oslo", "F")', "error: "), ("look(Oslo, Norway)", "Oslo, Norway"), ("look(city=New York)", "error: not look(city=...)"),
    ("look(x = 1; print(x))", "x = 1; print(x)"), ("look(city=5)", "5"), ("look(1)(2)", "1)(2"), ("look(look(Oslo))", "look(Oslo)"), ('look("how is look(x)?")', "how is look(x)?"),
    ("multiply(3, 4)", "12"), ("multiply(b=-4, a=3)", "-12"), ("multiply(\n  3,\n  b=4,\n)", "12"), ("multiply(3)", "error: "), ("add(1, 2, 3)", "6"),
    ("switch(on=false)", "False"), ("switch(True)", "True"), ("ping()", "pong"), ("ping(1)", "error: "),
    ('look(__import__("os").getcwd())', '__import__("os").getcwd()'),
])
def test_arguments_are_those_of_the_call_by_position_or_by_name(call, result):
    def weather(city: str, unit: "str | None" = "C"):
        return f"{city} {unit}"

    def look(city: str):
        return city.strip()

    def multiply(a: int, b: int):
        return a * b

    functions = dict(weather=weather, look=look, multiply=multiply, add=lambda *n: sum(n), switch=lambda on: repr(on), ping=lambda: "pong")
    (found,) = run_calls("so: " + call, functions)
    assert found.startswith(result) if result.startswith("error: ") else found == result


@pytest.mark.parametrize("rest,result", [
    ("", "none"), (', "arguments": null', "none"), (', "arguments": ""', "none"), (', "arguments": " "', "none"), (', "arguments": {}', "none"),
    (', "arguments": "{\\"n\\": 3}"', "3"), (', "arguments": "null"', "none"), (', "parameters": {"n": 3}', "3"),
    (', "arguments": "n=3"', "error: not {"), (', "arguments": 3', "error: not {"),
])
def test_arguments_in_json_may_be_missing_or_text(rest, result):
    (found,) = run_calls(f'<tool_call>{{"name": "ping"{rest}}}</tool_call>', {"ping": lambda n="none": n})
    assert found.startswith(result)


def test_python_runs_in_the_sandbox_and_is_refused_where_nothing_can_be_contained(monkeypatch):
    results = {"": None, "print(6*7)": SandboxResult(ok=True, stdout="42\n", stderr="", reason=""),
               "1/0": SandboxResult(ok=False, stdout="", stderr="ZeroDivisionError", reason="exit code 1")}
    monkeypatch.setattr(tools, "run_python", results.__getitem__)
    monkeypatch.setattr(loading, "run_python", results.__getitem__)
    respond = load_environment("python")
    ask = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
    assert respond([{"role": "assistant", "content": ask % "print(6*7)"}])["content"] == "42"
    assert respond([{"role": "assistant", "content": ask % "1/0"}])["content"] == "error: exit code 1 ZeroDivisionError"

    def refuses(code):
        raise RuntimeError("programs cannot be isolated here")

    monkeypatch.setattr(loading, "run_python", refuses)
    with pytest.raises(ValueError, match="--environment=python: programs cannot be isolated here; or use calculator"):
        load_environment("python")


def test_the_tool_calls_of_a_message_share_a_time_limit(monkeypatch):
    clock, calls = iter([0.0, 1.0, 9.0, 11.0, 12.0]), []
    monkeypatch.setattr(tools.time, "monotonic", lambda: next(clock))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    results = tools.run_calls(call * 4, {"add": lambda a: calls.append(a) or "done"})
    assert results == ["done", "done"] + ["error: too much time in one message"] * 2 and calls == [1, 1]
