"""
Where the seconds of a GRPO step and of an evaluation go, beside the rate at which this machine multiplies matrices.

    python bench/step_profile.py examples/smollm2.json [flags of train.py]           a minute or two

The second step and an evaluation of --eval_limit problems run under torch.profiler. An operation's own time goes to the first
group that it or a caller of it belongs to; Python between operations is what is left of the wall clock.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine import sampler
from runs.command_line import parse_config
from runs.setup import set_up
from growth import machine_rates
from train import grpo_training_step

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::mv", "aten::linear"}


def labelled(function, label: str):
    """Return the function with its operations in a group of the profile."""
    def call(*args, **kwargs):
        with record_function(label):
            return function(*args, **kwargs)
    return call


def group_of(event) -> str:
    """Return the group of an operation, by its own name and the names of its callers."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for name in names:
        if "HeadLogProbs" in name or name == "head":
            return "head: products, softmax, gradient"
        if name == "draw":
            return "sampling: drawing tokens"
        if name.startswith("Optimizer."):
            return "optimiser"
    return "products of the layers" if PRODUCTS & set(names) else "other operations of the layers"


def measure(name: str, function) -> None:
    """Run the function under the profiler, and print its groups."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        began = time.perf_counter()
        function()
        wall = time.perf_counter() - began
    seconds, flops = Counter(), Counter()
    for event in profiler.events():
        seconds[group_of(event)] += event.self_cpu_time_total / 1e6
        flops[group_of(event)] += (event.flops or 0) if event.name in PRODUCTS else 0
    seconds["Python between operations"] = wall - sum(seconds.values())
    print(f"{name}: {wall:.2f} s under the profiler")
    for group, value in seconds.most_common():
        rate = f", {flops[group] / value / 1e9:.0f} gigaflops" if flops[group] else ""
        print(f"    {100 * value / wall:5.1f} %  {group}{rate}")


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(parse_config([*argv, "--output_dir", folder, "--report_to", "none"]))
        run.begin_phase(run.phases[-1])
        sampler.SamplingState.step = labelled(sampler.SamplingState.step, "draw")
        sampler.compute_logits = labelled(sampler.compute_logits, "head")
        run.folder.open(0)
        grpo_training_step(run, next(run.batches))
        rate = machine_rates(size=2048, length=2**20)[0]
        print(f"{torch.get_num_threads()} threads, {rate / 1e9:.0f} gigaflops in products of 2048 x 2048")
        measure("a step", lambda: grpo_training_step(run, next(run.batches)))
        measure(f"an evaluation of {len(run.eval_set)} problems", run.log_evaluation)


if __name__ == "__main__":
    main(sys.argv[1:])
