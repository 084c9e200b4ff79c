"""
Six architectures from disk, each with the start-up check and ten GRPO steps: a table of what was found.

    python bench/architectures.py

Tiny models with random weights, built from their configuration classes and saved as a user's checkpoint would be. GPT-2 has
absolute positions and a tokenizer without chat template; the others get a template. Random models solve nothing, so the
reward is the share of digits in a completion, which ten steps can raise.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import ARCHITECTURES  # noqa: E402

from engine.policy import save_policy  # noqa: E402
from model import byte_tokenizer  # noqa: E402
from runs.records import read_jsonl  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWARD = "def digits(completions, **columns):\n    return [sum(c.isdigit() for c in t) / max(1, len(t)) for t in completions]\n"
FLAGS = (
    "--use_grpo --num_completions_per_prompt 8 --batch_size 8 --generation_max_length 24 --max_steps 10 --learning_rate 3e-3 "
    "--eval_limit 0 --report_to none"
)


def main() -> None:
    """Save each model, run train.py --check and ten steps on it, print a row."""
    print("| model | check: sampler, head, packing (nat) | first step, ratio - 1 | reward, steps 1-2 and 9-10 |")
    print("|---|---|---|---|")
    for name, build in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            tokenizer = byte_tokenizer()
            tokenizer.chat_template = None if name == "gpt2" else TEMPLATE
            model = build()
            save_policy(model, tokenizer, Path(folder) / "model")
            (Path(folder) / "reward.py").write_text(REWARD)
            command = [sys.executable, "train.py", *FLAGS.split(), "--model_path", f"{folder}/model"]
            command += ["--reward_functions", f"{folder}/reward.py:digits"]
            command += ["--output_dir", f"{folder}/run"]
            options = dict(cwd=ROOT, capture_output=True, text=True)
            check, run = subprocess.run([*command, "--check"], **options), subprocess.run(command, **options)
            if check.returncode or run.returncode:
                sys.exit(f"{name}: {check.stderr}{run.stderr}")
            lines = [line.split() for line in check.stdout.splitlines() if line.startswith("  ")]
            found = {words[1]: words[-2] for words in lines if words[0] == "ok" and words[-1] == "nat"}
            metrics = read_jsonl(Path(folder) / "run/metrics.jsonl")
        agreement = ", ".join(found.get(check, "off") for check in ("sampler", "head", "packing"))
        reward = [m["mean_reward"] for m in metrics]
        means = f"{sum(reward[:2]) / 2:.3f}, {sum(reward[-2:]) / 2:.3f}"
        attention = model.config._attn_implementation
        print(f"| {name} ({attention}) | {agreement} | {metrics[0]['ratio_deviation']:.1e} | {means} |", flush=True)


if __name__ == "__main__":
    main()
