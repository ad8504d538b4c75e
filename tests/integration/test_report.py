"""The report's page as a file: what it holds, what it escapes, how it fails. Its behaviour: test_report_browser.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import HOSTILE, add_paper, add_run

from gramgn.figures import load_runs, write_results
from gramgn.records import SweepFolder
from gramgn.report import make_report

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


def command(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "scripts" / "make_report.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def made(root: Path, **options: object) -> Page:
    out = root.parent / "report" / "index.html"
    options = {"figures": root.parent / "figures", "report": lambda line: None, **options}
    return Page(make_report(root, out, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page]:
    """Runs as the chain leaves them, and their page."""
    root = tmp_path_factory.mktemp("paper") / "outputs"
    add_paper(root, seeds=2, epochs=3)
    return root, made(root)


def test_nothing_to_report_is_one_line(tmp_path: Path, repository: Path) -> None:
    """F01: exit code 2, one line that says what makes runs, nothing written."""
    out = tmp_path / "report" / "index.html"
    done = command(repository, "--runs", str(tmp_path), "--out", str(out))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: no run in {tmp_path}. ")
    assert "make demo" in line
    assert "python train.py" in line
    assert not out.parent.exists()


def test_the_page_holds_everything_and_asks_for_nothing(paper: tuple[Path, Page]) -> None:
    _, page = paper
    # Any address outside the page would be an attribute; links within it begin with #.
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "url(" not in page.html
    assert "@import" not in page.html
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy
    targets = {link["href"] for link in page.all("a")}
    names = {f"#{attributes['id']}" for _, attributes in page.elements if "id" in attributes}
    assert targets <= names
    assert len(names) == sum("id" in attributes for _, attributes in page.elements), "an id is there twice"


def test_the_head_says_what_data_scale_and_device(paper: tuple[Path, Page]) -> None:
    _, page = paper
    (title,) = re.findall("<title>(.*)</title>", page.html)
    assert title == "Gram-Gauss-Newton: report on 56 runs (SYNTHETIC data)"
    assert "SYNTHETIC data. afad_synthetic, rsna_synthetic: made by a program" in page.text
    assert "SYNTHETIC rsna_synthetic 32 2560 laptop Abacus 2000 2 48 8 diverged, 40 done" in page.text
    assert "Mixed or unclean code" not in page.text


def test_every_claim_stands_beside_its_numbers(paper: tuple[Path, Page]) -> None:
    """The numbers are those of gramgn.figures, each with its spread, its seeds and its rule."""
    _, page = paper
    claims = page.section("claims")
    for claim in (
        "close to zero",
        "per epoch",
        "per second",
        "falls faster",
        "ends lower",
        "λ near 1",
        "hardly matters",
    ):
        assert claim in claims
    # The losses of GGN are 4 / (epoch + 0.1 seed): the least of 3 epochs, for two seeds and their median.
    row = re.search(r"least training loss of GGN.*?</tr>", claims, re.DOTALL)
    assert row is not None
    assert re.findall(r'"number">([^<]*)<', row.group()) == ["1.312", "1.29", "1.333", "2"]
    assert claims.count("Rule: ") == 9


def test_every_panel_is_there_with_a_text_instead(paper: tuple[Path, Page]) -> None:
    _, page = paper
    texts = [image["alt"] or "" for image in page.all("img")]
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(texts) == 8
    assert texts[0].startswith(
        "Lines of the training loss against training time, logarithmic: GGN on ResNetFixup (2 seeds)"
    )
    assert "is at 1.312 (1.29 to 1.333) after epoch 3" in texts[0]
    assert "Heat map of the training loss at epoch 3" in texts[6]
    assert "8 diverged, 32 finite" in texts[6]
    assert "at lambda 1, alpha 1;" in texts[6]
    assert "together on one page" in texts[7]
    assert "Figure 2b: no finished run; python train.py sweep=lambda_alpha_curves makes one" in page.text


def test_the_runs_table_has_every_run_with_settings_and_numbers(paper: tuple[Path, Page]) -> None:
    _, page = paper
    table = page.section("all-runs")
    assert table.count("<tr data-run=") == 56
    row = re.search(
        r"<tr data-run[^>]*>\s*<th[^>]*><a[^>]*>[^<]*lam2.0-alpha0.3</a>.*?</tr>", table, re.DOTALL
    )
    assert row is not None
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row.group())
    assert cells[:9] == ["done", "ggn", "resnet_fixup", "2", "0.3", "1", "0", "3", "3"]
    assert cells[9:14] == ["1.079", "3.236", "2.158", "10.79", "years"]
    heads = page.all("th")
    assert all("scope" in head for head in heads)


def test_a_run_is_compared_with_the_usual(tmp_path: Path) -> None:
    """The usual value is that of most runs with the same choice: alpha of GGN says nothing about SGD's keys."""
    root = tmp_path / "outputs"
    for seed in range(3):
        add_run(root / f"g{seed}", [1.0], seed=seed)
    add_run(root / "odd", [1.0], settings={"alpha": 0.9})
    add_run(root / "sgd", [1.0], optimizer="sgd", settings={"alpha": 7.0})
    page = made(root)
    odd = re.search(r"<h3>odd</h3>.*?</details>", page.html, re.DOTALL)
    sgd = re.search(r"<h3>sgd</h3>.*?</details>", page.html, re.DOTALL)
    assert odd is not None
    assert sgd is not None
    found = re.findall(
        r"<code>([^<]*)</code></th><td[^>]*><code>([^<]*)</code></td><td[^>]*><code>([^<]*)", odd.group()
    )
    assert found == [("optimizer.alpha", "0.9", "0.3")]
    assert "As usual in every entry." in sgd.group()
    usual = page.section("usual")
    assert "optimizer=sgd</h3> 1 run<" in usual
    assert "<code>7.0</code>" in usual


def test_details_tell_where_a_run_comes_from(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    git = {"commit": "beef" * 10, "dirty": True, "diff_sha256": "d1ff"}
    add_run(root / "a", [1.0, 0.5], git=git, resume_count=2)
    add_run(root / "b", [1.0])
    page = made(root)
    for words in (
        f"git commit {'beef' * 10}",
        "uncommitted changes yes: files differed from the commit",
        "hash of the changes d1ff",
        "versions gramgn 0.1.0, python 3.11.7, torch 2.14.1",
        "device Abacus 2000 · cpu",
        "CPU threads 2",
        f"manifest (SHA-256) {'ab' * 32}",
        "resumed 2 times",
        "solves by eigenvalues, after Cholesky failed 2",
        "overrides optimizer=ggn seed=0",
        "The runs come from 2 commits. In 1 of them files differed from the commit.",
    ):
        assert words in page.text, words


def test_what_did_not_end_well_is_listed_with_its_reason(tmp_path: Path) -> None:
    """F01: failed, diverged, killed, damaged, cut, and the jobs of a sweep that left no folder."""
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
    cells = [{"folder": "one", "state": "done"}, {"folder": "two"}, {"folder": "three", "state": "done"}]
    cells.append({"folder": "four", "state": "failed", "error": "killed by SIGKILL"})
    sweep.write({"name": "s", "cells": cells})
    page = made(root)
    rows = re.findall(
        r"<tr><th scope=\"row\">(.*?)</th>\s*<td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", page.section("problems")
    )
    listed = {re.sub("<[^>]*>", "", name): (state, reason) for name, state, reason in rows}
    assert listed["failed"] == ("failed", "disk full")
    assert listed["diverged"] == ("diverged", "non-finite loss or step after epoch 2")
    assert listed["killed"][0] == "killed"
    assert listed["torn"] == (
        "done, but damaged",
        "torn/metrics.csv: line 3 is torn (no line end); 1 whole rows before it",
    )
    assert listed["broken"][0] == "unreadable"
    assert listed["sweeps/s/two"][0] == "waiting"
    assert listed["sweeps/s/three"] == ("missing", "its sweep recorded it as done, but its folder is gone")
    assert listed["sweeps/s/four"] == ("failed", "killed by SIGKILL")
    assert len(listed) == 8
    assert str(tmp_path) not in page.html


def test_a_folder_with_broken_runs_only_still_gives_a_page(tmp_path: Path) -> None:
    add_run(tmp_path / "outputs" / "a", [1.0], state="failed", error={"message": "no data"})
    page = made(tmp_path / "outputs")
    assert "no data" in page.section("problems")
    assert page.all("img") == []
    assert "There is no run yet that a claim of the paper can be measured on" in page.text


def test_texts_of_records_are_shown_and_never_obeyed(tmp_path: Path) -> None:
    """Names, reasons, settings, choices and folders may hold HTML, quotes, half characters."""
    root = tmp_path / "outputs"
    add_run(root / "a" / HOSTILE, [1.0], state="failed", error={"message": HOSTILE}, name=HOSTILE)
    add_run(
        root / "b",
        [1.0],
        settings={HOSTILE: HOSTILE},
        choices={"experiment": HOSTILE, "optimizer": '"><b id="x">'},
    )
    add_run(root / "c", [1.0], data=HOSTILE, model="</script><script>alert(1)</script>")
    add_run(root / "d", [1.0], device={"kind": "cpu", "name": "' onload='x"}, name="half \ud800")
    add_run(root / os.fsdecode(b"not-\xff-utf8"), [1.0])
    plain = tmp_path / "plain"
    for name in "abcde":
        add_run(plain / "outputs" / name, [1.0])
    page, calm = made(root), made(plain / "outputs")
    assert page.html.count("&lt;img src=x onerror") > 8
    assert "half ?" in page.text
    for tag in ("script", "b", "style"):
        assert len(page.all(tag)) == len(calm.all(tag))
    assert all(image["src"] != "x" for image in page.all("img"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_same_runs_give_the_same_bytes(paper: tuple[Path, Page]) -> None:
    """F03: no time and no path of the day is in the page."""
    root, page = paper
    again = make_report(
        root, root.parent / "other.html", figures=root.parent / "figures", report=lambda line: None
    )
    assert again.read_text(encoding="utf-8") == page.html


def test_published_numbers_give_a_page_as_well(
    paper: tuple[Path, Page], tmp_path: Path, repository: Path
) -> None:
    root, page = paper
    results, out = tmp_path / "numbers.csv", tmp_path / "index.html"
    write_results(load_runs(root), results)
    words = ("--results", str(results), "--out", str(out), "--figures", str(tmp_path / "figures"))
    done = command(repository, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(out)]
    again = Page(out)
    assert "the published numbers in numbers.csv" in again.text
    assert again.section("claims") == page.section("claims")
    assert again.section("all-runs").count("<tr data-run=") == 56


def test_bad_input_is_one_message(tmp_path: Path, repository: Path) -> None:
    add_run(tmp_path / "runs" / "a", [1.0])
    (tmp_path / "file").write_text("mine")
    runs, out = ("--runs", str(tmp_path / "runs")), str(tmp_path / "x.html")
    for words, message in (
        ((*runs, "--out", str(tmp_path / "file" / "index.html")), "cannot make the folder"),
        ((*runs, "--out", out, "--figures", str(tmp_path / "file")), "cannot make the folder"),
        (("--results", str(tmp_path / "none.csv"), "--out", out), "there is no results file"),
    ):
        done = command(repository, *words)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {message}")
    assert (tmp_path / "file").read_text() == "mine"


def test_it_needs_no_training_stack_and_no_network(tmp_path: Path) -> None:
    """F09: every socket refused; torch, hydra and wandb are not imported."""
    add_run(tmp_path / "runs" / "a", [1.0, 0.5])
    code = (
        "import socket, sys, pathlib\n"
        "def refuse(*_, **__): raise OSError('network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from gramgn.report import make_report\n"
        "here = pathlib.Path(sys.argv[1])\n"
        "make_report(here / 'runs', here / 'index.html', figures=here / 'figures')\n"
        "print([name for name in ('torch', 'hydra', 'omegaconf', 'wandb') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[]\n", done.stderr
