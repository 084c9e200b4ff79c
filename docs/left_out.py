"""
What a line is there for: leave it out, really, and measure.

    python docs/left_out.py                  the table of docs/walkthrough.md
    python docs/left_out.py --only ties walls

Each case names a file, some text in it and what stands there once the line is gone. The program is copied to a temporary
folder, changed there, and the same number is taken of both. A test keeps the texts in step with the program.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Case:
    """A line, what is left when it is gone, and Python that prints a number in both programs."""

    file: str
    text: str
    without: str
    what: str                   # says what the number is
    code: str


# A random tiny model and six completions of three prompts, for the cases that need them.
SETTING = """
import torch
from config import GRPOConfig, ModelConfig
from engine import make_engine
from engine.policy import load_policy
torch.manual_seed(0)
model, tokenizer = load_policy(ModelConfig())
config = GRPOConfig(generation_max_length=16, generation_top_k=0, generation_top_p=1.0, generation_temperature=1.0)
engine = make_engine("shared", model, tokenizer)
rollout = engine.sample(["47+85=?", "1+1=?", "9+90=?"], config, seed=0, num_completions=2)
"""
PACKED_AND_ALONE = SETTING + """
with torch.no_grad():
    packed, alone = (each.log_probs(rollout, None, {}).logp for each in (engine, make_engine("plain", model, tokenizer)))
print(float((packed - alone).abs().max()))
"""
GRADIENT = """
from grpo import kl_penalty
p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.7, 0.2, 0.1], [0.2, 0.2, 0.6]))
theta = p.log().clone().requires_grad_()
logp = theta.log_softmax(0)
(true,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), theta, retain_graph=True)
"""
# The first update of a run, with its gradient; the start-up check would refuse some of these programs, so it is not asked.
STEP = """
import tempfile, torch, train
from engine import make_engine
from experience import compute_experience, minibatches
from grpo import compute_group_advantages
from runs import setup
setup.start_up_check = lambda policy, tokenizer, examples, config, *_: make_engine(
    "shared", policy, tokenizer, max_tokens=config.training.max_tokens_per_forward)
flags = "--use_grpo --reward_functions length.py:length --batch_size 8 --learning_rate 4e-4 --report_to none --eval_limit 0 --cold_start_steps 0"
open("length.py", "w").write("def length(completion_ids, **columns): return [float(len(ids)) for ids in completion_ids]")
def first(more=""):
    run = train.set_up(train.parse_config([*flags.split(), "--output_dir", tempfile.mkdtemp(), *more.split()]))
    run.console.rich.quiet = True
    run.begin_phase(run.phase)
    groups = train.sample_groups(run, next(run.batches))
    advantages = compute_group_advantages(groups.rewards)
    return run, compute_experience(groups, advantages, run.config.grpo, run.engine, run.ranks)
def gradient(run, experience):
    rows = torch.arange(len(experience.mask))
    losses = train.accumulate_gradients(run, experience, rows, run.config.grpo)
    return losses, torch.stack([p.grad.norm() for p in run.model.parameters() if p.grad is not None]).norm().item()
"""

CASES = {
    "ties": Case(
        "grpo.py", "torch.where(scored & ~tied,", "torch.where(scored,",
        "advantage of each of eight completions with 0.7 points",
        "import torch; from grpo import compute_group_advantages\n"
        "print(float(compute_group_advantages(torch.full((1, 8), 0.7))[0, 0].abs()))",
    ),
    "mask first": Case(
        "grpo.py", "torch.where(mask, logp - old_logp, 0.0)                          # (B, T), 0 on policy",
        "logp - old_logp", "distance from the sampler (policy_kl) of a policy that has not moved, padding of -inf beside it",
        "import torch; from grpo import policy_loss\n"
        "logp = torch.tensor([[-1.0, -torch.inf]]); mask = torch.tensor([[True, False]])\n"
        "print(float(policy_loss(logp, logp, torch.ones(1), mask, num_tokens=1)[1]['policy_kl']))",
    ),
    "walls": Case(
        "engine/packing.py", "prompts, completions, prefix_of, device)", "prompts, list(prefix_of), prefix_of, device)",
        "largest difference between packed and plain log-probabilities, nat", PACKED_AND_ALONE,
    ),
    "first tokens": Case(
        "engine/packing.py", "predictor[index, 0] = prompt_end - 1", "pass", "the same", PACKED_AND_ALONE,
    ),
    "positions": Case(
        "engine/packing.py", "prompt_length + torch.arange(length)", "end - start + torch.arange(length)",
        "the same", PACKED_AND_ALONE,
    ),
    "temperature": Case(
        "train.py", "micro_batch, config.policy,", "micro_batch, {},",
        "mean of |ratio - 1| on the first update, temperature 0.8, top-p 0.9, top-k 50",
        STEP + "print(gradient(*first('--profile balanced --num_completions_per_prompt 4 "
        "--generation_max_length 16 --use_kl_penalty false'))[0]['ratio_deviation'])",
    ),
    "denominator": Case(
        "train.py", "batch, config, denominators, run", "batch, config, experience.denominators(micro_batch, 0), run",
        "length of the gradient in passes of 128 tokens over that in a single pass",
        STEP + "pieces, whole = (gradient(*first(f'--max_tokens_per_forward {n}'))[1] for n in (128, 99999))\n"
        "print(pieces / whole)",
    ),
    "fresh gradients": Case(
        "train.py", "    run.optimizer.zero_grad(set_to_none=run.device.type != \"xla\")     # XLA: zeros avoid a recompilation\n",
        "", "length of the gradient that an update leaves for the next one",
        STEP + "run, experience = first(); losses, _ = gradient(run, experience); train.optimizer_step(run, losses['total_loss'])\n"
        "print(sum(float(p.grad.square().sum()) for p in run.model.parameters() if p.grad is not None) ** 0.5)",
    ),
    "clip": Case(
        "grpo.py", "would be NaN\n    unclipped = ratio * advantages\n"
        "    gain = torch.minimum(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)",
        "would be NaN\n    gain = unclipped = ratio * advantages",
        "largest ratio after eight updates on one rollout, with a learning rate of 0.001",
        STEP + """
from experience import log_probs_of_rollout
run, experience = first('--learning_rate 1e-3 --warmup_ratio 0 --lr_schedule constant')
for _ in range(8):
    losses, _ = gradient(run, experience); train.optimizer_step(run, losses['total_loss'])
new = log_probs_of_rollout(run.engine, run.ranks, experience.rollout, run.config.grpo.policy).logp
print(float((new - experience.old_logp)[experience.mask].exp().max()))""",
    ),
    "ratio of the KL": Case(
        "grpo.py", "return kl if ratio is None else ratio * kl", "return kl",
        "cosine between the mean gradient of k3 in the loss and the gradient of KL(policy ‖ reference)",
        SETTING.splitlines()[1] + GRADIENT + """
k3 = kl_penalty(logp, q.log(), estimator="k3", ratio=(logp - logp.detach()).exp())
(found,) = torch.autograd.grad((p * k3).sum(), theta)
print(float(torch.cosine_similarity(found, true, dim=0)))""",
    ),
    "position, not id": Case(
        "sample.py", "(x[:, :longest] for x in (ids, drawn, written, logp))",
        "(x[:, :longest] for x in (ids, ids != tokenizer.pad_token_id, written, logp))",
        "share of the stop tokens that are trained on, where pad and EOS are one id",
        SETTING + """
tokenizer.pad_token = tokenizer.eos_token
rollout = engine.sample(["47+85=?"] * 8, config, seed=0, num_completions=8)
ended = rollout.finished
last = rollout.completion_ids[ended] == tokenizer.eos_token_id
print(float((last & rollout.completion_mask[ended]).any(dim=1).float().mean()))""",
    ),
}


def measured(case: Case, leave_out: bool) -> float:
    """The number of a case in a copy of the program, with the line or without it."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.glob("*.py"):
            shutil.copy(path, folder)
        for package in ROOT.glob("*/__init__.py"):
            shutil.copytree(package.parent, Path(folder) / package.parent.name)
        changed = Path(folder) / case.file
        if leave_out:
            changed.write_text(changed.read_text().replace(case.text, case.without))
        done = subprocess.run([sys.executable, "-c", case.code], cwd=folder, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else f"stops: {done.stderr.strip().splitlines()[-1]}"


def as_text(number: float | str) -> str:
    """For a cell of the table."""
    if isinstance(number, str):
        return number
    return "< 1e-5" if 0 < abs(number) < 1e-5 else f"{float(f'{number:.3g}'):g}"          # rounding is not reproducible


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="numbers instead of a table")
    args = parser.parse_args()
    if not args.json:
        print("| what is left out | where | measured | with it | without it |\n|---|---|---|---|---|")
    for name in args.only:
        case = CASES[name]
        both = [measured(case, leave_out) for leave_out in (False, True)]
        if args.json:
            print(json.dumps([name, *both]), flush=True)
        else:
            what = case.what.replace("|", "\\|")
            print(f"| {name} | {case.file} | {what} | {as_text(both[0])} | {as_text(both[1])} |", flush=True)


if __name__ == "__main__":
    main()
