"""
GRPO steps of this project on a workload, in the form of `python train.py`; the counterpart of trl_steps.py.

    python bench/our_steps.py NAME FOLDER SEED [--gradient_checkpointing]          prints one line of JSON
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import sample
from config import parse_config
from devices import peak_memory_gb
from train import learn, set_up
from workloads import WORKLOADS, lengths_of

name, folder, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
workload = WORKLOADS[name]
steps = 0


class DrawnToLength(sample.Drawn):
    """Nothing but the stop token at a row's last position, never the stop token before it."""

    def take(self, owners, logits):
        lengths = sample.torch.tensor([*lengths_of(workload, steps, seed), 0])
        stop = int(self.stops[0])
        logits = logits.clone()
        logits[:, stop] = -sample.torch.inf
        last = self.count[owners] + 1 >= lengths[owners]
        logits[last] = -sample.torch.inf
        logits[last, stop] = 0.0
        super().take(owners, logits)


run_folder = folder / "run"
shutil.rmtree(run_folder, ignore_errors=True)
run = set_up(parse_config([
    "--use_grpo", "--model_path", str(folder / "model"), "--dataset", str(folder / "prompts.jsonl"), "--output_dir", str(run_folder),
    "--reward_functions", str(Path(__file__).parent / "workloads.py") + ":share_of_even", "--use_kl_penalty", "false",
    "--batch_size", str(workload.prompts), "--num_completions_per_prompt", str(workload.group_size),
    "--generation_max_length", str(workload.new_tokens), "--generation_temperature", "1", "--generation_top_p", "1",
    "--generation_top_k", "0", "--max_prompt_length", "2048", "--eval_limit", "0", "--learning_rate", "1e-6",
    "--max_steps", str(1 + workload.measured_steps), "--save_steps", "0", "--report_to", "none", "--seed", str(seed), *sys.argv[4:],
]))
if workload.mean_length:
    sample.Drawn = DrawnToLength
    log = run.folder.log

    def count_steps(*args):
        global steps
        steps += 1
        log(*args)

    run.folder.log = count_steps
learn(run)
lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][1:]
print(json.dumps({
    "system": "plain-grpo", "step": [line["step_seconds"] for line in lines],
    "sampling": [line["sampling_seconds"] for line in lines], "scoring": [0.0] * len(lines),
    "tokens": [line["completion_tokens"] * workload.prompts * workload.group_size for line in lines],
    "peak_gb": peak_memory_gb(run.device),
}))
