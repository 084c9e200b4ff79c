"""
The report of a run: one HTML page that holds everything it shows, to open, keep or send. It needs no network.

    python infer.py --report RUN [--against OTHER_RUN]          a run writes its own when it ends

Here a run folder becomes data; report.html beside this file is the page that draws it. What a model or a data set wrote is
not to be trusted: it travels as JSON in which no tag can begin, the page shows it as text and never as HTML, and the page's
own policy forbids every script but its own and every connection.

Left out on purpose, because rollouts.jsonl does not hold it: what else the policy might have said at a token. Runs that were
made before entropies and log-probabilities after the update were saved are not coloured by them.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import torch

from config import PROFILES, Config, ModelConfig
from engine.chat_template import as_text
from grpo import compute_group_advantages
from model import load_tokenizer
from runs.command_line import SECTIONS
from runs.records import or_none, read_jsonl

TEMPLATE = Path(__file__).with_suffix(".html")
BYTES_SHOWN = 50_000_000        # of rollouts.jsonl; of a longer one every second, third, ... saved step. Pages are half as long
# Section, metric (or its beginning, up to a slash), title, unit. A metric that is not here is drawn under "More".
CHARTS = [
    ("Reward", "mean_reward", "reward", "points"),
    ("Reward", "reward/", "{}", "points"),
    ("Held out", "eval_accuracy", "accuracy, 95 % interval", "share"),
    ("Held out", "eval_reward/", "{}, held out", "points"),
    ("Held out", "eval_truncated", "cut at the limit, held out", "share"),
    ("Groups", "tied_groups", "tied groups", "share"),
    ("Groups", "completion_tokens", "completion length", "tokens"),
    ("Groups", "truncated", "cut at the limit", "share"),
    ("Policy", "entropy", "entropy", "nat/token"),
    ("Policy", "kl", "KL to the reference", "nat/token"),
    ("Policy", "policy_kl", "KL to the rollout", "nat/token"),
    ("Policy", "clip_fraction", "clip fraction", "share"),
    ("Policy", "grad_norm", "gradient norm", ""),
    ("Policy", "loss", "supervised loss", "nat/token"),
    ("Policy", "policy_loss", "policy loss", ""),
    ("Speed and memory", "tokens_per_second", "completion tokens per second", "1/s"),
    ("Speed and memory", "step_seconds", "a step", "s"),
    ("Speed and memory", "sampling_seconds", "sampling and rewards", "s"),
    ("Speed and memory", "training_seconds", "passes and updates", "s"),
    ("Speed and memory", "peak_memory_gb", "peak memory", "GB"),
]
NOT_DRAWN = {"step", "eval_accuracy_low", "eval_accuracy_high"}                  # the band around eval_accuracy
DECIMALS = {"mean_advantage": 5}                # in most variants 0 but for float32's rounding, which looks like a curve


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Write folder/report.html about the run in it, with the curves and groups of another run beside its own.

    raises  ValueError in one line, if a folder is no run or a file in it is damaged
    """
    folders = [folder] if against is None else [folder, against]
    configs = [read_config(path) for path in folders]
    blocks, runs = [], []
    for number, (path, config) in enumerate(zip(folders, configs, strict=True)):
        lines = metrics_of(path, config)
        series = series_of(lines)
        groups, tokens, pieces, every = groups_of(path, config)
        completions = [completion for of_step in tokens.values() for completion in of_step]
        blocks += [block(f"tokens-{number}-{step}", of_step) for step, of_step in tokens.items()]
        runs.append({
            "name": str(path), "series": series, "phases": phases_of(lines), "groups": groups, "pieces": pieces,
            "every": every, "environment": config["grpo"].get("environment", ""), "judged": judged_by(config, series),
            "offers": [name for name, at in (("entropy", 3), ("change", 4)) if any(c[at] for c in completions)],
            "advice": [[line["step"], line["advice"]] for line in lines if line.get("advice")],
        })
    page = {"runs": runs, "charts": charts_of(runs), "settings": settings_of(configs)}
    blocks.append(block("page", page))
    target = folder / "report.html"
    target.write_text(fill(TEMPLATE.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    return target


def fill(template: str, blocks: list[str]) -> str:
    """The page, with its data and the fingerprint of its script: no other script may run in it."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    fingerprint = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, marker, tail = template.replace("{{script}}", f"sha256-{fingerprint}").partition("{{data}}")
    assert marker, "report.html has no {{data}}"
    return head + "\n".join(blocks) + tail


def block(name: str, data) -> str:
    """Data for the page. In JSON a < can only stand in a string, and there \\u003c is the same: no tag can begin or end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


# ---- settings and metrics --------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, dict]:
    """config.json of a run."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--report: {folder} is not the folder of a run: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        assert all(isinstance(section, dict) for section in config.values())
        return config
    except (ValueError, AttributeError, AssertionError):
        raise ValueError(f"--report: {path} is not the config.json of a run") from None


def settings_of(configs: list[dict]) -> list[dict]:
    """Every setting: its section, name, help and default, its value in each run, and which profile set it so, if one did."""
    defaults, helps = Config().as_dict(), {f.name: f.metadata["help"] for section in SECTIONS for f in fields(section)}
    profiles = [PROFILES.get(config.get("training", {}).get("profile", ""), {}) for config in configs]
    rows = []
    for section in defaults | configs[-1] | configs[0]:
        for name in dict.fromkeys(name for of in (defaults, *configs) for name in of.get(section, {})):
            values = [config.get(section, {}).get(name) for config in configs]
            rows.append({
                "section": section, "name": name, "help": helps.get(name, ""), "values": values,
                "default": defaults.get(section, {}).get(name),
                "profile": [name in profile and profile[name] == v for profile, v in zip(profiles, values, strict=True)],
            })
    return rows


def metrics_of(folder: Path, config: dict) -> list[dict]:
    """Lines of metrics.jsonl, with tokens_per_second: of completions that a step learns from, over the whole step."""
    path = folder / "metrics.jsonl"
    try:
        lines = read_jsonl(path)
        completions = {"grpo": config["training"]["batch_size"] * config["grpo"]["num_completions_per_prompt"]}
        for line in lines:
            if not {"step", "phase"} <= line.keys():
                raise KeyError
            if line.get("step_seconds") and line.get("completion_tokens"):
                tokens = line["completion_tokens"] * completions.get(line["phase"], config["training"]["batch_size"])
                line["tokens_per_second"] = tokens / line["step_seconds"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--report: {path} is damaged: a line of it is no metrics") from None
    return lines


def series_of(lines: list[dict]) -> dict[str, list[list]]:
    """{metric: [steps, values]}; six digits of each value, None where it does not exist."""
    series: dict[str, list[list]] = {}
    for line in lines:
        for name, value in line.items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                steps, values = series.setdefault(name, [[], []])
                steps.append(line["step"])
                values.append(digits(round(value, DECIMALS[name]) if value is not None and name in DECIMALS else value, 6))
    return {name: columns for name, columns in series.items() if set(columns[1]) - {None}}


def judged_by(config: dict, series: dict) -> list[str]:
    """Metrics that say how good the run is on held-out data: accuracy, or the points of what is trained on instead of it."""
    trained_on = config.get("grpo", {}).get("reward_functions", ["correctness"])
    if config.get("training", {}).get("use_grpo") and "correctness" not in trained_on:
        return [name for name in series if name.startswith("eval_reward/") and name != "eval_reward/correctness"]
    return [name for name in series if name == "eval_accuracy"]


def digits(value: float | None, count: int) -> float | None:
    """A number as JSON may hold it, to so many significant digits."""
    value = or_none(value)
    return None if value is None else float(f"{value:.{count}g}")


def phases_of(lines: list[dict]) -> list[list]:
    """[name, first step] of each phase. A line may stand for several steps, and has the number of the last one."""
    last_steps = {line["phase"]: line["step"] for line in lines if line["phase"] != "eval"}
    return [[name, before + 1] for name, before in zip(last_steps, [0, *last_steps.values()], strict=False)]


def charts_of(runs: list[dict]) -> list[dict]:
    """What to draw, in order: {"section", "metric", "title", "unit"} for every metric that a run has."""
    known = dict.fromkeys(name for run in runs for name in run["series"] if name not in NOT_DRAWN)
    charts = []
    for section, pattern, title, unit in CHARTS:
        for name in known:
            if name == pattern or (pattern.endswith("/") and name.startswith(pattern)):
                title_here = title.format(name.removeprefix(pattern))
                charts.append({"section": section, "metric": name, "title": title_here, "unit": unit})
    drawn = {chart["metric"] for chart in charts}
    return charts + [{"section": "More", "metric": name, "title": name, "unit": ""} for name in known if name not in drawn]


# ---- completions -----------------------------------------------------------------------------------------------------


def groups_of(folder: Path, config: dict) -> tuple[list[dict], dict[int, list], dict[int, str], int]:
    """What the page shows of rollouts.jsonl.

    returns  groups, each {"step", "group", "prompt", "tied", "names" of the reward functions, "completions"};
             {step: [tokens_of each of its completions]}, which the page reads when it comes to that step;
             the text of every token id, {} without a tokenizer; and n, if it is every n-th saved step
    """
    path, groups, tokens = folder / "rollouts.jsonl", [], {}
    every = max(1, -(-path.stat().st_size // BYTES_SHOWN)) if path.is_file() else 1
    tokenizer = tokenizer_of(folder, config)
    try:
        for step, of_step in groupby(saved_completions(path, every), key=lambda record: record["step"]):
            records = list(of_step)
            tokens[step] = [tokens_of(record) for record in records]
            groups += groups_of_step(records, tokenizer)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--report: {path} is damaged: {type(error).__name__}: {error}") from None
    ids = {token for of_step in tokens.values() for completion in of_step for token in completion[0]}
    return groups, tokens, {token: piece(tokenizer, token) for token in sorted(ids)} if tokenizer else {}, every


def saved_completions(path: Path, every: int) -> Iterator[dict]:
    """Records of rollouts.jsonl, of every n-th saved step. A last line cut off by a crash is left out.

    Lines of steps that are left out are not parsed: the step is the first thing in a line.
    """
    if not path.is_file():
        return
    number, last = -1, None
    with path.open(encoding="utf-8") as file:
        for line in file:
            step = re.match(r'\{"step": (\d+)', line)
            number += step is None or step[1] != last
            last = step[1] if step else None
            if number % every == 0 and line.endswith("\n"):
                yield json.loads(line)


def groups_of_step(records: list[dict], tokenizer) -> list[dict]:
    """A step's completions by prompt; "first": how many come before the group's own."""
    by_group = [list(of_group) for _, of_group in groupby(records, key=lambda record: record["group"])]
    rewards = [[torch.nan if r["reward"] is None else r["reward"] for r in of_group] for of_group in by_group]
    tied = (compute_group_advantages(torch.tensor(rewards)) == 0).all(dim=1).tolist()
    size = len(by_group[0])
    return [
        {
            "step": group[0]["step"], "group": group[0]["group"], "prompt": prompt_text(group[0]["prompt"], tokenizer),
            "tied": is_tied, "names": list(group[0]["rewards"]), "first": number * size,
            "completions": [completion_of(record) for record in group],
        }
        for number, (group, is_tied) in enumerate(zip(by_group, tied, strict=True))
    ]


def completion_of(record: dict) -> dict:
    """What the page shows of a completion besides its tokens."""
    return {
        "text": as_text(record["completion"]), "reward": digits(record["reward"], 6),
        "advantage": digits(record["advantage"], 4),
        "points": [digits(points, 6) for points in record["rewards"].values()], "finished": record["finished"],
        "tokens": record["tokens"],
    }


def tokens_of(record: dict) -> list:
    """[ids, log-probabilities, advantages, entropies, changes] of a completion's tokens.

    Log-probabilities have three decimals, the others three digits, because changes may be small. In nats, but for advantages.
    A change is the log-probability after the update, less that at sampling: where the sampler rounds otherwise than the
    trainer (bfloat16), that is in it too. A token that the policy did not choose, which an environment said, has None in each.
    Advantages are None as a whole without a value head; entropies and changes, where the run did not save them.
    """
    sampled, after = record["sampling_logp"], record.get("logp_after")
    logp = [None if (known := or_none(value)) is None else round(known, 3) for value in sampled]
    advantages, entropies = (
        values and [digits(value, 3) for value in values] for values in map(record.get, ("token_advantages", "entropies")))
    changes = after and [
        None if new is None or old is None else digits(new - old, 3) for new, old in zip(after, sampled, strict=True)]
    return [record["completion_ids"], logp, advantages, entropies, changes]


def prompt_text(prompt, tokenizer) -> str:
    """A prompt as people read it: text, chat messages, or token ids of one that was cut."""
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return as_text(prompt)
    return f"... {tokenizer.decode(prompt)}" if tokenizer else f"... {len(prompt)} tokens"


def tokenizer_of(folder: Path, config: dict):
    """What the run's tokens mean: from its final model, its newest checkpoint, or the model's folder; None if none is there."""
    source = config.get("model", {}).get("model_path", "")
    for path in [folder / "final", *sorted((folder / "checkpoints").glob("step-*"))[-1:], Path(source)]:
        if path.is_dir() or source == "":
            try:
                return load_tokenizer(ModelConfig(model_path=str(path) if source else ""))
            except ValueError:
                continue
    return None


def piece(tokenizer, token: int) -> str:
    """The text of a token. What it looks like behind itself: alone, some tokenizers drop the space that it begins with."""
    once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once) :]
