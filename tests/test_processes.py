"""Several processes: the same run as one. They are real ones, on the CPU; torchrun starts those of two tests."""

import json
import math
import os
import re
import shutil
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch

import train
from conftest import (
    ARCHITECTURES, CURRENT_ARCHITECTURES, PROMPTS, QUICK, WITH_TOWERS, exhaustive, length_reward, made_up_rollout,
    peaked_reward, run_process,
)
from forked import Ranks
from safetensors.torch import load_file
from test_sample import Traced

from config import GRPOConfig, ModelConfig
from engine import sharding
from engine.device_policy import DevicePolicy
from engine.devices import best_device, is_main, num_processes, shutdown
from engine.models import load_any_policy, save_any_policy
from engine.network import Network, move
from engine.shared import Shared
from engine.sharding import full_tensor, shard
from experience import Batch, Experience
from grpo import weighted_loss
from model import ValueHead, byte_tokenizer
from runs.checkpoint import latest_checkpoint
from runs.folder import read_jsonl

pytestmark = pytest.mark.slow


def launch(processes: int, folder: Path, *flags: str, fails: bool = False, by_torchrun: bool = False):
    """Run to the end, and return what was printed. One process is that of the tests. fails: it must end with an error.

    No group is tied, so every gradient is a real one.
    """
    rewards = [] if "false" in flags else ["--reward_functions", length_reward(folder.parent)]       # none if supervised
    words = ["train.py", *QUICK, "--output_dir", str(folder), *rewards, *flags]
    if processes == 1:
        return train.main(words[1:])
    if by_torchrun:
        return run_process(*words, processes=processes)
    try:
        done = Ranks(processes, *words).wait(240)
    except (TimeoutError, ChildProcessError) as error:    # each seen once in some hundred runs on a busy machine
        warnings.warn(f"{processes} processes waited for each other or crashed, and were started again: {error}", stacklevel=2)
        shutil.rmtree(folder)
        done = Ranks(processes, *words).wait(240)
    assert (done.returncode != 0) == fails, done.ends()
    return done


def assert_same_run(one: Path, many: Path, tolerance: float = 1e-5, most_draws: int = 1):
    """The same completions, and metrics and weights up to the order in which sums are taken.

    Rounding may decide a draw: then at most most_draws completions of a step differ, and the steps before it are compared.
    """
    left, right = (read_jsonl(folder / "rollouts.jsonl") for folder in (one, many))
    other_draws = [r["step"] for r, s in zip(left, right, strict=True) if r["completion_ids"] != s["completion_ids"]]
    end = min(other_draws, default=math.inf)
    assert left and other_draws.count(end) <= most_draws and (not other_draws or left[0]["step"] < end), other_draws
    assert all(r["rewards"] == s["rewards"] for r, s in zip(left, right) if r["step"] < end)
    lines = [[line for line in read_jsonl(folder / "metrics.jsonl") if line["step"] < end] for folder in (one, many)]
    first, again = (next(line["grad_norm"] for line in run if "grad_norm" in line) for run in lines)
    assert again == pytest.approx(first, rel=1e-5)
    for mine, other in zip(*lines, strict=True):
        for name, value in mine.items():
            if "seconds" in name or "memory" in name or name in ("ratio_deviation", "approx_kl", "policy_loss", "total_loss"):
                continue                                  # those are 0 but for rounding
            expected = pytest.approx(value, rel=20 * tolerance, abs=tolerance) if isinstance(value, float) else value
            assert other[name] == expected, name
    if other_draws:
        warnings.warn(f"a draw at step {end} was decided by rounding", stacklevel=2)
        return
    weights, others = ({p.name: load_file(p) for p in folder.glob("final/*.safetensors")} for folder in (one, many))
    assert weights.keys() == others.keys() and weights
    for file, tensors in weights.items():
        assert tensors.keys() == others[file].keys(), "a tied head is written once"
        for name, tensor in tensors.items():
            # AdamW makes of a gradient that is 0 but for rounding a step of up to the learning rate, 1e-6 here.
            rounding = tolerance * tensor.norm() + 0.1 * 1e-6 * tensor.numel() ** 0.5
            assert (tensor - others[file][name]).norm() <= rounding, name


def four_terms(new, batch):
    terms = {"nll": -new.logp, "kl": new.kl, "entropy": new.entropy, "values": new.values**2}
    return {name: weighted_loss(x, batch.weights) for name, x in terms.items()}, {"p": new.logp.exp(), "tokens": batch.mask.sum().float()}


def results() -> dict:
    """What the verbs give for passes that two processes cannot share equally, and for one pass. Called in each process, or alone."""
    best_device("cpu")
    found, rollout = {}, made_up_rollout([9, 5, 7], [5, 1, 9, 4, 12, 3])
    for make, is_sharded in product((DevicePolicy, Shared), (False, True)):
        torch.manual_seed(0)
        model, head = ARCHITECTURES["gemma3"]().eval(), ValueHead(32)
        torch.nn.init.normal_(head.layers[-1].weight)
        mesh = {"replicate": 1, "fsdp": num_processes(), "tp": 1}
        if is_sharded:
            shard(model, mesh)
        policy = make(Network(model, mesh=mesh), byte_tokenizer(), max_tokens=25)
        policy.set_optimizer(torch.optim.SGD([*model.parameters(), *head.parameters()]), None, head)
        reference = policy.frozen_copy()
        with torch.no_grad():
            for weight in reference.model.parameters():
                weight.mul_(0.9)

        def of_slice(numbers, seeds, policy=policy):
            rollout = policy.sample([PROMPTS[n] for n in numbers], GRPOConfig(generation_max_length=12), seeds)
            levels = {"length": rollout.prompt_mask.sum(dim=1)}
            return Traced(**vars(rollout), hidden=2 * rollout.sampling_logp, notes=rollout.completions, levels=levels)

        gathered = policy.map_over_processes(of_slice, [0, 1, 2], [(0, n) for n in range(3)])
        assert torch.equal(gathered.hidden, 2 * gathered.sampling_logp) and gathered.notes == gathered.completions
        name = f"{make.__name__}, {is_sharded=}"
        found[name] = [gathered.completion_ids, gathered.sampling_logp, gathered.levels]
        for rows in torch.arange(6), torch.tensor([3]):
            assert len(policy.split(rollout, rows)) % 2 == 1
            logp = policy.log_probs(rollout, rows, reference=reference).computed()
            table = Batch.of_rollout(rollout, torch.ones(6, 1))
            batch = Experience([], table, table.advantages).batch(rows)
            losses = policy.forward_backward(batch, four_terms, reference=reference)
            norm = policy.clip_gradient(math.inf)
            gradient = full_tensor([p.grad for p in policy.trained_parameters])
            found[f"{name}, {len(rows)} rows"] = [logp, losses, norm, gradient]
            policy.clear_gradient()
    return found


def test_the_verbs_give_in_two_processes_what_they_give_in_one(tmp_path):
    done = Ranks(2, __file__, tmp_path / "results.pt").wait(240)
    assert done.returncode == 0, done.stderr[-3000:]
    found, expected = torch.load(tmp_path / "results.pt"), results()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


EVERYTHING = (
    "--use_grpo --use_kl_penalty true --max_steps 3 --log_rollouts_every 1 --learning_rate 1e-6 "
    "--cold_start_learning_rate 1e-6 --save_steps 1 --generation_max_length 8"
)


@pytest.mark.parametrize("flags", [
    pytest.param(f"{EVERYTHING} --kl_estimator exact --batch_size 3 --max_tokens_per_forward 100 --dynamic_sampling 1 "
                 "--loss_type scale_rl", id="uneven"),
    exhaustive(f"{EVERYTHING} --reference_mode ema --ema_alpha 0.5 --use_value_head --ppo_epochs 2 --minibatch_size 8", id="value head"),
    exhaustive(f"{EVERYTHING} --lora_rank 4 --cold_start_steps 2 --gradient_checkpointing", id="lora"),
    exhaustive(f"{EVERYTHING} --batch_size 1 --baseline global_mean --importance_cap 2 --seed 1", id="one prompt"),
    pytest.param("--use_grpo false --max_steps 3 --learning_rate 1e-6", id="supervised"),
])
def test_two_processes_make_the_run_of_one(tmp_path, flags):
    launch(1, tmp_path / "one", *flags.split())
    launch(2, tmp_path / "two", *flags.split(), by_torchrun="use_grpo false" in flags)
    if "use_grpo false" in flags:
        line = json.dumps({"step": 1, "phase": "grpo", "completion_ids": [], "rewards": {}}) + "\n"
        for name in "one", "two":
            (tmp_path / name / "rollouts.jsonl").write_text(line)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_two_processes_write_the_best_policy_as_they_write_a_checkpoint(tmp_path):
    flags = f"{EVERYTHING} --cold_start_steps 0 --max_steps 4 --eval_steps 1 --keep_checkpoints 9 --keep_best".split()
    launch(2, tmp_path / "run", *flags, *peaked_reward(tmp_path))
    best, at_3, last = (
        [path.read_bytes() for path in (tmp_path / "run" / name).glob("*.safetensors")]
        for name in ("best", "checkpoints/step-00000003", "final"))
    assert len(best) == 1 and best == at_3 != last


@pytest.mark.parametrize("mesh,flags", [
    ("tp=2", "--use_value_head --gradient_checkpointing --max_steps 2 --cold_start_steps 1"),
    exhaustive("fsdp=2,tp=2", "--reference_mode ema --ema_alpha 0.5 --max_steps 2 --cold_start_steps 1"),
    exhaustive("replicate=2,fsdp=2", "--seed 1"),
])
def test_processes_that_divide_the_matrices_of_a_layer_or_have_copies_of_the_weights(tmp_path, mesh, flags):
    processes = 2 if mesh == "tp=2" else 4
    launch(1, tmp_path / "one", *EVERYTHING.split(), *flags.split())
    launch(processes, tmp_path / "many", *EVERYTHING.split(), *flags.split(), "--mesh", mesh)
    assert_same_run(tmp_path / "one", tmp_path / "many")


def test_a_step_is_explained_in_one_process_alone():
    done = Ranks(2, "analysis/explain.py", "--use_grpo", "--device", "cpu").wait(240)
    assert done.returncode == 2 and "only one process can explain a step; start it without torchrun" in done.stderr, done.stderr[-3000:]


def test_a_model_with_towers_in_two_processes(tmp_path, tokenizer):
    torch.manual_seed(0)
    save_any_policy(WITH_TOWERS["gemma3_vision"](), tokenizer, tmp_path / "base")
    flags = [*EVERYTHING.split(), "--model_path", f"{tmp_path}/base", "--generation_max_length", "16", "--gradient_checkpointing",
             "--reference_mode", "ema", "--ema_alpha", "0.5"]
    launch(1, tmp_path / "one", *flags)
    launch(2, tmp_path / "two", *flags)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", tmp_path / "two/final"))
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("language_model"))


@pytest.mark.parametrize("before,after,flags", [
    (1, 2, "--reference_mode ema --ema_alpha 0.5 --use_value_head"), exhaustive(2, 1, "--reference_mode ema --ema_alpha 0.5 --use_value_head"),
    exhaustive(1, 2, "--lora_rank 4 --precision bfloat16", id="LoRA"),
])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, before, after, flags):
    launch(1, tmp_path / "whole", *EVERYTHING.split(), *flags.split())
    launch(before, tmp_path / "changed", *EVERYTHING.split(), *flags.split())
    shutil.rmtree(latest_checkpoint(tmp_path / "changed"))          # as if it had stopped before the last step
    shutil.rmtree(tmp_path / "changed/final")
    words = "train.py", "--output_dir", str(tmp_path / "changed"), "--resume"
    done = Ranks(after, *words).wait(400)
    assert done.returncode == 0, done.stderr
    assert "not bit for bit" in " ".join(done.stdout.split())
    rounding = dict(tolerance=1e-3, most_draws=8) if "bfloat16" in flags else {}             # of 16 completions
    assert_same_run(tmp_path / "whole", tmp_path / "changed", **rounding)
    assert torch.load(latest_checkpoint(tmp_path / "changed") / "state.pt", weights_only=True)["versions"]["processes"] == after


def test_a_reward_function_that_raises_in_one_process_stops_all_with_one_message(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import os\ncalls = []\ndef bad(completions, **columns):\n    calls.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(calls) > 2:\n        raise ZeroDivisionError('no good')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    done = launch(
        2, tmp_path / "run", *EVERYTHING.split(), "--reward_functions", f"{tmp_path}/bad.py:bad", fails=True)
    assert done.stderr.count("ZeroDivisionError: no good") == 1 or done.stderr.count("RunError") >= 1, done.stderr[-3000:]


FAILS_ALONE = """
import json, sys
from pathlib import Path
import torch, train
from engine.devices import Ranks, all_gather_object, best_device, on_all_ranks, process_rank
from config import Config
from runs import checkpoint, folder as folders

class Own(Exception):
    def __init__(self, reason, code):
        super().__init__(reason)

def fail(error, rank=1):
    if process_rank() == rank:
        raise error

def save(state, folder=Path(sys.argv[1])):
    checkpoint.write_checkpoint(folder, 1, torch.nn.Linear(1, 1), None, None, state, keep=1)

best_device("cpu")
checkpoint.save_any_policy = lambda model, tokenizer, folder, weights: folder.mkdir(parents=True)
checkpoint.checkpoints_in = lambda folder: fail(OSError("a stale file handle"), rank=0)
folders.open_tracker = lambda *args: fail(OSError("no space is left"), rank=0)
config = Config.of(output_dir=f"{sys.argv[1]}-run", report_to="none")
for work in (
    lambda: folders.RunFolder(config).open(config, 0, {}),
    lambda: save({"optimizer": lambda: 0}), lambda: save({}), lambda: on_all_ranks(lambda: fail(ValueError("a state_dict"))),
    lambda: Ranks().gather(lambda: fail(Own("no good", 3))), lambda: Ranks().gather(lambda: process_rank() and (lambda: 0)),
):
    try:
        work()
    except Exception as error:
        print(json.dumps(all_gather_object(f"{type(error).__name__}: {error}")), flush=True)
"""


def test_what_one_rank_raises_before_a_collective_is_raised_on_all(tmp_path):
    """By a state that cannot be pickled, by old checkpoints; errors and results that cannot be pickled. The next collective fits."""
    (tmp_path / "alone.py").write_text(FAILS_ALONE)
    done = Ranks(2, tmp_path / "alone.py", tmp_path / "checkpoints").wait(240)
    errors = ("OSError: no space is left", f"RunError: could not save {tmp_path}", "OSError: a stale", "ValueError: a state",
              "RunError: Own: no good", "AttributeError: Can't")
    for rank in done.ranks:
        pairs = [json.loads(line) for line in rank.stdout.splitlines() if line.startswith("[\"")]
        assert len(pairs) == 6, done.ends()
        assert all(first == other and first.startswith(error) for (first, other), error in zip(pairs, errors, strict=True)), pairs


@pytest.mark.parametrize("flags,message", [
    (["--mesh", "fsdp=3"], "--mesh=fsdp=3"), (["--mesh", "tp=4"], "--mesh=tp=4"),
    (["--mesh", "ep=2"], "--mesh=ep=2"), (["--reference_offload"], "--reference_offload"),
    (["--mesh", "tp=2", "--lora_rank", "4"], "--lora_rank=4: not with tp"),
])
def test_what_several_processes_cannot_do_is_one_line(tmp_path, flags, message):
    done = launch(2, tmp_path / "run", *EVERYTHING.split(), *flags, fails=True)
    assert done.stderr.count("train.py: error:") == 1 and f"error: {message}" in done.stderr


def test_ranks_with_other_settings_end_with_one_line_that_names_the_first(tmp_path):
    (tmp_path / "other.py").write_text("import os, sys, train\ntrain.main([*sys.argv[1:], '--seed', os.environ['RANK']])\n")
    flags = [*QUICK, *EVERYTHING.split(), "--cold_start_steps", "0", "--output_dir", str(tmp_path / "run")]
    done = Ranks(2, tmp_path / "other.py", *flags).wait(240)
    assert done.returncode == 1 and done.stderr.count("train.py: ") == 1
    assert "train.py: seed is 0 on rank 0 and 1 on rank 1: start all ranks with" in done.stderr


# ---- loading: the weights and buffers of one process, in shards --------------------------------------------------------


@pytest.mark.parametrize("processes,mesh,names", [
    # Sizes that do not divide evenly.
    (3, {"replicate": 1, "fsdp": 3, "tp": 1}, ["gemma3", "gpt2", "gpt_oss", "gemma4_shared_keys", "lfm2", "gemma3_vision"]),
    exhaustive(4, {"replicate": 2, "fsdp": 2, "tp": 1}, ["gemma3", "qwen3_moe"]),
    exhaustive(4, {"replicate": 1, "fsdp": 2, "tp": 2}, ["gemma3", "qwen3", "gemma3_vision"]),
])
def test_every_architecture_is_loaded_as_in_one_process(tmp_path, processes, mesh, names):
    for name, build in (ARCHITECTURES | CURRENT_ARCHITECTURES | WITH_TOWERS).items():
        if name in names:
            torch.manual_seed(0)
            save_any_policy(build(), byte_tokenizer(), tmp_path / name)
    done = Ranks(processes, __file__, str(tmp_path), json.dumps(mesh)).wait(400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.findall(r"(\S+): the same", done.stdout) == sorted(path.name for path in tmp_path.iterdir())


def compare(folder: Path, mesh: dict) -> None:
    """In each process: load a model whole, and in shards; compare all tensors, also with those of a reference."""
    device = best_device()
    adapter = dict(lora_rank=2, precision="bfloat16")
    cases = [(path, options) for path in sorted(folder.iterdir()) for options in ({}, adapter)
             if not options or (path.name == "gemma3" and mesh["tp"] == 1)]
    for path, options in cases:
        config, processes = ModelConfig(model_path=str(path), **options), sharding.num_processes
        torch.manual_seed(0)
        sharding.num_processes = lambda: 1
        whole, _ = load_any_policy(config)
        sharding.num_processes = processes
        torch.manual_seed(0)
        model, _ = load_any_policy(config)
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
        total = sum(p.numel() for p in model.parameters())
        assert held <= 1.5 * total / num_processes(), f"{path.name}: {held} of {total}"
        move(model, device)
        shard(model, mesh)
        for other in [model] if options else [model, Network(model, mesh=mesh).frozen_copy().module]:
            tied = other.get_input_embeddings().weight is other.get_output_embeddings().weight
            assert tied == (whole.get_input_embeddings().weight is whole.get_output_embeddings().weight), path.name
            for name, tensor in (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers()):
                found = other.get_parameter_or_buffer(name)
                found = found.full_tensor() if hasattr(found, "full_tensor") else found
                assert found.dtype == tensor.dtype and torch.equal(found, tensor), f"{path.name}: {name}"
            assert len(list(other.named_buffers())) == len(list(whole.named_buffers())), path.name
        if os.environ["RANK"] == "0" and not options:
            print(f"{path.name}: the same", flush=True)
    shutdown()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        compare(Path(sys.argv[1]), json.loads(sys.argv[2]))
    else:
        found = results()
        if is_main():
            torch.save(found, sys.argv[1])
        shutdown()
