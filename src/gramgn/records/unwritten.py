"""The run folder of a process that must not write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gramgn.records.metrics import Row
from gramgn.records.run_folder import RunFolder


class UnwrittenFolder(RunFolder):
    """The folder of a run that another process writes: its record is kept in memory, everything else is dropped."""

    _run: Mapping[str, Any] = {}

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Keep the record."""
        self._run = dict(run)

    def read_run(self, *needed: str) -> dict[str, Any]:
        """Return the record that was kept."""
        return dict(self._run)

    def append_metrics(self, row: Mapping[str, int | float | None]) -> None:
        """Drop a row."""

    def truncate_metrics(self, epoch: int) -> None:
        """Do nothing."""

    def read_metrics(self) -> list[Row]:
        """Return no rows."""
        return []

    def append_log(self, line: str) -> None:
        """Drop a line."""

    def reserve(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Reserve nothing."""
        yield
