"""Lines of rollouts.jsonl."""

import json
import tracemalloc

import pytest
import torch
from transformers import AutoModelForCausalLM

from runs.records import cut_after, read_jsonl


def test_rollouts_hold_whole_groups(finished):
    records = read_jsonl(finished / "rollouts.jsonl")
    assert len(records) == 3 * 4 * 4 and {r["step"] for r in records} == {4, 5, 6}
    for start in range(0, len(records), 4):
        group = records[start : start + 4]
        assert len({r["prompt"] for r in group}) == 1
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-5)
        for r in group:
            weights = {"correctness": 1.0, "length": 0.5}
            assert r["reward"] == pytest.approx(sum(weights[name] * points for name, points in r["rewards"].items()))


def test_rollouts_hold_the_log_probabilities_and_entropies_after_the_update(finished):
    """The last step's against the final model, by transformers alone; the run samples at temperature 1 from everything."""
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    for r in read_jsonl(finished / "rollouts.jsonl")[-3:]:
        logits = model(torch.tensor([r["prompt_ids"] + r["completion_ids"]])).logits[0, len(r["prompt_ids"]) - 1 : -1]
        log_p = logits.log_softmax(-1)
        own = [row[token].item() for row, token in zip(log_p, r["completion_ids"])]
        assert r["logp_after"] == pytest.approx(own, abs=1e-4)
        assert r["logp_after"] != pytest.approx(r["sampling_logp"], abs=1e-4), "there was an update"
        assert r["entropies"] == pytest.approx((-log_p.exp() * log_p).sum(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("last_step,kept", [(0, 0), (1, 2), (2, 4), (7, 6)])
def test_lines_of_later_steps_are_cut_off_without_reading_the_file_into_memory(tmp_path, last_step, kept):
    path = tmp_path / "rollouts.jsonl"
    lines = [json.dumps({"step": step, "phase": "grpo", "completion": "x" * 2_000_000}) + "\n" for step in (1, 1, 2, 2, 3, 3)]
    path.write_text("".join(lines) + lines[0][:100])                # a crash cut off the last line
    tracemalloc.start()
    cut_after(path, last_step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.read_text() == "".join(lines[:kept])
    assert peak < 9_000_000, f"{peak} bytes for lines of 2 MB"


def test_no_file_is_nothing_to_cut(tmp_path):
    cut_after(tmp_path / "skipped.jsonl", 3)
    assert not (tmp_path / "skipped.jsonl").exists()
