"""The reward functions of others in foreign_rewards.py, unchanged, trained with for a step."""

import json
import math
import sys
from pathlib import Path

import pytest
from conftest import start_run

from runs.folder import read_jsonl
from train import grpo_training_step

FILE = Path(__file__).with_name("foreign_rewards.py")
NAMES = [
    "reward_of_ids", "reward_of_column", "reward_of_sums", "reward_by_request", "reward_with_schedule", "accuracy_reward",
    "code_reward", "compute_score", "BrevityORM",
]


def rows():
    for n in range(8):
        yield {
            "prompt": [{"role": "system", "content": "Answer."}, {"role": "user", "content": f"{n}+1=?"}],
            "question": f"{n}+1=?", "answer": str(n + 1), "solution": str(n + 1), "task": ["sum", "other"][n % 2],
            "verification_info": {"language": "e", "test_cases": {"inputs": [1, 2]}},
            "data_source": "openai/gsm8k", "extra_info": {"index": n},
        }


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(path)


def test_reward_functions_of_others_run_unchanged_through_a_step(data, tmp_path):
    run = start_run(
        tmp_path, "--use_grpo", "--cold_start_steps", "0", "--dataset", data, "--generation_max_length", "24",
        "--reward_timeout", "30", "--reward_functions", *(f"{FILE}:{name}" for name in NAMES),
    )
    run.folder.open(0)
    module = sys.modules[f"file {FILE}"]
    module.CALLS.clear()
    metrics, experience = grpo_training_step(run, next(run.batches))
    run.log_step(metrics | {"skipped": 0}, experience)
    assert math.isfinite(metrics["grad_norm"]) and metrics["reward_errors"] == 0
    examples, points = experience.examples, experience.groups.per_function
    texts, ids = experience.rollout.completions, experience.rollout.completion_mask.sum(dim=1).tolist()
    assert points["reward_of_ids"].flatten().tolist() == ids
    is_sum = [example["task"] == "sum" for example in examples]
    assert (~points["reward_of_sums"].isnan()).all(dim=1).tolist() == is_sum and 0 < sum(is_sum) < 4
    prompts = [example["prompt"][-1]["content"] for example in examples for _ in range(4)]
    requested = [1 / (1 + len(p) + len(t)) for p, t in zip(prompts, texts, strict=True)]
    assert points["reward_by_request"].flatten().tolist() == pytest.approx(requested)
    assert points["code_reward"].flatten().tolist() == [1.0 + ("e" in text) for text in texts]
    brevity = [max(0, 1 - len(text) / 20) for text in texts]
    assert points["BrevityORM"].flatten().tolist() == pytest.approx(brevity)
    solutions = [example["solution"] for example in examples for _ in range(4)]
    (call,) = module.CALLS
    assert call == {"solution": solutions, "question": prompts}
    for name in "reward_of_column", "accuracy_reward", "compute_score":
        assert points[name].isfinite().all(), name
    hits = [s in t for s, t in zip(solutions, texts, strict=True)]
    assert metrics["hit_rate"] == sum(hits) / len(hits) == pytest.approx(metrics["reward/compute_score/acc"])
    rest = 1 - 1 / run.phases[-1].steps                    # after one of the steps
    assert points["reward_with_schedule"].flatten().tolist() == pytest.approx([hit * rest for hit in hits])
    records = read_jsonl(run.folder.path / "rollouts.jsonl")
    assert [r["extra"]["gold"] for r in records] == solutions and {"compute_score/index"} < set(records[0]["extra"])
