"""
Draw the curves of a run, and write its report: one HTML page with them that needs no network.

    python infer.py --report RUN                                a run writes its own when it ends

report.html beside this module is its Jinja template. Text of models and data sets is not trusted: Jinja
escapes what it inserts, completions are JSON in which no tag can begin, the script shows them as text and
never as HTML, and the page's Content-Security-Policy forbids all other scripts and all connections.

Left out on purpose: probabilities of tokens that were not sampled (rollouts.jsonl does not hold them), and
metrics that PANELS does not name, which are in metrics.jsonl.
"""

import base64
import fnmatch
import hashlib
import io
import json
import re
from contextlib import suppress
from functools import cache, partial
from itertools import compress, groupby, pairwise
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps

from analysis.doctor import diagnose
from config import DEFAULTS, ModelConfig
from data import as_text
from engine.policy import load_any_tokenizer
from runs.console import points_text
from runs.folder import or_none, read_jsonl, read_steps, replace_text
from sources.settings import read_settings

TEMPLATE = Path(__file__).with_suffix(".html")
# Of a longer rollouts.jsonl every second, third, ... step is shown. The page has about half the size.
MAX_BYTES = 50_000_000
PANELS = {                      # of the curves: title -> names of metrics (file patterns)
    "reward (points)": ["mean_reward", "reward/*"],
    "held out (share), 95 % interval": ["eval_accuracy", "eval_truncated"],
    "held out (points), 95 % interval": ["eval_reward/*"],
    "groups and completions (share)": ["tied_groups", "truncated", "clip_fraction"],
    "length (tokens)": ["completion_tokens"],
    "policy (nat/token)": ["loss", "entropy"],
    "KL (nat/token)": ["kl", "approx_kl"],
    "gradient norm": ["grad_norm"],
    "time (s)": ["*_seconds"],
}


def write_report(folder: Path) -> Path:
    """Write folder/report.html on the run in it, and its curves to folder/curves.png.

    raises  ValueError in one line, if the folder is not a run or a file in it is damaged
    """
    config = DEFAULTS | read_settings(folder / "config.json")
    run = read_run(folder, config)
    curves = draw_curves(run)
    if curves:
        (folder / "curves.png").write_bytes(curves)
    template = TEMPLATE.read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    rows = ((name, value, DEFAULTS.get(name)) for name, value in config.items())
    changed = [(name, json.dumps(own), json.dumps(default)) for name, own, default in rows if own != default]
    target = folder / "report.html"
    replace_text(target, page.from_string(template).render(
        run, script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        curves=base64.b64encode(curves).decode(), settings=changed,
    ))
    return target


def read_run(folder: Path, config: dict) -> dict:
    """Return what the page shows of a run: name, phases, series, findings of the doctor and completions."""
    lines = read_jsonl(folder / "metrics.jsonl")
    ends = {line["phase"]: line["step"] for line in lines if line["phase"] != "eval"}
    phases = ", ".join(f"{phase} until step {step}" for phase, step in ends.items())
    return {
        "name": str(folder), "phases": phases or "no steps yet", "series": metric_series(lines),
        "starts": [step + 1 for step in ends.values()][:-1],
        "findings": diagnose(lines, config),
    } | read_completions(folder, config)


# ---- curves ------------------------------------------------------------------------------------------------


def metric_series(lines: list[dict]) -> dict[str, dict[int, float]]:
    """Return {metric: {step: value}} of all finite numbers."""
    series: dict[str, dict] = {}
    for line in lines:
        for name, value in line.items():
            if type(value) in (int, float) and or_none(value) is not None:             # no bool
                series.setdefault(name, {})[line["step"]] = or_none(value)
    return series


def draw_curves(run: dict) -> bytes:
    """Return the curves of a run as PNG, empty if there are no numbers yet.

    Dotted lines are the starts of its phases, bands 95 % intervals.
    """
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure

    series = run["series"]
    shown = {
        title: sorted(name for pattern in patterns for name in fnmatch.filter(series, pattern))
        for title, patterns in PANELS.items()
    }
    panels = {title: metrics for title, metrics in shown.items() if metrics}
    if not panels:
        return b""
    num_rows, png = -(-len(panels) // 2), io.BytesIO()
    with rc_context({"text.parse_math": False}):          # names of metrics are no formulas
        figure, axes = Figure(figsize=(12, 2.5 * num_rows), layout="constrained"), None
        for place, (title, metrics) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(num_rows, 2, place, title=title, sharex=axes)
            for i, metric in enumerate(metrics):
                values, low, high = (series.get(name, {}) for name in with_limits(metric))
                marker = "." if metric.startswith("eval") else ""
                axes.plot([*values], [*values.values()], marker=marker, color=f"C{i}", label=metric)
                both = [step for step in low if step in high]
                ends = [low[step] for step in both], [high[step] for step in both]
                axes.fill_between(both, *ends, color=f"C{i}", alpha=0.2, linewidth=0)
            for step in run["starts"]:
                axes.axvline(step, color="grey", linestyle=":")
            axes.legend(fontsize="small")
        figure.supxlabel("optimiser step")
        figure.savefig(png, dpi=100)
    return png.getvalue()


def with_limits(metric: str) -> tuple[str, ...]:
    """Return the names of a metric and of the ends of its interval."""
    limits = (re.sub("^eval_(accuracy|reward)", rf"eval_\1_{end}", metric) for end in ("low", "high"))
    return metric, *limits


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
            groups = []
            for number, group in groupby(records, key=lambda record: record["group"]):
                first, *others = group
                groups.append({
                    "title": f"step {first['step']}, group {number}", "tied": bool(first.get("tied")),
                    "prompt": prompt_text(first["prompt"], tokenizer),
                    "completions": [describe_completion(row, tokenizer) for row in (first, *others)],
                })
                saved.update(groups[-1]["completions"][0]["numbers"])
            groups.sort(key=lambda group: group["tied"])
            steps.append({"step": records[0]["step"], "groups": htmlsafe_json_dumps(groups, dumps=dumps)})
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"--report: {path} is damaged: {type(error).__name__}: {error}") from None
    return {"steps": steps, "every": every, "saved": saved}


def describe_completion(record: dict, tokenizer) -> dict:
    """Return lines of text, and texts and numbers of the tokens; without a tokenizer, one text."""
    end = "ended with a stop token" if record["finished"] else "truncated at the length limit"
    points = {"advantage": record["advantage"]} | record["rewards"]
    chosen = [logp is not None for logp in record["sampling_logp"]]              # by the policy
    ends = [own and not following for own, following in pairwise([*chosen, False])]      # of its turns
    of_turns = compress(record.get("turn_points", []), ends)
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
    """Return a prompt as text. It may be text, chat messages, or token ids, as in records of older runs."""
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return as_text(prompt)
    return f"... {tokenizer.decode(prompt)}" if tokenizer else f"... {len(prompt)} tokens"


def find_tokenizer(folder: Path, config: dict):
    """Load the tokenizer of the final model, the newest checkpoint or the initial model, or return None."""
    source = config["model_path"]
    for path in [folder / "final", *sorted((folder / "checkpoints").glob("step-*"))[-1:], Path(source)]:
        if path.is_dir() or source == "":
            with suppress(ValueError):
                return load_any_tokenizer(ModelConfig(model_path=str(path) if source else ""))
    return None


@cache
def token_text(tokenizer, token: int) -> str:
    """Return the text of a token, decoded after itself because some tokenizers drop a leading space."""
    once, twice = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return twice[len(once) :]
