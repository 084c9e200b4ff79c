"""The report: what lands in the page, and that nothing from a model can run in it."""

import base64
import hashlib
import json
import math
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from fake_run import AFTER, HOSTILE, edit_rollouts, fake_run

import infer
from analysis import report
from analysis.report import draw_curves, read_run, write_report
from model import byte_tokenizer


class Page(HTMLParser):
    """What a browser makes of the file: its tags, texts, JSON by id, and scripts."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.texts, self.data, self.scripts, self.open = [], [], {}, [], None
        self.feed(path.read_text(encoding="utf-8"))
        self.kinds = {(tag, tuple(dict(attributes))) for tag, attributes in self.tags}

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))
        if tag in ("script", "style"):
            self.open = dict(attributes).get("id", tag)

    def handle_endtag(self, tag):
        self.open = None if tag in ("script", "style") else self.open

    def handle_data(self, text):
        if self.open is None:
            self.texts += [text.strip()] if text.strip() else []
        elif self.open == "script":
            self.scripts.append(text)
        elif self.open != "style":
            self.data[self.open] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def panels_of(monkeypatch, folder):
    """{title: axes} of the curves of the run in a folder."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_curves(read_run(folder, settings_of(folder)))
    return {axes.get_title(): axes for axes in drawn[0].axes}


def settings_of(folder):
    return {name: value for section in json.loads((folder / "config.json").read_text()).values() for name, value in section.items()}


def curves_of(axes):
    """{label: [(step, value), ...]} of a panel."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines if not line.get_label().startswith("_")}


def test_curves_have_every_step_with_a_number_the_interval_and_the_start_of_a_phase(tmp_path, monkeypatch):
    panels = panels_of(monkeypatch, fake_run(tmp_path / "run"))
    assert list(panels) == ["reward (points)", "held out (share), 95 % interval", "groups and completions (share)", "length (tokens)",
                            "policy (nat/token)", "KL (nat/token)", "time (s)"]
    rewards = curves_of(panels["reward (points)"])
    assert rewards == {"mean_reward": [(step, step / 12) for step in range(2, 13)], "reward/correctness": [(step, 0.5) for step in range(2, 13)]}
    assert curves_of(panels["KL (nat/token)"]) == {"kl": [(step, 0.01) for step in range(2, 13) if step != 3]}
    held_out = panels["held out (share), 95 % interval"]
    assert curves_of(held_out) == {"eval_accuracy": [(0, 0.1), (12, 0.8)]}
    band = {tuple(corner) for corner in held_out.collections[0].get_paths()[0].vertices.tolist()}
    assert band == {(0, 0.05), (0, 0.2), (12, 0.7), (12, 0.9)}
    assert [line.get_xdata() for line in held_out.lines if line.get_linestyle() == ":"] == [[2, 2]]


def test_names_of_metrics_are_no_formulas(tmp_path):
    folder = fake_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "phase": "grpo", "reward/$\\no$": 2.5, "mean_reward": True, "kl": math.nan}) + "\n")
    run = read_run(folder, settings_of(folder))
    assert draw_curves(run).startswith(b"\x89PNG") and draw_curves(run | {"series": {}}) == b""


def test_the_page_has_curves_findings_settings_and_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw_curves", draw_curves)
    folder = fake_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "phase": "grpo", "skipped": 1}) + "\n" for step in (13, 14))
    page = Page(write_report(folder))
    assert f"plain-grpo: {folder}" in page.texts and "cold_start until step 1, grpo until step 14" in page.texts
    (picture,) = [dict(attributes)["src"] for tag, attributes in page.tags if tag == "img"]
    assert base64.b64decode(picture.partition("base64,")[2]) == (folder / "curves.png").read_bytes()
    course, finding = page.texts[page.texts.index("Training doctor") + 1 :][:2]
    assert course.startswith("mean_reward 0.33 -> ") and finding.startswith("not_finite: ")
    assert list(page.data) == ["step-2", "step-6", "step-10"]
    groups = page.data["step-6"]
    assert [group["title"] for group in groups] == [f"step 6, group {p}" for p in (1, 2, 3, 0)], "the tied one is last"
    assert [group["tied"] for group in groups] == [False] * 3 + [True] and groups[0]["prompt"] == "prompt 1"
    completion = groups[0]["completions"][1]
    assert completion["reward"] == "reward +0.00" and completion["end"] == "20 tokens, truncated at the length limit"
    assert completion["points"] == ["advantage -0.50", "correctness +0.00", "length ?"]
    assert "".join(completion["pieces"]) == "answer 11 of step 6<eos>"
    assert completion["numbers"] == {"log-probability": pytest.approx([-0.1 * t for t in range(20)])}


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


def test_settings_stand_beside_the_defaults(tmp_path):
    folder = fake_run(tmp_path / "run", flags=["--learning_rate", "0.05"])
    settings = json.loads((folder / "config.json").read_text())
    settings["grpo"]["of_a_later_version"] = ["a", 7]
    (folder / "config.json").write_text(json.dumps(settings))
    texts = Page(write_report(folder)).texts
    cells = texts[texts.index("flag") : texts.index("Groups", texts.index("flag"))]
    rows = dict(zip(cells[3::3], zip(cells[4::3], cells[5::3], strict=True), strict=True))
    assert rows["--learning_rate"] == ("0.05", "5e-06") and rows["--of_a_later_version"] == ('["a", 7]', "null")
    assert rows["--use_grpo"] == ("true", "false") and rows["--profile"] == ('"demo"', '""')
    assert not {"--ppo_epochs", "--resume"} & set(rows)


def test_no_text_of_a_model_becomes_part_of_the_page(tmp_path):
    harmless = Page(write_report(fake_run(tmp_path / "harmless")))
    for number, text in enumerate(HOSTILE):
        folder = fake_run(tmp_path / f"{number}" / '<b>"run', completion=text, prompt=text)
        page = Page(write_report(folder))
        assert page.kinds == harmless.kinds and page.scripts == harmless.scripts, text
        assert {group["prompt"] for groups in page.data.values() for group in groups} == {text}


def test_no_field_of_a_file_becomes_part_of_the_page(tmp_path):
    """Whatever the files of somebody else's run hold in place of numbers and names."""
    harmless, hostile = Page(write_report(fake_run(tmp_path / "harmless"))), '1"></script><img src=x onerror=alert(1)>'
    fields = "group", "tokens", "finished", "prompt", "completion"
    for name in fields:
        folder = edit_rollouts(fake_run(tmp_path / name), lambda record, i, name=name: record.update({name: hostile}))
        page = Page(write_report(folder))
        assert page.kinds == harmless.kinds and page.scripts == harmless.scripts, name
    folder = edit_rollouts(fake_run(tmp_path / "names"), lambda record, i: record.update(rewards={hostile: 1.0}))
    config = json.loads((folder / "config.json").read_text())
    config["training"] |= {hostile: hostile, "max_steps": hostile}
    config[hostile] = {hostile: hostile}
    (folder / "config.json").write_text(json.dumps(config))
    lines = {"step": 13, "phase": "grpo", hostile: 1.0, f"reward/{hostile}": 1.0}, {"step": 14, "phase": hostile}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    page = Page(write_report(folder))
    assert page.kinds == harmless.kinds and page.scripts == harmless.scripts
    assert f"--{hostile}" in page.texts and any(text.endswith(f"{hostile} until step 14") for text in page.texts), "they are shown"
    for head in f'"step": {json.dumps(hostile)}', f'"step": 10, "x": 1, "step": {json.dumps(hostile)}', '"step": null':
        folder = fake_run(tmp_path / str(len(head)))
        for name in "rollouts.jsonl", "metrics.jsonl":
            text = (folder / name).read_text().replace('"step": 10', head)
            (folder / name).write_text(text)
        page = Page(write_report(folder))
        assert page.kinds == harmless.kinds and list(page.data) == ["step-2", "step-6"]


def test_the_page_allows_its_own_script_and_nothing_else(tmp_path):
    page = Page(write_report(fake_run(tmp_path / "run")))
    metas = [dict(attributes) for tag, attributes in page.tags if tag == "meta"]
    (policy,) = [meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy and len(page.scripts) == 1
    assert base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode() in policy
    assert not [tag for tag, attributes in page.tags if {"src", "href"} & set(dict(attributes)) and tag != "a"], "the curves are left out"
    for word in "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "http:", "https:":
        assert word not in page.scripts[0].replace("http://www.w3.org/2000/svg", ""), word


def test_numbers_of_tokens_have_four_decimals_and_none_where_they_are_not_finite(tmp_path):
    folder = edit_rollouts(fake_run(tmp_path / "run"), lambda record, i: record.update(AFTER))
    edit_rollouts(folder, lambda record, i: record.update(
        reward=None, advantage=math.nan, sampling_logp=[-math.inf, None], logp_after=[-1.0, None], entropies=[math.nan] * 2)
        if record["step"] == 10 else None)
    data = Page(write_report(folder)).data
    assert data["step-6"][0]["completions"][0]["numbers"] == {
        "log-probability": [-0.25, -1.0, -2.5, None, -1.0], "change": [0.0, 0.0002, -0.1235, None, 0.5],
        "entropy": [0.0, 0.0001, 0.6931, None, 2.3026]}
    last = data["step-10"][0]["completions"][0]
    assert last["reward"] == "reward ?"
    assert set(map(tuple, last["numbers"].values())) <= {(None, None), (math.inf, None)}
    edit_rollouts(folder, lambda record, i: record["logp_after"].append(0.0))
    with pytest.raises(ValueError, match=r"rollouts\.jsonl is damaged"):
        write_report(folder)


@pytest.mark.parametrize("keep", [[], ["metrics.jsonl"]])
def test_a_run_that_has_written_nothing_yet_has_a_report(tmp_path, keep):
    folder = fake_run(tmp_path / "run")
    for name in "metrics.jsonl", "rollouts.jsonl":
        (folder / name).write_text("") if name in keep else (folder / name).unlink()
    page = Page(write_report(folder))
    assert {"no steps yet", "metrics.jsonl holds no numbers yet.", "No rollouts.", "--use_grpo"} <= set(page.texts)
    assert page.scripts == [] and page.data == {}


def test_files_are_read_up_to_what_is_damaged_with_one_line_for_each(tmp_path, capsys):
    folder = fake_run(tmp_path / "run")                   # of 12 completions at the steps 2, 6 and 10
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "pha')                   # cut off by a crash
    lines, rollouts = (folder / "metrics.jsonl").read_text().splitlines(), (folder / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "rollouts.jsonl").write_bytes(b"".join(rollouts[:32]))             # 8 of the 12 of step 10
    page = Page(write_report(folder))
    assert list(page.data) == ["step-2", "step-6"] and "grpo until step 12" in str(page.texts)
    write_report(folder)
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}/metrics.jsonl: line {len(lines)} is damaged, as a kill leaves it; left out from there on",
        f"{folder}/rollouts.jsonl: saved step 3 is not whole; left out from there on",
    ]


def test_of_very_many_completions_every_nth_saved_step_is_shown(tmp_path, monkeypatch):
    folder = fake_run(tmp_path / "run", steps=40)
    monkeypatch.setattr(report, "MAX_BYTES", (folder / "rollouts.jsonl").stat().st_size // 3 + 1)
    page = Page(write_report(folder))
    assert list(page.data) == [f"step-{step}" for step in (2, 14, 26, 38)]
    assert "1 of 3 saved steps is shown; rollouts.jsonl holds all." in str(page.texts)


def test_tokens_have_their_text_with_the_space_they_begin_with(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "s": 2, "<unk>": 3, "\u2581.": 4}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()      # as SentencePiece's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert "".join(report.token_text(tokenizer, token) for token in (0, 1, 2, 4)) == " the cats ."


def test_without_a_tokenizer_the_page_has_texts_and_no_numbers_of_tokens(tmp_path):
    page = Page(write_report(fake_run(tmp_path / "run", flags=["--model_path", "some/model"])))
    completion = page.data["step-2"][-1]["completions"][0]
    assert completion["pieces"] == ["answer 00 of step 2"] and completion["numbers"] == {}


@pytest.mark.parametrize("prompt,shown", [
    ([{"role": "system", "content": "<i>"}, {"role": "user", "content": "q"}], "system: <i>\nuser: q"),
    ([2, 19, 13], "... <bos>1+"),
])
def test_prompts_are_shown_as_people_read_them(tmp_path, prompt, shown):
    page = Page(write_report(fake_run(tmp_path / "run", prompt=prompt)))
    assert page.data["step-2"][0]["prompt"] == shown


@pytest.mark.parametrize("break_it,message", [
    (lambda folder: (folder / "config.json").unlink(), "config.json: not a readable JSON file of settings: .*No such file"),
    (lambda folder: (folder / "config.json").write_text("[1"), "config.json: not a readable JSON file of settings"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json: must hold an object"),
    (lambda folder: (folder / "rollouts.jsonl").write_text('{"step": 1, "phase": "grpo", "completions_of_step": 1}\n'), "rollouts.jsonl is damaged"),
    (lambda folder: edit_rollouts(folder, lambda record, i: record.update(completion_ids=["<b>", 1])), "rollouts.jsonl is damaged"),
])
def test_a_folder_without_a_valid_run_is_rejected_in_one_line(tmp_path, break_it, message):
    folder = fake_run(tmp_path / "run")
    break_it(folder)
    with pytest.raises(ValueError, match=message) as error:
        infer.main(["--report", str(folder)])
    assert "\n" not in str(error.value) and not (folder / "report.html").exists()


def test_the_command_says_where_the_page_is_and_the_newest_step_is_shown_first(tmp_path, capsys):
    folder = fake_run(tmp_path / "run")
    infer.main(["--report", str(folder)])
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    options = [dict(attributes) for tag, attributes in Page(folder / "report.html").tags if tag == "option"]
    assert [option["value"] for option in options if "selected" in option] == ["step-10"]
