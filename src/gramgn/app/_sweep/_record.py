"""What ``sweep.json`` says: written by the process that runs the sweep, and by nobody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gramgn.app._repository import repository
from gramgn.app._sweep._tasks import Planned
from gramgn.records import SweepFolder, portable


class SweepRecord:
    """The content of a sweep's ``sweep.json``, kept whole over commands: jobs of former ones stay listed.

    Args:
        folder: The sweep's folder; what it says already is read.
    """

    def __init__(self, folder: SweepFolder) -> None:
        self._folder = folder
        self._content: dict[str, Any] = folder.read() if folder.sweep_json.is_file() else {}
        cells = self._content.get("cells") or []
        self._cells: dict[str, dict[str, Any]] = {cell["folder"]: cell for cell in cells}

    @property
    def states(self) -> list[str]:
        """The states of all jobs that it knows."""
        return [str(cell.get("state")) for cell in self._cells.values()]

    def begin(
        self,
        plans: Sequence[Planned],
        order: Sequence[str],
        axes: Mapping[str, Sequence[str]],
        start: Mapping[str, Any] | None,
        **more: Any,
    ) -> None:
        """Write down a command before its first job.

        Args:
            plans: The jobs of this launch.
            order: The folder names of all jobs of the command, in its order; jobs of former commands stand after them.
            axes: What varies over all jobs of the command, with its values.
            start: An entry for ``starts``; None if this process has one already.
            **more: Further entries, e.g. ``n_jobs``.
        """
        cells = self._cells | {plan.cell.key: self._entry(plan) for plan in plans}
        self._cells = {key: cells[key] for key in dict.fromkeys([*order, *cells]) if key in cells}
        if start is not None:
            self._content["starts"] = [*(self._content.get("starts") or []), start]
        self._content |= {"name": self._folder.path.name, **more, "axes": axes}
        self._write()

    def change(self, key: str, **entries: Any) -> None:
        """Change what is said of one job, and write it."""
        self._cells[key] |= entries
        self._write()

    def _entry(self, plan: Planned) -> dict[str, Any]:
        known = self._cells.get(plan.cell.key, {})
        state = (plan.record or {}).get("state") if plan.action in ("keep", "refuse") else known.get("state")
        return {
            "folder": plan.cell.key,
            "overrides": portable(list(plan.cell.overrides), repository()),
            "config_hash": known.get("config_hash") if plan.action == "refuse" else plan.config_hash,
            "state": state or "waiting",
            "error": portable(plan.reason, repository()) if plan.action == "refuse" else known.get("error"),
            "exit_code": known.get("exit_code"),
            "started": known.get("started"),
            "ended": known.get("ended"),
        }

    def _write(self) -> None:
        self._folder.write({**self._content, "cells": list(self._cells.values())})


def now_utc() -> str:
    """Return the time as it stands in records."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
