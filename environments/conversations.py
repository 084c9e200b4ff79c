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

import math
from collections.abc import Callable
from functools import partial

from engine.chat_template import as_messages, encode_reply, is_ids
from engine.packing import completion_lengths

LONGEST_MESSAGE = 4000          # characters of an environment's message; the rest is cut, and the message says so


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
