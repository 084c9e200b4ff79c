"""The order of examples: shuffled batches, and the memory of rewards by prompt."""

import json
import random
import statistics
from collections import Counter

import pytest
from conftest import start_run

import train
from sources.batches import PromptMemory, ShuffledBatches, prompt_key


def test_prompts_that_say_the_same_have_one_key_and_others_have_not():
    same = ["What is  2+2?", "what is\n2+2? ", [{"role": "user", "content": "What is 2+2?"}]]
    assert len({prompt_key(prompt) for prompt in same}) == 1
    others = ["What is 2+3?", [{"role": "system", "content": "What is 2+2?"}], [5, 6], [5, 7],
              [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]]
    assert len({prompt_key(prompt) for prompt in [same[0], *others]}) == 6


def test_without_a_memory_the_order_depends_on_seed_and_position_alone():
    def as_it_always_was(seed):
        for epoch in range(3):
            order = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(order)
            yield from order

    for seed in 0, 1, 12:
        batches = ShuffledBatches(list(range(7)), batch_size=3, seed=seed)
        assert [e for _ in range(7) for e in next(batches)] == list(as_it_always_was(seed))
        assert batches.position == 21 and batches.take(0) == []
        batches = ShuffledBatches(list(range(7)), batch_size=3, seed=seed)
        batches.position = 12                             # the whole state
        assert [e for _ in range(3) for e in next(batches)] == list(as_it_always_was(seed))[12:]


def examples_of(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


def test_a_memory_of_nothing_leaves_the_order_as_it_is():
    examples = examples_of(*map(str, range(10)))
    plain, preferring = (ShuffledBatches(examples, 4, 0, memory) for memory in (None, PromptMemory()))
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]
    preferring.memory.record(["3"], [[0.7, 0.7]])         # one reward everywhere says nothing about any prompt
    assert [next(plain) for _ in range(10)] == [next(preferring) for _ in range(10)]


def test_the_chance_of_a_prompt_is_the_formula_of_the_docstring():
    generator = random.Random(0)
    prompts = [f"prompt {i}" for i in range(5)]
    rounds = [[[generator.choice([0.3, 2.3, 0.5]) for _ in range(4)] for _ in prompts] for _ in range(3)]
    memory, all_of = PromptMemory(), {prompt: [] for prompt in prompts}
    for groups in rounds:
        memory.record(prompts, groups)
        for prompt, group in zip(prompts, groups):
            all_of[prompt] += group
    lowest, highest = 0.3, 2.3
    for prompt, rewards in all_of.items():
        expected = 4 * statistics.pvariance([*rewards, lowest, highest]) / (highest - lowest) ** 2
        assert memory.probability(prompt) == pytest.approx(expected, rel=1e-12) and 0 < expected <= 1
    assert memory.probability("never asked") == 1.0


def test_a_memory_leaves_out_what_could_not_be_scored_and_knows_prompts_by_what_they_say():
    memory, other = PromptMemory(), PromptMemory()
    memory.record(["a b", "c"], [[0.0, float("nan"), 1.0], [float("nan")] * 3])
    other.record(["A\nb"], [[0.0, 1.0]])
    assert memory.probability("a b") == other.probability("a  b") and (memory.lowest, memory.highest) == (0.0, 1.0)
    assert memory.probability("c") == 1.0
    memory.record([[5, 6]], [[1.0, 1.0]])                 # a truncated prompt is token ids
    assert memory.probability([5, 6]) == 0.75 and memory.probability([5, 7]) == 1.0


def test_prompts_are_handed_out_by_their_chance_and_none_is_ever_forgotten():
    memory, examples = PromptMemory(), examples_of("never", "mixed", "always", "new")
    memory.record(["never", "mixed", "always"], [[0.0] * 8, [0.0, 1.0] * 4, [1.0] * 18])
    batches = ShuffledBatches(examples, 5, seed=0, memory=memory)
    counts = Counter(example["prompt"] for _ in range(1000) for example in next(batches))
    epochs = batches.position / 4
    assert abs(counts["mixed"] - epochs) <= 1 and abs(counts["new"] - epochs) <= 1
    for prompt in "never", "always":
        p = 1 / 10 if prompt == "never" else 19 / 20
        expected = 4 * p * (1 - p) * epochs
        assert abs(counts[prompt] - expected) < 4 * expected**0.5


def test_position_and_memory_are_the_whole_state():
    def outcome(prompt, at):
        return [float((hash_of(prompt) + i + at) % 3 == 0) if prompt > "5" else 0.0 for i in range(4)]

    def hash_of(prompt):
        return sum(map(ord, prompt))

    def go_on(batches, steps):
        taken = []
        for _ in range(steps):
            batch = next(batches)
            batches.memory.record([e["prompt"] for e in batch], [outcome(e["prompt"], batches.position) for e in batch])
            taken += [e["prompt"] for e in batch]
        return taken

    examples = examples_of(*map(str, range(10)))
    whole = ShuffledBatches(examples, 3, 7, PromptMemory())
    first, rest = go_on(whole, 9), None
    state = json.loads(json.dumps(vars(whole.memory)))    # plain numbers and nothing else
    resumed = ShuffledBatches(examples, 3, 7, PromptMemory(**state))
    resumed.position = whole.position
    rest = go_on(whole, 12)
    assert go_on(resumed, 12) == rest and whole.position == resumed.position > (9 + 12) * 3, "some were passed over"
    assert go_on(ShuffledBatches(examples, 3, 7, PromptMemory()), 21) == first + rest


def test_what_dynamic_sampling_replaces_is_remembered_too(tmp_path):
    (tmp_path / "none.py").write_text("def none(completions, **columns):\n    return [0.5] * len(completions)\n")
    flags = f"--use_grpo --cold_start_steps 0 --dynamic_sampling 2 --reward_functions {tmp_path}/none.py:none"
    run = start_run(tmp_path, *flags.split())
    train.grpo_training_step(run, next(run.batches))
    earned = run.progress.prompt_memory.earned
    assert len(earned) == 3 * 4 and set(earned.values()) == {(4, 2.0, 1.0)}
