"""A house of its own for each test: the checkout's code and configuration, outputs and data elsewhere."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = REPOSITORY / "tests" / "plugin"
BLOBS = ("--config-dir", str(PLUGIN / "conf"))
SMALL = ("dataset=blobs", "model=tiny", "trainer=debug", "tracking=none")


Call = Callable[..., int]


class House:
    """A folder that looks like a checkout and shares its code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir()
        for name in ("benchmarks", "conf", "examples", "src"):
            (root / name).symlink_to(REPOSITORY / name)
        shutil.copy(REPOSITORY / "train.py", root / "train.py")
        shutil.copytree(REPOSITORY / "scripts", root / "scripts")
        shutil.copytree(REPOSITORY / "data", root / "data", ignore=shutil.ignore_patterns("raw", "prepared"))

    def environment(self, **extra: str) -> dict[str, str]:
        """Return an environment without accounts, with the plug-in importable and one thread."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        own = {"HOME": str(self.root), "PYTHONPATH": str(PLUGIN), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        return clean | own | extra

    def start(
        self, *arguments: str, cwd: Path | None = None, start_new_session: bool = False, **extra: str
    ) -> subprocess.Popen[str]:
        """Start ``python train.py`` as a process, on request as the leader of a group, as on a terminal."""
        return subprocess.Popen(
            [sys.executable, str(self.root / "train.py"), *arguments],
            cwd=cwd or self.root,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=start_new_session,
        )

    def run(self, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run ``python train.py`` to its end."""
        process = self.start(*arguments, cwd=cwd, **extra)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def script(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run any other Python command line of the house."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def runs(self, under: str = "outputs") -> list[Path]:
        """Return the run folders, oldest first."""
        found = [path.parent for path in (self.root / under).rglob("run.json")]
        # The lock file is made with the folder and never written to.
        return sorted(found, key=lambda path: (path / ".lock").stat().st_mtime_ns)

    def files(self) -> dict[str, bytes]:
        """Return every file under outputs and data, to tell whether a command left things as they were."""
        tops = (self.root / "outputs", self.root / "data")
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for top in tops
            for path in sorted(top.rglob("*"))
            if path.is_file()
        }


def read_run(folder: Path) -> dict[str, Any]:
    """Return run.json."""
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return metrics.csv as text, so that a comparison is of every digit."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


LOSSES = ("epoch", "step", "train_loss", "train_mae", "val_loss", "val_mae", "test_loss", "test_mae")
LOSSES += (
    "lr",
    "lam",
    "alpha",
    "alpha_sum",
    "grad_norm",
    "step_norm",
    "actual_decrease",
    "rejected_steps",
    "lambda_min",
    "lambda_max",
    "solve_cholesky",
)


def losses(folder: Path) -> list[dict[str, str]]:
    """Return all columns of metrics.csv that have nothing to do with time or memory."""
    return [{name: row[name] for name in LOSSES} for row in read_rows(folder)]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait for something a running process does; fail with its words if it ends first."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode}: {process.communicate()}")
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"nothing after {seconds} s: {process.communicate()}")
        time.sleep(0.002)


def num_rows(house: House) -> int:
    """Return the rows that the newest run has in its metrics.csv."""
    files = sorted((house.root / "outputs").rglob("metrics.csv"))
    return files[-1].read_text().count("\n") - 1 if files else 0


def stop(process: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    """Send a signal and return exit code and stderr."""
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    return process.returncode, err
