"""When figures are drawn again, and when not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figure_runs import add_cell, add_curve, dataset_of
from figure_views import silent

from gramgn.figures import (
    load_runs,
    make_figures,
)
from gramgn.records import RunFolder

AFAD = dataset_of("afad", "synthetic", "years")


def edit(folder: Path, **changes: Any) -> None:
    RunFolder(folder).update_run(**changes)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a folder of runs that give figures 1a and 1b, the grid, and the page."""
    add_curve(tmp_path / "runs", "fig1/afad_sgd_bn", "sgd", "resnet_bn", 0, 2, AFAD)
    add_cell(tmp_path / "runs" / "cell", lam=1.0)
    return tmp_path / "runs"


def draw(runs: Path, out: Path, report: Callable[[str], None] = silent, **how: Any) -> list[str]:
    return sorted(path.name for path in make_figures(load_runs(runs), out, report=report, **how))


def test_only_what_changed_is_drawn_again(tmp_path: Path, small: Path) -> None:
    out = tmp_path / "out"
    stems = [f"{key}-synthetic-laptop" for key in ("fig1a", "fig1b", "fig2c", "paper")]
    everything = [f"{stem}.{extension}" for stem in stems for extension in ("pdf", "png")]
    assert draw(small, out) == everything
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    lines: list[str] = []
    assert draw(small, out, report=lines.append) == []
    assert lines == [f"8 files in {out} are up to date"]
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    add_cell(small / "second", lam=2.0)
    assert draw(small, out) == [name for name in everything if name.startswith(("fig2c", "paper"))]
    # What is not drawn (where it lies, who mirrors it) changes nothing.
    edit(small / "second", wandb={"id": "x"}, time={"wall_s": 3.0})
    assert draw(small, out) == []
    (out / "fig1a-synthetic-laptop.png").write_bytes(b"spoiled")
    (out / "fig1b-synthetic-laptop.pdf").unlink()
    assert draw(small, out) == [name for name in everything if name.startswith(("fig1a", "fig1b"))]
    assert (out / "fig1a-synthetic-laptop.png").read_bytes() == before["fig1a-synthetic-laptop.png"][0]


def test_a_damaged_note_of_inputs_and_force_draw_everything_to_the_same_bytes(
    tmp_path: Path, small: Path
) -> None:
    """F03."""
    out = tmp_path / "out"
    everything = draw(small, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert draw(small, out, force=True) == everything
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for damaged in ("{", '{"figures": {"fig1a-synthetic-laptop": 3}}'):
        (out / "inputs.json").write_text(damaged)
        assert draw(small, out) == everything
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_another_look_means_drawing_again(tmp_path: Path, small: Path) -> None:
    """What the drawing code or matplotlib's version was belongs to a figure's inputs."""
    out = tmp_path / "out"
    everything = draw(small, out)
    kept = json.loads((out / "inputs.json").read_text())
    for entry in kept["figures"].values():
        entry["code"] = "of another version"
    (out / "inputs.json").write_text(json.dumps(kept))
    assert draw(small, out) == everything


def test_a_sweep_that_was_moved_is_drawn_as_before(tmp_path: Path, small: Path) -> None:
    """Runs are known by what their records say; nothing is drawn again because a folder has another name."""
    out = tmp_path / "out"
    draw(small, out)
    shutil.move(small, tmp_path / "elsewhere" / "deeper")
    lines: list[str] = []
    assert draw(tmp_path / "elsewhere", out, report=lines.append) == []
    assert lines == [f"8 files in {out} are up to date"]


def test_a_folder_that_cannot_be_written_is_one_message(
    tmp_path: Path, small: Path, repository: Path
) -> None:
    """A read-only output folder; /proc refuses even root."""
    command = [
        sys.executable,
        str(repository / "scripts" / "make_figures.py"),
        "--runs",
        str(small),
        "--out",
        "/proc",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: cannot write into /proc: ")
    assert line.endswith("choose another with --out")
