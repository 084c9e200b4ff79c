"""Settings of conversations."""

import pytest

from config import GRPOConfig


@pytest.fixture
def settings():
    return GRPOConfig(
        generation_max_length=60, environment="calculator", max_turns=4, generation_top_k=0, generation_top_p=1.0,
        generation_temperature=1.0,
    )
