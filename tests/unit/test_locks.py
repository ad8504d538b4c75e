"""Locks that several machines share: notes of other hosts, their heartbeats, and who takes over."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from gramgn import locks
from gramgn.errors import InputError
from gramgn.locks import holder, is_locked, locked


def note(
    file: Path, *, age_s: float, host: str = "elsewhere", job: str | None = None, starts: int = 0
) -> Path:
    """Write what a process of another host leaves."""
    file.touch()
    path = file.with_name(f"{file.name}.json")
    path.write_text(json.dumps({"host": host, "pid": 7, "job": job, "starts": starts, "token": "x"}))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


def test_a_lock_names_its_holder_while_it_is_held(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with locked(file, "busy"):
        found = holder(file)
        assert found is not None
        assert (found.pid, found.job, found.is_here) == (os.getpid(), "12", True)
        assert str(found) == f"process {os.getpid()}, Slurm job 12"
    assert [path.name for path in file.parent.iterdir()] == [".lock"]


def test_a_stale_lock_of_another_host_is_taken_over(file: Path) -> None:
    """Scale-out, trap 30: neither flock nor the number of a process tells anything about another host."""
    note(file, age_s=locks.STALE_S + 5)
    assert not is_locked(file)
    with locked(file, "busy"):
        found = holder(file)
        assert found is not None
        assert found.is_here


def test_a_lock_with_a_heartbeat_on_another_host_is_respected(file: Path) -> None:
    path, ended = note(file, age_s=0), threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            os.utime(path)

    assert is_locked(file)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InputError, match="busy"), locked(file, "busy"):
            pass
    finally:
        ended.set()
        thread.join()
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_a_young_lock_without_further_heartbeats(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was killed just now: the next start waits until that is certain."""
    monkeypatch.setattr(locks, "STALE_S", 2.0)
    note(file, age_s=0.5)
    start = time.monotonic()
    with locked(file, "busy"):
        assert 1 < time.monotonic() - start < 20


def test_notes_that_are_nobodys(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this host, which flock answers for; of this very job before it was started again; and a damaged one."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    start = time.monotonic()
    for changes in ({"host": locks.socket.gethostname()}, {"job": "12", "starts": 0}):
        note(file, age_s=0, **changes)
        assert not is_locked(file)
        with locked(file, "busy"):
            pass
    note(file, age_s=0).write_text("{")
    with locked(file, "busy"):
        pass
    assert time.monotonic() - start < 1
    note(file, age_s=0, job="12", starts=1)  # another rank of the same start
    assert is_locked(file)


def test_a_lock_that_was_taken_over_ends_its_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was asleep for minutes must not write next to its successor."""
    codes: list[int] = []
    monkeypatch.setattr(locks.os, "_exit", lambda code: codes.append(code))
    with locked(file, "busy"):
        note(file, age_s=0)
        end = time.monotonic() + 10
        while not codes and time.monotonic() < end:
            time.sleep(0.05)
    assert codes[:1] == [1]
    assert json.loads(file.with_name(".lock.json").read_text())["host"] == "elsewhere"
