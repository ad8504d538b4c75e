"""Memory format and optimizers on networks with kernels: recorded, and no network is excluded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from house import SMALL, Call, House, losses, read_rows, read_run

CONV = (*(entry for entry in SMALL if not entry.startswith("model")), "model=tiny")
DEEP = (*CONV, "model._target_=outside_formats.DeepNet")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)[
        "model"
    ]
    return state


def assert_same_run(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name


def test_the_format_changes_rounding_only(call: Call, house: House) -> None:
    options = (*DEEP, "optimizer=ggn", "trainer.dtype=float64")
    for channels_last in ("true", "false"):
        assert call(*options, f"trainer.channels_last={channels_last}") == 0
    on, off = house.runs()
    assert [read_run(folder)["precision"]["channels_last"] for folder in (on, off)] == [True, False]
    for one, other in zip(read_rows(on), read_rows(off), strict=True):
        assert float(one["test_loss"]) == pytest.approx(float(other["test_loss"]), rel=1e-8)


def test_a_checkpoint_of_one_format_starts_a_run_of_the_other(call: Call, house: House) -> None:
    assert call(*DEEP, "optimizer=sgd") == 0
    (first,) = house.runs()
    options = (*DEEP, "optimizer=sgd", "optimizer.lr=0.0", f"init_from={first}")
    assert call(*options, "trainer.channels_last=false") == 0
    second = house.runs()[-1]
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name])
    assert weights(second)["body.0.weight"].is_contiguous()


def test_a_network_that_needs_contiguous_images(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains as it would without the setting, and the run says so."""
    options = (*CONV, "model._target_=outside_formats.ViewNet", "optimizer=sgd")
    assert call(*options) == 0
    message = capsys.readouterr().err
    assert "note: ViewNet does not take channels-last images (view size is not compatible" in message
    assert call(*options, "trainer.channels_last=false") == 0
    assert "note:" not in capsys.readouterr().err
    tried, off = house.runs()
    assert read_run(tried)["precision"]["channels_last"] is False
    assert_same_run(tried, off)


def test_vectors_have_no_memory_format(call: Call, house: House) -> None:
    options = (*CONV, "model._target_=outside_formats.VectorNet", "dataset._target_=outside_formats.Vectors")
    assert call(*options, "optimizer=ggn") == 0
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "done"
    assert read_run(folder)["precision"]["channels_last"] is False


def test_muon_through_the_command_line(call: Call, house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """The lr recorded is that of the matrices; a network without a hidden matrix is rejected before any work."""
    assert call(*DEEP, "optimizer=muon", "optimizer.lr=0.003") == 0
    (folder,) = house.runs()
    assert read_run(folder)["optimizer"]["name"] == "muon"
    assert [row["lr"] for row in read_rows(folder)] == ["0.003", "0.003"]
    assert all(float(row["grad_norm"]) > 0 for row in read_rows(folder))
    before = house.files()
    assert call(*SMALL, "optimizer=muon") == 2
    message = capsys.readouterr().err
    assert "Muon has nothing to do" in message
    assert "optimizer=adamw" in message
    assert call(*DEEP, "optimizer=muon", "optimizer.first_and_last=sgd") == 2
    assert "optimizer.first_and_last='sgd' must be adamw or muon" in capsys.readouterr().err
    assert call(*DEEP, "optimizer=muon", "optimizer.adamw_betas=[0.9]") == 2
    assert "optimizer (gramgn.training.muon_with_adamw)" in capsys.readouterr().err
    assert house.files() == before
    assert call(*SMALL, "optimizer=muon", "optimizer.first_and_last=muon") == 0


@pytest.mark.parametrize("optimizer", ["sgd", "ggn"])
@pytest.mark.parametrize("outputs", ["flat", "all frozen"])
def test_what_a_network_froze_stays_frozen(
    call: Call, house: House, capsys: pytest.CaptureFixture[str], optimizer: str, outputs: str
) -> None:
    """Neither the shape probe nor the loop nor an evaluation switches frozen modules to training mode."""
    options = (
        *CONV,
        "model._target_=outside_formats.FrozenNet",
        f"optimizer={optimizer}",
        "trainer.order=cyclic",
    )
    small_steps = "optimizer.lr=0.0" if optimizer == "sgd" else "optimizer.alpha=1e12"
    assert call(*options, f"model.outputs='{outputs}'", small_steps, "trainer.eval_train=true") == 0
    (folder,) = house.runs()
    for row in read_rows(folder):  # the same network in training and in evaluation
        assert float(row["train_loss"]) == pytest.approx(float(row["train_eval_loss"]), rel=1e-4)
    assert torch.equal(weights(folder)["body.1.running_mean"], torch.zeros(4))
    assert int(weights(folder)["body.1.num_batches_tracked"]) == 0
    assert ("FrozenNet was built in evaluation mode" in capsys.readouterr().err) == (outputs == "all frozen")
