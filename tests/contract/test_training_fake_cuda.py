"""Training and the step benchmark on a fake CUDA device: where tensors lie, and that every line runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, MEMORY, FakeCuda, fake_cuda

from benchmarks import PATHS, step
from gramgn.models import ResNetFixup
from gramgn.optim import GramGaussNewton
from gramgn.training import PeakMemory, Stepper, TensorData, choose_device, rng_state, set_rng_state


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """Provide the fake device."""
    with fake_cuda() as mode:
        yield mode


@pytest.mark.usefixtures("cuda")
def test_the_device_is_chosen() -> None:
    assert choose_device("auto") == torch.device("cuda")
    with pytest.raises(ValueError, match="cuda:1"):
        choose_device("cuda:1")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("free", [MEMORY, 1024])
def test_images_lie_on_the_device_where_they_fit_and_batches_in_any_case(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, MEMORY))
    data = TensorData(
        np.zeros((12, 1, 8, 8), dtype=np.uint8),
        np.arange(12.0),
        np.resize(["train", "train", "val", "test"], 12),
        channels=3,
        device=CUDA,
        dtype=torch.float32,
        standardize_targets=True,
    )
    inputs, targets = data.batch("train", torch.arange(2))
    assert inputs.device == targets.device == CUDA


@pytest.mark.usefixtures("cuda")
def test_steps_of_both_kinds() -> None:
    model = ResNetFixup(8, width=4, zero_last_layer=False).to(CUDA)
    inputs, targets = torch.randn(4, 3, 8, 8).to(CUDA), torch.randn(4).to(CUDA)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.01),
        GramGaussNewton(model, lam=1.0, alpha=0.3),
    ):
        assert Stepper(model, optimizer)(inputs, targets).finite
    assert PeakMemory(CUDA).mib() == MEMORY / 2**21
    set_rng_state(rng_state())


@pytest.mark.usefixtures("cuda")
def test_the_report_of_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are no fake tensors for SGD's fused update.
    monkeypatch.setitem(PATHS, "sgd", replace(PATHS["sgd"], variants=PATHS["ours"].variants))
    file = tmp_path / "report.csv"
    words = ["--device", "cuda", "--smoke", "--shapes", "resnet8:2x8", "--rounds", "1", "--csv", str(file)]
    assert step.main([*words, "--paths", "ours"]) == 0
    assert capsys.readouterr().out.startswith("Fake card, CUDA ")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["path"] for row in rows] == ["sgd", "ours"]
    assert {row["device"] for row in rows} == {"Fake card"}
    assert {row["kernels"] for row in rows} == {""}
    assert all(float(row["peak_mib"]) >= 0 for row in rows)
    assert all(float(row["error"]) < 1e-3 for row in rows[1:])
