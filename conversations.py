"""
Conversations: the policy speaks, an environment answers, the policy goes on, for up to --max_turns turns.

An environment is a function of the conversation so far, a list of chat messages whose last one is the policy's:

    def respond(conversation, **columns) -> str | dict | None

It returns what a user says next, or any chat message, such as {"role": "tool", "content": "132"}, or None at the end; or a
pair of that and the points that this turn of the policy is worth. Columns are those of the example, as many as it asks for.
It is asked after every turn that the policy ended itself, the last one included, so that it can give points for it.

Tokens in, tokens out: what was sampled stays as it is, what the environment says is encoded on its own and appended
(encode.encode_reply), and nothing is ever tokenised again. A cache goes on where it was.
Left out on purpose: environments that run at the same time, or ahead. They are asked one after the other.
"""

import ast
import inspect
import json
import math
import operator
import re
from collections.abc import Callable
from functools import cache, partial

from encode import as_messages, encode_reply, is_ids
from engine.packing import completion_lengths
from rewards import RESERVED, extract_answer, function_from_file
from sandbox import run_python

LONGEST_MESSAGE = 4000          # characters of an environment's message; the rest is cut, and the message says so
LONGEST_EXPRESSION = 200        # characters that the calculator reads
LARGEST_POWER = 4096            # bits of a power of whole numbers


class EnvironmentRaised(RuntimeError):
    """An environment raised, or returned what is no message; the text says which one, how, and after which words."""


class Conversation:
    """One conversation while it is sampled."""

    def __init__(self, tokenizer, prompt, respond: Callable, config, stops: list[int]):
        """respond: a function of the conversation alone; config has max_turns, generation_max_length and reward_errors."""
        self.tokenizer, self.prompt, self.respond, self.config, self.stops = tokenizer, prompt, respond, config, stops
        self.text_of = partial(tokenizer.decode, skip_special_tokens=True)       # what the tokens of a turn say
        self.messages = as_messages(tokenizer.decode(prompt) if is_ids(prompt) else prompt)
        self.opening = len(self.messages)
        self.begin = 0                                    # of the policy's turn, counted in tokens after the prompt
        self.turns = 0                                    # that the policy has ended
        self.points: dict[int, float] = {}                # by the place of the turn's last token
        self.outgrown = False                             # whether an answer did not fit any more

    def answer(self, ids: list[int]) -> list[int]:
        """The policy has ended a turn; ids are all tokens after the prompt. Returns those of the answer, none at the end."""
        self.begin, text = len(ids), self.text_of(ids[self.begin : -1])
        message, self.points[len(ids) - 1] = self.say(text)
        if message is None or self.turns == self.config.max_turns:
            return []
        reply = encode_reply(self.tokenizer, self.prompt, message, self.stops)
        self.outgrown = len(ids) + len(reply) >= self.config.generation_max_length       # the policy needs a token at least
        if self.outgrown:
            return []
        self.messages.append(message)
        self.begin += len(reply)
        return reply

    def say(self, text: str) -> tuple[dict | None, float]:
        """A turn of the policy, as text -> what the environment answers, and the points it gives for the turn.

        An environment that raises ends the run, or with --reward_errors none the conversation: its points are NaN then.
        """
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        try:
            return as_message_and_points(self.respond([dict(message) for message in self.messages]))
        except Exception as error:
            if self.config.reward_errors == "none":
                return None, math.nan
            raise EnvironmentRaised(
                f"environment {self.config.environment} raised {type(error).__name__}: {error}; after turn {self.turns}, "
                f"{text!r:.80}. Let it answer whatever a model may say, or pass --reward_errors none."
            ) from error

    def completion(self, ids: list[int]) -> list[dict]:
        """The messages after the prompt; ids as in answer. A turn that the length limit cut is the last one."""
        cut = [{"role": "assistant", "content": self.text_of(ids[self.begin :])}] if self.begin < len(ids) else []
        return self.messages[self.opening :] + cut


def as_message_and_points(answer) -> tuple[dict | None, float]:
    """What an environment may return, as a chat message or None, and points. Raises TypeError or ValueError."""
    message, points = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, 0.0)
    if not math.isfinite(points):
        raise ValueError(f"it gave {points} points")
    if message is None:
        return None, float(points)
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    is_message = isinstance(message, dict) and isinstance(message.get("content"), str) and isinstance(message.get("role"), str)
    if not is_message or message["role"] == "assistant":
        raise TypeError(f"it returned {message!s:.60}, not text, a message that is not the assistant's, or None at the end")
    if not message["content"].strip():
        raise ValueError("it returned an empty message; None ends a conversation")
    content = message["content"].encode(errors="replace").decode()               # half a surrogate pair cannot be tokenised
    if len(content) > LONGEST_MESSAGE:
        content = f"{content[:LONGEST_MESSAGE]} [{len(content) - LONGEST_MESSAGE} more characters were cut]"
    return message | {"content": content}, float(points)


def play(conversation: Conversation, turns: list[str]) -> tuple[list[dict], float]:
    """What would come of scripted turns of the policy: the messages after the prompt, and the points added up."""
    total, turns = 0.0, turns[: conversation.config.max_turns]
    for number, text in enumerate(turns, start=1):
        message, points = conversation.say(text)
        total += points
        if message is None or number == len(turns):
            break
        conversation.messages.append(message)
    return conversation.messages[conversation.opening :], total


def describe_conversations(rollout) -> dict:
    """Metrics of a rollout: turns of the policy and tokens of the environment, means over completions; none without one."""
    if rollout.turn_points is None:
        return {}
    mask = rollout.completion_mask                                               # (B, T), with a hole for each answer
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    answers = completion_lengths(mask).sum() - mask.sum()
    return {"turns": float(begins.sum()) / len(mask), "environment_tokens": float(answers) / len(mask)}


# ---- choosing one ----------------------------------------------------------------------------------------------------


@cache
def load_environment(name: str) -> Callable | None:
    """A built-in environment by name, or `path/to/file.py:function`; None for "". Raises ValueError in one line."""
    if not name:
        return None
    if name == "python":
        try:
            run_python("")
        except RuntimeError as error:
            raise ValueError(f"--environment=python: {error}; or take calculator") from None
    environment = BUILT_IN.get(name) or function_from_file("environment", name, BUILT_IN)
    if not inspect.signature(environment).parameters:
        raise ValueError(f"--environment={name}: must take the conversation, a list of chat messages, as its first argument")
    return environment


def columns_for(environment: Callable, examples: list[dict]) -> tuple[set[str], set[str]]:
    """Names of the columns that an environment accepts, and of those among them that it needs and no example has."""
    columns = {name for example in examples for name in example} - set(RESERVED)
    _, *parameters = inspect.signature(environment).parameters.values()
    needed = {p.name: p.default is p.empty for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = {name for name in needed if needed[name]} - columns
    accepted = columns if any(p.kind == p.VAR_KEYWORD for p in parameters) else columns & set(needed)
    return accepted | missing, missing


def refuse_missing_columns(name: str, environment: Callable | None, examples: list[dict]) -> None:
    """One line, if the environment of that name needs a column that the examples do not have."""
    _, missing = columns_for(environment, examples) if environment else ((), ())
    if missing:
        raise ValueError(f"--environment={name}: needs the column {min(missing)}, which no example has")


def responders(environment: Callable | None, examples: list[dict]) -> list[Callable] | None:
    """For each example a function of the conversation alone: the environment with the example's columns."""
    if environment is None:
        return None
    accepted, _ = columns_for(environment, examples)
    return [partial(environment, **{name: example.get(name) for name in accepted}) for example in examples]


# ---- tools -----------------------------------------------------------------------------------------------------------


def with_tools(*tools: Callable) -> Callable:
    """An environment that answers tool calls, and ends the conversation at the first message without one.

    tools  functions with type hints and a docstring with "Args:", from which chat templates tell the model about them
    """
    def respond(conversation: list[dict]) -> dict | None:
        results = answer_calls(conversation[-1]["content"], {tool.__name__: tool for tool in tools})
        return {"role": "tool", "content": "\n".join(results)} if results else None

    respond.tools = list(tools)
    return respond


def answer_calls(text: str, tools: dict[str, Callable]) -> list[str]:
    """The results of all tool calls in a message, or what was wrong with them; none if there are no calls.

    <tool_call>{"name": "calculate", "arguments": {"expression": "47+85"}}</tool_call>       Hermes and Qwen
    calculate(47+85)                                 at the end of a message, for models that know no such format
    """
    if calls := re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        return [answer_json_call(call, tools) for call in calls]
    call = re.search(rf"\b({'|'.join(tools)})\((.*)\)\s*\Z", text, re.DOTALL)
    return [run_tool(tools[call[1]], call[2])] if call else []


def answer_json_call(text: str, tools: dict[str, Callable]) -> str:
    """The result of {"name": ..., "arguments": {...}}, or what is wrong with it."""
    try:
        call = json.loads(text)
        name, arguments = str(call["name"]), dict(call["arguments"])
    except Exception as error:
        return f'error: not {{"name": "...", "arguments": {{...}}}} ({type(error).__name__})'
    return run_tool(tools[name], **arguments) if name in tools else f"error: no tool {name:.40}; there is {', '.join(tools)}"


def run_tool(tool: Callable, /, *args, **kwargs) -> str:
    """What a tool answers; the model is told when it raises, and may do better in its next turn."""
    try:
        return str(tool(*args, **kwargs)).strip() or "(nothing)"
    except Exception as error:
        return f"error: {str(error) or type(error).__name__}"


OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as (3+4)*12.
    """
    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                left, right = value(left), value(right)
                if isinstance(op, ast.Pow) and left and abs(right) * max(1, math.log2(abs(left))) > LARGEST_POWER:
                    raise ValueError("the power is too large")
                return OPERATIONS[type(op)](left, right)
        raise ValueError("only numbers with + - * / // % ** and parentheses")

    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"more than {LONGEST_EXPRESSION} characters")
    result = value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(result, complex):
        raise ValueError("not a real number")
    return str(result) if isinstance(result, int) else f"{result:.12g}"


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The whole program; only what it prints can be seen.
    """
    result = run_python(code)
    problem = "" if result.ok else f"error: {result.reason} {result.stderr}"
    return f"{result.stdout}{problem}".strip()


# ---- a game ----------------------------------------------------------------------------------------------------------


def guess_letter(conversation: list[dict], answer: str) -> tuple[str | None, float]:
    """Whether the letter to be found, the column `answer`, is up or down from the guess between <answer> tags.

    1 point for finding it, -0.1 for every other guess, -0.2 for a turn without one.
    """
    guess = extract_answer(conversation[-1]["content"]) or ""
    if guess not in list("abcdefghijklmnopqrstuvwxyz"):
        return "a letter", -0.2
    if guess == answer:
        return None, 1.0
    return "up" if answer > guess else "down", -0.1


BUILT_IN = {"calculator": with_tools(calculate), "python": with_tools(python), "guess_letter": guess_letter}
