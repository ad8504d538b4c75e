"""Sending a run from run.json and metrics.csv, whatever became of its W&B files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gramgn.errors import InputError
from gramgn.locks import is_locked
from gramgn.records import SWEEP_FILE, RunFolder, find_runs
from gramgn.tracking.client import close_run, open_run
from gramgn.tracking.config import TrackingConfig
from gramgn.tracking.mirror import history_row, summary_of

# A run that still says "running" was killed (or is running: then it has its own mirror).
EXIT_CODES = {"done": 0, "diverged": 3, "failed": 1, "interrupted": 130, "running": 1}


class NothingToUploadError(InputError):
    """There is nothing to upload, or not yet."""


def upload_run(folder: RunFolder, config: TrackingConfig) -> str:
    """Send the configuration and every row of a run to W&B, under the run's own id, and return what was sent.

    It replaces what the server has under that id, so that the run is there once and whole, however often it was
    killed, resumed or uploaded before. Offline, W&B's files go to `<folder>/upload`.

    Raises:
        NothingToUploadError: The run is still running, or has no epochs.
        InputError: Files of the run are damaged or cannot be written.
        Exception: Any error of W&B.
    """
    record, rows = folder.read_run("id"), folder.read_metrics()
    if record["state"] == "running" and is_locked(folder.path / ".lock"):
        raise NothingToUploadError("it is still running")
    if not rows and record["state"] != "diverged":
        raise NothingToUploadError(f"it is {record['state']}, and metrics.csv has no rows")
    record["name"] = record.get("name") or folder.path.name
    summary = summary_of(record.get("best"), (record.get("error") or {}).get("message"))
    with folder.lock(), upload_files(folder.path, config.mode) as files:
        run = open_run(files, record, config, resume=False)
        exit_code = 1
        try:
            for row in rows:
                run.log(history_row(row, record))
            exit_code = EXIT_CODES[record["state"]]
        finally:
            close_run(run, exit_code, config.finish_timeout_s, summary)
    return f"{len(rows)} rows ({config.mode})"


def upload_config(
    folder: Path, *, mode: str, project: str | None = None, entity: str | None = None, timeout_s: float = 60.0
) -> TrackingConfig:
    """Return where a run or sweep is uploaded: to the project that it was configured with, unless another is given.

    Raises:
        InputError: run.json is damaged, or an argument is not valid.
    """
    own = (find_runs(folder)[0].read_run().get("config") or {}).get("tracking") or {}
    return TrackingConfig(
        mode=mode,
        project=project or own.get("project") or TrackingConfig.project,
        entity=entity or own.get("entity"),
        init_timeout_s=timeout_s,
        finish_timeout_s=timeout_s,
    )


def find_uploads(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of all runs below some folders, and of their sweeps, each of which follows its runs.

    A single run brings no sweep.

    Raises:
        InputError: A folder does not exist or holds no run.
    """
    found: dict[Path, None] = {}
    for path in paths:
        runs = [run.path for run in find_runs(path)]
        if not runs:
            raise InputError(
                f"there is no run in {path}; runs lie in outputs/runs, the runs of sweeps in outputs/sweeps"
            )
        sweeps = dict.fromkeys(run.parent for run in runs if run != path.absolute())
        found |= dict.fromkeys(runs)
        found |= {sweep: None for sweep in sweeps if (sweep / SWEEP_FILE).is_file()}
    return list(found)


@contextmanager
def upload_files(folder: Path, mode: str) -> Iterator[Path]:
    """Yield the folder for W&B's files: an empty `<folder>/upload` that stays, or online a temporary one.

    Raises:
        InputError: The folder cannot be written.
    """
    if mode == "online":
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            yield Path(scratch)
        return
    files = folder / "upload"
    try:
        # Only the newest: `wandb sync` would take two files of one id for two runs.
        if files.exists():
            shutil.rmtree(files)
        files.mkdir()
    except OSError as error:
        raise InputError(f"cannot write {files}: {error.strerror or error}") from error
    yield files
