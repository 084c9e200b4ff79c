"""The page of a run, opened in Chromium: what it shows and colours, and that no text of a model runs in it."""

import math
import shutil

import pytest
from fake_run import AFTER, HOSTILE, STOP, edit_rollouts, fake_run, tokens_of_text

from analysis import report
from analysis.report import draw_curves, write_report

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
    return page.locator("#list .group > .soft").all_inner_texts()


def channels(colour):
    """The numbers of "rgb(1, 2, 3)" or "rgba(1, 2, 3, 0.5)"."""
    return [float(part) for part in colour.partition("(")[2].rstrip(")").split(",")]


def test_it_opens_draws_and_goes_from_step_to_step(tmp_path, visit, monkeypatch):
    monkeypatch.setattr(report, "draw_curves", draw_curves)
    page = visit(write_report(fake_run(tmp_path / "run")))
    assert page.title() == page.inner_text("h1") == f"plain-grpo: {tmp_path / 'run'}"
    assert page.locator("img").is_visible() and page.locator("img").evaluate("img => img.naturalWidth") > 0
    assert groups_shown(page) == [f"step 10, group {p}" for p in ("1", "2", "3", "0, tied")]
    for step in 2, 10:
        page.select_option("#step", f"step-{step}")
        assert groups_shown(page)[0] == f"step {step}, group 1" and not page.is_visible("#more")


def test_hostile_text_stays_text(tmp_path, visit):
    for number, text in enumerate(HOSTILE):
        page = visit(write_report(fake_run(tmp_path / f"{number}", completion=text, prompt=text)))
        assert page.evaluate("window.pwned") is None
        assert page.locator("#list .prompt").first.evaluate("node => node.textContent") == text
        assert page.locator("#list img, #list script").count() == 0


def test_of_a_large_step_the_first_groups_are_shown_and_all_on_demand(tmp_path, visit):
    folder = fake_run(tmp_path / "run", steps=60, prompts=20, siblings=8, every=4, completion="a completion " * 20)
    page = visit(write_report(folder))
    assert len(groups_shown(page)) == 8
    page.click("text=show all 20 groups of this step")
    assert len(groups_shown(page)) == 20 and not page.is_visible("#more")


def card(page, p, g):
    """Completion g of group p of the step shown."""
    return page.locator("#list .group").nth(p - 1).locator(".completion").nth(g)      # group 0 is tied and last


def colours(page, p, g):
    style = "spans => spans.map(span => getComputedStyle(span).backgroundColor)"
    return [channels(colour) for colour in card(page, p, g).locator(".text span").evaluate_all(style)]


def test_cards_and_colours_by_hand(tmp_path, visit):
    """Group 1 of a step has AFTER, group 3 advantages of tokens and an environment's words."""
    folder = fake_run(tmp_path / "run")
    ids = [*tokens_of_text("abc"), STOP]
    edit_rollouts(folder, lambda record, i: record.update(
        AFTER if record["group"] == 1 else {} if record["group"] != 3 else {
            "completion_ids": ids, "token_advantages": [2.0, None, -4.0, 0.0], "sampling_logp": [-1.0, None, -0.5, -0.75]}))
    page = visit(write_report(folder))
    assert card(page, 2, 0).locator("> *").all_inner_texts() == [
        "reward +1.50", "advantage +1.00", "correctness +1.00", "length +0.50", "answer 20 of step 10<eos>",
        "21 tokens, ended with a stop token"]
    for t, colour in enumerate(colours(page, 2, 0)):
        assert colour == pytest.approx([217, 140, 20, 0.75 * (1 - math.exp(-0.1 * t))], abs=0.006), "ochre: unlikely"
    spans = card(page, 3, 0).locator(".text span")
    assert spans.evaluate_all("spans => spans.map(span => span.title)") == [
        "log-probability -1, advantage 2", "of the environment", "log-probability -0.5, advantage -4", "log-probability -0.75, advantage 0"]
    assert spans.evaluate_all("spans => spans.map(span => span.className)") == ["", "soft", "", ""]
    up, down, odd = [42, 111, 191], [201, 66, 48], [217, 140, 20]
    for name, p, wanted in (
        ("advantage", 3, [[*up, 0.3], None, [*down, 0.6], None]),
        ("change", 1, [None, None, [*down, 0.6 * 0.1235 / 0.5], None, [*up, 0.6]]),
        ("entropy", 1, [None, None, [*odd, 0.375], None, [*odd, 0.675]]),
        ("", 1, [None] * 5),
    ):
        page.select_option("#colour", name)
        found = [None if colour[3] < 0.01 else pytest.approx(colour, abs=0.006) for colour in colours(page, p, 0)]
        assert found == wanted, name
