"""The step benchmark as a command line."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import step

REPOSITORY = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "benchmarks" / "step.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run_here(*arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    try:
        return step.main(list(arguments))
    except SystemExit as end:  # argparse's own
        return int(end.code or 0)


def test_smoke(tmp_path: Path) -> None:
    """Every part at a tiny scale: paths that are installed, one that may not be, breakdown, memory, CSV."""
    file = tmp_path / "new" / "step.csv"
    words = ("--smoke", "--shapes", "resnet8:4x8", "--paths", "ours", "vmap", "opacus")
    done = bench(*words, "--breakdown", "--convolutions", "--csv", str(file))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= max(100, len(f"written: {file}"))
    for text in (
        "OMP_WAIT_POLICY=",
        "torch ",
        "1 threads",
        "alpha 0.3 in the mean convention",
        "least ratio by operation",
    ):
        assert text in done.stdout
    for part in ("forward", "backward", "blocks", "gram", "solve", "update", "other", "step"):
        assert any(line.startswith(f"{part} ") for line in done.stdout.splitlines()), part
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    by_path = {row["path"]: row for row in rows}
    assert set(by_path) == {"sgd", "ours", "vmap", "opacus"}
    for row in rows:
        if not row["step_s"]:
            assert row["note"] == "not installed: pip install 'gramgn[bench]'", row
            continue
        assert float(row["step_least_s"]) <= float(row["step_s"]) <= float(row["step_most_s"])
        assert float(row["peak_mib"]) >= 0
        if not row["path"].startswith("sgd"):
            assert 0 < float(row["error"]) < 1e-3, row
    assert float(by_path["sgd"]["ratio"]) == 1
    assert by_path["ours"]["step_s"]
    assert by_path["vmap"]["step_s"]


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("--smoke", "--sweep", "--batches", "2", "4", "--rounds", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line for line in lines if line.startswith("b ")]
    titles = ["b", "SGD ms", "per sample", "ours ms", "per sample", "ours / SGD", "b^2 m share of ours"]
    assert re.split(r"  +", head) == titles
    rows = lines[lines.index(head) + 2 :]
    assert [line.split()[0] for line in rows if line[:1].isdigit()] == ["2", "4"]
    assert any(line.startswith("ours: t(b) = ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "resnet:128"), "error: shape 'resnet:128': write resnet[depth]:<batch>x<pixels>"),
        (("--shapes", "resnet9:4x8"), "error: shape 'resnet9:4x8': the depth of a ResNet is 6 n + 2"),
        (
            ("--paths", "opacsu"),
            "error: there is no path 'opacsu' (did you mean 'opacus'?); there are: sgd, ",
        ),
        (("--rounds", "0"), "'0' must be a whole number of at least 1"),
        (("--csv", "."), "error: --csv . is a folder; give the name of a file"),
    ],
)
def test_bad_input_is_one_message_before_any_work(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(*arguments) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_report_of_a_card_is_rejected_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    (line,) = [line for line in makefile.splitlines() if "--device cuda" in line]
    before = set((REPOSITORY / "outputs" / "results").glob("*"))
    assert run_here(*line.split("step.py")[1].split()) == 2
    said = capsys.readouterr()
    assert said.err == "error: there is no CUDA device on this machine; use --device cpu (make bench)\n"
    assert said.out == ""
    assert set((REPOSITORY / "outputs" / "results").glob("*")) == before
