"""The learning rate of a phase."""

import itertools

import pytest

from runs import phases


@pytest.mark.parametrize("schedule,last", [("constant", 1.0), ("linear", 1 / 8), ("cosine", 0.0381)])
def test_the_learning_rate_rises_falls_and_is_never_zero(schedule, last):
    factors = [phases.learning_rate_factor(step, steps=10, warmup=2, schedule=schedule) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0] and factors[-1] == pytest.approx(last, abs=1e-4)
    assert all(left >= right > 0 for left, right in itertools.pairwise(factors[1:]))
