"""Sweeps that are stopped or killed, in whatever way, and what the same command then does."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from house import House, read_rows, read_run, wait_until
from sweeps import (
    SLOW,
    UNTIMED,
    cell,
    contents,
    end,
    processes_in,
    states,
    sweep_of,
    wait_for_epoch,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(180)
PAIR = (*SLOW, "trainer.epochs=3", "seed=0,1")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_the_whole_sweep(house: House, how: signal.Signals, code: int) -> None:
    """H21: within seconds, in mid-epoch; the job saves, nothing is left; the same command completes the sweep.

    Ctrl-C on a terminal goes to the whole process group, and must reach the job once all the same.
    """
    process = house.start(*PAIR, start_new_session=True)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    running = json.loads(house.script("scripts/sweep_status.py", "--json").stdout)
    children = processes_in(folder)
    assert children
    start = time.monotonic()
    got, err = end(process, how, group=how == signal.SIGINT)
    assert got == code, err
    assert time.monotonic() - start < 10
    wait_until_gone(children, 1)
    assert "Traceback" not in err
    assert (running[0]["active"], running[0]["states"]) == (True, {"waiting": 1, "running": 1})
    assert states(house) == ["interrupted", "waiting"]
    assert f"stopped by {how.name}" in read_run(folder)["error"]["message"]
    if how == signal.SIGINT:
        done = house.run(*PAIR)
        assert done.returncode == 0, done.stderr
        assert states(house) == ["done", "done"]
        assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
        assert read_run(folder)["resume_count"] == 1
        assert (folder / "output.log").read_text().count("--- ") == 2


def test_kill_9_of_the_sweep(house: House) -> None:
    """H08: the job notices, saves and ends; the same command, given at once, waits for that and completes all."""
    process = house.start(*PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    children = processes_in(folder)
    end(process, signal.SIGKILL)
    done = house.run(*PAIR)
    assert done.returncode == 0, done.stderr
    wait_until_gone(children, 1)
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert "stopped by SIGTERM" in (folder / "output.log").read_text()


def test_kill_9_of_a_job_affects_no_other(house: House) -> None:
    """H02, H15: reported at once with its log, recorded as failed; the others run; the same command resumes it."""
    process = house.start(*PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    (child,) = processes_in(folder)
    os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by SIGKILL (out of memory?)" in err
    assert str(folder.relative_to(house.root) / "output.log") in err
    assert states(house) == ["failed", "done"]
    assert "SIGKILL" in read_run(folder)["error"]["message"]
    other = contents(cell(house, "seed=1").folder)
    assert house.run(*PAIR).returncode == 0
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert contents(cell(house, "seed=1").folder) == other


def test_the_same_sweep_twice_at_once_is_rejected(house: House) -> None:
    """H06: in one line, at once, with nothing changed; the first continues. All its jobs are listed from the start."""
    process = house.start(*PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    assert len(sweep_of(house).read()["cells"]) == 2
    second = house.run(*PAIR)
    assert second.returncode == 2
    assert second.stderr.count("error:") == 1
    assert "is running already" in second.stderr
    assert f"kill -INT {process.pid}" in second.stderr
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert states(house) == ["done", "done"]
    assert read_run(folder)["resume_count"] == 0


def test_two_starts_at_the_same_moment(house: House) -> None:
    """H06: one of them runs the sweep, the other is rejected, whoever comes first."""
    both = [house.start(*UNTIMED, "optimizer.sleep_s=0.3", "trainer.epochs=1", "seed=0,1") for _ in range(2)]
    ended = {process.returncode: err for process in both for _, err in [process.communicate(timeout=120)]}
    assert set(ended) == {0, 2}, ended
    assert "is running already" in ended[2]
    assert states(house) == ["done", "done"]
    assert [read_run(folder)["resume_count"] for folder in house.runs()] == [0, 0]


def test_a_stop_before_the_first_job_leaves_nothing(house: House) -> None:
    process = house.start(*PAIR)
    stderr = process.stderr
    assert stderr is not None
    assert stderr.readline().startswith("grid: seed = 0, 1: 2 jobs")
    code, err = end(process, signal.SIGINT)
    assert code == 130, err
    assert "Traceback" not in err
    assert not (house.root / "outputs").exists() or states(house) == ["interrupted", "waiting"]


def test_a_job_that_does_not_stop_is_killed(house: House) -> None:
    """H21: bounded: a step of a minute is not waited for; the run is marked all the same."""
    process = house.start(*UNTIMED, "optimizer.sleep_s=60", "trainer.epochs=1", "seed=0,1")
    wait_until(lambda: bool(house.runs()), process)
    (folder,) = house.runs()
    wait_until(lambda: "run folder" in (folder / "output.log").read_text(), process)
    (child,) = processes_in(folder)
    start = time.monotonic()
    code, err = end(process, signal.SIGINT)
    assert code == 130, err
    assert 9 < time.monotonic() - start < 25
    wait_until_gone([child], 1)
    assert read_run(folder)["state"] == "interrupted"
    assert states(house) == ["interrupted", "waiting"]
