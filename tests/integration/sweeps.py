"""What the tests of sweeps share: small commands, and looking at a sweep that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from house import BLOBS, SMALL, House, read_run, wait_until

from gramgn.records import CellStatus, SweepFolder

TINY = ("-m", *BLOBS, *SMALL, "trainer.epochs=1")
# 48 training samples in batches of 8: six steps an epoch.
SLOW = ("-m", *BLOBS, *SMALL, "optimizer=slow_sgd", "optimizer.sleep_s=0.1", "trainer.batch_size=8")


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


def wait_for_epoch(house: House, process: subprocess.Popen[str], label: str, epoch: int) -> Path:
    """Wait until a job of the sweep has that many whole epochs; return its folder."""

    def reached() -> bool:
        folders = list((house.root / "outputs" / "sweeps").glob(f"*/{label}-*"))
        if not folders or not (folders[0] / "metrics.csv").is_file():
            return False
        return (folders[0] / "metrics.csv").read_text().count("\n") > epoch

    wait_until(reached, process)
    return next((house.root / "outputs" / "sweeps").glob(f"*/{label}-*"))


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


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time and content of all files of a job."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def edit_run(folder: Path, **entries: Any) -> None:
    (folder / "run.json").write_text(json.dumps(read_run(folder) | entries))


def end(process: subprocess.Popen[str], how: signal.Signals, seconds: float = 30) -> tuple[int, str]:
    """Send a signal; return exit code and stderr."""
    process.send_signal(how)
    _, err = process.communicate(timeout=seconds)
    return process.returncode, err


def start_group(house: House, *arguments: str) -> subprocess.Popen[str]:
    """Start train.py as the leader of a process group, as a shell on a terminal does."""
    return subprocess.Popen(
        [sys.executable, str(house.root / "train.py"), *arguments],
        cwd=house.root,
        env=house.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
