"""
Write the report of a run: one HTML page that holds all of its data and needs no network.

    python infer.py --report RUN [--against OTHER_RUN]          a run writes its own when it ends

This module reads a run folder; report.html beside it is the page that draws the data. Text of models and
data sets is not trusted: it is embedded as JSON in which no tag can begin, the page shows it as text and
never as HTML, and the page's Content-Security-Policy forbids all other scripts and all connections.

Left out on purpose: probabilities of tokens that were not sampled. rollouts.jsonl does not hold them.
"""

if __name__ == "__main__":
    raise SystemExit("analysis/report.py is no program; run: python infer.py --report RUN")

import base64
import hashlib
import json
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from config import FLAGS, START_FLAGS, Config, ModelConfig
from engine.chat_template import as_text
from model import load_tokenizer
from runs.records import or_none, read_jsonl, read_steps, replace_text
from sources.settings import profile_values

TEMPLATE = Path(__file__).with_suffix(".html")
# Of a longer rollouts.jsonl every second, third, ... step is shown. The page has about half the size.
MAX_BYTES = 50_000_000
# Section, metric (or its prefix, up to a slash), title, unit. Other metrics are drawn under "More".
CHARTS = [
    ("Reward", "mean_reward", "reward", "points"),
    ("Reward", "reward/", "{}", "points"),
    ("Held out", "eval_accuracy", "accuracy, 95 % interval", "share"),
    ("Held out", "eval_reward/", "{}, held out", "points"),
    ("Held out", "eval_truncated", "truncated, held out", "share"),
    ("Groups", "tied_groups", "tied groups", "share"),
    ("Groups", "completion_tokens", "completion length", "tokens"),
    ("Groups", "truncated", "truncated completions", "share"),
    ("Policy", "entropy", "entropy", "nat/token"),
    ("Policy", "kl", "KL to the reference", "nat/token"),
    ("Policy", "policy_kl", "KL to the rollout", "nat/token"),
    ("Policy", "clip_fraction", "clip fraction", "share"),
    ("Policy", "grad_norm", "gradient norm", ""),
    ("Policy", "loss", "supervised loss", "nat/token"),
    ("Policy", "policy_loss", "policy loss", ""),
    ("Speed and memory", "tokens_per_second", "completion tokens per second", "1/s"),
    ("Speed and memory", "step_seconds", "step", "s"),
    ("Speed and memory", "sampling_seconds", "sampling and rewards", "s"),
    ("Speed and memory", "training_seconds", "forward, backward and updates", "s"),
    ("Speed and memory", "peak_memory_gb", "peak memory", "GB"),
]
NOT_DRAWN = {"step", "eval_accuracy_low", "eval_accuracy_high"}    # the latter are the band of eval_accuracy
DECIMALS = {"mean_advantage": 5}                # mostly 0: float32's rounding should not look like a curve


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Write folder/report.html on the run in it, with the curves and groups of another run beside it.

    raises  ValueError in one line, if a folder is not a run or a file in it is damaged
    """
    folders = [folder] if against is None else [folder, against]
    configs = [read_config(path) for path in folders]
    blocks, runs = [], []
    for number, (path, config) in enumerate(zip(folders, configs, strict=True)):
        lines = read_metrics(path, config)
        series = metric_series(lines)
        of_completions, tokens = read_completions(path, config)
        blocks += [block(f"tokens-{number}-{step}", text) for step, text in tokens.items()]
        runs.append({
            "name": str(path), "series": series, "phases": phase_starts(lines),
            "environment": config["grpo"].get("environment", ""), "judged": target_metrics(config, series),
            "advice": [[line["step"], str(line["advice"])] for line in lines if line.get("advice")],
        } | of_completions)
    page = {"runs": runs, "charts": list_charts(runs), "settings": list_settings(configs)}
    blocks.append(block("page", as_json(page)))
    target = folder / "report.html"
    replace_text(target, fill(TEMPLATE.read_text(encoding="utf-8"), blocks))
    return target


def fill(template: str, blocks: list[str]) -> str:
    """Insert the data and the hash of the page's script, so that no other script may run in it."""
    script = template.partition("<script>")[2].partition("</script>")[0]
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, marker, tail = template.replace("{{script}}", f"sha256-{script_hash}").partition("{{data}}")
    assert marker, "report.html has no {{data}}"
    return head + "\n".join(blocks) + tail


def as_json(content) -> str:
    """Return data for the page as JSON. \\u003c stands for each <, so no tag can begin or end in it."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def block(name: str, text: str) -> str:
    """Return the result of as_json as an element of the page. name: no text of a file."""
    return f'<script type="application/json" id="{name}">{text}</script>'


# ---- settings and metrics ----------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, dict]:
    """Read config.json of a run."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"--report: {folder} is not a run folder: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        assert all(isinstance(section, dict) for section in config.values())
        return config
    except (ValueError, AttributeError, AssertionError):
        raise ValueError(f"--report: {path} is not the config.json of a run") from None


def list_settings(configs: list[dict]) -> list[dict]:
    """Return every setting: section, name, help, default, values, and whether the run's profile set them."""
    helps = {name: f.metadata["help"] for name, f in FLAGS.items()}
    sections = {f.name: asdict(f.type()) for f in fields(Config)}
    defaults = {section: {name: value for name, value in values.items() if name not in START_FLAGS}
                for section, values in sections.items()}
    training = [config.get("training", {}) for config in configs]
    profiles = [profile_values(values.get("profile", ""), values.get("batch_size")) for values in training]
    rows = []
    for section in defaults | configs[-1] | configs[0]:
        names = dict.fromkeys(name for config in (defaults, *configs) for name in config.get(section, {}))
        for name in names:
            values = [config.get(section, {}).get(name) for config in configs]
            rows.append({
                "section": section, "name": name, "help": helps.get(name, ""), "values": values,
                "default": defaults.get(section, {}).get(name),
                "profile": [name in p and p[name] == v for p, v in zip(profiles, values, strict=True)],
            })
    return rows


def read_metrics(folder: Path, config: dict) -> list[dict]:
    """Read metrics.jsonl and add tokens_per_second: completion tokens of a step by its duration."""
    path = folder / "metrics.jsonl"
    try:
        lines = read_jsonl(path)
        prompts = config["training"]["batch_size"]
        completions = {"grpo": prompts * config["grpo"]["num_completions_per_prompt"]}
        for line in lines:
            if line.get("step_seconds") and line.get("completion_tokens"):
                tokens = line["completion_tokens"] * completions.get(line["phase"], prompts)
                line["tokens_per_second"] = tokens / line["step_seconds"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--report: {path} is damaged: a line of it does not hold metrics") from None
    return lines


def metric_series(lines: list[dict]) -> dict[str, list[list]]:
    """Return {metric: [steps, values]}. Values have six significant digits; missing ones are None."""
    series: dict[str, list[list]] = {}
    for line in lines:
        for name, value in line.items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                steps, values = series.setdefault(name, [[], []])
                steps.append(line["step"])
                rounded = value is not None and name in DECIMALS
                values.append(round_digits(round(value, DECIMALS[name]) if rounded else value, 6))
    return {name: columns for name, columns in series.items() if set(columns[1]) - {None}}


def target_metrics(config: dict, series: dict) -> list[str]:
    """Return the metrics of quality on held-out data: accuracy, or the points of the rewards trained on."""
    trained_on = config.get("grpo", {}).get("reward_functions", ["correctness"])
    if config.get("training", {}).get("use_grpo") and "correctness" not in trained_on:
        return [m for m in series if m.startswith("eval_reward/") and m != "eval_reward/correctness"]
    return [name for name in series if name == "eval_accuracy"]


def round_digits(value: float | None, n: int) -> float | None:
    """Round to n significant digits. Numbers that JSON cannot hold become None."""
    value = or_none(value)
    return None if value is None else float(f"{value:.{n}g}")


def phase_starts(lines: list[dict]) -> list[list]:
    """Return [name, first step] of each phase. A line may cover several steps; it has the last number."""
    last_steps = {line["phase"]: line["step"] for line in lines if line["phase"] != "eval"}
    return [[name, before + 1] for name, before in zip(last_steps, [0, *last_steps.values()], strict=False)]


def list_charts(runs: list[dict]) -> list[dict]:
    """Return {"section", "metric", "title", "unit"} for every metric of a run, in the order of the page."""
    names = (name for run in runs for name in run["series"] if not name.startswith("eval_reward_"))
    known = dict.fromkeys(name for name in names if name not in NOT_DRAWN)
    charts = []
    for section, pattern, title, unit in CHARTS:
        for name in known:
            if name == pattern or (pattern.endswith("/") and name.startswith(pattern)):
                full_title = title.format(name.removeprefix(pattern))
                charts.append({"section": section, "metric": name, "title": full_title, "unit": unit})
    others = [name for name in known if name not in {chart["metric"] for chart in charts}]
    return charts + [{"section": "More", "metric": name, "title": name, "unit": ""} for name in others]


# ---- completions -------------------------------------------------------------------------------------------


def read_completions(folder: Path, config: dict) -> tuple[dict, dict[int, str]]:
    """Read rollouts.jsonl, a step at a time.

    returns  {"groups": each {"step", "group", "prompt", "tied", "names" of the reward functions,
             "completions"}, "pieces": the text of every token id, {} without a tokenizer, "every": n, if
             every n-th saved step was read, "offers": colours of tokens that the run has saved};
             {step: completion_tokens of each completion}, as JSON that the page parses to show that step
    """
    path, groups, tokens, ids, offers = folder / "rollouts.jsonl", [], {}, set(), set()
    every = max(1, -(-path.stat().st_size // MAX_BYTES)) if path.is_file() else 1
    tokenizer = find_tokenizer(folder, config)
    try:
        for records in read_steps(path, every):
            step_tokens = [completion_tokens(record) for record in records]
            tokens[records[0]["step"]] = as_json(step_tokens)
            groups += summarise_groups(records, tokenizer)
            for completion in step_tokens:
                ids.update(completion[0])
                offers |= {name for name, i in (("entropy", 3), ("change", 4)) if completion[i]}
        pieces = {token: token_text(tokenizer, token) for token in sorted(ids)} if tokenizer else {}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"--report: {path} is damaged: {type(error).__name__}: {error}") from None
    return {"groups": groups, "pieces": pieces, "every": every, "offers": sorted(offers)}, tokens


def summarise_groups(records: list[dict], tokenizer) -> list[dict]:
    """Return the groups of a step. "first" is the index of the group's first completion within the step."""
    groups = [list(group) for _, group in groupby(records, key=lambda record: record["group"])]
    size = len(groups[0])
    return [
        {
            "step": group[0]["step"], "group": group[0]["group"],
            "prompt": prompt_text(group[0]["prompt"], tokenizer),
            "tied": group[0].get("tied", not any(record["advantage"] for record in group)),
            "names": list(group[0]["rewards"]), "first": number * size,
            "completions": [summarise_completion(record) for record in group],
        }
        for number, group in enumerate(groups)
    ]


def summarise_completion(record: dict) -> dict:
    """Return the fields of a completion on the page, without its tokens."""
    return {
        "text": as_text(record["completion"]), "reward": round_digits(record["reward"], 6),
        "advantage": round_digits(record["advantage"], 4),
        "points": [round_digits(points, 6) for points in record["rewards"].values()],
        "finished": record["finished"], "tokens": record["tokens"],
    }


def completion_tokens(record: dict) -> list:
    """Return [ids, log-probabilities, advantages, entropies, changes] of a completion's tokens.

    In nats, except advantages. Log-probabilities have three decimals, the others three significant digits,
    because changes may be small. A change is the log-probability after the update minus that at sampling, so
    it includes the rounding differences of sampler and trainer (bfloat16). A token of an environment has
    None in each list. Advantages are None without a value head, and entropies and changes are None if the
    run did not save them.
    """
    sampled, after = record["sampling_logp"], record.get("logp_after")
    logp = [None if (finite := or_none(value)) is None else round(finite, 3) for value in sampled]
    advantages, entropies = (
        values and [round_digits(value, 3) for value in values]
        for values in (record.get("token_advantages"), record.get("entropies"))
    )
    changes = after and [
        None if new is None or old is None else round_digits(new - old, 3)
        for new, old in zip(after, sampled, strict=True)
    ]
    return [record["completion_ids"], logp, advantages, entropies, changes]


def prompt_text(prompt, tokenizer) -> str:
    """Return a prompt as text. It may be text, chat messages, or the token ids of a truncated one."""
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return as_text(prompt)
    return f"... {tokenizer.decode(prompt)}" if tokenizer else f"... {len(prompt)} tokens"


def find_tokenizer(folder: Path, config: dict):
    """Load the tokenizer of the final model, the newest checkpoint or the initial model, or return None."""
    source = config.get("model", {}).get("model_path", "")
    for path in [folder / "final", *sorted((folder / "checkpoints").glob("step-*"))[-1:], Path(source)]:
        if path.is_dir() or source == "":
            try:
                return load_tokenizer(ModelConfig(model_path=str(path) if source else ""))
            except ValueError:
                continue
    return None


def token_text(tokenizer, token: int) -> str:
    """Return the text of a token, decoded after itself because some tokenizers drop a leading space."""
    once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once) :]
