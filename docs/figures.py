"""
Draw the figures in docs/figures. All values are computed by the functions that train.

    python docs/figures.py                   docs/figures/*.svg, in seconds
    python docs/figures.py --train           train, and draw the curve: outputs/figures/curve.svg, in a minute or two
    python docs/figures.py --train --keep    the same into docs/figures, which changes the published figure

The run trains on a smaller version of the demonstration's task: additions of numbers made of the digits 0 to 4, answered without
reasoning, 497 for training and 128 held out. A supervised cold start is followed by GRPO.
"""

import argparse
import inspect
import json
import random
import sys
import tempfile
from pathlib import Path

import matplotlib
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/figures"
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
import experience  # noqa: E402
import grpo  # noqa: E402
import logprobs  # noqa: E402
import policy  # noqa: E402
import rewards  # noqa: E402
import sample  # noqa: E402
import train  # noqa: E402
from config import GRPOConfig, ModelConfig  # noqa: E402
from engine.packing import pack_groups  # noqa: E402
from engine.models import load_any_policy  # noqa: E402

matplotlib.rcParams |= {"svg.hashsalt": "plain-grpo", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
TASK = (                        # flags of its GRPO phase
    "--use_grpo --max_steps 100 --num_epochs 100 --batch_size 32 --num_completions_per_prompt 4 --learning_rate 4e-4 "
    "--generation_max_length 8 --generation_temperature 1 --generation_top_p 1 --generation_top_k 0 "
    "--reward_functions correctness --eval_limit 128 --save_steps 0 --report_to none"
)
BLUE, ORANGE, GREEN, RED, GREY = "tab:blue", "tab:orange", "tab:green", "tab:red", "0.6"


def save(figure: Figure, name: str, folder: Path = FOLDER) -> None:
    """Write a figure without a date, so that the file changes only when the drawing does."""
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def random_groups(length: int) -> tuple:
    """Return a tiny random model, two examples and a rollout with three completions of each, of at most length tokens."""
    torch.manual_seed(0)
    model, tokenizer = load_any_policy(ModelConfig())
    examples = data.load_examples("arithmetic", limit=2)
    config = GRPOConfig(num_completions_per_prompt=3, generation_max_length=length)
    prompts = [example["prompt"] for example in examples]
    return model, examples, sample.sample_completions_for_prompts(model, tokenizer, prompts, config, seed=0)


def draw_flow(model, examples: list[dict], rollout) -> None:
    """Draw the functions of a step and the shapes of their results, for 2 prompts x 3 completions."""
    scores, _ = rewards.compute_rewards_for_completions([rewards.reasoning_coherence], [1.0], rollout, examples)
    advantages = grpo.compute_group_advantages(scores)
    logp = logprobs.completion_log_probs(model, rollout).logp
    loss, _ = grpo.policy_loss(logp, logp.detach(), advantages.view(-1, 1), rollout.completion_mask)
    boxes = [
        (data.load_examples, f"{len(examples)} dicts"),
        (sample.sample_completions_for_prompts, f"completion_ids {tuple(rollout.completion_ids.shape)}, sampling_logp"),
        (rewards.compute_rewards_for_completions, f"rewards {tuple(scores.shape)}"),
        (grpo.compute_group_advantages, f"advantages {tuple(advantages.shape)}"),
        (experience.compute_experience, "constant during the updates"),
        (logprobs.completion_log_probs, f"logp {tuple(logp.shape)}, with gradient"),
        (grpo.policy_loss, f"a scalar {tuple(loss.shape)}"),
        (policy.Policy.optimizer_step, "one step of AdamW"),
    ]
    figure = Figure(figsize=(6, 5.4))
    axes = figure.add_axes([0, 0, 1, 1])
    axes.axis("off")
    axes.set(xlim=(0, 8), ylim=(-0.5, len(boxes) - 0.5))
    for number, (function, result) in enumerate(boxes):
        y = len(boxes) - 1 - number
        file = Path(inspect.getfile(function)).name
        colour = "#dbe9f6" if number in (5, 6, 7) else "#f3f3f3"
        axes.text(3.1, y, f"{file}\n{function.__qualname__}", ha="center", va="center", fontsize=9,
                  bbox=dict(boxstyle="round,pad=0.45", facecolor=colour, edgecolor=GREY))
        last = number == len(boxes) - 1
        axes.text(4.6 if last else 3.3, y if last else y - 0.5, result, va="center", fontsize=8.5, color="0.25")
        if not last:
            axes.annotate("", (3.1, y - 0.66), (3.1, y - 0.34), arrowprops=dict(arrowstyle="->", color="0.4"))
    axes.annotate("", (0.75, 2.2), (0.75, -0.2), arrowprops=dict(arrowstyle="->", color=BLUE))
    axes.text(0.6, 1, "again for each micro-batch,\nthen for each update", rotation=90, ha="right", va="center", color=BLUE)
    save(figure, "flow")


def draw_groups() -> None:
    """Draw the rewards of four groups, and their advantages by compute_group_advantages."""
    nan = torch.nan
    scores = torch.tensor([[1, 0, 0, 1.0], [1.3, 0.3, 0.3, 0.3], [0.7, 0.7, 0.7, 0.7], [1.0, nan, 0.5, 0.0]])
    advantages = grpo.compute_group_advantages(scores)
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(torch.zeros_like(scores).numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
    right.imshow(advantages.numpy(), cmap="RdBu", vmin=-3, vmax=3, aspect="auto")       # pale, or numbers could not be read
    for axes, values, style, title in (left, scores, "{:.1f}", "rewards r (P, G)"), (right, advantages, "{:+.2f}", "advantages A (P, G)"):
        for p, g in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
            value = values[p, g].item()
            text = "none" if value != value else style.format(value) if value or axes is left else "0"
            axes.text(g, p, text, ha="center", va="center", fontsize=11)
        axes.hlines([0.5, 1.5, 2.5], -0.5, 3.5, color="0.8")
        axes.set(title=title, xticks=range(4), yticks=range(4), xlabel="completion g", ylabel="prompt p")
        axes.spines[:].set_visible(False)
    save(figure, "groups")


def draw_pack(rollout) -> None:
    """Draw which tokens attend to which in a pass of one prompt and three completions, without and with a window of 6.

    The keys of a row have two colours: one for its own, one for those of its prompt.
    """
    batch = pack_groups(rollout, torch.arange(3))
    positions, layout = batch.positions[0], batch.layout
    lengths = [int(rollout.prompt_mask[0].sum()), *rollout.completion_mask[:3].sum(dim=1).tolist()]
    names = "".join(name * length for name, length in zip("pabc", lengths, strict=True))
    figure = Figure(figsize=(7.4, 3.9), layout="constrained")
    for axes, window in zip(figure.subplots(1, 2), (None, 6), strict=True):
        seen = torch.full((len(names), len(names)), torch.nan)
        for number, block in enumerate(layout.blocks):
            keys, from_prompt = torch.cat([block.prompts, block.tokens], dim=1), block.prompts.shape[1]
            mask = layout.mask(number, 0, window, torch.float32).expand(len(keys), -1, -1, -1)
            for row, _, query, key in (mask == 0).nonzero().tolist():
                seen[block.tokens[row, query], keys[row, key]] = 1.0 if key < from_prompt else 0.0
        axes.imshow(seen.numpy(), cmap=ListedColormap([BLUE, ORANGE]), vmin=0, vmax=1, alpha=0.7)
        labels = [f"{name}\n{position}" for name, position in zip(names, positions.tolist(), strict=True)]
        axes.set_xticks(range(len(names)), labels, fontsize=5)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        for border in [i for i in range(1, len(names)) if names[i] != names[i - 1]]:
            axes.axhline(border - 0.5, color="0.7", linewidth=0.6)
            axes.axvline(border - 0.5, color="0.7", linewidth=0.6)
        axes.set(title="full attention" if window is None else f"window of {window} positions", xlabel="key, and its position",
                 ylabel="query")
    save(figure, "pack")


def loss_and_slope(ratio: torch.Tensor, advantage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return policy_loss of single tokens and its slope by logp. Each token has its own call, so its weight is 1."""
    logp = ratio.log()[:, None].requires_grad_()
    mask = torch.ones_like(logp, dtype=torch.bool)
    losses = []
    for row in range(len(ratio)):
        at = slice(row, row + 1)
        loss, _ = grpo.policy_loss(logp[at], torch.zeros(1, 1), torch.tensor([advantage]), mask[at])
        losses.append(loss)
    (slope,) = torch.autograd.grad(torch.stack(losses).sum(), logp)
    return torch.stack(losses).detach(), slope[:, 0]


def draw_clip() -> None:
    """Draw loss and gradient of one token over its ratio."""
    ratio = torch.linspace(0.05, 3, 119)
    figure = Figure(figsize=(7.4, 4.6), layout="constrained")
    for column, advantage in zip(figure.subplots(2, 2, sharex=True).T, (1.0, -1.0), strict=True):
        for axes, values in zip(column, loss_and_slope(ratio, advantage), strict=True):
            axes.plot(ratio, values, color=BLUE, linewidth=2.5)
            axes.axvspan(0.8, 1.2, color="0.92")
            axes.axhline(0, color=GREY, linewidth=0.6)
        column[0].set(title=f"A = {advantage:+.0f}", ylabel="loss of a token")
        column[1].set(xlabel="ratio (grey: 1 - clip_low to 1 + clip_high)", ylabel="its slope by logp")
    save(figure, "clip")


def mean_gradients(p: torch.Tensor, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of each estimator's mean over tokens from p with respect to the logits of p, by enumeration."""
    logits = p.log().requires_grad_()
    logp = logits.log_softmax(0)
    ratio = (logp - logp.detach()).exp()
    terms = {name: grpo.kl_penalty(logp, q.log(), estimator=name) for name in ("k1", "k2", "k3")}
    terms["ratio * k3"] = grpo.kl_penalty(logp, q.log(), estimator="k3", ratio=ratio)
    means = {name: (p * term).sum() for name, term in terms.items()}
    means["KL(policy || reference)"] = (logp.exp() * (logp - q.log())).sum()
    means["KL(reference || policy)"] = (q * (q.log() - logp)).sum()
    return {name: torch.autograd.grad(mean, logits, retain_graph=True)[0] for name, mean in means.items()}


def draw_kl() -> None:
    """Draw the values of the estimators at one token, and their mean gradients for a policy of two tokens."""
    x = torch.linspace(-2.5, 2.5, 201)
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in ("k1", GREY), ("k2", GREEN), ("k3", ORANGE):
        left.plot(x, grpo.kl_penalty(torch.zeros_like(x), x, estimator=name), label=name, color=colour)
    left.set(xlabel="x = ref_logp - logp of the sampled token", ylabel="nat", title="value at a token", ylim=(-2.6, 6))
    shares = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
    found = [mean_gradients(torch.stack([s, 1 - s]), torch.tensor([0.3, 0.7], dtype=torch.float64)) for s in shares]
    styles = {
        "KL(policy || reference)": dict(color=BLUE, linewidth=5, alpha=0.35), "ratio * k3": dict(color=RED),
        "k2": dict(color=GREEN, linestyle="--"), "KL(reference || policy)": dict(color="k", linewidth=5, alpha=0.15),
        "k3": dict(color=ORANGE), "k1": dict(color=GREY),
    }
    for name, style in styles.items():
        right.plot(shares, [gradient[name][0] for gradient in found], label=name, **style)
    right.set(xlabel="probability of a token (reference: 0.3)", ylabel="slope by its logit",
              title="mean gradient")
    for axes in left, right:
        axes.axhline(0, color="0.8", linewidth=0.6)
        axes.legend(frameon=False, fontsize=7)
    save(figure, "kl")


def write_task(folder: Path) -> str:
    """Write train.jsonl and test.jsonl, and return the flags that read them."""
    examples = data.load_examples("arithmetic", "train") + data.load_examples("arithmetic", "test")
    examples = sorted((e for e in examples if set(e["prompt"]) <= set("01234+=?")), key=lambda e: e["prompt"])
    random.Random(0).shuffle(examples)
    for example in examples:
        example["completion"] = f"<answer>{example['answer']}</answer>"
    for name, part in ("test", examples[:128]), ("train", examples[128:]):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(example) + "\n" for example in part))
    return f"--dataset {folder}/train.jsonl --eval_dataset {folder}/test.jsonl"


def read_lines(path: Path) -> list[dict]:
    """Read a file of JSON Lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_small(target: Path) -> None:
    """Train on the small task; write its numbers to curve.jsonl in the target folder."""
    names = "step", "phase", "eval_accuracy", "eval_accuracy_low", "eval_accuracy_high", "mean_reward", "zero_variance_groups", "entropy"
    with tempfile.TemporaryDirectory() as folder:
        cold_start = "--cold_start_steps 100 --cold_start_learning_rate 1e-3"
        train.main(f"{TASK} {write_task(Path(folder))} {cold_start} --eval_steps 10 --output_dir {folder}/run".split())
        kept = [{n: line[n] for n in names if n in line} for line in read_lines(Path(folder) / "run/metrics.jsonl")]
    target.mkdir(parents=True, exist_ok=True)
    (target / "curve.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def draw_curve(folder: Path = FOLDER) -> None:
    """Draw held-out accuracy, the share of zero-variance groups and entropy from curve.jsonl in the folder."""
    lines = read_lines(folder / "curve.jsonl")
    evals, steps = ([line for line in lines if (line["phase"] == "eval") == held_out] for held_out in (True, False))
    grpo_steps = [line for line in steps if line["phase"] == "grpo"]
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    at, low, middle, high = (
        [line[name] for line in evals] for name in ("step", "eval_accuracy_low", "eval_accuracy", "eval_accuracy_high"))
    left.plot(at, middle, marker=".", color=BLUE)
    left.fill_between(at, low, high, color=BLUE, alpha=0.2)
    left.set(xlabel="optimiser step", ylabel="held-out accuracy, 95 %")
    for name, colour in ("zero_variance_groups", ORANGE), ("entropy", GREEN):
        right.plot([m["step"] for m in grpo_steps], [m[name] for m in grpo_steps], label=name, color=colour)
    right.set(xlabel="optimiser step", ylim=(0, None))
    right.legend(frameon=False)
    for axes in left, right:
        axes.axvline(grpo_steps[0]["step"], color=GREY, linestyle=":")
    save(figure, "curve", folder)


def main() -> None:
    """Draw all figures; with --train the learning curve alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train, and draw the learning curve alone")
    parser.add_argument("--keep", action="store_true", help="write it to docs/figures, not to outputs/figures")
    args = parser.parse_args()
    if args.train:
        folder = FOLDER if args.keep else ROOT / "outputs/figures"
        train_small(folder)
        draw_curve(folder)
        print(f"{folder.relative_to(ROOT)}/curve.svg (the run's own folder was temporary, and is removed)")
        return
    draw_flow(*random_groups(length=12))                  # the shapes of docs/walkthrough.md
    draw_groups()
    draw_pack(random_groups(length=6)[2])
    draw_clip()
    draw_kl()
    draw_curve()


if __name__ == "__main__":
    main()
