"""Sweeps that are stopped or killed, in whatever way, and what the same command then does."""

from __future__ import annotations

import os
import signal
import time

import pytest
from house import House, read_rows, read_run, wait_until
from sweeps import (
    SLOW,
    cell,
    contents,
    end,
    parent_of,
    processes_in,
    start_group,
    states,
    sweep_of,
    wait_for_epoch,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(180)
PAIR = (*SLOW, "trainer.epochs=4", "seed=0,1")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_stops_the_whole_sweep(house: House, how: signal.Signals, code: int) -> None:
    """H21: within seconds, the running job saves and is interrupted, nothing is left; the command goes on."""
    process = house.start(*PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    children = processes_in(folder)
    assert children
    start = time.monotonic()
    got, err = end(process, how)
    assert got == code, err
    assert time.monotonic() - start < 10
    wait_until_gone(children, 1)
    assert "Traceback" not in err
    assert states(house) == ["interrupted", "waiting"]
    assert read_run(folder)["state"] == "interrupted"
    done = house.run(*PAIR)
    assert done.returncode == 0, done.stderr
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3", "4"]
    assert read_run(folder)["resume_count"] == 1
    assert (folder / "output.log").read_text().count("--- ") == 2


def test_ctrl_c_of_a_terminal_reaches_each_process_once(house: House) -> None:
    """H21: a terminal's Ctrl-C goes to the whole group; the job gets one signal, saves, and is not cut off."""
    process = start_group(house, *PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 1)
    time.sleep(0.25)  # in the middle of the second epoch
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert read_run(folder)["state"] == "interrupted"
    assert "stopped by SIGINT" in read_run(folder)["error"]["message"]


def test_kill_9_of_the_sweep_stops_its_jobs(house: House) -> None:
    """H08: the job notices, saves and ends; the same command, given at once, waits for that and completes all."""
    process = house.start(*PAIR)
    folder = wait_for_epoch(house, process, "seed=0", 2)
    children = processes_in(folder)
    end(process, signal.SIGKILL)
    done = house.run(*PAIR)
    assert done.returncode == 0, done.stderr
    wait_until_gone(children, 1)
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3", "4"]
    assert "resuming after epoch" in (folder / "output.log").read_text()


def test_jobs_of_a_killed_sweep_end_by_themselves(house: House) -> None:
    process = house.start(*PAIR, "trainer.epochs=500")
    folder = wait_for_epoch(house, process, "seed=0", 1)
    children = processes_in(folder)
    assert cell(house, "seed=0").state == "running"
    end(process, signal.SIGKILL)
    wait_until_gone(children, 15)
    assert cell(house, "seed=0").state == "interrupted"
    assert cell(house, "seed=1").state == "waiting"


def test_kill_9_of_a_job_touches_no_other(house: House) -> None:
    """H02, H15: said at once with its log, recorded as failed; the others run; the same command resumes it."""
    process = house.start(*SLOW, "trainer.epochs=3", "seed=0,1")
    folder = wait_for_epoch(house, process, "seed=0", 1)
    (child,) = processes_in(folder)
    os.kill(child, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "killed by SIGKILL (out of memory?)" in err
    assert str(folder.relative_to(house.root) / "output.log") in err
    assert states(house) == ["failed", "done"]
    assert read_run(folder)["state"] == "failed"
    assert "SIGKILL" in read_run(folder)["error"]["message"]
    other = contents(cell(house, "seed=1").folder)
    assert house.run(*SLOW, "trainer.epochs=3", "seed=0,1").returncode == 0
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert contents(cell(house, "seed=1").folder) == other


def test_kill_9_of_the_fork_server_costs_one_job(house: House) -> None:
    """Its children stop by themselves, a new one takes over, and the sweep ends with exit code 1."""
    process = house.start(*SLOW, "trainer.epochs=3", "seed=0,1")
    folder = wait_for_epoch(house, process, "seed=0", 1)
    (child,) = processes_in(folder)
    os.kill(parent_of(child), signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    wait_until_gone([child], 1)
    assert "the process it was forked from was killed" in err
    assert cell(house, "seed=1").state == "done"
    assert house.run(*SLOW, "trainer.epochs=3", "seed=0,1").returncode == 0
    assert states(house) == ["done", "done"]


def test_the_same_sweep_twice_at_once_is_refused(house: House) -> None:
    """H06: in one line, at once, with nothing changed; the first goes on."""
    process = house.start(*PAIR, "trainer.epochs=6")
    wait_for_epoch(house, process, "seed=0", 1)
    second = house.run(*PAIR, "trainer.epochs=6")
    assert second.returncode == 2
    assert second.stderr.count("error:") == 1
    assert "is running already" in second.stderr
    assert f"kill -INT {process.pid}" in second.stderr
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert states(house) == ["done", "done"]


def test_two_starts_at_the_same_moment(house: House) -> None:
    """H06: one of them does the sweep, the other is refused, whoever comes first."""
    both = [house.start(*SLOW, "optimizer.sleep_s=0.3", "seed=0,1") for _ in range(2)]
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
    process = house.start(*SLOW, "optimizer.sleep_s=60", "seed=0,1")
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
    assert sweep_of(house).cells()[0].state == "interrupted"
