"""The report: what lands in the page, and that nothing from a model can run in it. The table of several runs."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import infer
from analysis import report
from analysis.report import compare_runs, draw_curves, write_report
from model import byte_tokenizer
from runs.command_line import parse_config
from runs.folder import read_jsonl

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


class Page(HTMLParser):
    """What a browser makes of the file: its tags, its texts, and the tokens of its completions: (text, title, style)."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self.tokens, self.token = [], [], [], None
        self.feed(path.read_text(encoding="utf-8"))
        self.kinds = {(tag, tuple(dict(attributes))) for tag, attributes in self.tags}

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))
        self.token = dict(attributes) if tag == "span" else None

    def handle_data(self, text):
        if self.token is not None:
            self.tokens.append((text, self.token.get("title"), self.token.get("style")))
        elif text.strip():
            self.texts.append(text.strip())
        self.token = None


def curves_of(axes):
    """{label: [(step, value), ...]} of a panel."""
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in lines}


def test_curves_have_every_step_with_a_number_the_interval_and_the_start_of_a_phase(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_curves(read_jsonl(fake_run(tmp_path / "run") / "metrics.jsonl"))
    panels = {axes.get_title(): axes for axes in drawn[0].axes}
    assert list(panels) == ["reward", "held out (share), 95 % interval", "groups and completions (share)", "length (tokens)",
                            "policy (nat/token)", "KL (nat/token)", "time (s)"]
    rewards = curves_of(panels["reward"])
    assert rewards == {"mean_reward": [(step, step / 12) for step in range(2, 13)],
        "reward/correctness": [(step, 0.5) for step in range(2, 13)]}
    assert curves_of(panels["KL (nat/token)"]) == {"kl": [(step, 0.01) for step in range(2, 13) if step != 3]}
    held_out = panels["held out (share), 95 % interval"]
    assert curves_of(held_out) == {"eval_accuracy": [(0, 0.1), (12, 0.8)]}
    band = {tuple(corner) for corner in held_out.collections[0].get_paths()[0].vertices.tolist()}
    assert band == {(0, 0.05), (0, 0.2), (12, 0.7), (12, 0.9)}
    assert [line.get_xdata() for line in held_out.lines if line.get_linestyle() == ":"] == [[2, 2]]


def test_names_of_metrics_are_no_formulas_and_what_is_no_finite_number_is_not_drawn():
    line = {"step": 41, "phase": "grpo", "mean_reward": True, "kl": math.nan}
    assert draw_curves([line | {"reward/$\\no$": 2.5}]).startswith(b"\x89PNG")
    assert draw_curves([]) == draw_curves([line]) == b""


def test_the_page_has_curves_findings_settings_and_groups(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "draw_curves", draw_curves)
    folder = fake_run(tmp_path / "run", flags=["--learning_rate", "0.05"])
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "phase": "grpo", "skipped": 1}) + "\n" for step in (13, 14))
    settings = json.loads((folder / "config.json").read_text())
    settings["grpo"]["of_a_later_version"] = ["a", 7]
    (folder / "config.json").write_text(json.dumps(settings))
    infer.main(["--report", str(folder)])
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    page = Page(folder / "report.html")
    assert f"plain-grpo: {folder}" in page.texts and "cold_start until step 1, grpo until step 14" in page.texts
    (picture,) = [dict(attributes)["src"] for tag, attributes in page.tags if tag == "img"]
    assert base64.b64decode(picture.partition("base64,")[2]) == (folder / "curves.png").read_bytes()
    course, finding = page.texts[page.texts.index("Training doctor") + 1 :][:2]
    assert course.startswith("mean_reward 0.33 -> ") and finding.startswith("not_finite: ")
    cells = page.texts[page.texts.index("default") + 1 : page.texts.index("Groups of the last steps in rollouts.jsonl")]
    rows = dict(zip(cells[::3], zip(cells[1::3], cells[2::3], strict=True), strict=True))
    assert rows["--learning_rate"] == ("0.05", "0.0") and rows["--of_a_later_version"] == ('["a", 7]', "null")
    assert rows["--use_grpo"] == ("true", "false") and not {"--ppo_epochs", "--resume"} & set(rows)
    groups = page.texts[page.texts.index("step 6") :]
    assert groups[:4] == ["step 6", "step 6, group 1", "prompt 1",
                          "reward +0.50, advantage +1.00, correctness +0.00, length +0.50, 20 tokens"]
    assert groups[4] == "reward +0.00, advantage -0.50, correctness +0.00, length ?, 20 tokens, truncated at the length limit"
    assert "".join(text for text, *_ in page.tokens[-20:]) == "answer 02 of step 2<eos>", "of the last sibling of the last group"


def test_of_the_last_steps_a_few_groups_are_shown_the_newest_step_first_and_tied_groups_last(tmp_path, monkeypatch):
    folder = fake_run(tmp_path / "run", steps=22)         # saved: 2, 6, 10, 14, 18 and 22
    monkeypatch.setattr(report, "GROUPS_SHOWN", 2)
    titles = [text for text in Page(write_report(folder)).texts if re.match(r"step \d+, group", text)]
    assert titles == [f"step {step}, group {group}" for step in (22, 18, 14) for group in (1, 2)]
    monkeypatch.setattr(report, "GROUPS_SHOWN", 4)
    page = Page(write_report(folder))
    assert [text for text in page.texts if text.startswith("step 22")] == ["step 22",
        *(f"step 22, group {p}" for p in (1, 2, 3)), "step 22, group 0, zero variance"]
    assert [dict(attributes) for tag, attributes in page.tags if tag == "details"] == [{}, {"open": None}, {}, {}], "the newest"


def test_tokens_have_their_numbers_and_are_darker_the_less_probable_they_are(tmp_path):
    ids = byte_tokenizer()("wxyz", add_special_tokens=False)["input_ids"]
    folder = edit_rollouts(fake_run(tmp_path / "run", prompts=1, siblings=2), lambda record, i: record.update(
        completion_ids=ids, sampling_logp=[0.0, math.log(0.25), None, -math.inf], token_advantages=[1.0, -2.0, None, 0.5],
        turn_points=[0.0, 1.0, 0.0, 0.0]))
    assert Page(write_report(folder)).tokens[-4:] == [
        ("w", "log-probability 0, advantage 1, reward of the turn 0", "background: rgb(217 140 20 / 0.0)"),
        ("x", "log-probability -1.386, advantage -2, reward of the turn 1", "background: rgb(217 140 20 / 0.56)"),
        ("y", None, None),
        ("z", "log-probability -inf, advantage 0.5, reward of the turn 0", "background: rgb(217 140 20 / 0.75)"),
    ]


def test_tokens_are_read_with_the_final_model_else_the_newest_checkpoint_else_the_one_it_began_with(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(report, "load_any_tokenizer", lambda config: loaded.append(config.model_path) or byte_tokenizer())
    begun = tmp_path / "begun"
    begun.mkdir()
    folder = fake_run(tmp_path / "run", flags=["--model_path", str(begun)])
    write_report(folder)
    for step in "00000002", "00000010":
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    write_report(folder)
    (folder / "final").mkdir()
    write_report(folder)
    assert loaded == [str(begun), str(folder / "checkpoints/step-00000010"), str(folder / "final")]


def test_tokens_have_their_text_with_the_space_they_begin_with(tmp_path):
    words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "s": 2, "<unk>": 3, "\u2581.": 4}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()      # as SentencePiece's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert "".join(report.token_text(tokenizer, token) for token in (0, 1, 2, 4)) == " the cats ."


def test_no_text_of_a_model_becomes_part_of_the_page(tmp_path):
    harmless = Page(write_report(fake_run(tmp_path / "harmless")))
    assert not {"script", "link", "iframe"} & {tag for tag, _ in harmless.kinds}
    for number, text in enumerate(HOSTILE):
        folder = fake_run(tmp_path / f"{number}" / '<b>"run', completion=text, prompt=text)
        page = Page(write_report(folder))
        assert page.kinds == harmless.kinds and text.strip() in page.texts, text
        page = Page(write_report(fake_run(tmp_path / f"{number}/text", completion=text, flags=["--model_path", "some/model"])))
        assert page.kinds == harmless.kinds and text in {token for token, *_ in page.tokens}, text


def test_no_field_of_a_file_becomes_part_of_the_page(tmp_path):
    """Whatever the files of somebody else's run hold in place of numbers and names: it is escaped, or one line of error."""
    harmless, hostile = Page(write_report(fake_run(tmp_path / "harmless"))), '1"></script><img src=x onerror=alert(1)>'
    folder = edit_rollouts(fake_run(tmp_path / "numbers"), lambda record, i: record.update(advantage=hostile))
    with pytest.raises(ValueError, match=f"metrics.jsonl or rollouts.jsonl of {folder} is damaged"):
        write_report(folder)
    fields = {name: hostile for name in ("step", "group", "tokens", "finished", "zero_variance")}
    folder = edit_rollouts(fake_run(tmp_path / "names"), lambda record, i: record.update(rewards={hostile: 1.0}, **fields))
    config = json.loads((folder / "config.json").read_text())
    config["training"] |= {hostile: hostile, "max_steps": hostile}
    (folder / "config.json").write_text(json.dumps(config))
    lines = {"step": 13, "phase": "grpo", hostile: 1.0, f"reward/{hostile}": 1.0}, {"step": 14, "phase": hostile}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    page = Page(write_report(folder))
    assert page.kinds == harmless.kinds
    assert f"--{hostile}" in page.texts and any(text.endswith(f"{hostile} until step 14") for text in page.texts)


@pytest.mark.parametrize("keep", [[], ["metrics.jsonl"]])
def test_a_run_that_has_written_nothing_yet_has_a_report(tmp_path, keep):
    folder = fake_run(tmp_path / "run")
    for name in "metrics.jsonl", "rollouts.jsonl":
        (folder / name).write_text("") if name in keep else (folder / name).unlink()
    page = Page(write_report(folder))
    assert {"no steps yet", "metrics.jsonl holds no numbers yet.", "No rollouts.", "--use_grpo"} <= set(page.texts)
    assert page.tokens == []


@pytest.mark.parametrize("break_it,message", [
    (lambda folder: (folder / "config.json").unlink(), "config.json: not a readable JSON file of settings: .*No such file"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json: must hold an object"),
    (lambda folder: (folder / "rollouts.jsonl").write_text('{"step": 1, "phase": "grpo"}\n'), "is damaged: KeyError: 'group'"),
    (lambda folder: (folder / "metrics.jsonl").write_text('{"step": "1", "phase": "grpo"}\n{"step": 2}\n'),
     "is damaged: KeyError: 'phase'"),
])
def test_a_folder_without_a_valid_run_is_rejected_in_one_line(tmp_path, break_it, message):
    folder = fake_run(tmp_path / "run")
    break_it(folder)
    with pytest.raises(ValueError, match=rf"^.*{message}.*$"):
        infer.main(["--report", str(folder)])
    assert not (folder / "report.html").exists()


def run_of(folder, *evaluations, flags=()):
    """A run folder with the given lines of evaluations, at the steps 0, 50, 100, ..."""
    fake_run(folder, flags=flags)
    lines = [{"step": 50 * number, "phase": "eval"} | line for number, line in enumerate(evaluations)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 999, "phase": "grpo"}]))
    return folder


def accuracy(value):
    return {"eval_accuracy": value, "eval_accuracy_low": value - 0.1, "eval_accuracy_high": value + 0.1}


def rows_of(text):
    return [re.split(" {2,}", line) for line in text.splitlines()]


def test_runs_that_differ_in_the_seed_alone_have_a_mean_and_a_range(tmp_path, capsys):
    a, b = (run_of(tmp_path / name, accuracy(0.2), accuracy(0.9), accuracy(after), flags=["--seed", seed, "--output_dir", name])
            for name, seed, after in (("a", "1", 0.5), ("b", "2", 0.75)))
    c = run_of(tmp_path / "c", accuracy(0.3), accuracy(0.4), flags=["--loss_type", "gspo", "--max_tokens_per_forward", "99"])
    infer.main(["--report", str(a), str(c), str(b)])
    header, *rows = rows_of(capsys.readouterr().out)
    assert header == ["loss_type", "run", "seed", "steps", "eval_accuracy before", "eval_accuracy after"]
    assert rows == [
        ["dapo", str(a), "1", "100", "0.200 [0.100, 0.300]", "0.500 [0.400, 0.600]"],
        ["dapo", str(b), "2", "100", "0.200 [0.100, 0.300]", "0.750 [0.650, 0.850]"],
        ["dapo", "mean (range) of 2", "0.200 (0.200 to 0.200)", "0.625 (0.500 to 0.750)"],
        ["gspo", str(c), "0", "50", "0.300 [0.200, 0.400]", "0.400 [0.300, 0.500]"],
    ]


def test_settings_of_other_runs_do_not_control_the_terminal(tmp_path):
    folders = [run_of(tmp_path / str(n), accuracy(0.5), flags=["--instruction", text])
        for n, text in enumerate(("x", "\x1b]0;title\x07"))]
    assert "\\x1b]0;title\\x07" in compare_runs(folders)


def test_runs_that_do_not_reward_correctness_are_compared_by_their_own_rewards(tmp_path):
    points = {"eval_reward/diversity": 2.0, "eval_reward_low/diversity": None, "eval_reward_high/diversity": None}
    a = run_of(tmp_path / "a", points, flags=["--reward_functions", "diversity"])
    b = run_of(tmp_path / "b", {"eval_reward/diversity": None}, flags=["--reward_functions", "diversity"])
    assert "eval_reward/diversity after" in compare_runs([run_of(tmp_path / "answers unknown", points)])
    header, *rows = rows_of(compare_runs([a, b]))
    assert header[-2:] == ["eval_reward/diversity before", "eval_reward/diversity after"]
    assert [row[-2:] for row in rows] == [["2.000", "2.000"], ["?", "?"], ["2.000 (2.000 to 2.000)"] * 2]
