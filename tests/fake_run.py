"""Run folders without a run, for the tests of reports."""

import json

from model import byte_tokenizer
from runs.command_line import parse_config

HOSTILE = [
    "</script><script>window.pwned = 1</script>", "<!--<script>", "<img src=x onerror='window.pwned = 2'>",
    "{{ config }} {% raw %}",
    "\u2028 ]]> \\u003c é 🙂 \x00", "javascript:alert(1)\" onload=\"window.pwned = 3",
]


def fake_run(folder, *, steps=12, prompts=4, siblings=3, completion=None, prompt=None, every=4, flags=()):
    """A run folder without a run: reward rises, group 0 is tied, sibling 0 is right unless the group is odd."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    config = parse_config(["--use_grpo", "--batch_size", str(prompts), "--num_completions_per_prompt", str(siblings), *flags])
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    metrics = [{"step": 0, "phase": "eval", "eval_accuracy": 0.1, "eval_accuracy_low": 0.05, "eval_accuracy_high": 0.2}]
    metrics += [{"step": 1, "phase": "cold_start", "loss": 2.0, "entropy": 1.0, "completion_tokens": 5.0, "step_seconds": 0.5}]
    for step in range(2, steps + 1):
        metrics.append({
            "step": step, "phase": "grpo", "mean_reward": step / steps, "reward/correctness": 0.5, "zero_variance_groups": 0.25,
            "entropy": 1 / step, "completion_tokens": 10.0, "step_seconds": 2.0, "kl": None if step == 3 else 0.01,
            "own_metric": 3,
        })
    metrics.append({"step": steps, "phase": "eval", "eval_accuracy": 0.8, "eval_accuracy_low": 0.7, "eval_accuracy_high": 0.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(2, steps + 1, every):
            for p in range(prompts):
                for g in range(siblings):
                    text = completion or f"answer {p}{g} of step {step}"
                    right = float(p > 0 and g == 0 and p % 2 == 0)
                    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"][:20], tokenizer.eos_token_id]
                    file.write(json.dumps({
                        "step": step, "phase": "grpo", "prompt": prompt or f"prompt {p}", "completion": text,
                        "rewards": {"correctness": right, "length": None if g == 1 else 0.5},
                        "reward": right + 0.5 * (p > 0 and g == 0), "advantage": 0.0 if p == 0 else 1.0 if g == 0 else -0.5,
                        "zero_variance": p == 0,
                        "finished": g != 1, "tokens": len(ids), "group": p, "prompt_ids": [2, 5], "completion_ids": ids,
                        "sampling_logp": [-0.1 * t for t in range(len(ids))],
                    }) + "\n")
    return folder


def edit_rollouts(folder, change):
    """change(record, i) each record of rollouts.jsonl."""
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for i, record in enumerate(records):
        change(record, i)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder
