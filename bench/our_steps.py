"""
GRPO steps of this project on a workload, in the form of `python train.py`; the counterpart of trl_steps.py.

    python bench/workloads.py NAME FOLDER
    python bench/our_steps.py NAME FOLDER SEED [flags of train.py, such as --engine plain]          prints one line of JSON
"""

import json
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine import sampler
from runs.command_line import parse_config
from engine.host import peak_memory_gb
from runs.setup import set_up
from train import training_loop
from workloads import WORKLOADS, lengths_of


class SampledToLength(sampler.SamplingState):
    """Nothing but the stop token at a row's last position, never the stop token before it."""

    workload, seed, rollouts = None, 0, 0

    def __init__(self, *args):
        super().__init__(*args)
        wanted = lengths_of(self.workload, SampledToLength.rollouts, self.seed)
        is_rollout = self.dummy_row == len(wanted)        # the start-up check samples fewer, on its own
        lengths = [*wanted, 0] if is_rollout else [10**6] * (self.dummy_row + 1)
        self.lengths = torch.tensor(lengths, device=self.count.device)
        SampledToLength.rollouts += is_rollout

    def step(self, row_ids, logits):
        stop, last = self.stop_ids[:1], (self.count[row_ids] + 1 >= self.lengths[row_ids])[:, None]
        is_stop = torch.arange(logits.shape[1], device=logits.device) == stop
        forced = logits.masked_fill(is_stop != last, -torch.inf).masked_fill(is_stop & last, 0.0)
        at, going = self.count[row_ids].clamp(max=self.ids.shape[1] - 1), ~self.stopped[row_ids]
        super().step(row_ids, forced)
        ids = self.ids[row_ids, at]                       # trained on as if nothing had been forced, or ratios would not be 1
        logp = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
        self.logp[row_ids, at] = torch.where(going, logp, self.logp[row_ids, at])


def main(name: str, folder: Path, seed: int, flags: list[str]) -> None:
    workload = WORKLOADS[name]
    shutil.rmtree(folder / "run", ignore_errors=True)
    if workload.mean_length:
        assert "plain" not in flags, "lengths are prescribed to the shared engine alone"
        SampledToLength.workload, SampledToLength.seed = workload, seed
        sampler.SamplingState = SampledToLength
    run = set_up(parse_config([
        "--use_grpo", "--model_path", str(folder / "model"), "--dataset", str(folder / "prompts.jsonl"),
        "--output_dir", str(folder / "run"),
        "--reward_functions", f"{Path(__file__).parent}/workloads.py:share_of_even",
        "--use_kl_penalty", "false", "--batch_size", str(workload.prompts), "--num_completions_per_prompt",
        str(workload.group_size), "--generation_max_length", str(workload.new_tokens), "--generation_temperature", "1",
        "--generation_top_p", "1", "--generation_top_k", "0", "--max_prompt_length", "2048", "--eval_limit", "0",
        "--learning_rate", "1e-6", "--max_steps", str(1 + workload.measured_steps), "--save_steps", "0", "--report_to", "none",
        "--seed", str(seed), *(["--engine", "shared"] if workload.mean_length else []), *flags,
    ]))
    training_loop(run)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()][1:]
    print(json.dumps({
        "system": "plain-grpo", "step": [line["step_seconds"] for line in lines],
        "sampling": [line["sampling_seconds"] for line in lines],                # with scoring, which is a millisecond here
        "tokens": [line["completion_tokens"] * workload.prompts * workload.group_size for line in lines],
        "peak_gb": peak_memory_gb(next(run.policy.model.parameters()).device),
    }))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
