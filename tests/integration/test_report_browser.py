"""The report in a real browser: it sorts, filters, unfolds, adapts, prints, and asks nobody for anything."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from report_runs import HOSTILE, add_paper, add_run

from gramgn.report import make_report

SHOWN = "[...document.querySelectorAll('#runs tbody tr')].filter(row => !row.hidden)"
HEAD = "[...document.querySelectorAll('#runs thead th')].findIndex(head => head.textContent.trim() === '{}')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests here."""
    program = find_chromium()
    if program is None:
        assert "CI" not in os.environ, "Chromium is not installed: apt-get install chromium"
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a page on the paper's runs, a failed one with a hostile name, and others."""
    root = tmp_path_factory.mktemp("report") / "outputs"
    add_paper(root, seeds=2, epochs=3)
    add_run(root / "hostile" / HOSTILE, [1.0], state="failed", error={"message": HOSTILE})
    add_run(root / "z", [12.0], seed=10, kind="real", data="afad")
    add_run(root / "none", [], state="failed", error={"message": "at once"}, epochs=3)
    out = make_report(
        root, root.parent / "index.html", figures=root.parent / "figures", report=lambda line: None
    )
    return out.as_uri()


@pytest.fixture
def opened(browser: Browser, page: str) -> Browser:
    """The browser, with the page loaded afresh in a wide window."""
    browser.scripts(allowed=True)
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


def numbers(cells: list[str]) -> list[float]:
    return [float(cell) for cell in cells if cell not in ("–", "nan")]


def test_nothing_outside_the_page_is_asked_for_and_nothing_goes_wrong(opened: Browser, page: str) -> None:
    """No request but for the file itself, no complaint of the browser, no hostile name obeyed."""
    asked = [event["request"]["url"] for event in opened.named("Network.requestWillBeSent")]
    assert [address for address in asked if not address.startswith("data:")] == [page]
    assert opened.named("Log.entryAdded") == []
    assert opened.named("Runtime.exceptionThrown") == []
    assert opened.evaluate("document.title").startswith("Gram-Gauss-Newton: report on 59 runs")
    assert opened.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 300)")


@pytest.mark.parametrize("title", ["train loss", "seed", "α", "train s"])
def test_a_column_of_numbers_sorts_both_ways(opened: Browser, title: str) -> None:
    """By value, not by text (10 after 2); what has no number stands last either way."""
    before = column(opened, title)
    press_head(opened, title)
    up = column(opened, title)
    press_head(opened, title)
    down = column(opened, title)
    assert sorted(up) == sorted(before) == sorted(down)
    assert numbers(up) == sorted(numbers(before))
    assert numbers(down) == sorted(numbers(before), reverse=True)
    assert len(set(up)) > 1
    missing = len(up) - len(numbers(up))
    assert (
        len(numbers(up[: len(up) - missing]))
        == len(numbers(down[: len(down) - missing]))
        == len(up) - missing
    )


def test_a_column_of_texts_sorts_and_says_so(opened: Browser) -> None:
    press_head(opened, "state")
    states = column(opened, "state")
    assert states == sorted(states)
    assert set(states) == {"diverged", "done", "failed"}
    sorted_by = "[...document.querySelectorAll('[aria-sort]')].map(head => [head.textContent, head.ariaSort])"
    assert opened.evaluate(sorted_by) == [["state", "ascending"]]
    press_head(opened, "optimizer")
    assert opened.evaluate(sorted_by) == [["optimizer", "ascending"]]
    # Equal ones stay as the folders are ordered.
    spring = [
        path
        for path, name in zip(column(opened, "run"), column(opened, "optimizer"), strict=True)
        if "spring" in name
    ]
    assert len(spring) == 4
    assert spring == sorted(spring)


def test_every_column_can_be_sorted(opened: Browser) -> None:
    titles = opened.evaluate(
        "[...document.querySelectorAll('#runs thead th button')].map(head => head.textContent)"
    )
    assert len(titles) == opened.evaluate("document.querySelector('#runs tbody tr').cells.length") > 25
    everything = sorted(column(opened, "run"))
    for title in titles:
        press_head(opened, title)
        assert sorted(column(opened, "run")) == everything


def test_the_keyboard_alone_reaches_the_headings(opened: Browser) -> None:
    opened.evaluate("document.getElementById('filter').focus()")
    seen: list[Any] = []
    for _ in range(4):
        opened.press("Tab", 9)
        seen.append(opened.evaluate("document.activeElement.textContent.trim().split('\\n')[0]"))
    assert opened.evaluate("document.activeElement.closest('th') !== null")
    assert seen[1:] == ["run", "state", "optimizer"]
    opened.press(" ", 32, " ")
    assert opened.evaluate("document.activeElement.closest('th').ariaSort") == "ascending"


def test_the_filter_shows_what_has_all_words(opened: Browser) -> None:
    write(opened, "DIVERGED 0.25")
    assert opened.evaluate("document.getElementById('count').textContent") == "8 of 59 runs"
    assert set(column(opened, "state")) == {"diverged"}
    assert set(column(opened, "λ")) == {"0.25"}
    # The details below follow.
    assert (
        opened.evaluate(
            "[...document.querySelectorAll('details[id^=run-]')].filter(one => !one.hidden).length"
        )
        == 8
    )
    # Sorting keeps the filter.
    press_head(opened, "α")
    assert column(opened, "α") == ["0.01", "0.03", "0.1", "0.3", "1", "3", "10", "30"]
    write(opened, "no-such-word")
    assert column(opened, "run") == []
    assert opened.evaluate("document.getElementById('count').textContent") == "0 of 59 runs"
    write(opened, "<img onerror")
    assert column(opened, "run") == [f"hostile/{HOSTILE}"]
    write(opened, " ")
    assert len(column(opened, "run")) == 59


def test_a_link_unfolds_the_run(opened: Browser) -> None:
    write(opened, "spring")
    opened.evaluate("document.querySelector('#runs tbody tr:not([hidden]) a').click()")
    opened.evaluate("new Promise(done => setTimeout(done, 100))")
    name = opened.evaluate("document.querySelector('details[id^=run-][open] h3').textContent")
    assert name == column(opened, "run")[0]
    opened.evaluate("document.getElementById('open-all').click()")
    shown = "[...document.querySelectorAll('details[id^=run-]')].filter(one => !one.hidden)"
    assert opened.evaluate(f"{shown}.every(one => one.open)")
    opened.evaluate("document.getElementById('open-all').click()")
    assert opened.evaluate(f"{shown}.every(one => !one.open)")


def test_it_reads_without_javascript(browser: Browser, page: str) -> None:
    """All content is there; what would do nothing is not shown."""
    browser.look(1280)
    browser.scripts(allowed=False)
    browser.open(page)
    assert browser.evaluate("document.querySelectorAll('#runs tbody tr').length") == 59
    assert browser.evaluate("document.querySelectorAll('#runs button').length") == 0
    visible = "document.getElementById('{}').checkVisibility()"
    assert not browser.evaluate(visible.format("filter"))
    assert not browser.evaluate(visible.format("open-all"))
    assert browser.evaluate("document.images.length") == 10
    browser.scripts(allowed=True)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_window_and_the_readers_colours(
    opened: Browser, page: str, width: int, dark: bool
) -> None:
    """The page itself never scrolls sideways, wide tables do within their frame; text stands out by 4.5 to 1."""
    opened.look(width, dark=dark)
    opened.open(page)
    opened.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    found = opened.evaluate(CONTRAST)
    assert len(found) > 5
    for words, ratio in found.items():
        assert ratio >= 4.5, (words, ratio)
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_a_screen_reader_finds_its_way(opened: Browser) -> None:
    """Headings in order, one main part; every table, picture, field, link and frame has a name."""
    levels = opened.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(head => Number(head.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert opened.evaluate("document.querySelectorAll('main').length") == 1
    assert opened.evaluate(
        "[...document.querySelectorAll('table')].every(one => one.caption.textContent.trim() !== '')"
    )
    assert opened.evaluate("[...document.images].every(one => one.alt.length > 30)")
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    for node in nodes:
        if node.get("role", {}).get("value") in ("searchbox", "button", "link", "region") and not node.get(
            "ignored"
        ):
            assert node.get("name", {}).get("value"), node


def test_it_prints(opened: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.pdf"
    opened.pdf(path)
    content = path.read_bytes()
    assert content.startswith(b"%PDF")
    # Some pages, not hundreds, and landscape: the table is wide.
    assert 4 < content.count(b"/Type /Page\n") < 40
    opened.call("Emulation.setEmulatedMedia", media="print")
    assert not opened.evaluate("document.getElementById('filter').checkVisibility()")
    # 273 mm of A4 within its margins: no column of the table may fall off the paper.
    opened.look(1032)
    assert opened.evaluate("document.documentElement.scrollWidth") == 1032
    opened.call("Emulation.setEmulatedMedia", media="")


# The lowest contrast of the text in each kind of element against what is behind it (WCAG 2.2, section 1.4.3).
CONTRAST = """
(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => parts(color).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if ((parts(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  const names = "p th td a dt dd code caption figcaption .warning .note .failed .diverged .holds .fails";
  for (const name of names.split(" ")) {
    for (const element of document.querySelectorAll(name)) {
      const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      found[name] = Math.min(found[name] ?? 99, ratio);
    }
  }
  return found;
})()
"""
