"""The report: what lands in the page, and that nothing from a model can run in it."""

import base64
import hashlib
import json
import math
import shutil
from html.parser import HTMLParser

import pytest
from fake_run import AFTER, HOSTILE, STOP, edit_rollouts, fake_run

import infer
from analysis import report
from model import byte_tokenizer
from analysis.report import list_charts, write_report

class Page(HTMLParser):
    """What a browser makes of the file: its tags, its data blocks by id and its scripts."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.data, self.scripts, self.open = [], {}, [], None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))
        if tag == "script":
            self.open = dict(attributes).get("id", "")

    def handle_endtag(self, tag):
        self.open = None if tag == "script" else self.open

    def handle_data(self, text):
        if self.open:
            self.data[self.open] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        elif self.open == "":
            self.scripts.append(text)


def test_the_numbers_of_the_files_are_in_the_page(tmp_path):
    page = Page(write_report(fake_run(tmp_path / "run")))
    (run,) = page.data["page"]["runs"]
    assert run["series"]["mean_reward"] == [list(range(2, 13)), [pytest.approx(step / 12, rel=1e-5) for step in range(2, 13)]]
    assert run["series"]["kl"][1][:3] == [0.01, None, 0.01]
    assert run["series"]["eval_accuracy"] == [[0, 12], [0.1, 0.8]] and run["series"]["eval_accuracy_high"][1] == [0.2, 0.9]
    assert run["series"]["tokens_per_second"] == [list(range(1, 13)), [5.0 * 4 / 0.5] + [10.0 * 4 * 3 / 2.0] * 11]
    assert run["phases"] == [["cold_start", 1], ["grpo", 2]] and run["advice"] == [[5, "ties: <b>most</b> groups"]]
    assert [group["step"] for group in run["groups"]] == [2] * 4 + [6] * 4 + [10] * 4 and run["every"] == 1
    group = run["groups"][1]
    assert group["prompt"] == "prompt 1" and group["names"] == ["correctness", "length"] and not group["tied"]
    assert group["completions"][1] == {
        "text": "answer 11 of step 2", "reward": 0.0, "advantage": -0.5, "points": [0.0, None], "finished": False, "tokens": 20}
    assert [group["tied"] for group in run["groups"]] == [True, False, False, False] * 3
    ids, logp, advantages, entropies, changes = page.data["tokens-0-2"][group["first"] + 1]
    assert len(ids) == 20 and logp[:3] == [0.0, -0.1, -0.2] and advantages is entropies is changes is None
    assert run["pieces"][str(STOP)] == "<eos>"


def test_groups_by_hand(tmp_path):
    """Rewards to six digits; a group with unscored completions is tied if the others are; tokens are found where they lie."""
    rewards = [[0.123456789, None, 0.123456789], [None, 0.5, 0.25], [None] * 3, [1.0, 2.0, 3.0]]
    page = Page(write_report(edit_rollouts(fake_run(tmp_path / "run"), lambda record, i: record.update(
        reward=rewards[record["group"]][i % 3], completion_ids=[i],
        tied=record["group"] % 2 == 0)))).data            # as training wrote it, of rewards after clips and penalties
    groups = page["page"]["runs"][0]["groups"][4:8]       # of step 6
    assert [group["tied"] for group in groups] == [True, False, True, False]
    assert [completion["reward"] for completion in groups[0]["completions"]] == [0.123457, None, 0.123457]
    ids = [[page["tokens-0-6"][group["first"] + g][0] for g in range(3)] for group in groups]
    assert ids == [[[12 + 3 * p + g] for g in range(3)] for p in range(4)]


def test_a_middling_completion_does_not_tie_its_group(tmp_path):
    """Its advantage is 0, and those beside it have others."""
    folder = edit_rollouts(
        fake_run(tmp_path / "run"), lambda record, i: record.update(reward=float(i % 3), advantage=i % 3 - 1.0))
    assert not any(group["tied"] for group in Page(write_report(folder)).data["page"]["runs"][0]["groups"])


def test_what_only_the_other_run_has_is_drawn_and_what_is_no_number_is_not(tmp_path):
    ours, other = fake_run(tmp_path / "ours"), fake_run(tmp_path / "other")
    for folder, line in (ours, {"never": None, "flag": True}), (other, {"theirs": 2.5}):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 13, "phase": "grpo"} | line) + "\n")
    page = Page(write_report(ours, other)).data["page"]
    drawn = {chart["metric"] for chart in page["charts"]}
    assert "theirs" in drawn and not {"never", "flag"} & drawn
    assert page["runs"][1]["series"]["theirs"] == [[13], [2.5]]


def test_tokens_are_read_with_the_final_model_else_the_newest_checkpoint_else_the_one_it_began_with(tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(report, "load_tokenizer", lambda config: loaded.append(config.model_path) or byte_tokenizer())
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


def test_every_metric_is_drawn_and_known_ones_come_first_with_a_unit(tmp_path):
    charts = Page(write_report(fake_run(tmp_path / "run"))).data["page"]["charts"]
    found = {chart["metric"]: chart for chart in charts}
    assert list(found)[:2] == ["mean_reward", "reward/correctness"] and found["reward/correctness"]["title"] == "correctness"
    assert found["own_metric"]["section"] == "More" and found["entropy"]["unit"] == "nat/token"
    assert {"kl", "tied_groups", "eval_accuracy", "loss", "tokens_per_second"} <= set(found)
    assert not {"step", "eval_accuracy_low", "advice", "phase"} & set(found)


def test_settings_stand_beside_defaults_profiles_and_the_other_run(tmp_path):
    ours, other = fake_run(tmp_path / "ours"), fake_run(tmp_path / "other", flags=["--learning_rate", "0.05"])
    rows = {row["name"]: row for row in Page(write_report(ours, other)).data["page"]["settings"]}
    assert rows["learning_rate"]["values"] == [1e-4, 0.05], "the demonstration's 4e-4, for 4 prompts in place of 64"
    assert rows["learning_rate"]["default"] == 5e-6
    assert rows["learning_rate"]["profile"] == [True, False] and "peak learning rate" in rows["learning_rate"]["help"]
    assert rows["ppo_epochs"]["values"] == [1, 1] == [rows["ppo_epochs"]["default"]] * 2
    assert "resume" not in rows
    theirs = json.loads((other / "config.json").read_text())
    theirs["grpo"]["of_a_later_version"] = 7
    theirs["training"]["profile"] = ""
    (other / "config.json").write_text(json.dumps(theirs))
    rows = {row["name"]: row for row in Page(write_report(ours, other)).data["page"]["settings"]}
    assert rows["of_a_later_version"]["values"] == [None, 7] and rows["of_a_later_version"]["default"] is None
    assert rows["num_epochs"]["profile"] == [True, False], "the same value, and no profile that set it"


def test_no_text_of_a_model_becomes_part_of_the_page(tmp_path):
    harmless = Page(write_report(fake_run(tmp_path / "harmless")))
    for number, text in enumerate(HOSTILE):
        folder = fake_run(tmp_path / f"{number}" / "<b>run", completion=text, prompt=text)
        page = Page(write_report(folder))
        assert page.tags == harmless.tags and page.scripts == harmless.scripts, text
        groups = page.data["page"]["runs"][0]["groups"]
        assert {c["text"] for group in groups for c in group["completions"]} == {text} == {group["prompt"] for group in groups}


def test_no_field_of_a_file_becomes_part_of_the_page(tmp_path, capsys):
    """Whatever the files of somebody else's run hold in place of numbers and names."""
    harmless, hostile = Page(write_report(fake_run(tmp_path / "harmless"))), '1"></script><img src=x onerror=alert(1)>'
    fields = "group", "tokens", "finished", "prompt", "completion"
    for name in fields:
        folder = edit_rollouts(fake_run(tmp_path / name), lambda record, i, name=name: record.update({name: hostile}))
        page = Page(write_report(folder))
        assert page.tags == harmless.tags and page.scripts == harmless.scripts, name
    folder = edit_rollouts(fake_run(tmp_path / "names"), lambda record, i: record.update(rewards={hostile: 1.0}))
    config = json.loads((folder / "config.json").read_text())
    config["training"] |= {hostile: hostile, "max_steps": hostile}
    config[hostile] = {hostile: hostile}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "phase": "grpo", hostile: 1.0, "advice": [hostile]}) + "\n")
    page = Page(write_report(folder))
    assert page.tags == harmless.tags and page.scripts == harmless.scripts
    assert page.data["page"]["runs"][0]["advice"][-1] == [13, str([hostile])]
    for head in f'"step": {json.dumps(hostile)}', f'"step": 2, "x": 1, "step": {json.dumps(hostile)}', '"step": null':
        folder = fake_run(tmp_path / "step")
        for name in "rollouts.jsonl", "metrics.jsonl":
            text = (folder / name).read_text().replace('"step": 2', head)
            (folder / name).write_text(text)
        page = Page(write_report(folder))
        assert [tag for tag in page.tags if tag[1] != [("type", "application/json"), ("id", "tokens-0-2")]] == [
            tag for tag in harmless.tags if tag[1] != [("type", "application/json"), ("id", "tokens-0-2")]], head
        assert all(type(step) is int for steps, _ in page.data["page"]["runs"][0]["series"].values() for step in steps)
        assert {group["step"] for group in page.data["page"]["runs"][0]["groups"]} == {6, 10}
        shutil.rmtree(folder)


def test_the_page_allows_its_own_script_and_nothing_else(tmp_path):
    page = Page(write_report(fake_run(tmp_path / "run")))
    metas = [dict(attributes) for tag, attributes in page.tags if tag == "meta"]
    (policy,) = [meta["content"] for meta in metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy and len(page.scripts) == 1
    assert base64.b64encode(hashlib.sha256(page.scripts[0].encode()).digest()).decode() in policy
    assert not [tag for tag, attributes in page.tags if {"src", "href"} & set(dict(attributes)) and tag != "a"]
    for word in "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "http:", "https:":
        assert word not in page.scripts[0].replace("http://www.w3.org/2000/svg", ""), word


def test_numbers_that_are_not_finite_are_none(tmp_path):
    folder = fake_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "phase": "grpo", "mean_reward": NaN, "kl": Infinity, "step_seconds": 0, "entropy": null}\n')
    record = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[-1])
    record |= {"step": 13, "reward": None, "advantage": math.nan, "token_advantages": [math.nan]}
    record["sampling_logp"] = [-math.inf] * record["tokens"]
    record |= {"entropies": [math.nan] * record["tokens"], "logp_after": [-math.inf, *[-1.0] * (record["tokens"] - 1)]}
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(2 * (json.dumps(record | {"completions_of_step": 2}) + "\n"))
    page = Page(write_report(folder))
    run = page.data["page"]["runs"][0]
    assert run["series"]["mean_reward"][1][-1] is None and run["series"]["kl"][1][-1] is None
    completion = run["groups"][-1]["completions"][0]
    assert completion["reward"] is None and completion["advantage"] is None
    (_, logp, advantages, entropies, changes), _ = page.data["tokens-0-13"]
    assert set(logp) == set(entropies) == set(changes) == {None} and advantages == [None]


def test_entropies_and_changes_have_three_digits_however_small(tmp_path):
    page = Page(write_report(edit_rollouts(fake_run(tmp_path / "run"), lambda record, i: record.update(AFTER)))).data
    *_, entropies, changes = page["tokens-0-6"][5]
    assert entropies == [0.0, 0.000123, 0.693, None, 2.3] and changes == [0.0, 0.0002, -0.123, None, 0.5]
    assert page["page"]["runs"][0]["offers"] == ["change", "entropy"]
    folder = edit_rollouts(tmp_path / "run", lambda record, i: record.pop("entropies"))
    assert Page(write_report(folder)).data["page"]["runs"][0]["offers"] == ["change"]
    edit_rollouts(folder, lambda record, i: record["logp_after"].append(0.0))
    with pytest.raises(ValueError, match=r"rollouts\.jsonl is damaged"):
        write_report(folder)


def test_the_rounding_of_a_mean_that_is_0_is_no_curve(tmp_path):
    folder = fake_run(tmp_path / "run")
    means = [5e-8, -7e-8, 2e-6, 0.0312345678, None]
    with (folder / "metrics.jsonl").open("a") as file:
        for i, mean in enumerate(means):
            file.write(json.dumps({"step": 13 + i, "phase": "grpo", "mean_advantage": mean, "kl": mean}) + "\n")
    series = Page(write_report(folder)).data["page"]["runs"][0]["series"]
    assert series["mean_advantage"][1] == [0, 0, 0, 0.03123, None]
    assert series["kl"][1][-5:] == [5e-8, -7e-8, 2e-6, 0.0312346, None]


@pytest.mark.parametrize("keep", [[], ["metrics.jsonl"]])
def test_a_run_that_has_written_nothing_yet_has_a_report(tmp_path, keep):
    folder = fake_run(tmp_path / "run")
    for name in "metrics.jsonl", "rollouts.jsonl":
        (folder / name).write_text("") if name in keep else (folder / name).unlink()
    page = Page(write_report(folder)).data["page"]
    assert page["charts"] == [] and page["runs"][0]["groups"] == [] and page["settings"]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    folder = fake_run(tmp_path / "run")
    for name in "metrics.jsonl", "rollouts.jsonl":
        with (folder / name).open("a") as file:
            file.write('{"step": 99, "pha')
    run = Page(write_report(folder)).data["page"]["runs"][0]
    assert run["series"]["mean_reward"][0][-1] == 12 and run["groups"][-1]["step"] == 10


def test_damaged_lines_and_steps_that_are_not_whole_are_left_out_with_one_line_for_each_file(tmp_path, capsys):
    folder = fake_run(tmp_path / "run")                   # of 12 completions at the steps 2, 6 and 10
    metrics, rollouts = ((folder / name).read_bytes().splitlines(keepends=True) for name in ("metrics.jsonl", "rollouts.jsonl"))
    (folder / "metrics.jsonl").write_bytes(b"".join([*metrics[:4], b"\0" * 99 + b"\n", b"[1]\n", *metrics[4:]]))
    rollouts[17] = b"\xff\xfe" + rollouts[17]             # in step 6
    (folder / "rollouts.jsonl").write_bytes(b"".join(rollouts[:32]))             # 8 of the 12 of step 10
    run = Page(write_report(folder)).data["page"]["runs"][0]
    assert run["series"]["mean_reward"][0] == list(range(2, 13)) and {group["step"] for group in run["groups"]} == {2}
    write_report(folder)
    assert capsys.readouterr().err.splitlines() == [
        f"{folder}/{name}: left out {count} lines that are damaged or belong to a step that is not whole"
        for name, count in (("metrics.jsonl", 2), ("rollouts.jsonl", 20))
    ]


def test_of_very_many_completions_every_nth_saved_step_is_shown(tmp_path, monkeypatch):
    folder = fake_run(tmp_path / "run", steps=40)
    monkeypatch.setattr(report, "MAX_BYTES", (folder / "rollouts.jsonl").stat().st_size // 3 + 1)
    page = Page(write_report(folder))
    run = page.data["page"]["runs"][0]
    assert run["every"] == 3 and list(dict.fromkeys(group["step"] for group in run["groups"])) == [2, 14, 26, 38]
    assert sorted(name for name in page.data if name != "page") == sorted(f"tokens-0-{step}" for step in (2, 14, 26, 38))
    assert all(len(group["completions"]) == 3 for group in run["groups"])


def test_tokens_have_their_text_with_the_space_they_begin_with(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "s": 2, "<unk>": 3, "\u2581.": 4}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()      # as SentencePiece's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert "".join(report.token_text(tokenizer, token) for token in (0, 1, 2, 4)) == " the cats ."


def test_without_a_tokenizer_the_page_has_texts_and_no_pieces(tmp_path):
    folder = fake_run(tmp_path / "run", flags=["--model_path", "some/model"])
    run = Page(write_report(folder)).data["page"]["runs"][0]
    assert run["pieces"] == {} and run["groups"][0]["completions"][0]["text"] == "answer 00 of step 2"


@pytest.mark.parametrize("prompt,shown", [
    ([{"role": "system", "content": "<i>"}, {"role": "user", "content": "q"}], "system: <i>\nuser: q"),
    ([2, 19, 13], "... <bos>1+"),
])
def test_prompts_are_shown_as_people_read_them(tmp_path, prompt, shown):
    page = Page(write_report(fake_run(tmp_path / "run", prompt=prompt)))
    found = page.data["page"]["runs"][0]["groups"][0]["prompt"]
    assert found == shown


@pytest.mark.parametrize("break_it,message", [
    (lambda folder: (folder / "config.json").unlink(), "is not a run folder: it has no config.json"),
    (lambda folder: (folder / "config.json").write_text("[1"), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "config.json").write_text('{"model_path": "x"}'), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "metrics.jsonl").write_text(
        '{"step": 1, "phase": "grpo", "step_seconds": "a", "completion_tokens": 1}\n'), "metrics.jsonl is damaged"),
    (lambda folder: (folder / "rollouts.jsonl").write_text('{"step": 1, "phase": "grpo"}\n'), "rollouts.jsonl is damaged"),
    (lambda folder: edit_rollouts(folder, lambda record, i: record.update(completion_ids=["<b>", 1])), "rollouts.jsonl is damaged"),
])
def test_a_folder_without_a_valid_run_is_rejected_in_one_line(tmp_path, break_it, message):
    folder = fake_run(tmp_path / "run")
    break_it(folder)
    for flags in ["--report", str(folder)], ["--report", str(fake_run(tmp_path / "fine")), "--against", str(folder)]:
        with pytest.raises(ValueError, match=message) as error:
            infer.main(flags)
        assert "\n" not in str(error.value) and not (folder / "report.html").exists()


def test_the_command_says_where_the_page_is(tmp_path, capsys):
    folder = fake_run(tmp_path / "run")
    infer.main(["--report", str(folder), "--against", str(fake_run(tmp_path / "other", steps=20))])
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert [run["name"] for run in Page(folder / "report.html").data["page"]["runs"]] == [str(folder), str(tmp_path / "other")]


def test_ends_of_intervals_are_no_charts_of_their_own():
    names = "eval_reward/length", "eval_reward_low/length", "eval_reward_high/length", "eval_accuracy", "eval_accuracy_low"
    charts = list_charts([{"series": {name: [[1], [0.5]] for name in names}}])
    assert [chart["metric"] for chart in charts] == ["eval_accuracy", "eval_reward/length"]
