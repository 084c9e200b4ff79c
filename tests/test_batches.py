"""The order of examples, shuffled or not."""

import random

from data import Batches
from sources.training_data import example_key


def test_prompts_that_say_the_same_have_one_key_and_others_have_not():
    same = ["What is  2+2?", "what is\n2+2? ", [{"role": "user", "content": "What is 2+2?"}]]
    assert len({example_key({"prompt": prompt}) for prompt in same}) == 1
    others = ["What is 2+3?", [{"role": "system", "content": "What is 2+2?"}],
              [{"role": "user", "content": "What is"}, {"role": "user", "content": "2+2?"}]]
    assert len({example_key({"prompt": prompt}) for prompt in [same[0], *others]}) == 4


def test_the_order_depends_on_seed_and_position_alone():
    def as_it_always_was(seed):
        for epoch in range(3):
            order = list(range(7))
            random.Random(f"{seed} {epoch}").shuffle(order)
            yield from order

    for seed in 0, 1, 12:
        batches = Batches(list(range(7)), batch_size=3, seed=seed)
        assert [e for _ in range(7) for e in next(batches)] == list(as_it_always_was(seed))
        assert batches.position == 21 and batches.take(0) == []
        batches = Batches(list(range(7)), batch_size=3, seed=seed)
        batches.position = 12                             # the whole state
        assert [e for _ in range(3) for e in next(batches)] == list(as_it_always_was(seed))[12:]
