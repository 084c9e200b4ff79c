"""A finished run for the tests of its files."""

import pytest
from conftest import length_reward, run_folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A short GRPO run with everything on."""
    path = tmp_path_factory.mktemp("run")
    folder = path / "out"
    flags = (
        f"--use_grpo --use_kl_penalty --max_steps 3 --save_steps 1 --keep_checkpoints 2 --log_rollouts_every 1 "
        f"--report_to tensorboard --reward_functions correctness {length_reward(path)} --reward_weights 1 0.5"
    )
    return run_folder(folder, *flags.split())
