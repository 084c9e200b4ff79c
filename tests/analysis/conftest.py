"""A saved model for the tests of this folder."""

import pytest

from config import ModelConfig
from engine.policy import load_policy, save_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "model"
    save_policy(*load_policy(ModelConfig()), path)
    return str(path)
