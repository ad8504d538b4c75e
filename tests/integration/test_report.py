"""The report's page as a file: what it holds, what it escapes, how it fails. Its behaviour: test_report_browser.py."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from figure_runs import GIT, add_curve, add_paper_runs, add_run, dataset_of
from figure_views import script, silent

from gramgn.records import SweepFolder, runs, write_results
from gramgn.report import make_report

HOSTILE = "<img src=x onerror=document.title='attacked'>"
_VOID = {"meta", "link", "img", "br", "input"}


class Page(HTMLParser):
    """The elements of a page; an element that is not closed in order fails the test."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def section(self, name: str) -> str:
        """Return the HTML of one section."""
        found = re.search(rf'<section aria-labelledby="{name}">.*?</section>', self.html, re.DOTALL)
        assert found is not None
        return found.group()

    def details(self, name: str) -> str:
        """Return the HTML of one run's details."""
        found = re.search(rf"<h3>{name}</h3>.*?</details>", self.html, re.DOTALL)
        assert found is not None
        return found.group()


def made(*sources: Path) -> Page:
    return Page(make_report(*sources, out=sources[0].parent / "report" / "index.html", report=silent))


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """Runs as the paper's sweeps leave them, and their page."""
    root = tmp_path_factory.mktemp("paper") / "outputs"
    add_paper_runs(root, seeds=(0, 1), epochs=3)
    return root, made(root)


def test_the_page_holds_everything_and_asks_for_nothing(paper: tuple[Path, Page]) -> None:
    _, page = paper
    # Any address outside the page would be an attribute; links within it begin with #.
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in page.html
    assert "@import" not in page.html
    targets = {link["href"] for link in page.all("a")}
    names = {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    assert targets <= names
    assert len(names) == sum("id" in attributes for _, attributes in page.elements), "an id is there twice"
    assert all("scope" in head for head in page.all("th"))


def test_the_head_says_what_data_scale_and_device(paper: tuple[Path, Page]) -> None:
    _, page = paper
    (title,) = re.findall("<title>(.*)</title>", page.html)
    assert title == "Gram-Gauss-Newton: report on 63 runs (SYNTHETIC data)"
    assert "SYNTHETIC data. afad_synthetic, rsna_synthetic: drawn by a program" in page.text
    assert "SYNTHETIC rsna_synthetic 32 512, 2560 laptop Abacus 2000 2 55 11 diverged, 44 done" in page.text
    assert "versions of the code" not in page.text


def test_every_claim_has_its_numbers_and_every_panel_a_text(paper: tuple[Path, Page]) -> None:
    """The numbers are those of gramgn.figures, each with its spread, its seeds and its rule."""
    _, page = paper
    claims = page.section("claims")
    assert claims.count("Rule: ") == 9
    row = re.search(r"least training loss of GGN.*?</tr>", claims, re.DOTALL)
    assert row is not None
    median, least, greatest, seeds = re.findall(r'"number">([^<]*)<', row.group())
    assert float(least) <= float(median) <= float(greatest)
    assert seeds == "2"
    texts = [image["alt"] or "" for image in page.all("img")]
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(texts) == 9
    start = (
        "Lines of the training loss against training time, logarithmic: GGN on ResNetFixup (2 seeds) ends at "
    )
    assert texts[0].startswith(start)
    assert "Heat map of the training loss at epoch 10" in texts[7]
    assert "The least loss is 0.01 at lambda 0.5, alpha 10." in texts[7]
    assert "together on one page" in texts[8]


def test_the_runs_table_has_every_run_with_settings_and_numbers(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    settings = {"lam": 2.0, "alpha": 0.3, "damping_convention": "mean"}
    add_run(root / "a", [2.0, 1.0786], settings=settings, seed=1)
    add_run(root / "b", [float("nan")], state="diverged", epochs=3)
    page = made(root)
    table = page.section("all-runs")
    assert table.count("<tr data-run=") == 2
    row = re.search(r"<tr data-run[^>]*>\s*<th[^>]*><a[^>]*>a</a>.*?</tr>", table, re.DOTALL)
    assert row is not None
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row.group())
    assert cells[:9] == ["done", "ggn", "resnet_fixup", "2", "0.3", "1", "1", "2", "2"]
    assert cells[9:14] == ["1.079", "3.236", "2.157", "10.79", "months"]


def test_a_run_is_compared_with_the_usual(tmp_path: Path) -> None:
    """The usual value is that of most runs with the same choice: alpha of GGN says nothing about SGD's keys."""
    root = tmp_path / "outputs"
    for seed in range(3):
        add_run(root / f"g{seed}", [1.0], seed=seed, settings={"alpha": 0.3})
    add_run(root / "odd", [1.0], settings={"alpha": 0.9})
    add_run(root / "sgd", [1.0], optimizer="sgd", settings={"alpha": 7.0})
    page = made(root)
    pattern = r"<code>([^<]*)</code></th><td[^>]*><code>([^<]*)</code></td><td[^>]*><code>([^<]*)"
    assert re.findall(pattern, page.details("odd")) == [("optimizer.alpha", "0.9", "0.3")]
    assert "All settings are the usual ones." in page.details("sgd")
    assert "optimizer=sgd</h3> 1 run<" in page.section("usual")


def test_details_tell_where_a_run_comes_from(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    git = {"commit": "beef" * 10, "dirty": True, "diff_sha256": "d1ff"}
    starts = [{"time_utc": "2026-01-01T00:00:00Z", "git": git}]
    add_run(root / "a", [1.0, 0.5], git=git, starts=starts, resume_count=2, overrides=["seed=0"])
    add_run(root / "b", [1.0])
    page = made(root)
    for words in (
        f"git commit {'beef' * 10}",
        "uncommitted changes yes: files differed from the commit",
        "hash of the changes d1ff",
        "versions gramgn 0.1.0, torch 2.14.1",
        "device Abacus 2000 · cpu",
        "CPU threads 2",
        f"manifest (SHA-256) {'ab' * 32}",
        "resumed 2 times",
        "solves by eigenvalues, after Cholesky failed 2",
        "overrides seed=0",
        f"versions of the code: beefbeefbe+d1ff, {GIT['commit'][:10]}.",
    ):
        assert words in page.text, words


def test_what_did_not_end_well_is_listed_with_its_reason(tmp_path: Path) -> None:
    """F01: failed, diverged, killed, damaged, cut, and the jobs of a sweep that have not begun."""
    root = tmp_path / "outputs"
    add_run(root / "good", [1.0, 0.5])
    add_run(root / "failed", [1.0], state="failed", error={"type": "E", "message": "disk full"})
    add_run(root / "diverged", [1.0, float("nan")], state="diverged", epochs=5)
    add_run(root / "killed", [1.0], state="running", epochs=5)
    torn = add_run(root / "torn", [1.0, 0.5]).metrics_csv
    torn.write_bytes(torn.read_bytes()[:-3])
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{")
    sweep = SweepFolder(root / "sweeps" / "s")
    add_run(sweep.path / "one", [1.0])
    sweep.write({"name": "s", "cells": [{"folder": "one", "state": "done"}, {"folder": "two"}]})
    page = made(root)
    rows = re.findall(
        r"<tr><th scope=\"row\">(.*?)</th><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page.section("problems")
    )
    listed = {re.sub("<[^>]*>", "", name): (state, reason) for name, state, reason in rows}
    assert listed == {
        "diverged": ("diverged", "non-finite loss or step after epoch 2"),
        "failed": ("failed", "E: disk full"),
        "killed": ("running", "not finished: still running, or killed"),
        "sweeps/s/two": ("waiting", "not begun; rerun the sweep&#39;s command"),
    }
    assert "torn/metrics.csv: line 3 is damaged" in page.section("problems")
    assert "broken/run.json" in page.section("problems")
    assert str(tmp_path) not in page.html


def test_a_folder_with_broken_runs_only_still_gives_a_page(tmp_path: Path) -> None:
    add_run(tmp_path / "outputs" / "a", [1.0], state="failed", error={"type": "E", "message": "no data"})
    page = made(tmp_path / "outputs")
    assert "no data" in page.section("problems")
    assert page.all("img") == []
    assert "No claim of the paper can be measured on these runs" in page.text


def test_texts_of_records_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    """Names, reasons, settings, choices and folders may hold HTML and quotes."""
    root = tmp_path / "outputs"
    failed = {"state": "failed", "error": {"type": "E", "message": HOSTILE}}
    add_run(root / "a" / HOSTILE, [1.0], name=HOSTILE, **failed)
    choices = {"experiment": HOSTILE, "optimizer": '"><b id="x">'}
    add_run(root / "b", [1.0], settings={HOSTILE: HOSTILE}, choices=choices)
    add_run(root / "c", [1.0], dataset={"name": HOSTILE}, model="</script><script>alert(1)</script>")
    add_run(root / "d", [1.0], device={"kind": "cpu", "name": "' onload='x"}, **failed)
    add_run(root / os.fsdecode(b"not-\xff-utf8"), [1.0], **failed)
    page = made(root)
    assert page.html.count("&lt;img src=x onerror") > 8
    assert [len(page.all(tag)) for tag in ("script", "style", "b")] == [1, 1, 0]
    assert all(image["src"] != "x" for image in page.all("img"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_same_runs_and_their_results_file_give_the_same_claims(tmp_path: Path) -> None:
    """F03: no time and no path of the day is in the page."""
    root, results, out = tmp_path / "runs", tmp_path / "numbers.csv", tmp_path / "index.html"
    for name, optimizer, model in CURVES:
        add_curve(root, f"fig1/afad_{name}", optimizer, model, 0, 3, dataset_of("afad", "real", "years"))
    page = made(root)
    assert make_report(root, out=out, report=silent).read_text() == page.html
    write_results(runs(root), results)
    done = script("make_report", "--results", results, "--out", out)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    again = Page(out)
    assert "Made from numbers.csv." in again.text
    assert again.section("claims") == page.section("claims")
    assert again.section("all-runs").count("<tr data-run=") == 3


CURVES = (
    ("ggn_fixup", "ggn", "resnet_fixup"),
    ("sgd_fixup", "sgd", "resnet_fixup"),
    ("sgd_bn", "sgd", "resnet_bn"),
)


def test_bad_input_is_one_message(tmp_path: Path) -> None:
    """F01: exit code 2, one line that says what to do, nothing written."""
    add_run(tmp_path / "runs" / "a", [1.0])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "new" / "x.html"
    for words, message in (
        (("--runs", tmp_path / "runs", "--out", tmp_path / "file" / "index.html"), "cannot make the folder"),
        (("--results", tmp_path / "none.csv", "--out", out), "there is no results file"),
        (
            ("--runs", tmp_path / "empty", "--out", out),
            f"no run in {tmp_path / 'empty'}. Make some with `make demo`",
        ),
    ):
        done = script("make_report", *words)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {message}")
    assert (tmp_path / "file").read_text() == "mine"
    assert not out.parent.exists()
