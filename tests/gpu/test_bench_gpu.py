"""The step benchmark on a CUDA device; skipped without one."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    PARTS,
    PATHS,
    Settings,
    Shape,
    make_problem,
    measure,
    ours,
    parameters_of,
    profile_step,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SHAPE = Shape.parse("resnet8:16x32")


def test_a_captured_sgd_step_is_the_eager_one() -> None:
    problem = make_problem(SHAPE, torch.device("cuda"))
    eager, captured = (PATHS[name].build(problem, 1.0, "channels last") for name in ("sgd", "sgd-graph"))
    for _ in range(3):  # what capturing has taken to warm up
        eager.step()
    for _ in range(2):
        eager.step()
        captured.step()
    start = dict(problem.model.named_parameters())
    for name, param in parameters_of(eager.model).items():
        moved = param - start[name]
        other = parameters_of(captured.model)[name] - start[name]
        assert float((moved - other).norm()) <= 1e-2 * float(moved.norm()) + 1e-6, name


def test_time_memory_and_accuracy_of_every_path() -> None:
    settings = Settings(torch.device("cuda"), torch.get_num_threads(), rounds=2)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    result = measure(SHAPE, [PATHS[name] for name in ("sgd", "sgd-graph", "ours", "vmap")], settings, print)
    for row in result.rows:
        assert row.step_s is not None
        assert row.step_s.median > 0
        assert row.peak_mib is not None
        assert row.peak_mib > 0
        assert row.path.sgd or (row.error is not None and row.error < 1e-3)


def test_the_parts_are_kernels_of_the_step() -> None:
    device = torch.device("cuda")
    prepared = ours(make_problem(SHAPE, device), 2.0**-10, "")
    prepared.step()
    split = profile_step(prepared.step, device)
    assert all(split.parts[part] > 0 for part in PARTS), split
    assert sum(split.parts.values()) <= split.step_s


def test_the_report_names_the_card(tmp_path: Path, repository: Path) -> None:
    file = tmp_path / "report.csv"
    command = [
        sys.executable,
        "benchmarks/step.py",
        "--device",
        "cuda",
        "--smoke",
        "--breakdown",
        "--csv",
        str(file),
    ]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    with file.open(newline="") as lines:
        assert {row["device"] for row in csv.DictReader(lines)} == {torch.cuda.get_device_name()}
