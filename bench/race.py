"""
The demonstration as a race: GRPO of this project and of TRL from the same cold start, on the same sums with the same rewards.

    python bench/race.py --pairs 3

Times `python train.py --use_grpo` whole, then takes its checkpoint from the end of the cold start and goes on from there for
60 steps in each system, in fresh processes that alternate. TRL has the settings of the demo profile and runs in its own
environment (requirements-trl-1.10.txt). Both results are measured by this project on the same 256 held-out sums.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BENCH = Path(__file__).parent
ROOT = BENCH.parent
STEPS = 60


def correct(completions, answer, **columns):
    """1 point for <answer>N</answer> with the right number, as the demonstration's correctness."""
    return [float(f"<answer>{right}</answer>" in text) for text, right in zip(completions, answer, strict=True)]


def well_formed(completions, **columns):
    """1 point for one <reasoning> before one <answer> at the end, a shorter form of reasoning_coherence."""
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

    def points(text):
        places = [text.find(tag) for tag in tags]
        alone = all(text.count(tag) == 1 for tag in tags)
        return float(alone and places == sorted(places) and text.startswith(tags[0]) and text.endswith(tags[-1]))

    return [points(text) for text in completions]


def with_trl(folder: Path, seed: int) -> None:
    """60 steps of TRL's GRPOTrainer. Prints a line of JSON; runs in TRL's environment."""
    import logging
    import resource
    import warnings

    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.seconds = []

        def on_step_begin(self, *args, **kwargs):
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            self.seconds.append(time.perf_counter() - self.began)

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(folder / "cold")
    model = AutoModelForCausalLM.from_pretrained(folder / "cold", dtype=torch.float32, attn_implementation="sdpa")
    dataset = Dataset.from_list([json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()])
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=256, num_generations=4, max_completion_length=40,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.0, num_iterations=1, loss_type="dapo", max_steps=STEPS,
        learning_rate=4e-4, lr_scheduler_type="cosine", warmup_steps=STEPS // 10, adam_beta2=0.95, max_grad_norm=1.0,
        reward_weights=[1.0, 0.2], gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=seed,
    )
    clock = Clock()
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=[correct, well_formed], args=config, train_dataset=dataset, processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    model.save_pretrained(folder / "after_trl")
    tokenizer.save_pretrained(folder / "after_trl")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps({"step": statistics.median(clock.seconds[1:]), "peak_gb": peak}))


def with_ours(folder: Path, seed: int) -> dict:
    """60 steps of train.py from the same weights."""
    rewards = [f"{__file__}:{name}" for name in ("correct", "well_formed")]
    call([
        sys.executable, "train.py", "--use_grpo", "--profile", "demo", "--model_path", folder / "cold", "--dataset",
        folder / "train.jsonl", "--cold_start_steps", "0", "--max_steps", STEPS, "--eval_limit", "0", "--save_steps", "0",
        "--report_to", "none", "--reward_functions", *rewards, "--reward_weights", "1", "0.2", "--seed", seed,
        "--output_dir", folder / f"ours{seed}",
    ])
    lines = [json.loads(line) for line in (folder / f"ours{seed}/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "grpo"]
    peak = max(line["peak_gb"] if "peak_gb" in line else line["peak_memory_gb"] for line in steps)
    return {"step": statistics.median(line["step_seconds"] for line in steps[1:]), "peak_gb": peak}


def call(command: list) -> str:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def accuracy(model: Path, folder: Path) -> float:
    """Share of the held-out sums answered right, one sample each."""
    call([
        sys.executable, "infer.py", "--evaluate", folder / "held_out.jsonl", "--model_path", model, "--limit", "256",
        "--generation_max_length", "40", "--json", folder / "accuracy.json",
    ])
    found = json.loads((folder / "accuracy.json").read_text())
    return found["results"][0]["estimates"]["accuracy"]["mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The demonstration as a race against TRL.", allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from against_trl import environment
    from data import arithmetic

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        demo = ["--use_grpo", "--keep_checkpoints", "99", "--output_dir", folder / "demo"]
        call([sys.executable, "train.py", *demo])
        print(f"the demonstration: {time.perf_counter() - began:.0f} s", flush=True)
        metrics = [json.loads(line) for line in (folder / "demo/metrics.jsonl").read_text().splitlines()]
        cold_steps = sum(m["phase"] == "cold_start" for m in metrics)
        print(f"held out after the cold start and at the end: "
              f"{next(m['eval_accuracy'] for m in metrics if m['phase'] == 'eval' and m['step'] == cold_steps):.3f}, "
              f"{metrics[-1]['eval_accuracy']:.3f}", flush=True)
        saved = {int(path.name.split("-")[-1]): path for path in (folder / "demo/checkpoints").iterdir()}
        saved[cold_steps].rename(folder / "cold")
        for split, file in ("train", "train.jsonl"), ("test", "held_out.jsonl"):
            lines = [json.dumps({key: e[key] for key in ("prompt", "answer")}) for e in arithmetic(split, 0)]
            (folder / file).write_text("\n".join(lines) + "\n")
        pairs = []
        for seed in range(args.pairs):
            pair = {}
            for system in ("trl", "ours")[:: 1 if seed % 2 else -1]:
                if system == "ours":
                    pair[system] = with_ours(folder, seed) | {"accuracy": accuracy(folder / f"ours{seed}/final", folder)}
                else:
                    line = call([environment("trl-1.10"), __file__, "--trl", folder, seed]).strip().splitlines()[-1]
                    pair[system] = json.loads(line) | {"accuracy": accuracy(folder / "after_trl", folder)}
            pairs.append(pair)
            print(f"seed {seed}: {json.dumps(pair)}", flush=True)
        for part in "step", "peak_gb":
            ratios = sorted(pair["trl"][part] / pair["ours"][part] for pair in pairs)
            print(f"{part}, TRL / ours: {statistics.median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        with_trl(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
