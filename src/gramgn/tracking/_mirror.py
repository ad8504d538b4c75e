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
from gramgn.records import Row, RunFolder, write_atomic

from ._sent import Target, mark_sent, run_digest
from ._wandb import FINISH_GRACE_S, bounded, one_line, open_anew, open_run

MODES = ("offline", "online", "none")
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
        keeps_marks: bool = True,
        target: Target | None = None,
    ) -> None:
        self.mode = mode
        self.run_id = run_id
        self._folder = folder
        self._run = run
        self._unit = unit
        self._finish_s = finish_timeout_s
        self._target = target
        self._sent = 0
        # An upload sends all rows in one go and is repeated as a whole: it need not know what it sent before.
        self._marker = folder.path / "wandb" / "mirrored.json" if keeps_marks else None

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
            job_type: The kind of job; here the optimizer's name, e.g. ``"ggn"``.
            run_id: The id to continue, from ``run.json`` of the run that is resumed; ``None`` for a new one.
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
        target = Target(mode, project, entity, group)
        options = _options(folder, run, target, job_type, init_timeout_s, finish_timeout_s)
        wanted = run_id or secrets.token_hex(4)
        handle, mode = open_run(
            folder.path, folder.path, run, mode, wanted, options, resumed=run_id is not None
        )
        if handle is None:
            return cls(folder, None, "none")
        return cls(
            folder,
            handle,
            mode,
            wanted,
            unit=_unit(run),
            finish_timeout_s=finish_timeout_s,
            target=target,
        )

    @classmethod
    def replace(
        cls,
        folder: RunFolder,
        run: Mapping[str, Any],
        target: Target,
        run_id: str,
        *,
        files: Path,
        init_timeout_s: float,
        finish_timeout_s: float,
    ) -> WandbMirror:
        """Open a W&B run that takes the place of whatever there is under its id.

        Args:
            folder: The run folder.
            run: The content of ``run.json``.
            target: Where it is sent.
            run_id: The id.
            files: Where W&B's own folder ``wandb`` goes.
            init_timeout_s: Longest wait for W&B, in seconds.
            finish_timeout_s: Longest wait for uploads at the end, in seconds.

        Raises:
            Exception: Whatever W&B raised: there is no falling back to another mode.
        """
        job_type = (run.get("optimizer") or {}).get("name")
        options = _options(folder, run, target, job_type, init_timeout_s, finish_timeout_s)
        handle = open_anew(files, run, target.mode, run_id, options)
        return cls(
            folder,
            handle,
            target.mode,
            run_id,
            unit=_unit(run),
            finish_timeout_s=finish_timeout_s,
            keeps_marks=False,
        )

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

        Raises:
            Exception: Of a mirror made by :meth:`replace`, whatever W&B raised; of others nothing, it is said.
        """
        before = self._sent
        if self._run is None:
            return 0
        try:
            last = self._last_epoch()
            for row in rows:
                epoch = int(row["epoch"] or 0)
                if last is None or epoch > last:
                    # Marked before it is sent: a kill in between loses a point on the dashboard, which
                    # scripts/upload_runs.py can mend, instead of showing an epoch twice.
                    self._mark(epoch)
                    self._run.log(self._values(row))
                    last, self._sent = epoch, self._sent + 1
        except Exception as error:
            if self._marker is None:
                raise
            self._give_up("logging", error)
        return self._sent - before

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
            bounded(lambda: run.finish(exit_code=exit_code), self._finish_s + FINISH_GRACE_S)
            self._mark_complete()
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
        if self._marker is None or not self._marker.is_file():
            return None
        marked = json.loads(self._marker.read_text(encoding="utf-8"))
        return int(marked["epoch"]) if marked["run_id"] == self.run_id else None

    def _mark(self, epoch: int) -> None:
        if self._marker is not None:
            write_atomic(self._marker, json.dumps({"run_id": self.run_id, "epoch": epoch}) + "\n")

    def _mark_complete(self) -> None:
        """Note that the server has the whole run, so that an upload later need not send it again.

        Only what this one start sent is known to have arrived: of a run that was resumed, nothing is noted.
        """
        if self.mode != "online" or self._target is None:
            return
        rows = self._folder.read_metrics()
        if self._sent == len(rows):
            digest = run_digest(self._target, self._folder.read_run(), rows)
            mark_sent(self._folder.path, self.mode, digest)

    def _give_up(self, doing: str, error: Exception) -> None:
        run, self._run = self._run, None
        say(f"W&B: {doing} failed ({one_line(error)}); the run goes on without it. {self._upload_later()}")
        with suppress(Exception):  # said above; closing is only a courtesy to the service
            bounded(lambda: run.finish(exit_code=1), self._finish_s)

    def _upload_later(self) -> str:
        return f"All records are on disk; to upload them: python scripts/upload_runs.py {self._folder.path}"


def _options(
    folder: RunFolder,
    run: Mapping[str, Any],
    target: Target,
    job_type: str | None,
    init_timeout_s: float,
    finish_timeout_s: float,
) -> dict[str, Any]:
    return {
        "project": target.project,
        "entity": target.entity,
        "run_group": target.group,
        "run_job_type": job_type,
        "run_name": run.get("name") or folder.path.name,
        "init_timeout": init_timeout_s,
        "finish_timeout": finish_timeout_s,
    }


def _unit(run: Mapping[str, Any]) -> str:
    return str((run.get("dataset") or {}).get("unit") or "")
