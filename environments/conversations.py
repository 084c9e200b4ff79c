"""
Conversations: the policy and an environment take turns, up to --max_turns turns of the policy.

    def respond(conversation, **columns) -> str | dict | None          the next message; None ends it
    def respond(conversation, **columns) -> tuple[..., float]          also rewards the turn

An environment is such a function of the chat messages so far, or a class, of which each conversation has an
instance (environments/instances.py). It is called after every turn that the policy has ended itself.

Sampled tokens are never decoded and encoded again: an environment's message is encoded separately, then
appended (environments/messages.py), and the key-value cache is extended. Calls run one after the other.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from data import as_messages, encode_prompt
from engine.errors import RunError, in_one_line
from logprobs import completion_lengths
from environments.instances import Instance, close_all, responders, start_group
from environments.messages import encode_reply
from reward_functions.calling import call_with_timeout
from rewards import MAX_REWARD
from sample import Rollout, decode_completion, opened_thought, stop_token_ids
from sources.token_check import without_special_tokens

MAX_MESSAGE_CHARACTERS = 4000   # limit of an environment's message; a note replaces the rest


def sample_with_environment(
    policy, environment: Callable, examples: list[dict], grpo_config, seeds: Sequence[tuple], *,
    num_completions: int | None = None, max_prompt_length: float = math.inf,
) -> Rollout:
    """Sample a group of conversations for each example's prompt: a completion is a list of messages.

    max_prompt_length  in tokens, with the text of reset
    returns  a rollout; if environment is a class, its instances, rollout.environments, are still open
    """
    group_size = num_completions or grpo_config.num_completions_per_prompt
    stops = stop_token_ids(policy.model, policy.tokenizer)
    conversations = Conversations(
        policy.tokenizer, environment, examples, grpo_config, stops, seeds, group_size, max_prompt_length)
    try:
        conversations.restart()
        rollout = policy.sample(
            conversations.prompts, grpo_config, seeds, num_completions=group_size, reply=conversations)
        return conversations.finish(rollout)
    except BaseException:                                 # Ctrl-C too
        conversations.close()
        raise


@dataclass
class Conversations:
    """The conversations of a rollout, each with its environment. Policy.sample calls this object as reply."""

    tokenizer: object
    environment: Callable
    examples: list[dict]
    config: object              # a GRPOConfig
    stops: list[int]            # stop token ids
    seeds: Sequence[tuple]      # of `random` in reset, one for each example
    group_size: int = 1
    max_prompt_length: float = math.inf
    prompts: list = field(default_factory=list)           # one for each example, for Policy.sample
    instances: list[Instance] = field(default_factory=list)          # of a class, one for each conversation
    each: list["Conversation"] = field(default_factory=list)

    def restart(self) -> None:
        """Begin all conversations; begin them again if sampling is repeated. Create and reset instances."""
        self.close()
        size, name = self.group_size, self.config.environment
        rows = [example for example in self.examples for _ in range(size)]
        prompts = [example["prompt"] for example in self.examples]
        if inspect.isclass(self.environment):
            responds = self.instances = [Instance(example, self.config.reward_timeout) for example in rows]
            prompts = [
                start_group(self.environment, responds[p * size : (p + 1) * size], str(seed), name)
                for p, seed in enumerate(self.seeds)]
        else:
            responds = responders(self.environment, rows)
        # Changed in place, because a repetition of sampling reads the same list.
        self.prompts[:] = [
            example | {"prompt": prompt} for example, prompt in zip(self.examples, prompts, strict=True)]
        encoded = [encode_prompt(self.tokenizer, prompt) for prompt in self.prompts]
        if (longest := max(map(len, encoded))) > self.max_prompt_length:
            raise RunError(
                f"environment {name}: with the text of reset a prompt has {longest} tokens, more than "
                f"--max_prompt_length={self.max_prompt_length}; raise it, or let reset return less.")
        opened = [opened_thought(self.tokenizer, ids) for ids in encoded]
        self.each = [
            Conversation(
                self.tokenizer, prompts[row // size], respond, self.config, self.stops, opened[row // size])
            for row, respond in enumerate(responds)]

    def __call__(self, row: int, ids: list[int]) -> list[int]:
        """Return the environment's reply to a row's tokens so far: see Conversation.end_turn."""
        return self.each[row].end_turn(ids)

    def finish(self, rollout: Rollout) -> Rollout:
        """Return the rollout with messages as completions, and with the rewards of turns."""
        if any(rollout.finished[row] and not each.num_turns for row, each in enumerate(self.each)):
            raise RunError("the policy's sample does not call reply, which an environment needs.")
        lengths = completion_lengths(rollout.completion_mask)
        rewards = torch.zeros(rollout.completion_mask.shape)
        rows = zip(self.each, rollout.completion_ids.tolist(), lengths.tolist(), strict=True)
        for row, conversation in enumerate(self.each):
            turns = conversation.turn_points
            rewards[row, list(turns)] = torch.tensor(list(turns.values()))
            rewards[row, lengths[row] - 1] += conversation.final_reward()
        return replace(
            rollout, turn_points=rewards, environments=[each.environment for each in self.each],
            finished=rollout.finished & ~torch.tensor([conversation.too_long for conversation in self.each]),
            completions=[conversation.completion_messages(ids[:n]) for conversation, ids, n in rows])

    def close(self) -> None:
        close_all([instance.environment for instance in self.instances], self.config.reward_timeout)


@dataclass
class Conversation:
    """The state of one conversation while it is sampled."""

    tokenizer: object
    prompt: str | list[dict]
    respond: Callable           # a function of messages, or an Instance
    config: object              # a GRPOConfig
    stops: list[int]            # stop token ids
    opened: str = ""            # <think>, if the template opened it for this turn
    turn_start: int = 0         # start of the current turn, in tokens after the prompt
    num_turns: int = 0          # turns that the policy has ended
    turn_points: dict[int, float] = field(default_factory=dict)      # position of a turn's end -> reward
    too_long: bool = False      # ended because a message did not fit the length limit

    def __post_init__(self):
        self.environment = getattr(self.respond, "environment", None)            # the instance of a class
        self.messages = list(as_messages(self.prompt))    # a copy: messages are appended
        self.num_prompt_messages = len(self.messages)

    def end_turn(self, ids: list[int]) -> list[int]:
        """Return the tokens of the environment's message after a turn of the policy, or [] at the end.

        ids  all tokens after the prompt, up to and including the stop token of the turn
        """
        start, self.turn_start = self.turn_start, len(ids)
        text = self.opened + decode_completion(self.tokenizer, ids[start:-1])
        message, reward = self.environment_step(text)
        self.turn_points[len(ids) - 1] = reward
        if message is None or self.num_turns == self.config.max_turns:
            return []
        said = message | {"content": without_special_tokens(self.tokenizer, message["content"])}
        reply = encode_reply(self.tokenizer, self.prompt, said, self.stops, ended_by=ids[-1])
        # The policy needs at least one more token.
        self.too_long = len(ids) + len(reply) >= self.config.generation_max_length
        if self.too_long:
            return []
        self.messages.append(message)
        self.turn_start += len(reply)
        self.opened = opened_thought(self.tokenizer, reply)
        return reply

    def environment_step(self, text: str) -> tuple[dict | None, float]:
        """Append a turn of the policy. Return the environment's message and the reward of the turn."""
        self.messages.append({"role": "assistant", "content": text})
        self.num_turns += 1
        return self.attempt(partial(self.respond, [dict(message) for message in self.messages]))

    def final_reward(self) -> float:
        """Return the reward that an instance gives at the end."""
        if self.environment is None:
            return 0.0
        return self.attempt(lambda: (None, self.respond.new_reward(at_end=True)))[1]

    def attempt(self, call: Callable) -> tuple[dict | None, float]:
        """Return the message and the reward of a call. If it raises, or takes too long, raise RunError; with
        --reward_errors none, end the conversation with NaN.
        """
        try:
            return parse_step(call_with_timeout(getattr(self.respond, "seconds", 0.0), call))
        except Exception as error:
            if self.config.reward_errors == "none":
                return None, math.nan
            last = f"after turn {self.num_turns}, {self.messages[-1]['content']!r:.80}"
            raise RunError(
                f"environment {self.config.environment} raised {in_one_line(error)}; {last}. Let it accept "
                "any text, or pass --reward_errors none."
            ) from error

    def completion_messages(self, ids: list[int]) -> list[dict]:
        """Return the messages after the prompt, including a last turn that the length limit truncated."""
        text = self.opened + decode_completion(self.tokenizer, ids[self.turn_start :])
        last = [{"role": "assistant", "content": text}] if self.turn_start < len(ids) else []
        return self.messages[self.num_prompt_messages :] + last


def parse_step(returned) -> tuple[dict | None, float]:
    """Convert the result of an environment to a chat message (or None) and a reward."""
    message, reward = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, 0.0)
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(f"it gave a reward of {reward}, not a number of at most {MAX_REWARD:g}")
    if message is None:
        return None, float(reward)
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    match message:
        case {"role": str(role), "content": str(content)} if role != "assistant" and content.strip():
            content = content.encode(errors="replace").decode()     # a lone surrogate cannot be tokenised
        case _:
            expected = "not text, a message with text that is not the assistant's, or None at the end"
            raise TypeError(f"it returned {message!r:.60}, {expected}")
    if (surplus := len(content) - MAX_MESSAGE_CHARACTERS) > 0:
        content = f"{content[:MAX_MESSAGE_CHARACTERS]} [{surplus} more characters were cut]"
    return message | {"content": content}, float(reward)
