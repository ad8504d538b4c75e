"""Signals of a terminal and of a scheduler: what is saved, who is asked to start the job again, where it continues."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from house import BLOBS, SMALL, Call, House, losses, num_rows, read_rows, read_run, stop, wait_until

pytestmark = pytest.mark.timeout(120)
# 48 training samples in batches of 8: six steps per epoch.
SLOW = (*SMALL, "optimizer=slow_sgd", "trainer.batch_size=8", "trainer.epochs=3", "trainer.threads=1")


def saved_batch(folder: Path) -> int:
    """Return the number of batches of the epoch in progress that the last checkpoint has."""
    return int(torch.load(folder / "checkpoints" / "last.pt")["batch"])


def test_signals_at_the_same_moment_are_one(house: House) -> None:
    """H21: slurmstepd and srun each send SIGTERM: the epoch is saved, not dropped as by a second request."""
    process = house.start(*BLOBS, *SLOW, "optimizer.sleep_s=0.1")
    wait_until(lambda: num_rows(house) == 1, process)
    time.sleep(0.25)  # two of the next epoch's six steps
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    code, err = stop(process, signal.SIGTERM)
    assert code == 143, err
    (folder,) = house.runs()
    assert read_run(folder)["error"]["type"] == "StopRequested"
    assert 0 < saved_batch(folder) < 6


def test_a_second_signal_some_seconds_later_ends_at_once(house: House) -> None:
    """H21: a step of a minute is not waited for, and nothing that it may have left half done is saved."""
    process = house.start(*BLOBS, *SLOW, "optimizer.sleep_s=60")
    wait_until(lambda: bool(house.runs()) and "scaling" in read_run(house.runs()[0]), process)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    time.sleep(2.1)
    start = time.monotonic()
    code, err = stop(process, signal.SIGINT)
    assert code == 130, err
    assert time.monotonic() - start < 10
    (folder,) = house.runs()
    assert read_run(folder)["error"]["type"] == "StopAtOnce"
    assert not (folder / "checkpoints").exists()


def test_two_signals_while_data_is_drawn(call: Call, house: House) -> None:
    """H21: worker processes draw: no waiting, no process left, the right code."""
    options = ("dataset=afad_synthetic", "trainer=debug", "tracking=none")
    process = house.start(*options, "dataset.workers=2", "dataset.num_images=4000", "dataset.limit=null")
    raw = house.root / "data" / "raw"
    wait_until(lambda: len(list(raw.rglob("*.jpg"))) > 50, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    code, err = stop(process, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in err
    assert call(*options, "trainer.epochs=1") == 0


def scontrol(house: House, body: str) -> dict[str, str]:
    """Put a program `scontrol` on the path and return the environment of a job of Slurm that finds it."""
    folder = house.root / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "scontrol").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "77"}


# As Slurm's: the job gets SIGTERM while it is being asked for. What is on disk by then is kept to be looked at.
ACCEPTS = 'echo "$@" >> asked; cat outputs/*/*/run.json > then.json; kill -TERM $PPID; sleep 0.2'


def test_a_signal_before_the_limit_saves_and_requeues(
    call: Call, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved first, then requeued, SIGTERM ignored; the restarted job continues in its folder, to the same losses."""
    environment = scontrol(house, ACCEPTS)
    options = (*SLOW, "optimizer.sleep_s=0.1")
    process = house.start(*BLOBS, *options, **environment)
    wait_until(lambda: num_rows(house) == 1, process)
    time.sleep(0.25)
    code, err = stop(process, signal.SIGUSR1)
    assert code == 138, err
    assert (house.root / "asked").read_text() == "requeue 77\n"
    assert json.loads((house.root / "then.json").read_text())["state"] == "interrupted"
    (folder,) = house.runs()
    assert 0 < saved_batch(folder) < 6

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert call(*options) == 0
    assert house.runs() == [folder]
    assert (read_run(folder)["state"], read_run(folder)["resume_count"]) == ("done", 1)
    assert call(*options) == 0  # a batch script that was started again repeats commands that were done
    assert house.runs() == [folder]
    assert call(*options, "seed=1") == 0
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert call(*options) == 0
    other_command, other_job = (run for run in house.runs() if run != folder)
    assert losses(folder) == losses(other_job) != losses(other_command)


def test_a_limit_before_the_first_step(house: House) -> None:
    """Such a run would be started for ever: Slurm is not asked, and what to change is reported."""
    process = house.start(*BLOBS, *SLOW, "optimizer.sleep_s=60", **scontrol(house, 'echo "$@" >> asked'))
    wait_until(lambda: bool(house.runs()) and "scaling" in read_run(house.runs()[0]), process)
    time.sleep(1.0)
    process.send_signal(signal.SIGUSR1)
    time.sleep(2.1)
    code, err = stop(process, signal.SIGUSR1)
    assert code == 138, err
    assert "raise the time limit (--time)" in err
    assert "requeue" not in (house.root / "asked").read_text()


def test_without_slurm_the_run_is_saved_and_ends(call: Call, house: House) -> None:
    process = house.start(*BLOBS, *SLOW, "optimizer.sleep_s=0.1")
    wait_until(lambda: num_rows(house) == 1, process)
    code, err = stop(process, signal.SIGUSR2)
    assert code == 140, err
    (folder,) = house.runs()
    assert read_run(folder)["state"] == "interrupted"
    assert call(f"resume={folder}") == 0
    assert len(read_rows(folder)) == 3


def test_a_job_that_slurm_does_not_requeue(house: House) -> None:
    """The reason is reported, and the run is as resumable as any that was stopped."""
    environment = scontrol(house, "echo 'Requested operation is presently disabled' >&2; exit 1")
    process = house.start(*BLOBS, *SLOW, "optimizer.sleep_s=0.1", **environment)
    wait_until(lambda: num_rows(house) == 1, process)
    code, err = stop(process, signal.SIGUSR1)
    assert code == 138
    assert "does not requeue job 77 (Requested operation is presently disabled)" in err
    assert "resume=" in err
    assert read_run(house.runs()[0])["state"] == "interrupted"


def test_a_sweep_is_requeued_once(house: House) -> None:
    """Its jobs save; only the process that runs the sweep asks, after they have ended."""
    environment = scontrol(house, ACCEPTS)
    words = ("-m", *BLOBS, *SLOW, "optimizer.sleep_s=0.1", "seed=0,1", "hydra.launcher.n_jobs=2")
    process = house.start(*words, **environment)
    wait_until(lambda: sum(1 for _ in house.root.rglob("metrics.csv")) == 2, process)
    code, err = stop(process, signal.SIGUSR1)
    assert code == 138, err
    assert (house.root / "asked").read_text() == "requeue 77\n"
    assert [read_run(folder)["state"] for folder in house.runs()] == ["interrupted", "interrupted"]
    assert all(saved_batch(folder) > 0 for folder in house.runs())
