"""
XLA: the numbers of a plain CPU, one program for each size, and a run from end to end, on one device and on four.

make test-tpu runs this in an environment of its own, on XLA's CPU device, which is compiled for as a TPU is.
"""

import copy
import json
import os
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

if not os.environ.get("PJRT_DEVICE"):
    pytest.skip("PJRT_DEVICE is not set: make test-tpu does that", allow_module_level=True)
pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-tpu does that")

from torch_xla.debug import metrics

from runs import plan, setup
import train
from conftest import PROMPTS, QUICK, length_reward, run_process, start_run
from config import GRPOConfig
from engine import make_engine
from engine.devices import best_device
from engine.network import move
from model import ValueHead
from logprobs import completion_lengths
from runs.folder import read_jsonl

DEVICE = best_device()                                    # before any backward pass on the CPU
CPU = torch.device("cpu")
EARLY = list(range(1, 30))                                # stop ids, so that completions end at different times
RUN = [*QUICK, "--use_grpo", "--use_kl_penalty", "--cold_start_steps", "3", "--max_steps", "3", "--generation_max_length", "12"]
RUN += ["--reward_weights", "1", "--learning_rate", "1e-4", "--reward_functions"]


def compilations() -> int:
    """Programs compiled so far."""
    return (metrics.metric_data("CompileTime") or [0])[0]


def fallbacks() -> set[str]:
    """Operations that XLA did not have, so that the CPU did them. Reading a number is counted among them and is none."""
    return {name for name in metrics.counter_names() if name.startswith("aten::")} - {"aten::_local_scalar_dense"}


def on_both(model) -> list:
    """A model on the CPU, and a copy of it on XLA."""
    return [model, move(copy.deepcopy(model), DEVICE)]


@pytest.mark.parametrize("distribution", [dict(), dict(temperature=0.8, top_k=50, top_p=0.9)], ids=["everything", "restricted"])
def test_log_probabilities_and_gradients_are_those_of_plain_torch(architecture, tokenizer, settings, distribution):
    """With entropy, exact KL and values, over several groups and rows out of order."""
    _, model = architecture
    rollout = replace(make_engine("shared", model, tokenizer).sample(PROMPTS, settings, seeds=0), distribution=distribution)
    rows = torch.tensor([0, 9, 3, 4, 5, 15, 14])
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(0.9)
    torch.manual_seed(0)
    slopes = torch.randn(4, len(rows), rollout.completion_mask.shape[1])
    head = ValueHead(model.config.get_text_config().hidden_size)
    torch.nn.init.normal_(head.layers[-1].weight)
    found = []
    for here, other, value_head in zip(on_both(model), on_both(reference), [head, copy.deepcopy(head).to(DEVICE)], strict=True):
        policy = make_engine("shared", here, tokenizer)
        policy.value_head = value_head
        new = policy.forward(rollout, rows, policy.like(other))
        parts = torch.stack([new.logp, new.entropy, new.kl, new.values])
        assert parts.device == CPU
        (parts * slopes).sum().backward()
        found.append((parts.detach(), [p.grad.cpu() for module in (here, value_head) for p in module.parameters()]))
    (plain, plain_gradients), (xla, xla_gradients) = found
    torch.testing.assert_close(xla, plain, atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(xla_gradients, plain_gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-5, f"{(ours - theirs).norm()} of {theirs.norm()}"
    assert not fallbacks()


def test_sampler_and_trainer_agree_with_each_other_and_with_plain_torch(architecture, tokenizer):
    """From a queue, so that the cache is joined and rearranged; three prompts, three completions each: sizes are rounded."""
    _, model = architecture
    model.generation_config.eos_token_id = EARLY
    judges = [make_engine("shared", here, tokenizer) for here in on_both(model)]
    config = GRPOConfig(
        num_completions_per_prompt=3, generation_batch_size=6, generation_max_length=40, generation_temperature=1.0,
        generation_top_k=0, generation_top_p=1.0,
    )
    rollout = judges[1].sample(PROMPTS[:3], config, seeds=3)
    assert len(set(rollout.completion_mask.sum(dim=1).tolist())) > 3
    for judge in judges:
        assert (rollout.sampling_logp - judge.log_probs(rollout).logp).abs().max() < 1e-4
    assert not fallbacks()


def test_tied_weights_stay_tied_on_the_way_there_and_back(model):
    for where in DEVICE, CPU:
        move(model, where)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert model.get_output_embeddings().weight.device.type == where.type


def test_no_program_is_compiled_twice(tmp_path, monkeypatch):
    """Steps of ragged completions: after the first ones nothing new is compiled."""
    monkeypatch.setattr(setup, "build_policy", lambda network, tokenizer, *_, max_tokens, **others: (               # a run below has it
        make_engine("shared", network, tokenizer, max_tokens=max_tokens), None))
    run = start_run(
        tmp_path, "--use_grpo", "--use_kl_penalty", "--cold_start_steps", "0", "--generation_max_length", "14",
        "--reward_functions", length_reward(tmp_path), "--reward_weights", "1", "--learning_rate", "4e-4",
    )
    assert run.policy.device == DEVICE
    run.policy.model.generation_config.eos_token_id = EARLY
    counts, shapes = [], set()
    for _ in range(9):
        _, experience = train.grpo_training_step(run, next(run.batches))
        counts.append(compilations())
        shapes.add(tuple(completion_lengths(experience.table.mask).tolist()))
    assert len(shapes) == 9, "every step had completions of other lengths"
    assert counts[-1] == counts[4], f"programs after each step: {counts}"
    run.save_checkpoint()
    assert compilations() == counts[-1], "the update is over: fetching weights computes nothing"


def run_on(device, folder, monkeypatch):
    """metrics.jsonl of a run in this process."""
    monkeypatch.setattr(plan, "best_device", lambda *_: device)
    train.main([*RUN, length_reward(folder), "--output_dir", str(folder / "run")])
    return read_jsonl(folder / "run/metrics.jsonl")


def same_run(ours: list[dict], theirs: list[dict]) -> None:
    """The same numbers to rounding, over cold start, evaluations and GRPO."""
    assert [(m["step"], m["phase"]) for m in ours] == [(m["step"], m["phase"]) for m in theirs] and len(ours) == 9
    assert all(m["grad_norm"] > 1e-3 for m in ours if m["phase"] != "eval"), "there is something to compare"
    for mine, other in zip(ours, theirs):
        assert mine.keys() == other.keys()
        for name in mine.keys() - {"peak_memory_gb", "phase", "advice"}:
            if not name.endswith("_seconds") and mine[name] is not None:
                assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), (mine["step"], name)


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """A run on the plain CPU, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        return run_on(CPU, tmp_path_factory.mktemp("plain"), patch)


def test_a_run_is_that_of_a_plain_cpu_and_its_checkpoint_loads_anywhere(plain_run, tmp_path, monkeypatch):
    same_run(run_on(DEVICE, tmp_path, monkeypatch), plain_run)
    (newest, _) = sorted((tmp_path / "run/checkpoints").iterdir(), reverse=True)
    state = torch.load(newest / "state.pt", weights_only=True)
    assert state["progress"]["step"] == 6
    assert {tensor.device for tensor in tree_leaves(state) if isinstance(tensor, torch.Tensor)} == {CPU}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/final")
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight


FOUR = """
import json, sys
import torch_xla
import train
from runs.command_line import parse_config

run = train.set_up(parse_config(sys.argv[1:]))
train.training_loop(run)
for parameter in run.policy.model.parameters():
    pair = parameter, run.policy.optimizer.state[parameter]["exp_avg"]
    print("SPEC", json.dumps([list(parameter.shape), *map(torch_xla._XLAC._get_xla_sharding_spec, pair)]))
"""


def test_four_devices_share_the_weights_and_give_the_numbers_of_one(plain_run, tmp_path):
    """In a process of its own: how many devices there are is settled when XLA starts."""
    done = run_process("-c", FOUR, *RUN, length_reward(tmp_path), "--output_dir", tmp_path / "run", CPU_NUM_DEVICES="4")
    same_run(read_jsonl(tmp_path / "run/metrics.jsonl"), plain_run)
    specs = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("SPEC")]
    assert len(specs) > 20
    for shape, weight, moment in specs:
        if len(shape) > 1:
            cut = [4 if side == shape.index(max(shape)) else 1 for side in range(len(shape))]
            assert f"devices={cut}".replace(" ", "") in weight.replace(" ", ""), (shape, weight)
            sides = [f"devices={part}".replace(" ", "") for part in (cut, cut[::-1])]
            assert any(side in moment.replace(" ", "") for side in sides), (shape, moment)       # the compiler chooses the side
