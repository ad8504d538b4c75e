"""All runs under a folder, whatever their state, and what cannot be read there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.records import Row, RunFolder, find_runs, run_status

# Counts of an epoch that say how often the solve of (lam G + alpha I) u = r did not go the plain way.
FALL_BACKS = {
    "solve_cholesky": "solves by Cholesky (the plain way)",
    "solve_eigh": "solves by eigenvalues, after Cholesky failed",
    "solve_minimum_norm": "minimum-norm solves (alpha = 0 or next to it)",
    "solve_non_finite": "solves with a non-finite result",
    "ill_conditioned": "alpha below the rounding of G",
    "rejected_steps": "tries refused by adaptive damping or line search",
    "skipped_batches": "batches left out",
}
_UNFINISHED = {
    "running": "not finished: it is being trained",
    "killed": "it ended without saying so: killed, or the machine went down",
}


@dataclass(frozen=True)
class Entry:
    """One run as the page shows it.

    Attributes:
        path: Its folder, relative to the searched one, with ``/``.
        record: The content of ``run.json``; the same keys, as far as they are known, for a run of a results file.
        rows: The rows of ``metrics.csv``, whole lines only.
        notes: What is wrong with its files, one sentence each.
        is_killed: Whether ``run.json`` says that it is running and nothing works on it.
    """

    path: str
    record: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    is_killed: bool = False

    @property
    def anchor(self) -> str:
        """Name of its place in the page: plain letters and digits whatever the folder is called."""
        return "run-" + hashlib.sha256(self.path.encode(errors="surrogatepass")).hexdigest()[:12]

    @property
    def state(self) -> str:
        """The state in ``run.json``, or ``"killed"``."""
        return "killed" if self.is_killed else str(self.record.get("state"))

    @property
    def reason(self) -> str | None:
        """Why the run did not end well, or ``None`` if it did."""
        if self.state == "done":
            return None
        if self.state in _UNFINISHED:
            return _UNFINISHED[self.state]
        error = self.record.get("error")
        message = error.get("message") if isinstance(error, Mapping) else error
        if self.state == "diverged" and not message:
            return f"non-finite loss or step after epoch {self.last_epoch}"
        return str(message) if message else "no reason was recorded"

    @property
    def last_epoch(self) -> int:
        """The last epoch in ``metrics.csv``; 0 if there is none."""
        return int(self.rows[-1]["epoch"] or 0) if self.rows else 0

    def get(self, *keys: str) -> Any:
        """Return a nested entry of the record, or ``None`` where there is none.

        Args:
            *keys: Names from the outermost to the innermost.
        """
        value: Any = self.record
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def last(self, column: str) -> float | None:
        """Return the value of a column of ``metrics.csv`` in the last epoch that has one.

        Args:
            column: A name out of ``METRIC_COLUMNS``.
        """
        return next((value for row in reversed(self.rows) if (value := row[column]) is not None), None)

    def total(self, column: str) -> int | None:
        """Return the sum of a count over the epochs, or ``None`` if no epoch has it.

        Args:
            column: A count out of ``METRIC_COLUMNS``.
        """
        counts = [int(value) for row in self.rows if (value := row[column]) is not None]
        return sum(counts) if counts else None


def load_entries(root: Path) -> tuple[list[Entry], dict[str, str]]:
    """Read all runs under a folder; a damaged one stops nothing.

    Args:
        root: Folder to search, to any depth.

    Returns:
        The runs ordered by path, and for each folder whose ``run.json`` cannot be read its path and the reason.
    """
    top = Path(root).absolute()
    entries: list[Entry] = []
    unreadable: dict[str, str] = {}
    for folder in find_runs(top):
        path = folder.path.relative_to(top).as_posix()
        try:
            record = folder.read_run()
        except InputError as error:
            unreadable[path] = relative(str(error), top)
            continue
        rows, notes = _rows(folder)
        is_killed = record["state"] == "running" and _is_killed(folder)
        entries.append(Entry(path, record, rows, tuple(relative(note, top) for note in notes), is_killed))
    return entries, unreadable


def relative(text: str, root: Path) -> str:
    """Return a message with paths under ``root`` made relative to it: the page may be passed on.

    Args:
        text: A message that may name files.
        root: The searched folder, absolute.
    """
    return text.replace(f"{root}/", "")


def _is_killed(folder: RunFolder) -> bool:
    try:
        status = run_status(folder, active=False, folder=folder.path, label="", overrides=())
    except InputError:
        # Its metrics.csv is damaged, which a note says: what became of the process cannot be told.
        return False
    return status.state == "killed"


def _rows(folder: RunFolder) -> tuple[list[Row], list[str]]:
    if not folder.metrics_csv.is_file():
        return [], ["metrics.csv is missing"]
    notes: list[str] = []
    try:
        return folder.read_metrics(report=notes.append), notes
    except InputError as error:
        return [], [str(error)]
