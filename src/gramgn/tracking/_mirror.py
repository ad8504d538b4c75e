"""The W&B mirror: shows a run's records on a dashboard.

The run folder is the truth and complete without this; nothing reads W&B back. So no failure in here stops a
training: it is said in one line, and the run goes on with its local records.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from gramgn.errors import ConfigError, nearest
from gramgn.progress import say

from ._wandb import bounded, one_line, open_run
from .records import Row, RunFolder, write_atomic

MODES = ("offline", "online", "none")
# W&B keeps the limit of finish itself; this much later we stop waiting, should it hang before it gets there.
_GRACE_S = 5.0
# What is worth seeing against the clock; by_epoch/* has every column.
_BY_TIME = ("train_loss", "train_eval_loss", "val_loss", "test_loss", "train_mae", "val_mae", "test_mae")


class WandbMirror:
    """One W&B run of one job. Make it with :meth:`start`; close it with :meth:`finish` or a ``with`` block.

    Attributes:
        mode: What it really does: ``"online"``, ``"offline"`` or ``"none"``.
        run_id: The W&B run id, kept in ``run.json`` for a resumed start to continue; ``None`` for ``"none"``.
    """

    def __init__(
        self,
        folder: RunFolder,
        run: Any,
        mode: str,
        run_id: str | None = None,
        *,
        unit: str = "",
        finish_timeout_s: float = 30.0,
        files: Path | None = None,
    ) -> None:
        self.mode = mode
        self.run_id = run_id
        self._folder = folder
        self._run = run
        self._unit = unit
        self._finish_s = finish_timeout_s
        self._marker = (files or folder.path) / "wandb" / "mirrored.json"

    @classmethod
    def start(
        cls,
        folder: RunFolder,
        run: Mapping[str, Any],
        *,
        mode: str = "offline",
        project: str = "gramgn",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        run_id: str | None = None,
        resume: bool = True,
        files: Path | None = None,
        init_timeout_s: float = 15.0,
        finish_timeout_s: float = 30.0,
    ) -> WandbMirror:
        """Open the W&B run of this job.

        ``"online"`` falls back to ``"offline"``, with one line saying why, if there is no API key (it never
        asks for one) or the server does not answer in time.

        Args:
            folder: The run folder.
            run: The content of ``run.json``: ``name``, ``config``, ``dataset``, ``optimizer``, ``model`` and
                ``git`` are used.
            mode: One of :data:`MODES`.
            project: W&B project.
            entity: W&B team or user; ``None`` is the account's default.
            group: The sweep this job belongs to.
            job_type: The kind of job, e.g. ``"train"``.
            run_id: The id to continue, from ``run.json`` of the run that is resumed; ``None`` for a new one.
            resume: With a ``run_id``: append to what the server has of it, or (``False``) replace that.
            files: Where W&B's own folder ``wandb`` goes; ``None`` is the run folder.
            init_timeout_s: Longest wait for each of the two steps of going online, in seconds.
            finish_timeout_s: Longest wait for uploads at the end, in seconds.

        Raises:
            ConfigError: The mode is not one of :data:`MODES`.
        """
        if mode not in MODES:
            raise ConfigError(
                f"tracking mode '{mode}' is not one of {', '.join(MODES)}{nearest(mode, MODES)}"
            )
        if mode == "none":
            return cls(folder, None, "none")
        options = {
            "project": project,
            "entity": entity,
            "run_group": group,
            "run_job_type": job_type,
            "run_name": run.get("name") or folder.path.name,
            "init_timeout": init_timeout_s,
            "finish_timeout": finish_timeout_s,
        }
        wanted, resumed = run_id or secrets.token_hex(4), resume and run_id is not None
        root = files or folder.path
        handle, mode = open_run(folder.path, root, run, mode, wanted, options, resumed=resumed)
        if handle is None:
            return cls(folder, None, "none")
        unit = str((run.get("dataset") or {}).get("unit") or "")
        return cls(folder, handle, mode, wanted, unit=unit, finish_timeout_s=finish_timeout_s, files=files)

    def __enter__(self) -> WandbMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = f"{kind.__name__}: {error}" if kind else None
        message = self.finish(exit_code=1 if kind else 0, error=text)
        if message:
            say(message)

    @property
    def record(self) -> dict[str, str] | None:
        """The entry ``wandb`` of ``run.json``: id and mode, or ``None``."""
        return {"id": self.run_id, "mode": self.mode} if self.run_id else None

    def log_rows(self, rows: Iterable[Row]) -> int:
        """Send rows of ``metrics.csv``, one W&B history row each; rows sent by an earlier start are left out.

        Call it with rows whose checkpoint is on disk: then a resumed run never sends an epoch twice.

        Args:
            rows: In the order of ``metrics.csv``.

        Returns:
            How many were sent.
        """
        sent = 0
        if self._run is None:
            return sent
        try:
            last = self._last_epoch()
            for row in rows:
                epoch = int(row["epoch"] or 0)
                if last is None or epoch > last:
                    # Marked before it is sent: a kill in between loses a point on the dashboard, which
                    # scripts/upload_run.py can mend, instead of showing an epoch twice.
                    self._mark(epoch)
                    self._run.log(self._values(row))
                    last, sent = epoch, sent + 1
        except Exception as error:
            self._give_up("logging", error)
        return sent

    def finish(
        self, exit_code: int = 0, error: str | None = None, best: Mapping[str, Any] | None = None
    ) -> str | None:
        """Close the W&B run. Call it when results and state are on disk; a second call does nothing.

        Args:
            exit_code: That of the job; W&B shows anything but 0 as failed.
            error: Why the job failed, for the summary.
            best: The entry ``best`` of ``run.json``; goes to the summary as ``best_<name>``.

        Returns:
            ``None``, or one line that says what did not work and how to upload the run later.
        """
        run, self._run = self._run, None
        if run is None:
            return None
        try:
            values = {f"best_{name}": value for name, value in (best or {}).items()}
            values |= {"error": error} if error else {}
            if values:
                run.summary.update(values)
            bounded(lambda: run.finish(exit_code=exit_code), self._finish_s + _GRACE_S)
        except Exception as problem:
            return f"W&B: closing the run failed ({one_line(problem)}). {self._upload_later()}"
        return None

    def _values(self, row: Row) -> dict[str, int | float]:
        timed = row.get("train_s") is not None
        values: dict[str, int | float] = {}
        for name, value in row.items():
            if value is not None:
                key = f"{name}_{self._unit}" if name.endswith("_mae") and self._unit else name
                values[f"by_epoch/{key}"] = value
                if timed and (name in _BY_TIME or name == "train_s"):
                    values[f"by_time/{key}"] = value
        return values

    def _last_epoch(self) -> int | None:
        if not self._marker.is_file():
            return None
        marked = json.loads(self._marker.read_text(encoding="utf-8"))
        return int(marked["epoch"]) if marked["run_id"] == self.run_id else None

    def _mark(self, epoch: int) -> None:
        write_atomic(self._marker, json.dumps({"run_id": self.run_id, "epoch": epoch}) + "\n")

    def _give_up(self, doing: str, error: Exception) -> None:
        run, self._run = self._run, None
        say(f"W&B: {doing} failed ({one_line(error)}); the run goes on without it. {self._upload_later()}")
        with suppress(Exception):  # said above; closing is only a courtesy to the service
            bounded(lambda: run.finish(exit_code=1), self._finish_s)

    def _upload_later(self) -> str:
        return f"All records are on disk; to upload them: python scripts/upload_run.py {self._folder.path}"
