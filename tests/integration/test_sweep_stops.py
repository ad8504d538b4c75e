"""Sweeps that are stopped or killed, in whatever way, and what the same command then does."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from house import Call, House, read_rows, read_run
from sweeps import (
    MULTI,
    PAIR,
    SLOW,
    cell,
    contents,
    end,
    meanwhile,
    processes_in,
    states,
    sweep_of,
    until,
    wait_for_epoch,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(180)


def test_ctrl_c_stops_the_whole_sweep(house: House) -> None:
    """H21: within seconds, in mid-epoch; the job saves, nothing is left.

    Ctrl-C on a terminal goes to the whole process group, and must reach the job once all the same.
    """
    process = house.start(*MULTI, *PAIR, start_new_session=True)
    folder = wait_for_epoch(house, "seed=0", 1, process)
    (running,) = json.loads(house.script("scripts/sweep_status.py", "--json").stdout)
    children = processes_in(folder)
    assert children
    start = time.monotonic()
    code, err = end(process, signal.SIGINT, group=True)
    assert code == 130, err
    assert time.monotonic() - start < 10
    wait_until_gone(children, 1)
    assert "Traceback" not in err
    assert (running["active"], running["states"]) == (True, {"waiting": 1, "running": 1})
    assert states(house) == ["interrupted", "waiting"]
    assert "stopped by SIGINT" in read_run(folder)["error"]["message"]


def test_sigterm_and_the_same_command_again(call: Call, house: House) -> None:
    """H21: exit code 143; the command then resumes what was stopped and runs the rest."""

    def stop() -> None:
        wait_for_epoch(house, "seed=0", 1)
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(stop):
        assert call(*PAIR, multirun=True) == 143
    assert states(house) == ["interrupted", "waiting"]
    assert call(*PAIR, multirun=True) == 0
    assert states(house) == ["done", "done"]
    folder = cell(house, "seed=0").folder
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert read_run(folder)["resume_count"] == 1
    assert (folder / "output.log").read_text().count("--- ") == 2


def test_kill_9_of_the_sweep(call: Call, house: House) -> None:
    """H08: the job notices, saves and ends; the same command, given at once, waits for that and completes all."""
    process = house.start(*MULTI, *PAIR)
    folder = wait_for_epoch(house, "seed=0", 1, process)
    children = processes_in(folder)
    end(process, signal.SIGKILL)
    assert call(*PAIR, multirun=True) == 0
    wait_until_gone(children, 1)
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert "stopped by SIGTERM" in (folder / "output.log").read_text()


def test_kill_9_of_a_job_affects_no_other(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H02, H15: reported at once with its log, recorded as failed; the others run; the same command resumes it."""

    def kill() -> None:
        (child,) = processes_in(wait_for_epoch(house, "seed=0", 1))
        os.kill(child, signal.SIGKILL)

    with meanwhile(kill):
        assert call(*PAIR, multirun=True) == 1
    err = capsys.readouterr().err
    folder = cell(house, "seed=0").folder
    assert "killed by SIGKILL (out of memory?)" in err
    assert str(folder.relative_to(house.root) / "output.log") in err
    assert states(house) == ["failed", "done"]
    assert "SIGKILL" in read_run(folder)["error"]["message"]
    other = contents(cell(house, "seed=1").folder)
    assert call(*PAIR, multirun=True) == 0
    assert states(house) == ["done", "done"]
    assert [row["epoch"] for row in read_rows(folder)] == ["1", "2", "3"]
    assert contents(cell(house, "seed=1").folder) == other


def test_the_same_sweep_twice_at_once_is_rejected(
    call: Call, house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """H06: in one line, with nothing changed; the first continues. All its jobs are listed from the start."""
    process = house.start(*MULTI, *PAIR)
    folder = wait_for_epoch(house, "seed=0", 1, process)
    assert len(sweep_of(house).read()["cells"]) == 2
    assert call(*PAIR, multirun=True) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "is running already" in err
    assert f"kill -INT {process.pid}" in err
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert states(house) == ["done", "done"]
    assert read_run(folder)["resume_count"] == 0


def test_two_starts_at_the_same_moment(house: House) -> None:
    """H06: one of them runs the sweep, the other is rejected, whoever comes first."""
    words = (*MULTI, *SLOW, "optimizer.sleep_s=0.3", "trainer.epochs=1", "seed=0,1")
    both = [house.start(*words) for _ in range(2)]
    ended = {process.returncode: err for process in both for _, err in [process.communicate(timeout=120)]}
    assert set(ended) == {0, 2}, ended
    assert "is running already" in ended[2]
    assert states(house) == ["done", "done"]
    assert [read_run(folder)["resume_count"] for folder in house.runs()] == [0, 0]


def test_a_stop_before_the_first_job_leaves_nothing(house: House) -> None:
    process = house.start(*MULTI, *PAIR)
    stderr = process.stderr
    assert stderr is not None
    assert stderr.readline().startswith("grid: seed = 0, 1: 2 jobs")
    code, err = end(process, signal.SIGINT)
    assert code == 130, err
    assert "Traceback" not in err
    assert not (house.root / "outputs").exists() or states(house) == ["interrupted", "waiting"]


def test_a_job_that_does_not_stop_is_killed(call: Call, house: House) -> None:
    """H21: bounded: a step of a minute is not waited for; the run is marked all the same."""
    children: list[int] = []
    stopped_at: list[float] = []

    def stop() -> None:
        until(lambda: any("run folder" in log.read_text() for log in house.root.rglob("output.log")))
        children.extend(processes_in(house.runs()[0]))
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(stop):
        words = (*SLOW, "optimizer.sleep_s=60", "trainer.epochs=1", "seed=0,1")
        assert call(*words, multirun=True) == 130
    assert 9 < time.monotonic() - stopped_at[0] < 25
    wait_until_gone(children, 1)
    assert read_run(house.runs()[0])["state"] == "interrupted"
    assert read_run(house.runs()[0])["error"]["message"].startswith("killed when the sweep was stopped")
    assert states(house) == ["interrupted", "waiting"]


def test_a_second_ctrl_c_is_recorded_as_what_it_was(house: House) -> None:
    """H21: not as memory that ran out, and nothing is left behind that Python would warn about."""
    words = (*SLOW, "optimizer.sleep_s=60", "seed=0,1", "hydra.launcher.n_jobs=2")
    process = house.start(*MULTI, *words)
    logs = (house.root / "outputs").rglob
    until(lambda: sum("run folder" in log.read_text() for log in logs("output.log")) == 2, process)
    process.send_signal(signal.SIGINT)
    time.sleep(2.1)  # sooner, it would count as the first
    code, err = end(process, signal.SIGINT)
    assert code == 130
    assert "leaked" not in err
    assert "out of memory" not in err
    for folder in house.runs():
        assert read_run(folder)["state"] == "interrupted"
        assert read_run(folder)["error"]["message"].startswith("killed when the sweep was stopped")
