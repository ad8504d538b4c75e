"""Runs on several ranks: the numbers of one process, one writer, and resuming on another number of ranks."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from house import House, read_run
from pipeline_runs import SAMPLES, UNEVEN, Launch

pytestmark = pytest.mark.timeout(120)
LOSSES = ("train_loss", "train_mae", "val_loss", "val_mae", "test_loss", "test_mae", "grad_norm", "step_norm")


def numbers(folder: Path) -> list[list[float]]:
    """Return the losses of every epoch."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [[float(row[name]) for name in LOSSES if row[name]] for row in csv.DictReader(file)]


def assert_equal(one: Path, other: Path) -> None:
    for row, same in zip(numbers(one), numbers(other), strict=True):
        assert row == pytest.approx(same, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("optimizer", ["ggn", "sgd", "muon"])
def test_two_ranks_train_as_one(launch: Launch, house: House, optimizer: str) -> None:
    """Uneven shares weighted by their samples; the order of the data, augmented too, knows nothing of ranks."""
    words = (*UNEVEN, f"optimizer={optimizer}", "augment=flip", "trainer.eval_batch_size=3")
    for size in (1, 2):
        started = launch(size, *words)
        assert started.codes() == [0] * size, started.text()
    one, two = house.runs()
    assert_equal(one, two)
    assert read_run(two)["ranks"] == 2
    # One folder, and one line of each kind, from rank 0.
    assert len(list((house.root / "outputs" / "runs").iterdir())) == 2
    assert started.text().count("epoch 2/2") == started.text().count("done: ") == 1


@pytest.mark.parametrize("optimizer", ["ggn_spring", "adamw"])
def test_a_rank_without_samples(launch: Launch, house: House, optimizer: str) -> None:
    """45 samples in batches of 22: the last batch has one."""
    words = (
        *SAMPLES,
        "model=tiny",
        "trainer.dtype=float64",
        f"optimizer={optimizer}",
        "trainer.batch_size=22",
    )
    for size in (1, 3):
        started = launch(size, *words, "trainer.average_decay=0.9")
        assert started.codes() == [0] * size, started.text()
    assert_equal(*house.runs())


def test_a_checkpoint_resumes_on_any_number_of_ranks(launch: Launch, house: House) -> None:
    """Four ranks, then one, then two, as on one from the start; the optimizer's state is included."""
    words = (*UNEVEN, "optimizer=ggn_spring", "schedule=cosine", "schedule.every=epoch", "trainer.epochs=3")
    assert launch(1, *words).codes() == [0]
    started = launch(4, *words, STOP_AFTER="5")
    assert started.codes() == [143] * 4, started.text()
    whole, part = house.runs()
    started = launch(1, f"resume={part}", STOP_AFTER="5")
    assert started.codes() == [143], started.text()
    started = launch(2, f"resume={part}")
    assert started.codes() == [0, 0], started.text()
    assert "note: 2 ranks now, 1 before" in started.text()
    assert_equal(whole, part)
    assert len(read_run(part)["starts"]) == 3
