"""
Write the report of a run: one HTML page that holds all of its data and needs no network.

    python infer.py --report RUN [--against OTHER_RUN]          a run writes its own when it ends

report.html beside this module is its Jinja template. Text of models and data sets is not trusted: Jinja
escapes what it inserts, completions are JSON in which no tag can begin, the script shows them as text and
never as HTML, and the page's Content-Security-Policy forbids all other scripts and all connections.

Left out on purpose: probabilities of tokens that were not sampled (rollouts.jsonl does not hold them), and
the values of single steps in a chart, which are in metrics.jsonl.
"""

import base64
import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict
from fnmatch import filter as matching
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps

from config import SECTIONS, ModelConfig
from data import as_text
from engine.policy import load_tokenizer
from runs.records import or_none, points_of_turns, points_text, read_jsonl, read_steps, replace_text
from sources.settings import read_settings

TEMPLATE = Path(__file__).with_suffix(".html")
# Of a longer rollouts.jsonl every second, third, ... step is shown. The page has about half the size.
MAX_BYTES = 50_000_000
# Section, unit and names of metrics (file patterns). Each metric is drawn by the first row that it matches.
CHARTS = [
    ("Reward", "points", "mean_reward reward/*"),
    ("Held out", "share", "eval_accuracy"),
    ("Held out", "points", "eval_reward/*"),
    ("Held out", "share", "eval_truncated"),
    ("Groups", "share", "tied_groups truncated"),
    ("Groups", "tokens", "completion_tokens"),
    ("Policy", "nat/token", "entropy kl policy_kl loss"),
    ("Policy", "share", "clip_fraction"),
    ("Policy", "", "policy_loss grad_norm"),
    ("Speed and memory", "s", "*_seconds"),
    ("Speed and memory", "GB", "peak_memory_gb"),
    ("More", "", "*"),
]
LEFT, RIGHT, TOP, BOTTOM = 46, 352, 8, 126                # of a chart's axes, as in report.html


def write_report(folder: Path, against: Path | None = None) -> Path:
    """Write folder/report.html on the run in it, with the curves and groups of another run beside it.

    raises  ValueError in one line, if a folder is not a run or a file in it is damaged
    """
    folders = [folder] if against is None else [folder, against]
    defaults = {name: value for section in SECTIONS for name, value in asdict(section()).items()}
    configs = [defaults | read_settings(path / "config.json") for path in folders]
    runs = [read_run(path, config) for path, config in zip(folders, configs, strict=True)]
    steps = [saved | {"run": number} for number, run in enumerate(runs) for saved in run["steps"]]
    steps.sort(key=lambda saved: (saved["step"], -saved["run"]))                 # the last one is shown first
    advice = [(step, number, text) for number, run in enumerate(runs) for step, text in run["advice"]]
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    target = folder / "report.html"
    replace_text(target, page.from_string(template).render(
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=runs, sections=list_charts(runs), advice=sorted(advice), steps=steps,
        settings=list_settings(configs, defaults), saved={name for run in runs for name in run["saved"]},
    ))
    return target


def list_settings(configs: list[dict], defaults: dict) -> list[dict]:
    """Return the settings of which a run has another value than the default. Differing ones come first."""
    rows = []
    for name in dict.fromkeys(name for config in configs for name in config):
        texts = (json.dumps(config.get(name), ensure_ascii=False) for config in (*configs, defaults))
        *values, default = [text.strip('"') or text for text in texts]
        if set(values) != {default}:
            rows.append({"name": name, "values": values, "default": default, "differs": len(set(values)) > 1})
    return sorted(rows, key=lambda row: not row["differs"])


def read_run(folder: Path, config: dict) -> dict:
    """Return what the page shows of a run: name, phases, series, advice and completions."""
    lines = read_jsonl(folder / "metrics.jsonl")
    ends = {line["phase"]: line["step"] for line in lines if line["phase"] != "eval"}
    phases = ", ".join(f"{phase} until step {step}" for phase, step in ends.items())
    return {
        "name": str(folder), "phases": phases or "no steps yet", "series": metric_series(lines),
        "starts": [step + 1 for step in ends.values()][:-1],
        "advice": [(line["step"], str(line["advice"])) for line in lines if line.get("advice")],
    } | read_completions(folder, config)


# ---- metrics -----------------------------------------------------------------------------------------------


def metric_series(lines: list[dict]) -> dict[str, dict[int, float]]:
    """Return {metric: {step: value}} of all finite numbers."""
    series: dict[str, dict] = {}
    for line in lines:
        for name, value in line.items():
            if type(value) in (int, float) and or_none(value) is not None:             # no bool
                series.setdefault(name, {})[line["step"]] = or_none(value)
    return series


def list_charts(runs: list[dict]) -> dict[str, list[dict]]:
    """Return {section: charts} of every metric of a run."""
    names = dict.fromkeys(name for run in runs for name in run["series"] if name != "step")
    last_step = max((step for run in runs for steps in run["series"].values() for step in steps), default=0)
    sections: dict[str, list] = {}
    for section, unit, patterns in CHARTS:
        for name in [name for pattern in patterns.split() for name in matching(names, pattern)]:
            del names[name]
            if not re.match("eval_(accuracy|reward)_(low|high)", name):          # drawn with another metric
                chart = {"title": name, "unit": unit} | draw_chart(runs, name, unit, last_step or 1)
                sections.setdefault(section, []).append(chart)
    return sections


def draw_chart(runs: list[dict], metric: str, unit: str, last_step: int) -> dict:
    """Return the ticks of both axes, and for each run its first and last value and the SVG paths."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    limits = [re.sub("^eval_(accuracy|reward)", rf"eval_\1_{end}", metric) for end in ("low", "high")]
    curves = [[run["series"].get(name, {}) for name in (metric, *limits)] for run in runs]
    values = [value for parts in curves for part in parts for value in part.values()]
    low, high = min(values), max(values)
    margin = max(abs(low), abs(high)) / 2 or 0.5
    if high - low <= 2e-3 * margin:                       # flat: all labels would be the same four digits
        low, high = low - margin, high + margin
    y_ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(0 if unit == "share" else low, high).tolist()
    x_ticks = MaxNLocator(5, steps=[1, 2, 5, 10], integer=True).tick_values(0, last_step).tolist()

    def x(step):
        return round(LEFT + (RIGHT - LEFT) * step / last_step, 1)

    def y(value):
        return round(BOTTOM - (BOTTOM - TOP) * (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]), 1)

    def path(points):
        line = "L".join(f"{x(step)} {y(value)}" for step, value in points)
        return line and f"M{line}h0"                      # h0, a line of no length, makes a lone point a dot

    drawn = []
    for run, (series, lows, highs) in zip(runs, curves, strict=True):
        there, back = ([(step, end[step]) for step in lows if step in highs] for end in (highs, lows))
        ends = [*series.values()][:: max(1, len(series) - 1)]
        drawn.append({
            "ends": " \u2192 ".join(f"{value:.4g}" for value in ends),
            "curve": path(series.items()), "band": path(there + back[::-1]),
            "starts": [x(step) for step in run["starts"]], "advice": [x(step) for step, _ in run["advice"]],
        })
    return {
        "runs": drawn, "y_ticks": [(y(value), f"{value:.4g}") for value in y_ticks],
        "x_ticks": [(x(step), f"{step:.0f}") for step in x_ticks if step <= last_step],
    }


# ---- completions -------------------------------------------------------------------------------------------


def read_completions(folder: Path, config: dict) -> dict:
    """Read rollouts.jsonl, a step at a time.

    returns  {"steps": each {"step", "groups": JSON that the page parses to show them}, "every": n, if every
             n-th saved step was read, "saved": names of the numbers of tokens}
    """
    path, steps, saved = folder / "rollouts.jsonl", [], set()
    every = max(1, -(-path.stat().st_size // MAX_BYTES)) if path.is_file() else 1
    tokenizer = find_tokenizer(folder, config)
    dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    try:
        for records in read_steps(path, every):
            of_groups = groupby(records, key=lambda record: record["group"])
            groups = [describe_group(list(group), tokenizer) for _, group in of_groups]
            groups.sort(key=lambda group: group["tied"])
            saved.update(*(completion["numbers"] for group in groups for completion in group["completions"]))
            steps.append({"step": records[0]["step"], "groups": htmlsafe_json_dumps(groups, dumps=dumps)})
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"--report: {path} is damaged: {type(error).__name__}: {error}") from None
    return {"steps": steps, "every": every, "saved": saved}


def describe_group(group: list[dict], tokenizer) -> dict:
    """Return what the page shows of a group: its place, its prompt and its completions."""
    first = group[0]
    return {
        "title": f"step {first['step']}, group {first['group']}", "tied": bool(first.get("tied")),
        "prompt": prompt_text(first["prompt"], tokenizer),
        "completions": [describe_completion(record, tokenizer) for record in group],
    }


def describe_completion(record: dict, tokenizer) -> dict:
    """Return lines of text, and texts and numbers of the tokens; without a tokenizer, one text."""
    end = "ended with a stop token" if record["finished"] else "truncated at the length limit"
    points = {"advantage": record["advantage"]} | record["rewards"]
    chosen = [logp is not None for logp in record["sampling_logp"]]
    of_turns = points_of_turns(chosen, record.get("turn_points", []))
    points |= {f"turn {turn}": value for turn, value in enumerate(of_turns, start=1)}
    return {
        "reward": f"reward {points_text(record['reward'])}",
        "points": [f"{name} {points_text(value)}" for name, value in points.items()],
        "end": f"{record['tokens']} tokens, {end}",
        "numbers": token_numbers(record) if tokenizer else {},
        "pieces": [token_text(tokenizer, token) for token in record["completion_ids"]] if tokenizer
        else [as_text(record["completion"])],
    }


def token_numbers(record: dict) -> dict[str, list[float | None]]:
    """Return {name: a number for each token} of what the run saved, with four decimals.

    In nats, except advantages, which only runs with a value head have for tokens. A change is the
    log-probability after the update minus that at sampling, so it includes the rounding differences of
    sampler and trainer (bfloat16). Tokens of an environment have None.
    """
    saved = {
        "log-probability": "sampling_logp", "change": "logp_after", "entropy": "entropies",
        "advantage": "token_advantages",
    }
    # As floats, None is NaN.
    numbers = {name: np.array(record[key], float) for name, key in saved.items() if key in record}
    if "change" in numbers:
        numbers["change"] -= numbers["log-probability"]
    return {name: list(map(or_none, values.round(4).tolist())) for name, values in numbers.items()}


def prompt_text(prompt, tokenizer) -> str:
    """Return a prompt as text. It may be text, chat messages, or the token ids of a truncated one."""
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return as_text(prompt)
    return f"... {tokenizer.decode(prompt)}" if tokenizer else f"... {len(prompt)} tokens"


def find_tokenizer(folder: Path, config: dict):
    """Load the tokenizer of the final model, the newest checkpoint or the initial model, or return None."""
    source = config["model_path"]
    for path in [folder / "final", *sorted((folder / "checkpoints").glob("step-*"))[-1:], Path(source)]:
        if path.is_dir() or source == "":
            with suppress(ValueError):
                return load_tokenizer(ModelConfig(model_path=str(path) if source else ""))
    return None


@cache
def token_text(tokenizer, token: int) -> str:
    """Return the text of a token, decoded after itself because some tokenizers drop a leading space."""
    once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once) :]
