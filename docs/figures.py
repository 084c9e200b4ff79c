"""
Draw the figures in docs/figures. All values are computed by the functions that train.

    python docs/figures.py                   docs/figures/*.svg, in seconds
    python docs/figures.py --ladder 5        first run the programs of examples/ladder, seeds 0 to 4, as far as docs/figures/ladder.jsonl
                                             has no lines of them: half a minute each
    python docs/figures.py --losses 5        the same for the demonstration with five losses: two minutes each
"""

import argparse
import contextlib
import inspect
import io
import itertools
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import matplotlib
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/figures"
LADDER = ROOT / "examples/ladder"
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
    figure = Figure(figsize=(9.6, 5.7), layout="constrained")
    for axes, window in zip(figure.subplots(1, 2), (None, 6), strict=True):
        seen = torch.full((len(names), len(names)), torch.nan)
        for number, block in enumerate(layout.blocks):
            keys, from_prompt = torch.cat([block.prompts, block.tokens], dim=1), block.prompts.shape[1]
            mask = layout.mask(number, 0, window, torch.float32).expand(len(keys), -1, -1, -1)
            for row, _, query, key in (mask == 0).nonzero().tolist():
                seen[block.tokens[row, query], keys[row, key]] = 1.0 if key < from_prompt else 0.0
        axes.imshow(seen.numpy(), cmap=ListedColormap([BLUE, ORANGE]), vmin=0, vmax=1, alpha=0.7)
        labels = [f"{name}\n{position}" for name, position in zip(names, positions.tolist(), strict=True)]
        axes.set_xticks(range(len(names)), labels, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=8)
        for border in [i for i in range(1, len(names)) if names[i] != names[i - 1]]:
            axes.axhline(border - 0.5, color="0.7", linewidth=0.6)
            axes.axvline(border - 0.5, color="0.7", linewidth=0.6)
        axes.set(title="full attention" if window is None else f"window of {window} positions", xlabel="key, and its position",
                 ylabel="query")
    meaning = {BLUE: "a key of its own range", ORANGE: "a key of its prompt"}
    figure.legend([Patch(color=colour, alpha=0.7) for colour in meaning], meaning.values(), loc="outside lower center", ncols=2, frameon=False)
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


def run_program(name: str, seed: int, **settings) -> list[dict]:
    """Run a program of the ladder with other settings or another reward; return step, reward and accuracy of each printed line."""
    names = runpy.run_path(str(LADDER / f"{name}.py"))["main"].__globals__
    names |= {"SEED": seed, **settings}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names["main"]()
    found = re.findall(r"^step +(\d+)  reward ([\d.]+).* accuracy ([\d.]+)$", printed.getvalue(), flags=re.MULTILINE)
    return [{"step": int(step), "reward": float(reward), "accuracy": float(accuracy)} for step, reward, accuracy in found]


def every_digit(completion: str, answer: str) -> float:
    """Reward completions that contain every digit of the answer: this can be hacked."""
    return float(set(answer) <= set(completion))


def read_lines(path: Path) -> list[dict]:
    """Read a file of JSON Lines, or nothing if there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lines_by_run(path: Path) -> dict[str, list[dict]]:
    """Return the lines of a file of JSON Lines by the name of their run."""
    runs = {}
    for line in read_lines(path):
        runs.setdefault(line["run"], []).append(line)
    return runs


def run_ladder(path: Path, seeds: int) -> None:
    """Add to a file of JSON Lines what the programs print for each seed, and what 5_kl.py does with a reward that can be hacked."""
    runs = {file.stem: (file.stem, {}) for file in sorted(LADDER.glob("*.py"))}
    for name, beta in ("hackable reward, BETA=0", 0.0), ("hackable reward", 0.1):
        runs[name] = "5_kl", {"reward": every_digit, "BETA": beta}
    for seed, (run, (program, settings)) in itertools.product(range(seeds), runs.items()):
        if not any(line["run"] == run and line["seed"] == seed for line in read_lines(path)):
            lines = [{"run": run, "seed": seed, **line} for line in run_program(program, seed, **settings)]
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            print(f"{run}, seed {seed}: accuracy {lines[-1]['accuracy']}", flush=True)


def run_losses(path: Path, seeds: int) -> None:
    """Add to a file of JSON Lines the held-out accuracy of half a demonstration with each loss, for each seed."""
    for seed, loss in itertools.product(range(seeds), ("grpo", "dapo", "dr_grpo", "gspo", "cispo")):
        if any(line["run"] == loss and line["seed"] == seed for line in read_lines(path)):
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            flags = ["--use_grpo", "--loss_type", loss, "--seed", str(seed), "--num_epochs", "0.8", "--report_to", "none"]
            train.main([*flags, "--output_dir", f"{folder}/run"])
            lines = read_lines(Path(folder, "run/metrics.jsonl"))
        start = min(line["step"] for line in lines if line["phase"] == "grpo") - 1
        with path.open("a") as file:
            for line in lines:
                if line["phase"] == "eval" and line["step"] >= start:
                    found = {"run": loss, "seed": seed, "step": line["step"] - start, "accuracy": line["eval_accuracy"]}
                    file.write(json.dumps(found) + "\n")


def values_by_step(lines: list[dict], value: str) -> dict[int, list[float]]:
    """Return the values of all seeds at each step."""
    steps = sorted({line["step"] for line in lines})
    return {step: [line[value] for line in lines if line["step"] == step] for step in steps}


def draw_accuracies(runs: dict[str, list[dict]], name: str) -> None:
    """Draw the mean accuracy of runs by name over their steps, and beside the last step that of each seed as a dot."""
    figure = Figure(figsize=(5, 2.8), layout="constrained")
    axes = figure.subplots()
    for number, (run, lines) in enumerate(runs.items()):
        found = values_by_step(lines, "accuracy")
        (drawn,) = axes.plot([*found], [*map(fmean, found.values())], label=run)
        last = max(found)
        beside = [last * (1.03 + 0.025 * number)] * len(found[last])
        axes.plot(beside, found[last], "o", color=drawn.get_color(), markersize=3, alpha=0.6)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0.3, 1))
    axes.legend(frameon=False, fontsize=7)
    save(figure, name)


def draw_hacked(runs: dict[str, list[dict]]) -> None:
    """Draw reward and accuracy with a reward that can be hacked: the mean of the seeds, and their range."""
    figure = Figure(figsize=(5, 2.8), layout="constrained")
    axes = figure.subplots()
    for run, colour, kl in ("hackable reward, BETA=0", RED, "without KL penalty"), ("hackable reward", BLUE, "with KL penalty"):
        for value, line in ("reward", "--"), ("accuracy", "-"):
            found = values_by_step(runs[run], value)
            axes.plot([*found], [*map(fmean, found.values())], line, color=colour, label=f"{value} {kl}")
            axes.fill_between([*found], [*map(min, found.values())], [*map(max, found.values())], color=colour, alpha=0.12)
    axes.set(xlabel="step", ylabel="reward, held-out accuracy", ylim=(0, 1.02))
    axes.legend(frameon=False, fontsize=7)
    save(figure, "hacked")


def main() -> None:
    """Draw all figures, after the runs that there are not yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladder", type=int, default=0, help="number of seeds to run the programs of examples/ladder with")
    parser.add_argument("--losses", type=int, default=0, help="number of seeds to run the demonstration with, for each loss")
    args = parser.parse_args()
    ladder, losses = FOLDER / "ladder.jsonl", FOLDER / "losses.jsonl"
    run_ladder(ladder, args.ladder)
    run_losses(losses, args.losses)
    draw_flow(*random_groups(length=12))                  # the shapes of docs/walkthrough.md
    draw_groups()
    draw_pack(random_groups(length=6)[2])
    draw_clip()
    draw_kl()
    programs = lines_by_run(ladder)
    draw_hacked(programs)
    draw_accuracies({f"{run}.py": lines for run, lines in sorted(programs.items()) if run[0].isdigit()}, "ladder")
    draw_accuracies(lines_by_run(losses), "losses")


if __name__ == "__main__":
    main()
