"""Figures and tables from run folders, by the command line and in memory."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from figure_runs import add_run
from matplotlib.figure import Figure

from gramgn.figures import load_runs, make_figures, summary_table
from gramgn.figures._draw import ERRORS, LOSSES, draw
from gramgn.figures._group import Comparison, compare
from gramgn.figures._style import house_style


def command(repository: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "scripts" / "make_figures.py"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def only_comparison(root: Path) -> Comparison:
    loaded = load_runs(root)
    assert loaded.omitted == ()
    (comparison,) = compare(loaded.runs)
    return comparison


def drawn(root: Path, columns: Sequence[str] = LOSSES) -> Figure:
    with house_style():
        figure = draw(only_comparison(root), columns)
    assert figure is not None
    return figure


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_nothing_to_draw_is_one_line_with_the_command_that_makes_data(
    tmp_path: Path, repository: Path
) -> None:
    """F01: no runs at all: exit code 2, one line, no empty figure."""
    for arguments in ((), ("--table",)):
        done = command(repository, "--runs", str(tmp_path), "--out", str(tmp_path / "out"), *arguments)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "make demo" in done.stderr
        assert "python train.py" in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_finished_is_drawn_and_the_rest_is_named(tmp_path: Path, repository: Path) -> None:
    """F01: killed, failed, no CSV, cut in mid-line, short by whole lines, damaged: named; exit code 0."""
    runs = tmp_path / "runs"
    add_run(runs / "good", [1.0, 0.5])
    add_run(runs / "killed", [1.0], state="running")
    add_run(runs / "failed", [1.0], state="failed", error={"type": "E", "message": "disk full\nmore"})
    add_run(runs / "no-csv", [1.0], seed=1).metrics_csv.unlink()
    torn = add_run(runs / "torn", [1.0, 0.5], seed=2).metrics_csv
    torn.write_bytes(torn.read_bytes()[:-3])
    short = add_run(runs / "short", [1.0, 0.5], seed=3)
    short.truncate_metrics(1)
    add_run(runs / "broken", [1.0]).run_json.write_text("{")
    done = command(repository, "--runs", str(runs), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    expected = {
        "killed": "still running, or killed",
        "failed": "disk full",
        "no-csv": "metrics.csv is missing",
        "torn": "cut in mid-line",
        "short": "ends at epoch 1 of 2",
        "broken": "damaged",
    }
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected)
    for name, reason in expected.items():
        assert any(line.startswith(f"left out {name}: ") and reason in line for line in lines), name
    stems = ("error-rsna-32-laptop", "loss-rsna-32-laptop")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted(["inputs.json", *(f"{stem}.{end}" for stem in stems for end in ("pdf", "png"))])


def test_two_builds_are_equal_byte_for_byte(tmp_path: Path, repository: Path) -> None:
    """F03, F02, F06: also later, with a display and a backend set, and a matplotlibrc of the user's."""
    runs = tmp_path / "runs"
    for seed in (0, 1, 2):
        add_run(runs / f"g{seed}", [1.0, 0.5 + 0.1 * seed, 0.25], seed=seed)
    add_run(runs / "d", [1.0, 1e9, math.inf], optimizer="sgd", state="diverged")
    rc = tmp_path / "rc"
    rc.mkdir()
    (rc / "matplotlibrc").write_text("text.usetex: True\nfont.family: NoSuchFont\nbackend: TkAgg\n")
    first = command(repository, "--runs", str(runs), "--out", str(tmp_path / "a"))
    time.sleep(1.1)
    environment = {"DISPLAY": ":99", "MPLBACKEND": "TkAgg", "MPLCONFIGDIR": str(rc), "TZ": "Asia/Tokyo"}
    second = command(repository, "--runs", str(runs), "--out", str(tmp_path / "b"), **environment)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        assert "findfont" not in done.stderr
    assert len(hashes(tmp_path / "a")) == 5
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_only_bundled_fonts_and_no_date_are_in_the_pdf(tmp_path: Path) -> None:
    """F06, F03: DejaVu, which comes with matplotlib, as TrueType; no creation date, no version."""
    add_run(tmp_path / "runs" / "x", [1.0, 0.5])
    pdfs = [
        path for path in make_figures(load_runs(tmp_path / "runs"), tmp_path / "out") if path.suffix == ".pdf"
    ]
    for path in pdfs:
        content = path.read_bytes()
        assert set(re.findall(rb"/BaseFont /(?:[A-Z]{6}\+)?([\w-]+)", content)) == {b"DejaVuSans"}
        assert b"/Subtype /Type3" not in content
        assert b"CreationDate" not in content
        assert b"matplotlib" not in content.lower()


def test_figures_need_no_network_and_no_training_stack(tmp_path: Path, repository: Path) -> None:
    """F09: drawn from our own files with every socket refused; torch, hydra and wandb are not imported."""
    add_run(tmp_path / "runs" / "x", [1.0, 0.5])
    code = (
        "import socket, sys, pathlib\n"
        "def refuse(*_, **__): raise OSError('network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from gramgn.figures import load_runs, make_figures\n"
        "runs, out = map(pathlib.Path, sys.argv[1:])\n"
        "print(len(make_figures(load_runs(runs), out)))\n"
        "print([name for name in ('torch', 'hydra', 'omegaconf', 'wandb') if name in sys.modules])\n"
    )
    arguments = [str(tmp_path / "runs"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["4", "[]"], done.stderr


def test_a_file_that_cannot_be_written_is_one_message(tmp_path: Path, repository: Path) -> None:
    add_run(tmp_path / "runs" / "x", [1.0, 0.5])
    (tmp_path / "file").write_text("mine")
    done = command(repository, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot make the folder")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_panels_show_losses_against_time_and_epoch(tmp_path: Path) -> None:
    add_run(tmp_path / "x", [1.0, 0.5, 0.25], seconds=3.0)
    axes = drawn(tmp_path).axes
    first = [axis.get_lines()[0].get_xydata().tolist() for axis in axes]
    assert first[0] == [[3.0, 1.0], [6.0, 0.5], [9.0, 0.25]]
    assert first[1] == [[1.0, 1.0], [2.0, 0.5], [3.0, 0.25]]
    assert first[2] == [[3.0, 2.0], [6.0, 1.0], [9.0, 0.5]]
    assert first[3] == [[1.0, 2.0], [2.0, 1.0], [3.0, 0.5]]
    assert {axis.get_yscale() for axis in axes} == {"log"}
    assert [axis.get_xlabel() for axis in axes[2:]] == ["training time (s)", "epoch"]
    assert [axis.get_ylabel() for axis in axes[::2]] == [
        "training loss (MSE, standardised)",
        "test loss (MSE, standardised)",
    ]


def test_errors_carry_the_unit_of_the_data(tmp_path: Path) -> None:
    """T09: the axis of an absolute error names months, years or degrees."""
    add_run(tmp_path / "x", [1.0, 0.5])
    labels = [axis.get_ylabel() for axis in drawn(tmp_path, ERRORS).axes[::2]]
    assert labels == ["training error (mean absolute, months)", "test error (mean absolute, months)"]


def test_synthetic_data_are_called_synthetic(tmp_path: Path) -> None:
    add_run(tmp_path / "x", [1.0, 0.5], dataset={"kind": "synthetic"})
    figure = drawn(tmp_path)
    assert figure.get_suptitle() == "rsna, SYNTHETIC images, 32×32 pixels, 2,560 images, laptop scale"
    assert "SYNTHETIC" in summary_table(load_runs(tmp_path).runs)


def test_seeds_become_a_median_with_a_band(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.5, 0.1, 0.2)):
        add_run(tmp_path / f"{seed}", [1.0, loss], seed=seed, seconds=1.0 + seed)
    figure = drawn(tmp_path)
    assert legend_texts(figure) == ["GGN on ResNetFixup (3 seeds)"]
    axes = figure.axes[0]
    assert axes.get_lines()[0].get_xydata().tolist() == [[2.0, 1.0], [4.0, 0.2]]
    (band,) = axes.collections
    assert (band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()) == (0.1, 1.0)


def test_other_settings_are_other_curves_and_say_in_what_they_differ(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 0.5], settings={"alpha": 0.3})
    add_run(tmp_path / "b", [1.0, 0.4], settings={"alpha": 1.0})
    add_run(tmp_path / "c", [1.0, 0.3], optimizer="sgd")
    figure = drawn(tmp_path)
    labels = ["GGN on ResNetFixup, alpha 0.3", "GGN on ResNetFixup, alpha 1", "SGD on ResNetFixup"]
    assert legend_texts(figure) == labels
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[1].get_lines()[:3]}
    assert len(styles) == 3


def test_what_cannot_be_compared_stands_in_figures_of_its_own(tmp_path: Path) -> None:
    """Other images under the same name, or times of another machine, are never drawn into one panel."""
    add_run(tmp_path / "runs" / "a", [1.0, 0.5])
    add_run(tmp_path / "runs" / "b", [1.0, 0.5], dataset={"manifest_sha256": "cd"})
    add_run(tmp_path / "runs" / "c", [1.0, 0.5], device={"kind": "cuda", "name": "Fast"})
    add_run(tmp_path / "runs" / "d", [1.0, 0.5], dataset={"name": "afad"})
    comparisons = compare(load_runs(tmp_path / "runs").runs)
    stems = sorted(comparison.stem for comparison in comparisons)
    assert len(set(stems)) == 4
    assert stems[0] == "afad-32-laptop"
    assert all(re.fullmatch(r"rsna-32-laptop-[0-9a-f]{6}", stem) for stem in stems[1:])


def test_a_repeated_run_is_drawn_once_the_newest(tmp_path: Path) -> None:
    add_run(tmp_path / "z-old", [1.0, 0.5], began="2026-01-01T00:00:00Z")
    add_run(tmp_path / "a-new", [1.0, 0.4], began="2026-01-02T00:00:00Z")
    loaded = load_runs(tmp_path)
    assert [run.path for run in loaded.runs] == ["a-new"]
    assert loaded.omitted == ("z-old: repeated later by a-new",)


def test_a_diverged_run_is_drawn_to_its_end_with_a_cross(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 0.5, 0.2])
    add_run(tmp_path / "b", [1.0, 2.0, math.inf], optimizer="sgd", state="diverged")
    add_run(tmp_path / "c", [1.0, 1e9, math.nan], optimizer="adamw", state="diverged")
    figure = drawn(tmp_path)
    assert legend_texts(figure) == [
        "AdamW on ResNetFixup (diverged in epoch 3)",
        "GGN on ResNetFixup",
        "SGD on ResNetFixup (diverged in epoch 3)",
    ]
    axes = figure.axes[1]
    adamw, sgd = (line.get_xydata()[0] for line in axes.get_lines() if line.get_marker() == "x")
    assert sgd.tolist() == [2.0, 2.0]
    # Its line leaves the panel between epochs 1 and 2: the cross stands on the upper edge.
    assert adamw[1] == axes.get_ylim()[1] == 30.0
    assert adamw[0] == pytest.approx(1.0 + math.log(30.0) / math.log(1e9))


def test_a_run_that_diverged_at_once_is_in_the_legend(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 0.5])
    add_run(tmp_path / "b", [math.nan], optimizer="sgd", state="diverged")
    assert legend_texts(drawn(tmp_path))[1] == "SGD on ResNetFixup (diverged in epoch 1)"


def test_a_diverged_seed_does_not_enter_the_median(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.2, 0.4)):
        add_run(tmp_path / f"{seed}", [1.0, loss], seed=seed)
    # It was to run as long as the others.
    late = add_run(tmp_path / "2", [1.0, 50.0], seed=2, state="diverged")
    late.truncate_metrics(1)
    figure = drawn(tmp_path)
    assert legend_texts(figure) == ["GGN on ResNetFixup (3 seeds, 1 diverged)"]
    assert figure.axes[1].get_lines()[0].get_ydata().tolist() == pytest.approx([1.0, 0.3])


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 1.25e-5], seconds=12345.678)
    add_run(
        tmp_path / "b", [1.0, 123456.789], seed=12, settings={"a_setting_with_a_long_name": "and value" * 9}
    )
    add_run(tmp_path / "c", [1.0, -math.inf], optimizer="sgd", state="diverged")
    add_run(tmp_path / "d", [1.0], dataset={"name": "n" * 99})
    table = summary_table(load_runs(tmp_path).runs)
    assert max(len(line) for line in table.splitlines()) <= 80
    (line,) = (line for line in table.splitlines() if line.startswith("SGD"))
    assert line.split() == ["SGD", "on", "ResNetFixup", "0", "2", *["-inf"] * 4, "2", "diverged"]
    (line,) = (line for line in table.splitlines() if line.split()[:2] == ["12", "2"])
    assert line.split() == ["12", "2", "1.2e+05", "3.7e+05", "2.5e+05", "1e+06", "2"]
    assert "MAE: test, in months" in table


def test_damaged_records_are_named_and_not_drawn(tmp_path: Path) -> None:
    """F01: above all no synthetic data without the word; and no epoch twice, no time below zero."""
    add_run(tmp_path / "good", [0.5, 0.4])
    add_run(tmp_path / "unnamed", [0.5, 0.4], dataset={"kind": None})
    twice = add_run(tmp_path / "twice", [0.5, 0.4])
    lines = twice.metrics_csv.read_text().splitlines(keepends=True)
    twice.metrics_csv.write_text("".join([*lines[:2], *lines[1:]]))
    add_run(tmp_path / "backwards", [0.5, 0.4], seconds=-2.0)
    loaded = load_runs(tmp_path)
    assert [run.path for run in loaded.runs] == ["good"]
    assert len(loaded.omitted) == 3
    assert "real or synthetic" in loaded.omitted[2]
