"""scripts/show.py: any run, in plain characters, in at most 80 columns, without torch."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from house import SMALL, House, read_run
from trained_runs import copy_of, tool, train

from gramgn.app.tools._chart import chart
from gramgn.records import RunFolder


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("tools") / "house")


@pytest.fixture(scope="module")
def run(house: House) -> Path:
    return train(house, *SMALL, "trainer.epochs=3", "name=first try")


def shown(house: House, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert tool(house, "show", f"run={folder}") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.isascii()
    return text


def changed(run: Path, name: str, **entries: Any) -> Path:
    folder = copy_of(run, name)
    (folder / "run.json").write_text(json.dumps(read_run(folder) | entries))
    return folder


def rewritten(run: Path, name: str, losses: list[float]) -> Path:
    """Return a copy of a run with as many epochs as there are losses."""
    folder = copy_of(run, name)
    (folder / "metrics.csv").unlink()
    records = RunFolder(folder)
    for epoch, loss in enumerate(losses, 1):
        records.append_metrics(
            {"epoch": epoch, "step": epoch, "train_loss": loss, "val_loss": loss * 2, "train_s": 1}
        )
    return folder


def test_a_finished_run(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git = {"commit": "0123456789abcdef", "dirty": True, "diff_sha256": None}
    text = shown(house, changed(run, "finished", git=git), capsys)
    record = read_run(run)
    for words in (
        "done, 3 of 3 epochs",
        "name       first try",
        "blobs [SYNTHETIC",
        "pixels",
        "optimizer  ggn: lr 1, lam 1",
        f"alpha_sum {record['optimizer']['alpha_sum']:.4g}",
        f"best       epoch {record['best']['epoch']}: val_loss {record['best']['val_loss']:.4g}",
        "git 0123456789ab with uncommitted changes",
        "torch 2",
        "* train_loss   o val_loss",
    ):
        assert words in text
    # An option that is longer than a line is wrapped, not cut.
    assert "trainer=debug" in " ".join(text.split())
    table = [
        line.split() for line in text.splitlines() if line[:5].strip() in ("1", "2", "3") and "|" not in line
    ]
    assert [row[0] for row in table] == ["1", "2", "3"]


def test_no_torch_and_a_pipe(house: House, run: Path) -> None:
    """Start-up: showing loads neither torch nor Pillow nor wandb, and writes nothing; a closed pipe is no error."""
    before = house.files()
    code = (
        f"import sys, runpy; sys.argv = ['show.py', 'run={run}']\n"
        "try:\n    runpy.run_path('scripts/show.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert not {'torch', 'PIL', 'wandb', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    done = house.script("-c", code)
    assert done.returncode == 0, done.stderr
    piped = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"'{sys.executable}' scripts/show.py 'run={run}' | head -1"],
        cwd=house.root,
        env=house.environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (piped.returncode, piped.stderr) == (0, "")
    assert house.files() == before


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "running, 3 of 3 epochs; if no process is at it any more"),
        ("interrupted", "interrupted, 3 of 3 epochs; goes on with: python train.py resume="),
        ("failed", "error      MemoryError: no memory left"),
        ("diverged", "diverged, 3 of 3 epochs"),
    ],
)
def test_how_it_ended(
    house: House, run: Path, capsys: pytest.CaptureFixture[str], state: str, words: str
) -> None:
    error = {"type": "MemoryError", "message": "no memory left"} if state == "failed" else None
    text = " ".join(shown(house, changed(run, state, state=state, error=error), capsys).split())
    assert " ".join(words.split()) in text


def test_a_run_without_epochs(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed at once: run.json has next to nothing, metrics.csv is not there."""
    folder = copy_of(run, "at-once")
    (folder / "metrics.csv").unlink()
    shutil.rmtree(folder / "checkpoints")
    (folder / "run.json").write_text('{"format": 1, "state": "running"}')
    text = shown(house, folder, capsys)
    assert "no epoch was done" in text
    assert "running, 0 of ? epochs" in text


def test_many_epochs_and_long_names(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rewritten(run, "long-" + "x" * 120, [10 * 0.95**epoch for epoch in range(300)])
    text = shown(house, folder, capsys)
    assert "of 300 epochs" in text
    assert "(log axis)" in text
    table = [line.split()[0] for line in text.splitlines() if line[:5].strip().isdigit() and "|" not in line]
    assert len(table) <= 23
    assert "1" in table
    assert "300" in table


def test_a_line_cut_in_the_middle(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F01: a torn last line is said and left out; values that are no number are told, not drawn."""
    folder = rewritten(run, "torn", [1.0, math.nan, 0.5])
    with (folder / "metrics.csv").open("a") as file:
        file.write("4,4,1.")
    capsys.readouterr()
    assert tool(house, "show", f"run={folder}") == 0
    told = capsys.readouterr()
    assert "line 5 is torn" in told.err
    assert "nan" in told.out
    assert "done, 3 of 3 epochs" in told.out


def test_narrow_terminals(house: House, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for columns in (200, 60, 40, 10):
            patch.setenv("COLUMNS", str(columns))
            text = shown(house, run, capsys)
            assert max(map(len, text.splitlines())) <= min(80, max(columns, 40))
            assert "train_loss" in text


def test_a_chart_puts_values_where_they_belong() -> None:
    lines = chart({"up": [(1, 0.0), (2, 1.0), (3, 2.0)]}, width=20, height=3)
    assert lines[0].split() == ["*", "up"]
    plane = [line.split("|")[1] for line in lines[1:4]]
    assert [line.index("*") for line in plane] == [
        len(plane[0]) - 1,
        len(plane[0]) // 2 - 1 + len(plane[0]) % 2,
        0,
    ]
    assert lines[1].startswith("2 |")
    assert lines[3].startswith("0 |")
    # A logarithmic axis: 1 lies half-way between 0.1 and 10.
    lines = chart({"down": [(1, 10.0), (2, 1.0), (3, 0.1)]}, width=20, height=5)
    assert [place for place, line in enumerate(lines[1:6]) if "*" in line] == [0, 2, 4]
    assert chart({"none": [(1, math.nan)]}, width=20) == []
    assert len(chart({"one": [(1, 5.0)]}, width=20, height=3)) == 6
