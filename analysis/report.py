"""
Report on runs: a static HTML page about one run (infer.py --report RUN), and a table that compares several.

report.html beside this module is a Jinja template. Text of models and data sets is not trusted: Jinja escapes
all that it inserts, and the page has no script; in text for a terminal, control characters are escaped.
"""

import base64
import fnmatch
import io
import math
import re
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from analysis.doctor import diagnose
from config import DEFAULTS, ModelConfig
from data import as_text
from engine.models import load_any_tokenizer
from runs.console import reward_text, with_interval, with_limits
from runs.folder import or_none, read_jsonl, read_records, replace_text
from sources.settings import read_settings

TEMPLATE = Path(__file__).with_suffix(".html")
STEPS_SHOWN, GROUPS_SHOWN = 3, 4                          # the last steps in rollouts.jsonl; groups of each
PANELS = {                      # title of a panel -> names of its metrics (file patterns)
    "reward": ["mean_reward", "reward/*"],
    "held out (share), 95 % interval": ["eval_accuracy", "eval_truncated"],
    "held-out reward, 95 % interval": ["eval_reward/*"],
    "groups and completions (share)": ["zero_variance_groups", "truncated", "clip_fraction"],
    "length (tokens)": ["completion_tokens"],
    "policy (nat/token)": ["loss", "entropy"],
    "KL (nat/token)": ["kl", "approx_kl"],
    "gradient norm": ["grad_norm"],
    "time (s)": ["*_seconds"],
}
NUMBERS = {                     # in the title of a token: name -> field of rollouts.jsonl
    "log-probability": "sampling_logp", "advantage": "token_advantages", "reward of the turn": "turn_points",
}
# Settings in which runs of one variant may differ; the last two change when memory runs out.
OF_A_RUN = "seed", "output_dir", "max_tokens_per_forward", "generation_batch_size"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def write_report(folder: Path) -> Path:
    """Write report.html and curves.png to a run folder. Raises ValueError if it is not one, or damaged."""
    config = DEFAULTS | read_settings(folder / "config.json")
    try:
        lines = read_jsonl(folder / "metrics.jsonl")
        phases, curves, findings = ends_of_phases(lines), draw_curves(lines), diagnose(lines, config)
        steps = read_groups(folder, config)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        message = f"--report: metrics.jsonl or rollouts.jsonl of {folder} is damaged"
        raise ValueError(f"{message}: {type(error).__name__}: {error}") from None
    if curves:
        (folder / "curves.png").write_bytes(curves)
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    replace_text(folder / "report.html", page.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=folder, phases=phases, curves=base64.b64encode(curves).decode(), findings=findings, steps=steps,
        settings=config, defaults=DEFAULTS,
    ))
    return folder / "report.html"


def ends_of_phases(lines: list[dict]) -> dict[str, int]:
    """Return the last step of each phase."""
    return {line["phase"]: line["step"] for line in lines if line["phase"] != "eval"}


def draw_curves(lines: list[dict]) -> bytes:
    """Return the curves of a run as PNG, from the lines of metrics.jsonl; empty if there are no numbers yet.

    Dotted lines mark the starts of phases, and bands 95 % intervals.
    """
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure

    series: dict[str, dict] = {}                          # {metric: {step: value}} of all finite numbers
    for line in lines:
        for name, value in line.items():
            if type(value) in (int, float) and or_none(value) is not None:             # no bool
                series.setdefault(name, {})[line["step"]] = value
    panels = {}
    for title, patterns in PANELS.items():
        if metrics := sorted(name for pattern in patterns for name in fnmatch.filter(series, pattern)):
            panels[title] = metrics
    if not panels:
        return b""
    num_rows, png = -(-len(panels) // 2), io.BytesIO()
    with rc_context({"text.parse_math": False}):          # names of metrics are not formulas
        figure, axes = Figure(figsize=(12, 2.5 * num_rows), layout="constrained"), None
        for place, (title, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(num_rows, 2, place, title=title, sharex=axes)
            for i, metric in enumerate(metrics):
                values, low, high = (series.get(name, {}) for name in with_limits(metric))
                marker = "." if metric.startswith("eval") else ""
                axes.plot([*values], [*values.values()], marker=marker, color=f"C{i}", label=metric)
                limits = [*low.values()], [*high.values()]
                axes.fill_between([*low], *limits, color=f"C{i}", alpha=0.2, linewidth=0)
            for last_step in [*ends_of_phases(lines).values()][:-1]:
                axes.axvline(last_step + 1, color="grey", linestyle=":")
            axes.legend(fontsize="small")
        figure.supxlabel("optimiser step")
        figure.savefig(png, dpi=100)
    return png.getvalue()


# ---- completions -------------------------------------------------------------------------------------------


def read_groups(folder: Path, config: dict) -> list[dict]:
    """Return the last steps in rollouts.jsonl as {"step", "groups": each with title, prompt, completions}.

    Zero-variance groups come last. A completion is (its numbers as text, its tokens by tokens_of).
    """
    tokenizer, steps = find_tokenizer(folder, config), []
    records = read_records(folder / "rollouts.jsonl", STEPS_SHOWN)
    for step, of_step in groupby(records, key=lambda record: record["step"]):
        groups = [list(group) for _, group in groupby(of_step, key=lambda record: record["group"])]
        groups.sort(key=lambda group: bool(group[0]["zero_variance"]))
        shown = []
        for first, *others in groups[:GROUPS_SHOWN]:
            title = f"step {step}, group {first['group']}" + ", zero variance" * bool(first["zero_variance"])
            completions = [(numbers_of(record), tokens_of(record, tokenizer)) for record in (first, *others)]
            shown.append({"title": title, "prompt": as_text(first["prompt"]), "completions": completions})
        steps.append({"step": step, "groups": shown})
    return steps


def numbers_of(record: dict) -> str:
    """Return the reward of a completion, its advantage, its rewards by function, and its length."""
    rewards = {"reward": record["reward"], "advantage": record["advantage"]} | record["rewards"]
    parts = [f"{name} {reward_text(value)}" for name, value in rewards.items()]
    truncated = "" if record["finished"] else ", truncated at the length limit"
    return ", ".join([*parts, f"{record['tokens']} tokens"]) + truncated


def tokens_of(record: dict, tokenizer) -> list[tuple[str, str, float | None]]:
    """Return (text, title, shade) for each token of a completion; without a tokenizer, for its whole text.

    title  the numbers that the run saved; advantages of tokens only if they differ, as with a value head
    shade  1 - p, the probability of all other tokens; None for tokens of an environment
    """
    if tokenizer is None:
        return [(as_text(record["completion"]), "", 0.0)]
    numbers = {name: record[field] for name, field in NUMBERS.items() if field in record}
    tokens = []
    for token, *values in zip(record["completion_ids"], *numbers.values(), strict=True):
        known = zip(numbers, values, strict=True)
        title = ", ".join(f"{name} {value:.4g}" for name, value in known if value is not None)
        shade = None if values[0] is None else 1 - math.exp(values[0])
        tokens.append((token_text(tokenizer, token), title, shade))
    return tokens


def find_tokenizer(folder: Path, config: dict):
    """Load the tokenizer of the final model, the newest checkpoint or the initial model, or return None."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1:]
    for path in folder / "final", *newest, config["model_path"]:
        if not path or Path(path).is_dir():
            with suppress(ValueError):
                return load_any_tokenizer(ModelConfig(model_path=str(path)))
    return None


@cache
def token_text(tokenizer, token: int) -> str:
    """Return the text of a token. It is decoded twice in a row, as some tokenizers drop a leading space."""
    once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once) :]


# ---- several runs ------------------------------------------------------------------------------------------


def compare_runs(folders: list[Path]) -> str:
    """Return a table of runs: the settings that differ, and held-out results before and after training.

    Runs that differ only in the seed are adjacent, followed by their mean and their range. Raises ValueError
    if a folder is not a run with an evaluation.
    """
    runs = []
    for folder in folders:
        settings = DEFAULTS | read_settings(folder / "config.json")
        evaluations = [line for line in read_jsonl(folder / "metrics.jsonl") if line["phase"] == "eval"]
        if not evaluations:
            raise ValueError(f"--report: {folder} has no evaluation on held-out problems; see --eval_limit")
        runs.append(dict(folder=str(folder), settings=settings, before=evaluations[0], after=evaluations[-1]))
    names = [name for name in DEFAULTS if name not in OF_A_RUN]
    differ = [name for name in names if len({str(run["settings"][name]) for run in runs}) > 1]
    variants: dict[tuple, list[dict]] = {}
    for run in runs:
        values = tuple(" ".join(str(run["settings"][name]).split()) for name in differ)      # of one line
        variants.setdefault(values, []).append(run)
    by_accuracy = all("eval_accuracy" in run["after"] for run in runs)
    rewards = {name for run in runs for name in run["after"] if name.startswith("eval_reward/")}
    metrics = ["eval_accuracy"] if by_accuracy else sorted(rewards)
    columns = [(metric, when) for metric in metrics for when in ("before", "after")]
    rows = [[*differ, "run", "seed", "steps", *map(" ".join, columns)]]
    for values, members in variants.items():
        for run in members:
            results = [with_interval(run[when], metric) for metric, when in columns]
            seed, steps = str(run["settings"]["seed"]), str(run["after"]["step"])
            rows.append([*values, run["folder"], seed, steps, *results])
        if len(members) > 1:
            results = [mean_and_range([run[when].get(metric) for run in members]) for metric, when in columns]
            rows.append([*values, f"mean (range) of {len(members)}", "", "", *results])
    form = "  ".join(f"{{:<{max(map(len, column))}}}" for column in zip(*rows, strict=True))
    return escape("\n".join(form.format(*row).rstrip() for row in rows))


def escape(text: str) -> str:
    """Replace control characters, except newline and tab, by escapes such as \\x1b."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def mean_and_range(values: list[float | None]) -> str:
    """Return results of several seeds as "0.910 (0.870 to 0.940)"."""
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f} ({min(known):.3f} to {max(known):.3f})" if known else "?"
