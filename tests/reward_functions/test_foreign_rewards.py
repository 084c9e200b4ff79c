"""The reward functions of others in foreign_rewards.py, unchanged."""

from pathlib import Path

import pytest
from test_rewards import rollout_of
from wrapped_rewards import call_and_score

from reward_functions.calling import Reports
from reward_functions.loading import load_reward_function, require_columns

FILE = Path(__file__).with_name("foreign_rewards.py")
ROW = {
    "prompt": [{"role": "user", "content": "6+1=?"}], "answer": "7", "solution": "7",
    "verification_info": {"language": "e", "inputs": [1, 2]}, "data_source": "openai/gsm8k",
}
OTHER = ROW | {"answer": "x", "solution": "x"}
POINTS = {                      # of two completions of the first row, and two of the other one
    "accuracy_reward": [1, 0, None, None],
    "code_reward": [1, 2, 1, 2],
    "compute_score": [1, 0, 0, 0],
}


@pytest.mark.parametrize("name", POINTS)
def test_reward_functions_of_others_run_unchanged(name):
    function, reports = load_reward_function(f"{FILE}:{name}"), Reports()
    examples = [ROW | {"extra_info": {"index": 4}}, OTHER | {"extra_info": {"index": 5}}]
    require_columns([function], examples, "the data")
    rollout = rollout_of("#### 7", "maybe", "#### 7", "maybe")
    _, per_function = call_and_score([function], [1.0], rollout, examples, reports=reports, timeout=30.0)
    assert [None if p != p else p for p in per_function[name].flatten().tolist()] == POINTS[name]
    if name == "compute_score":
        assert [row["compute_score/index"] for row in reports.extra] == [4, 4, 5, 5]
