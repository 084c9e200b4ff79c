"""Lines of rollouts.jsonl."""

import dataclasses
import json
import math
import tracemalloc

import pytest
import torch
from transformers import AutoModelForCausalLM

from config import Config, GRPOConfig
from conftest import length_reward, made_up_rollout, run_folder
from reward_functions.calling import Reports
from experience import Groups, compute_experience, shape_rewards
from grpo import compute_group_advantages
from runs.metrics import summarize_groups
from runs.folder import completion_records, cut_after, held_out_text, read_jsonl, read_steps


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


def test_a_group_is_tied_by_the_rewards_that_are_learned_from(base):
    config = GRPOConfig(generation_max_length=12, overlong="penalise", reward_clip=2.0)
    rollout, scores = made_up_rollout([3, 4], [3, 12, 3, 3]), torch.tensor([[1.0, 1.0], [3.0, 4.0]])
    rewards = shape_rewards(config, rollout, scores)
    groups = Groups([{"prompt": "a"}, {"prompt": "b"}], rollout, scores, {"points": scores}, rewards, reports=Reports())
    experience = compute_experience(groups, compute_group_advantages(rewards), config, base.engine, base.ranks)
    assert [(r["reward"], r["tied"]) for r in completion_records(experience)] == [
        (1.0, False), (1.0, False), (3.0, True), (4.0, True)], "one penalised for its length; two clipped to 2"


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


DAMAGED = [b"no JSON\n", b"\0" * 64 + b"\n", b"\xff\xfe\n", b"[1]\n", b"\n", b'{"kl": 1}\n', b'{"step": "3", "phase": "grpo"}\n',
           b'{"step": true, "phase": "grpo"}\n', b'{"step": 3, "phase": null}\n', b'{"step": 3, "phase": "gr']


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_from_a_damaged_line_on_a_file_is_left_out_with_one_line(tmp_path, capsys, damaged):
    path, line = tmp_path / "metrics.jsonl", b'{"step": %d, "phase": "grpo", "kl": NaN}\n'
    path.write_bytes(line % 1 + damaged + line % 2)
    for _ in range(2):
        assert [record["step"] for record in read_jsonl(path)] == [1]
    assert capsys.readouterr().err == f"{path}: line 2 is damaged, as a kill leaves it; left out from there on\n"
    cut_after(path, 3)
    assert path.read_bytes() == line % 1


def rollouts(path, steps, text=""):
    """Four completions of each step."""
    lines = [json.dumps({"step": s, "phase": "grpo", "completions_of_step": 4, "completion": text}) + "\n" for s in steps for g in range(4)]
    path.write_text("".join(lines))
    return path, [line.encode() for line in lines]


def steps_of(path, **options):
    return [(records[0]["step"], len(records)) for records in read_steps(path, **options)]


def test_steps_are_read_one_at_a_time(tmp_path):
    path, _ = rollouts(tmp_path / "rollouts.jsonl", range(1, 41), text="x" * 100_000)
    tracemalloc.start()
    assert steps_of(path) == [(step, 4) for step in range(1, 41)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_500_000, f"{peak} bytes for steps of 400 kB"


def test_lines_of_steps_that_are_not_wanted_are_not_parsed(tmp_path, capsys):
    path, lines = rollouts(tmp_path / "rollouts.jsonl", range(1, 8))
    path.write_bytes(b"".join(lines).replace(b'"step": 3, "phase": "grpo"', b'"step": 3, "phase": "grpo" broken'))
    assert steps_of(path, every=3) == [(1, 4), (4, 4), (7, 4)] and capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", [
    lambda lines: lines[:-1], lambda lines: [*lines[:-3], lines[-3][:40]], lambda lines: [*lines[:-4], lines[-4][:4]],
    lambda lines: [*lines[:-2], b"\0" * 40 + b"\n"],
], ids=range(4))
def test_a_step_that_was_being_written_is_left_out_and_no_other(tmp_path, capsys, kept):
    path, lines = rollouts(tmp_path / "rollouts.jsonl", (1, 2, 3))
    path.write_bytes(b"".join(kept(lines)))
    assert steps_of(path) == [(1, 4), (2, 4)]
    assert "saved step 3 is not whole; left out from there on" in capsys.readouterr().err
    cut_after(path, 2)
    assert path.read_bytes() == b"".join(lines[:-4])


def test_groups_that_are_tied_and_all_right_are_counted(base):
    scores = torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    groups = Groups([{"prompt": "a"}] * 3, made_up_rollout([3] * 3, [3] * 6), scores, {"correctness": scores}, scores, reports=Reports())
    experience = compute_experience(groups, compute_group_advantages(scores), GRPOConfig(), base.engine, base.ranks)
    metrics = summarize_groups(groups, experience)
    assert (metrics["tied_groups"], metrics["tied_right_groups"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    unknown = summarize_groups(dataclasses.replace(groups, per_function={"length": scores}), experience)
    assert math.isnan(unknown["tied_right_groups"])


@pytest.mark.slow
def test_held_out_points_of_ones_own_reward_have_an_interval(tmp_path, capsys):
    folder = run_folder(
        tmp_path / "run", "--use_grpo", "--reward_functions", length_reward(tmp_path), "--cold_start_steps", "0", "--max_steps", "1")
    line = [line for line in read_jsonl(folder / "metrics.jsonl") if line["phase"] == "eval"][-1]
    low, mean, high = (line[f"eval_{name}/length"] for name in ("reward_low", "reward", "reward_high"))
    assert low < mean < high
    printed, shown = capsys.readouterr().out, f"length {mean:.3f} [{low:.3f}, {high:.3f}] points"
    assert f"after GRPO            {shown}" in printed and f"held out at step 1: {shown}" in printed
    equal = line | {"eval_reward_low/length": None, "eval_reward_high/length": None}
    assert held_out_text(equal, Config.of(use_grpo=True, reward_functions=["diversity"])) == f"length {mean:.3f} points"
