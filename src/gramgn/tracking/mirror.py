"""The mirror of one run while it trains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from gramgn.progress import say
from gramgn.records import Row, RunFolder, write_atomic
from gramgn.tracking.client import close_run, one_line, online_problem, open_run
from gramgn.tracking.config import TrackingConfig

# What is worth seeing against the clock; by_epoch/* has every column.
_BY_TIME = (
    "train_s",
    "train_loss",
    "train_eval_loss",
    "val_loss",
    "test_loss",
    "train_mae",
    "val_mae",
    "test_mae",
)


class WandbMirror:
    """The W&B run of one job, under the id of run.json. Open it with `start`; close it with `finish`, or use `with`.

    Attributes:
        mode: The mode it is in: `"online"`, `"offline"` or `"none"`.
    """

    def __init__(
        self, folder: RunFolder, run: Any, mode: str, *, unit: str = "", finish_timeout_s: float = 60.0
    ) -> None:
        self.mode = mode
        self._folder = folder
        self._run = run
        self._unit = unit
        self._finish_s = finish_timeout_s
        self._marker = folder.path / "wandb" / "mirrored.json"

    @classmethod
    def start(cls, folder: RunFolder, record: Mapping[str, Any], config: TrackingConfig) -> WandbMirror:
        """Open the W&B run of this job, the same one again when the run is resumed.

        Online falls back to offline, and offline to no mirror, each with one line that says why: there is no API key
        (W&B never asks for one), or the server does not answer in time.

        Args:
            folder: The run folder.
            record: The content of run.json.
            config: Mode, project and time limits.
        """
        if config.mode == "none":
            return cls(folder, None, "none")
        record = {**record, "name": record.get("name") or folder.path.name}
        problem = online_problem(config.init_timeout_s) if config.mode == "online" else None
        modes = ("online", "offline") if config.mode == "online" and not problem else ("offline",)
        for mode in modes:
            try:
                run = open_run(
                    folder.path, record, replace(config, mode=mode), job_type=job_type(record), resume=True
                )
            except Exception as error:
                problem = one_line(error)
                continue
            if problem:
                say(f"W&B: working offline, because {problem}. {upload_later(folder.path)}")
            return cls(folder, run, mode, unit=unit_of(record), finish_timeout_s=config.finish_timeout_s)
        say(f"W&B: no mirror of this run ({problem}); its records in {folder.path} are complete without it.")
        return cls(folder, None, "none")

    def __enter__(self) -> WandbMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=1 if kind else 0, error=f"{kind.__name__}: {error}" if kind else None)

    def log_rows(self, rows: Iterable[Row]) -> None:
        """Send rows of metrics.csv, one W&B history row each; epochs that an earlier start sent are left out.

        A failure is reported in one line and ends the mirror, not the run.

        Args:
            rows: Rows whose checkpoint is on disk, in the order of metrics.csv.
        """
        if self._run is None:
            return
        try:
            last = self._last_epoch()
            for row in rows:
                epoch = int(row["epoch"] or 0)
                if last is None or epoch > last:
                    # Marked before it is sent: a kill in between loses a point on the dashboard, which
                    # scripts/upload_runs.py can repair, instead of showing an epoch twice.
                    write_atomic(self._marker, json.dumps({"epoch": epoch}) + "\n")
                    self._run.log(history_row(row, self._unit))
                    last = epoch
        except Exception as error:
            run, self._run = self._run, None
            say(f"W&B: logging failed ({one_line(error)}); the run continues without it. {self._later}")
            with suppress(Exception):  # reported above; closing is only a courtesy to the service
                close_run(run, 1, self._finish_s)

    def finish(
        self, exit_code: int = 0, error: str | None = None, best: Mapping[str, Any] | None = None
    ) -> None:
        """Close the W&B run when results and state are on disk; a failure is reported in one line.

        Args:
            exit_code: That of the job; W&B shows anything but 0 as failed.
            error: Why the job failed, for the summary.
            best: The entry `best` of run.json; goes to the summary as `best_<name>`.
        """
        run, self._run = self._run, None
        if run is None:
            return
        try:
            conclude(run, exit_code, error, best, self._finish_s)
        except Exception as problem:
            say(f"W&B: closing the run failed ({one_line(problem)}). {self._later}")

    @property
    def _later(self) -> str:
        return upload_later(self._folder.path)

    def _last_epoch(self) -> int | None:
        if not self._marker.is_file():
            return None
        return int(json.loads(self._marker.read_text(encoding="utf-8"))["epoch"])


def conclude(
    run: Any, exit_code: int, error: str | None, best: Mapping[str, Any] | None, limit_s: float
) -> None:
    """Write the summary of a run and close it.

    Raises:
        Exception: Whatever W&B raised, or TimeoutError.
    """
    values = {f"best_{name}": value for name, value in (best or {}).items()}
    run.summary.update(values | ({"error": error} if error else {}))
    close_run(run, exit_code, limit_s)


def history_row(row: Row, unit: str) -> dict[str, int | float]:
    """Return a row of metrics.csv as W&B shows it: by epoch, and losses and errors by training seconds as well.

    Args:
        row: The row; missing values are left out.
        unit: Unit of the errors, e.g. `"months"`; becomes part of their names.
    """
    values: dict[str, int | float] = {}
    for name, value in row.items():
        if value is not None:
            key = f"{name}_{unit}" if name.endswith("_mae") and unit else name
            values[f"by_epoch/{key}"] = value
            if name in _BY_TIME and row.get("train_s") is not None:
                values[f"by_time/{key}"] = value
    return values


def unit_of(record: Mapping[str, Any]) -> str:
    """Return the unit of a run's targets, an empty text if it has none."""
    return str((record.get("dataset") or {}).get("unit") or "")


def job_type(record: Mapping[str, Any]) -> str | None:
    """Return the kind of a run's job: its optimizer's name."""
    return (record.get("optimizer") or {}).get("name")


def upload_later(folder: object) -> str:
    """Return how to upload a run or sweep later."""
    return f"All records are on disk; to upload them: python scripts/upload_runs.py {folder}"
