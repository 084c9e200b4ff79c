"""The report: what lands in the page, that nothing from a model can run in it, and the page at work where Chromium is there."""

import base64
import hashlib
import json
import math
import shutil
from html.parser import HTMLParser

import pytest

import infer
import report
from config import parse_config
from report import write_report

HOSTILE = [
    "</script><script>window.pwned = 1</script>", "<!--<script>", "<img src=x onerror='window.pwned = 2'>",
    "{{data}} {{script}}",
    "\u2028 ]]> \\u003c é 🙂 \x00", "javascript:alert(1)\" onload=\"window.pwned = 3",
]
STOP = 1                        # of the built-in tokenizer


def fake_run(folder, *, steps=12, prompts=4, siblings=3, completion=None, prompt=None, every=4, flags=()):
    """A run folder without a run: reward rises, group 0 is tied, sibling 0 is right unless the group is odd."""
    folder.mkdir(parents=True)
    config = parse_config(["--use_grpo", "--batch_size", str(prompts), "--num_completions_per_prompt", str(siblings), *flags])
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    metrics = [{"step": 0, "phase": "eval", "eval_accuracy": 0.1, "eval_accuracy_low": 0.05, "eval_accuracy_high": 0.2}]
    metrics += [{"step": 1, "phase": "cold_start", "loss": 2.0, "entropy": 1.0, "completion_tokens": 5.0, "step_seconds": 0.5}]
    for step in range(2, steps + 1):
        metrics.append({
            "step": step, "phase": "grpo", "mean_reward": step / steps, "reward/correctness": 0.5, "tied_groups": 0.25,
            "entropy": 1 / step, "completion_tokens": 10.0, "step_seconds": 2.0, "kl": None if step == 3 else 0.01,
            "own_metric": 3,
        } | ({"advice": "ties: <b>most</b> groups"} if step == 5 else {}))
    metrics.append({"step": steps, "phase": "eval", "eval_accuracy": 0.8, "eval_accuracy_low": 0.7, "eval_accuracy_high": 0.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    with (folder / "rollouts.jsonl").open("w") as file:
        for step in range(2, steps + 1, every):
            for p in range(prompts):
                for g in range(siblings):
                    text = completion or f"answer {p}{g} of step {step}"
                    right = float(p > 0 and g == 0 and p % 2 == 0)
                    ids = [*[3 + byte % 90 for byte in text.encode()][:20], STOP]
                    file.write(json.dumps({
                        "step": step, "phase": "grpo", "prompt": prompt or f"prompt {p}", "completion": text,
                        "rewards": {"correctness": right, "length": None if g == 1 else 0.5},
                        "reward": right + 0.5 * (p > 0 and g == 0), "advantage": 0.0 if p == 0 else 1.0 if g == 0 else -0.5,
                        "finished": g != 1, "tokens": len(ids), "group": p, "prompt_ids": [2, 5], "completion_ids": ids,
                        "sampling_logp": [-0.1 * t for t in range(len(ids))],
                    }) + "\n")
    return folder


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
    ids, logp, advantages = page.data["tokens-0-2"][group["first"] + 1]
    assert len(ids) == 20 and logp[:3] == [0.0, -0.1, -0.2] and advantages is None
    assert run["pieces"][str(STOP)] == "<eos>"


def test_every_metric_is_drawn_and_known_ones_come_first_with_a_unit(tmp_path):
    charts = Page(write_report(fake_run(tmp_path / "run"))).data["page"]["charts"]
    found = {chart["metric"]: chart for chart in charts}
    assert list(found)[:2] == ["mean_reward", "reward/correctness"] and found["reward/correctness"]["title"] == "correctness"
    assert found["own_metric"]["section"] == "More" and found["entropy"]["unit"] == "nat/token"
    assert {"kl", "tied_groups", "eval_accuracy", "loss", "tokens_per_second"} <= set(found)
    assert not {"step", "eval_accuracy_low", "advice", "phase"} & set(found)


def test_settings_stand_beside_defaults_profiles_and_the_other_run(tmp_path):
    ours, other = fake_run(tmp_path / "ours"), fake_run(tmp_path / "other", flags=["--learning_rate", "0.5"])
    rows = {row["name"]: row for row in Page(write_report(ours, other)).data["page"]["settings"]}
    assert rows["learning_rate"]["values"] == [4e-4, 0.5] and rows["learning_rate"]["default"] == 5e-6
    assert rows["learning_rate"]["profile"] == [True, False] and "peak learning rate" in rows["learning_rate"]["help"]
    assert rows["ppo_epochs"]["values"] == [1, 1] == [rows["ppo_epochs"]["default"]] * 2
    assert "resume" not in rows


def test_no_text_of_a_model_becomes_part_of_the_page(tmp_path):
    harmless = Page(write_report(fake_run(tmp_path / "harmless")))
    for number, text in enumerate(HOSTILE):
        folder = fake_run(tmp_path / f"{number}" / "<b>run", completion=text, prompt=text)
        page = Page(write_report(folder))
        assert page.tags == harmless.tags and page.scripts == harmless.scripts, text
        groups = page.data["page"]["runs"][0]["groups"]
        assert {c["text"] for group in groups for c in group["completions"]} == {text} == {group["prompt"] for group in groups}


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
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(2 * (json.dumps(record) + "\n"))
    page = Page(write_report(folder))
    run = page.data["page"]["runs"][0]
    assert run["series"]["mean_reward"][1][-1] is None and run["series"]["kl"][1][-1] is None
    completion = run["groups"][-1]["completions"][0]
    assert completion["reward"] is None and completion["advantage"] is None
    (_, logp, advantages), _ = page.data["tokens-0-13"]
    assert set(logp) == {None} and advantages == [None]


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


def test_of_very_many_completions_every_nth_saved_step_is_shown(tmp_path, monkeypatch):
    folder = fake_run(tmp_path / "run", steps=40)
    monkeypatch.setattr(report, "BYTES_SHOWN", (folder / "rollouts.jsonl").stat().st_size // 3 + 1)
    page = Page(write_report(folder))
    run = page.data["page"]["runs"][0]
    assert run["every"] == 3 and list(dict.fromkeys(group["step"] for group in run["groups"])) == [2, 14, 26, 38]
    assert sorted(name for name in page.data if name != "page") == sorted(f"tokens-0-{step}" for step in (2, 14, 26, 38))
    assert all(len(group["completions"]) == 3 for group in run["groups"])


def test_tokens_have_their_text_with_the_space_they_begin_with(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()      # as SentencePiece's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert tokenizer.decode([1]) == "cat"
    assert "".join(report.piece(tokenizer, token) for token in (0, 1, 2)) == " the cats"


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
    (lambda folder: (folder / "config.json").unlink(), "is not the folder of a run: it has no config.json"),
    (lambda folder: (folder / "config.json").write_text("[1"), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "config.json").write_text('{"model_path": "x"}'), "config.json is not the config.json of a run"),
    (lambda folder: (folder / "metrics.jsonl").write_text("{\n"), "metrics.jsonl is damaged"),
    (lambda folder: (folder / "metrics.jsonl").write_text('{"step_seconds": 1}\n'), "metrics.jsonl is damaged"),
    (lambda folder: (folder / "rollouts.jsonl").write_text('{"step": 1}\n'), "rollouts.jsonl is damaged"),
    (lambda folder: (folder / "rollouts.jsonl").write_text("no\n"), "rollouts.jsonl is damaged"),
])
def test_what_is_no_run_is_said_in_one_line(tmp_path, break_it, message):
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


# ---- in a browser ---------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to test the page in a browser")
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH, to test the page in a browser")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Open a report; whatever the page complains about, or asks the network for, fails the test at its end."""
    complaints = []

    def open_page(path, width=1200, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    assert complaints == []


def groups_shown(page):
    return [" ".join(text.split()) for text in page.locator("#list .group > .soft").all_inner_texts()]


def count_becomes(page, text):
    """The search looks when the typing has ended."""
    for _ in range(100):
        if page.inner_text("#count") == text:
            return True
        page.wait_for_timeout(50)
    return False


def test_it_opens_draws_switches_steps_and_filters(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    assert page.title() == f"GRPO run {tmp_path / 'run'}"
    assert page.locator("#charts svg path").count() > 0
    assert groups_shown(page) == ["step 10, group 0tied", "step 10, group 1", "step 10, group 2", "step 10, group 3"]
    page.click("#back")
    assert groups_shown(page)[1] == "step 6, group 1"
    page.select_option("#step", "2")
    assert groups_shown(page)[1] == "step 2, group 1"
    page.check("#tied")
    assert groups_shown(page) == ["step 2, group 0tied"]
    page.select_option("#step", "")
    assert groups_shown(page) == [f"step {step}, group 0tied" for step in (2, 6, 10)]
    page.uncheck("#tied")
    page.fill("#search", "OF STEP 6")
    assert count_becomes(page, "4 of 12 groups")
    assert groups_shown(page)[1:] == [f"step 6, group {p}" for p in (1, 2, 3)]
    page.fill("#search", "no such words")
    assert count_becomes(page, "0 of 12 groups") and groups_shown(page) == []


def test_only_groups_with_a_wrong_completion(tmp_path, visit):
    folder = fake_run(tmp_path / "run", siblings=2)
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for record in records:
        record["rewards"]["correctness"] = float(record["group"] == 2)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = visit(write_report(folder))
    page.check("#wrong")
    assert groups_shown(page) == ["step 10, group 0tied", "step 10, group 1", "step 10, group 3"]


def test_completions_show_tokens_points_and_why_they_ended(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    first, second = (page.locator("#list .group").nth(1).locator(".completion").nth(g) for g in (0, 1))
    for words in "reward +0.5", "advantage +1", "ended with <eos>":
        assert words in first.inner_text()
    assert "cut at the length limit" in second.inner_text() and "length none" in second.inner_text()
    colours = first.locator(".text span").evaluate_all("spans => spans.map(span => getComputedStyle(span).backgroundColor)")
    assert len(colours) == 21 and len(set(colours)) > 15, "the less likely, the stronger"
    page.select_option("#colour", "advantage")
    better, worse = (
        completion.locator(".text span").first.evaluate("span => getComputedStyle(span).backgroundColor")
        for completion in (first, second)
    )
    assert better != worse


def test_hostile_text_stays_text(tmp_path, visit):
    for number, text in enumerate(HOSTILE):
        page = visit(write_report(fake_run(tmp_path / f"{number}", completion=text, prompt=text)))
        assert page.evaluate("window.pwned") is None
        assert page.locator("#list .prompt").first.evaluate("node => node.textContent") == text
        assert page.locator("#list img, #list script").count() == 0


def test_two_runs_lie_over_each_other(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "ours"), fake_run(tmp_path / "other", steps=40)))
    lines = page.locator("#charts .chart").first.locator("path")
    strokes = lines.evaluate_all("paths => paths.map(path => path.getAttribute('stroke'))")
    assert strokes == ["var(--run0)", "var(--run1)"]
    assert groups_shown(page)[1] == "step 10, group 1"
    page.select_option("#run", "1")
    assert groups_shown(page)[1] == "step 10, group 1", "the same step, where there is one"
    page.select_option("#step", "38")
    page.select_option("#run", "0")
    assert groups_shown(page)[1] == "step 10, group 1"


def test_smoothing_draws_the_mean_over_the_curve(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    chart = page.locator("#charts .chart").first
    before = chart.locator("path").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    page.locator("#smoothing").evaluate("slider => { slider.value = 0.9; slider.dispatchEvent(new Event('input')); }")
    after = chart.locator("path").evaluate_all("paths => paths.map(path => path.getAttribute('d'))")
    assert len(before) == 1 and len(after) == 2 and after[0] == before[0] != after[1]
    means = page.evaluate("smoothed([1, 0, null, 1])")
    assert means == pytest.approx([1, 0.09 / 0.19, None, (0.081 + 0.1) / 0.271])


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_in_light_and_dark(tmp_path, visit, width, scheme):
    page = visit(write_report(fake_run(tmp_path / "run")), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    brightness = [sum(int(part) for part in colour[4:-1].split(",")) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) == (scheme == "dark")


def test_an_empty_run_opens_without_complaint(tmp_path, visit):
    folder = fake_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "rollouts.jsonl").unlink()
    page = visit(write_report(folder))
    assert "no steps yet" in page.inner_text("#keys") and page.is_visible("#without") and not page.is_visible("#browser")


def test_thousands_of_rollouts_are_drawn_as_they_come_into_view(tmp_path, visit):
    folder = fake_run(tmp_path / "run", steps=200, prompts=20, siblings=8, every=4, completion="a completion " * 20)
    page = visit(write_report(folder))
    assert page.evaluate("runs[0].groups.length * 8") == 8000
    page.select_option("#step", "")
    assert page.inner_text("#count") == "1000 of 1000 groups"
    assert len(groups_shown(page)) < 50
    page.locator("#settings").scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    assert 6 < len(groups_shown(page)) < 100
    assert page.evaluate("tokensOfStep.size") < 10, "tokens are parsed when their step is shown"
    seconds = page.evaluate("(() => { const begin = performance.now(); look(); return (performance.now() - begin) / 1000; })()")
    assert seconds < 0.5
