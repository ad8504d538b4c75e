"""What the tests of sweeps share: small commands, and looking at a sweep that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from house import BLOBS, SMALL, House, read_run, wait_until

from gramgn.records import CellStatus, SweepFolder

MULTI = ("-m", *BLOBS)  # what a process needs and `call` adds itself
# 48 training samples in batches of 8: six steps per epoch.
SLOW = (*SMALL, "optimizer=slow_sgd", "trainer.batch_size=8")
PAIR = (*SLOW, "optimizer.sleep_s=0.1", "trainer.epochs=3", "seed=0,1")


def sweep_of(house: House, name: str | None = None) -> SweepFolder:
    """Return the sweep of that name, or the only one there is."""
    if name is not None:
        return SweepFolder(house.root / "outputs" / "sweeps" / name)
    (folder,) = (house.root / "outputs" / "sweeps").iterdir()
    return SweepFolder(folder)


def states(house: House, name: str | None = None) -> list[str]:
    return [cell.state for cell in sweep_of(house, name).cells()]


def cell(house: House, label: str, name: str | None = None) -> CellStatus:
    (found,) = [each for each in sweep_of(house, name).cells() if label in each.overrides]
    return found


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait for something that this process, or another one, does."""
    if process is not None:
        wait_until(condition, process)
        return
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_for_epoch(
    house: House, label: str, epoch: int, process: subprocess.Popen[str] | None = None
) -> Path:
    """Wait until a job of the sweep has that many whole epochs; return its folder."""
    place = house.root / "outputs" / "sweeps"

    def found() -> list[Path]:
        return [path.parent for path in place.glob(f"*/{label.replace('=', '-')}-*/metrics.csv")]

    until(lambda: bool(found()) and (found()[0] / "metrics.csv").read_text().count("\n") > epoch, process)
    return found()[0]


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread while a sweep runs in this process."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed, failed


def processes_in(folder: Path) -> list[int]:
    """Return the processes that write a job's output: its own, and what that started."""
    log = folder / "output.log"
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd" / "2").resolve() == log:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(processes: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < end, f"{processes} still run after {seconds} s"
        time.sleep(0.05)


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder, except the lock files, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def times(folder: Path) -> dict[str, int]:
    """Return when the files of a folder were last written."""
    return {name: (folder / name).stat().st_mtime_ns for name in contents(folder)}


def edit_run(folder: Path, **entries: Any) -> None:
    (folder / "run.json").write_text(json.dumps(read_run(folder) | entries))


def end(process: subprocess.Popen[str], how: signal.Signals, *, group: bool = False) -> tuple[int, str]:
    """Send a signal, to the whole process group as Ctrl-C on a terminal; return exit code and stderr."""
    if group:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
