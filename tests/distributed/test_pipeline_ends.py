"""Ranks that die, hang, fail or are stopped: the run ends soon, its record names the cause, and it can be resumed."""

from __future__ import annotations

import csv
import signal
import time
from pathlib import Path

import pytest
import torch
from house import House, read_run
from pipeline_runs import SAMPLES, Launch, Started

pytestmark = pytest.mark.timeout(120)
# 45 training samples in batches of 13: four steps per epoch.
SLOW = (*SAMPLES, "model=tiny", "optimizer=slow_sgd", "trainer.batch_size=13", "trainer.epochs=3")


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


def wait_for_epoch(house: House, epoch: int, started: Started) -> Path:
    """Wait until the run has that many whole epochs; return its folder."""
    end = time.monotonic() + 60
    while True:
        files = list((house.root / "outputs").rglob("metrics.csv"))
        if files and files[0].read_text().count("\n") > epoch:
            return files[0].parent
        assert time.monotonic() < end, started.text()
        time.sleep(0.01)


@pytest.mark.parametrize(("victim", "sleep_s"), [(1, 0.05), (0, 0.05), (2, 30.0)])
def test_a_killed_rank_ends_the_run(launch: Launch, house: House, victim: int, sleep_s: float) -> None:
    """Within 5 s, whether the others wait for it or compute for longer; then the run resumes to the same losses."""
    words = (*SLOW, "trainer.dtype=float64")
    started = launch(3, *words, f"optimizer.sleep_s={sleep_s}")
    if sleep_s > 1:
        while "run folder" not in started.text():
            time.sleep(0.01)
        time.sleep(1)
        (folder,) = house.runs()
    else:
        folder = wait_for_epoch(house, 1, started)
    killed_at = time.monotonic()
    started.send(signal.SIGKILL, victim)
    codes = started.codes(20)
    assert time.monotonic() - killed_at < 5, started.text()
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [1, 1]
    run = read_run(folder)
    assert run["state"] == "failed"
    assert run["error"]["message"].startswith(f"rank {victim} ended without a word")
    if sleep_s > 1:
        return
    again = launch(3, f"resume={folder}")
    assert again.codes() == [0, 0, 0], again.text()
    whole = launch(1, *words, "optimizer.sleep_s=0")
    assert whole.codes() == [0]
    (other,) = (each for each in house.runs() if each != folder)
    assert losses(folder) == pytest.approx(losses(other), rel=1e-11)


def test_a_signal_to_one_rank_stops_all(launch: Launch, house: House) -> None:
    """H21: agreed on in each step: all end with its code, and rank 0 has saved the epoch so far."""
    started = launch(2, *SLOW, "optimizer.sleep_s=0.1")
    folder = wait_for_epoch(house, 1, started)
    time.sleep(0.15)
    started.send(signal.SIGTERM, 1)
    assert started.codes() == [143, 143], started.text()
    assert read_run(folder)["state"] == "interrupted"
    assert read_run(folder)["error"]["type"] == "StopRequested"
    saved = torch.load(folder / "checkpoints" / "last.pt")
    assert (saved["epoch"], 0 < saved["batch"] < 4) == (1, True)


def test_sigterm_after_a_death_is_a_failure(launch: Launch, house: House) -> None:
    """As torchrun does it: the others are told to stop because a rank has died."""
    started = launch(3, *SLOW, "optimizer.sleep_s=0.3")
    folder = wait_for_epoch(house, 1, started)
    started.send(signal.SIGKILL, 2)
    time.sleep(0.1)
    started.send(signal.SIGTERM, 0, 1)
    assert started.codes(20)[:2] == [1, 1], started.text()
    assert read_run(folder)["state"] == "failed"
    assert "rank 2" in read_run(folder)["error"]["message"]


def test_the_mistake_of_one_rank_is_reported_by_the_first(launch: Launch, house: House) -> None:
    """Its traceback is in the log; the others do not wait for it until the timeout."""
    started = launch(2, *SLOW, "optimizer._target_=outside.FailsOnRank")
    begun = time.monotonic()
    assert started.codes(30) == [1, 1], started.text()
    assert time.monotonic() - begun < 25
    (folder,) = house.runs()
    message = read_run(folder)["error"]["message"]
    assert message.startswith("rank 1 failed: ValueError: the plug-in's own mistake")
    assert "Traceback" in (folder / "log.txt").read_text()


def test_data_that_one_rank_lacks(launch: Launch, house: House) -> None:
    """The others wait for it without a limit, as they would while it prepares them, but not once it has failed."""
    started = launch(2, *SAMPLES, "model=tiny", "optimizer=sgd", "dataset.bad=rank")
    assert started.codes(30) == [1, 2], started.text()
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "failed"
    assert read_run(folder)["error"]["message"] == "rank 1 failed: these files are not on this machine"
    assert started.text().count("rank 1 failed") == 1


def test_a_stopped_rank_is_named_at_the_timeout(launch: Launch, house: House) -> None:
    """SIGSTOP, as a machine that no longer answers."""
    started = launch(3, *SLOW, "optimizer.sleep_s=0.05", TEST_TIMEOUT_S="3")
    folder = wait_for_epoch(house, 1, started)
    started.send(signal.SIGSTOP, 1)
    time.sleep(3)
    begun = time.monotonic()
    while read_run(folder)["state"] == "running" and time.monotonic() - begun < 15:
        time.sleep(0.05)
    started.send(signal.SIGKILL, 1)
    codes = started.codes(20)
    assert codes == [1, -signal.SIGKILL, 1], started.text()
    assert read_run(folder)["error"]["message"] == "rank 1 does not answer"


@pytest.mark.parametrize("attempt", [1, 2])
def test_three_ranks_end_normally(launch: Launch, house: House, attempt: int) -> None:
    started = launch(3, *SAMPLES, "model=tiny", "optimizer=sgd", "trainer.epochs=1")
    assert started.codes() == [0, 0, 0], started.text()


def test_what_is_rejected(launch: Launch, house: House) -> None:
    """Before anything is written, with one message for all ranks and exit code 2."""
    mistakes = {
        ("model=resnet_bn",): "has batch norm, which on 2 cpu ranks",
        ("model=tiny", "trainer.compile=true"): "trainer.compile=true is for one process",
        ("model=tiny", "trainer.device=cuda:0"): "is one device for 2 ranks",
        ("model=tiny", "seed=0,1", "-m"): "a sweep starts its own processes",
        ("model=tiny", "optimizer.lam=1"): "optimizer.lam",
    }
    for words, message in mistakes.items():
        started = launch(2, *SAMPLES, "optimizer=sgd", *words)
        assert started.codes()[0] == 2, (words, started.text())
        assert started.text().count("error:") == 1
        assert message in started.text()
    assert house.runs() == []
