"""Uploading a run from our own files, whatever became of its W&B files."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramgn.errors import InputError
from gramgn.locks import is_locked
from gramgn.records import Row, RunFolder

from ._mirror import WandbMirror
from ._sent import Target, mark_sent, run_digest, run_target, was_sent
from ._wandb import one_line, online_problem

# A run that still says "running" was killed (or is running: then it has a mirror of its own).
EXIT_CODES = {"done": 0, "diverged": 3, "failed": 1, "interrupted": 130, "running": 1}


@dataclass(frozen=True)
class UploadOptions:
    """How to upload.

    Attributes:
        mode: ``"online"``, or ``"offline"`` to write W&B's files into ``<folder>/upload``.
        project: W&B project; None is the one in the run's own configuration.
        entity: W&B team or user; None is the one in the run's own configuration, else the account's default.
        group: The sweep; None is the one that the run belongs to.
        timeout_s: Longest wait for W&B at each step, in seconds.
        again: Also send what was sent before and has not changed.
    """

    mode: str = "online"
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    timeout_s: float = 60.0
    again: bool = False


@dataclass(frozen=True)
class Upload:
    """What became of one run, or of a sweep's summary.

    Attributes:
        path: The folder of the run or sweep.
        state: ``"uploaded"``, ``"unchanged"`` (sent before), ``"left out"`` (nothing to send, or still
            running), or ``"failed"``.
        detail: What was sent, or why not: one line.
        reached: Whether W&B took part; a failure without it lies in the run's own files.
    """

    path: Path
    state: str
    detail: str
    reached: bool = True


def upload_run(folder: RunFolder, options: UploadOptions | None = None) -> Upload:
    """Send the configuration and every row of a run to W&B, under the run's own id.

    What the server has under that id is replaced, so that the run is there once and whole, however often it
    was killed, resumed or uploaded before. A run that was sent before and has not changed is left alone.

    Args:
        folder: The run.
        options: Default: online, with the project and group that the run has.

    Raises:
        InputError: Files of the run are damaged or cannot be written.
    """
    options = options or UploadOptions()
    run, rows = folder.read_run(), folder.read_metrics()
    if run["state"] == "running" and is_locked(folder.path / ".lock"):
        return Upload(folder.path, "left out", "it is still running", reached=False)
    if not rows and run["state"] != "diverged":
        detail = f"{run['state']}, and metrics.csv has no rows: there is nothing to upload"
        return Upload(folder.path, "left out", detail, reached=False)
    target = run_target(run, options.mode, options.project, options.entity, options.group)
    digest = run_digest(target, run, rows)
    if not options.again and was_sent(folder.path, options.mode, digest) and has_files(folder.path, options):
        return Upload(folder.path, "unchanged", "uploaded before", reached=False)
    with folder.lock(), upload_files(folder.path, options.mode) as files:
        problem, run_id = _send(folder, run, rows, target, files, options.timeout_s)
        if problem:
            return Upload(folder.path, "failed", problem)
        if not run.get("wandb"):
            # A resumed start continues it, and the next upload replaces it instead of standing beside it.
            folder.update_run(wandb={"id": run_id, "mode": options.mode})
        mark_sent(folder.path, options.mode, digest)
    return Upload(folder.path, "uploaded", f"{len(rows)} rows sent ({options.mode})")


def _send(
    folder: RunFolder, run: Mapping[str, Any], rows: list[Row], target: Target, files: Path, timeout_s: float
) -> tuple[str | None, str]:
    """Return what did not work, or None, and the W&B id."""
    # A run without a mirror gets its id from its own: an upload that was cut off is replaced by the next.
    run_id = str((run.get("wandb") or {}).get("id") or run.get("id") or secrets.token_hex(4))
    try:
        mirror = WandbMirror.replace(
            folder, run, target, run_id, files=files, init_timeout_s=timeout_s, finish_timeout_s=timeout_s
        )
    except Exception as error:
        return f"nothing was uploaded: W&B could not be used {target.mode} ({one_line(error)})", run_id
    try:
        mirror.log_rows(rows)
    except Exception as error:
        mirror.finish(1)
        return f"logging failed ({one_line(error)})", run_id
    reason = (run.get("error") or {}).get("message")
    return mirror.finish(EXIT_CODES[run["state"]], reason, run.get("best")), run_id


@contextmanager
def upload_files(folder: Path, mode: str) -> Iterator[Path]:
    """Yield the folder for W&B's files: an empty ``<folder>/upload`` that stays, or one that goes again.

    Args:
        folder: The run's or sweep's folder.
        mode: ``"offline"`` or ``"online"``.

    Raises:
        InputError: The folder cannot be written.
    """
    if mode == "online":
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            yield Path(scratch)
        return
    files = folder / "upload"
    try:
        # Only the newest: two files of one id would be a run and its double to `wandb sync`.
        if files.exists():
            shutil.rmtree(files)
        files.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {files}: {error.strerror or error}") from error
    yield files


def has_files(folder: Path, options: UploadOptions) -> bool:
    """Tell whether what an earlier upload wrote is still there; online there is nothing to look for."""
    return options.mode == "online" or any((folder / "upload").glob("wandb/*/*.wandb"))


def unreachable(options: UploadOptions) -> str | None:
    """Return why W&B cannot be used as asked, or None.

    Args:
        options: Mode and time limit count.
    """
    return online_problem(options.timeout_s) if options.mode == "online" else None
