"""Results files: written from runs, checked when read, drawn to the same figures."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from figure_runs import add_curve, add_paper_runs, add_run, dataset_of

from gramgn.errors import InputError
from gramgn.figures import (
    RESULT_COLUMNS,
    claims_table,
    drawings,
    figure_sets,
    load_runs,
    read_results,
    summary_table,
    write_results,
)
from gramgn.records import RunFolder

AFAD = dataset_of("afad", "synthetic", "years")


def script(repository: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "scripts" / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def silent(line: str) -> None:
    """Take a report and forget it."""


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return the results file of two seeds of one curve, three epochs each."""
    for seed in (0, 1):
        add_curve(tmp_path / "runs", "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 3, AFAD)
    path = tmp_path / "results.csv"
    write_results(load_runs(tmp_path / "runs"), path)
    return path


def test_a_results_file_draws_the_same_panels_as_its_runs(tmp_path: Path) -> None:
    """F03, F09: byte for byte, with the same claims and table, so that a reader redraws what was published."""
    add_paper_runs(tmp_path / "runs", epochs=3, seeds=(0, 1))
    loaded = load_runs(tmp_path / "runs")
    write_results(loaded, tmp_path / "results.csv")
    read = read_results([tmp_path / "results.csv"])
    pairs = list(zip(drawings(loaded, report=silent), drawings(read, report=silent), strict=True))
    assert len(pairs) == 9
    for one, other in pairs:
        assert one.stem == other.stem
        assert one.render("png") == other.render("png"), one.stem
    for text in (
        lambda found: claims_table(figure_sets(found)[0][0]),
        lambda found: summary_table(figure_sets(found)[0][0].runs("afad")),
    ):
        assert text(loaded) == text(read)


def test_numbers_come_back_exactly_with_a_row_a_run_and_epoch(results: Path) -> None:
    runs = load_runs(results.parent / "runs").runs
    read = read_results([results]).runs
    assert [run.path for run in read] == [run.path for run in runs]
    names = ("epoch", "step", "train_s", "train_loss", "train_mae", "val_loss", "test_loss", "test_mae")
    for one, other in zip(runs, read, strict=True):
        assert [[row[name] for name in names] for row in one.rows] == [
            [row[name] for name in names] for row in other.rows
        ]
        assert one.own_settings == other.own_settings
        assert (one.other_settings, one.code, one.began) == (other.other_settings, other.code, other.began)
    rows = table(results)
    assert len(rows) == 6
    assert rows[0]["kind"] == "synthetic"
    assert rows[0]["manifest"] == "afadafadafad"
    assert rows[0]["device"] == "Abacus 2000"


def test_other_runs_keep_their_comparison(tmp_path: Path) -> None:
    """Settings with a column of their own are named in the legend; of others only that they differ."""
    add_run(tmp_path / "runs" / "a", [1.0, 0.5], settings={"lr": 0.1})
    add_run(tmp_path / "runs" / "b", [1.0, 0.4], settings={"lr": 0.3})
    add_run(tmp_path / "runs" / "c", [1.0, 0.3], settings={"lr": 0.3, "nesterov": True})
    write_results(load_runs(tmp_path / "runs"), tmp_path / "r.csv")
    lines = summary_table(read_results([tmp_path / "r.csv"]).runs).splitlines()
    labels = [line for line in lines if line.startswith("GGN")]
    assert labels == [
        "GGN on ResNetFixup, lr 0.1",
        "GGN on ResNetFixup, lr 0.3",
        "GGN on ResNetFixup, lr 0.3",
    ]


def test_runs_without_an_epoch_have_a_row_all_the_same(tmp_path: Path) -> None:
    """Diverged in epoch 1, failed, killed: a grid needs to know of them; what was repeated is not told."""
    runs = tmp_path / "runs"
    settings = {"lam": 1.0, "alpha": 0.1}
    add_run(runs / "diverged", [], epochs=3, state="diverged", settings={"lam": 0.5, "alpha": 0.1})
    add_run(runs / "failed", [1.0], epochs=3, state="failed", settings={"lam": 2.0, "alpha": 0.1})
    add_run(runs / "killed", [1.0], epochs=3, state="running", settings=settings, seed=1)
    add_run(runs / "first-try", [1.0], epochs=3, state="interrupted", settings=settings)
    add_run(runs / "second-try", [1.0, 0.5, 0.2], settings=settings)
    write_results(load_runs(runs), tmp_path / "r.csv")
    assert [(row["run"], row["state"], row["epoch"]) for row in table(tmp_path / "r.csv")] == [
        ("diverged", "diverged", ""),
        ("failed", "failed", ""),
        ("killed", "running", ""),
        *(("second-try", "done", str(epoch)) for epoch in (1, 2, 3)),
    ]
    read = read_results([tmp_path / "r.csv"])
    assert [run.path for run in read.runs] == ["diverged", "second-try"]
    assert [run.path for run in read.unfinished] == ["failed", "killed"]


def test_numbers_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    add_run(tmp_path / "runs" / "a", [1.0, math.nan, math.inf], state="diverged")
    write_results(load_runs(tmp_path / "runs"), tmp_path / "r.csv")
    assert [row["train_loss"] for row in table(tmp_path / "r.csv")] == ["1.0", "nan", "inf"]
    (run,) = read_results([tmp_path / "r.csv"]).runs
    assert [str(row["train_loss"]) for row in run.rows] == ["1.0", "nan", "inf"]


def test_a_value_that_no_column_can_hold_is_named_and_the_run_left_out(tmp_path: Path) -> None:
    add_run(tmp_path / "runs" / "a", [1.0, 0.5])
    add_run(tmp_path / "runs" / "b", [1.0, 0.5], settings={"lr": "auto"})
    lines: list[str] = []
    assert write_results(load_runs(tmp_path / "runs"), tmp_path / "r.csv", report=lines.append) == 2
    (line,) = lines
    assert line.startswith("left out b: the column lr cannot hold 'auto'")
    assert [run.path for run in read_results([tmp_path / "r.csv"]).runs] == ["a"]


def test_of_two_files_with_the_same_run_the_newest_counts(tmp_path: Path, results: Path) -> None:
    add_curve(
        tmp_path / "again", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 3, AFAD, began="2027-01-01T00:00:00Z"
    )
    write_results(load_runs(tmp_path / "again"), tmp_path / "again.csv")
    loaded = read_results([results, tmp_path / "again.csv"])
    assert len(loaded.runs) == 2
    assert len(loaded.omitted) == 1
    assert "repeated later" in loaded.omitted[0]


def replaced(column: str, old: str, new: str) -> Callable[[str], str]:
    """Return what changes the second row's cell of a column."""

    def change(text: str) -> str:
        lines = text.splitlines()
        cells = lines[2].split(",")
        place = RESULT_COLUMNS.index(column)
        assert old in cells[place]
        cells[place] = new
        return "\n".join([*lines[:2], ",".join(cells), *lines[3:]]) + "\n"

    return change


def without(column: str) -> Callable[[str], str]:
    place = RESULT_COLUMNS.index(column)

    def change(text: str) -> str:
        rows = [line.split(",") for line in text.splitlines()]
        return "".join(",".join(row[:place] + row[place + 1 :]) + "\n" for row in rows)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("train_loss"), "it lacks train_loss"),
        (
            lambda text: text.replace("train_loss", "loss", 1),
            "it lacks train_loss; it has 'loss', unknown here",
        ),
        (lambda text: text.replace("epoch,step", "step,epoch", 1), "another order, or doubled"),
        (lambda text: "", "it lacks experiment"),
        (lambda text: text[:-5], "is cut in mid-line"),
        (lambda text: text + "1,2\n", "line 8: 2 cells, expected"),
        (replaced("epoch", "2", "two"), "line 3, column epoch: "),
        (replaced("train_loss", "0.", "low"), "line 3, column train_loss: "),
        (replaced("train_s", ".", "-1.0"), "line 3, column train_s: -1.0 is below zero"),
        (replaced("train_s", ".", "nan"), "line 3, column train_s: nan is not a finite number"),
        (replaced("state", "done", "finished"), "column state: 'finished' is not one of running, done"),
        (replaced("seed", "0", "7"), "line 3: seed changes within the run"),
        (replaced("epoch", "2", "1"), "it has an epoch twice"),
        (replaced("run", "seed", ""), "line 3: the column run is empty"),
        (
            lambda text: text.replace("synthetic,years", ",years"),
            "does not say whether its data is real or synthetic",
        ),
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "ends at epoch 2 of 3"),
    ],
)
def test_a_file_that_is_not_of_the_schema_is_refused_in_one_sentence(
    results: Path, change: Callable[[str], str], message: str
) -> None:
    """Wrong or missing columns, cut in mid-line, cells that cannot be."""
    results.write_text(change(results.read_text()))
    with pytest.raises(InputError) as raised:
        read_results([results])
    assert message in str(raised.value)
    assert str(results) in str(raised.value)


def test_a_run_in_two_pieces_is_refused(results: Path) -> None:
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join([*lines, lines[3]]))
    with pytest.raises(InputError, match="a run's rows stand together"):
        read_results([results])


def test_the_commands_export_check_and_draw(tmp_path: Path, repository: Path, results: Path) -> None:
    out = tmp_path / "new" / "mine.csv"
    done = script(repository, "export_results", "--runs", str(tmp_path / "runs"), "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{out}: 6 rows, 2 runs: 2 of fig1/afad_sgd_bn\n"
    assert out.read_bytes() == results.read_bytes()
    done = script(repository, "export_results", "--check", str(out), str(results))
    assert done.stdout.splitlines() == [f"{path}: 2 runs: 2 of fig1/afad_sgd_bn" for path in (out, results)]
    done = script(repository, "make_figures", "--results", str(out), "--out", str(tmp_path / "figures"))
    assert done.returncode == 0, done.stderr
    stems = ("fig1a", "fig1b", "paper")
    expected = [
        tmp_path / "figures" / f"{stem}-synthetic-laptop.{end}" for stem in stems for end in ("pdf", "png")
    ]
    assert done.stdout.splitlines() == [str(path) for path in expected]
    done = script(repository, "make_figures", "--results", str(out), "--claims")
    assert "[not measured] On AFAD-LITE GGN is ahead of both SGD baselines per epoch" in done.stdout


def test_bad_input_of_the_commands_is_one_line(tmp_path: Path, repository: Path, results: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    results.write_text(results.read_text()[:-5])
    add_run(tmp_path / "plain" / "a", [1.0, 0.5])
    cases = [
        (
            "export_results",
            ("--runs", str(tmp_path / "empty"), "--out", str(tmp_path / "x.csv")),
            "make demo",
        ),
        (
            "export_results",
            ("--runs", str(tmp_path / "runs"), "--out", "/proc/x.csv"),
            "cannot write /proc/x.csv",
        ),
        (
            "export_results",
            ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "file" / "x")),
            "cannot make",
        ),
        ("export_results", ("--check", str(results)), "cut in mid-line"),
        ("make_figures", ("--results", str(results)), "cut in mid-line"),
        ("make_figures", ("--results", str(tmp_path / "missing.csv")), "there is no results file"),
        ("make_figures", ("--runs", str(tmp_path / "plain"), "--claims"), "make paper"),
    ]
    for name, arguments, message in cases:
        done = script(repository, name, *arguments)
        assert done.returncode == 2, arguments
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ")
        assert message in done.stderr
    assert not (tmp_path / "x.csv").exists()


def test_an_unreadable_record_does_not_stop_an_export(tmp_path: Path, repository: Path) -> None:
    add_run(tmp_path / "runs" / "a", [1.0, 0.5])
    broken = add_run(tmp_path / "runs" / "b", [1.0, 0.5], seed=1)
    RunFolder(broken.path).run_json.write_text("{")
    done = script(
        repository, "export_results", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "r.csv")
    )
    assert done.returncode == 0
    assert done.stderr.startswith("left out b: ")
    assert [row["run"] for row in table(tmp_path / "r.csv")] == ["a", "a"]


def test_what_is_published_is_in_order_and_described(repository: Path) -> None:
    """Every results file of the repository passes the check; the page names every column."""
    folder = repository / "outputs" / "results"
    files = [path for path in sorted(folder.glob("*.csv")) if path.read_text().startswith("experiment,")]
    assert files
    assert read_results(files).runs
    page = (folder / "README.md").read_text()
    described = set(re.findall(r"`(\w+)`", page))
    assert set(RESULT_COLUMNS) <= described
