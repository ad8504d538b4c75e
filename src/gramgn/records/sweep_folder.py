"""The folder of a sweep: sweep.json holds what was requested, the runs in it hold their progress."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.locks import is_locked
from gramgn.records.files import write_atomic
from gramgn.records.run_folder import RunFolder, finite

SWEEP_FORMAT = 1
CELL_STATES = ("waiting", "running", "killed", "interrupted", "failed", "diverged", "done")
SWEEP_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
# Errors of these types are fully explained by their message.
_SAID_IN_FULL = ("InputError", "ConfigError", "DataError", "Killed")


@dataclass(frozen=True)
class CellStatus:
    """The progress of one job of a sweep, from its records.

    Attributes:
        folder: Its run folder, absolute; missing on disk if the job has not begun.
        label: The overrides that not all jobs of the sweep share, e.g. `"optimizer.lam=1 seed=0"`.
        overrides: Its whole command line.
        state: One of `CELL_STATES`. A job is `killed` if it ended without recording why and no
            process works on it.
        epoch: Last whole epoch; None before the first.
        epochs: Epochs asked for; None before it began.
        train_loss: Mean squared error of `epoch`, in standardised units.
        val_loss: The best so far, in standardised units.
        elapsed_s: Seconds of the run up to `epoch`, or all of them if it has ended.
        error: Why it failed, diverged or stopped.
        commits: The code versions that it ran with, oldest first; `+` marks uncommitted changes.
    """

    folder: Path
    label: str
    overrides: tuple[str, ...]
    state: str
    epoch: int | None = None
    epochs: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    elapsed_s: float | None = None
    error: str | None = None
    commits: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON types: the folder by its name, NaN and infinities as text."""
        content: dict[str, Any] = finite({**asdict(self), "folder": self.folder.name})
        return content


class SweepFolder:
    """One sweep on disk; it may have been moved.

    Attributes:
        path: The folder, absolute.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()

    @property
    def sweep_json(self) -> Path:
        """What was requested, and what the sweep itself recorded about its jobs."""
        return self.path / SWEEP_FILE

    def read(self) -> dict[str, Any]:
        """Return the content of sweep.json.

        Raises:
            InputError: The file is missing, damaged or of another format.
        """
        try:
            content = json.loads(self.sweep_json.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"{self.path} is not a sweep's folder: it has no {SWEEP_FILE}. Sweeps lie in outputs/sweeps"
            ) from None
        except OSError as error:
            raise InputError(f"cannot read {self.sweep_json}: {error.strerror or error}") from error
        except ValueError:
            content = None
        cells = content.get("cells") if isinstance(content, dict) else None
        whole = isinstance(cells, list) and all(
            isinstance(cell, dict) and isinstance(cell.get("folder"), str) for cell in cells
        )
        if not whole or content.get("format") != SWEEP_FORMAT:
            raise InputError(
                f"{self.sweep_json} is damaged or of another version. Remove it and repeat the sweep's command: "
                "the finished jobs are found again in their folders"
            )
        found: dict[str, Any] = content
        return found

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace `sweep.json` atomically; `format` is added.

        Raises:
            InputError: The disk is full or the folder cannot be written.
        """
        text = json.dumps({"format": SWEEP_FORMAT, **content}, indent=1, allow_nan=False)
        write_atomic(self.sweep_json, text + "\n")

    def is_active(self) -> bool:
        """Return whether a process is working on the sweep."""
        return is_locked(self.path / LOCK_FILE)

    def cells(self) -> list[CellStatus]:
        """Return the progress of each job, in the order of the sweep; a job with damaged records counts as failed.

        Raises:
            InputError: sweep.json is missing or damaged.
        """
        record, active = self.read(), self.is_active()
        labels = varying([cell.get("overrides") or [] for cell in record["cells"]])
        return [
            self._status(cell, label, active) for cell, label in zip(record["cells"], labels, strict=True)
        ]

    def _status(self, cell: Mapping[str, Any], label: str, active: bool) -> CellStatus:
        folder = self.path / cell["folder"]
        overrides = tuple(str(each) for each in cell.get("overrides") or [])
        known = {"folder": folder, "label": label or folder.name.rpartition("-")[0], "overrides": overrides}
        if not RunFolder(folder).run_json.is_file():
            return CellStatus(**known, state=_unbegun(cell, active), error=_why_unbegun(cell))
        try:
            return run_status(RunFolder(folder), active=active, **known)
        except InputError as error:
            return CellStatus(**known, state="failed", error=str(error))


def run_status(
    run: RunFolder, *, active: bool, folder: Path, label: str, overrides: tuple[str, ...]
) -> CellStatus:
    """Return the progress of a run that has begun.

    Args:
        run: Its folder.
        active: Whether a process is working on its sweep.
        folder: See `CellStatus`, also for the arguments below.
        label: The overrides that distinguish it.
        overrides: Its command line.

    Raises:
        InputError: Its records are damaged.
    """
    record = run.read_run()
    rows = run.read_metrics(report=lambda message: None)
    last = rows[-1] if rows else {}
    state = str(record["state"])
    if state == "running" and not active and not is_locked(run.path / ".lock"):
        state = "killed"
    ended_s = (record.get("time") or {}).get("wall_s") if state != "running" else None
    epoch, elapsed = last.get("epoch"), ended_s if ended_s is not None else last.get("wall_s")
    return CellStatus(
        folder=folder,
        label=label,
        overrides=overrides,
        state=state,
        epoch=None if epoch is None else int(epoch),
        epochs=((record.get("config") or {}).get("trainer") or {}).get("epochs"),
        train_loss=last.get("train_loss"),
        val_loss=(record.get("best") or {}).get("val_loss"),
        elapsed_s=elapsed,
        error=failure_reason(record),
        commits=code_versions(record),
    )


def failure_reason(record: Mapping[str, Any]) -> str | None:
    """Return why a run failed, stopped or diverged, None if it did not; unexpected errors with their type.

    Args:
        record: Content of run.json.
    """
    error = record.get("error")
    if not error:
        return None
    named = record["state"] == "failed" and error.get("type") not in _SAID_IN_FULL
    return f"{error.get('type')}: {error.get('message')}" if named else error.get("message")


def code_versions(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the code versions of a run's starts, each once: 10 digits of the commit and `+` if changed.

    The first digits of a hash distinguish uncommitted changes.

    Args:
        record: Content of run.json.
    """
    states = [start.get("git") or {} for start in record.get("starts") or []] or [record.get("git") or {}]
    return tuple(dict.fromkeys(code_version(git) for git in states))


def code_version(git: Mapping[str, Any]) -> str:
    """Return a version of the code in short, e.g. `"1a2b3c4d5e+9f8e7d"`; `"unknown"` outside a repository."""
    commit, changes = git.get("commit"), git.get("diff_sha256")
    if not commit and not changes:
        return "unknown"
    return str(commit or "no commit")[:10] + (f"+{str(changes)[:6]}" if changes else "")


def count_states(cells: Sequence[CellStatus]) -> dict[str, int]:
    """Return the number of jobs in each state that occurs, in the order of `CELL_STATES`."""
    counts = Counter(cell.state for cell in cells)
    return {state: counts[state] for state in CELL_STATES if counts[state]}


def find_sweeps(root: str | os.PathLike[str]) -> list[SweepFolder]:
    """Return the sweeps directly below a folder, sorted by name; none if it does not exist."""
    found = Path(root).glob(f"*/{SWEEP_FILE}")
    return [SweepFolder(path.parent) for path in sorted(found)]


def varying(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each of several command lines, the overrides that not all of them share, joined to one text.

    Of a single command line the text is empty.
    """
    if not commands:
        return []
    common = set(commands[0]).intersection(*map(set, commands[1:]))
    return [" ".join(each for each in command if each not in common) for command in commands]


def _unbegun(cell: Mapping[str, Any], active: bool) -> str:
    """Return the state of a job without run.json; a job recorded as finished has to be repeated."""
    state = str(cell.get("state") or "waiting")
    if state == "running" and not active:
        return "killed"
    return state if state in CELL_STATES and state not in ("done", "diverged") else "waiting"


def _why_unbegun(cell: Mapping[str, Any]) -> str | None:
    state = cell.get("state")
    return f"it was {state}, and its run.json is gone" if state in ("done", "diverged") else cell.get("error")
