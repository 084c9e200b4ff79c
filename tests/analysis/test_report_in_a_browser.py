"""The page of a run, opened in Chromium: what it draws, shows, filters and colours."""

import json
import math
import re
import shutil

import pytest
from fake_run import AFTER, HOSTILE, STOP, edit_rollouts, fake_run, tokens_of_text

from analysis import report
from analysis.report import write_report

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt install chromium")
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


def channels(colour):
    """The numbers of "rgb(1, 2, 3)" or "rgba(1, 2, 3, 0.5)"."""
    return [float(part) for part in colour.partition("(")[2].rstrip(")").split(",")]


def over(shade, paper):
    """What is seen of a colour through which its ground shines."""
    *colour, alpha = channels(shade)
    mixed = [alpha * c + (1 - alpha) * p for c, p in zip(colour, channels(paper), strict=True)]
    return f"rgb({', '.join(map(str, mixed))})"


def contrast(one, other):
    """Ratio of two colours' luminances, WCAG 2.2."""
    def luminance(colour):
        shares = [c / 255 for c in channels(colour)]
        linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def count_becomes(page, text):
    """The search looks when the typing has ended."""
    for _ in range(100):
        if page.inner_text("#count") == text:
            return True
        page.wait_for_timeout(50)
    return False


def test_it_opens_draws_switches_steps_and_filters(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    assert page.title() == page.inner_text("h1") == f"plain-grpo: {tmp_path / 'run'}"
    assert page.locator("#charts svg path").count() > 0
    assert groups_shown(page) == ["step 10, group 2", "step 10, group 1", "step 10, group 3", "step 10, group 0tied"]
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
    assert groups_shown(page)[:3] == [f"step 6, group {p}" for p in (2, 1, 3)]
    page.fill("#search", "no such words")
    assert count_becomes(page, "0 of 12 groups") and groups_shown(page) == []


def test_hostile_text_stays_text(tmp_path, visit):
    for number, text in enumerate(HOSTILE):
        page = visit(write_report(fake_run(tmp_path / f"{number}", completion=text, prompt=text)))
        assert page.evaluate("window.pwned") is None
        assert page.locator("#list .prompt").first.evaluate("node => node.textContent") == text
        assert page.locator("#list img, #list script").count() == 0


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_narrow_and_wide_in_light_and_dark(tmp_path, visit, width, scheme):
    page = visit(write_report(fake_run(tmp_path / "run")), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = page.evaluate("(style => [style.color, style.backgroundColor])(getComputedStyle(document.body))")
    brightness = [sum(int(part) for part in colour[4:-1].split(",")) for colour in (ink, paper)]
    assert (brightness[0] > brightness[1]) == (scheme == "dark")
    card = page.locator(".completion").first.evaluate("node => getComputedStyle(node.closest('.card')).backgroundColor")
    for shade in "rgb(var(--odd) / .75)", "rgb(var(--good) / .6)", "rgb(var(--bad) / .6)":
        page.locator(".text span").first.evaluate("(span, shade) => { span.style.background = shade; }", shade)
        strongest = page.locator(".text span").first.evaluate("span => getComputedStyle(span).backgroundColor")
        assert contrast(ink, over(strongest, card)) > 4.5, "readable, by WCAG 2.2, criterion 1.4.3"


def test_an_empty_run_opens_without_complaint(tmp_path, visit):
    folder = fake_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "rollouts.jsonl").unlink()
    page = visit(write_report(folder))
    assert "no steps yet" in page.inner_text("#keys") and page.is_visible("#without") and not page.is_visible("#browser")
    page = visit(write_report(folder, fake_run(tmp_path / "other")))
    page.select_option("#run", "1")
    assert not page.is_visible("#without") and len(groups_shown(page)) == 4, "the other one has groups"


def test_thousands_of_rollouts_are_drawn_as_they_come_into_view(tmp_path, visit):
    folder = fake_run(tmp_path / "run", steps=60, prompts=20, siblings=8, every=4, completion="a completion " * 20)
    page = visit(write_report(folder))
    assert page.evaluate("runs[0].groups.length * 8") == 2400
    page.select_option("#step", "")
    assert page.inner_text("#count") == "300 of 300 groups"
    assert len(groups_shown(page)) < 50
    page.locator("#settings").scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    cards = groups_shown(page)
    assert 6 < len(cards) < 100 and len(cards) == len(set(cards)), "no group twice"
    assert page.evaluate("tokensOfStep.size") < 10, "tokens are parsed when their step is shown"
    seconds = page.evaluate("(() => { const begin = performance.now(); look(); return (performance.now() - begin) / 1000; })()")
    assert seconds < 0.5


class Chart:
    """A curve as people read it: what lies where, by the labels of its axes."""

    def __init__(self, page, title):
        page.evaluate("document.querySelectorAll('#charts details').forEach(folded => folded.open = true)")
        self.card = page.locator("#charts .chart", has=page.get_by_text(title, exact=True))
        self.card.scroll_into_view_if_needed()
        self.card.locator("svg").wait_for()
        texts = self.card.locator("text").evaluate_all(
            "texts => texts.map(t => [t.textContent, ...['x', 'y', 'text-anchor'].map(name => t.getAttribute(name))])")
        self.steps = [(float(text), float(x)) for text, x, _, anchor in texts if anchor != "end"]
        self.values = [
            (float(text.removesuffix("\u00a0%")), float(y) - 4)
            for text, _, y, anchor in texts if anchor == "end" and text != "step"]
        self.labels = [text for text, *_ in texts]

    def read(self, x, y):
        """Step and value (in percent where the labels are) at a place."""
        found = []
        for ticks, place in (self.steps, x), (self.values, y):
            (first, here), (last, there) = ticks[0], ticks[-1]
            found.append(first + (last - first) * (place - here) / (there - here))
        return found

    def points(self, number=0):
        """[[(step, value)], ...]: the unbroken pieces of a path."""
        drawn = self.card.locator("path").nth(number).get_attribute("d")
        pieces = [piece.rstrip("Z").split("L") for piece in drawn.split("M")[1:]]
        return [[tuple(self.read(*map(float, place.split()))) for place in piece] for piece in pieces]

    def place(self, page, step):
        """Where a step is on the screen."""
        (first, here), (last, there) = self.steps[0], self.steps[-1]
        box = self.card.locator("svg").bounding_box()
        return box["x"] + here + (step - first) * (there - here) / (last - first), box["y"] + 40


def near(points, wanted):
    """Within the width of a line: the steps, and the values to a five-hundredth of the largest."""
    (steps, values), (right_steps, right_values) = zip(*points, strict=True), zip(*wanted, strict=True)
    assert steps == pytest.approx(right_steps, abs=0.05)
    assert values == pytest.approx(right_values, abs=0.002 * max(right_values))


def test_a_curve_lies_where_its_axes_say_with_gaps_a_band_and_a_share_from_0(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    reward, kl, accuracy = (Chart(page, title) for title in ("reward", "KL to the reference", "accuracy, 95 % interval"))
    near(reward.points()[0], [(step, step / 12) for step in range(2, 13)])
    before, after = kl.points()
    near(before, [(2, 0.01)])
    near(after, [(step, 0.01) for step in range(4, 13)])
    band, line = accuracy.points(0)[0], accuracy.points(1)[0]
    near(line, [(0, 10), (12, 80)])
    near(band, [(0, 20), (12, 90), (12, 70), (0, 5)])
    assert accuracy.labels[0] == "0\u00a0%" and "step" in accuracy.labels and "0" in accuracy.labels
    bottom = accuracy.values[0][1]
    outline = accuracy.card.locator("path").first.get_attribute("d").strip("MZ").split("L")
    heights = [float(place.split()[1]) for place in outline]
    assert all(0 <= y <= bottom for y in heights), "all of the band is in the picture"
    dashed = reward.card.locator("line[stroke-dasharray]")
    assert dashed.count() == 1 and reward.read(float(dashed.get_attribute("x1")), 0)[0] == pytest.approx(2, abs=0.1)
    dot = reward.card.locator("circle")
    assert dot.count() == 1 and reward.read(float(dot.get_attribute("cx")), 0)[0] == pytest.approx(5, abs=0.1)


def test_labels_stand_at_round_numbers_neither_few_nor_many(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run", steps=2)))
    for low, high in (0, 1), (0, 12), (0.36, 0.417), (-0.003, 0.0009), (0, 5999), (81.5, 82), (1e-6, 4e-6):
        ticks = page.evaluate(f"ticks({low}, {high})")
        gap = ticks[1] - ticks[0]
        assert 3 <= len(ticks) <= 8 and ticks == pytest.approx([ticks[0] + i * gap for i in range(len(ticks))], abs=1e-9 * gap)
        assert low - 1e-6 * gap <= ticks[0] < low + gap and high - gap < ticks[-1] <= high + 1e-6 * gap
        mantissa = float(f"{gap:e}".partition("e")[0])
        assert any(mantissa == pytest.approx(round_one) for round_one in (1, 2, 5))
        assert ticks[0] / gap == pytest.approx(round(ticks[0] / gap))


def test_numbers_and_ranges_by_hand(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run", steps=2)))
    for arguments, text in {
        "0.00391, 'share'": "0.391\u00a0%", "0, ''": "0", "null, 's'": "none", "0.5, 'points'": "0.5 points",
        "0.05, ''": "0.05",
        "1234567, ''": "1.2e+6", "0.00012, 's'": "1.2e-4 s", "-3.14159, ''": "-3.142",
    }.items():
        assert page.evaluate(f"number({arguments})") == text
    for arguments, ends in {
        "[0.2, 0.9], 'share'": [0, 0.9], "[0.2, null, 0.9], ''": [0.2, 0.9], "[0, 0], 'share'": [0, 1], "[4, 4], ''": [2, 6],
        "[100, 100.01], ''": [49.995, 150.01], "[1e-9, 2e-8], ''": [-0.5, 0.5],
    }.items():
        assert page.evaluate(f"range({arguments})") == pytest.approx(ends, abs=0.01), arguments
    for wanted, at in (1, 0), (3.9, 0), (4.1, 1), (8.1, 2), (99, 2):
        assert page.evaluate(f"nearest([2, 6, 10], {wanted})") == at
    for value, text in {
        "[]": "[]", '""': '""', '["a", "b"]': "a b", "[1, 0.2]": "1 0.2", "null": "missing", "false": "false",
    }.items():
        assert page.evaluate(f"shown({value})") == text


def test_the_pointer_reads_the_nearest_step_shows_the_advice_and_a_click_opens_that_step(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    chart = Chart(page, "reward")
    for pointed, shown in {
        7.8: "step 8\n0.6667 points", 4.4: "step 4\n0.3333 points",
        5: "step 5\n0.4167 points\nstep 5: ties: <b>most</b> groups",
    }.items():
        page.mouse.move(*chart.place(page, pointed))
        assert chart.card.locator(".tip").inner_text() == shown
    page.mouse.click(*chart.place(page, 6.4))
    assert groups_shown(page)[1] == "step 6, group 1"


def card(page, p, g):
    """Completion g of the first group shown that has the number p in its step."""
    head = page.locator(".soft", has_text=re.compile(rf"^step \d+, group {p}(?!\d)"))
    return page.locator("#list .group", has=head).first.locator(".completion").nth(g)


def colours(page, p, g):
    style = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
    return [channels(colour) for colour in card(page, p, g).locator(".text span").evaluate_all(style)]


def test_cards_by_hand(tmp_path, visit):
    """Numbers, tokens and colours of two completions, and of one whose tokens have advantages and an environment's words."""
    folder = fake_run(tmp_path / "run")
    records = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    last = records[-3:]                                   # group 3 of step 10
    ids = [*tokens_of_text("abc"), STOP]
    for record, advantages in zip(last, ([2.0, None, -4.0, 0.0], [1.0] * 4, [0.5] * 4), strict=True):
        record |= {"completion_ids": ids, "token_advantages": advantages, "advantage": -0.6667, "tokens": 3}
        record["sampling_logp"] = [-1.0, None, -0.5, -0.75]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = visit(write_report(folder), color_scheme="light")

    mean = sum(-0.1 * t for t in range(21)) / 21
    assert card(page, 2, 0).inner_text().split("\n") == [
        "reward +1.5", "advantage +1", "correctness +1", "length +0.5", "answer 20 of step 10<eos>",
        "21 tokens, ended with <eos>", f"mean log-probability {mean:.3f} nat"]
    assert card(page, 2, 1).inner_text().split("\n")[:6] == [
        "reward 0", "advantage -0.5", "wrong", "correctness 0", "length none", "answer 21 of step 10<eos>"]
    assert "truncated at the length limit" in card(page, 2, 1).inner_text()
    titles = card(page, 2, 0).locator(".text span").evaluate_all("spans => spans.map(span => span.title)")
    assert titles[:2] == ['"a"\nlog-probability 0 nat\nadvantage +1', '"n"\nlog-probability -0.1 nat\nadvantage +1']
    for t, colour in enumerate(colours(page, 2, 0)):
        assert colour == pytest.approx([217, 140, 20, 0.75 * (1 - math.exp(-0.1 * t))], abs=0.006), "ochre: unlikely"
    assert "mean advantage -0.667" in card(page, 3, 0).inner_text() and "3 tokens" in card(page, 3, 0).inner_text()
    assert "mean log-probability -0.750 nat" in card(page, 3, 0).inner_text(), "of the policy's tokens"
    titles = card(page, 3, 0).locator(".text span").evaluate_all("spans => spans.map(span => span.title)")
    assert titles[:3] == [
        '"a"\nlog-probability -1 nat\nadvantage +2', '"b"\ntoken of the environment',
        '"c"\nlog-probability -0.5 nat\nadvantage -4']
    page.select_option("#colour", "advantage")
    assert colours(page, 2, 0)[0] == [42, 111, 191, 0.6] and colours(page, 2, 1)[20] == pytest.approx([201, 66, 48, 0.3])
    assert colours(page, 3, 0) == [
        pytest.approx(c) for c in ([42, 111, 191, 0.3], [0, 0, 0, 0], [201, 66, 48, 0.6], [0, 0, 0, 0])]
    assert " ".join(page.inner_text("#legend").split()) == "negative positive; full colour at the group's largest"
    page.select_option("#colour", "")
    assert {colour[3] for colour in colours(page, 2, 0)} == {0} and page.inner_text("#legend") == ""


def modes(page):
    return page.locator("#colour option").evaluate_all("options => options.map(option => option.value)")


def test_tokens_are_coloured_by_entropy_and_by_what_the_update_changed(tmp_path, visit):
    """Group 1 of a step has AFTER in its first completion, small changes in the second, and nothing saved in the third."""
    def change(record, i):
        if record["group"] == 1 and i % 3 == 0:
            record.update(AFTER)
        elif record["group"] == 1 and i % 3 == 1:
            record.update(AFTER, logp_after=[-0.5, -1.0, -2.5, None, -1.0])
        elif record["group"] == 2:                        # rounding: nothing changed more than 1e-5
            record.update(AFTER, logp_after=[-0.25001, -1.0, -2.5, None, -1.0])

    page = visit(write_report(edit_rollouts(fake_run(tmp_path / "run"), change)), color_scheme="light")
    assert modes(page) == ["logp", "entropy", "change", "advantage", ""] and page.input_value("#colour") == "logp"
    titles = card(page, 1, 0).locator(".text span").evaluate_all("spans => spans.map(span => span.title)")
    assert titles == [
        '"w"\nlog-probability -0.25 nat\nchange by the update 0 nat\nentropy 0 nat\nadvantage +1',
        '"x"\nlog-probability -1 nat\nchange by the update +0.0002 nat\nentropy 0.000123 nat\nadvantage +1',
        '"y"\nlog-probability -2.5 nat\nchange by the update -0.123 nat\nentropy 0.693 nat\nadvantage +1',
        '"z"\ntoken of the environment',
        '"<eos>"\nlog-probability -1 nat\nchange by the update +0.5 nat\nentropy 2.3 nat\nadvantage +1',
    ]
    title = card(page, 1, 2).locator(".text span").nth(1).get_attribute("title")
    assert title == '"n"\nlog-probability -0.1 nat\nadvantage -0.5', "nothing was saved of it"
    mean_change, mean_entropy = (0.0002 - 0.123 + 0.5) / 4, (0.000123 + 0.693 + 2.3) / 4
    assert f"mean change +{mean_change:.3g}, entropy {mean_entropy:.3g} nat" in card(page, 1, 0).inner_text()
    assert "mean change" not in card(page, 1, 2).inner_text()

    page.select_option("#colour", "change")
    up, down, clear = [42, 111, 191], [201, 66, 48], pytest.approx([0, 0, 0, 0])
    assert colours(page, 1, 0) == [clear, [*up, 0], pytest.approx([*down, 0.6 * 0.123 / 0.5], abs=0.006), clear, [*up, 0.6]]
    assert colours(page, 1, 1) == [pytest.approx([*down, 0.3]), clear, clear, clear, clear]
    assert colours(page, 1, 2) == [clear] * 21
    assert colours(page, 2, 0)[0] == pytest.approx([*down, 0.06]), "faint, though nothing else changed"
    assert groups_shown(page)[:2] == ["step 10, group 2full colour: 0.0001 nat", "step 10, group 1full colour: 0.5 nat"]
    assert " ".join(page.inner_text("#legend").split()) == (
        "less likely after the update more likely; full colour at the group's largest change of log-probability, in nat")
    ramp = page.locator("#legend .ramp").evaluate("ramp => getComputedStyle(ramp).backgroundImage")
    assert ramp.index("201, 66, 48") < ramp.index("42, 111, 191"), "left is less likely"

    page.select_option("#colour", "entropy")
    odd = [217, 140, 20]
    assert colours(page, 1, 0) == [
        [*odd, 0], [*odd, 0], pytest.approx([*odd, 0.375], abs=0.006), clear, pytest.approx([*odd, 0.675], abs=0.006)]
    assert colours(page, 1, 2) == [clear] * 21 and groups_shown(page)[1] == "step 10, group 1"
    assert " ".join(page.inner_text("#legend").split()) == "0 nat, one choice many; in the middle 0.69 nat, two equal choices"


def test_what_a_run_did_not_save_is_not_offered(tmp_path, visit):
    """Two runs, of which one has entropies and changes. The choice goes back to log-probabilities where it must."""
    ours, other = fake_run(tmp_path / "ours"), fake_run(tmp_path / "other")
    edit_rollouts(other, lambda record, i: record.update(AFTER))
    page = visit(write_report(ours, other))
    assert modes(page) == ["logp", "advantage", ""]
    page.select_option("#colour", "advantage")
    page.select_option("#run", "1")
    assert modes(page) == ["logp", "entropy", "change", "advantage", ""] and page.input_value("#colour") == "advantage"
    page.select_option("#colour", "change")
    page.select_option("#run", "0")
    assert modes(page) == ["logp", "advantage", ""] and page.input_value("#colour") == "logp"
    assert page.inner_text("#legend").startswith("certain") and colours(page, 1, 0)[20][3] > 0.5
    page.select_option("#run", "1")
    page.select_option("#colour", "")
    page.select_option("#run", "0")
    assert page.input_value("#colour") == "", "none stays none"


def test_it_opens_where_there_is_something_to_learn(tmp_path, visit):
    """At the last step with a group that is not tied; at the last one if there is none."""
    folder = fake_run(tmp_path / "run")
    edit_rollouts(folder, lambda record, i: record.update(reward=1.0, advantage=0.0) if record["step"] > 6 else None)
    assert groups_shown(visit(write_report(folder)))[1] == "step 6, group 1"
    edit_rollouts(folder, lambda record, i: record.update(reward=1.0, advantage=0.0))
    assert groups_shown(visit(write_report(folder)))[1] == "step 10, group 1tied"


def test_the_page_names_the_step_shown_instead_of_an_unsaved_one(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run"), fake_run(tmp_path / "other")))
    assert not page.is_visible("#nearest")
    page.locator(".advice button").first.click()
    assert page.input_value("#step") == "6" and page.inner_text("#nearest") == "nearest saved step to 5"
    page.check("#tied")
    assert page.inner_text("#nearest") == "nearest saved step to 5", "it is still"
    for elsewhere in (
        lambda: page.click("#on"), lambda: page.select_option("#step", "2"), lambda: page.select_option("#run", "1"),
        lambda: page.evaluate("goTo(6.3)"), lambda: page.select_option("#step", ""),
    ):
        page.evaluate("goTo(4.7)")
        assert page.inner_text("#nearest") == "nearest saved step to 5"
        elsewhere()
        assert not page.is_visible("#nearest")


@pytest.mark.parametrize("width", [390, 1500])
def test_no_flag_and_no_number_is_broken(tmp_path, visit, width):
    folder = fake_run(tmp_path / "run", flags=["--learning_rate", "5e-7"])
    shown = "ties: most groups of the last 12345678 rollouts: raise --num_completions_per_prompt to 16 or --dynamic_sampling"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "phase": "grpo", "advice": f"{shown}; {shown}"}) + "\n")
    page = visit(write_report(folder, fake_run(tmp_path / ("a_long_name" * 5))), width=width)
    page.locator("summary", has_text="All settings").click()
    cells = page.locator("td, .advice li > span:last-child").evaluate_all("""cells => cells.flatMap(cell => {
        const words = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) for (const {0: word, index} of texts.currentNode.data.matchAll(/--\\w+|\\d[\\d.e-]*/g)) {
            const range = document.createRange();
            range.setStart(texts.currentNode, index);
            range.setEnd(texts.currentNode, index + word.length);
            words.push([word, range.getClientRects().length]);
        }
        return words;
    })""")
    assert [word for word, lines in cells if lines != 1] == []
    assert {"--num_completions_per_prompt", "12345678", "5e-7"} <= {word for word, _ in cells}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator(".advice").evaluate("list => [list.scrollWidth, list.clientWidth]")
    assert box[0] <= box[1], "the sentences fit"
    last = page.locator(".advice li").last
    button, sentence = (last.locator(part).bounding_box() for part in ("button", "> span:last-child"))
    beside = sentence["x"] > button["x"] + button["width"] and sentence["y"] < button["y"] + button["height"]
    assert beside == (width == 1500), "beside its button, or on a telephone below it"


def test_the_head_says_how_good_a_run_is_at_what_it_was_trained_on(tmp_path, visit):
    """The accuracy of a run whose rewards do not ask for it says nothing."""
    flags = ["--reward_functions", "length", "diversity"]
    folders = [fake_run(tmp_path / "length", flags=flags), *(fake_run(tmp_path / name) for name in ("right", "supervised"))]
    for folder in folders:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["phase"] == "eval":
                line |= {"eval_reward/length": 0.25 + line["step"] / 100, "eval_reward/correctness": 0.0}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = json.loads((folders[2] / "config.json").read_text())
    config["training"]["use_grpo"], config["grpo"]["reward_functions"] = False, ["length"]
    (folders[2] / "config.json").write_text(json.dumps(config))
    began = "cold_start from step 1, grpo from step 2; 12 steps"
    page = visit(write_report(folders[0]))
    assert page.inner_text("#keys") == f"held-out length 0.25 points \u2192 0.37 points in the run; {began}"
    for folder in folders[1:]:
        assert visit(write_report(folder)).inner_text("#keys") == f"held-out accuracy 10\u00a0% \u2192 80\u00a0% in the run; {began}"


def test_the_head_says_what_the_last_phase_added_not_what_came_before_it(tmp_path, visit):
    """36 % right after a cold start that ends at step 1, 80 % at the end: GRPO added the difference between these two."""
    folder = fake_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines.insert(2, json.dumps({"step": 1, "phase": "eval", "eval_accuracy": 0.359}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = visit(write_report(folder))
    head = "held-out accuracy 35.9\u00a0% \u2192 80\u00a0% in GRPO; before training 10\u00a0%; "
    assert page.inner_text("#keys").startswith(head) and page.inner_text("#keys strong") == head.partition("; ")[0]


def test_groups_with_right_and_wrong_completions_come_first_and_constant_curves_are_folded(tmp_path, visit):
    """In a fake run group 0 is tied, 1 and 3 are wrong throughout, and 2 has one right completion."""
    page = visit(write_report(fake_run(tmp_path / "run")))
    assert groups_shown(page) == [f"step 10, group {name}" for name in ("2", "1", "3", "0tied")]
    folded = page.locator("#charts details strong").all_text_contents()
    assert {"own_metric", "tied groups"} <= set(folded) and not {"reward", "entropy"} & set(folded)
    assert {"accuracy, 95 % interval", "correctness"} <= set(page.locator("#charts > div strong").all_text_contents())


def test_without_a_tokenizer_completions_are_shown_as_text(tmp_path, visit):
    flags = "--model_path some/model --environment calculator --max_turns 2".split()
    page = visit(write_report(fake_run(tmp_path / "run", flags=flags)))
    text = card(page, 0, 0).inner_text()
    assert "answer 00 of step 10\n" in text and "ended with a stop token" in text
    assert "grey: tokens of the environment" in page.inner_text("#legend")


def test_wrong_is_what_correctness_could_score_and_did_not_find_right(tmp_path, visit):
    """Group 0 is unscored, 1 half right, 2 right and 3 wrong."""
    folder = edit_rollouts(fake_run(tmp_path / "run", siblings=2), lambda record, i: record.update(
        rewards={"correctness": [None, float(i % 2), 1.0, 0.0][record["group"]]}))
    page = visit(write_report(folder, fake_run(tmp_path / "other")))
    page.check("#wrong")
    assert groups_shown(page) == ["step 10, group 1", "step 10, group 3"]
    assert [count for count in page.locator("#list .group").evaluate_all(
        "groups => groups.map(group => group.querySelectorAll('.completion .badge').length)")] == [1, 2]
    edit_rollouts(folder, lambda record, i: record.update(rewards={"length": 0.5}))
    page = visit(write_report(folder, fake_run(tmp_path / "third")))
    assert page.is_disabled("#wrong"), "it cannot be known"
    page.select_option("#run", "1")
    page.check("#wrong")
    page.select_option("#run", "0")
    assert not page.is_checked("#wrong") and len(groups_shown(page)) == 4


def test_steps_are_gone_through_one_by_one_and_not_beyond_the_ends(tmp_path, visit, monkeypatch):
    folder = fake_run(tmp_path / "run", steps=24)
    monkeypatch.setattr(report, "MAX_BYTES", (folder / "rollouts.jsonl").stat().st_size // 2 + 1)
    page = visit(write_report(folder))
    seen = []
    for button in "#on", "#back", "#back", "#back", "#on":
        page.click(button)
        seen.append(page.input_value("#step"))
    assert seen == ["18", "10", "2", "2", "10"]
    page.select_option("#step", "")
    page.click("#back")
    assert page.input_value("#step") == "18", "before all steps comes the last one"
    assert page.inner_text("#count") == "4 of 12 groups; 1 of 2 saved steps is shown, rollouts.jsonl holds all"
    page.fill("#search", "prompt 3")
    assert count_becomes(page, "1 of 12 groups; 1 of 2 saved steps is shown, rollouts.jsonl holds all")
    assert not page.is_visible("#which") and not page.is_visible("#without")


def test_two_runs_beside_each_other_by_hand(tmp_path, visit):
    ours, other = fake_run(tmp_path / "ours"), fake_run(
        tmp_path / "other", steps=40, flags=["--learning_rate", "0.05", "--reward_functions", "correctness", "diversity"])
    edit_rollouts(other, lambda record, i: record.update(
        completion_ids=[*tokens_of_text("other"), STOP], sampling_logp=[-1.0] * 6))
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    lines[19]["advice"] = "kl: far away"                  # of step 19
    del lines[5]["advice"]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = visit(write_report(ours, other))
    assert page.locator("#keys > span").all_inner_texts() == [
        f"{folder}: held-out accuracy 10\u00a0% \u2192 80\u00a0% in the run; cold_start from step 1, grpo from step 2; {steps} steps"
        for folder, steps in ((ours, 12), (other, 40))]
    chart = Chart(page, "reward")
    assert [chart.card.locator("path").nth(i).get_attribute("stroke") for i in (0, 1)] == ["var(--run0)", "var(--run1)"]
    near(chart.points(1)[0], [(step, step / 40) for step in range(2, 41)])
    assert chart.card.locator("line[stroke-dasharray]").count() == 2
    page.mouse.move(*chart.place(page, 30))
    assert chart.card.locator(".tip").inner_text() == "step 12\n1 points\n0.75 points at 30"
    shown = page.locator(".advice li")
    sentences = [" ".join(text.split()) for text in shown.all_inner_texts()]
    assert sentences == ["step 5 ties: <b>most</b> groups", "step 19 kl: far away"]
    shown.nth(1).get_by_role("button").click()
    assert page.input_value("#run") == "1" and groups_shown(page)[1] == "step 18, group 1"
    assert "other<eos>" in page.locator("#list .completion").first.inner_text()
    page.select_option("#step", "2")
    page.select_option("#run", "0")
    assert groups_shown(page)[1] == "step 2, group 1", "the same step, where there is one"
    apart, changed = page.locator("#tables > .wide table").all()
    rows = {row.split("\t")[0]: row.split("\t")[1:4] for row in apart.locator("tr").all_inner_texts()[1:]}
    assert rows == {
        "--learning_rate": ["0.0001 (profile)", "0.05", "0.000005"], "--reward_functions": [
            "correctness reasoning_coherence explanation_quality", "correctness diversity",
            "correctness reasoning_coherence explanation_quality"]}
    flags = [row.split("\t")[0] for row in changed.locator("tr").all_inner_texts()]
    assert {"--use_grpo", "--learning_rate", "--reward_functions"} <= set(flags) and "--ppo_epochs" not in flags


def test_the_smoothed_curve_is_the_weighted_mean_of_what_came_before(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")))
    page.locator("#smoothing").evaluate("slider => { slider.value = 0.9; slider.dispatchEvent(new Event('input')); }")
    assert page.inner_text("#amount") == "over about 10 points"
    means = []
    for step in range(2, 13):
        weights = {before: 0.9 ** (step - before) for before in range(2, step + 1)}
        means.append((step, sum(weight * before / 12 for before, weight in weights.items()) / sum(weights.values())))
    chart = Chart(page, "reward")
    near(chart.points(0)[0], [(step, step / 12) for step in range(2, 13)])
    near(chart.points(1)[0], means)
    assert page.evaluate("smoothed([1, 0, null, 1])") == pytest.approx([1, 0.09 / 0.19, None, (0.081 + 0.1) / 0.271])


def test_charts_are_drawn_when_they_come_into_view_and_all_of_them_for_paper(tmp_path, visit):
    page = visit(write_report(fake_run(tmp_path / "run")), width=500)
    drawings = page.locator("#charts > div .drawing")
    drawn = page.locator("#charts > div .drawing svg")
    assert 0 < drawn.count() < drawings.count()
    drawings.last.scroll_into_view_if_needed()
    drawings.last.locator("svg").wait_for(timeout=5000)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert drawn.count() == drawings.count()
    assert page.locator("#charts details").count() == 1 and not page.is_visible("text=own_metric")
