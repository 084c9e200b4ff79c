"""Loading in several processes: the weights and buffers of one process, in shards."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES, CURRENT_ARCHITECTURES, WITH_TOWERS, exhaustive
from forked import Ranks

sys.path.insert(0, str(Path(__file__).parents[2]))
from config import ModelConfig
from engine.devices import best_device, num_processes, shutdown
from engine.sharding import shard
from engine.models import load_any_policy, save_any_policy
from engine.network import Network, move
from model import byte_tokenizer

pytestmark = pytest.mark.slow


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
    import engine.sharding

    device = best_device()
    adapter = dict(lora_rank=2, precision="bfloat16")
    cases = [(path, options) for path in sorted(folder.iterdir()) for options in ({}, adapter)
             if not options or (path.name == "gemma3" and mesh["tp"] == 1)]
    for path, options in cases:
        config, processes = ModelConfig(model_path=str(path), **options), engine.sharding.num_processes
        torch.manual_seed(0)
        engine.sharding.num_processes = lambda: 1
        whole, _ = load_any_policy(config)
        engine.sharding.num_processes = processes
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
    compare(Path(sys.argv[1]), json.loads(sys.argv[2]))
