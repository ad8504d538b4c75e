"""The mirror of one run while it trains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gramgn.progress import say
from gramgn.records import Row, RunFolder, write_atomic
from gramgn.tracking.client import close_run, one_line, open_run, unreachable
from gramgn.tracking.config import TrackingConfig

# What is worth seeing against the clock; by_epoch/* has every column.
_LOSSES = ("train_loss", "train_eval_loss", "val_loss", "test_loss")
_BY_TIME = ("train_s", *_LOSSES, "train_mae", "val_mae", "test_mae")


class WandbMirror:
    """The W&B run of one job. Open it with `start`; close it with `finish`.

    Attributes:
        mode: `"online"`, `"offline"` or `"none"`.
        run_id: The id that W&B has given the run; empty without one.
    """

    def __init__(
        self, folder: RunFolder, record: Mapping[str, Any], run: Any, config: TrackingConfig
    ) -> None:
        self.mode = "none" if run is None else config.mode
        self.run_id = "" if run is None else str(run.id)
        self._folder, self._record, self._run, self._config = folder, record, run, config
        self._marker = folder.path / "wandb" / "mirrored.json"

    @classmethod
    def start(cls, folder: RunFolder, record: Mapping[str, Any], config: TrackingConfig) -> WandbMirror:
        """Open the W&B run of this job, the same one again when the run is resumed.

        Online falls back to offline, and offline to no mirror, each with one line that says why: there is no API key
        (W&B never asks for one), or the server does not answer in time.
        """
        if config.mode == "none":
            return cls(folder, record, None, config)
        record = {**record, "name": record.get("name") or folder.path.name}
        problem = unreachable(config)
        for mode in ("online", "offline"):
            if mode == "online" and (config.mode == "offline" or problem):
                continue
            given = replace(config, mode=mode)
            try:
                run = open_run(folder.path, record, given, resume=True)
            except Exception as error:
                problem = one_line(error)
                continue
            if problem:
                say(f"W&B: working offline, because {problem}. {upload_later(folder.path)}")
            return cls(folder, record, run, given)
        say(f"W&B: no mirror of this run ({problem}); its records in {folder.path} are complete without it.")
        return cls(folder, record, None, config)

    def log_rows(self, rows: Iterable[Row]) -> None:
        """Send rows of metrics.csv whose checkpoint is on disk, except epochs that an earlier start sent.

        A failure is reported in one line and ends the mirror, not the run.
        """
        if self._run is None:
            return
        try:
            last = self._last_epoch()
            for row in rows:
                epoch = int(row["epoch"] or 0)
                if epoch > last:
                    # Marked before it is sent: a kill in between loses a point on the dashboard, which
                    # scripts/upload_runs.py can repair, instead of showing an epoch twice.
                    write_atomic(self._marker, json.dumps({"epoch": epoch}) + "\n")
                    self._run.log(history_row(row, self._record))
                    last = epoch
        except Exception as error:
            run, self._run = self._run, None
            later = upload_later(self._folder.path)
            say(f"W&B: logging failed ({one_line(error)}); the run continues without it. {later}")
            with suppress(Exception):  # reported above; closing is only a courtesy to the service
                close_run(run, 1, self._config.finish_timeout_s)

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
            close_run(run, exit_code, self._config.finish_timeout_s, summary_of(best, error))
        except Exception as problem:
            say(f"W&B: closing the run failed ({one_line(problem)}). {upload_later(self._folder.path)}")

    def _last_epoch(self) -> int:
        if not self._marker.is_file():
            return -1
        return int(json.loads(self._marker.read_text(encoding="utf-8"))["epoch"])


def summary_of(best: Mapping[str, Any] | None, error: str | None) -> dict[str, Any]:
    """Return the summary of a run: its best epoch, and why it ended early."""
    return {f"best_{name}": value for name, value in (best or {}).items()} | {"error": error}


def history_row(row: Row, record: Mapping[str, Any]) -> dict[str, int | float]:
    """Return a row of metrics.csv as W&B shows it: by epoch, and losses and errors by training seconds as well.

    Missing values are left out. The unit of the targets, in `record`, becomes part of the names of errors.
    """
    unit = (record.get("dataset") or {}).get("unit")
    values: dict[str, int | float] = {}
    for name, value in row.items():
        if value is not None:
            key = f"{name}_{unit}" if name.endswith("_mae") and unit else name
            values[f"by_epoch/{key}"] = value
            if name in _BY_TIME and row.get("train_s") is not None:
                values[f"by_time/{key}"] = value
    return values


def upload_later(folder: object) -> str:
    """Return how to upload a run or sweep later."""
    return f"All records are on disk; to upload them: python scripts/upload_runs.py {folder}"
