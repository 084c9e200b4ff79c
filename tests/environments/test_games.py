"""The guessing game and its demonstrations."""

from dataclasses import replace

import pytest

from sources import load_examples
from environments.conversations import Conversation
from environments.tools import guess_letter
from environments.instances import responders
from rewards import correctness
from scripted_turns import run_scripted_turns


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
