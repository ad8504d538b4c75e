"""The folder of a sweep: sweep.json holds what was requested, the runs in it hold their progress."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.locks import is_locked
from gramgn.records.columns import look_up
from gramgn.records.files import write_atomic
from gramgn.records.run_folder import RunFolder, finite
from gramgn.scheduler import GONE, WAITING, is_live, job_states, pending_reasons

SWEEP_FORMAT = 1
CELL_STATES = ("done", "diverged", "failed", "rejected", "interrupted", "killed", "running", "waiting")
SWEEP_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
_ENDED = ("done", "diverged")
# Errors of these types are fully explained by their message.
_SAID_IN_FULL = ("InputError", "ConfigError", "DataError", "Killed")


@dataclass(frozen=True)
class CellStatus:
    """The progress of one job of a sweep, from its records."""

    folder: Path  # the run folder, absolute; missing on disk if the job has not begun
    label: str  # the overrides that not all jobs of the sweep share, e.g. `"optimizer.lam=1 seed=0"`
    overrides: tuple[str, ...]
    state: str  # one of `CELL_STATES`; `killed`: it ended without recording why, and no process works on it
    epoch: int | None = None  # the last whole one
    epochs: int | None = None  # number of epochs requested
    train_loss: float | None = None  # of `epoch`, in standardized units
    val_loss: float | None = None  # the best so far, in standardized units
    elapsed_s: float | None = None
    error: str | None = None  # why it failed, diverged or stopped
    commits: tuple[str, ...] = ()  # see `code_versions`
    slurm: str | None = (
        None  # Slurm's name, state and reason of its job, if it is in the queue: `"12_0 PENDING Priority"`
    )

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
        if not self.sweep_json.is_file():
            raise InputError(
                f"{self.path} is not a sweep's folder: it has no {SWEEP_FILE}. Sweeps lie in outputs/sweeps"
            )
        try:
            content: dict[str, Any] = json.loads(self.sweep_json.read_text(encoding="utf-8"))
            if content["format"] == SWEEP_FORMAT and all(
                isinstance(cell["folder"], str) for cell in content["cells"]
            ):
                return content
        except OSError as error:
            raise InputError(f"cannot read {self.sweep_json}: {error.strerror or error}") from error
        except (ValueError, LookupError, TypeError):
            pass
        raise InputError(
            f"{self.sweep_json} is damaged or of another version. Remove it and repeat the sweep's command: "
            "the finished jobs are found again in their folders"
        )

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace `sweep.json` atomically; `format` is added.

        Raises:
            InputError: The disk is full or the folder cannot be written.
        """
        text = json.dumps({"format": SWEEP_FORMAT, **content}, indent=1, allow_nan=False)
        write_atomic(self.sweep_json, text + "\n")

    def is_active(self) -> bool:
        """Return whether a process works on the sweep."""
        return is_locked(self.path / LOCK_FILE)

    def cells(self) -> list[CellStatus]:
        """Return the progress of each job, in the order of the sweep; a job with damaged records counts as failed.

        Raises:
            InputError: sweep.json is missing or damaged.
        """
        cells, active = self.read()["cells"], self.is_active()
        labels = varying([cell.get("overrides") or [] for cell in cells])
        was_submitted = any(cell.get("job") and cell.get("state") not in _ENDED for cell in cells)
        queue = (job_states() if was_submitted else None) or {}
        reasons = pending_reasons() if "PENDING" in queue.values() else {}
        found = []
        for cell, label in zip(cells, labels, strict=True):
            in_queue = queue.get(str(cell.get("job")), GONE)
            status = self._status(cell, label, active or is_live(in_queue))
            if is_live(in_queue) and status.state not in _ENDED:
                state = "waiting" if in_queue in WAITING else "running"
                words = (cell["job"], in_queue, reasons.get(cell["job"]))
                status = replace(status, state=state, slurm=" ".join(filter(None, words)))
            found.append(status)
        return found

    def _status(self, cell: Mapping[str, Any], label: str, active: bool) -> CellStatus:
        run = RunFolder(self.path / cell["folder"])
        status = CellStatus(
            folder=run.path,
            label=label or run.path.name.rpartition("-")[0],
            overrides=tuple(map(str, cell.get("overrides") or [])),
            state=str(cell.get("state") or "waiting"),
            error=cell.get("error"),
        )
        try:
            if run.run_json.is_file():
                return _begun(run, status, active)
        except InputError as error:
            return replace(status, state="failed", error=str(error))
        if status.state in _ENDED:
            return replace(status, state="waiting", error=f"it was {status.state}, and its run.json is gone")
        return replace(status, state="killed") if status.state == "running" and not active else status


def _begun(run: RunFolder, status: CellStatus, active: bool) -> CellStatus:
    """Return the status of a job with what its run's records add."""
    record, rows = run.read_run(), run.read_metrics()
    last = rows[-1] if rows else {}
    state = str(record["state"])
    is_alive = state == "running" and (active or is_locked(run.path / ".lock"))
    ended_s = (record.get("time") or {}).get("wall_s") if state != "running" else None
    epoch = last.get("epoch")
    return replace(
        status,
        state="killed" if state == "running" and not is_alive else state,
        epoch=None if epoch is None else int(epoch),
        epochs=look_up(record, "config.trainer.epochs"),
        train_loss=last.get("train_loss"),
        val_loss=look_up(record, "best.val_loss"),
        elapsed_s=last.get("wall_s") if ended_s is None else ended_s,
        error=failure_reason(record),
        commits=code_versions(record),
    )


def failure_reason(record: Mapping[str, Any]) -> str | None:
    """Return why a run failed, stopped or diverged, None if it did not; unexpected errors with their type."""
    error = record.get("error") or {}
    if record["state"] == "failed" and error.get("type") not in (None, *_SAID_IN_FULL):
        return f"{error['type']}: {error.get('message')}"
    return error.get("message")


def code_versions(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the code versions of a run's starts, each once, e.g. `("1a2b3c4d5e+9f8e7d",)`.

    A version is the start of the commit's hash, then `+` and the start of a hash of uncommitted changes. `record` is
    the content of run.json, or has an entry `git` like it.
    """
    found: dict[str, None] = {}
    for start in record.get("starts") or [record]:
        commit, changes = look_up(start, "git.commit"), look_up(start, "git.diff_sha256")
        version = str(commit or "no commit")[:10] + (f"+{str(changes)[:6]}" if changes else "")
        found[version if commit or changes else "unknown"] = None
    return tuple(found)


def count_states(states: Iterable[str]) -> dict[str, int]:
    """Return the number of jobs in each state that occurs, in the order of `CELL_STATES`."""
    counts = Counter(states)
    return {state: counts[state] for state in CELL_STATES if counts[state]}


def varying(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each of several command lines, the overrides that not all of them share, joined by spaces."""
    common = set(commands[0]).intersection(*map(set, commands[1:])) if commands else set()
    return [" ".join(each for each in command if each not in common) for command in commands]
