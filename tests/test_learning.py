"""Every loss learns: held-out accuracy rises beyond its interval, from the same cold start; bench/losses.py has more seeds."""

import sys
from pathlib import Path

import pytest

from grpo import LOSSES

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from losses import WEAK_REWARD, distance, learn, write_task

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]           # in make test the built-in model learns a task of one token
SEED = 0


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder with the data, where runs are kept to be used again."""
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_raises_held_out_accuracy_beyond_its_interval(task, loss_type):
    before, after = learn(task, SEED, loss_type, f"--use_kl_penalty false --loss_type {loss_type} --max_steps 60")
    assert 0.1 < before["eval_accuracy"] < 0.4, "the cold start leaves something to learn"
    assert after["eval_accuracy"] > before["eval_accuracy_high"]


def test_a_kl_coefficient_of_a_hundredth_keeps_the_policy_nearer_to_the_reference(task):
    for coefficient in "0", "0.01":
        learn(task, SEED, f"kl{coefficient}", f"{WEAK_REWARD} --max_steps 80 --kl_penalty_coef {coefficient}")
    assert distance(task, SEED, "kl0.01") < 0.95 * distance(task, SEED, "kl0")
