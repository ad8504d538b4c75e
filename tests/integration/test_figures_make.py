"""Figures and tables of any runs, by the command line and in memory."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from figure_runs import add_curve, add_run, dataset_of
from figure_views import drawn, labels, listed, notes, script, shown, silent, texts, xy

from gramgn.figures import make_figures, summary_table
from gramgn.records import RESULT_COLUMNS, RunFolder, runs

AFAD = dataset_of("afad", "synthetic", "years")


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_two_builds_are_equal_byte_for_byte(tmp_path: Path, repository: Path) -> None:
    """F03, F02, F06: also with a display, a backend and a matplotlibrc of the user's; what is there is drawn again."""
    folder = tmp_path / "runs"
    for seed in (0, 1, 2):
        add_run(folder / f"g{seed}", [1.0, 0.5 + 0.1 * seed, 0.25], seed=seed)
    add_run(folder / "d", [1.0, 1e9, math.inf], optimizer="sgd", state="diverged")
    rc = tmp_path / "rc"
    rc.mkdir()
    (rc / "matplotlibrc").write_text("text.usetex: True\nfont.family: NoSuchFont\nbackend: TkAgg\n")
    environment = {"DISPLAY": ":99", "MPLBACKEND": "TkAgg", "MPLCONFIGDIR": str(rc), "TZ": "Asia/Tokyo"}
    arguments = ("--runs", folder, "--out", tmp_path / "b")
    make_figures(shown(folder), tmp_path / "a", report=silent)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "loss-rsna-32-laptop.png").write_bytes(b"spoiled")
    done = subprocess.run(
        [sys.executable, str(repository / "scripts" / "make_figures.py"), *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "findfont" not in done.stderr
    assert len(hashes(tmp_path / "a")) == 4
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    content = (tmp_path / "a" / "loss-rsna-32-laptop.pdf").read_bytes()
    # F06, F03: DejaVu, which comes with matplotlib, as TrueType; no creation date, no version.
    assert set(re.findall(rb"/BaseFont /(?:[A-Z]{6}\+)?([\w-]+)", content)) == {b"DejaVuSans"}
    assert b"/Subtype /Type3" not in content
    assert b"CreationDate" not in content
    assert b"matplotlib" not in content.lower()


def test_figures_need_no_network_and_no_training_stack(tmp_path: Path) -> None:
    """F09: drawn from our own files with every socket rejected; torch, hydra and wandb are not imported."""
    add_run(tmp_path / "runs" / "x", [1.0, 0.5])
    code = (
        "import socket, sys, pathlib\n"
        "def reject(*_, **__): raise OSError('network')\n"
        "socket.socket = socket.create_connection = socket.getaddrinfo = reject\n"
        "from gramgn.figures import make_figures, read_runs\n"
        "from gramgn.report import make_report\n"
        "folder, out = map(pathlib.Path, sys.argv[1:])\n"
        "print(len(make_figures(read_runs(folder), out)))\n"
        "make_report(folder, out=out / 'index.html', report=print)\n"
        "print([name for name in ('torch', 'hydra', 'omegaconf', 'wandb') if name in sys.modules])\n"
    )
    arguments = [str(tmp_path / "runs"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["4", "1 run, all finished", "[]"], done.stderr


def test_what_is_finished_is_drawn_and_the_rest_is_named(tmp_path: Path) -> None:
    """F01: killed, failed, no CSV, cut in mid-line, short by whole lines, damaged: named."""
    add_run(tmp_path / "good", [1.0, 0.5])
    add_run(tmp_path / "killed", [1.0], state="running")
    add_run(tmp_path / "failed", [1.0], state="failed", error={"type": "E", "message": "disk full\nmore"})
    add_run(tmp_path / "no-csv", [1.0], seed=1).metrics_csv.unlink()
    torn = add_run(tmp_path / "torn", [1.0, 0.5], seed=2).metrics_csv
    torn.write_bytes(torn.read_bytes()[:-3])
    add_run(tmp_path / "short", [1.0, 0.5], seed=3).truncate_metrics(1)
    add_run(tmp_path / "broken", [1.0]).run_json.write_text("{")
    expected = {
        "killed": "still running, or killed",
        "failed": "disk full",
        "no-csv": "its metrics have no epoch",
        "torn": "is damaged",
        "short": "end at epoch 1 of 2",
        "broken": "run.json",
    }
    lines = notes(tmp_path)
    for name, reason in expected.items():
        assert any(name in line and reason in line for line in lines), (name, lines)
    assert set(shown(tmp_path).finished.run) == {"good"}
    assert list(listed(tmp_path)) == ["loss-rsna-32-laptop", "error-rsna-32-laptop"]


def test_without_sources_the_papers_runs_below_outputs_are_drawn(tmp_path: Path) -> None:
    """Others are counted and drawn where their folder is named; a table shows all."""
    outputs = tmp_path / "outputs"
    add_run(outputs / "runs" / "mine", [1.0, 0.5])
    done = script("make_figures", outputs=outputs)
    assert done.returncode == 2
    assert "1 finished run (such as runs/mine) in no figure of the paper; name folders" in done.stderr
    add_curve(outputs / "sweeps", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 2, AFAD)
    done = script("make_figures", outputs=outputs)
    names = [Path(line).name for line in done.stdout.splitlines()]
    assert names == [
        f"{stem}-synthetic-laptop.{end}" for stem in ("fig1a", "fig1b", "paper") for end in ("pdf", "png")
    ]
    assert "1 finished run (such as runs/mine)" in done.stderr
    done = script("make_figures", "--table", outputs=outputs)
    assert "GGN on ResNetFixup" in done.stdout
    assert "SGD on ResNetBN" in done.stdout
    done = script("make_figures", "--claims", outputs=outputs)
    assert "[not measured] On AFAD-LITE GGN is ahead of both SGD baselines per epoch" in done.stdout


def test_the_commands_export_and_check(tmp_path: Path) -> None:
    for seed in (0, 1):
        add_curve(tmp_path / "runs", "fig1/afad_sgd_bn", "sgd", "resnet_bn", seed, 3, AFAD)
    failed = add_curve(tmp_path / "runs", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 2, 3, AFAD)
    failed.update_run(state="failed")
    broken = add_curve(tmp_path / "runs", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 3, 3, AFAD)
    RunFolder(broken.path).run_json.write_text("{")
    out = tmp_path / "new" / "mine.csv"
    done = script("export_results", "--runs", tmp_path / "runs", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}: 7 rows, 2 runs, 1 unfinished: 3 of fig1/afad_sgd_bn\n"
    assert len(done.stderr.splitlines()) == 2
    done = script("export_results", "--check", out)
    assert done.stdout == f"{out}: 2 runs, 1 unfinished: 3 of fig1/afad_sgd_bn\n"
    table = runs(out)
    assert list(table.run[table.state == "failed"]) == ["paper-laptop-fig1_afad_sgd_bn/seed=2"]
    assert table.train_loss[table.state == "failed"].isna().all()


def test_bad_input_of_the_commands_is_one_line(tmp_path: Path) -> None:
    """F01: exit code 2, one line that says what to do, no file touched."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "cut.csv").write_text("experiment,sweep")
    add_run(tmp_path / "plain" / "a", [1.0, 0.5])
    plain = ("--runs", tmp_path / "plain")
    cases = [
        ("export_results", ("--runs", tmp_path / "empty", "--out", tmp_path / "x.csv"), "`make demo`"),
        ("export_results", (*plain, "--out", tmp_path / "file" / "x"), "cannot create the folder"),
        ("make_figures", ("--runs", tmp_path / "empty"), "python train.py"),
        ("make_figures", (*plain, "--out", tmp_path / "file"), "cannot write into"),
        ("make_figures", (*plain, "--out", "/proc"), "choose another folder with --out"),
        ("make_figures", ("--results", tmp_path / "cut.csv"), "cut in mid-line"),
        ("make_figures", (*plain, "--claims"), "make paper"),
    ]
    for name, arguments, message in cases:
        done = script(name, *arguments)
        assert done.returncode == 2, arguments
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ")
        assert message in line
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "x.csv").exists()


def test_panels_show_losses_against_time_and_epoch(tmp_path: Path) -> None:
    add_run(tmp_path / "x", [1.0, 0.5, 0.25], seconds=3.0, dataset={"kind": "synthetic"})
    figure = drawn(tmp_path, "loss")
    assert [xy(axes) for axes in figure.axes] == [
        [[3.0, 1.0], [6.0, 0.5], [9.0, 0.25]],
        [[1.0, 1.0], [2.0, 0.5], [3.0, 0.25]],
        [[3.0, 2.0], [6.0, 1.0], [9.0, 0.5]],
        [[1.0, 2.0], [2.0, 1.0], [3.0, 0.5]],
    ]
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert [axes.get_xlabel() for axes in figure.axes[2:]] == ["training time (s)", "epoch"]
    names = [axes.get_ylabel() for axes in figure.axes[::2]]
    assert names == ["training loss (MSE, standardised)", "test loss (MSE, standardised)"]
    # T09: the axis of an absolute error names months, years or degrees.
    names = [axes.get_ylabel() for axes in drawn(tmp_path, "error").axes[::2]]
    assert names == ["training error (mean absolute, months)", "test error (mean absolute, months)"]
    assert figure.get_suptitle() == "rsna, SYNTHETIC images, 32×32 pixels, 2,560 images, laptop scale"
    assert "SYNTHETIC" in summary_table(shown(tmp_path).finished)


def test_seeds_become_a_median_with_a_band(tmp_path: Path) -> None:
    for seed, loss in enumerate((0.5, 0.1, 0.2)):
        add_run(tmp_path / f"{seed}", [1.0, loss], seed=seed, seconds=1.0 + seed)
    # A seed that diverged does not enter the median; it was to run as long as the others.
    add_run(tmp_path / "3", [1.0, 50.0], seed=3, state="diverged").truncate_metrics(1)
    figure = drawn(tmp_path, "loss")
    assert labels(figure) == ["GGN on ResNetFixup (4 seeds, 1 diverged)"]
    assert xy(figure.axes[0]) == [[2.0, 1.0], [4.0, 0.2]]
    (band,) = figure.axes[0].collections
    assert (band.get_paths()[0].vertices[:, 1].min(), band.get_paths()[0].vertices[:, 1].max()) == (0.1, 1.0)


def test_other_settings_are_other_curves_and_say_in_what_they_differ(tmp_path: Path) -> None:
    """By the name that a column or, where the run's folder is there, run.json has for the setting."""
    add_run(tmp_path / "a", [1.0, 0.5], settings={"alpha": 0.3})
    add_run(tmp_path / "b", [1.0, 0.4], settings={"alpha": 1.0})
    add_run(tmp_path / "c", [1.0, 0.3], optimizer="sgd")
    add_run(tmp_path / "d", [1.0, 0.2], optimizer="sgd", settings={"nesterov": True})
    figure = drawn(tmp_path, "loss")
    assert labels(figure) == [
        "GGN on ResNetFixup, alpha 0.3",
        "GGN on ResNetFixup, alpha 1",
        "SGD on ResNetFixup, nesterov True",
        "SGD on ResNetFixup, nesterov none",
    ]
    styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[1].get_lines()[:4]}
    assert len(styles) == 4


def test_of_many_curves_the_best_twelve_are_shown(tmp_path: Path) -> None:
    for number in range(14):
        add_run(tmp_path / f"{number}", [1.0, 1.0 + number], settings={"lr": float(number)})
    figure = drawn(tmp_path, "loss")
    assert labels(figure)[-1] == "GGN on ResNetFixup, lr 9"
    assert len(labels(figure)) == 12
    assert "the 12 curves of 14 that end with the least training loss" in texts(figure)


def test_what_cannot_be_compared_is_in_figures_of_its_own(tmp_path: Path) -> None:
    """Other images under the same name, or times of another machine, are never drawn into one panel."""
    add_run(tmp_path / "a", [1.0, 0.5])
    add_run(tmp_path / "b", [1.0, 0.5], dataset={"manifest_sha256": "cd"})
    add_run(tmp_path / "c", [1.0, 0.5], device={"kind": "cuda", "name": "Fast"})
    add_run(tmp_path / "d", [1.0, 0.5], dataset={"name": "afad"})
    stems = sorted(stem for stem in listed(tmp_path) if stem.startswith("loss"))
    assert stems[0] == "loss-afad-32-laptop"
    assert len(set(stems)) == 4
    assert all(re.fullmatch(r"loss-rsna-32-laptop-[0-9a-f]{6}", stem) for stem in stems[1:])


def test_a_diverged_run_is_drawn_to_its_end_with_a_cross(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 0.5, 0.2])
    add_run(tmp_path / "b", [1.0, 2.0, math.inf], optimizer="sgd", state="diverged")
    add_run(tmp_path / "c", [1.0, 1e9, math.nan], optimizer="adamw", state="diverged")
    add_run(tmp_path / "d", [math.nan], optimizer="muon", state="diverged")
    figure = drawn(tmp_path, "loss")
    assert labels(figure) == [
        "AdamW on ResNetFixup (diverged in epoch 3)",
        "GGN on ResNetFixup",
        "Muon on ResNetFixup (diverged in epoch 1)",
        "SGD on ResNetFixup (diverged in epoch 3)",
    ]
    axes = figure.axes[1]
    adamw, sgd = (line.get_xydata()[0] for line in axes.get_lines() if line.get_marker() == "x")
    assert sgd.tolist() == [2.0, 2.0]
    # Its line leaves the panel between epochs 1 and 2: the cross is on the upper edge.
    assert adamw[1] == axes.get_ylim()[1] == 30.0
    assert adamw[0] == pytest.approx(1.0 + math.log(30.0) / math.log(1e9))


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    add_run(tmp_path / "a", [1.0, 1.25e-5], seconds=12345.678)
    settings = {"a_setting_with_a_long_name": "and value" * 9}
    add_run(tmp_path / "b", [1.0, 123456.789], seed=12, settings=settings)
    add_run(tmp_path / "c", [1.0, -math.inf], optimizer="sgd", state="diverged")
    add_run(tmp_path / "d", [1.0], dataset={"name": "n" * 99})
    table = summary_table(shown(tmp_path).finished)
    assert max(len(line) for line in table.splitlines()) <= 80
    (line,) = (line for line in table.splitlines() if line.startswith("SGD"))
    assert line.split() == ["SGD", "on", "ResNetFixup", "0", "2", *["-inf"] * 4, "2", "diverged"]
    (line,) = (line for line in table.splitlines() if line.split()[:2] == ["12", "2"])
    assert line.split() == ["12", "2", "1.2e+05", "3.7e+05", "2.5e+05", "1e+06", "2"]
    assert "MAE: test, in months" in table


def test_what_is_published_is_described(repository: Path) -> None:
    """The page about the results files names every column."""
    page = (repository / "outputs" / "results" / "README.md").read_text()
    assert set(RESULT_COLUMNS) <= set(re.findall(r"`(\w+)`", page))
