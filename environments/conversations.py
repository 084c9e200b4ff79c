"""
Conversations: the policy and an environment take turns, up to --max_turns turns of the policy.

An environment is either a class, of which each conversation has an instance (environments/instances.py), or a
function of the conversation so far, which is a list of chat messages that ends with the policy's message:

    def respond(conversation, **columns) -> str | dict | None

The function returns the next user message as text, or a chat message such as {"role": "tool", "content":
"132"}, or None to end the conversation; to reward the turn, it returns the pair (one of these, reward). It
receives the columns of the example that its parameters name. It is called after every turn that the policy
has ended itself, including the last turn, which can then get a reward.

Sampled tokens are never decoded and encoded again: an environment's message is encoded separately, then
appended (environments/messages.py), and the key-value cache is extended. Calls run one after the other.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from data import as_messages, encode_prompt
from engine.errors import RunError, exits_as_errors, in_one_line
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
    num_completions: int | None = None,
) -> Rollout:
    """Sample a group of conversations for each example's prompt: a completion is a list of messages.

    policy   a Policy;  grpo_config  a GRPOConfig;  seeds  a tuple for each prompt
    returns  a rollout; if environment is a class, its instances, rollout.environments, are still open
    """
    group_size = num_completions or grpo_config.num_completions_per_prompt
    stops = stop_token_ids(policy.model, policy.tokenizer)
    conversations = Conversations(
        policy.tokenizer, environment, examples, grpo_config, stops, seeds, group_size)
    try:
        conversations.restart()
        rollout = policy.sample(
            conversations.prompts, grpo_config, seeds, num_completions=group_size, reply=conversations)
        return conversations.finish(rollout)
    except BaseException:                                 # Ctrl-C too
        conversations.close()
        raise


class Conversations:
    """The conversations of a rollout, each with its environment. Policy.sample calls this object as reply."""

    def __init__(
        self, tokenizer, environment: Callable, examples: list[dict], grpo_config, stops: list[int],
        seeds: Sequence[tuple], group_size: int = 1,
    ):
        """Prepare group_size conversations for each example; restart begins them.

        stops  stop token ids;  seeds  seeds of `random` in reset, one for each example
        """
        self.tokenizer, self.environment, self.examples = tokenizer, environment, examples
        self.config, self.stops, self.seeds, self.group_size = grpo_config, stops, seeds, group_size
        self.prompts: list = []                           # one for each example, for Policy.sample
        self.instances: list = []                         # of the class, one for each conversation
        self.each: list[Conversation] = []

    def restart(self) -> None:
        """Begin all conversations; begin them again if sampling is repeated. Create and reset instances."""
        self.close()
        rows = [example for example in self.examples for _ in range(self.group_size)]
        prompts = [example["prompt"] for example in self.examples]
        if inspect.isclass(self.environment):
            responds = self.instances = [Instance(example, self.config.reward_timeout) for example in rows]
            size, name = self.group_size, self.config.environment
            prompts = [
                start_group(self.environment, responds[p * size : (p + 1) * size], str(seed), name)
                for p, seed in enumerate(self.seeds)]
            longest = max(len(encode_prompt(self.tokenizer, prompt)) for prompt in prompts)
            if longest > (limit := getattr(self.tokenizer, "max_prompt_length", longest)):
                raise RunError(
                    f"environment {name}: with the text of reset a prompt has {longest} tokens, more than "
                    f"--max_prompt_length={limit}; raise it, or let reset return less.")
        else:
            responds = responders(self.environment, rows)
        # Changed in place, because a repetition of sampling reads the same list.
        self.prompts[:] = [
            example | {"prompt": prompt} for example, prompt in zip(self.examples, prompts, strict=True)]
        opened = [opened_thought(self.tokenizer, encode_prompt(self.tokenizer, p)) for p in self.prompts]
        self.each = [
            Conversation(
                self.tokenizer, prompts[row // self.group_size], respond, self.config, self.stops,
                opened[row // self.group_size])
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


class Conversation:
    """The state of one conversation while it is sampled."""

    def __init__(
        self, tokenizer, prompt, respond: Callable, grpo_config, stops: list[int], opened: str = ""
    ):
        """respond: a function of messages, or an Instance; opened: the <think> at the end of the prompt."""
        self.tokenizer, self.prompt, self.respond = tokenizer, prompt, respond
        self.config, self.stops = grpo_config, stops
        self.environment = getattr(respond, "environment", None)     # the instance of a class
        self.opened = opened                              # <think>, if the template opened it for this turn
        self.messages = list(as_messages(prompt))         # a copy: messages are appended
        self.num_prompt_messages = len(self.messages)
        self.turn_start = 0                         # start of the current turn, in tokens after the prompt
        self.num_turns = 0                                # turns that the policy has ended
        self.turn_points: dict[int, float] = {}           # position of a turn's last token -> reward
        self.too_long = False                           # ended because a message did not fit the length limit

    def end_turn(self, ids: list[int]) -> list[int]:
        """Return the tokens of the environment's message after a turn of the policy, or [] at the end.

        ids  all tokens after the prompt, up to and including the stop token of the turn
        """
        start, self.turn_start = self.turn_start, len(ids)
        message, reward = self.environment_step(self.text_of_turn(ids[start:-1]))
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

    def text_of_turn(self, ids: list[int]) -> str:
        """Return the text of the policy's current turn."""
        return self.opened + decode_completion(self.tokenizer, ids)

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
        """Return the message and the reward of a call.

        If it raises, or an instance takes too long, raise RunError; with --reward_errors none, end the
        conversation with NaN.
        """
        try:
            with exits_as_errors():
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
        cut = self.turn_start < len(ids)
        last = [{"role": "assistant", "content": self.text_of_turn(ids[self.turn_start :])}] if cut else []
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
