"""The report in a real browser: it sorts, filters, unfolds, adapts, and asks nobody for anything."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from browser import Browser, find_chromium
from figure_runs import add_grid, add_run, dataset_of
from figure_views import silent

from gramgn.report import make_report

HOSTILE = "<img src=x onerror=document.title='attacked'>"
SHOWN = "[...document.querySelectorAll('#runs tbody tr')].filter(row => !row.hidden)"
HEAD = "[...document.querySelectorAll('#runs thead th')].findIndex(head => head.textContent.trim() === '{}')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests here."""
    program = find_chromium()
    if program is None:
        assert "CI" not in os.environ, "Chromium is not installed: apt-get install chromium"
        pytest.skip("browser tests need Chromium: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a page on a grid, a failed run with a hostile name, and others."""
    root = tmp_path_factory.mktemp("report") / "outputs"
    add_grid(root / "grid", dataset_of("rsna", "synthetic", "months"), lams=(0.25, 1))
    add_run(root / "hostile" / HOSTILE, [1.0], state="failed", error={"type": "E", "message": HOSTILE})
    add_run(root / "z", [12.0], seed=10, dataset={"name": "afad"})
    add_run(root / "none", [], state="failed", error={"type": "E", "message": "at once"}, epochs=3)
    return make_report(root, out=root.parent / "index.html", report=silent).as_uri()


@pytest.fixture
def opened(browser: Browser, page: str) -> Browser:
    """The browser, with the page loaded afresh in a wide window."""
    browser.look(1280)
    browser.open(page)
    return browser


def column(browser: Browser, title: str) -> list[str]:
    return browser.evaluate(f"{SHOWN}.map(row => row.cells[{HEAD.format(title)}].textContent)")


def press_head(browser: Browser, title: str) -> None:
    """Put the focus on a heading as Tab does, and press Enter."""
    browser.evaluate(
        f"document.querySelectorAll('#runs thead th')[{HEAD.format(title)}].querySelector('button').focus()"
    )
    browser.press("Enter", 13, "\r")


def write(browser: Browser, text: str) -> None:
    browser.evaluate(
        "(() => { const field = document.getElementById('filter'); field.focus(); field.select(); })()"
    )
    browser.type(text)


def test_nothing_outside_the_page_is_asked_for_and_nothing_goes_wrong(opened: Browser, page: str) -> None:
    """No request but for the file itself, no complaint of the browser, no hostile name obeyed; all images load."""
    asked = [event["request"]["url"] for event in opened.named("Network.requestWillBeSent")]
    assert [address for address in asked if not address.startswith("data:")] == [page]
    assert opened.named("Log.entryAdded") == []
    assert opened.named("Runtime.exceptionThrown") == []
    assert opened.evaluate("document.title").startswith("Gram-Gauss-Newton: report on 21 runs")
    assert opened.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 300)")


def test_columns_sort_both_ways(opened: Browser) -> None:
    """Numbers by value, not by text (10 after 2); what has no number is last either way."""
    for title in ("train loss", "seed", "α"):
        before = column(opened, title)
        press_head(opened, title)
        up = column(opened, title)
        press_head(opened, title)
        down = column(opened, title)
        numbers = [float(cell) for cell in before if cell != "–"]
        missing = len(before) - len(numbers)
        assert [float(cell) for cell in up[: len(numbers)]] == sorted(numbers)
        assert [float(cell) for cell in down[: len(numbers)]] == sorted(numbers, reverse=True)
        assert up[len(numbers) :] == down[len(numbers) :] == ["–"] * missing
    press_head(opened, "state")
    assert column(opened, "state") == sorted(column(opened, "state"))
    assert opened.evaluate("document.querySelector('[aria-sort]').textContent") == "state"


def test_the_filter_shows_what_has_all_words(opened: Browser) -> None:
    write(opened, "DIVERGED 0.25")
    assert opened.evaluate("document.getElementById('count').textContent") == "9 of 21 runs"
    assert set(column(opened, "state")) == {"diverged"}
    details = "[...document.querySelectorAll('details[id^=run-]')].filter(one => !one.hidden).length"
    assert opened.evaluate(details) == 9
    press_head(opened, "α")
    assert column(opened, "α") == ["0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30", "100"]
    write(opened, "<img onerror")
    assert column(opened, "run") == [f"hostile/{HOSTILE}"]
    opened.evaluate("document.querySelector('#runs tbody tr:not([hidden]) a').click()")
    opened.evaluate("new Promise(done => setTimeout(done, 100))")
    assert (
        opened.evaluate("document.querySelector('details[id^=run-][open] h3').textContent")
        == f"hostile/{HOSTILE}"
    )


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_it_fits_the_window_and_the_readers_colours(
    opened: Browser, page: str, width: int, dark: bool
) -> None:
    """The page itself never scrolls sideways; wide tables do within their frame. Text and background swap."""
    opened.look(width, dark=dark)
    opened.open(page)
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")
