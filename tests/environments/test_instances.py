"""Environments with a state: TRL's contract, threads, time limits, and what bad ones cost; the guessing game; columns."""

import itertools
import json
import math
import random
import re
import sqlite3
import time
from dataclasses import replace

import pytest
import torch
from conftest import PROMPTS

import environments.instances
import environments.tools
from data import encode_prompt
from engine import make_engine
from engine.errors import RunError
from engine.shared import Shared
from environments.conversations import Conversation, Conversations, sample_with_environment
from environments.instances import close_all, load_environment, refuse_missing_columns, responders, tools_of
from environments.tools import guess_letter, run_call
from reward_functions import environment
from rewards import correctness
from runs.groups import Scoring, sampler_of, score
from sources import load_examples

CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


class Parrot:
    """Say the same back: as TRL's echo, the trainer's reward function reads its attribute; over after three."""

    def __init__(self):
        self.reward, self.database = 0.0, sqlite3.connect(":memory:")

    def reset(self, word, **kwargs) -> str | None:
        self.word, self.reward, self.said = word, 0.0, 0
        self.database.execute("CREATE TABLE said (text)")

    def echo(self, message: str) -> str:
        """
        Say it back.

        Args:
            message: What to say.
        """
        if self.said == 3:
            raise ValueError("Over.")
        self.said += 1
        self.database.execute("INSERT INTO said VALUES (?)", [message])          # only in the thread that connected
        self.reward = len(message) / 10
        return message

    def close(self):
        self.database.close()
        self.closed = True


def read_reward(environments, **kwargs):
    return [each.reward for each in environments]


def start(tokenizer, settings, cls, example):
    """Begin a conversation with an instance."""
    conversations = Conversations(tokenizer, load_environment(cls), [{"prompt": "p "} | example], settings, [1], [(0, 0)])
    conversations.restart()
    return conversations.each[0]


def run_scripted_turns(conversation, turns):
    """Run a conversation with given turns of the policy. Return the messages and the total points."""
    total, turns = 0.0, turns[: conversation.config.max_turns]
    for number, text in enumerate(turns, start=1):
        message, points = conversation.environment_step(text)
        total += points
        if message is None or number == len(turns):
            break
        conversation.messages.append(message)
    return conversation.messages[conversation.num_prompt_messages :], total + conversation.final_reward()


def play(tokenizer, settings, cls, example, *turns):
    conversation = start(tokenizer, settings, cls, example)
    return conversation, *run_scripted_turns(conversation, list(turns))


def test_an_environment_may_give_its_own_reward_and_have_async_tools(tokenizer, settings):
    class Own(Parrot):
        def get_reward(self) -> float:
            return float(self.said)

        async def count(self, step: int) -> int:
            """Count.

            Args:
                step: What to add.

            Returns:
                The sum.
            """
            self.said += step
            return self.said

    _, messages, points = play(tokenizer, settings, Own, {"word": "w"}, CALL % ("count", '{"step": 2}'), "bye")
    assert [message["content"] for message in messages[1:]] == ["2", "bye"] and points == 2.0
    assert [tool.__name__ for tool in tools_of(Own)] == ["count", "echo"], "neither reset, get_reward nor close"


def test_an_environment_of_trl_whose_reward_the_trainer_reads(tokenizer, settings):
    turns = [CALL % ("echo", json.dumps({"message": word})) for word in ("hello", "hi", "x", "y")]
    conversation, messages, points = play(tokenizer, replace(settings, max_turns=5), Parrot, {"word": "w"}, *turns, "bye")
    assert [message["content"] for message in messages[1::2]] == ["hello", "hi", "x", "error: Over."]
    assert points == pytest.approx(0.1) and conversation.respond.environment.word == "w"


ROWS = [{"prompt": prompt, "word": "w"} for prompt in PROMPTS[:2]]


def sample(model, tokenizer, config, cls, seed=3):
    """A rollout in which every turn of the random model is a call of the only tool."""
    model.generation_config.eos_token_id = list(range(1, 90))
    policy = make_engine("shared", model, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments.tools, "run_calls", lambda text, tools: [run_call(next(iter(tools.values())), text[:9])])
        return sample_with_environment(policy, cls, ROWS, config, [(seed, p) for p in range(2)], num_completions=4)


def test_a_group_has_one_beginning_and_a_seed_gives_it_again(model, tokenizer, settings):
    class Drawn(Parrot):
        def reset(self, **columns):
            super().reset("w")
            return f" {random.random()}"

    before = random.getstate()
    first, again, other = (sample(model, tokenizer, settings, Drawn, seed=seed) for seed in (3, 3, 4))
    assert random.getstate() == before
    assert first.completions == again.completions and torch.equal(first.turn_points, again.turn_points)
    assert not torch.equal(first.prompt_ids, other.prompt_ids)
    texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(first.prompt_ids, first.prompt_mask)]
    assert all(re.search(r" 0\.\d+$", text) for text in texts) and len({text[-9:] for text in texts}) == 2


def test_reward_functions_read_instances_before_they_are_closed(model, tokenizer, settings):
    rollout, other = (sample(model, tokenizer, settings, Parrot) for _ in range(2))
    assert not any(hasattr(each, "closed") for each in rollout.environments)
    groups = score(rollout, ROWS, Scoring([environment, read_reward], [1.0, 1.0]), settings)
    torch.testing.assert_close(groups.per_function["environment"], groups.per_function["read_reward"], atol=1e-6, rtol=0.0)
    assert len(set(groups.scores.flatten().tolist())) > 2 and groups.rollout.environments is None
    with pytest.raises(RunError):
        score(other, ROWS, Scoring([lambda completions: 1 / 0], [1.0]), settings)
    assert all(each.closed for each in rollout.environments + other.environments)


def never():
    while True:
        pass


class Quiet:
    """What the bad environments change: in the fourth conversation of eight, at one place."""

    born = closed = reward = 0

    def __init__(self):
        Quiet.born += 1
        self.bad = Quiet.born == 4
        self._misbehave("init")

    def reset(self, **columns):
        return self._misbehave("reset")

    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: The words.
        """
        return self._misbehave("say") or "x"

    def close(self):
        Quiet.closed += 1
        self._misbehave("close")

    def _misbehave(self, place):
        return self._deed() if self.bad and place == self.place else None


def bad(place, deed, **members):
    return type("Bad", (Quiet,), {"place": place, "_deed": lambda self: deed(), **members})


def throw(error):
    raise error


BAD = {                         # and what is said about the lost conversation
    "hangs when it is made": (bad("init", never), r"no result within 0.3 s \(--reward_timeout\)"),
    "raises in reset": (bad("reset", lambda: throw(KeyError("x"))), "raised KeyError: 'x'"),
    "returns a number from reset": (bad("reset", lambda: 7), "reset returned 7, neither text nor None"),
    "hangs in a tool": (bad("say", never), "no result within 0.3 s .*; after turn [12]"),
    "gives no number": (bad("x", None, reward=property(lambda self: math.nan if self.bad else 0.0)), "gave a reward of nan"),
    "hangs in close": (bad("close", never), ""),
}


@pytest.mark.parametrize("errors", ["none", "raise"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_environment_costs_its_own_conversation(model, tokenizer, settings, name, errors):
    cls, message = BAD[name]
    Quiet.born, Quiet.closed, start = 0, 0, time.monotonic()
    config = replace(settings, reward_timeout=0.3, reward_errors=errors)
    if errors == "raise" and message:
        with pytest.raises(RunError, match=rf"^.*{message}.*$"):
            sample(model, tokenizer, config, cls)
    else:
        rollout = sample(model, tokenizer, config, cls)
        assert rollout.turn_points.isnan().any(dim=1).nonzero().flatten().tolist() == [3] * bool(message)
        close_all(rollout.environments, config.reward_timeout)
    assert time.monotonic() - start < 10
    assert Quiet.closed == 8 - (cls.place == "init"), "each that was made is closed, once"


@pytest.mark.parametrize("members,message", [
    ({"reset": None}, "needs a method reset"), ({"say": None}, "and one that is a tool"),
    ({"say": lambda self, text: "x"}, "no docstring"),
    ({"__init__": lambda self, address: None}, "missing a required argument: 'address'"),
    ({"reset": lambda self, level, **columns: None}, "needs the column level, which no example has"),
])
def test_a_class_that_cannot_be_an_environment_is_one_line_at_the_start(members, message):
    cls = type("Mine", (Quiet,), members)
    with pytest.raises(ValueError, match=rf"^--environment=python:Mine: .*{message}.*$"):
        refuse_missing_columns("python:Mine", load_environment(cls), [{"prompt": "p"}])


def test_different_beginnings_of_a_group_end_the_run(model, tokenizer, settings):
    numbers, Quiet.closed = itertools.count(), 0
    cls = bad("x", None, reset=lambda self, **columns: f"{next(numbers)}")
    with pytest.raises(RunError, match=r"reset returned '.*' and '.*' for one prompt; let them depend on columns"):
        sample(model, tokenizer, replace(settings, reward_errors="none"), cls)
    assert Quiet.closed == 4


def test_when_memory_runs_out_instances_are_closed_and_begun_again(model, tokenizer, settings, monkeypatch, capsys):
    expected, real = sample(model, tokenizer, settings, Parrot), Shared.sample_batches

    def short_of_memory(policy, prompts, config, *args, **options):
        rollout = real(policy, prompts, config, *args, **options)
        if config.generation_batch_size > 4:
            raise MemoryError("out of memory")
        return rollout

    monkeypatch.setattr(Shared, "sample_batches", short_of_memory)
    again = sample(model, tokenizer, settings, Parrot)
    assert again.completions == expected.completions and torch.equal(again.turn_points, expected.turn_points)
    assert capsys.readouterr().out == "out of memory: --generation_batch_size 8 -> 4, trying again\n"
    Quiet.born = Quiet.closed = 0
    rollout = sample(model, tokenizer, settings, bad("x", None, reset=lambda self, **columns: f" group {(Quiet.born - 1) // 4}"))
    assert (Quiet.born, Quiet.closed) == (16, 8)
    texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)]
    assert [text[-8:] for text in texts] == [" group 2", " group 3"], "what the instances said that are open"


def test_instances_are_closed_after_ctrl_c_and_a_crash(model, tokenizer, settings):
    for error in KeyboardInterrupt, MemoryError:
        Quiet.closed = 0
        engine = make_engine("plain", model, tokenizer)
        engine.sample = lambda *_, error=error, **__: throw(error())
        with pytest.raises(error):
            sample_with_environment(engine, bad("x", None), [{"prompt": "p"}], settings, [(0, 0)], num_completions=4)
        assert Quiet.closed == 4


def test_what_reset_returns_has_a_place_in_every_form_of_prompt(tokenizer, settings, model):
    cls = bad("x", None, reset=lambda self, **columns: " It is dark.")
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "Go."}]
    for prompt in "Go.", chat:
        prompt_ids = encode_prompt(tokenizer, start(tokenizer, settings, cls, {"prompt": prompt}).prompt)
        assert tokenizer.decode(prompt_ids).removesuffix("\nassistant: ").endswith("Go. It is dark.")
    assert chat[-1]["content"] == "Go."


def test_the_text_of_reset_counts_as_a_part_of_the_prompt(model, tokenizer, settings):
    wordy, policy = bad("x", None, reset=lambda self, **columns: "x" * 20), make_engine("plain", model, tokenizer)

    def sample(limit):
        return sampler_of(policy, Scoring([], [], wordy, None, limit))([{"prompt": "abc"}], settings, [(0, 0)])

    assert sample(24).prompt_ids.shape[1] == 24           # with BOS
    with pytest.raises(RunError, match="with the text of reset a prompt has 24 tokens, more than --max_prompt_length=23;"):
        sample(23)


def test_an_environment_gets_the_columns_it_asks_for():
    examples = [{"prompt": "p", "completion": "c", "topic": "t", "answer": "3"}, {"prompt": "q", "answer": "4"}]
    (first, second) = responders(lambda conversation, topic: (conversation, topic), examples)
    assert first("x") == ("x", "t") and second("x") == ("x", None)
    (first, _) = responders(lambda conversation, **columns: columns, examples)
    assert first([]) == {"topic": "t", "answer": "3"}, "never the demonstration"
    (first, _) = responders(lambda conversation, level, topic=1: (level, topic), examples)
    assert first([]) == (None, "t"), "other examples have the column"
    refuse_missing_columns("mine", lambda conversation, topic: None, examples)


def test_demonstrations_of_the_game_are_games_and_its_ranges_are_held_out(tokenizer, settings):
    train_set, test_set = (load_examples("guess_letter", split) for split in ("train", "test"))
    assert len({e["prompt"] for e in train_set}) == 108 and len({e["prompt"] for e in test_set}) == 27
    assert not {e["prompt"] for e in train_set} & {e["prompt"] for e in test_set}
    for example in train_set[:200]:
        (respond,) = responders(guess_letter, [example])
        game = example["completion"]
        game = [{"role": "assistant", "content": game}] if isinstance(game, str) else game           # a first guess that is right
        turns = [message["content"] for message in game[::2]]
        conversation = Conversation(tokenizer, example["prompt"], respond, replace(settings, max_turns=20), [1])
        messages, points = run_scripted_turns(conversation, turns)
        assert messages == game and points == pytest.approx(1 - 0.1 * (len(turns) - 1))
        assert correctness([messages], answer=[example["answer"]]) == [1.0]
        low, high = example["prompt"].strip("?").split("-")
        assert 8 <= ord(high) - ord(low) + 1 <= 16 and low <= example["answer"] <= high
    for nonsense in "hm", "<answer>ab</answer>", "<answer></answer>", "<answer>7</answer>":
        assert guess_letter([{"role": "assistant", "content": nonsense}], answer="c") == ("a letter", -0.2)
