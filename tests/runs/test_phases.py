"""The learning rate of a phase, and its evaluations."""

import itertools
import math

import pytest

from config import Config


from runs import phases


@pytest.mark.parametrize("schedule,last", [("constant", 1.0), ("linear", 1 / 8), ("cosine", 0.0381)])
def test_the_learning_rate_rises_falls_and_is_never_zero(schedule, last):
    factors = [phases.learning_rate_factor(step, steps=10, warmup=2, schedule=schedule) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0] and factors[-1] == pytest.approx(last, abs=1e-4)
    assert all(left >= right > 0 for left, right in itertools.pairwise(factors[1:]))


@pytest.mark.parametrize("size", [1, 2, 8, 32, 64, 128, 256])
def test_the_demonstration_is_evaluated_a_twentieth_of_a_run_apart_and_its_cold_start_as_often_as_every_5_steps_of_64(size):
    config = Config.from_profile("demo", use_grpo=True, batch_size=size)
    cold_start, grpo_phase = phases.plan_phases(config, 9000)
    assert cold_start.eval_steps == math.ceil(5 * 64 / size), "the accuracy that ends it is measured after the same examples"
    assert 14 <= grpo_phase.steps / grpo_phase.eval_steps <= 22
    cold_start, grpo_phase = phases.plan_phases(Config.from_profile("demo", use_grpo=True, cold_start_accuracy=1.0, eval_steps=7), 9000)
    assert cold_start.eval_steps == grpo_phase.eval_steps == 7
    assert {phase.eval_steps for phase in phases.plan_phases(Config.from_profile("demo", use_grpo=True, eval_steps=0), 9000)} == {0}
